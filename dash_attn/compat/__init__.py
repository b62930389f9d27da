"""The modules of flash_attn and of FlashAttention-3, for code that calls more of them than `dash_attn` has.

    flash_attn_2    flash_attn.flash_attn_interface: the public functions, and the private ones that ring attention,
                    TransformerEngine, DeepSpeed and others call
    flash_attn_3    flash_attn_interface of FlashAttention-3
    bert_padding    flash_attn.bert_padding

Import them by these names, or have them under FlashAttention's names: see docs/api/compat.md.
"""

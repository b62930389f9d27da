"""The modules of flash_attn and of FlashAttention-3, for code that needs more of them than `dash_attn` itself provides.

    flash_attn_2    flash_attn.flash_attn_interface: the public functions, and the private functions that ring
                    attention, TransformerEngine, DeepSpeed and others call
    flash_attn_3    flash_attn_interface of FlashAttention-3
    bert_padding    flash_attn.bert_padding

Import the modules by these names, or under the names of the libraries they replace: see docs/api/compat.md.
"""

"""What the modules of dash_attn.compat export: names, order and defaults, as recorded from the peers."""

import inspect
import typing

import pytest
import torch
from compat_support import parameters

import dash_attn
from dash_attn.compat import bert_padding, flash_attn_2, flash_attn_3

# flash-attn 2.8.3: flash_attn/flash_attn_interface.py.
_TAIL_2 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
_OFFSETS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_SIDES = "window_size_left, window_size_right, softcap, alibi_slopes"
FLASH_ATTENTION_2 = {
    "flash_attn_func": f"q, k, v, {_TAIL_2}",
    "flash_attn_kvpacked_func": f"q, kv, {_TAIL_2}",
    "flash_attn_qkvpacked_func": f"qkv, {_TAIL_2}",
    "flash_attn_varlen_func": f"q, k, v, {_OFFSETS}, {_TAIL_2}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_OFFSETS}, {_TAIL_2}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_TAIL_2}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
    "_flash_attn_forward": f"q, k, v, dropout_p, softmax_scale, causal, {_SIDES}, return_softmax",
    "_flash_attn_varlen_forward": (
        f"q, k, v, {_OFFSETS}, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, "
        "softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, "
        "zero_tensors=False"
    ),
    "_flash_attn_backward": (
        f"dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, {_SIDES}, deterministic, "
        "rng_state=None"
    ),
    "_flash_attn_varlen_backward": (
        f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {_OFFSETS}, dropout_p, softmax_scale, causal, {_SIDES}, "
        "deterministic, rng_state=None, zero_tensors=False"
    ),
}
for _name in ("forward", "varlen_forward", "backward", "varlen_backward"):
    FLASH_ATTENTION_2[f"_wrapped_flash_attn_{_name}"] = FLASH_ATTENTION_2[f"_flash_attn_{_name}"]

# FlashAttention-3 of Dao-AILab/flash-attention 0251105a: hopper/flash_attn_interface.py.
_DESCALE = "q_descale=None, k_descale=None, v_descale=None"
_TAIL_3 = (
    f"softmax_scale=None, causal=False, qv=None, {_DESCALE}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
)
FLASH_ATTENTION_3 = {
    "flash_attn_func": f"q, k, v, {_TAIL_3}",
    "flash_attn_varlen_func": f"q, k, v, {_OFFSETS}, seqused_q=None, seqused_k=None, {_TAIL_3}",
    "flash_attn_qkvpacked_func": (
        f"qkv, softmax_scale=None, causal=False, {_DESCALE}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False"
    ),
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        f"max_seqlen_q=None, rotary_seqlens=None, {_DESCALE}, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, "
        "pack_gqa=None, sm_margin=0, return_softmax_lse=False"
    ),
    "get_scheduler_metadata": (
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
        "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
        "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
        "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"
    ),
    "_flash_attn_forward": (
        "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, "
        "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, "
        f"{_DESCALE}, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, "
        "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, "
        "pack_gqa=None, sm_margin=0"
    ),
    "_flash_attn_backward": (
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, "
        "window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0"
    ),
}
# flash-attn 2.8.3: flash_attn/bert_padding.py, where the first two are `apply` of autograd functions.
BERT_PADDING = {
    "index_first_axis": "input, indices",
    "index_put_first_axis": "values, indices, first_axis_dim",
    "unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    "pad_input": "hidden_states, indices, batch, seqlen",
}
RECORDED = [
    (module, name, text)
    for module, functions in (
        (flash_attn_2, FLASH_ATTENTION_2), (flash_attn_3, FLASH_ATTENTION_3), (bert_padding, BERT_PADDING),
    )
    for name, text in functions.items()
]  # fmt: skip


@pytest.mark.parametrize(
    "module, name, text", RECORDED, ids=[f"{module.__name__.rpartition('.')[2]}.{name}" for module, name, _ in RECORDED]
)
def test_signature(module, name, text):
    function = getattr(module, name)
    assert parameters(function) == parameters(eval(f"lambda {text}: None", {"torch": torch}))
    # ring-flash-attn and megatron-core read the signature of plain functions only.
    assert inspect.isfunction(function) and function.__doc__
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    if name.startswith("_"):
        assert inspect.Parameter.KEYWORD_ONLY not in kinds
    assert set(typing.get_type_hints(function)) == {*inspect.signature(function).parameters, "return"}


@pytest.mark.parametrize("module, recorded", [
    (flash_attn_2, FLASH_ATTENTION_2), (flash_attn_3, FLASH_ATTENTION_3), (bert_padding, BERT_PADDING),
])  # fmt: skip
def test_all_is_what_is_public(module, recorded):
    assert sorted(module.__all__) == sorted(name for name in recorded if not name.startswith("_"))


@pytest.mark.parametrize("module", [flash_attn_2, flash_attn_3])
@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_varlen_func"])
def test_keywords_that_transformers_looks_for(module, function):
    """It gives those that the signature names, and drops the others without a word."""
    wanted = {"dropout_p", "window_size", "deterministic", "softcap", "s_aux", "learnable_sink"}
    if function == "flash_attn_varlen_func":
        wanted |= {"max_seqlen_q", "max_seqlen_k", "block_table"}
    assert wanted <= set(inspect.signature(getattr(module, function)).parameters)


def test_the_public_functions_of_flash_attention_2_are_ours():
    assert set(flash_attn_2.__all__) == set(dash_attn.__all__)
    assert all(getattr(flash_attn_2, name) is getattr(dash_attn, name) for name in dash_attn.__all__)

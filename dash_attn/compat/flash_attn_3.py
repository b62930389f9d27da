"""flash_attn_interface of FlashAttention-3: the same names, argument order, defaults and results.

The functions call `dash_attn`'s, whose arguments and errors they share. Gradients are deterministic for either value of
`deterministic`. The log-sum-exp of a query that sees no key is -inf, as in FlashAttention-3, where `dash_attn` and
FlashAttention-2 return +inf; the backward accepts either. FlashAttention-3's arguments are followed by keyword-only
arguments that frameworks look for by name, and by `schedule`.

`num_splits`, `pack_gqa` and `scheduler_metadata` are accepted and ignored. Unsupported arguments raise
NotImplementedError: a second query-value product (`qv`) and fp8.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from .. import checks, interface, kvcache
from ..schedule import Schedule
from .calls import minus_infinity_without_keys
from .flash_attn_3_private import _flash_attn_backward as _flash_attn_backward
from .flash_attn_3_private import _flash_attn_forward as _flash_attn_forward
from .flash_attn_3_private import check_advice, no_splits, reject

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_Window: TypeAlias = Sequence[int | None]
_WithLse: TypeAlias = tuple[Tensor, Tensor]
_WithLseOfCache: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


class _Sinks(TypedDict, total=False):
    learnable_sink: Tensor | None
    s_aux: Tensor | None


class _Keywords(_Sinks, total=False):
    """The keyword-only arguments that follow FlashAttention-3's arguments, for the overloads."""

    dropout_p: float
    schedule: Schedule


class _OfPack(_Keywords, total=False):
    block_table: Tensor | None


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: _Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: Literal[False] = False, **keywords: Unpack[_Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: _Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    *, return_attn_probs: Literal[True], **keywords: Unpack[_Keywords],
) -> _WithLse: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: _Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False, **keywords: Unpack[_Keywords],
) -> Tensor | _WithLse: ...  # fmt: skip
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: _Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
    *, dropout_p: float = 0.0, learnable_sink: Tensor | None = None, s_aux: Tensor | None = None,
    schedule: Schedule = "auto",
) -> Tensor | _WithLse:  # fmt: skip
    """Computes `dash_attn.flash_attn_func` with FlashAttention-3's order of arguments.

    Returns:
        out; with return_attn_probs (out, softmax_lse).
    """
    checks.reject_dropout(dropout_p)
    result = interface.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic,
        return_attn_probs, learnable_sink=learnable_sink, s_aux=s_aux, qv=qv, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, attention_chunk=attention_chunk, num_splits=num_splits, pack_gqa=pack_gqa,
        sm_margin=sm_margin, schedule=schedule,
    )  # fmt: skip
    return _two(result)


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: _Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: Literal[False] = False, **keywords: Unpack[_OfPack],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: _Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    *, return_attn_probs: Literal[True], **keywords: Unpack[_OfPack],
) -> _WithLse: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: _Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False, **keywords: Unpack[_OfPack],
) -> Tensor | _WithLse: ...  # fmt: skip
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: _Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
    *, dropout_p: float = 0.0, block_table: Tensor | None = None, learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None, schedule: Schedule = "auto",
) -> Tensor | _WithLse:  # fmt: skip
    """Computes `dash_attn.flash_attn_varlen_func` with FlashAttention-3's order of arguments.

    Returns:
        out; with return_attn_probs (out, softmax_lse).
    """
    checks.reject_dropout(dropout_p)
    result = interface.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal,
        window_size, softcap, None, deterministic, return_attn_probs, block_table, seqused_q=seqused_q,
        seqused_k=seqused_k, learnable_sink=learnable_sink, s_aux=s_aux, qv=qv, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk, num_splits=num_splits,
        pack_gqa=pack_gqa, sm_margin=sm_margin, schedule=schedule,
    )  # fmt: skip
    return _two(result)


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: _Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0,
    return_attn_probs: Literal[False] = False, **keywords: Unpack[_Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: _Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0,
    *, return_attn_probs: Literal[True], **keywords: Unpack[_Keywords],
) -> _WithLse: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: _Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0,
    return_attn_probs: bool = False, **keywords: Unpack[_Keywords],
) -> Tensor | _WithLse: ...  # fmt: skip
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None, causal: bool = False,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: _Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: bool = False,
    *, dropout_p: float = 0.0, learnable_sink: Tensor | None = None, s_aux: Tensor | None = None,
    schedule: Schedule = "auto",
) -> Tensor | _WithLse:  # fmt: skip
    """Computes `dash_attn.flash_attn_qkvpacked_func` with FlashAttention-3's order of arguments.

    Returns:
        out; with return_attn_probs (out, softmax_lse).
    """
    checks.reject_dropout(dropout_p)
    result = interface.flash_attn_qkvpacked_func(
        qkv, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic,
        return_attn_probs, learnable_sink=learnable_sink, s_aux=s_aux, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, attention_chunk=attention_chunk, num_heads_q=num_heads_q, sm_margin=sm_margin,
        schedule=schedule,
    )  # fmt: skip
    return _two(result)


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None, num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
    return_softmax_lse: Literal[False] = False, **keywords: Unpack[_Sinks],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None, num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
    *, return_softmax_lse: Literal[True], **keywords: Unpack[_Sinks],
) -> _WithLseOfCache: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: _Window = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None, num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
    return_softmax_lse: bool = False, **keywords: Unpack[_Sinks],
) -> Tensor | _WithLseOfCache: ...  # fmt: skip
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    k: Tensor | None = None, v: Tensor | None = None, qv: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None, rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: _Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None, num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *, learnable_sink: Tensor | None = None, s_aux: Tensor | None = None,
) -> Tensor | _WithLseOfCache:  # fmt: skip
    """Computes `dash_attn.flash_attn_with_kvcache` with FlashAttention-3's order of arguments.

    Args:
        page_table: `block_table` of `dash_attn.flash_attn_with_kvcache`.
        cu_seqlens_q: int32 (batch + 1,) on q's device. If given, the queries are a variable-length batch,
            (total_q, heads, head_dim), and the log-sum-exp is (heads, total_q).
        max_seqlen_q: ignored.
        cu_seqlens_k_new: int32 (batch + 1,) on q's device, only with k. If given, the new keys and values are a
            variable-length batch, (total_k_new, kv_heads, head_dim or value_head_dim).
        rotary_seqlens: int32 (batch,) on q's device: positions of the first new keys for the rotary embedding. Default:
            their positions in the cache. Ignored without rotary_cos.
        attention_chunk: as in `flash_attn_func`. The rotary embedding of queries treats it as a mask, like window_size.
        qv: must be None.
        q_descale: must be None.
        k_descale: must be None.
        v_descale: must be None.

    Returns:
        out; with return_softmax_lse (out, softmax_lse, empty, empty), because there are no results of splits.
    """
    if max_seqlen_q is not None:
        checks.check_max_seqlen("max_seqlen_q", max_seqlen_q)
    reject(qv, q_descale, k_descale, v_descale)
    check_advice(scheduler_metadata, num_splits, pack_gqa)
    return_softmax_lse = checks.as_flag("return_softmax_lse", return_softmax_lse)
    out, softmax_lse = kvcache.attend(
        q, kvcache.Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, "page_table"),
        kvcache.NewKeys(k, v, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, cu_seqlens_k_new),
        cu_seqlens_q=cu_seqlens_q, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        attention_chunk=attention_chunk, softcap=softcap, learnable_sink=learnable_sink, s_aux=s_aux,
        sm_margin=sm_margin,
    )  # fmt: skip
    if not return_softmax_lse:
        return out
    return out, minus_infinity_without_keys(softmax_lse.contiguous()), *no_splits(q)


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merges attention over parts of the keys by the log-sum-exps of the parts.

    Args:
        out_partial: fp32 (parts, batch, seqlen_q, heads, head_dim).
        lse_partial: fp32 (parts, batch, seqlen_q, heads); +inf or -inf if a query sees no key of a part, whose
            out_partial is then ignored.
        out: the tensor for the result, of dtype out_dtype. Default: a new tensor.
        out_dtype: fp32, bf16 or fp16. Default: fp32.

    Returns:
        out: (batch, seqlen_q, heads, head_dim), and the log-sum-exp, fp32 (batch, seqlen_q, heads).
    """
    tensors = {"out_partial": out_partial, "lse_partial": lse_partial, "out": out}
    checks.check_tensors({name: x for name, x in tensors.items() if x is not None or name != "out"})
    for name, x, rank in (("out_partial", out_partial, 5), ("lse_partial", lse_partial, 4)):
        if x.dtype != torch.float32:
            raise TypeError(f"{name} must be torch.float32, got {x.dtype}")
        if x.dim() != rank or x.shape[:4] != out_partial.shape[:4]:
            raise ValueError(
                f"{name} must have shape (parts, batch, seqlen_q, heads{', head_dim' if rank == 5 else ''}) like "
                f"out_partial, got {tuple(x.shape)}"
            )
    dtype = torch.float32 if out_dtype is None else out_dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"out_dtype must be torch.float32, torch.bfloat16, torch.float16 or None, got {out_dtype}")
    if out is not None and (out.dtype != dtype or out.shape != out_partial.shape[1:]):
        expected = f"{tuple(out_partial.shape[1:])} of {dtype}"
        raise ValueError(f"out must have shape and dtype {expected}, got {tuple(out.shape)} of {out.dtype}")
    parts = minus_infinity_without_keys(lse_partial)
    largest = functools.reduce(torch.maximum, parts, parts.new_full(parts.shape[1:], -torch.inf))
    largest = largest.masked_fill(largest.isinf(), 0.0)
    softmax_lse = largest + _sum_of_parts((parts - largest).exp()).log()
    weights = torch.where(parts == -torch.inf, 0.0, (parts - softmax_lse).exp()).unsqueeze(-1)
    # A part without weight contributes nothing, not even a NaN.
    merged = _sum_of_parts(torch.where(weights == 0, 0.0, weights * out_partial)).to(dtype)
    return merged if out is None else out.copy_(merged), softmax_lse


def _sum_of_parts(parts: Tensor) -> Tensor:
    """Sums over the first dimension in ascending order. PyTorch's order depends on the position of a row."""
    return functools.reduce(torch.add, parts, parts.new_zeros(parts.shape[1:]))


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16, headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, cache_leftpad: Tensor | None = None,
    page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
    window_size: _Window = (-1, -1), attention_chunk: int = 0, has_softcap: bool = False, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """Returns an empty int32 tensor, because dash_attn ignores `scheduler_metadata`.

    The arguments of `flash_attn_with_kvcache` that it takes are ignored; cache_seqlens chooses the device.
    """
    checks.check_tensors({"cache_seqlens": cache_seqlens})
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _two(result: Tensor | tuple[Tensor, ...]) -> Tensor | _WithLse:
    """Converts a result of FlashAttention-2's form to FlashAttention-3's."""
    return result if isinstance(result, Tensor) else (result[0], minus_infinity_without_keys(result[1]))

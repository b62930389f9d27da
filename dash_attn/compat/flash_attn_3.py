"""flash_attn_interface of FlashAttention-3: names, order and defaults of the arguments, results.

The functions compute by `dash_attn`'s, whose arguments and errors they have; gradients are deterministic whatever
`deterministic` is. The log-sum-exp of a query that sees no key is -inf, as in FlashAttention-3, where `dash_attn`'s and
FlashAttention-2's is +inf; the backward takes either. Behind FlashAttention-3's arguments stand, as keywords, those
that frameworks look for by name, and `schedule`.

`num_splits`, `pack_gqa` and `scheduler_metadata` are accepted and ignored. Unsupported arguments raise
NotImplementedError: a second query-value product (`qv`) and fp8.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import checks, interface, kvcache
from ..schedule import Schedule
from . import calls
from .calls import Lengths, as_pack, minus_infinity_without_keys

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    schedule: Schedule = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`dash_attn.flash_attn_func` with FlashAttention-3's order of arguments.

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


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    block_table: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    schedule: Schedule = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`dash_attn.flash_attn_varlen_func` with FlashAttention-3's order of arguments.

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


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    schedule: Schedule = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`dash_attn.flash_attn_qkvpacked_func` with FlashAttention-3's order of arguments.

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


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """`dash_attn.flash_attn_with_kvcache` with FlashAttention-3's order of arguments.

    Args:
        page_table: `block_table` there.
        cu_seqlens_q: int32 (batch + 1,) on q's device: the queries are a pack, (total_q, heads, head_dim), and the
            log-sum-exp is (heads, total_q).
        max_seqlen_q: not looked at.
        cu_seqlens_k_new: int32 (batch + 1,) on q's device, only with k: the new keys and values are a pack,
            (total_k_new, kv_heads, head_dim or value_head_dim).
        rotary_seqlens: int32 (batch,) on q's device: positions of the first new keys for the rotation. Default: their
            places in the cache. Not looked at without rotary_cos.
        attention_chunk: as in `flash_attn_func`; for the rotation of queries it is a mask, as a window_size is.
        qv, q_descale, k_descale, v_descale: None only.

    Returns:
        out; with return_softmax_lse (out, softmax_lse, empty, empty): there are no results of splits.
    """
    if max_seqlen_q is not None:
        checks.check_max_seqlen("max_seqlen_q", max_seqlen_q)
    _reject(qv, q_descale, k_descale, v_descale)
    _check_advice(scheduler_metadata, num_splits, pack_gqa)
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
    return out, minus_infinity_without_keys(softmax_lse), *_no_splits(q)


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merges attention over parts of the keys by the log-sum-exps of the parts.

    Args:
        out_partial: fp32 (parts, batch, seqlen_q, heads, head_dim).
        lse_partial: fp32 (parts, batch, seqlen_q, heads); +inf or -inf where a query sees no key of a part, whose
            out_partial is not looked at there.
        out: where the result goes, of out_dtype. Default: a new tensor.
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
    # Of a part that has no weight not even a NaN is taken.
    merged = _sum_of_parts(torch.where(weights == 0, 0.0, weights * out_partial)).to(dtype)
    return merged if out is None else out.copy_(merged), softmax_lse


def _sum_of_parts(parts: Tensor) -> Tensor:
    """The sum over the first dimension in ascending order. PyTorch's order depends on where a row lies."""
    return functools.reduce(torch.add, parts, parts.new_zeros(parts.shape[1:]))


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty int32 tensor: what `scheduler_metadata` says of the work changes nothing here."""
    checks.check_tensors({"cache_seqlens": cache_seqlens})
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of a dense batch or a pack, or over a cache where there is something of one.

    Args:
        q, k, v, softmax_scale, causal, softcap, attention_chunk, sm_margin: as in `flash_attn_func`.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k: as in `flash_attn_varlen_func`;
            each may stand alone, then what it does not say of is a dense batch.
        window_size_left, window_size_right: as `window_size`.
        out_: where the output goes. Default: a new tensor.
        k_new, v_new, cu_seqlens_k_new, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary: as
            k, v, cu_seqlens_k_new, page_table, cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin and
            rotary_seqlens in `flash_attn_with_kvcache`, where k and v are the cache and seqused_k is `cache_seqlens`.
            With any of them there is no gradient.
        qv, q_descale, k_descale, v_descale: None only.

    Returns:
        out, softmax_lse (heads, total_q) of a pack and (batch, heads, seqlen_q) else, and two empty tensors: there are
        no results of splits. out has a gradient.
    """
    _reject(qv, q_descale, k_descale, v_descale)
    _check_advice(scheduler_metadata, num_splits, pack_gqa)
    calls.check_max_seqlens(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    if out_ is not None:
        calls.check_plain_tensors({"q": q, "v": v, "out_": out_})
        shape = (*q.shape[:-1], *v.shape[-1:])
        if out_.shape != shape or out_.dtype != q.dtype:
            expected = f"{shape} of {q.dtype}"
            raise ValueError(f"out_ must have shape and dtype {expected}, got {tuple(out_.shape)} of {out_.dtype}")
    arguments: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": (window_size_left, window_size_right),
        "attention_chunk": attention_chunk, "softcap": softcap, "sm_margin": sm_margin,
    }  # fmt: skip
    new = kvcache.NewKeys(
        k_new, v_new, rotary_cos, rotary_sin, rotary_interleaved, seqlens_rotary, cu_seqlens_k_new
    )  # fmt: skip
    of_cache = (*new[:4], cu_seqlens_k_new, page_table, kv_batch_idx, leftpad_k)
    if any(x is not None for x in of_cache):
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k must be None with a cache (page_table, kv_batch_idx, leftpad_k or k_new)")
        cache = kvcache.Cache(k, v, seqused_k, kv_batch_idx, leftpad_k, page_table, "page_table")
        out, softmax_lse = kvcache.attend(q, cache, new, cu_seqlens_q=cu_seqlens_q, seqused_q=seqused_q, **arguments)
        softmax_lse = minus_infinity_without_keys(softmax_lse)
    else:
        pack = as_pack(q, k, v, Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k))
        out, softmax_lse = calls.forward(
            pack.of_queries(q), pack.of_keys(k), pack.of_keys(v), pack.lengths, **arguments
        )
        out, softmax_lse = pack.as_queries(out), pack.as_lse(softmax_lse)
    if out_ is not None:
        out = out_.copy_(out)
    return out, softmax_lse, *_no_splits(q)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Writes the gradients of one forward into dq, dk and dv: of `_flash_attn_forward` without a cache, here or there.

    Args:
        dout, out: (batch, seqlen_q, heads, value_head_dim) or (total_q, heads, value_head_dim), like q.
        softmax_lse: as the forward returns it, natural logarithm; -inf or +inf for a query that sees no key.
        dq, dk, dv: like q, k and v, of any strides, sharing no memory with each other nor with what is read. One that
            is None is computed and dropped.
        sequed_q, sequed_k: `seqused_q` and `seqused_k` of the forward.
        is_causal: `causal` of the forward.
        deterministic: accepted for compatibility; gradients are deterministic for either value.

    The other arguments are those of the forward. Head dims must be multiples of 8.

    Returns:
        softmax_d, fp32, D = rowsum(dout * out) in the layout of `_flash_attn_backward` and of
        `_flash_attn_varlen_backward` in flash_attn_2. FlashAttention-3 pads it by the tile sizes of its kernels.
    """
    if deterministic is not None:
        checks.as_flag("deterministic", deterministic)
    calls.check_max_seqlens(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    arguments: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": is_causal, "window_size": (window_size_left, window_size_right),
        "softcap": softcap, "sm_margin": sm_margin,
    }  # fmt: skip
    pack = as_pack(q, k, v, Lengths(cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k))
    if pack.is_as_given:
        return calls.backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, pack.lengths, **arguments)[-1]
    gradients = {"dq": dq, "dk": dk, "dv": dv}
    calls.check_around_pack(pack, q, k, v, {"dout": dout, "out": out}, softmax_lse, gradients)
    dq_rows, dk_rows, dv_rows, softmax_d = calls.backward(
        pack.of_queries(dout), pack.of_queries(q), pack.of_keys(k), pack.of_keys(v), pack.of_queries(out),
        pack.of_lse(softmax_lse), None, None, None, pack.lengths, **arguments,
    )  # fmt: skip
    for given, gradient in ((dq, pack.as_queries(dq_rows)), (dk, pack.as_keys(dk_rows)), (dv, pack.as_keys(dv_rows))):
        if given is not None:
            given.copy_(gradient)
    return softmax_d


def _two(result: Tensor | tuple[Tensor, Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
    """FlashAttention-3's result of what is FlashAttention-2's."""
    return result if isinstance(result, Tensor) else (result[0], minus_infinity_without_keys(result[1]))


def _no_splits(q: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of the outputs and log-sum-exps of splits."""
    return q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)


def _reject(qv, q_descale, k_descale, v_descale) -> None:
    checks.reject_given(checks.QV, qv=qv)
    checks.reject_given(checks.FP8, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)


def _check_advice(scheduler_metadata: Tensor | None, num_splits: int, pack_gqa: bool | None) -> None:
    checks.check_hints(num_splits, pack_gqa)
    if scheduler_metadata is not None:
        checks.check_tensors({"scheduler_metadata": scheduler_metadata})

"""The private functions of FlashAttention-3's flash_attn_interface, which frameworks call for one part of the keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks, kvcache
from . import calls
from .calls import Lengths, as_pack, minus_infinity_without_keys


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor,
    k_new: Tensor | None = None, v_new: Tensor | None = None, qv: Tensor | None = None, out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None, page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 1,
    pack_gqa: bool | None = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes attention of a dense or variable-length batch, or over a KV cache if an argument belongs to one.

    Args:
        q, k, v, softmax_scale, causal, softcap, attention_chunk, sm_margin: as in `flash_attn_func`.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k: as in `flash_attn_varlen_func`.
            Each may be given alone; a side without offsets is a dense batch.
        window_size_left, window_size_right: the sides of `window_size`.
        out_: the tensor for the output. Default: a new tensor.
        k_new, v_new, cu_seqlens_k_new, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary: as
            k, v, cu_seqlens_k_new, page_table, cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin and
            rotary_seqlens in `flash_attn_with_kvcache`, where k and v are the cache and seqused_k is `cache_seqlens`.
            With any of these arguments there is no gradient.
        qv, q_descale, k_descale, v_descale: must be None.

    Returns:
        out; softmax_lse, (heads, total_q) for a variable-length batch and (batch, heads, seqlen_q) otherwise; and two
        empty tensors, because there are no results of splits. out has a gradient.
    """
    reject(qv, q_descale, k_descale, v_descale)
    check_advice(scheduler_metadata, num_splits, pack_gqa)
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
        softmax_lse = minus_infinity_without_keys(softmax_lse.contiguous())
    else:
        pack = as_pack(q, k, v, Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k))
        out, softmax_lse = calls.forward(
            pack.of_queries(q), pack.of_keys(k), pack.of_keys(v), pack.lengths, **arguments
        )
        out, softmax_lse = pack.as_queries(out), pack.as_lse(softmax_lse)
    if out_ is not None:
        out = out_.copy_(out)
    return out, softmax_lse, *no_splits(q)


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None, sequed_k: Tensor | None = None, max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    softmax_scale: float | None = None, is_causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0, deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """Writes the gradients of a forward without a KV cache, of this library or FlashAttention-3, into dq, dk and dv.

    Args:
        dout, out: (batch, seqlen_q, heads, value_head_dim) or (total_q, heads, value_head_dim), like q.
        softmax_lse: as returned by the forward, natural logarithm; -inf or +inf for a query that sees no key.
        dq, dk, dv: like q, k and v, with any strides, overlapping neither each other nor an input. A gradient that is
            None is computed and discarded.
        sequed_q, sequed_k: `seqused_q` and `seqused_k` of the forward.
        is_causal: `causal` of the forward.
        deterministic: accepted for compatibility; gradients are deterministic for either value.

    The other arguments are those of the forward. Head dims must be multiples of 8.

    Returns:
        softmax_d, fp32, D = rowsum(dout * out) in the layout of `_flash_attn_backward` and
        `_flash_attn_varlen_backward` in flash_attn_2. FlashAttention-3 pads it to the tile sizes of its kernels.
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


def no_splits(q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns empty tensors in place of the outputs and log-sum-exps of splits."""
    return q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)


def reject(qv, q_descale, k_descale, v_descale) -> None:
    checks.reject_given(checks.QV, qv=qv)
    checks.reject_given(checks.FP8, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)


def check_advice(scheduler_metadata: Tensor | None, num_splits: int, pack_gqa: bool | None) -> None:
    checks.check_hints(num_splits, pack_gqa)
    if scheduler_metadata is not None:
        checks.check_tensors({"scheduler_metadata": scheduler_metadata})

"""flash_attn.flash_attn_interface of FlashAttention 2.8: the same names, argument order, defaults and results.

The public functions are those of `dash_attn`. Ring attention and others call the private functions for one part of the
keys after the other. These use `dash_attn`'s ops and can be traced by torch.compile. Their gradients are deterministic
for either value of `deterministic`. They differ from FlashAttention-2's in two respects:

- They are plain functions, and so are the `_wrapped_` names, which are ops in FlashAttention-2.
- The log-sum-exp of a query that sees no key is -inf, the logarithm of an empty sum, where FlashAttention-2 returns
  +inf. Callers merge results by their log-sum-exps, and +inf would outweigh every other part. The public functions
  return +inf, as in FlashAttention-2. The backwards accept either.

Dropout in the private functions and `leftpad_k` raise NotImplementedError, and so does `block_table` if a gradient is
required. Other arguments and errors are those of `dash_attn.flash_attn_func` and `flash_attn_varlen_func`; head dims
must be multiples of 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import (
    checks,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from ..kvcache import attend_pages
from . import calls
from .calls import Lengths

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float,
    softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes one dense forward, like FlashAttention-2's op.

    Args:
        q, k, v, softmax_scale, causal, softcap, alibi_slopes: as in `dash_attn.flash_attn_func`.
        dropout_p: must be 0.0 or None.
        window_size_left, window_size_right: the sides of `window_size` in `dash_attn.flash_attn_func`.
        return_softmax: accepted; no probabilities are returned, because nothing is dropped.

    Returns:
        out; softmax_lse fp32 (batch, heads, seqlen_q), natural logarithm, -inf for a query that sees no key; an empty
        tensor instead of the probabilities; rng_state int64 (2,), zeros.
    """
    return _forward(
        q, k, v, Lengths(), dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap,
        alibi_slopes, return_softmax,
    )  # fmt: skip


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    dropout_p: float,
    softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    return_softmax: bool = False, block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None, zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes `_flash_attn_forward` for a variable-length batch, with softmax_lse (heads, total_q).

    Args:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k: as in `dash_attn.flash_attn_varlen_func`.
        block_table: as in `dash_attn.flash_attn_varlen_func`.
        leftpad_k: must be None.
        zero_tensors: accepted; rows outside of all sequences are always 0.
    """
    checks.reject_given("padding on the left is not supported", leftpad_k=leftpad_k)
    checks.as_flag("zero_tensors", zero_tensors)
    calls.check_max_seqlens(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    return _forward(
        q, k, v, Lengths(cu_seqlens_q, cu_seqlens_k, None, seqused_k), dropout_p, softmax_scale, causal,
        (window_size_left, window_size_right), softcap, alibi_slopes, return_softmax, block_table,
    )  # fmt: skip


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Writes the gradients of one dense forward into dq, dk and dv.

    Args:
        dout, out: (batch, seqlen_q, heads, head_dim), like q.
        q, k, v, softmax_scale, causal, softcap, alibi_slopes: as in the forward.
        softmax_lse: fp32 (batch, heads, seqlen_q), from any forward; +inf or -inf for a query that sees no key.
        dq, dk, dv: like q, k and v, with any strides, overlapping neither each other nor an input. A gradient that is
            None is computed and discarded.
        dropout_p, window_size_left, window_size_right: as in the forward.
        deterministic: accepted for compatibility; gradients are deterministic for either value.
        rng_state: ignored.

    Returns:
        softmax_d, fp32 (batch, heads, seqlen_q rounded up to a multiple of 128): D = rowsum(dout * out), then zeros.
    """
    return all_of_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, Lengths(), dropout_p, softmax_scale, causal,
        (window_size_left, window_size_right), softcap, alibi_slopes, deterministic,
    )[-1]  # fmt: skip


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    dropout_p: float,
    softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """Computes `_flash_attn_backward` for a variable-length batch.

    softmax_lse is (heads, total_q), and softmax_d is (heads, total_q + 128 batch). As in FlashAttention-2, row i of
    sequence b is at cu_seqlens_q[b] + 128 b + i in softmax_d; other elements are zero.
    """
    return all_of_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, Lengths(cu_seqlens_q, cu_seqlens_k), dropout_p, softmax_scale,
        causal, (window_size_left, window_size_right), softcap, alibi_slopes, deterministic, max_seqlen_q, max_seqlen_k,
        zero_tensors,
    )[-1]  # fmt: skip


def _forward(
    q, k, v, lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax,
    block_table=None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    checks.reject_dropout(dropout_p)
    if return_softmax is not None:
        checks.as_flag("return_softmax", return_softmax)
    arguments = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    if block_table is None:
        out, softmax_lse = calls.forward(q, k, v, lengths, **arguments)
    else:
        out, softmax_lse = attend_pages(q, k, v, block_table, *lengths, **arguments)
        softmax_lse = calls.minus_infinity_without_keys(softmax_lse)
    return out, softmax_lse, out.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)


def all_of_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, lengths, dropout_p, softmax_scale, causal, window_size, softcap,
    alibi_slopes, deterministic, max_seqlen_q=None, max_seqlen_k=None, zero_tensors=False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns dq, dk and dv, allocated if they are None, and softmax_d, for the two functions above."""
    checks.as_flag("zero_tensors", zero_tensors)
    calls.check_max_seqlens(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    checks.reject_dropout(dropout_p)
    if deterministic is not None:
        checks.as_flag("deterministic", deterministic)
    return calls.backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, lengths, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward

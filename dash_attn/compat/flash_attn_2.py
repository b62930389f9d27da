"""flash_attn.flash_attn_interface of FlashAttention 2.8: names, order and defaults of the arguments, results.

The public functions are those of `dash_attn`. The private ones are called by ring attention and others, part by part of
the keys. They compute by `dash_attn`'s ops, are traced by torch.compile, and their gradients are deterministic whatever
`deterministic` is. In two things they are not FlashAttention-2's:

- They are plain functions, and so are the `_wrapped_` names, which there are its ops.
- The log-sum-exp of a query that sees no key is -inf, the logarithm of a sum of nothing, where FlashAttention-2 has
  +inf: whoever calls them merges results by their log-sum-exps, and +inf would outweigh every other part. The public
  functions have +inf, as there. The backwards take either.

Dropout of the private functions and `leftpad_k` raise NotImplementedError, and so does `block_table` where a gradient
is required. Arguments and errors are otherwise those of `dash_attn.flash_attn_func` and `flash_attn_varlen_func`; head
dims must be multiples of 8.
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One dense forward, as FlashAttention-2's op.

    Args:
        q, k, v, softmax_scale, causal, softcap, alibi_slopes: as in `dash_attn.flash_attn_func`.
        dropout_p: 0.0 or None only.
        window_size_left, window_size_right: as `window_size` there.
        return_softmax: accepted; there are no dropped-out probabilities.

    Returns:
        out; softmax_lse fp32 (batch, heads, seqlen_q), natural logarithm, -inf for a query that sees no key; an empty
        tensor for the probabilities; rng_state int64 (2,), zeros.
    """
    return _forward(
        q, k, v, Lengths(), dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap,
        alibi_slopes, return_softmax,
    )  # fmt: skip


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_flash_attn_forward` of a pack, with softmax_lse (heads, total_q).

    Args:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k: as in `dash_attn.flash_attn_varlen_func`.
        block_table: as in `dash_attn.flash_attn_varlen_func`.
        leftpad_k: None only.
        zero_tensors: accepted; rows of no sequence are 0 in any case.
    """
    checks.reject_given("padding on the left is not supported", leftpad_k=leftpad_k)
    checks.as_flag("zero_tensors", zero_tensors)
    calls.check_max_seqlens(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    return _forward(
        q, k, v, Lengths(cu_seqlens_q, cu_seqlens_k, None, seqused_k), dropout_p, softmax_scale, causal,
        (window_size_left, window_size_right), softcap, alibi_slopes, return_softmax, block_table,
    )  # fmt: skip


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes the gradients of one dense forward into dq, dk and dv.

    Args:
        dout, out: (batch, seqlen_q, heads, head_dim), like q.
        q, k, v, softmax_scale, causal, softcap, alibi_slopes: as in the forward.
        softmax_lse: fp32 (batch, heads, seqlen_q), of any forward; +inf or -inf for a query that sees no key.
        dq, dk, dv: like q, k and v, of any strides, sharing no memory with each other nor with what is read. One that
            is None is computed and dropped.
        dropout_p, window_size_left, window_size_right: as in the forward.
        deterministic: accepted for compatibility; gradients are deterministic for either value.
        rng_state: not looked at.

    Returns:
        softmax_d, fp32 (batch, heads, seqlen_q rounded up to a multiple of 128): D = rowsum(dout * out), then zeros.
    """
    return all_of_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, Lengths(), dropout_p, softmax_scale, causal,
        (window_size_left, window_size_right), softcap, alibi_slopes, deterministic,
    )[-1]  # fmt: skip


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """`_flash_attn_backward` of a pack: softmax_lse is (heads, total_q), softmax_d (heads, total_q + 128 batch).

    Row i of sequence b is at cu_seqlens_q[b] + 128 b + i in softmax_d, as in FlashAttention-2; zeros elsewhere.
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
    """dq, dk and dv, allocated where they are None, and softmax_d, with the arguments of the two functions above."""
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

"""The functions of flash_attn_2_cuda in FlashAttention 2.8 that frameworks call, with the argument order of C++.

The functions call `flash_attn_2`, whose docstrings describe the arguments, and return the same tensors in a list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from . import flash_attn_2
from .calls import Lengths

__all__ = ["bwd", "fwd", "varlen_bwd", "varlen_fwd"]

_NO_OUT = "the output is allocated"


def fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, alibi_slopes: Tensor | None, p_dropout: float,
    softmax_scale: float, is_causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    return_softmax: bool, gen: torch.Generator | None,
) -> list[Tensor]:  # fmt: skip
    """Returns [out, softmax_lse, empty, rng_state] of `_flash_attn_forward`. out and gen must be None."""
    checks.reject_given(_NO_OUT, out=out)
    checks.reject_given(checks.DROPOUT, gen=gen)
    return list(
        flash_attn_2._flash_attn_forward(
            q, k, v, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap, alibi_slopes,
            return_softmax,
        )
    )  # fmt: skip


def varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    seqused_k: Tensor | None, leftpad_k: Tensor | None, block_table: Tensor | None, alibi_slopes: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, p_dropout: float, softmax_scale: float, zero_tensors: bool, is_causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, return_softmax: bool, gen: torch.Generator | None,
) -> list[Tensor]:  # fmt: skip
    """Returns [out, softmax_lse, empty, rng_state] of `_flash_attn_varlen_forward`. out and gen must be None."""
    checks.reject_given(_NO_OUT, out=out)
    checks.reject_given(checks.DROPOUT, gen=gen)
    return list(
        flash_attn_2._flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, is_causal,
            window_size_left, window_size_right, softcap, alibi_slopes, return_softmax, block_table, leftpad_k,
            seqused_k, zero_tensors,
        )
    )  # fmt: skip


def bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, alibi_slopes: Tensor | None, p_dropout: float, softmax_scale: float,
    is_causal: bool, window_size_left: int, window_size_right: int, softcap: float, deterministic: bool,
    gen: torch.Generator | None, rng_state: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Returns [dq, dk, dv, softmax_d] of `_flash_attn_backward`, allocating gradients that are None. gen must be
    None."""
    checks.reject_given(checks.DROPOUT, gen=gen)
    return list(
        flash_attn_2.all_of_backward(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, Lengths(), p_dropout, softmax_scale, is_causal,
            (window_size_left, window_size_right), softcap, alibi_slopes, deterministic,
        )
    )  # fmt: skip


def varlen_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, alibi_slopes: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, p_dropout: float, softmax_scale: float, zero_tensors: bool, is_causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, deterministic: bool, gen: torch.Generator | None,
    rng_state: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Computes `bwd` with `_flash_attn_varlen_backward`."""
    checks.reject_given(checks.DROPOUT, gen=gen)
    return list(
        flash_attn_2.all_of_backward(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, Lengths(cu_seqlens_q, cu_seqlens_k), p_dropout, softmax_scale,
            is_causal, (window_size_left, window_size_right), softcap, alibi_slopes, deterministic, max_seqlen_q,
            max_seqlen_k, zero_tensors,
        )
    )  # fmt: skip

"""Drop-in replacements for FlashAttention's functions whose gradients have the same bits every run: dense batches.

Names, order and defaults of the arguments are FlashAttention-2's; FlashAttention-3's further arguments follow as
keywords. An argument that asks for what is not there yet raises NotImplementedError: none is ignored.

On CUDA tensors the kernels need a Hopper GPU. CPU tensors are computed by `dash_attn.reference`, slowly, with the same
checks. Gradients are a function of the inputs and of `schedule` alone. `dash_attn.varlen` has the functions of packs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks
from .attention import attention


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    schedule: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention O = softmax(c Q K^T) V, exact, with deterministic gradients.

    The gradients are FlashAttention-2's (arXiv 2307.08691), their sums taken in the order of `schedule` (DASH,
    arXiv 2601.21824).

    Args:
        q: (batch, seqlen_q, heads, head_dim), bf16 or fp16, head_dim from 1 to 128. Any strides: what the kernels
            cannot address (a last dimension that is not contiguous, a base or a stride that is not a multiple of 16
            bytes) is copied, and a head_dim that is not a multiple of 8 is padded with zeros. On a CUDA, CPU or meta
            device.
        k, v: (batch, seqlen_k, kv_heads, head_dim), like q; kv_heads divides heads, and query head h uses KV head
            h // (heads // kv_heads).
        dropout_p: 0.0 or None only.
        softmax_scale: c, any number whose product with log2(e) is finite in fp32. Default: 1 / sqrt(head_dim). Under
            torch.compile each value is a graph of its own.
        causal: mask aligned at the bottom right: query i sees the keys j <= i + seqlen_k - seqlen_q. A query that sees
            no key has output 0, log-sum-exp +inf and gradients 0.
        window_size: (left, right): query i sees the keys from p - left to p + right, p = i + seqlen_k - seqlen_q being
            its own. A negative number or None is unbounded; causal sets right to 0, and (-1, 0) is the causal mask.
        softcap: 0.0 or None only.
        alibi_slopes: None only.
        deterministic: accepted for compatibility; gradients are deterministic for either value.
        return_attn_probs: also return the log-sum-exp, and an empty tensor where FlashAttention-2 returns the
            dropped-out probabilities.
        attention_chunk: FlashAttention-3's: of the keys that the mask leaves, query i sees those of its own chunk, keys
            j with j // attention_chunk = p // attention_chunk. 0 or None: all.
        qv, q_descale, k_descale, v_descale, num_splits: FlashAttention-3's; None, None, None, None and 0 or 1 only.
        pack_gqa: FlashAttention-3's, how grouped heads are laid out; accepted, and changes nothing.
        sm_margin: SMs that our kernels leave to others; at least 0 and less than the GPU has. Changes no bits. torch's
            own kernels, which pad, copy or negate where a call needs it, take the SMs they like.
        schedule: how the backward sums: a name of `dash_attn.schedule.POLICIES` or "auto", which is "descending" at
            every shape. Each has its own last bits. All but one add the parts of dq in fp32, in an order of their own,
            and a part waits for those before it; "order_free" rounds the parts to multiples of a unit that the inputs
            fix and adds integers, which need no order. That moves a row of dq that attends about evenly to runs of 16
            or more keys by at most 1e-4 of its norm; other rows may move by more of theirs. Heads whose inputs leave
            no room for it are added in order after all. docs/order_free.md says what is promised. "auto" is an ordered
            sum: its errors are the smaller ones for any inputs.

    Flags may be Python's or numpy's bools, 0 or 1.

    Returns:
        out: (batch, seqlen_q, heads, head_dim), like q; with return_attn_probs (out, softmax_lse, empty), softmax_lse
        fp32 (batch, heads, seqlen_q), natural logarithm, not differentiable, empty (0,), like q.

    Raises:
        NotImplementedError: an argument asks for what is not supported.
        TypeError, ValueError: an argument has a wrong type, dtype, shape or value; the message names it.
        RuntimeError: CUDA tensors without the compiled kernels or without a Hopper GPU; a second differentiation.
    """
    unsupported = (
        dropout_p, softcap, alibi_slopes, qv, q_descale, k_descale, v_descale, num_splits, pack_gqa, None
    )  # fmt: skip
    return attention(
        torch.ops.dash_attn.attention.default, {"q": q, "k": k, "v": v}, (), softmax_scale, causal, window_size,
        attention_chunk, deterministic, return_attn_probs, sm_margin, schedule, unsupported,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    schedule: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_func` for keys and values in one tensor; the gradient is written into one tensor too.

    Args:
        q: (batch, seqlen_q, heads, head_dim), bf16 or fp16.
        kv: (batch, seqlen_k, 2, kv_heads, head_dim), like q.

    The other arguments, the result and the errors are those of `flash_attn_func`, and so are the bits.
    """
    unsupported = (
        dropout_p, softcap, alibi_slopes, qv, q_descale, k_descale, v_descale, num_splits, pack_gqa, None
    )  # fmt: skip
    return attention(
        torch.ops.dash_attn.attention_kvpacked.default, {"q": q, "kv": kv}, (), softmax_scale, causal, window_size,
        attention_chunk, deterministic, return_attn_probs, sm_margin, schedule, unsupported,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    schedule: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_func` for queries, keys and values in one tensor; the gradient is written into one tensor too.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), bf16 or fp16; with `num_heads_q`
            (batch, seqlen, num_heads_q + 2 * kv_heads, head_dim): query heads, then key heads, then value heads.
        num_heads_q: number of query heads of a four-dimensional qkv; a multiple of kv_heads.

    The other arguments, the result and the errors are those of `flash_attn_func`, and so are the bits.
    """
    unsupported = (
        dropout_p, softcap, alibi_slopes, qv, q_descale, k_descale, v_descale, num_splits, pack_gqa, None
    )  # fmt: skip
    return attention(
        torch.ops.dash_attn.attention_qkvpacked.default, {"qkv": qkv}, (checks.as_num_heads_q(num_heads_q),),
        softmax_scale, causal, window_size, attention_chunk, deterministic, return_attn_probs, sm_margin, schedule,
        unsupported,
    )  # fmt: skip

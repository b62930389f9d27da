"""The functions of packs: sequences of many lengths one behind the other, without padding.

Names, order and defaults of the arguments are FlashAttention-2's; FlashAttention-3's further arguments follow as
keywords. A sequence has, bit for bit, the output, log-sum-exp and gradients that `dash_attn.interface` gives it alone,
whatever else is in the pack. On CUDA tensors lengths are read on the device only: no call waits for it, and a captured
graph may be replayed with other lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks
from .attention import attention


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
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
    """`flash_attn_func` of each sequence of a pack.

    Sequence b has the queries in rows cu_seqlens_q[b], ..., cu_seqlens_q[b + 1] - 1 of q, and its keys and values in
    rows of k and v in the same way; every mask is that of its own lengths. Sequences may be empty. Rows of no sequence,
    past the last offset or between the end of `seqused` and the next offset, may hold anything: they reach no sequence,
    and have output 0, log-sum-exp +inf and gradients 0.

    Args:
        q: (total_q, heads, head_dim), bf16 or fp16, as in `flash_attn_func`.
        k, v: (total_k, kv_heads, head_dim), like q.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), contiguous, on q's device: where each sequence begins and ends.
            They start at 0 or more, never decrease and end at total or less, which is checked on the CPU alone.
        max_seqlen_q, max_seqlen_k: an int, or an integer tensor of shape (), which is not read. FlashAttention's hints
            of the longest sequence; they change nothing.
        block_table: None only.
        seqused_q, seqused_k: int32 (batch,) like cu_seqlens: how many rows of a sequence there are, at most those up
            to the next offset. Default: all.

    The other arguments and the errors are those of `flash_attn_func`.

    Returns:
        out: (total_q, heads, head_dim), like q; with return_attn_probs (out, softmax_lse, empty) as from
        `flash_attn_func`, softmax_lse fp32 (heads, total_q).
    """
    unsupported = (
        dropout_p, softcap, alibi_slopes, qv, q_descale, k_descale, v_descale, num_splits, pack_gqa, block_table
    )  # fmt: skip
    pack = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k
    }  # fmt: skip
    max_seqlens = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return attention(
        torch.ops.dash_attn.attention.default, {"q": q, "k": k, "v": v}, (), softmax_scale, causal, window_size,
        attention_chunk, deterministic, return_attn_probs, sm_margin, schedule, unsupported, pack, max_seqlens,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
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
    """`flash_attn_varlen_func` for keys and values in one tensor; the gradient is written into one tensor too.

    Args:
        q: (total_q, heads, head_dim), bf16 or fp16.
        kv: (total_k, 2, kv_heads, head_dim), like q.

    The other arguments, the result and the errors are those of `flash_attn_varlen_func`, and so are the bits.
    """
    unsupported = (
        dropout_p, softcap, alibi_slopes, qv, q_descale, k_descale, v_descale, num_splits, pack_gqa, None
    )  # fmt: skip
    pack = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k
    }  # fmt: skip
    max_seqlens = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return attention(
        torch.ops.dash_attn.attention_kvpacked.default, {"q": q, "kv": kv}, (), softmax_scale, causal, window_size,
        attention_chunk, deterministic, return_attn_probs, sm_margin, schedule, unsupported, pack, max_seqlens,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused: Tensor | None = None,
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
    """`flash_attn_varlen_func` for queries, keys and values in one tensor; the gradient is written into one tensor too.

    Args:
        qkv: (total, 3, heads, head_dim), bf16 or fp16; with `num_heads_q`
            (total, num_heads_q + 2 * kv_heads, head_dim): query heads, then key heads, then value heads.
        cu_seqlens, max_seqlen, seqused: of the queries and of the keys alike.
        num_heads_q: number of query heads of a three-dimensional qkv; a multiple of kv_heads.

    The other arguments, the result and the errors are those of `flash_attn_varlen_func`, and so are the bits.
    """
    unsupported = (
        dropout_p, softcap, alibi_slopes, qv, q_descale, k_descale, v_descale, num_splits, pack_gqa, None
    )  # fmt: skip
    pack, max_seqlens = {"cu_seqlens": cu_seqlens, "seqused": seqused}, {"max_seqlen": max_seqlen}
    split = (checks.as_num_heads_q(num_heads_q),)
    return attention(
        torch.ops.dash_attn.attention_qkvpacked.default, {"qkv": qkv}, split, softmax_scale, causal, window_size,
        attention_chunk, deterministic, return_attn_probs, sm_margin, schedule, unsupported, pack, max_seqlens,
    )  # fmt: skip

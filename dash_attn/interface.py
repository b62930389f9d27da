"""Drop-in replacements for FlashAttention's functions whose gradients have the same bits in every run.

Names, order and defaults of the arguments are FlashAttention-2's, with FlashAttention-3's extra arguments as keywords.
Unsupported arguments raise NotImplementedError, and tuning hints are ignored.

CUDA tensors need a Hopper GPU. CPU tensors use `dash_attn.reference`, which is slow and has the same checks. Gradients
depend only on the inputs of their sequence and on `schedule`: a sequence has the same bits alone, in a batch and in a
variable-length batch (sequences of different lengths one after the other, without padding).

Lengths on a GPU are read only on the device: no call waits for the GPU, and a captured graph can be replayed with other
lengths. There are two exceptions, both with dropout in a variable-length batch: return_attn_probs, and a max_seqlen
that is a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks, kvcache, ops  # noqa: F401  ops registers torch.ops.dash_attn
from .calls import attention
from .dropout import DropoutBits
from .schedule import Schedule


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
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    schedule: Schedule = "auto",
    dropout_bits: DropoutBits | None = None,
    startend_row_indices: Tensor | None = None,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention O = softmax(c Q K^T) V with deterministic gradients.

    The score of query i and key j of a head is S_ij = c q_i . k_j, unless softcap or alibi_slopes change it. Over the
    keys j that query i sees, with the head's sink s (without a sink there is no e^s),

        LSE_i = log(e^s + sum_j e^(S_ij))    O_i = sum_j e^(S_ij - LSE_i) v_j

    The gradients are FlashAttention-2's (arXiv 2307.08691), summed in the order of `schedule` (DASH, arXiv 2601.21824).

    Args:
        q: (batch, seqlen_q, heads, head_dim), bf16 or fp16, head_dim from 1 to 256, on a CUDA, CPU or meta device. Any
            strides. Tensors that the kernels cannot address are copied: those whose last dimension is not contiguous,
            or whose base or strides are not multiples of 16 bytes. A head_dim that is not a multiple of 8 is padded.
        k: (batch, seqlen_k, kv_heads, head_dim), like q. kv_heads divides heads, and query head h uses KV head
            h // (heads // kv_heads).
        v: (batch, seqlen_k, kv_heads, value_head_dim), like q. value_head_dim is from 1 to 256 and may differ from
            head_dim.
        dropout_p: probability of dropping an element of the softmax, at least 0 and below 1 in fp32; None means 0. Kept
            elements are divided by 1 - dropout_p. The log-sum-exp is the one without dropout. Without dropout_bits the
            mask follows from a state drawn by torch's generator of q's device (`dash_attn.dropout`).
        softmax_scale: c, any number whose product with log2(e) is finite in fp32. Default: 1 / sqrt(head_dim). Under
            torch.compile each value compiles its own graph.
        causal: use the causal mask, aligned at the bottom right: query i sees the keys j <= i + seqlen_k - seqlen_q. A
            query that sees no key has output 0, gradients 0 and log-sum-exp +inf, or the sink if there is one above
            -inf.
        window_size: (left, right): query i sees the keys from p - left to p + right, where p = i + seqlen_k - seqlen_q
            is its position. A negative number or None means no limit. causal sets right to 0, and (-1, 0) is the causal
            mask. Any sequence of two integers, including an array or a tensor; for a tensor on a GPU the call waits
            for the GPU.
        softcap: t > 0 makes the scores S_ij = t tanh(c q_i . k_j / t), before the mask. None or 0 or less: none.
        alibi_slopes: fp32 (heads,) or (batch, heads), on q's device. Slope m makes the scores of its head
            S_ij = c q_i . k_j - m |p - j|, with p as in window_size. Slopes get no gradient and must not require one.
            They cannot be combined with softcap. Default: none.
        deterministic: accepted for compatibility. Gradients are deterministic for either value.
        return_attn_probs: also return the log-sum-exp, which has a gradient, and a third tensor: the dropped-out
            probabilities with dropout, as in FlashAttention-2, and an empty tensor without.
        learnable_sink, s_aux: two names of one argument: (heads,), any floating-point dtype, on q's device. The sink s
            of a head is the score of a key without a value that every query sees. It is neither scaled, capped nor
            masked. A sink of 0 adds 1 to the denominator of the softmax ("off by one"), and -inf adds nothing. The
            gradient has the sink's dtype. It is summed over the queries of each sequence and then over the sequences,
            in an order that only the sequences determine. Default: none.
        attention_chunk: FlashAttention-3's. Of the keys that the mask leaves, query i sees those of its own chunk, with
            j // attention_chunk = p // attention_chunk. 0 or None: all.
        qv, q_descale, k_descale, v_descale: FlashAttention-3's; must be None.
        num_splits, pack_gqa: FlashAttention-3's tuning hints, an int, and None or a bool; accepted and ignored. A row's
            keys are never split.
        sm_margin: number of SMs that our kernels leave to others, at least 0 and less than the GPU has; on any device
            less than 144, which no Hopper GPU exceeds. It changes no bits. torch's own kernels, which pad, copy or
            negate if a call needs it, ignore it.
        schedule: the order of sums in the backward: "auto" (the same as "descending" at every shape) or a name in
            `dash_attn.schedule.POLICIES`. The gradients of two schedules differ in their last bits. All schedules but
            one add the parts of dq in fp32 in a fixed order, in which each part waits for the parts before it.
            "order_free" rounds the parts to multiples of a unit that follows from the inputs, and adds integers, which
            need no order. If a query attends about evenly to runs of 16 or more keys, this changes its row of dq by at
            most 1e-4 of the row's norm; other rows may change by more. Heads whose inputs leave no room for this are
            added in order (docs/order_free.md has the guarantees). "order_free" supports plain scores without dropout
            up to head dim 128. "auto" has smaller errors.
        dropout_bits: the bits that say what to drop, which `dash_attn.dropout.dropout_bits` generates for dropout_p,
            this batch, these query heads and these lengths (in a variable-length batch at least the lengths of the
            longest sequence). The call keeps them for the backward, unless they were generated with keep_bits=False. In
            that case, and without dropout_bits, the backward generates them again from the state. Default: none.
        startend_row_indices: int32 (batch, 1 or kv_heads, seqlen_k, n), on q's device: FlashMask's masks by key
            columns, which `dash_attn.masks` makes. Each key has n bounds of intervals of query rows that do not see the
            key, in addition to what the arguments above hide. With causal, n is 1 (rows >= s0) or 2 (s0 <= row < s1).
            Without causal, n is 2 (rows >= s0, and rows < s1) or 4 (s0 <= row < s1, and s2 <= row < s3). The tensor
            gets no gradient. It cannot be combined with dropout, softcap, alibi_slopes, DTensors or a schedule other
            than "auto" and "descending". Default: none.
        return_max_logits: also return the largest logit of each head (the maximum that QK-clip of MuonClip needs), as a
            last element of the result. The forward finds it in the same pass. Not with DTensors, under transforms of
            torch.func or, on a GPU, with dropout, softcap or alibi_slopes. Default: no.

    Flags may be Python or numpy bools, 0 or 1.

    Returns:
        out: (batch, seqlen_q, heads, value_head_dim), like q. With return_attn_probs (out, softmax_lse, empty):
        softmax_lse is fp32 (batch, heads, seqlen_q), natural logarithm, and its gradient is ignored where it is
        infinite; empty is (0,), like q. With dropout the third tensor is (batch, heads, seqlen_q, seqlen_k), like q,
        both lengths rounded up to multiples of 128: the probabilities before dropout, negative where an element was
        dropped, and 0 where a query does not see a key. In a variable-length batch the lengths are those of the longest
        sequence: on a GPU the call waits to read them and cannot be captured in a graph; on a meta device it is (0,).
        With return_max_logits (out, max_logits), or (out, softmax_lse, empty, max_logits): max_logits is fp32 (batch,
        heads), the largest S_ij of the head over all queries i of the sequence and the keys j that i sees. Sinks and
        dropout do not affect it. It is -inf if no query sees a key, and NaN if an S_ij is NaN or +inf. It has no
        gradient, and its bits depend only on the head's inputs in that sequence.

    Raises:
        NotImplementedError: an argument is not supported, or softcap and alibi_slopes are both given.
        TypeError, ValueError: an argument has a wrong type, dtype, shape or value; the message names it.
        RuntimeError: CUDA tensors without the compiled kernels or without a Hopper GPU; a second differentiation; in a
            graph capture, dropout in a variable-length batch with return_attn_probs or a max_seqlen that is a tensor.
    """
    return attention(
        torch.ops.dash_attn.attention.default, {"q": q, "k": k, "v": v}, (),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        learnable_sink, s_aux, qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin,
        schedule, dropout_bits, startend_row_indices, return_max_logits,
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
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    schedule: Schedule = "auto",
    dropout_bits: DropoutBits | None = None,
    startend_row_indices: Tensor | None = None,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` for keys and values in one tensor, which get one gradient.

    Args:
        q: (batch, seqlen_q, heads, head_dim), bf16 or fp16.
        kv: (batch, seqlen_k, 2, kv_heads, head_dim), like q.

    The other arguments, the result, the errors and the bits are those of `flash_attn_func`.
    """
    return attention(
        torch.ops.dash_attn.attention_kvpacked.default, {"q": q, "kv": kv}, (),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        learnable_sink, s_aux, qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin,
        schedule, dropout_bits, startend_row_indices, return_max_logits,
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
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    schedule: Schedule = "auto",
    dropout_bits: DropoutBits | None = None,
    startend_row_indices: Tensor | None = None,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` for queries, keys and values in one tensor, which get one gradient.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), bf16 or fp16; with `num_heads_q`
            (batch, seqlen, num_heads_q + 2 * kv_heads, head_dim): query heads, then key heads, then value heads.
        num_heads_q: number of query heads of a four-dimensional qkv; a multiple of kv_heads.

    The other arguments, the result, the errors and the bits are those of `flash_attn_func`.
    """
    return attention(
        torch.ops.dash_attn.attention_qkvpacked.default, {"qkv": qkv}, (checks.as_num_heads_q(num_heads_q),),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        learnable_sink, s_aux, qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin,
        schedule, dropout_bits, startend_row_indices, return_max_logits,
    )  # fmt: skip


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
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    schedule: Schedule = "auto",
    dropout_bits: DropoutBits | None = None,
    startend_row_indices: Tensor | None = None,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_func` of each sequence of a variable-length batch.

    Sequence b has the queries in rows cu_seqlens_q[b], ..., cu_seqlens_q[b + 1] - 1 of q, and its keys and values in
    rows of k and v in the same way. The mask of a sequence follows from its own lengths. Sequences may be empty. Rows
    that belong to no sequence (past the last offset, or between the end of `seqused` and the next offset) may contain
    any values. They affect no sequence, and have output 0, log-sum-exp +inf and gradients 0, even with sinks.

    Args:
        q: (total_q, heads, head_dim), bf16 or fp16, as in `flash_attn_func`.
        k: (total_k, kv_heads, head_dim), like q.
        v: (total_k, kv_heads, value_head_dim), like q.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), contiguous, on q's device: where each sequence begins and ends.
            They start at 0 or more, never decrease, and end at total or less. Other values raise ValueError on a CPU,
            and cause a device-side error on a GPU, like an index out of bounds.
        max_seqlen_q, max_seqlen_k: an int, or an integer tensor of shape (), which is not read. FlashAttention's hints
            for the longest sequence; they change nothing. With dropout_p above 0 and no dropout_bits they must be at
            least the longest length, because random bits are generated for that many rows. A tensor is then read, and
            the call waits for its GPU. A longer sequence raises ValueError on a CPU, and causes a device-side error on
            a GPU.
        block_table: int32 (batch, max_blocks) on q's device: k and v are pages, (num_blocks, block_size, kv_heads,
            head_dim or value_head_dim), and a sequence has its keys in the blocks of its row, in order. `cu_seqlens_k`
            then only gives the number of keys of each sequence, and `seqused_k` overrides it. Pages are read or
            copied as in `flash_attn_with_kvcache`. Dropout, or a gradient that is required, raises NotImplementedError.
            Default: none.
        seqused_q, seqused_k: int32 (batch,) like cu_seqlens: number of rows of each sequence, at most those up to the
            next offset. Default: all.
        startend_row_indices: int32 (1 or kv_heads, total_k, n), as in `flash_attn_func`. Query rows count from the
            first query of the key's sequence. Not with block_table.
        return_max_logits: as in `flash_attn_func`. Not with block_table.

    The other arguments and the errors are those of `flash_attn_func`.

    Returns:
        out: (total_q, heads, value_head_dim), like q. With return_attn_probs (out, softmax_lse, empty) as in
        `flash_attn_func`, with softmax_lse fp32 (heads, total_q). With return_max_logits the last element is fp32
        (batch, heads): the largest logit of each head of each sequence.
    """
    pack = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k
    }  # fmt: skip
    max_seqlens = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if block_table is not None:
        checks.reject_unsupported(qv, q_descale, k_descale, v_descale, num_splits, pack_gqa)
        checks.reject_given("block_table is given", startend_row_indices=startend_row_indices)
        checks.reject_flag("return_max_logits", return_max_logits, "block_table is given")
        return kvcache.varlen_attention(
            q, k, v, block_table, pack, max_seqlens, dropout_p=dropout_p, dropout_bits=dropout_bits,
            deterministic=deterministic, return_attn_probs=return_attn_probs, schedule=schedule,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, s_aux=s_aux, attention_chunk=attention_chunk,
            sm_margin=sm_margin,
        )  # fmt: skip
    return attention(
        torch.ops.dash_attn.attention.default, {"q": q, "k": k, "v": v}, (),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        learnable_sink, s_aux, qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin,
        schedule, dropout_bits, startend_row_indices, return_max_logits, pack, max_seqlens,
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
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    schedule: Schedule = "auto",
    dropout_bits: DropoutBits | None = None,
    startend_row_indices: Tensor | None = None,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_varlen_func` for keys and values in one tensor, which get one gradient.

    Args:
        q: (total_q, heads, head_dim), bf16 or fp16.
        kv: (total_k, 2, kv_heads, head_dim), like q.

    The other arguments, the result, the errors and the bits are those of `flash_attn_varlen_func`.
    """
    pack = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k
    }  # fmt: skip
    max_seqlens = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return attention(
        torch.ops.dash_attn.attention_kvpacked.default, {"q": q, "kv": kv}, (),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        learnable_sink, s_aux, qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin,
        schedule, dropout_bits, startend_row_indices, return_max_logits, pack, max_seqlens,
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
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    schedule: Schedule = "auto",
    dropout_bits: DropoutBits | None = None,
    startend_row_indices: Tensor | None = None,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_varlen_func` for queries, keys and values in one tensor, which get one gradient.

    Args:
        qkv: (total, 3, heads, head_dim), bf16 or fp16; with `num_heads_q`
            (total, num_heads_q + 2 * kv_heads, head_dim): query heads, then key heads, then value heads.
        cu_seqlens, max_seqlen, seqused: those of both the queries and the keys.
        num_heads_q: number of query heads of a three-dimensional qkv; a multiple of kv_heads.

    The other arguments, the result, the errors and the bits are those of `flash_attn_varlen_func`.
    """
    pack, max_seqlens = {"cu_seqlens": cu_seqlens, "seqused": seqused}, {"max_seqlen": max_seqlen}
    return attention(
        torch.ops.dash_attn.attention_qkvpacked.default, {"qkv": qkv}, (checks.as_num_heads_q(num_heads_q),),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        learnable_sink, s_aux, qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin,
        schedule, dropout_bits, startend_row_indices, return_max_logits, pack, max_seqlens,
    )  # fmt: skip

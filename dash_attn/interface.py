"""Drop-in replacements for FlashAttention's functions whose gradients have the same bits every run.

Names, order and defaults of the arguments are FlashAttention-2's; FlashAttention-3's further arguments follow as
keywords. An argument that asks for what is not there yet raises NotImplementedError; tuning hints are ignored.

On CUDA tensors the kernels need a Hopper GPU. CPU tensors are computed by `dash_attn.reference`, slowly, with the same
checks. Gradients are a function of the inputs and of `schedule` alone, of each sequence by itself: in a pack, sequences
of many lengths one behind the other without padding, a sequence has the bits that it has alone, whatever else is there.
On CUDA tensors lengths are read on the device only: no call waits for it, and a captured graph may be replayed with
other lengths. Two calls with dropout of a pack are the exception: one with return_attn_probs, and one whose max_seqlen
is a tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import checks, dtensors, kvcache, ops, packs, transforms  # noqa: F401  ops registers torch.ops.dash_attn
from .dropout import DropoutBits
from .dropout import calls as dropout_calls
from .schedule import Schedule

# In the order of _attention's `scores`, `dropout` and `unsupported`, and the same objects as the functions' defaults:
# those of one module are.
_SELDOM_DEFAULTS = (0.0, None, None, None, 0.0, None, None, None, None, None, 1, None)
_ANY_WINDOW = (-1, -1)
_NO_WINDOW = (-1, -1, 0)  # left, right, attention_chunk


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
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention O = softmax(c Q K^T) V, exact, with deterministic gradients.

    For query i and key j of a head the score is S_ij = c q_i . k_j, or what softcap and alibi_slopes make of it; then

        LSE_i = log(e^s + sum_j e^(S_ij))    O_i = sum_j e^(S_ij - LSE_i) v_j

    over the keys j that query i sees, s being the head's sink; without one there is no e^s. The gradients are
    FlashAttention-2's (arXiv 2307.08691), their sums taken in the order of `schedule` (DASH, arXiv 2601.21824).

    Args:
        q: (batch, seqlen_q, heads, head_dim), bf16 or fp16, head_dim from 1 to 256. Any strides: what the kernels
            cannot address (a last dimension that is not contiguous, a base or a stride that is not a multiple of 16
            bytes) is copied, and a head_dim that is not a multiple of 8 is padded with zeros. On a CUDA, CPU or meta
            device.
        k: (batch, seqlen_k, kv_heads, head_dim), like q; kv_heads divides heads, and query head h uses KV head
            h // (heads // kv_heads).
        v: (batch, seqlen_k, kv_heads, value_head_dim), like q; value_head_dim is from 1 to 256 and may differ from
            head_dim.
        dropout_p: probability of dropping an element of the softmax, from 0 to below 1 in fp32; None is 0. What is
            kept is divided by 1 - dropout_p; the log-sum-exp is the one without dropout. Without dropout_bits the mask
            is made of a state that torch's generator of q's device draws (`dash_attn.dropout`).
        softmax_scale: c, any number whose product with log2(e) is finite in fp32. Default: 1 / sqrt(head_dim). Under
            torch.compile each value is a graph of its own.
        causal: mask aligned at the bottom right: query i sees the keys j <= i + seqlen_k - seqlen_q. A query that sees
            no key has output 0, gradients 0 and log-sum-exp +inf, or the sink, where there is one above -inf.
        window_size: (left, right): query i sees the keys from p - left to p + right, p = i + seqlen_k - seqlen_q being
            its own. A negative number or None is unbounded; causal sets right to 0, and (-1, 0) is the causal mask.
            Any sequence of two integers, also an array or a tensor; the call waits to read one that is on a GPU.
        softcap: t > 0 makes scores S_ij = t tanh(c q_i . k_j / t), before the mask. At most 0, or None: as they are.
        alibi_slopes: fp32 (heads,) or (batch, heads), on q's device: m makes the scores of its head
            S_ij = c q_i . k_j - m |p - j|, with p as in window_size. They get no gradient, and must not require one.
            Not together with softcap. Default: none.
        deterministic: accepted for compatibility; gradients are deterministic for either value.
        return_attn_probs: also return the log-sum-exp, which has a gradient, and, where FlashAttention-2 returns the
            dropped-out probabilities, these with dropout and else an empty tensor.
        learnable_sink, s_aux: two names of one argument: (heads,), any floating-point dtype, on q's device. The sink s
            of each head, the score of a key that every query sees and that has no value; it is neither scaled nor
            capped nor masked, and -inf is none. Its gradient has its dtype, and is summed in an order that the
            sequences alone fix: over the queries of each, then over the sequences. Softmax with 1 added to its
            denominator ("off by one") is a sink of 0. Default: none.
        attention_chunk: FlashAttention-3's: of the keys that the mask leaves, query i sees those of its own chunk, keys
            j with j // attention_chunk = p // attention_chunk. 0 or None: all.
        qv, q_descale, k_descale, v_descale: FlashAttention-3's; None only.
        num_splits, pack_gqa: FlashAttention-3's tuning hints, an int and None or a bool; accepted and ignored. A row's
            keys are never split.
        sm_margin: SMs that our kernels leave to others; at least 0 and less than the GPU has, on any device less than
            144, which no Hopper GPU exceeds. Changes no bits. torch's own kernels, which pad, copy or negate where a
            call needs it, take the SMs they like.
        schedule: how the backward sums: a name of `dash_attn.schedule.POLICIES` or "auto", which is "descending" at
            every shape. Each has its own last bits. All but one add the parts of dq in fp32, in an order of their own,
            and a part waits for those before it; "order_free" rounds the parts to multiples of a unit that the inputs
            fix and adds integers, which need no order. That moves a row of dq that attends about evenly to runs of 16
            or more keys by at most 1e-4 of its norm; other rows may move by more of theirs. Heads whose inputs leave
            no room for it are added in order after all (docs/order_free.md). "order_free" supports plain scores and
            dropout up to head dim 128. "auto" is an ordered sum: its errors are the smaller ones for any inputs.
        dropout_bits: what to drop, from `dash_attn.dropout.dropout_bits` for dropout_p, this batch, these query heads
            and these lengths (of a pack, those of its longest sequence, or longer). They are kept for the backward,
            unless they were made with keep_bits=False; then, and without them, it makes them of a state. Default: none.

    Flags may be Python's or numpy's bools, 0 or 1.

    Returns:
        out: (batch, seqlen_q, heads, value_head_dim), like q; with return_attn_probs (out, softmax_lse, empty),
        softmax_lse fp32 (batch, heads, seqlen_q), natural logarithm, empty (0,), like q. Where the log-sum-exp is
        infinite, its gradient is not looked at. With dropout, in the place of empty: (batch, heads, seqlen_q, seqlen_k)
        like q, both lengths rounded up to multiples of 128, the probabilities before dropout with the sign - where an
        element was dropped, and 0 where a query does not see a key. Of a pack the lengths are those of its longest
        sequence: on a GPU the call waits to read them and cannot be captured in a graph, and on a meta device (0,).

    Raises:
        NotImplementedError: an argument asks for what is not supported, or softcap and alibi_slopes are both given.
        TypeError, ValueError: an argument has a wrong type, dtype, shape or value; the message names it.
        RuntimeError: CUDA tensors without the compiled kernels or without a Hopper GPU; a second differentiation; in
            the capture of a graph, with dropout of a pack, return_attn_probs or a max_seqlen that is a tensor.
    """
    return _attention(
        torch.ops.dash_attn.attention.default, {"q": q, "k": k, "v": v}, (),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        learnable_sink, s_aux, qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin,
        schedule, dropout_bits,
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
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_func` for keys and values in one tensor; the gradient is written into one tensor too.

    Args:
        q: (batch, seqlen_q, heads, head_dim), bf16 or fp16.
        kv: (batch, seqlen_k, 2, kv_heads, head_dim), like q.

    The other arguments, the result and the errors are those of `flash_attn_func`, and so are the bits.
    """
    return _attention(
        torch.ops.dash_attn.attention_kvpacked.default, {"q": q, "kv": kv}, (),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        learnable_sink, s_aux, qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin,
        schedule, dropout_bits,
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
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_func` for queries, keys and values in one tensor; the gradient is written into one tensor too.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), bf16 or fp16; with `num_heads_q`
            (batch, seqlen, num_heads_q + 2 * kv_heads, head_dim): query heads, then key heads, then value heads.
        num_heads_q: number of query heads of a four-dimensional qkv; a multiple of kv_heads.

    The other arguments, the result and the errors are those of `flash_attn_func`, and so are the bits.
    """
    return _attention(
        torch.ops.dash_attn.attention_qkvpacked.default, {"qkv": qkv}, (checks.as_num_heads_q(num_heads_q),),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        learnable_sink, s_aux, qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin,
        schedule, dropout_bits,
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
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_func` of each sequence of a pack.

    Sequence b has the queries in rows cu_seqlens_q[b], ..., cu_seqlens_q[b + 1] - 1 of q, and its keys and values in
    rows of k and v in the same way; every mask is that of its own lengths. Sequences may be empty. Rows of no sequence,
    past the last offset or between the end of `seqused` and the next offset, may hold anything: they reach no sequence,
    and have output 0, log-sum-exp +inf and gradients 0, with sinks too.

    Args:
        q: (total_q, heads, head_dim), bf16 or fp16, as in `flash_attn_func`.
        k: (total_k, kv_heads, head_dim), like q.
        v: (total_k, kv_heads, value_head_dim), like q.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), contiguous, on q's device: where each sequence begins and ends.
            They start at 0 or more, never decrease and end at total or less. Others are a ValueError on the CPU, and on
            a GPU an error on the device, as an index out of bounds is.
        max_seqlen_q, max_seqlen_k: an int, or an integer tensor of shape (), which is not read. FlashAttention's hints
            of the longest sequence; they change nothing. With dropout_p above 0 and no dropout_bits they must be no
            less than the longest, because random bits are made for so many rows. A tensor is then read: the call waits
            for its GPU. A sequence beyond them is a ValueError on the CPU, and on a GPU an error on the device, as an
            index out of bounds is.
        block_table: int32 (batch, max_blocks) on q's device: k and v are pages, (num_blocks, block_size, kv_heads,
            head_dim or value_head_dim), and a sequence has its keys in the blocks of its row, in order. `cu_seqlens_k`
            then only gives the number of keys of each sequence; `seqused_k` overrides it. Pages are gathered into a
            copy in every call. Dropout, or a gradient that is required, raises NotImplementedError. Default: none.
        seqused_q, seqused_k: int32 (batch,) like cu_seqlens: how many rows of a sequence there are, at most those up
            to the next offset. Default: all.

    The other arguments and the errors are those of `flash_attn_func`.

    Returns:
        out: (total_q, heads, value_head_dim), like q; with return_attn_probs (out, softmax_lse, empty) as from
        `flash_attn_func`, softmax_lse fp32 (heads, total_q).
    """
    pack = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k
    }  # fmt: skip
    max_seqlens = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if block_table is not None:
        checks.reject_unsupported(qv, q_descale, k_descale, v_descale, num_splits, pack_gqa)
        return kvcache.varlen_attention(
            q, k, v, block_table, pack, max_seqlens, dropout_p=dropout_p, dropout_bits=dropout_bits,
            deterministic=deterministic, return_attn_probs=return_attn_probs, schedule=schedule,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, s_aux=s_aux, attention_chunk=attention_chunk,
            sm_margin=sm_margin,
        )  # fmt: skip
    return _attention(
        torch.ops.dash_attn.attention.default, {"q": q, "k": k, "v": v}, (),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        learnable_sink, s_aux, qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin,
        schedule, dropout_bits, pack, max_seqlens,
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
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_varlen_func` for keys and values in one tensor; the gradient is written into one tensor too.

    Args:
        q: (total_q, heads, head_dim), bf16 or fp16.
        kv: (total_k, 2, kv_heads, head_dim), like q.

    The other arguments, the result and the errors are those of `flash_attn_varlen_func`, and so are the bits.
    """
    pack = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k
    }  # fmt: skip
    max_seqlens = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return _attention(
        torch.ops.dash_attn.attention_kvpacked.default, {"q": q, "kv": kv}, (),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        learnable_sink, s_aux, qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin,
        schedule, dropout_bits, pack, max_seqlens,
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
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_varlen_func` for queries, keys and values in one tensor; the gradient is written into one tensor too.

    Args:
        qkv: (total, 3, heads, head_dim), bf16 or fp16; with `num_heads_q`
            (total, num_heads_q + 2 * kv_heads, head_dim): query heads, then key heads, then value heads.
        cu_seqlens, max_seqlen, seqused: of the queries and of the keys alike.
        num_heads_q: number of query heads of a three-dimensional qkv; a multiple of kv_heads.

    The other arguments, the result and the errors are those of `flash_attn_varlen_func`, and so are the bits.
    """
    pack, max_seqlens = {"cu_seqlens": cu_seqlens, "seqused": seqused}, {"max_seqlen": max_seqlen}
    return _attention(
        torch.ops.dash_attn.attention_qkvpacked.default, {"qkv": qkv}, (checks.as_num_heads_q(num_heads_q),),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        learnable_sink, s_aux, qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin,
        schedule, dropout_bits, pack, max_seqlens,
    )  # fmt: skip


def _attention(
    op: Callable[..., tuple[Tensor, Tensor]],
    named: dict[str, Tensor],
    split: tuple[int | None, ...],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    learnable_sink: Tensor | None,
    s_aux: Tensor | None,
    qv: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    attention_chunk: int,
    num_splits: int,
    pack_gqa: bool | None,
    sm_margin: int,
    schedule: str,
    dropout_bits: DropoutBits | None,
    pack: dict[str, Tensor | None] | None = None,
    max_seqlens: dict[str, int | Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Calls `op`, which checks the tensors, on arguments of the types that it takes.

    This is on the path of every call: what is at its default, or of the right type already, is not looked at again.
    """
    scores = (softcap, alibi_slopes, learnable_sink, s_aux)
    dropout = (dropout_p, dropout_bits)
    unsupported = (qv, q_descale, k_descale, v_descale, num_splits, pack_gqa)
    of_scores: dict[str, object] = {}
    of_dropout: dict[str, object] = {}
    is_seldom = any(map(operator.is_not, (*scores, *dropout, *unsupported), _SELDOM_DEFAULTS))
    if is_seldom:
        checks.reject_unsupported(*unsupported)
        of_scores = checks.as_scores(*scores)
    checks.check_tensors(named)
    probability = 0.0
    if is_seldom:
        probability = dropout_calls.checked_probability(*dropout, softmax_scale=softmax_scale, is_pack=pack is not None)
    if pack is not None and max_seqlens is not None:
        checks.check_tensors({name: x for name, x in pack.items() if x is not None or name.startswith("cu_seqlens")})
        for name, value in max_seqlens.items():
            if type(value) is not int or torch.compiler.is_compiling() or value < 0:
                checks.check_max_seqlen(name, value)
    if type(causal) is not bool:
        causal = checks.as_flag("causal", causal)
    if deterministic is not False and deterministic is not None:
        checks.as_flag("deterministic", deterministic)
    if type(return_attn_probs) is not bool:
        return_attn_probs = checks.as_flag("return_attn_probs", return_attn_probs)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = checks.as_number("softmax_scale", softmax_scale)
    if type(sm_margin) is not int or sm_margin:
        sm_margin = checks.as_sm_margin(sm_margin)
    if type(schedule) is not str or schedule not in checks.SCHEDULES:
        checks.check_schedule(schedule)
    extra: tuple[object, ...] = ()
    # Of arrays and tensors the type alone is looked at here: they say neither yes nor no.
    is_usual = type(window_size) is tuple and type(attention_chunk) is int
    if not is_usual or window_size != _ANY_WINDOW or attention_chunk:
        extra = (*checks.as_window(window_size), checks.as_attention_chunk(attention_chunk))
    if pack is not None:
        extra = (*(extra or _NO_WINDOW), *pack.values())
        if checks.CHECKS_VALUES:
            packs.check_lengths(named, pack)
    num_heads_q = split[0] if split else None
    if dtensors.are_among(named.values(), of_scores.values(), pack.values() if pack else ()):
        op = dtensors.on_local_parts(op, named, pack, num_heads_q, of_scores, probability)
    if probability:  # last, as it may draw random numbers
        left, right, chunk = extra[:3] or _NO_WINDOW
        of_dropout = dropout_calls.keywords(
            probability, dropout_bits, named, num_heads_q, mask=(causal, left, right, chunk), pack=pack,
            max_seqlens=max_seqlens, return_attn_probs=return_attn_probs,
        )  # fmt: skip
    settings = (softmax_scale, causal, schedule, sm_margin, *extra)
    call = transforms.transformed(op) if transforms.is_active() else op
    out, softmax_lse = call(*named.values(), *split, *settings, **of_scores, **of_dropout)
    if not return_attn_probs:
        return out
    if not of_dropout:
        return out, softmax_lse, out.new_empty(0)
    left, right, chunk = extra[:3] or _NO_WINDOW
    mask = {"causal": causal, "window": (left, right), "attention_chunk": chunk}
    changed = {"softmax_scale": softmax_scale, "softcap": of_scores["softcap"], "alibi_slopes": alibi_slopes}
    signed = dropout_calls.signed_probabilities(named, num_heads_q, softmax_lse, pack, of_dropout, changed, **mask)
    return out, softmax_lse, signed

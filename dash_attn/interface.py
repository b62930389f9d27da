"""Drop-in replacements for FlashAttention's functions whose gradients have the same bits every run.

Names, order and defaults of the arguments are FlashAttention-2's; FlashAttention-3's further arguments follow as keywords. An
argument that is not supported yet raises NotImplementedError unless it is at its default: none is ignored.

On CUDA tensors the kernels need a Hopper GPU. CPU tensors are computed by `dash_attn.reference`, slowly, with the same
checks. Gradients are a function of the inputs and of `schedule` alone.
"""

import functools

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from . import checks, ops

_HEAD_DIM_MULTIPLE = 8


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    attention_chunk=0,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
    schedule="auto",
):
    """Attention O = softmax(c Q K^T) V, exact, with deterministic gradients.

    The gradients are FlashAttention-2's (arXiv 2307.08691), their sums taken in the order of `schedule` (DASH, arXiv 2601.21824).

    Args:
        q: (batch, seqlen_q, heads, head_dim), bf16 or fp16, head_dim up to 128. Any strides; what the kernels cannot address (a last
            dimension that is not contiguous, a base or a stride that is not a multiple of 16 bytes) is copied, and a
            head_dim that is not a multiple of 8 is padded with zeros.
        k, v: (batch, seqlen_k, kv_heads, head_dim), like q; kv_heads divides heads, and query head h uses
            KV head h // (heads // kv_heads).
        dropout_p: 0.0 only.
        softmax_scale: c, any finite number. Default: 1 / sqrt(head_dim).
        causal: mask aligned at the bottom right: query i sees the keys j <= i + seqlen_k - seqlen_q. A query that sees no key
            has output 0, log-sum-exp +inf and gradients 0.
        window_size, softcap, alibi_slopes: (-1, -1), 0.0 and None only.
        deterministic: accepted for compatibility; gradients are deterministic for either value.
        return_attn_probs: also return the log-sum-exp, and None where FlashAttention-2 returns the dropped-out
            probabilities, which are empty without dropout.
        qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa: FlashAttention-3's; None, None, None, None, 0,
            1 and None only.
        sm_margin: SMs that the backward leaves to other kernels; at least 0 and less than the GPU has. Changes no bits.
        schedule: the order of the backward's sums: a name of `dash_attn.schedule.POLICIES` or "auto", which chooses by shape.
            Each has its own last bits.

    Returns:
        out: (batch, seqlen_q, heads, head_dim), like q; with return_attn_probs (out, softmax_lse, None), softmax_lse fp32
        (batch, heads, seqlen_q), natural logarithm, not differentiable.

    Raises:
        NotImplementedError: an unsupported argument is not at its default.
        TypeError, ValueError: an argument has a wrong type, dtype, shape or value; the message names it.
        RuntimeError: CUDA tensors without the compiled kernels or without a Hopper GPU; a second differentiation.
    """
    checks.reject_unsupported(
        dropout_p=dropout_p, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, qv=qv, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk, num_splits=num_splits, pack_gqa=pack_gqa,
    )  # fmt: skip
    checks.check_qkv(q, k, v)
    return _attention(
        _unpack_nothing, (q, k, v), softmax_scale, causal, deterministic, return_attn_probs, sm_margin, schedule
    )


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    attention_chunk=0,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
    schedule="auto",
):
    """`flash_attn_func` for keys and values in one tensor; the gradient is written into one tensor too.

    Args:
        q: (batch, seqlen_q, heads, head_dim), bf16 or fp16.
        kv: (batch, seqlen_k, 2, kv_heads, head_dim), like q.

    The other arguments, the result and the errors are those of `flash_attn_func`, and so are the bits.
    """
    checks.reject_unsupported(
        dropout_p=dropout_p, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, qv=qv, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk, num_splits=num_splits, pack_gqa=pack_gqa,
    )  # fmt: skip
    checks.check_q_kvpacked(q, kv)
    return _attention(_unpack_kv, (q, kv), softmax_scale, causal, deterministic, return_attn_probs, sm_margin, schedule)


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    attention_chunk=0,
    num_splits=1,
    pack_gqa=None,
    num_heads_q=None,
    sm_margin=0,
    schedule="auto",
):
    """`flash_attn_func` for queries, keys and values in one tensor; the gradient is written into one tensor too.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), bf16 or fp16; with `num_heads_q`
            (batch, seqlen, num_heads_q + 2 * kv_heads, head_dim), the query heads first, then the key and the value heads.
        num_heads_q: number of query heads of a four-dimensional qkv; a multiple of kv_heads.

    The other arguments, the result and the errors are those of `flash_attn_func`, and so are the bits.
    """
    checks.reject_unsupported(
        dropout_p=dropout_p, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, qv=qv, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk, num_splits=num_splits, pack_gqa=pack_gqa,
    )  # fmt: skip
    checks.check_qkvpacked(qkv, num_heads_q)
    unpack = _unpack_qkv if num_heads_q is None else functools.partial(_split_heads, num_heads_q=num_heads_q)
    return _attention(unpack, (qkv,), softmax_scale, causal, deterministic, return_attn_probs, sm_margin, schedule)


def _attention(unpack, packed, softmax_scale, causal, deterministic, return_attn_probs, sm_margin, schedule):
    checks.check_flags(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    checks.check_schedule(schedule, causal)
    checks.check_sm_margin(sm_margin, packed[0].device)
    if softmax_scale is None:
        softmax_scale = packed[0].shape[-1] ** -0.5
    else:
        checks.check_softmax_scale(softmax_scale)
    out, softmax_lse = _Attention.apply(unpack, float(softmax_scale), causal, schedule, sm_margin, *packed)
    return (out, softmax_lse, None) if return_attn_probs else out


class _Attention(torch.autograd.Function):
    """`unpack` turns the tensors as the caller packed them into views q, k and v; it serves their gradients as well."""

    @staticmethod
    def forward(ctx, unpack, softmax_scale, causal, schedule, sm_margin, *packed):
        head_dim = packed[0].shape[-1]
        packed = tuple(map(_pad_head_dim, packed))
        out, softmax_lse = ops.forward(*unpack(*packed), softmax_scale, causal)
        ctx.save_for_backward(*packed, out, softmax_lse)
        ctx.mark_non_differentiable(softmax_lse)
        # No zeros for the log-sum-exp's gradient.
        ctx.set_materialize_grads(False)
        ctx.unpack, ctx.softmax_scale, ctx.causal = unpack, softmax_scale, causal
        ctx.schedule, ctx.sm_margin, ctx.head_dim = schedule, sm_margin, head_dim
        return out[..., :head_dim], softmax_lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        *packed, out, softmax_lse = ctx.saved_tensors
        if dout is None:
            return (None,) * (5 + len(packed))
        gradients = tuple(torch.empty_like(t) for t in packed)
        ops.backward(
            _pad_head_dim(dout), *ctx.unpack(*packed), out, softmax_lse, *ctx.unpack(*gradients),
            ctx.softmax_scale, ctx.causal, ctx.schedule, ctx.sm_margin,
        )  # fmt: skip
        needed = ctx.needs_input_grad[5:]
        return (None,) * 5 + tuple(g[..., : ctx.head_dim] if n else None for g, n in zip(gradients, needed))


def _pad_head_dim(tensor):
    """Zeros up to a multiple of 8 change neither scores nor outputs, and their gradients are cut off again."""
    padding = -tensor.shape[-1] % _HEAD_DIM_MULTIPLE
    return F.pad(tensor, (0, padding)) if padding else tensor


def _unpack_nothing(q, k, v):
    return q, k, v


def _unpack_kv(q, kv):
    return q, *kv.unbind(dim=2)


def _unpack_qkv(qkv):
    return qkv.unbind(dim=2)


def _split_heads(qkv, num_heads_q):
    kv_heads = (qkv.shape[2] - num_heads_q) // 2
    return qkv.split((num_heads_q, kv_heads, kv_heads), dim=2)

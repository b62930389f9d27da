"""Drop-in replacements for FlashAttention's functions whose gradients have the same bits every run.

Names, order and defaults of the arguments are FlashAttention-2's; FlashAttention-3's further arguments follow as
keywords. An argument that is not supported yet raises NotImplementedError unless it is at its default: none is ignored.

On CUDA tensors the kernels need a Hopper GPU. CPU tensors are computed by `dash_attn.reference`, slowly, with the same
checks. Gradients are a function of the inputs and of `schedule` alone.
"""

import torch
import torch.nn.functional as F

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

    The gradients are FlashAttention-2's (arXiv 2307.08691), their sums taken in the order of `schedule` (DASH,
    arXiv 2601.21824).

    Args:
        q: (batch, seqlen_q, heads, head_dim), bf16 or fp16, head_dim from 1 to 128. Any strides: what the kernels
            cannot address (a last dimension that is not contiguous, a base or a stride that is not a multiple of 16
            bytes) is copied, and a head_dim that is not a multiple of 8 is padded with zeros.
        k, v: (batch, seqlen_k, kv_heads, head_dim), like q; kv_heads divides heads, and query head h uses KV head
            h // (heads // kv_heads).
        dropout_p: 0.0 only.
        softmax_scale: c, any finite number. Default: 1 / sqrt(head_dim).
        causal: mask aligned at the bottom right: query i sees the keys j <= i + seqlen_k - seqlen_q. A query that sees
            no key has output 0, log-sum-exp +inf and gradients 0.
        window_size, softcap, alibi_slopes: (-1, -1), 0.0 and None only.
        deterministic: accepted for compatibility; gradients are deterministic for either value.
        return_attn_probs: also return the log-sum-exp, and None where FlashAttention-2 returns the dropped-out
            probabilities, which are empty without dropout.
        qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa: FlashAttention-3's; None, None,
            None, None, 0, 1 and None only.
        sm_margin: SMs that the kernels leave to others; at least 0 and less than the GPU has. Changes no bits.
        schedule: how the backward sums: a name of `dash_attn.schedule.POLICIES` or "auto", which chooses by shape. Each
            has its own last bits. All but one add the parts of dq in fp32, in an order of their own, and a part waits for
            those before it; "order_free" rounds the parts to multiples of a unit that the inputs fix and adds integers,
            which need no order. That moves a row of dq by at most 1e-4 of its norm, but for rows whose gradient all but
            vanishes; heads whose inputs leave no room for it are added in order after all
            (docs/order_free.md). "auto" is an ordered sum: its errors are the smaller ones for any inputs.

    Returns:
        out: (batch, seqlen_q, heads, head_dim), like q; with return_attn_probs (out, softmax_lse, None), softmax_lse
        fp32 (batch, heads, seqlen_q), natural logarithm, not differentiable.

    Raises:
        NotImplementedError: an unsupported argument is not at its default.
        TypeError, ValueError: an argument has a wrong type, dtype, shape or value; the message names it.
        RuntimeError: CUDA tensors without the compiled kernels or without a Hopper GPU; a second differentiation.
    """
    checks.reject_unsupported(
        dropout_p=dropout_p,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
    )
    checks.check_qkv(q, k, v)
    return _attention(
        (q, k, v), None, softmax_scale, causal, deterministic, return_attn_probs, sm_margin, schedule
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
        dropout_p=dropout_p,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
    )
    checks.check_q_kvpacked(q, kv)
    return _attention((q, kv), None, softmax_scale, causal, deterministic, return_attn_probs, sm_margin, schedule)


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
            (batch, seqlen, num_heads_q + 2 * kv_heads, head_dim): query heads, then key heads, then value heads.
        num_heads_q: number of query heads of a four-dimensional qkv; a multiple of kv_heads.

    The other arguments, the result and the errors are those of `flash_attn_func`, and so are the bits.
    """
    checks.reject_unsupported(
        dropout_p=dropout_p,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
    )
    checks.check_qkvpacked(qkv, num_heads_q)
    return _attention((qkv,), num_heads_q, softmax_scale, causal, deterministic, return_attn_probs, sm_margin, schedule)


def _attention(packed, num_heads_q, softmax_scale, causal, deterministic, return_attn_probs, sm_margin, schedule):
    checks.check_flags(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    checks.check_schedule(schedule, causal)
    checks.check_sm_margin(sm_margin, packed[0].device)
    head_dim = packed[0].shape[-1]
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    else:
        checks.check_softmax_scale(softmax_scale)
    packed = map(_pad_head_dim, packed)
    out, softmax_lse = _Attention.apply(num_heads_q, float(softmax_scale), causal, schedule, sm_margin, *packed)
    out = out[..., :head_dim]
    return (out, softmax_lse, None) if return_attn_probs else out


class _Attention(torch.autograd.Function):
    """`packed` is what the caller gave: q, k and v in three tensors, two or one."""

    @staticmethod
    def forward(ctx, num_heads_q, softmax_scale, causal, schedule, sm_margin, *packed):
        out, softmax_lse = ops.forward(*_unpack(packed, num_heads_q), softmax_scale, causal, sm_margin)
        ctx.save_for_backward(*packed, out, softmax_lse)
        ctx.mark_non_differentiable(softmax_lse)
        # Spares the zeros that would stand for the log-sum-exp's gradient.
        ctx.set_materialize_grads(False)
        ctx.arguments = (num_heads_q, softmax_scale, causal, schedule, sm_margin)
        return out, softmax_lse

    @staticmethod
    def backward(ctx, dout, _):
        *packed, out, softmax_lse = ctx.saved_tensors
        skipped = (None,) * len(ctx.arguments)
        if dout is None:
            return (*skipped, *(None for _ in packed))
        # create_graph=True
        differentiable = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        compute = _Gradients.apply if differentiable else _gradients
        gradients = compute(*ctx.arguments, dout, out, softmax_lse, *packed)
        needed = ctx.needs_input_grad[len(skipped) :]
        return (*skipped, *(gradient if need else None for gradient, need in zip(gradients, needed)))


class _Gradients(torch.autograd.Function):
    """`_gradients`, such that differentiating the result raises instead of treating it as constant."""

    @staticmethod
    def forward(ctx, *arguments):
        return _gradients(*arguments)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("attention must be differentiated at most once, got a second differentiation of dash_attn")


def _gradients(num_heads_q, softmax_scale, causal, schedule, sm_margin, dout, out, softmax_lse, *packed):
    gradients = tuple(torch.empty_like(t) for t in packed)
    # Written through the views that q, k and v are read through: a packed gradient needs no copy.
    q, k, v = _unpack(packed, num_heads_q)
    dq, dk, dv = _unpack(gradients, num_heads_q)
    ops.backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, schedule, sm_margin)
    return gradients


def _pad_head_dim(tensor):
    """Zeros up to a multiple of 8 change neither scores nor outputs, and their gradients are cut off again."""
    padding = -tensor.shape[-1] % _HEAD_DIM_MULTIPLE
    return F.pad(tensor, (0, padding)) if padding else tensor


def _unpack(packed, num_heads_q):
    """Views q, k and v of one, two or three tensors."""
    if len(packed) == 3:
        return packed
    if len(packed) == 2:
        q, kv = packed
        return q, *kv.unbind(dim=2)
    (qkv,) = packed
    if num_heads_q is None:
        return qkv.unbind(dim=2)
    kv_heads = (qkv.shape[2] - num_heads_q) // 2
    return qkv.split((num_heads_q, kv_heads, kv_heads), dim=2)

"""Our backward on an output and a log-sum-exp that another forward made: FlashAttention-3's conventions, recorded.

FlashAttention-3's forward has a natural logarithm in fp32, (batch, heads, seqlen_q) or (heads, total_q), -inf for a
query that sees no key, and an output of the inputs' dtype. It sums in another order, so its output differs from ours by
about a rounding of its dtype, and its log-sum-exp by a few roundings of fp32.
"""

import example_support
import pytest
import torch
from compat_support import dense, packed, public, with_lse_of_no_key
from float64_reference import attention_float64, attention_in_dtype, attention_rounded, sequences_of
from interface_support import assert_same_bits

from dash_attn.compat import flash_attn_3


def foreign(q, k, v, **arguments):
    """Another forward: probabilities are rounded once they are normalised, not before as ours are, sums are those of
    float64, and the log-sum-exp is two roundings of fp32 away from its own."""
    no_dout, no_out = torch.zeros_like(q), torch.zeros_like(q)
    out = attention_rounded(q, k, v, no_dout, no_out, rounded_factors=False, **arguments)["out"]
    lse = attention_float64(q, k, v, **arguments).softmax_lse.float()
    noise = torch.randint(-2, 3, lse.shape, generator=torch.Generator().manual_seed(0)) * 2.0**-23
    return out.to(q.dtype), with_lse_of_no_key(lse * (1 + noise), -torch.inf)


def foreign_pack(q, k, v, cu_seqlens_q, cu_seqlens_k, **arguments):
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), -torch.inf)
    for rows, keys in zip(*(sequences_of(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k))):
        if rows.start < rows.stop and keys.start < keys.stop:
            found, found_lse = foreign(q[None, rows], k[None, keys], v[None, keys], **arguments)
            out[rows], lse[:, rows] = found[0], found_lse[0]
    return out, lse


def errors(gradients, exact):
    return [(x.double() - getattr(exact, name)).norm() for name, x in zip(("dq", "dk", "dv"), gradients)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_as_good_as_with_our_own_forward(dtype, causal):
    *tensors, dout = dense(48, 60, dtype=dtype, heads=4, kv_heads=2)
    own_out, own_lse, *own = public(tensors, dout, causal=causal)
    out, lse = foreign(*tensors, causal=causal)
    assert not torch.equal(out, own_out) and not torch.equal(lse, own_lse)
    gradients = [torch.full_like(x, torch.nan) for x in tensors]
    arguments = dict(zip(("dq", "dk", "dv"), gradients)) | {"is_causal": causal}
    flash_attn_3._flash_attn_backward(dout, *tensors, out, lse, **arguments)
    exact = attention_float64(*tensors, dout, causal=causal)
    eager = attention_in_dtype(*tensors, dout, causal=causal)
    bar = errors((eager.dq, eager.dk, eager.dv), exact)
    assert all(error <= limit for error, limit in zip(errors(gradients, exact), bar))
    # And about as near as with our own forward.
    assert all(x <= 1.1 * y for x, y in zip(errors(gradients, exact), errors(own, exact)))


@pytest.mark.parametrize("is_pack", [False, True])
def test_queries_without_keys_and_repeats(is_pack):
    """Their output is 0 and their log-sum-exp -inf; the gradients are 0 there, finite elsewhere, and the same again."""
    if is_pack:
        *tensors, dout, cu_seqlens_q, cu_seqlens_k = packed()
        lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": 25, "max_seqlen_k": 12}
        out, lse = foreign_pack(*tensors, cu_seqlens_q, cu_seqlens_k, causal=True)
    else:
        *tensors, dout = dense()
        lengths = {}
        out, lse = foreign(*tensors, causal=True)
    runs = []
    for _ in range(2):
        runs.append([torch.full_like(x, torch.nan) for x in tensors])
        arguments = dict(zip(("dq", "dk", "dv"), runs[-1])) | lengths | {"is_causal": True}
        flash_attn_3._flash_attn_backward(dout, *tensors, out, lse, **arguments)
    assert_same_bits(*runs)
    blind = (lse == -torch.inf).transpose(-1, -2)
    assert blind.any() and not runs[0][0][blind].any() and all(x.isfinite().all() for x in runs[0])


def test_the_function_that_is_put_in_place_of_flash_attention_3s():
    """As docs/integrations/foreign_forward.md does it; its autograd function calls it by position."""
    *tensors, dout = dense(48, 60)

    class OfFlashAttention3(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = foreign(q, k, v, softmax_scale=0.25, causal=True)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, lse = ctx.saved_tensors
            gradients = [torch.empty_like(x) for x in (q, k, v)]
            nothing = (None,) * 6
            options = (0.25, True, -1, -1, 0.0, False, 0)  # scale, causal, window, softcap, deterministic, sm_margin
            flash_attn_3._flash_attn_backward(dout, q, k, v, out, lse, *nothing, *gradients, *options)
            return tuple(gradients)

    inputs = [x.clone().requires_grad_() for x in tensors]
    runs = [torch.autograd.grad(OfFlashAttention3.apply(*inputs), inputs, dout) for _ in range(2)]
    assert_same_bits(*runs)
    exact = attention_float64(*tensors, dout, softmax_scale=0.25, causal=True)
    eager = attention_in_dtype(*tensors, dout, softmax_scale=0.25, causal=True)
    bar = errors((eager.dq, eager.dk, eager.dv), exact)
    assert all(error <= limit for error, limit in zip(errors(runs[0], exact), bar))


@pytest.mark.slow
def test_example():
    assert example_support.last_line("foreign_forward.py") == "the gradients of three runs have the same bits"

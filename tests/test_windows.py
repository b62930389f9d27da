"""window_size and attention_chunk on CPU tensors, from the public functions to the reference's sums."""

import itertools

import numpy as np
import pytest
import torch
from float64_reference import attention_float64, attention_in_dtype, error_limits, relative_error, visible_keys
from interface_support import FUNCTIONS, MASK, assert_same_bits, inputs_of, kernel_calls, out_and_gradients, qkv_tensors
from mask_support import WINDOWS, name_of, public, window
from products import spread

from dash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    reference,
)
from dash_attn.schedule import POLICIES, fitting, policy_number
from dash_attn.tile_order import tile_order

LENGTHS = [(1, 1), (1, 9), (9, 1), (17, 33), (33, 17), (40, 40), (7, 65), (65, 7)]
ONE_GRAPH = {"backend": "aot_eager", "fullgraph": True}


@pytest.mark.parametrize("mask", WINDOWS, ids=name_of)
@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTHS)
def test_formulas_in_float64(seqlen_q, seqlen_k, mask):
    """In small tiles, so that most are dead and many are cut."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2), (seqlen_q, 4)]
    q, k, v, dout = (torch.randn(2, s, h, 8, generator=generator, dtype=torch.float64) for s, h in shapes)
    out, lse = reference.forward(q, k, v, softmax_scale=0.25, **mask)
    expected = attention_float64(q, k, v, dout, softmax_scale=0.25, **mask)
    for policy in fitting(**mask):
        order = tile_order(policy, seqlen_q, seqlen_k, head_dim=8, tile_q=4, tile_k=8, **mask)
        gradients = reference.backward(dout, q, k, v, out, lse, softmax_scale=0.25, order=order, **mask)
        for a, e in zip((out, lse, *gradients), expected):
            torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", WINDOWS, ids=name_of)
def test_float64_reference_agrees_with_autograd(mask):
    generator = torch.Generator().manual_seed(0)
    shapes = [(19, 4), (30, 2), (30, 2), (19, 4)]
    q, k, v, dout = (torch.randn(2, s, h, 8, generator=generator, dtype=torch.float64) for s, h in shapes)
    expected, actual = (f(q, k, v, dout, softmax_scale=-0.7, **mask) for f in (attention_in_dtype, attention_float64))
    torch.testing.assert_close(actual.out, expected.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual[2:], expected[2:], rtol=1e-12, atol=1e-12)


SHAPES = [(64, (260, 260)), (128, (130, 300)), (100, (300, 130)), (64, (30, 127))]  # head_dim and lengths


# A mask hides the same elements in either dtype.
@pytest.mark.parametrize(
    "mask, shape, dtype",
    spread(
        itertools.product([*WINDOWS, window(100, 30), window(300, -1, 200)], SHAPES), [torch.bfloat16, torch.float16]
    ),
    ids=str,
)
def test_accuracy(mask, shape, dtype):
    head_dim, lengths = shape
    *inputs, dout = qkv_tensors(*lengths, 4, 2, head_dim, batch=1, dtype=dtype)
    actual = out_and_gradients(flash_attn_func, inputs, dout, **public(mask))
    with torch.no_grad():
        truth = attention_float64(*inputs, dout, **mask)
    limits = error_limits(truth, *inputs, dout, actual[0].detach(), rounded_factors=False, **mask)
    for (name, limit), x in zip(limits.items(), actual, strict=True):
        error = (x.detach().double() - getattr(truth, name)).norm()
        assert error <= limit, f"{name}: off by {error:.3e} in norm, allowed {limit:.3e}"


@pytest.mark.parametrize("mask", WINDOWS, ids=name_of)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(200, 65), (65, 200), (127, 1)])
def test_queries_and_keys_that_see_nothing(seqlen_q, seqlen_k, mask):
    *inputs, dout = qkv_tensors(seqlen_q, seqlen_k)
    out, lse, _ = flash_attn_func(*inputs, **public(mask), return_attn_probs=True)
    dq, dk, dv = torch.autograd.grad(out, inputs, dout)
    visible = visible_keys(seqlen_q, seqlen_k, **mask)
    blind, unseen = ~visible.any(dim=1), ~visible.any(dim=0)
    assert (out[:, blind] == 0).all() and (lse[:, :, blind] == torch.inf).all() and (dq[:, blind] == 0).all()
    assert (dk[:, unseen] == 0).all() and (dv[:, unseen] == 0).all()
    assert lse[:, :, ~blind].isfinite().all() and dv[:, ~unseen].any()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("causal", [False, True])
def test_the_numbers_reach_the_kernels(function, causal):
    """As they are: also those that are wider than any sequence of the call, so that the kernel is chosen by them."""
    inputs = inputs_of(function)
    for given, chunk, numbers in (
        ((3, 2), 0, (3, 2, 0)), ([np.int64(5), None], 4, (5, -1, 4)), ((100, 100), None, (100, 100, 0)),
        ((2**70, -3), np.int32(7), (2**31 - 1, -1, 7)), (torch.tensor([3, 2]), 0, (3, 2, 0)),
        (np.array([5, -1]), 4, (5, -1, 4)), (range(3, 5), 0, (3, 4, 0)), ((torch.tensor(6), None), 0, (6, -1, 0)),
    ):  # fmt: skip
        with kernel_calls() as calls:
            out = function(*inputs, causal=causal, window_size=given, attention_chunk=chunk, schedule="spt")
            torch.autograd.grad(out.float().sum(), inputs)
        (_, forward), (_, backward) = calls
        for given_to_kernel in (forward, backward):
            assert tuple(given_to_kernel[name] for name in MASK) == (causal, *numbers)
        assert backward["schedule"] == policy_number("spt")


def test_the_causal_mask_closes_the_right_side():
    *inputs, dout = qkv_tensors(60, 90)
    expected = out_and_gradients(flash_attn_func, inputs, dout, window_size=(20, 0))
    for right in (0, 5, -1, None):
        actual = out_and_gradients(flash_attn_func, inputs, dout, causal=True, window_size=(20, right))
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("arguments, same", [
    ({"window_size": (300, 300)}, {}), ({"attention_chunk": 300}, {}),
    ({"window_size": (300, 0)}, {"causal": True}), ({"causal": True, "attention_chunk": 300}, {"causal": True}),
], ids=str)  # fmt: skip
def test_windows_that_hide_nothing(arguments, same):
    """They take the window kernel, whose sums are those of the other masks where its tiles are theirs: with one query
    head a KV head, since under a window heads go one after the other."""
    *inputs, dout = qkv_tensors(200, 290, heads=2, kv_heads=2)
    actual = out_and_gradients(flash_attn_func, inputs, dout, **arguments)
    assert_same_bits(actual, out_and_gradients(flash_attn_func, inputs, dout, **same))


@pytest.mark.parametrize("mask", WINDOWS, ids=name_of)
def test_packed_equals_unpacked(mask):
    q, k, v, dout = qkv_tensors(60, 60, heads=2, kv_heads=2, head_dim=20)
    arguments = public(mask)
    out, dq, dk, dv = out_and_gradients(flash_attn_func, (q, k, v), dout, **arguments)
    kv = torch.stack((k, v), dim=2).detach().requires_grad_()
    actual = out_and_gradients(flash_attn_kvpacked_func, (q, kv), dout, **arguments)
    assert_same_bits(actual, (out, dq, torch.stack((dk, dv), dim=2)))
    qkv = torch.stack((q, k, v), dim=2).detach().requires_grad_()
    actual = out_and_gradients(flash_attn_qkvpacked_func, (qkv,), dout, **arguments)
    assert_same_bits(actual, (out, torch.stack((dq, dk, dv), dim=2)))


@pytest.mark.parametrize("mask", [window(70, 20), window(-1, -1, 96, causal=True)], ids=name_of)
@pytest.mark.parametrize("schedule", ["auto", *POLICIES])
def test_same_bits_every_time_and_alone(schedule, mask):
    if schedule not in ("auto", *fitting(**mask)):
        pytest.skip("the policy is not defined for this mask")
    *inputs, dout = qkv_tensors(300, 400, head_dim=64, batch=3)
    arguments = {"schedule": schedule, **public(mask)}
    first = out_and_gradients(flash_attn_func, inputs, dout, **arguments)
    assert_same_bits(out_and_gradients(flash_attn_func, inputs, dout, **arguments), first)
    for b in range(3):
        alone = [x.detach()[b : b + 1].requires_grad_() for x in inputs]
        found = out_and_gradients(flash_attn_func, alone, dout[b : b + 1], **arguments)
        assert_same_bits(found, [x[b : b + 1] for x in first])


def test_the_schedule_shows_in_the_sums():
    *inputs, dout = qkv_tensors(700, 700, heads=1, kv_heads=1, head_dim=128, batch=1, dtype=torch.float16)
    found = {
        schedule: out_and_gradients(flash_attn_func, inputs, dout, window_size=(400, 100), schedule=schedule)
        for schedule in fitting(causal=False, window=(400, 100))
    }
    assert set(found) == {"descending", "spt", "order_free"}
    assert not torch.equal(found["descending"][1], found["spt"][1])
    assert not torch.equal(found["descending"][2], found["spt"][2])
    for gradients in found.values():
        for a, e in zip(gradients, found["descending"]):
            assert relative_error(a, e) < 1e-3


@pytest.mark.parametrize("chunk", [16, 50, 128])
def test_causal_chunks_are_sequences_cut_into_pieces(chunk):
    """Of self-attention, each chunk a sequence of its own."""
    seqlen = 270
    q, k, v, dout = qkv_tensors(seqlen, seqlen, head_dim=64, batch=1)
    actual = out_and_gradients(flash_attn_func, (q, k, v), dout, causal=True, attention_chunk=chunk)
    offsets = torch.tensor([*range(0, seqlen, chunk), seqlen], dtype=torch.int32)
    rows = [x.detach()[0].requires_grad_() for x in (q, k, v)]
    out = flash_attn_varlen_func(*rows, offsets, offsets, chunk, chunk, causal=True)
    expected = (out, *torch.autograd.grad(out, rows, dout[0]))
    for a, e in zip(actual, expected):
        assert relative_error(a[0], e) < 5e-3


def test_order_free_of_windows():
    """Some heads may be summed in order; here none is."""
    *inputs, dout = qkv_tensors(500, 500, head_dim=64, batch=1)
    free, ordered = (
        out_and_gradients(flash_attn_func, inputs, dout, window_size=(200, 30), schedule=schedule)
        for schedule in ("order_free", "descending")
    )
    assert not torch.equal(free[1], ordered[1]) and relative_error(free[1], ordered[1]) < 1e-3
    assert_same_bits((free[0], *free[2:]), (ordered[0], *ordered[2:]))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_compiles_to_one_graph(function):
    torch._dynamo.reset()
    inputs = inputs_of(function, seqlen=40)

    def layer(window_size, chunk):
        return function(*(t * 0.5 for t in inputs), causal=True, window_size=window_size, attention_chunk=chunk)

    compiled = torch.compile(layer, **ONE_GRAPH)
    dout = torch.randn(1, 40, 2, 8).bfloat16()
    for window_size, chunk in (((5, -1), 0), ((7, -1), 0), ((None, None), 16), ((9, 9), 24), ((-1, -1), 0)):
        actual, expected = compiled(window_size, chunk), layer(window_size, chunk)
        assert torch.equal(actual, expected)
        assert_same_bits(torch.autograd.grad(actual, inputs, dout), torch.autograd.grad(expected, inputs, dout))


def test_a_window_of_a_compiled_graph_serves_other_lengths():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flash_attn_func, backend=counter, fullgraph=True)
    for seqlen in (20, 31, 47, 60):
        *inputs, _ = qkv_tensors(seqlen, seqlen)
        assert torch.equal(compiled(*inputs, window_size=(30, 3)), flash_attn_func(*inputs, window_size=(30, 3)))
    assert counter.frame_count == 2

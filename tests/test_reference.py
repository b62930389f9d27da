"""The tile-by-tile reference: right to float64, in the order it is given and in no other."""

import functools
import itertools

import pytest
import torch
from float64_reference import attention_float64, attention_in_dtype, error_limits, relative_error, visible_keys
from products import spread

from dash_attn import reference
from dash_attn.schedule import fitting, resolve
from dash_attn.tile_order import TileOrder, tile_order

SCHEDULES = [(name, causal) for causal in (False, True) for name in fitting(causal=causal)]
LENGTHS = [(1, 1), (1, 9), (9, 1), (16, 16), (17, 33), (33, 17), (40, 40), (7, 65), (65, 7)]


def tensors(seqlen_q, seqlen_k, *, heads=2, kv_heads=2, head_dim=16, batch=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads), (seqlen_q, heads)]
    draws = (torch.randn(batch, s, h, head_dim, generator=generator, dtype=torch.float64) for s, h in shapes)
    return tuple(draw.to(dtype) for draw in draws)


def small_order(schedule, seqlen_q, seqlen_k, causal, tile_q=4, tile_k=8):
    return tile_order(schedule, seqlen_q, seqlen_k, head_dim=16, causal=causal, tile_q=tile_q, tile_k=tile_k)


def run(q, k, v, dout, *, causal, order, softmax_scale=0.25):
    out, lse = reference.forward(q, k, v, softmax_scale=softmax_scale, causal=causal)
    grads = reference.backward(dout, q, k, v, out, lse, softmax_scale=softmax_scale, causal=causal, order=order)
    return out, lse, *grads


# A schedule orders the tiles of one head; which heads share K and V makes no difference to the order.
@pytest.mark.parametrize(
    "policy, lengths, heads", spread(itertools.product(SCHEDULES, LENGTHS), [(2, 2), (4, 2), (3, 1)]), ids=str
)
def test_formulas_in_float64(policy, lengths, heads):
    schedule, causal = policy
    q, k, v, dout = tensors(*lengths, heads=heads[0], kv_heads=heads[1])
    actual = run(q, k, v, dout, causal=causal, order=small_order(schedule, *lengths, causal))
    expected = attention_float64(q, k, v, dout, softmax_scale=0.25, causal=causal)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_float64_reference_agrees_with_autograd(causal):
    q, k, v, dout = tensors(12, 19, heads=4, kv_heads=2)
    expected = attention_in_dtype(q, k, v, dout, softmax_scale=-0.7, causal=causal)
    actual = attention_float64(q, k, v, dout, softmax_scale=-0.7, causal=causal)
    torch.testing.assert_close(actual.out, expected.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual[2:], expected[2:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal):
    """Finite differences know nothing of the formulas."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = reference.forward(q, k, v, softmax_scale=0.6, causal=causal)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            order = small_order("descending", 6, 9, causal, tile_q=2, tile_k=4)
            return reference.backward(dout, *ctx.saved_tensors, softmax_scale=0.6, causal=causal, order=order)

    q, k, v, _ = (t.requires_grad_() for t in tensors(6, 9, heads=4, kv_heads=2, head_dim=3, batch=1))
    assert torch.autograd.gradcheck(Attention.apply, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("schedule, causal", SCHEDULES)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(65, 65), (129, 255), (256, 256)])
def test_accuracy(schedule, causal, seqlen_q, seqlen_k, dtype):
    inputs = tensors(seqlen_q, seqlen_k, heads=4, kv_heads=2, head_dim=64, dtype=dtype)
    order = tile_order(schedule, seqlen_q, seqlen_k, head_dim=64, causal=causal)
    out, lse, *grads = run(*inputs, causal=causal, order=order, softmax_scale=0.125)
    truth = attention_float64(*inputs, causal=causal)
    limits = error_limits(truth, *inputs, out, rounded_factors=False, causal=causal)
    for (name, limit), actual in zip(limits.items(), (out, *grads)):
        assert actual.dtype == dtype
        assert (actual.double() - getattr(truth, name)).norm() <= limit, name
    assert (lse - truth.softmax_lse).abs().max() <= 1e-5


@functools.lru_cache
def gradients(schedule, causal, dtype=torch.bfloat16):
    q, k, v, dout = tensors(256, 256, heads=4, kv_heads=2, head_dim=64, dtype=dtype)
    order = tile_order(schedule, 256, 256, head_dim=64, causal=causal, tile_q=16, tile_k=32)
    return run(q, k, v, dout, causal=causal, order=order)[2:]


@pytest.mark.parametrize("schedule, causal", SCHEDULES)
def test_same_order_same_bits(schedule, causal):
    first = gradients(schedule, causal)
    again = gradients.__wrapped__(schedule, causal)
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("schedule, causal, changed", [
    ("spt", False, (True, True, True)),  # visits and dQ's sum turned round
    ("spt", True, (True, True, True)),
    ("order_free", False, (True, False, False)),  # visits as in descending
    ("order_free", True, (True, False, False)),
    ("shift", False, (True, True, True)),
    ("symmetric_shift", True, (True, True, True)),
])  # fmt: skip
def test_order_shows_in_the_bits_of_the_sums_it_changes(schedule, causal, changed):
    # fp32 results, which the rounding to 16 bits would hide in part.
    base, other = (gradients_in_fp32(name, causal) for name in ("descending", schedule))
    assert tuple(not torch.equal(a, b) for a, b in zip(base, other)) == changed
    for a, b in zip(base, other):
        assert relative_error(a, b) < 1e-6


@functools.lru_cache
def gradients_in_fp32(schedule, causal):
    return gradients.__wrapped__(schedule, causal, torch.float32)


def test_dq_is_summed_in_the_given_order():
    """Partials of very different size make the order of dQ's sum visible: big, -big and one in each order."""
    big = 2.0**26
    q = out = torch.zeros(1, 1, 1, 1)
    v = torch.tensor([1.0, -1.0, 1.0, -1.0]).reshape(1, 4, 1, 1)
    k = torch.tensor([big, big, 1.0, 0.0]).reshape(1, 4, 1, 1)
    lse = torch.zeros(1, 1, 1)  # P is 1 everywhere, so that the partials are v * k exactly
    dout = torch.ones(1, 1, 1, 1)
    for adds, expected in (([0, 1, 2, 3], 1.0), ([0, 2, 1, 3], 0.0), ([2, 0, 1, 3], 0.0), ([1, 0, 3, 2], 1.0)):
        order = TileOrder(1, 1, visits=[[0]] * 4, adds=[adds])
        dq, _, _ = reference.backward(dout, q, k, v, out, lse, softmax_scale=1.0, causal=False, order=order)
        assert dq.item() == expected, adds


def test_dv_is_summed_in_the_visited_order():
    big = 2.0**26
    dout = torch.tensor([big, -big, 1.0]).reshape(1, 3, 1, 1)
    zeros, k, lse = torch.zeros(1, 3, 1, 1), torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 3)
    for visits, expected in (([0, 1, 2], 1.0), ([0, 2, 1], 0.0), ([2, 1, 0], 0.0)):
        order = TileOrder(1, 1, visits=[visits], adds=[[0]] * 3)
        _, _, dv = reference.backward(dout, zeros, k, k, zeros, lse, softmax_scale=1.0, causal=False, order=order)
        assert dv.item() == expected, visits


def test_dv_is_summed_over_heads_together_or_one_after_the_other():
    big = 2.0**26
    dout = torch.tensor([[big, 1.0], [-big, 1.0]]).reshape(1, 2, 2, 1)  # (query, head)
    zeros, k, lse = torch.zeros(1, 2, 2, 1), torch.zeros(1, 1, 1, 1), torch.zeros(1, 2, 2)
    for together, expected in ((False, 2.0), (True, 1.0)):
        order = TileOrder(1, 1, visits=[[0, 1]], adds=[[0]] * 2, heads_together=together)
        _, _, dv = reference.backward(dout, zeros, k, k, zeros, lse, softmax_scale=1.0, causal=False, order=order)
        assert dv.item() == expected


@pytest.mark.parametrize("visits, adds", [
    ([[0, 1], [1, 0]], [[1, 0], [0, 1]]),  # each waits for the other's second step
    ([[0, 1], [0]], [[0, 1], [0, 1]]),  # query tile 1 expects a KV tile that never comes
    ([[0, 1], [0, 1]], [[0, 1], [0]]),  # and one comes that it does not expect
])  # fmt: skip
def test_orders_that_cannot_run_are_refused(visits, adds):
    q, k, v, dout = tensors(2, 2, heads=1, kv_heads=1, batch=1)
    with pytest.raises(ValueError, match="order must have visits and adds of the same tiles"):
        run(q, k, v, dout, causal=False, order=TileOrder(1, 1, visits, adds))


@pytest.mark.parametrize("schedule, causal", SCHEDULES)
def test_bits_do_not_depend_on_the_rest_of_the_batch(schedule, causal):
    q, k, v, dout = tensors(70, 90, heads=4, kv_heads=2, head_dim=64, batch=3, dtype=torch.bfloat16)
    order = small_order(schedule, 70, 90, causal, tile_q=16, tile_k=32)
    together = run(q, k, v, dout, causal=causal, order=order)
    for b in range(3):
        alone = run(*(t[b : b + 1] for t in (q, k, v, dout)), causal=causal, order=order)
        assert all(torch.equal(t[b : b + 1], a) for t, a in zip(together, alone))


@pytest.mark.parametrize("marker", [torch.inf, -torch.inf])
def test_rows_that_see_no_key(marker):
    q, k, v, dout = tensors(20, 8, dtype=torch.bfloat16)
    blind = ~visible_keys(20, 8, True).any(dim=1)
    assert blind.sum() == 12
    out, lse = reference.forward(q, k, v, softmax_scale=0.25, causal=True)
    assert (out[:, blind] == 0).all() and (lse[:, :, blind] == torch.inf).all()
    assert lse[:, :, ~blind].isfinite().all()
    lse = lse.masked_fill(blind, marker)
    order = small_order("descending", 20, 8, True)
    dq, dk, dv = reference.backward(dout, q, k, v, out, lse, softmax_scale=0.25, causal=True, order=order)
    assert (dq[:, blind] == 0).all()
    # The blind queries add nothing to the keys' gradients.
    seen = [t[:, ~blind] for t in (dout, q, out)]
    truth = attention_float64(seen[1], k, v, seen[0], softmax_scale=0.25, causal=True)
    for actual, expected in ((dq[:, ~blind], truth.dq), (dk, truth.dk), (dv, truth.dv)):
        assert relative_error(actual, expected) < 1e-2


def test_nan_is_not_hidden():
    q, k, v, _ = tensors(5, 5)
    q[0, 3, 0, 0] = torch.nan
    out, lse = reference.forward(q, k, v, softmax_scale=1.0, causal=True)
    assert out[0, 3, 0].isnan().all() and lse[0, 0, 3].isnan()
    assert out[0, 4].isfinite().all()


def test_tile_order_is_the_schedule_modules():
    order = tile_order("auto", 1000, 700, head_dim=128, causal=True)
    name = resolve("auto", causal=True)
    assert order == tile_order(name, 1000, 700, head_dim=128, causal=True)
    assert len(order.adds) == -(-1000 // order.tile_q) and len(order.visits) == -(-700 // order.tile_k)

"""Order-free accumulation: the bounds that docs/order_free.md proves, on inputs made to reach them, and its error."""

import math

import distributions
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_attn import _schedule, order_free, reference

TILE = 128
BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def make(change, seqlen, head_dim, dtype, seed=0, batch=1, heads=1, kv_heads=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(seqlen, heads), (seqlen, kv_heads), (seqlen, kv_heads), (seqlen, heads)]
    tensors = [torch.randn(batch, s, h, head_dim, generator=generator) for s, h in shapes]
    change(*tensors, generator)
    return [x.to(dtype) for x in tensors]


class Row(dict):
    """What one head's rows of dQ are: `exact`, `units`, `grid`, `noise`."""


def accumulate(q, k, v, dout, causal=False, tile=TILE, softmax_scale=None):
    """The partials of one head (batch and heads are 1), their exact sum, and the sum of their integers without wrapping."""
    dtype, scale = q.dtype, softmax_scale or q.shape[-1] ** -0.5
    q, k, v, dout = (x[0, :, 0].float() for x in (q, k, v, dout))
    s = q @ k.T * scale
    if causal:
        s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
    p = s.softmax(dim=1)
    out = (p @ v).to(dtype).float()
    d = (dout * out).sum(dim=1, keepdim=True)
    ds = ((dout @ v.T - d) * p).to(dtype).float()
    grid = order_free.grid(
        q[None, None], k[None], v[None], dout[None, None], d[None, None],
        softmax_scale=scale, kv_tiles=-(-k.shape[0] // tile), dtype=dtype,
    )  # fmt: skip
    exponents = grid.exponents[0, 0][:, None]
    exact, units, magnitudes = (torch.zeros(q.shape, dtype=torch.float64) for _ in range(3))
    for start in range(0, k.shape[0], tile):
        partial = ds[:, start : start + tile] @ k[start : start + tile]
        rounded = torch.ldexp(partial, exponents).round().double()
        exact += partial
        units += rounded
        magnitudes += rounded.abs()
    noise = torch.finfo(dtype).eps / 4 * (dout * out).norm(dim=1) * (p @ k).norm(dim=1)
    rounded_sum = torch.ldexp(units, -exponents)
    return Row(exact=exact, sum=rounded_sum, magnitudes=magnitudes, grid=grid, noise=noise.double())


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim, seqlen", [(64, 512), (128, 2048)])
@pytest.mark.parametrize("change", distributions.ROOMY, ids=lambda f: f.__name__)
def test_error_of_a_row(change, head_dim, seqlen, causal):
    """At most 1e-4 of the row, or, where the gradient vanishes, of what rounding O to 16 bits moves the row by."""
    rows = accumulate(*make(change, seqlen, head_dim, torch.bfloat16), causal=causal)
    assert not rows["grid"].needs_order.any()
    error = (rows["sum"] - rows["exact"]).norm(dim=1)
    allowed = 1e-4 * torch.maximum(rows["exact"].norm(dim=1), rows["noise"])
    assert bool((error <= allowed).all()), f"row {int((error - allowed).argmax())}: {(error / allowed).max() * 1e-4:.1e}"
    # Something is rounded, or the test would say nothing.
    assert error.max() > 0


@pytest.mark.parametrize("head_dim, seqlen", [(64, 512), (128, 2048)])
@pytest.mark.parametrize("change", distributions.ROOMY, ids=lambda f: f.__name__)
def test_error_of_a_row_in_half_precision(change, head_dim, seqlen):
    """The same where the gradient does not vanish. fp16 rounds O eight times finer, and its grid is twice coarser."""
    rows = accumulate(*make(change, seqlen, head_dim, torch.float16))
    if change is distributions.small_gradients:
        assert not rows["exact"].any()  # dS is below fp16's smallest number
        return
    assert not rows["grid"].needs_order.any()
    error = (rows["sum"] - rows["exact"]).norm(dim=1)
    assert bool((error <= 1e-4 * torch.maximum(rows["exact"].norm(dim=1), 16 * rows["noise"])).all())


@BOTH
@pytest.mark.parametrize("change", distributions.CRAMPED, ids=lambda f: f.__name__)
def test_heads_with_too_little_room_need_the_order(change, dtype):
    q, k, v, dout = make(distributions.normal, 512, 64, dtype, batch=2, heads=4, kv_heads=2)
    bad = make(change, 512, 64, dtype, heads=2)
    for x, y in zip((q, k, v, dout), bad):
        x[1, :, -1] = y[0, :, -1]  # the last KV head of the second sequence, and a query head that uses it
    gradients = {}
    for order in ("order_free", "descending"):
        tiles = reference.tile_order(order, 512, 512, head_dim=64, causal=True)
        out, lse = reference.forward(q, k, v, softmax_scale=0.125, causal=True)
        gradients[order] = reference.backward(
            dout, q, k, v, out, lse, softmax_scale=0.125, causal=True, order=tiles
        )
    dq, ordered = gradients["order_free"][0], gradients["descending"][0]
    assert torch.equal(dq[1, :, 2:], ordered[1, :, 2:])
    for own, other in ((dq[0], ordered[0]), (dq[1, :, :2], ordered[1, :, :2])):
        assert not torch.equal(own, other), "heads that have room are on the grid"
    for a, b in zip(gradients["order_free"][1:], gradients["descending"][1:]):
        assert torch.equal(a, b)


def extreme(seqlen, head_dim, dtype, scale_v, scale_k, scale_dout):
    """Every |dP - D| is |dO||V|, and all dS K have one sign: the bound, reached up to the rounding of D."""
    sign = torch.ones(seqlen, 1)
    sign[::2] = -1
    ones = torch.ones(seqlen, head_dim)
    tensors = torch.zeros_like(ones), sign * ones * scale_k, sign * ones * scale_v, ones * scale_dout
    return [x.to(dtype)[None, :, None] for x in tensors]


@BOTH
@pytest.mark.parametrize("seqlen", [64, 1024])
def test_the_bound_is_nearly_reached_and_never_passed(seqlen, dtype):
    # Scales that leave the mantissas of a bound anywhere between two powers of 2.
    for scale in (1.0, 1.1, 1.25, 1.4, 1.5, 1.6, 1.75, 1.9):
        rows = accumulate(*extreme(seqlen, 64, dtype, scale, 0.5, 3.0))
        assert rows["magnitudes"].max() < 2**31 - 1
        assert rows["magnitudes"].max() > (2**28 if dtype == torch.float16 else 2**29)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    seqlen=st.integers(2, 96),
    head_dim=st.sampled_from([8, 16, 64]),
    tile=st.sampled_from([1, 16, 128]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    causal=st.booleans(),
    exponents=st.tuples(*(st.integers(-12, 3) for _ in range(4))),
    tails=st.tuples(*(st.floats(0, 2) for _ in range(4))),
    aligned=st.booleans(),
)
def test_no_sum_overflows(seed, seqlen, head_dim, tile, dtype, causal, exponents, tails, aligned):
    """Random sizes, tails and signs, tiles down to one key. Heads that need the order are judged too: the bound is a
    row's, whatever the rule for heads says, where scores are within its range."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for exponent, tail in zip(exponents, tails):
        x = torch.randn(1, seqlen, 1, head_dim, generator=generator)
        x = x * torch.exp(tail * torch.randn(1, seqlen, 1, 1, generator=generator)) * 2.0**exponent
        tensors.append(x.clamp(-1e3, 1e3))
    q, k, v, dout = tensors
    if aligned:
        k, v, dout = k.abs() * v.sign(), v.abs() * v.sum(-1, keepdim=True).sign(), dout.abs()
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    scale = head_dim**-0.5
    if scale * q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max() > order_free.MAX_SCORE:
        return
    rows = accumulate(q, k, v, dout, causal=causal, tile=tile)
    assert rows["magnitudes"].max() <= 2**31 - 1


def backward(tensors, order, causal=True, scale=0.125):
    q, k, v, dout = tensors
    out, lse = reference.forward(q, k, v, softmax_scale=scale, causal=causal)
    return reference.backward(dout, q, k, v, out, lse, softmax_scale=scale, causal=causal, order=order)


@BOTH
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_no_order_shows_in_dq(causal, dtype):
    tensors = make(distributions.heavy_tailed_rows_of_dout, 300, 32, dtype, batch=2, heads=4, kv_heads=2)
    results = []
    for schedule in ("ascending", "spt", "symmetric_shift" if causal else "shift"):
        tiles = reference.tile_order(schedule, 300, 300, head_dim=32, causal=causal, tile_q=16, tile_k=32)
        results.append(backward(tensors, tiles._replace(order_free=True), causal)[0])
        assert not torch.equal(backward(tensors, tiles, causal)[0], results[0])
    assert all(torch.equal(x, results[0]) for x in results)


def test_wrapping_does_not_matter():
    """Partial sums may leave 32 bits as long as the whole sum does not."""
    no = (torch.zeros(shape, dtype=torch.bool) for shape in ((1,), (1, 1, 1)))
    grid = order_free.Grid(torch.zeros(1, 1, 1, dtype=torch.int64), *no)
    sums = order_free.Accumulator(grid, torch.zeros(1, 1, 1, 1))
    for partial in (2.0**31 - 128, 2.0**31 - 128, -(2.0**31), -(2.0**31), 5.0):
        sums.add(0, slice(0, 1), torch.full((1, 1, 1), partial))
    assert sums.result().item() == 5 - 256


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_bits_do_not_depend_on_neighbours(causal):
    own = make(distributions.normal, 200, 32, torch.bfloat16, heads=4, kv_heads=2)
    tiles = reference.tile_order("order_free", 200, 200, head_dim=32, causal=causal)
    alone = backward(own, tiles, causal)
    for change in (distributions.huge_value_row, distributions.heavy_tailed_rows_of_dout):
        other = make(change, 200, 32, torch.bfloat16, seed=1, heads=4, kv_heads=2)
        other[3][0, 3] = math.nan
        together = backward([torch.cat([a, b]) for a, b in zip(other, own)], tiles, causal)
        assert all(torch.equal(x[1:], y) for x, y in zip(together, alone))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", range(4), ids=["q", "k", "v", "dout"])
def test_nan_where_fp32_sums_have_it(place, value):
    tensors = make(distributions.normal, 200, 32, torch.bfloat16, heads=4, kv_heads=2)
    tensors[place][0, 70, 1, 3] = value
    results = []
    for schedule in ("order_free", "descending"):
        tiles = reference.tile_order(schedule, 200, 200, head_dim=32, causal=True, tile_q=16, tile_k=32)
        results.append(backward(tensors, tiles))
    for actual, expected in zip(*results):
        assert torch.equal(actual.isfinite(), expected.isfinite())
    assert results[0][0].isnan().any() and results[0][0].isfinite().any()


@settings(max_examples=500, deadline=None)
@given(bound=st.floats(0, allow_infinity=False), half=st.booleans())
def test_grid_of_a_row(bound, half):
    """The kernel's own function: never more than the capacity, and more than a third of it where exponents allow it."""
    exponent = _schedule.row_exponent(bound, half)
    capacity = order_free.CAPACITY / (2 if half else 1)
    assert exponent <= order_free.MAX_EXPONENT
    if bound > 0:
        assert math.frexp(bound)[1] + exponent <= 32  # 2^exponent alone may overflow
    if bound > 1e-20 and bound < 1e30:
        assert capacity / 2.001 < bound * 2.0**exponent <= capacity


def head_statistics(q, k, v):
    norm = lambda x: (x.double().norm(dim=-1) * order_free.NORM_SLACK).max().item()  # noqa: E731
    product = (v.double().norm(dim=-1) * order_free.NORM_SLACK * k.double().abs().amax(-1)).max().item()
    steps = [order_free._steps(x[0, :, 0][None]) for x in (k, v)]
    return {
        "max_query_norm": norm(q), "max_key_norm": norm(k), "max_product": product,
        "sum_of_key_steps": steps[0].abs().sum().item(), "sum_of_value_steps": steps[1].norm(dim=-1).sum().item(),
    }  # fmt: skip


@BOTH
@pytest.mark.parametrize("change", distributions.ROOMY + distributions.CRAMPED, ids=lambda f: f.__name__)
def test_rule_of_a_head_is_the_kernels(change, dtype):
    for seqlen in (64, 333, 2048):
        q, k, v, dout = make(change, seqlen, 64, dtype)
        shape = {"head_dim": 64, "seqlen_k": seqlen, "kv_tiles": -(-seqlen // TILE)}
        decided = _schedule.needs_order(
            **head_statistics(q, k, v), softmax_scale=0.125, **shape, half_precision=dtype == torch.float16
        )
        assert decided == bool(accumulate(q, k, v, dout)["grid"].needs_order), seqlen


@pytest.mark.parametrize("name", ["max_query_norm", "max_key_norm", "max_product", "sum_of_key_steps", "sum_of_value_steps"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_needs_the_order(name, value):
    q, k, v, _ = make(distributions.normal, 256, 64, torch.bfloat16)
    rest = {"softmax_scale": 0.125, "head_dim": 64, "seqlen_k": 256, "kv_tiles": 2, "half_precision": False}
    statistics = head_statistics(q, k, v)
    assert not _schedule.needs_order(**statistics, **rest)
    # Differences alone may overflow where the values do not: the error would only be smaller.
    if value == math.inf and "steps" in name:
        return
    assert _schedule.needs_order(**{**statistics, name: value}, **rest)


def test_all_zeros_are_on_the_grid():
    zeros = [torch.zeros(1, 64, 1, 16, dtype=torch.bfloat16)] * 4
    rows = accumulate(*zeros)
    assert not rows["grid"].needs_order.any() and not rows["magnitudes"].any()

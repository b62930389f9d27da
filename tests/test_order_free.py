"""Order-free accumulation: the bounds that docs/order_free.md proves, on inputs made to reach them, and its error."""

import itertools
import math
import random
from fractions import Fraction
from typing import NamedTuple

import distributions
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import spread

import dash_attn
from dash_attn import _schedule, order_free, reference
from dash_attn.tile_order import tile_order

TILE = 128
BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def make(change, seqlen, head_dim, dtype, seed=0, batch=1, heads=1, kv_heads=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(seqlen, heads), (seqlen, kv_heads), (seqlen, kv_heads), (seqlen, heads)]
    tensors = [torch.randn(batch, s, h, head_dim, generator=generator) for s, h in shapes]
    change(*tensors, generator)
    return [x.to(dtype) for x in tensors]


def keys_seen(seqlen_k, seqlen_q, causal):
    """(seqlen_q, 2): where the keys of each query begin and end."""
    end = torch.arange(seqlen_k - seqlen_q, seqlen_k) + 1 if causal else torch.full((seqlen_q,), seqlen_k)
    return torch.stack((torch.zeros_like(end), end), dim=1)


def accumulate_with(p, lse, k, v, dout, dtype, tile, causal=False):
    """What the rows of dQ of one head are where query i attends to key j with p[i, j]; fp32, no batch, no heads.

    `exact` is the sum of the partials, `sum` that of their integers in `scales`, which have `magnitudes` unwrapped;
    `noise` is what rounding O to the inputs' dtype moves a row by.
    """
    out = (p @ v).to(dtype).float()
    d = (dout * out).sum(dim=1, keepdim=True)
    ds = ((dout @ v.T - d) * p).to(dtype).float()
    scales = order_free.row_scales(
        k[None], v[None], dout[None, None], d[None, None], lse[None, None],
        seen=keys_seen(k.shape[0], p.shape[0], causal), tile_k=tile, dtype=dtype,
    )  # fmt: skip
    exponents = scales.exponents[0, 0][:, None]
    exact, units, magnitudes = (torch.zeros(dout.shape, dtype=torch.float64) for _ in range(3))
    for start in range(0, k.shape[0], tile):
        partial = ds[:, start : start + tile] @ k[start : start + tile]
        rounded = torch.ldexp(partial, exponents).round().double()
        exact += partial
        units += rounded
        magnitudes += rounded.abs()
    noise = torch.finfo(dtype).eps / 4 * (dout * out).norm(dim=1) * (p @ k).norm(dim=1)
    rounded_sum = torch.ldexp(units, -exponents)
    sums = {"exact": exact, "sum": rounded_sum, "magnitudes": magnitudes}
    return sums | {"scales": scales, "lse": lse, "noise": noise.double()}


def accumulate(q, k, v, dout, causal=False, tile=TILE, softmax_scale=None):
    """`accumulate_with` the softmax of the scores; batch and heads are 1."""
    dtype, scale = q.dtype, softmax_scale or q.shape[-1] ** -0.5
    q, k, v, dout = (x[0, :, 0].float() for x in (q, k, v, dout))
    s = q @ k.T * scale
    if causal:
        s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
    lse = s.logsumexp(dim=1, keepdim=True)
    return accumulate_with((s - lse).exp(), lse, k, v, dout, dtype, tile, causal)


# What is hard for fixed point is in the numbers of a row, of which either mask has many.
@pytest.mark.parametrize(
    "change, size, causal",
    spread(itertools.product(distributions.ROOMY, [(64, 512), (128, 2048)]), [False, True]),
    ids=lambda x: x.__name__ if callable(x) else str(x),
)
def test_error_of_a_row(change, size, causal):
    """At most 1e-4 of the row, or, where the gradient vanishes, of what rounding O to 16 bits moves the row by."""
    head_dim, seqlen = size
    rows = accumulate(*make(change, seqlen, head_dim, torch.bfloat16), causal=causal)
    assert not rows["scales"].needs_order.any()
    error = (rows["sum"] - rows["exact"]).norm(dim=1)
    allowed = 1e-4 * torch.maximum(rows["exact"].norm(dim=1), rows["noise"])
    worst = int((error - allowed).argmax())
    assert bool((error <= allowed).all()), f"row {worst}: {(error / allowed).max() * 1e-4:.1e}"
    # Something is rounded, or the test would say nothing.
    assert error.max() > 0


@pytest.mark.parametrize("head_dim, seqlen", [(64, 512), (128, 2048)])
@pytest.mark.parametrize("change", distributions.ROOMY, ids=lambda f: f.__name__)
def test_error_of_a_row_in_half_precision(change, head_dim, seqlen):
    """The same where the gradient does not vanish. fp16 rounds O eight times finer."""
    rows = accumulate(*make(change, seqlen, head_dim, torch.float16))
    if change is distributions.small_gradients:
        assert not rows["exact"].any()  # dS is below fp16's smallest number
        return
    assert not rows["scales"].needs_order.any()
    error = (rows["sum"] - rows["exact"]).norm(dim=1)
    assert bool((error <= 1e-4 * torch.maximum(rows["exact"].norm(dim=1), 8 * rows["noise"])).all())


@BOTH
@pytest.mark.parametrize("change", distributions.CRAMPED, ids=lambda f: f.__name__)
def test_heads_with_too_little_room_need_the_order(change, dtype):
    q, k, v, dout = make(distributions.normal, 512, 64, dtype, batch=2, heads=4, kv_heads=2)
    bad = make(change, 512, 64, dtype, heads=2)
    for x, y in zip((q, k, v, dout), bad):
        x[1, :, -1] = y[0, :, -1]  # the last KV head of the second sequence, and a query head that uses it
    gradients = {}
    for order in ("order_free", "descending"):
        tiles = tile_order(order, 512, 512, head_dim=64, causal=True)
        out, lse = reference.forward(q, k, v, softmax_scale=0.125, causal=True)
        gradients[order] = reference.backward(dout, q, k, v, out, lse, softmax_scale=0.125, causal=True, order=tiles)
    dq, ordered = gradients["order_free"][0], gradients["descending"][0]
    assert torch.equal(dq[1, :, 2:], ordered[1, :, 2:])
    for own, other in ((dq[0], ordered[0]), (dq[1, :, :2], ordered[1, :, :2])):
        assert not torch.equal(own, other), "heads that have room are in fixed point"
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
        assert rows["magnitudes"].max() > 2**29


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
    row's, whatever the rule for heads says, where its LSE is within its range."""
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
    rows = accumulate(q, k, v, dout, causal=causal, tile=tile)
    in_range = (rows["lse"].abs() <= order_free.MAX_LSE).squeeze(1)
    assert (rows["magnitudes"][in_range] <= 2**31 - 1).all()


def backward(tensors, order, causal=True, scale=0.125):
    q, k, v, dout = tensors
    out, lse = reference.forward(q, k, v, softmax_scale=scale, causal=causal)
    return reference.backward(dout, q, k, v, out, lse, softmax_scale=scale, causal=causal, order=order)


@BOTH
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_no_order_shows_in_dq(causal, dtype):
    tensors = make(distributions.heavy_tailed_rows_of_dout, 300, 32, dtype, batch=2, heads=4, kv_heads=2)
    results = []
    for schedule in ("descending", "spt", "symmetric_shift" if causal else "shift"):
        tiles = tile_order(schedule, 300, 300, head_dim=32, causal=causal, tile_q=16, tile_k=32)
        results.append(backward(tensors, tiles._replace(order_free=True), causal)[0])
        assert not torch.equal(backward(tensors, tiles, causal)[0], results[0])
    assert all(torch.equal(x, results[0]) for x in results)


def test_wrapping_does_not_matter():
    """Partial sums may leave 32 bits as long as the whole sum does not."""
    scales = order_free.Scales(torch.zeros(1, 1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool))
    sums = order_free.Accumulator(scales, torch.zeros(1, 1, 1, 1))
    for partial in (2.0**31 - 128, 2.0**31 - 128, -(2.0**31), -(2.0**31), 5.0):
        sums.add(0, slice(0, 1), torch.full((1, 1, 1), partial))
    assert sums.result().item() == 5 - 256


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_bits_do_not_depend_on_neighbours(causal):
    own = make(distributions.normal, 200, 32, torch.bfloat16, heads=4, kv_heads=2)
    tiles = tile_order("order_free", 200, 200, head_dim=32, causal=causal)
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
        tiles = tile_order(schedule, 200, 200, head_dim=32, causal=True, tile_q=16, tile_k=32)
        results.append(backward(tensors, tiles))
    for actual, expected in zip(*results):
        assert torch.equal(actual.isfinite(), expected.isfinite())
    assert results[0][0].isnan().any() and results[0][0].isfinite().any()


@settings(max_examples=500, deadline=None)
@given(bound=st.floats(0))
def test_scale_of_a_row(bound):
    """The kernel's own function: never more than the capacity, and more than half of it where exponents allow it."""
    exponent = _schedule.row_exponent(bound)
    assert order_free.MIN_EXPONENT - 1 <= exponent <= order_free.MAX_EXPONENT
    # No sum of what has that bound overflows fp32, with the 1.27 that rounding can add.
    assert (exponent < order_free.MIN_EXPONENT) == (bound > order_free.CAPACITY * 2.0**-order_free.MIN_EXPONENT)
    assert 1.27 * order_free.CAPACITY * 2.0**-order_free.MIN_EXPONENT < torch.finfo(torch.float32).max
    if exponent >= order_free.MIN_EXPONENT:
        assert math.frexp(bound)[1] + exponent <= 32  # 2^exponent alone may overflow
    if bound > 1e-20 and bound < 1e30:
        assert order_free.CAPACITY / 2.001 < bound * 2.0**exponent <= order_free.CAPACITY


def float32(x):
    return torch.tensor(x, dtype=torch.float64).float().item()


@settings(max_examples=500, deadline=None)
@given(
    units=st.integers(-int(1.91 * 2**30), int(1.91 * 2**30)) | st.integers(-(2**24), 2**24),
    halves=st.integers(-3, 3),
    exponent=st.integers(order_free.MIN_EXPONENT, order_free.MAX_EXPONENT),
)
def test_rounding_to_units(units, halves, exponent):
    """The kernel's own function: the nearest integer, of two the even one, up to the most units that there can be."""
    # Between two units, and where the two parts of a number of units meet.
    for numerator in (2 * units + halves, 1024 * (units // 1024) + 512 + halves):
        x = float32(math.ldexp(numerator, -exponent - 1))
        assert _schedule.rounded_to_units(x, exponent) == round(Fraction(x) * Fraction(2) ** exponent)


def test_a_bound_that_is_not_finite_needs_the_order():
    assert _schedule.row_exponent(math.nan) == _schedule.row_exponent(math.inf) == order_free.MIN_EXPONENT - 1


def key_statistics(k, v):
    product = (v.double().norm(dim=-1) * order_free.NORM_SLACK * k.double().abs().amax(-1)).max().item()
    return {"max_product": product, "min_step_product": order_free.min_step_product(k[:, :, 0], v[:, :, 0]).item()}


@BOTH
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("change", distributions.ROOMY + distributions.CRAMPED, ids=lambda f: f.__name__)
def test_rule_of_a_head_is_the_kernels(change, causal, dtype):
    for seqlen in (64, 333):
        q, k, v, dout = (x.float() for x in make(change, seqlen, 64, dtype))
        out, lse = reference.forward(q, k, v, softmax_scale=0.125, causal=causal)
        d = (dout * out)[:, :, 0].sum(dim=-1)
        settings = {"seen": keys_seen(seqlen, seqlen, causal), "tile_k": TILE, "dtype": dtype}
        scales = order_free.row_scales(
            k[:, :, 0], v[:, :, 0], dout[:, None, :, 0], d[:, None, :, None], lse[..., None], **settings
        )
        statistics = key_statistics(k, v)
        decided = _schedule.keys_need_order(**statistics, seqlen_k=seqlen)
        of_keys = {"max_product": statistics["max_product"], "max_element": k.abs().max().item(), "seqlen_k": seqlen}
        for row, norm in enumerate((dout[0, :, 0].double().norm(dim=-1) * order_free.NORM_SLACK).tolist()):
            decided |= _schedule.lse_needs_order(lse[0, 0, row].item())
            bound = _schedule.row_bound(
                dout_norm=norm, delta=d[0, row].item(), **of_keys, half_precision=dtype == torch.float16
            )
            exponent = _schedule.row_exponent(bound)
            assert max(exponent, order_free.MIN_EXPONENT) == scales.exponents[0, 0, row], row
            steps, seen = statistics["min_step_product"], row + 1 if causal else seqlen
            decided |= _schedule.row_needs_order(
                exponent=exponent, dout_norm=norm, min_step_product=steps, head_dim=64,
                keys=seen, tiles=-(-seen // TILE),
            )  # fmt: skip
        assert decided == bool(scales.needs_order), seqlen


NORMAL = {"max_product": 45.0, "min_step_product": 600.0}


@pytest.mark.parametrize("name", NORMAL)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_needs_the_order(name, value):
    assert not _schedule.keys_need_order(**NORMAL, seqlen_k=256)
    assert _schedule.keys_need_order(**NORMAL | {name: value}, seqlen_k=256)


def test_a_log_sum_exp_of_few_digits_needs_the_order():
    """An infinite one is of a row that sees no key; NaN needs no order to make the row NaN."""
    for lse in (0.0, order_free.MAX_LSE, math.inf, math.nan):
        assert not _schedule.lse_needs_order(lse) and not _schedule.lse_needs_order(-lse)
    for lse in (order_free.MAX_LSE + 1, 1e38):
        assert _schedule.lse_needs_order(lse) and _schedule.lse_needs_order(-lse)


def test_statistics_that_leave_too_little_room():
    """Products that vanish in fp32 say nothing of their factors, nor do zeros."""
    assert _schedule.keys_need_order(**NORMAL | {"max_product": 0.0, "min_step_product": 0.0}, seqlen_k=256)
    assert _schedule.keys_need_order(**NORMAL, seqlen_k=order_free.MAX_KEYS + 1)
    zeros = [torch.zeros(1, 64, 1, 16, dtype=torch.bfloat16)] * 4
    assert accumulate(*zeros)["scales"].needs_order.all()


def test_a_row_whose_units_are_too_coarse_needs_the_order():
    row = {"min_step_product": 600.0, "head_dim": 64, "keys": 256, "tiles": 2}
    # Of an element 600 / 512 / 2 * 1.2533 / 16 * |dO| are expected; 1e-4 of that is sqrt(2 / 12) units of 2^-16.4.
    assert not _schedule.row_needs_order(exponent=17, dout_norm=1.0, **row)
    assert _schedule.row_needs_order(exponent=16, dout_norm=1.0, **row)
    assert not _schedule.row_needs_order(exponent=16, dout_norm=2.0, **row)
    assert not _schedule.row_needs_order(exponent=-40, dout_norm=0.0, **row), "zeros are not rounded"
    assert _schedule.row_needs_order(exponent=order_free.MIN_EXPONENT - 1, dout_norm=0.0, **row), "no scale"
    assert _schedule.row_needs_order(exponent=100, dout_norm=math.nan, **row)


@BOTH
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("seqlen", [64, 1000, 4096, 16384, 32768])
def test_normal_inputs_stay_in_fixed_point(seqlen, head_dim, dtype):
    generator = torch.Generator().manual_seed(seqlen + head_dim)
    k, v = (torch.randn(1, seqlen, head_dim, generator=generator).to(dtype).float() for _ in range(2))
    dout = torch.randn(1, 4, 256, head_dim, generator=generator).to(dtype).float()
    # D of rows that see that many keys: O is a mean of them. The last 256 queries.
    d = (torch.randn(1, 4, 256, head_dim, generator=generator) / seqlen**0.5 * dout).sum(dim=-1, keepdim=True)
    seen = keys_seen(seqlen, 256, True).clamp(min=0)
    lse = torch.full_like(d, math.log(seqlen) + 0.5)
    tile_k = _schedule.backward_tile_shape(head_dim)[1]
    assert not order_free.row_scales(k, v, dout, d, lse, seen=seen, tile_k=tile_k, dtype=dtype).needs_order.any()


def public_gradients(tensors, schedule, causal=False):
    inputs = [x.clone().requires_grad_() for x in tensors[:3]]
    out = dash_attn.flash_attn_func(*inputs, causal=causal, schedule=schedule)
    return torch.autograd.grad(out, inputs, tensors[3])


def assert_rows_agree(free, ordered, rows_at_once):
    """Groups of rows of dq agree to what rounding to bf16 makes of sums that differ by 1e-4."""
    free, ordered = (x[0, :, 0].double().split(rows_at_once) for x in (free, ordered))
    for group, (x, y) in enumerate(zip(free, ordered)):
        error = ((x - y).norm() / y.norm()).item()
        assert error <= 1e-3, f"rows from {group * rows_at_once}: {error:.1e}"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("scale", [1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
def test_documents_of_different_size(scale, causal):
    def change(*args):
        distributions.document_of_small_values(*args, scale=scale)

    tensors = make(change, 1024, 64, torch.bfloat16)
    free, ordered = (public_gradients(tensors, schedule, causal)[0] for schedule in ("order_free", "descending"))
    assert_rows_agree(free, ordered, 512)
    if scale >= 0.1:
        assert not torch.equal(free, ordered), "there is room"


@pytest.mark.parametrize("first", [1.0, 0.1, 1e-3, 1e-5])
def test_values_growing_along_the_sequence(first):
    tensors = make(distributions.normal, 1024, 64, torch.bfloat16)
    tensors[2] *= torch.logspace(math.log10(first), 0, 1024)[:, None, None]
    free, ordered = (public_gradients(tensors, schedule, True)[0] for schedule in ("order_free", "descending"))
    assert_rows_agree(free, ordered, 16)
    if first >= 0.1:
        assert not torch.equal(free, ordered), "there is room"


class Pattern(NamedTuple):
    """A scale of K and of V for each run of keys, and what the run's values have in common, in multiples of that."""

    lengths: tuple[int, ...]
    key_scales: tuple[float, ...]
    value_scales: tuple[float, ...]
    common: tuple[float, ...]

    @classmethod
    def drawn(cls, rng):
        lengths = []
        while sum(lengths) < 512:
            lengths.append(min(rng.randint(16, 200), 512 - sum(lengths)))
        draw = [tuple(10 ** rng.uniform(-low, high) for _ in lengths) for low, high in ((2, 0), (4, 0), (3, 1))]
        return cls(tuple(lengths), *draw)

    def mutated(self, rng):
        field = rng.choice(("key_scales", "value_scales", "common"))
        place, factor = rng.randrange(len(self.lengths)), 10 ** rng.uniform(-1.5, 1.5)
        scales = list(getattr(self, field))
        scales[place] = max(1e-6, min(1e2, scales[place] * factor))
        return self._replace(**{field: tuple(scales)})

    def worst_row(self, seed):
        """Largest error of a row that attends to a run of 16 keys or more, over what is allowed; 0 if in order."""
        generator = torch.Generator().manual_seed(seed)
        k, v = (torch.randn(512, 64, generator=generator) for _ in range(2))
        scales = [torch.tensor(x).repeat_interleave(torch.tensor(self.lengths))[:, None] for x in self[1:]]
        k, v = k * scales[0], (v + scales[2] * torch.randn(64, generator=generator)) * scales[1]
        k, v = k.bfloat16().float(), v.bfloat16().float()
        # Runs of 16 to 512 keys anywhere, attended to about evenly.
        length = (16 * 32 ** torch.rand(96, generator=generator)).int()
        first = (torch.rand(96, generator=generator) * (513 - length)).int()
        place = torch.arange(512)
        inside = (place >= first[:, None]) & (place < (first + length)[:, None])
        scores = torch.randn(96, 512, generator=generator) * torch.rand(96, 1, generator=generator)
        p = scores.masked_fill(~inside, -math.inf).softmax(dim=1)
        dout = torch.randn(96, 64, generator=generator).bfloat16().float()
        rows = accumulate_with(p, torch.zeros(96, 1), k, v, dout, torch.bfloat16, tile=16)
        if rows["scales"].needs_order.any():
            return 0.0
        error = (rows["sum"] - rows["exact"]).norm(dim=1)
        return (error / (1e-4 * torch.maximum(rows["exact"].norm(dim=1), rows["noise"]))).max().item()


@pytest.mark.parametrize("seed", [0, 2])
def test_no_pattern_of_scales_along_the_keys_moves_a_row_by_more(seed):
    """The worst that a search finds: random patterns, and the worst of each start made worse."""
    rng = random.Random(seed)
    in_fixed_point = 0
    for start in range(12):
        pattern = max((Pattern.drawn(rng) for _ in range(8)), key=lambda x: x.worst_row(start))
        worst = pattern.worst_row(start)
        for _ in range(25):
            other = pattern.mutated(rng)
            error = other.worst_row(start)
            assert error <= 1, f"{error:.1f} times what is allowed: {other}"
            in_fixed_point += error > 0
            if error > worst:
                pattern, worst = other, error
    assert in_fixed_point > 50, "else the search says nothing"


def test_subnormal_gradients_do_not_overflow():
    """Rounding dS to bf16 doubles it here, in every key alike."""
    q, k, v, dout = (torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16) for _ in range(4))
    k[..., 0] = torch.tensor([1.0, -1.0])[:, None] * 2.0**40
    v[..., 0] = torch.tensor([1.0, -1.0])[:, None] * 2.0**-67
    dout[..., 0] = 1.0078125 * 2.0**-66
    for mantissa in (1.0, 1.25, 1.5, 1.75):
        tensors = (q, k * mantissa, v, dout)
        free, ordered = (public_gradients(tensors, schedule)[0] for schedule in ("order_free", "descending"))
        assert ordered[0, 0, 0, 0] > 0
        torch.testing.assert_close(free, ordered, rtol=1e-2, atol=0)


def test_one_column_that_overflows():
    """The other columns of the row stay finite, as in the ordered sum."""
    q, k, v, dout = (torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16) for _ in range(4))
    sign = torch.tensor([1.0, -1.0])[:, None]
    k += sign[:, None]
    k[..., 0] = sign * 2.0**66
    v[..., 0] = sign * 2.0**30
    dout[..., 0] = 2.0**33
    free, ordered = (public_gradients((q, k, v, dout), schedule)[0] for schedule in ("order_free", "descending"))
    assert ordered[..., 0].isinf().all() and ordered[..., 1:].isfinite().all()
    assert torch.equal(free, ordered)


@pytest.mark.parametrize("sizes", [(1.0, 1e-6, 3e37), (1e-23, 1e-24, 1e37)], ids=["huge_dout", "products_underflow"])
def test_what_statistics_cannot_hold_is_summed_in_order(sizes):
    """|dO| beyond fp32's square root of its largest number, and |V||K| below its smallest one."""
    q, *rest = make(distributions.normal, 200, 64, torch.bfloat16)
    tensors = (q, *(x * size for x, size in zip(rest, sizes)))
    free, ordered = (public_gradients(tensors, schedule)[0] for schedule in ("order_free", "descending"))
    assert ordered.isfinite().all() and ordered.any()
    assert torch.equal(free, ordered)

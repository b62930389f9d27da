"""Order-free accumulation on the GPU: inputs that are hard for fixed point, heads that need the order, NaN."""

import itertools
import math

import distributions
import gpu_support as support
import products
import pytest
import torch
from float64_reference import attention_float64
from gpu_support import Problem

from dash_attn import schedule

MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
HEAD_DIM = pytest.mark.parametrize("head_dim", [64, 96, 128])
KINDS = [*itertools.product((64, 96, 128), (torch.bfloat16, torch.float16), (False, True))]
KIND = pytest.mark.parametrize("head_dim, dtype, causal", KINDS, ids=str)


def changed(problem, change, device, seed=0):
    """q, k, v, dout drawn as normal, changed in fp32, rounded; within the range of fp16."""
    generator = torch.Generator().manual_seed(seed)
    of_queries, of_keys = (problem.seqlen_q, problem.heads), (problem.seqlen_k, problem.kv_heads)
    tensors = [
        torch.randn(problem.batch, *shape, problem.head_dim, generator=generator)
        for shape in (of_queries, of_keys, of_keys, of_queries)
    ]
    change(*tensors, generator)
    return [x.clamp(-6e4, 6e4).to(problem.dtype).to(device) for x in tensors]


def dq_of(inputs, problem):
    """dQ of order_free and of descending."""
    return [support.backward(inputs, problem, policy)["dq"] for policy in ("order_free", "descending")]


# A third of the kinds for each: what is hard for fixed point is in the numbers, and every kind has many of these.
CHANGED_KINDS = [
    (change, *kind)
    for i, change in enumerate(distributions.ROOMY + distributions.CRAMPED)
    for j, kind in enumerate(KINDS)
    if (i + j) % 3 == 0
]


@pytest.mark.parametrize(
    "change, head_dim, dtype, causal", CHANGED_KINDS, ids=lambda x: x.__name__ if callable(x) else str(x)
)
def test_no_less_accurate_than_the_ordered_sum(change, head_dim, dtype, causal, device):
    problem = Problem(1, 1100, 1100, 4, 2, head_dim, causal=causal, dtype=dtype)
    q, k, v, dout = changed(problem, change, device)
    inputs = support.with_forward(problem, q, k, v, dout)
    exact = attention_float64(q, k, v, dout, softmax_scale=problem.scale, causal=causal)
    free, ordered = (support.backward(inputs, problem, policy) for policy in ("order_free", "descending"))
    for name in ("dk", "dv"):
        mismatch = support.first_mismatch(name, free[name], ordered[name])
        assert mismatch is None, mismatch
    # Rows larger than the mean count by their relative error, or a heavy tail would leave two or three rows to compare.
    norms = exact.dq.norm(dim=-1, keepdim=True)
    weights = 1 / torch.maximum(norms, norms.mean()).clamp_min(1e-300)
    error, bar = (((x["dq"].double() - exact.dq) * weights).norm().item() for x in (free, ordered))
    assert error <= 1.001 * bar
    same = support.first_mismatch("dq", free["dq"], ordered["dq"]) is None
    if change in distributions.CRAMPED:
        assert same, "the ordered sum, bit for bit"
    elif change is not distributions.small_gradients or dtype == torch.bfloat16:
        assert not same, "fixed point"
        rows = (free["dq"].double() - ordered["dq"].double()).norm(dim=-1)
        # Rounding to 16 bits turns a difference of the sums by 1e-4 into one of an element's last bit here and there.
        eps = torch.finfo(dtype).eps
        assert bool((rows <= eps * ordered["dq"].double().norm(dim=-1) + eps * exact.dq.norm(dim=-1).mean()).all())


@MASKS
@HEAD_DIM
def test_no_less_accurate_with_sinks_and_a_gradient_of_the_log_sum_exp(head_dim, causal, device):
    problem = Problem(2, 700, 900, 4, 2, head_dim, causal=causal, sinks=True, lse_gradient=True)
    inputs = support.random_inputs(problem, device)
    exact = attention_float64(
        inputs.q, inputs.k, inputs.v, inputs.dout, softmax_scale=problem.scale, causal=causal, scores=inputs.scores
    )
    free, ordered = (support.backward(inputs, problem, policy) for policy in ("order_free", "descending"))
    same = [name for name in ordered if support.first_mismatch(name, free[name], ordered[name]) is None]
    assert same == [name for name in ordered if name != "dq"], "dq alone is in fixed point"
    error, bar = ((x["dq"].double() - exact.dq).norm().item() for x in (free, ordered))
    assert error <= 1.001 * bar


def cancelling(problem, device, spread):
    """q and k whose scores have that deviation, of terms some thousand times larger; one query a column of dout."""
    generator = torch.Generator().manual_seed(0)
    half, size = problem.head_dim // 2, (spread * 2**10) ** 0.5
    rows = [(problem.batch, n, problem.heads, half) for n in (problem.seqlen_q, problem.seqlen_k)]
    q, k = (size * torch.randn(shape, generator=generator).to(problem.dtype).float() for shape in rows)
    change = 1 + (torch.randint(0, 32, k.shape, generator=generator) == 0) / 2**7
    q, k = torch.cat((q, q), dim=-1), torch.cat((k, -k * change), dim=-1)
    v = torch.randn(k.shape, generator=generator)
    dout = torch.eye(problem.seqlen_q)[None, :, None].expand(problem.batch, -1, problem.heads, -1)
    return [x.to(device, problem.dtype).contiguous() for x in (q, k, v, dout)]


@MASKS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@HEAD_DIM
def test_products_have_the_same_bits_in_both_passes(head_dim, dtype, causal, device):
    """What the proof that no sum overflows builds on: probabilities of a row sum to 1 however few digits of its scores
    are right. dV of one-hot dO is the probabilities."""
    for spread in (20.0, 300.0):
        problem = Problem(3, head_dim, 1000, 4, 4, head_dim, causal=causal, dtype=dtype)
        q, k, v, dout = cancelling(problem, device, spread)
        inputs = support.with_forward(problem, q, k, v, dout)
        if spread > 100 and not causal:
            rows, keys = (x.double().transpose(1, 2) for x in (q, k))
            wrong = (inputs.softmax_lse - (rows @ keys.mT * problem.scale).logsumexp(dim=-1)).abs().max().item()
            assert wrong > 2**-4, f"{wrong}: or the test would say nothing"
        free, ordered = (support.backward(inputs, problem, policy) for policy in ("order_free", "descending"))
        sums = free["dv"].double().sum(dim=1)
        assert bool(((sums - 1).abs() <= 2**-6).all()), (spread, (sums - 1).abs().max())
        assert support.first_mismatch("dq", free["dq"], ordered["dq"]) is not None, "fixed point"
        error = (free["dq"].double() - ordered["dq"].double()).norm()
        assert error <= 1e-3 * ordered["dq"].double().norm(), spread


@MASKS
@HEAD_DIM
def test_only_the_heads_that_need_the_order_have_it(head_dim, causal, device, num_sms):
    problem = Problem(2, 700, 700, 8, 4, head_dim, causal=causal)
    q, k, v, dout = changed(problem, distributions.normal, device)
    bad = changed(problem, distributions.huge_value_row, device, seed=1)
    v[1, :, 2] = bad[2][1, :, 2]
    inputs = support.with_forward(problem, q, k, v, dout)
    free, ordered = dq_of(inputs, problem)
    support.assert_finite({"dq": free}, "order_free")
    for batch in range(2):
        for head in range(8):
            same = support.first_mismatch("dq", free[batch, :, head], ordered[batch, :, head]) is None
            assert same == (batch == 1 and head in (4, 5)), (batch, head)
    for sm_margin in (1, num_sms // 2, num_sms - 1):
        again = support.backward(inputs, problem, "order_free", sm_margin)["dq"]
        assert support.first_mismatch("dq", again, free) is None, sm_margin


@MASKS
@pytest.mark.parametrize("change", [distributions.huge_value_row, distributions.heavy_tailed_rows_of_dout])
@HEAD_DIM
def test_neighbours_with_outliers_change_no_bit(head_dim, change, causal, device):
    alone, batch = (Problem(sequences, 515, 515, 4, 2, head_dim, causal=causal) for sequences in (1, 3))
    inputs = support.random_inputs(alone, device)
    expected = support.backward(inputs, alone, "order_free")
    tensors = changed(batch, change, device)
    tensors[2][0, 9] = float("nan")
    for x, own in zip(tensors, (inputs.q, inputs.k, inputs.v, inputs.dout)):
        x[1] = own[0]
    gradients = support.backward(support.with_forward(batch, *tensors), batch, "order_free")
    support.assert_same_bits({name: x[1:2] for name, x in gradients.items()}, expected, change.__name__)


@pytest.mark.parametrize(
    "head_dim, dtype, causal, value", products.spread(KINDS, [math.nan, math.inf, -math.inf]), ids=str
)
def test_nan_where_the_ordered_sum_has_it(value, head_dim, dtype, causal, device):
    problem = Problem(2, 700, 900, 4, 2, head_dim, causal=causal, dtype=dtype)
    for place in range(4):
        tensors = list(support.random_qkv_dout(problem, device))
        tensors[place][1, 450, 1, 3] = value
        tensors[place][0, 699, 0, 5] = value
        inputs = support.with_forward(problem, *tensors)
        free, ordered = (support.backward(inputs, problem, policy) for policy in ("order_free", "descending"))
        for name in support.GRADIENTS:
            where = ~ordered[name].isfinite()
            assert bool((~free[name].isfinite() == where).all()), (place, name)
        assert bool(ordered["dq"].isfinite().any()) and not bool(ordered["dq"].isfinite().all())


@HEAD_DIM
def test_a_log_sum_exp_that_is_nan_reaches_its_row(head_dim, device):
    problem = Problem(1, 300, 300, 2, 1, head_dim, causal=True)
    inputs = support.random_inputs(problem, device)
    inputs.softmax_lse[0, 1, 200] = float("nan")
    dq = support.backward(inputs, problem, "order_free")["dq"]
    bad = torch.zeros_like(dq, dtype=torch.bool)
    bad[0, 200, 1] = True
    assert bool((dq.isnan() == bad).all())


@pytest.mark.parametrize(
    "scale, head_dim, causal", products.pairwise([1e-30, 1e-12, 1e12, 1e30], [64, 96, 128], [False, True]), ids=str
)
def test_gradients_of_any_size(head_dim, scale, causal, device):
    """Where the exponents end the ordered sum takes over, or what is lost is below the normal numbers."""
    problem = Problem(1, 300, 300, 2, 1, head_dim, causal=causal)
    q, k, v, dout = support.random_qkv_dout(problem, device)
    inputs = support.with_forward(problem, q, k, v, dout * scale)
    free, ordered = (x.double() for x in dq_of(inputs, problem))
    assert (free - ordered).norm() <= 1e-3 * ordered.norm() and ordered.norm() > 0


@pytest.mark.parametrize(
    "scale, head_dim, causal",
    products.pairwise([1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6], [64, 96, 128], [False, True]),
    ids=str,
)
def test_documents_of_different_size(scale, head_dim, causal, device):
    def change(*args):
        distributions.document_of_small_values(*args, scale=scale)

    problem = Problem(1, 4096, 4096, 2, 1, head_dim, causal=causal)
    free, ordered = dq_of(support.with_forward(problem, *changed(problem, change, device)), problem)
    for document in (slice(0, 2048), slice(2048, 4096)):
        x, y = free[:, document].double(), ordered[:, document].double()
        # Rounding to bf16 makes that of sums that differ by 1e-4.
        assert (x - y).norm() <= 1e-3 * y.norm(), document
    if scale == 1.0:
        assert support.first_mismatch("dq", free, ordered) is not None, "fixed point"


@pytest.mark.parametrize(
    "head_dim, dtype, causal, seqlen",
    # Every kernel at the length where it has the most to add up, and at one other.
    [(*kind, 32768) for kind in KINDS] + products.spread(KINDS, (512, 4096, 16384)),
    ids=str,
)
def test_normal_inputs_stay_in_fixed_point(seqlen, head_dim, dtype, causal, device):
    problem = Problem(1, seqlen, seqlen, 8, 2, head_dim, causal=causal, dtype=dtype)
    free, ordered = dq_of(support.random_inputs(problem, device), problem)
    for head in range(problem.heads):
        assert support.first_mismatch("dq", free[:, :, head], ordered[:, :, head]) is not None, head


def two_keys(head_dim, k, v, dout, others=0.0):
    """Two queries that attend to two opposite keys alike; `k`, `v`, `dout` in column 0, `others` in the others of K."""
    tensors = [torch.zeros(1, 2, 1, head_dim) for _ in range(4)]
    sign = torch.tensor([1.0, -1.0])[:, None]
    tensors[1] += others * sign[:, None]
    for x, column in zip(tensors[1:], (k * sign, v * sign, dout)):
        x[..., 0] = column
    return [x.bfloat16() for x in tensors]


@HEAD_DIM
@pytest.mark.parametrize("mantissa", [1.0, 1.25, 1.5, 1.75])
def test_subnormal_gradients_do_not_overflow(mantissa, head_dim, device):
    """Rounding to bf16 would double dS here, in every key alike, where the hardware kept numbers that small."""
    problem = Problem(1, 2, 2, 1, 1, head_dim, False)
    tensors = two_keys(head_dim, k=mantissa * 2.0**40, v=2.0**-67, dout=1.0078125 * 2.0**-66)
    free, ordered = dq_of(support.with_forward(problem, *(x.to(device) for x in tensors)), problem)
    torch.testing.assert_close(free, ordered, rtol=1e-2, atol=0)


@HEAD_DIM
def test_one_column_that_overflows(head_dim, device):
    problem = Problem(1, 2, 2, 1, 1, head_dim, False)
    tensors = two_keys(head_dim, k=2.0**66, v=2.0**30, dout=2.0**33, others=1.0)
    free, ordered = dq_of(support.with_forward(problem, *(x.to(device) for x in tensors)), problem)
    assert bool(ordered[..., 0].isinf().all()) and bool(ordered[..., 1:].isfinite().all())
    assert support.first_mismatch("dq", free, ordered) is None


@MASKS
@pytest.mark.parametrize("sizes", [(1.0, 1e-6, 3e37), (1e-23, 1e-24, 1e37)], ids=["huge_dout", "products_underflow"])
@HEAD_DIM
def test_what_statistics_cannot_hold_is_summed_in_order(head_dim, sizes, causal, device):
    """|dO| beyond fp32's square root of its largest number, and |V||K| below its smallest one."""
    problem = Problem(1, 300, 300, 2, 1, head_dim, causal=causal)
    q, k, v, dout = support.random_qkv_dout(problem, device)
    tensors = (q, *(x * size for x, size in zip((k, v, dout), sizes)))
    free, ordered = dq_of(support.with_forward(problem, *tensors), problem)
    assert bool(ordered.isfinite().all()) and bool(ordered.any())
    assert support.first_mismatch("dq", free, ordered) is None


@MASKS
@HEAD_DIM
def test_rows_that_see_no_key_and_rows_without_gradient(head_dim, causal, device):
    problem = Problem(2, 700, 300, 4, 2, head_dim, causal=causal)
    q, k, v, dout = support.random_qkv_dout(problem, device)
    dout[:, 600:] = 0
    dq = support.backward(support.with_forward(problem, q, k, v, dout), problem, "order_free")["dq"]
    unseen = 400 if causal else 0
    assert not dq[:, :unseen].any() and not dq[:, 600:].any() and dq[:, unseen:600].any()


@HEAD_DIM
def test_workspace_is_dq_and_two_percent(head_dim, device):
    """Of the rows of whole query tiles."""
    for seqlen in (512, 4096, 16384):
        problem = Problem(16384 // seqlen, seqlen, seqlen, 4, 4, head_dim, causal=True)
        used = support.workspace_bytes(problem, "order_free", device)
        tile_q, _ = schedule.tile_shape(head_dim)
        rows = math.ceil(seqlen / tile_q) * tile_q
        elements = problem.batch * rows * problem.heads * head_dim
        assert used <= 1.02 * 4 * elements + (1 << 16), used / (4 * elements)


@pytest.mark.parametrize("policy", schedule.YARDSTICKS)
def test_yardsticks_cannot_be_chosen(policy, device):
    problem = Problem(1, 64, 64, 1, 1, 64, True)
    inputs = support.random_inputs(problem, device)
    with pytest.raises(ValueError, match="schedule must be one of"):
        support.backward(inputs, problem, policy)


@pytest.mark.parametrize("options", [
    dict(head_dim=192), dict(head_dim=256), dict(head_dim=64, softcap=20.0), dict(head_dim=64, alibi="heads"),
    dict(head_dim=64, dropout_p=0.1), dict(head_dim=128, dropout_p=0.1),
], ids=str)  # fmt: skip
def test_wide_heads_changed_scores_and_dropout_raise_before_a_launch(options, device):
    problem = Problem(1, 64, 64, 1, 1, causal=True, **options)
    inputs = support.random_inputs(problem, device)
    gradients = support.nan_gradients(inputs)
    with pytest.raises(ValueError, match="^schedule='order_free' supports plain scores without dropout up to"):
        support.backward_into(gradients, inputs, problem, "order_free")
    assert all(bool(x.isnan().all()) for x in gradients.values())

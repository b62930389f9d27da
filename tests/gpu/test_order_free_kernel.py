"""Order-free accumulation on the GPU: inputs that are hard for fixed point, heads that need the order, NaN."""

import distributions
import gpu_support as support
import pytest
import torch
from float64_reference import attention_float64
from gpu_support import Problem

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def changed(problem, change, device, seed=0):
    """q, k, v, dout drawn as normal, changed in fp32, rounded; within the range of fp16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(problem.seqlen_q, problem.heads), (problem.seqlen_k, problem.kv_heads)]
    tensors = [
        torch.randn(problem.batch, *shape, problem.head_dim, generator=generator)
        for shape in (shapes[0], *shapes[1:] * 2)
    ]
    dout = torch.randn(problem.batch, *shapes[0], problem.head_dim, generator=generator)
    change(*tensors, dout, generator)
    return [x.clamp(-6e4, 6e4).to(problem.dtype).to(device) for x in (*tensors, dout)]


def dq_of(inputs, problem):
    """dQ of order_free and of descending."""
    return [support.backward(inputs, problem, policy)["dq"] for policy in ("order_free", "descending")]


@MASKS
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("change", distributions.ROOMY + distributions.CRAMPED, ids=lambda f: f.__name__)
def test_no_less_accurate_than_the_ordered_sum(change, head_dim, dtype, causal, device):
    problem = Problem(1, 1100, 1100, 4, 2, head_dim, causal, dtype)
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
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_only_the_heads_that_need_the_order_have_it(head_dim, causal, device, num_sms):
    problem = Problem(2, 700, 700, 8, 4, head_dim, causal)
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
def test_neighbours_with_outliers_change_no_bit(change, causal, device):
    alone, batch = Problem(1, 515, 515, 4, 2, 128, causal), Problem(3, 515, 515, 4, 2, 128, causal)
    inputs = support.random_inputs(alone, device)
    expected = support.backward(inputs, alone, "order_free")
    tensors = changed(batch, change, device)
    tensors[2][0, 9] = float("nan")
    for x, own in zip(tensors, (inputs.q, inputs.k, inputs.v, inputs.dout)):
        x[1] = own[0]
    gradients = support.backward(support.with_forward(batch, *tensors), batch, "order_free")
    support.assert_same_bits({name: x[1:2] for name, x in gradients.items()}, expected, change.__name__)


@MASKS
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_where_the_ordered_sum_has_it(value, head_dim, dtype, causal, device):
    problem = Problem(2, 700, 900, 4, 2, head_dim, causal, dtype)
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


def test_a_log_sum_exp_that_is_nan_reaches_its_row(device):
    problem = Problem(1, 300, 300, 2, 1, 128, True)
    inputs = support.random_inputs(problem, device)
    inputs.softmax_lse[0, 1, 200] = float("nan")
    dq = support.backward(inputs, problem, "order_free")["dq"]
    bad = torch.zeros_like(dq, dtype=torch.bool)
    bad[0, 200, 1] = True
    assert bool((dq.isnan() == bad).all())


@MASKS
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_gradients_of_any_size(scale, causal, device):
    """Where the exponents end the ordered sum takes over, or what is lost is below the normal numbers."""
    problem = Problem(1, 300, 300, 2, 1, 64, causal)
    q, k, v, dout = support.random_qkv_dout(problem, device)
    inputs = support.with_forward(problem, q, k, v, dout * scale)
    free, ordered = (x.double() for x in dq_of(inputs, problem))
    assert (free - ordered).norm() <= 1e-3 * ordered.norm() and ordered.norm() > 0


@MASKS
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("scale", [1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
def test_documents_of_different_size(scale, head_dim, causal, device):
    def change(*args):
        distributions.document_of_small_values(*args, scale=scale)

    problem = Problem(1, 4096, 4096, 2, 1, head_dim, causal)
    free, ordered = dq_of(support.with_forward(problem, *changed(problem, change, device)), problem)
    for document in (slice(0, 2048), slice(2048, 4096)):
        x, y = free[:, document].double(), ordered[:, document].double()
        # Rounding to bf16 makes that of sums that differ by 1e-4.
        assert (x - y).norm() <= 1e-3 * y.norm(), document
    if scale == 1.0:
        assert support.first_mismatch("dq", free, ordered) is not None, "fixed point"


@MASKS
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("seqlen", [512, 4096, 16384, 32768])
def test_normal_inputs_stay_in_fixed_point(seqlen, head_dim, dtype, causal, device):
    problem = Problem(1, seqlen, seqlen, 8, 2, head_dim, causal, dtype)
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


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("mantissa", [1.0, 1.25, 1.5, 1.75])
def test_subnormal_gradients_do_not_overflow(mantissa, head_dim, device):
    """Rounding to bf16 would double dS here, in every key alike, where the hardware kept numbers that small."""
    problem = Problem(1, 2, 2, 1, 1, head_dim, False)
    tensors = two_keys(head_dim, k=mantissa * 2.0**40, v=2.0**-67, dout=1.0078125 * 2.0**-66)
    free, ordered = dq_of(support.with_forward(problem, *(x.to(device) for x in tensors)), problem)
    torch.testing.assert_close(free, ordered, rtol=1e-2, atol=0)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_one_column_that_overflows(head_dim, device):
    problem = Problem(1, 2, 2, 1, 1, head_dim, False)
    tensors = two_keys(head_dim, k=2.0**66, v=2.0**30, dout=2.0**33, others=1.0)
    free, ordered = dq_of(support.with_forward(problem, *(x.to(device) for x in tensors)), problem)
    assert bool(ordered[..., 0].isinf().all()) and bool(ordered[..., 1:].isfinite().all())
    assert support.first_mismatch("dq", free, ordered) is None


@MASKS
@pytest.mark.parametrize("sizes", [(1.0, 1e-6, 3e37), (1e-23, 1e-24, 1e37)], ids=["huge_dout", "products_underflow"])
def test_what_statistics_cannot_hold_is_summed_in_order(sizes, causal, device):
    """|dO| beyond fp32's square root of its largest number, and |V||K| below its smallest one."""
    problem = Problem(1, 300, 300, 2, 1, 128, causal)
    q, k, v, dout = support.random_qkv_dout(problem, device)
    tensors = (q, *(x * size for x, size in zip((k, v, dout), sizes)))
    free, ordered = dq_of(support.with_forward(problem, *tensors), problem)
    assert bool(ordered.isfinite().all()) and bool(ordered.any())
    assert support.first_mismatch("dq", free, ordered) is None


@MASKS
def test_rows_that_see_no_key_and_rows_without_gradient(causal, device):
    problem = Problem(2, 700, 300, 4, 2, 128, causal)
    q, k, v, dout = support.random_qkv_dout(problem, device)
    dout[:, 600:] = 0
    dq = support.backward(support.with_forward(problem, q, k, v, dout), problem, "order_free")["dq"]
    unseen = 400 if causal else 0
    assert not dq[:, :unseen].any() and not dq[:, 600:].any() and dq[:, unseen:600].any()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_workspace_is_dq_and_two_percent(head_dim, device):
    for seqlen in (512, 4096, 16384):
        problem = Problem(16384 // seqlen, seqlen, seqlen, 4, 4, head_dim, True)
        used = support.workspace_bytes(problem, "order_free", device)
        elements = problem.batch * seqlen * problem.heads * head_dim
        assert used <= 1.02 * 4 * elements + (1 << 16), used / (4 * elements)


def test_the_yardstick_cannot_be_chosen(device):
    problem = Problem(1, 64, 64, 1, 1, 64, True)
    inputs = support.random_inputs(problem, device)
    with pytest.raises(ValueError, match="schedule must be one of"):
        support.backward(inputs, problem, "atomic")

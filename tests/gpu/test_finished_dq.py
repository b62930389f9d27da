"""dQ that the main kernel makes of its sums, as it does of calls with many work tiles: the bits are those of a sequence
alone, whose dQ a kernel behind it makes. Of `shift` at head_dim 64 it is the other way round; at 128 the main kernel
always makes it, and the bits that converting gave are in golden_bits.json."""

import dataclasses
import itertools

import gpu_support as support
import pack_checks
import pytest
import torch
from bit_checks import check_sm_margins, check_under_load
from column_support import FORMS
from gpu_support import Problem
from kernel_names import kernels, ours
from products import spread

# batch, seqlen_q, seqlen_k, heads, kv_heads. The last has query heads in splits.
SHAPES = {
    "one KV tile": (64, 130, 100, 16, 16),
    "two": (32, 200, 256, 16, 16),
    "three": (32, 300, 300, 24, 12),
    "queries without keys": (22, 513, 390, 12, 12),
    "seven": (16, 700, 850, 12, 12),
    "nine at 128 alone": (16, 1100, 1100, 16, 8),
    "splits": (16, 2100, 1000, 32, 8),
}
KINDS = {
    "full": dict(causal=False),
    "causal": dict(causal=True),
    "window": dict(causal=False, window=(200, 30)),
    "chunks": dict(causal=True, attention_chunk=150),
}
# Of plain scores: beside others dQ is always converted.
FEATURES = {
    "sinks": dict(sinks=True, lse_gradient=True),
    "fp16": dict(dtype=torch.float16),
}

PACK_LENGTHS = [(130, 250), (5, 400), (200, 0), (0, 7), (64, 64), (1, 129), (300, 280), (257, 513)] * 16


def sequence_of(inputs, number):
    """The inputs of a sequence alone."""
    one = slice(number, number + 1)
    scores = inputs.scores
    if scores.dsoftmax_lse is not None:
        scores = scores._replace(dsoftmax_lse=scores.dsoftmax_lse[one])
    columns = None if inputs.columns is None else inputs.columns[one]
    return support.Inputs(*(x[one] for x in inputs.tensors()), scores, columns)


def assert_as_alone(problem, inputs, policy):
    alone = dataclasses.replace(problem, batch=1)
    together = support.backward(inputs, problem, policy)
    for number in {0, problem.batch // 2, problem.batch - 1}:
        expected = support.backward(sequence_of(inputs, number), alone, policy)
        expected.pop("dsinks", None)  # a sum over the batch
        own = {name: together[name][number : number + 1] for name in expected}
        support.assert_same_bits(own, expected, f"{problem} {policy}, sequence {number}")


# Who does is decided by the shape, the mask and the head_dim; each policy in half of the cases.
@pytest.mark.parametrize(
    "shape, kind, head_dim, policy",
    spread(itertools.product(SHAPES, KINDS, (64, 128)), ("auto", "order_free")),
    ids=str,
)
def test_who_makes_dq(shape, kind, head_dim, policy, device):
    """Or the other tests would compare one way with itself."""
    problem = Problem(*SHAPES[shape], head_dim, **KINDS[kind])
    inputs = support.random_inputs(problem, device)
    alone = dataclasses.replace(problem, batch=1)
    of_batch = kernels(lambda: support.backward(inputs, problem, policy))
    of_one = kernels(lambda: support.backward(sequence_of(inputs, 0), alone, policy))
    many_short_tiles = shape == "nine at 128 alone" and head_dim == 64 and kind != "full"
    assert ours(of_batch, "backward_kernel") and ours(of_batch, "convert_kernel") == many_short_tiles
    assert ours(of_one, "convert_kernel")


@pytest.mark.parametrize("head_dim, batch, seqlen, converts", [
    (64, 1, 1700, False), (64, 2, 1700, True), (64, 2, 2000, False), (128, 1, 130, False), (128, 2, 1700, False),
])  # fmt: skip
def test_who_makes_dq_of_divided_tiles(head_dim, batch, seqlen, converts, device):
    """112 work tiles at 64 run side by side, 224 do not."""
    problem = Problem(batch, seqlen, seqlen, 8, 8, head_dim, False)
    inputs = support.random_inputs(problem, device)
    of_call = kernels(lambda: support.backward(inputs, problem, "shift"))
    assert ours(of_call, "backward_kernel") and ours(of_call, "convert_kernel") == converts
    if converts:
        assert_as_alone(problem, inputs, "shift")


def test_bits_of_divided_tiles_whatever_sms_are_left(device, num_sms):
    """Whose number decides who makes dQ."""
    problem = Problem(1, 1700, 1700, 8, 8, 64, False)
    inputs = support.random_inputs(problem, device)
    all_sms, few = (support.backward(inputs, problem, "shift", sm_margin) for sm_margin in (0, num_sms // 2))
    support.assert_same_bits(few, all_sms, "half of the SMs")
    of_few = kernels(lambda: support.backward(inputs, problem, "shift", num_sms // 2))
    assert ours(of_few, "convert_kernel")


# Each shape under each mask by the kernels of both rows of the table, once of whole rows and once of padded ones.
@pytest.mark.parametrize(
    "shape, kind, head_dim",
    [
        (shape, kind, head_dim)
        for number, (shape, kind) in enumerate(itertools.product(SHAPES, KINDS))
        for head_dim in ((64, 120), (40, 128))[number % 2]
    ],
    ids=str,
)
def test_as_alone(shape, kind, head_dim, device):
    problem = Problem(*SHAPES[shape], head_dim, **KINDS[kind])
    inputs = support.random_inputs(problem, device)
    for policy in ["auto", *support.policies(problem)]:
        assert_as_alone(problem, inputs, policy)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, kind, head_dim, device):
    problem = Problem(*SHAPES["three"], head_dim, **KINDS[kind], **FEATURES[feature])
    inputs = support.random_inputs(problem, device)
    for policy in ("auto", "order_free"):
        assert_as_alone(problem, inputs, policy)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("place", range(4), ids=["q", "k", "v", "dout"])
def test_what_is_not_finite_stays_where_it_is(place, causal, head_dim, device):
    problem = Problem(*SHAPES["three"], head_dim, causal)
    tensors = support.random_qkv_dout(problem, device)
    for sequence, value in ((0, float("nan")), (problem.batch - 1, float("inf"))):
        tensors[place][sequence, 150, 1, 3] = value
    inputs = support.with_forward(problem, *tensors)
    inputs.softmax_lse[problem.batch // 2, 1, 200] = float("nan")
    for policy in ("auto", "order_free"):
        assert_as_alone(problem, inputs, policy)
        gradients = support.backward(inputs, problem, policy)
        whole = slice(1, problem.batch // 2)
        support.assert_finite({name: x[whole] for name, x in gradients.items()}, policy)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scale", [1e-35, 1e-36, 1e-37])
def test_subnormal_sums(scale, head_dim, device):
    """Bulk additions keep subnormal numbers, and so does the last one, of what is in registers."""
    problem = Problem(*SHAPES["three"], head_dim, False)
    q, k, v, dout = support.random_qkv_dout(problem, device)
    inputs = support.with_forward(problem, q, k, v, dout * scale)
    for policy in ("auto", "spt", "order_free"):
        assert_as_alone(problem, inputs, policy)
    dq = support.backward(inputs, problem, "auto")["dq"].float().abs()
    assert bool(((dq > 0) & (dq < 2.0**-126)).any()), "or the test would say nothing"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_row_that_others_have_marked(head_dim, device):
    """Whose dS leaves fp16's range in the first KV tile, and whose last partial is finite."""
    problem = Problem(*SHAPES["three"], head_dim, False, dtype=torch.float16)
    q, k, v, dout = support.random_qkv_dout(problem, device)
    k[..., 0], q[..., 0] = 0, 0
    q[:, 250, 1, 0] = 40  # attends to the first two keys, to each by half
    k[:, 0, :, 0] = 40
    k[:, 1] = k[:, 0]
    v *= 100
    v[:, 1] = -v[:, 0]
    dout[:, 250, 1] = 6000 * v[:, 0, 0].sign()
    inputs = support.with_forward(problem, q, k, v, dout)
    free, ordered = (support.backward(inputs, problem, policy)["dq"] for policy in ("order_free", "descending"))
    bad = torch.zeros(free.shape[:3], dtype=torch.bool, device=device)
    bad[:, 250, 1] = True
    assert bool((free.isnan().all(dim=-1) == bad).all()) and bool((free.isnan().any(dim=-1) == bad).all())
    assert support.first_mismatch("dq", free[:, :200], ordered[:, :200]) is not None, "fixed point"
    assert_as_alone(problem, inputs, "order_free")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_head_that_needs_the_order(head_dim, device):
    problem = Problem(*SHAPES["three"], head_dim, True)
    q, k, v, dout = support.random_qkv_dout(problem, device)
    v[3, 7, 2] *= 1e4
    inputs = support.with_forward(problem, q, k, v, dout)
    free, ordered = (support.backward(inputs, problem, policy)["dq"] for policy in ("order_free", "descending"))
    assert support.first_mismatch("dq", free[3, :, 4:6], ordered[3, :, 4:6]) is None
    assert support.first_mismatch("dq", free[3, :, :4], ordered[3, :, :4]) is not None
    assert_as_alone(problem, inputs, "order_free")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_packs(kind, head_dim, device):
    """Whose mean lengths and number of work tiles decide; a sequence alone has too few."""
    pool = pack_checks.Pool(Problem(1, 0, 0, 16, 8, head_dim, **KINDS[kind]), device)
    pack = pack_checks.pack_of_lengths(pool, PACK_LENGTHS)
    found = {policy: pack_checks.varlen_attention(pack, policy) for policy in ("auto", "spt", "order_free")}
    pack_checks.assert_as_alone(pack, found)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal, bounds", FORMS)
def test_packs_with_masks_by_key_columns(causal, bounds, head_dim, device):
    problem = Problem(1, 0, 0, 16, 8, head_dim, causal, column_bounds=bounds, column_heads=True)
    pack = pack_checks.pack_of_lengths(pack_checks.Pool(problem, device), PACK_LENGTHS)
    pack_checks.assert_as_alone(pack, {"auto": pack_checks.varlen_attention(pack, "auto")})
    names = kernels(lambda: pack_checks.varlen_attention(pack, "auto"))
    assert ours(names, "backward_kernel") and not ours(names, "convert_kernel")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal, bounds", FORMS)
def test_masks_by_key_columns(causal, bounds, head_dim, perturbation, device, num_sms):
    """In every other sequence, no KV tile adds to the query tiles of rows 128 to 255."""
    problem = Problem(*SHAPES["three"], head_dim, causal, column_bounds=bounds, column_heads=True)
    columns = support.random_columns(problem, device)
    if bounds == 4 or (causal and bounds == 2):
        columns[1::2, ..., 0], columns[1::2, ..., 1] = 128, 256
    else:
        columns[1::2, ..., 0].clamp_(max=128)
    inputs = support.with_forward(problem, *support.random_qkv_dout(problem, device), columns=columns)
    assert not support.backward(inputs, problem, "auto")["dq"][1::2, 128:256].any()
    assert_as_alone(problem, inputs, "auto")
    check_under_load(inputs, problem, perturbation, 12, 4)
    check_sm_margins(inputs, problem, num_sms, (1, num_sms // 2))
    of_batch = kernels(lambda: support.backward(inputs, problem, "auto"))
    of_one = kernels(lambda: support.backward(sequence_of(inputs, 0), dataclasses.replace(problem, batch=1), "auto"))
    assert ours(of_batch, "backward_kernel") and not ours(of_batch, "convert_kernel")
    assert ours(of_one, "convert_kernel")


@pytest.mark.parametrize("head_dim, causal", list(itertools.product((64, 128), (False, True))))
def test_under_load(head_dim, causal, perturbation, device, num_sms):
    problem = Problem(*SHAPES["three"], head_dim, causal)
    inputs = support.random_inputs(problem, device)
    check_under_load(inputs, problem, perturbation, 30, 4)
    check_sm_margins(inputs, problem, num_sms, (1, num_sms // 2, num_sms - 2))

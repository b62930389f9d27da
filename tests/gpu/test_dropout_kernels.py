"""The kernels that drop: outputs against float64 with the exported mask, what dropout must not change, and errors."""

import dataclasses
import itertools
import random

import dropout_checks
import gpu_support as support
import gradient_check
import pytest
import torch
from dropout_checks import DTYPES, HEAD_DIMS, MASKS, problem_of
from pack_checks import Pool, accuracy_failures, assert_as_alone, lay_out, make_pack, varlen_attention
from products import spread

import dash_attn
from dash_attn.dropout import DropoutState

DIMS = pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
MASK = pytest.mark.parametrize("mask", MASKS)
THREE_MASKS = pytest.mark.parametrize("mask", ["full", "causal", "both"])  # a kernel each at 64 and 128
# Below a tile, at the ends of blocks of 32 and of tiles, unequal, and over several tiles.
LENGTHS = [(1, 1), (33, 65), (130, 200), (300, 130), (515, 515)]
SINKS = dict(sinks=True, lse_gradient=True)


def assert_right(problems, device: str) -> None:
    lines = gradient_check.check_together(problems, device, support.policies)
    assert not lines, "\n".join(lines)


@MASK
@pytest.mark.parametrize("dtype", DTYPES)
@DIMS
def test_gradients_with_the_exported_mask(head_dims, dtype, mask, device):
    options = dict(MASKS[mask], dtype=DTYPES[dtype])
    heads = itertools.cycle([(4, 4), (6, 2), (8, 1)])
    assert_right((problem_of(head_dims, (2, *x, *next(heads)), **options) for x in LENGTHS), device)


@DIMS
def test_probabilities(head_dims, device):
    masks = itertools.cycle(MASKS.values())
    ps = (0.125, 0.5, 0.9, 1e-9, 0.999)
    assert_right((problem_of(head_dims, (2, 200, 300, 4, 2), p, **next(masks)) for p in ps), device)


@THREE_MASKS
@DIMS
def test_sinks_and_a_gradient_of_the_log_sum_exp(head_dims, mask, device):
    assert_right(
        (problem_of(head_dims, (2, *x, 8, 2), **MASKS[mask], **SINKS) for x in ((130, 200), (300, 130))), device
    )


@pytest.mark.parametrize("mask", ["full", "causal"])
@DIMS
def test_query_heads_over_several_work_tiles(head_dims, mask, device):
    """Split, so that dK and dV are sums over work tiles; what is kept is scaled once."""
    problem = problem_of(head_dims, (1, 600, 200, 64, 1), **MASKS[mask])
    assert support.splits(problem) > 1, problem
    assert_right([problem], device)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 120, 136, 248])
def test_padded_head_dims(head_dim, device):
    masks = itertools.cycle(MASKS.values())
    lengths = (20, 5), (130, 200)
    assert_right((problem_of((head_dim, head_dim), (2, *x, 4, 2), **next(masks)) for x in lengths), device)


@pytest.mark.parametrize("softmax_scale", [0.3, -0.2, 0.0])
@pytest.mark.parametrize("head_dims", [(64, 64), (256, 256)], ids=str)
def test_softmax_scale(head_dims, softmax_scale, device):
    assert_right([problem_of(head_dims, (2, 130, 200, 4, 2), causal=True, softmax_scale=softmax_scale)], device)


@THREE_MASKS
@DIMS
def test_long_sequences_of_many_heads(head_dims, mask, device):
    """More work than SMs: each CTA of either pass has several tiles, of several heads and sequences."""
    assert_right([problem_of(head_dims, (3, 1100, 1100, 16, 4), **MASKS[mask])], device)


@THREE_MASKS
@DIMS
def test_bits_that_nobody_may_look_at_change_nothing(head_dims, mask, device):
    """Of blocks without a pair that is seen, and of rows past the end: as they were made, and inverted."""
    problem = problem_of(head_dims, (2, 301, 333, 4, 2), **MASKS[mask])
    inputs = support.random_inputs(problem, device)
    poisoned = inputs.scores.dropout.bits
    made = dropout_checks.bits_for(problem, DropoutState(inputs.scores.dropout.rng_state)).bits
    assert not torch.equal(made, poisoned)
    other = dataclasses.replace(inputs, scores=dropout_checks.with_bits(inputs, made))
    for policy in support.policies(problem):
        found, expected = (dropout_checks.results(problem, x, policy) for x in (inputs, other))
        support.assert_same_bits(found, expected, f"{problem} {policy}")


@THREE_MASKS
@DIMS
def test_log_sum_exp_is_the_one_without_dropout(head_dims, mask, device):
    for options in ({}, SINKS):
        problem = problem_of(head_dims, (2, 301, 333, 8, 2), **MASKS[mask], **options)
        inputs = support.random_inputs(problem, device)
        _, plain = dropout_checks.without_dropout(problem, inputs)
        mismatch = support.first_mismatch("softmax_lse", inputs.softmax_lse, plain.softmax_lse)
        assert mismatch is None, f"{problem}: {mismatch}"


@pytest.mark.parametrize(
    "head_dims, mask, scaling",
    spread(itertools.product(HEAD_DIMS, ("full", "causal", "both")), [(1e-9, 1), (0.5, 2)]),
    ids=str,
)
def test_all_bits_set_only_scale(head_dims, mask, scaling, device):
    """1 / (1 - p) is a power of two, so that scaling by it is exact: as without dropout, times that. In bf16, whose
    range is fp32's."""
    p, factor = scaling
    problem = problem_of(head_dims, (2, 301, 333, 8, 2), p, **MASKS[mask])
    inputs = support.random_inputs(problem, device)
    scores = dropout_checks.with_bits(inputs, torch.full_like(inputs.scores.dropout.bits, 255))
    inputs = dataclasses.replace(inputs, scores=scores)
    plain_problem, plain = dropout_checks.without_dropout(problem, inputs)
    for policy in support.policies(problem):
        found = dropout_checks.results(problem, inputs, policy)
        expected = dropout_checks.results(plain_problem, plain, policy)
        expected = {name: x if name == "softmax_lse" else factor * x for name, x in expected.items()}
        support.assert_same_bits(found, expected, f"{problem} {policy}")


def test_all_bits_zero_drop_everything(device):
    """As p near 1 may: the output and all gradients are 0, the log-sum-exp is what it is."""
    for head_dims in HEAD_DIMS:
        problem = problem_of(head_dims, (2, 130, 200, 4, 2), **MASKS["causal"])
        inputs = support.random_inputs(problem, device)
        scores = dropout_checks.with_bits(inputs, torch.zeros_like(inputs.scores.dropout.bits))
        inputs = dataclasses.replace(inputs, scores=scores)
        for policy in support.policies(problem):
            found = dropout_checks.results(problem, inputs, policy)
            assert all(not bool(found[name].any()) for name in ("out", *support.GRADIENTS)), f"{problem} {policy}"


@pytest.mark.parametrize("mask, options", [("full", SINKS), ("causal", {}), ("both", SINKS)])
@DIMS
def test_packs(head_dims, mask, options, device):
    """Each sequence has the bits that it has alone, with a state of its own, and they are right; gaps, rows in use,
    empty sequences and one that is poisoned."""
    problem = problem_of(head_dims, (1, 0, 0, 4, 2), **MASKS[mask], **options)
    pool, chance = Pool(problem, device), random.Random(1)
    lengths = [(70, 65), (0, 0), (129, 200), (1, 1), (0, 40), (300, 130)]
    sequences = [pool.get(*own) for own in lengths]
    for gaps, poisoned in ((False, None), (True, 2)):
        rows = [lay_out(own, chance, gaps=gaps) for own in zip(*lengths)]
        pack = make_pack(sequences, *rows, poisoned=poisoned)
        found = {policy: varlen_attention(pack, policy) for policy in support.policies(problem)}
        if poisoned is None:
            lines = accuracy_failures(pack, found)
            assert not lines, f"{pack}:\n" + "\n".join(lines)
        assert_as_alone(pack, found)


def call(device: str, batch: int = 2, length: int = 40):
    problem = problem_of((64, 64), (batch, length, length, 4, 2), causal=True)
    return problem, support.random_inputs(problem, device)


@pytest.mark.parametrize("scores", [dict(softcap=5.0), dict(alibi_slopes=True)], ids=["softcap", "slopes"])
def test_no_kernel_drops_beside_changed_scores(scores, device):
    _, inputs = call(device)
    if "alibi_slopes" in scores:
        scores = dict(alibi_slopes=torch.ones(4, device=device))
    message = "dropout_p must be 0.0 with softcap or alibi_slopes on a GPU"
    with pytest.raises(NotImplementedError, match=message):
        dash_attn.flash_attn_func(inputs.q, inputs.k, inputs.v, dropout_p=0.1, **scores)


@pytest.mark.parametrize("change, error, message", [
    (lambda bits: bits[:, :2].contiguous(), ValueError, "dropout_bits must have shape"),
    (lambda bits: bits[:, :, :1].contiguous(), ValueError, "dropout_bits must have shape"),
    (lambda bits: bits[..., :1, :].contiguous(), ValueError, "dropout_bits must have shape"),
    (lambda bits: bits.int(), TypeError, "dropout_bits must be torch.uint8"),
    (lambda bits: bits.cpu(), ValueError, "dropout_bits must be on the device of q"),
    (lambda bits: bits.mT.contiguous().mT, ValueError, "dropout_bits must be contiguous"),
])  # fmt: skip
def test_wrong_bits_raise_and_nothing_is_written(change, error, message, device):
    problem, inputs = call(device)
    scores = dropout_checks.with_bits(inputs, change(inputs.scores.dropout.bits))
    with pytest.raises(error, match=message):
        support.forward(problem, inputs.q, inputs.k, inputs.v, scores=scores)
    gradients = support.nan_gradients(inputs)
    with pytest.raises(error, match=message):
        support.backward_into(gradients, dataclasses.replace(inputs, scores=scores), problem, "descending")
    assert all(bool(x.isnan().all()) for x in gradients.values())


@pytest.mark.parametrize("change, error, message", [
    (lambda state: state.int(), TypeError, "rng_state must be torch.int64"),
    (lambda state: state.cpu(), ValueError, "rng_state must be on the device of q"),
    (lambda state: state[:1], ValueError, "rng_state must have shape"),
])  # fmt: skip
def test_wrong_states_raise(change, error, message, device):
    problem, inputs = call(device)
    dropout = inputs.scores.dropout._replace(bits=None, rng_state=change(inputs.scores.dropout.rng_state))
    with pytest.raises(error, match=message):
        support.forward(problem, inputs.q, inputs.k, inputs.v, scores=inputs.scores._replace(dropout=dropout))


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_bad_probabilities_raise(p, device):
    problem, inputs = call(device)
    with pytest.raises(ValueError, match="dropout_p must be from 0 to below 1 in fp32, got"):
        dash_attn.flash_attn_func(inputs.q, inputs.k, inputs.v, dropout_p=p)
    scores = dropout_checks.with_bits(inputs, inputs.scores.dropout.bits, p)
    with pytest.raises(ValueError, match="dropout_p must be above 0 and below 1 in fp32"):
        support.forward(problem, inputs.q, inputs.k, inputs.v, scores=scores)

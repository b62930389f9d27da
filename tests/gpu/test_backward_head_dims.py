"""The backward at head dims above 128 and of unequal pairs, where one consumer owns dV and the other dK."""

import itertools
import random
from collections.abc import Iterable

import gpu_support as support
import gradient_check
import pytest
import torch
from bit_checks import check_sm_margins, check_under_load
from gpu_support import Problem
from pack_checks import Pool, assert_as_alone, random_pack, varlen_attention
from products import pairwise
from test_forward_head_dims import (
    DIMS,
    DTYPES,
    EVERY_KERNEL,
    LENGTHS,
    MASK,
    MASKS,
    OF_PADDED,
    ROWS,
    problem_of,
    with_scores,
)

CALLS, CALLS_IN_FLIGHT = 40, 8
PACKS = 6


def assert_right(problems: Iterable[Problem], device: str) -> None:
    lines = gradient_check.check_together(problems, device, lambda problem: ["auto", *support.policies(problem)])
    assert not lines, "\n".join(lines)


@EVERY_KERNEL
def test_all_lengths_and_policies(head_dims, dtype, mask, device):
    shapes = [(2, *lengths, *heads) for lengths, heads in itertools.product(LENGTHS, ((4, 4), (6, 2), (8, 1)))]
    assert_right((problem_of(head_dims, shape, DTYPES[dtype], **MASKS[mask]) for shape in shapes), device)


@OF_PADDED
def test_padded_head_dims(head_dims, mask, device):
    lengths = (1, 5), (20, 5), (130, 200), (300, 130)
    assert_right((problem_of(head_dims, (2, *x, 4, 2), **MASKS[mask]) for x in lengths), device)


@MASK
@DIMS
def test_query_heads_over_several_work_tiles(head_dims, mask, device):
    """Split, so that dK and dV are sums over work tiles."""
    assert_right([problem_of(head_dims, (1, 600, 200, 64, 1), **MASKS[mask])], device)


@pytest.mark.parametrize(
    "head_dims, mask, scores",
    with_scores(dict(softcap=2.0), dict(alibi="heads"), dict(alibi="sequences", lse_gradient=True), dict(sinks=True)),
    ids=str,
)
def test_scores_and_sinks(head_dims, mask, scores, device):
    lengths = (130, 200), (300, 130), (515, 515)
    assert_right((problem_of(head_dims, (2, *x, 8, 2), **MASKS[mask], **scores) for x in lengths), device)


# Of many work tiles a CTA: short ones, without queries even, and longer.
@pytest.mark.parametrize(
    "head_dims, mask, lengths", pairwise(ROWS, MASKS, [(70, 300), (700, 700), (1500, 1500)]), ids=str
)
def test_same_bits_under_load(head_dims, mask, lengths, perturbation, device, num_sms):
    problem = problem_of(head_dims, (4, *lengths, 16, 4), **MASKS[mask])
    inputs = support.random_inputs(problem, device)
    check_under_load(inputs, problem, perturbation, CALLS, CALLS_IN_FLIGHT)
    check_sm_margins(inputs, problem, num_sms, (1, 7, num_sms // 2, num_sms - 1))


@MASK
@DIMS
def test_packed_as_alone(head_dims, mask, device):
    problem = problem_of(head_dims, (1, 0, 0, 8, 2), **MASKS[mask])
    pool, chance = Pool(problem, device), random.Random(f"{head_dims} {mask}")
    for number in range(PACKS):
        pack = random_pack(pool, chance, spoilt=0.3)
        found = {policy: varlen_attention(pack, policy) for policy in ("auto", *support.policies(problem))}
        assert_as_alone(pack, found, f"(number {number})")


@pytest.mark.parametrize("held", (66, 131))
@DIMS
def test_progress_while_sms_are_held(head_dims, held, holder, device, num_sms):
    if held >= num_sms:
        pytest.skip(f"the GPU has {num_sms} SMs")
    problem = problem_of(head_dims, (2, 700, 700, 8, 2), causal=True)
    inputs = support.random_inputs(problem, device)
    expected = {policy: support.backward(inputs, problem, policy) for policy in support.policies(problem)}
    torch.cuda.synchronize()
    for policy, gradients in expected.items():
        with holder.hold(held, 5.0):
            found = support.backward(inputs, problem, policy)
            end = torch.cuda.Event()
            end.record()
            while not end.query() and holder.holding():
                pass
            assert end.query() and holder.holding(), f"{problem} {policy}: no end while {held} SMs were held"
        support.assert_same_bits(found, gradients, f"{problem} {policy}, {held} SMs held")


@DIMS
def test_a_policy_without_kernels_is_refused(head_dims, device):
    problem = problem_of(head_dims, (1, 64, 64, 2, 2), causal=False)
    inputs = support.random_inputs(problem, device)
    with pytest.raises(ValueError, match="schedule must be one of 'auto', .* at head dims above 128, got 'shift'"):
        support.backward(inputs, problem, "shift")

"""The bit contract at head dims above 128 and of unequal pairs, beside test_backward_head_dims.py: neighbours in a
batch, heads alone, query heads split over work tiles."""

import gpu_support as support
import pytest
from bit_checks import check_heads, check_neighbours, check_sm_margins, check_under_load
from gpu_support import Problem
from test_forward_head_dims import DIMS, MASK, MASKS, problem_of

CALLS, CALLS_IN_FLIGHT = 40, 4
# (head_dims, causal, seqlen_q, seqlen_k, heads, kv_heads): splits.
SPLITS = {
    ((192, 128), False, 1024, 1024, 32, 1): 16,
    ((192, 128), True, 2048, 2048, 8, 1): 4,
    ((192, 192), True, 1300, 2500, 24, 1): 6,
    ((256, 256), False, 2048, 2048, 8, 1): 4,
    ((256, 256), True, 1024, 1024, 32, 1): 8,
}
SPLIT = pytest.mark.parametrize("case", SPLITS, ids=str)


def split_problem(case) -> Problem:
    head_dims, causal, *lengths = case
    problem = problem_of(head_dims, (1, *lengths), causal=causal)
    assert support.splits(problem) == SPLITS[case]
    return problem


@MASK
@DIMS
def test_neighbours_in_the_batch(head_dims, mask, device):
    """The bits of a sequence, alone and among others that differ."""
    for lengths in ((515, 515), (300, 700), (700, 300)):
        check_neighbours(problem_of(head_dims, (1, *lengths, 8, 2), **MASKS[mask]), 3, (0, 2), device)


@pytest.mark.parametrize("heads, kv_heads", [(6, 6), (64, 2), (32, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@DIMS
def test_a_head_does_not_see_the_other_heads(head_dims, causal, heads, kv_heads, device):
    """So that splitting a model's heads over GPUs changes no bits."""
    for lengths in ((515, 515), (1300, 2500)):
        check_heads(problem_of(head_dims, (1, *lengths, heads, kv_heads), causal=causal), device)


@MASK
@DIMS
def test_a_head_does_not_see_the_other_heads_under_any_policy(head_dims, mask, device):
    problem = problem_of(head_dims, (2, 515, 515, 8, 4), **MASKS[mask])
    check_heads(problem, device, support.policies(problem))


@SPLIT
def test_splits_under_load(case, perturbation, device, num_sms):
    """On fewer SMs as well, down to one CTA, which comes to the splits of a KV tile one after the other."""
    problem = split_problem(case)
    inputs = support.random_inputs(problem, device)
    check_under_load(inputs, problem, perturbation, CALLS, CALLS_IN_FLIGHT)
    check_sm_margins(inputs, problem, num_sms, (1, 7, num_sms // 2, num_sms - 3))


@SPLIT
def test_splits_in_a_batch(case, device):
    check_neighbours(split_problem(case), 4, (0, 3), device)

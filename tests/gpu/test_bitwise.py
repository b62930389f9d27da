"""The bit contract: gradients are a function of the inputs alone."""

import gpu_support as support
import pytest
import torch
from bit_checks import check_heads, check_neighbours, check_sm_margins, check_under_load, expected_gradients
from gpu_support import Problem

CALLS = 200
CALLS_IN_FLIGHT = 8

# Several KV tiles a CTA, a last tile that is not full, grouped heads.
PROBLEMS = [
    pytest.param(Problem(2, 1100, 1100, 16, 4, head_dim, causal), id=f"{head_dim}-{'causal' if causal else 'full'}")
    for head_dim in (64, 96, 128)
    for causal in (False, True)
]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_200_calls_under_load(problem, perturbation, device):
    inputs = support.random_inputs(problem, device)
    check_under_load(inputs, problem, perturbation, CALLS, CALLS_IN_FLIGHT)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_sm_margin(problem, device, num_sms):
    inputs = support.random_inputs(problem, device)
    check_sm_margins(inputs, problem, num_sms, (1, 2, 7, num_sms // 2, num_sms - 3, num_sms - 2))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_stream(problem, perturbation, device):
    inputs = support.random_inputs(problem, device)
    side = torch.cuda.Stream()
    for policy in support.schedules(problem.causal):
        expected = expected_gradients(inputs, problem, policy)
        torch.cuda.synchronize()
        perturbation.enqueue(16)
        with torch.cuda.stream(side):
            gradients = support.backward(inputs, problem, policy)
        side.synchronize()
        support.assert_same_bits(gradients, expected, f"{problem} {policy}, on a side stream")


@pytest.mark.parametrize("lengths", [(515, 515), (300, 700), (700, 300)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 72])
def test_neighbours_in_the_batch(head_dim, causal, lengths, device):
    """The bits of a sequence, alone, and at every place of a batch of four whose other sequences differ."""
    check_neighbours(Problem(1, *lengths, 8, 2, head_dim, causal), 4, range(4), device)


# Few and many KV tiles, lengths at which query heads are split over work tiles, unequal lengths.
@pytest.mark.parametrize("lengths", [(515, 515), (2049, 2049), (1300, 2500)], ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(6, 6), (64, 2), (32, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_a_head_does_not_see_the_other_heads(head_dim, causal, heads, kv_heads, lengths, device):
    """So that splitting a model's heads over GPUs changes no bits."""
    check_heads(Problem(1, *lengths, heads, kv_heads, head_dim, causal), device)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_head_does_not_see_the_other_heads_under_any_policy(causal, device):
    check_heads(Problem(2, 515, 515, 16, 8, 128, causal), device, support.schedules(causal))


@pytest.mark.parametrize("policy, causal", [("shift", False), ("symmetric_shift", True)])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_clusters_raise_when_one_sm_is_left(head_dim, policy, causal, device, num_sms):
    problem = Problem(1, 300, 300, 2, 2, head_dim, causal)
    inputs = support.random_inputs(problem, device)
    expected = expected_gradients(inputs, problem, policy)
    with pytest.raises(RuntimeError, match=f"sm_margin leaves 1 SM, schedule {policy} runs clusters of 2"):
        support.backward(inputs, problem, policy, num_sms - 1)
    gradients = support.backward(inputs, problem, policy, num_sms - 2)
    support.assert_same_bits(gradients, expected, f"{problem} {policy}, two SMs left")

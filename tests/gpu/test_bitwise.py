"""The bit contract: gradients are a function of the inputs alone."""

import itertools

import gpu_support as support
import pytest
import torch
from bit_checks import check_heads, check_neighbours, check_sm_margins, check_under_load, expected_gradients
from gpu_support import Problem
from products import pairwise, spread

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


@pytest.mark.parametrize(
    "lengths, head_dim, causal", pairwise([(515, 515), (300, 700), (700, 300)], (64, 128, 72), (False, True)), ids=str
)
def test_neighbours_in_the_batch(head_dim, causal, lengths, device):
    """The bits of a sequence, alone, and at every place of a batch of four whose other sequences differ."""
    check_neighbours(Problem(1, *lengths, 8, 2, head_dim, causal), 4, range(4), device)


# Few and many KV tiles, lengths at which query heads are split over work tiles, unequal lengths.
@pytest.mark.parametrize(
    "lengths, heads, causal, head_dim",
    spread(
        itertools.product([(515, 515), (2049, 2049), (1300, 2500)], [(6, 6), (64, 2), (32, 1)], [False, True]),
        (64, 96, 128),
    ),
    ids=str,
)
def test_a_head_does_not_see_the_other_heads(lengths, heads, causal, head_dim, device):
    """So that splitting a model's heads over GPUs changes no bits."""
    check_heads(Problem(1, *lengths, *heads, head_dim, causal), device)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_head_does_not_see_the_other_heads_under_any_policy(causal, device):
    check_heads(Problem(2, 515, 515, 16, 8, 128, causal), device, support.schedules(causal))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_clusters_raise_when_one_sm_is_left(head_dim, device, num_sms):
    policy, problem = "symmetric_shift", Problem(1, 300, 300, 2, 2, head_dim, True)
    inputs = support.random_inputs(problem, device)
    expected = expected_gradients(inputs, problem, policy)
    with pytest.raises(RuntimeError, match=f"sm_margin leaves 1 SM, schedule {policy} runs clusters of 2"):
        support.backward(inputs, problem, policy, num_sms - 1)
    gradients = support.backward(inputs, problem, policy, num_sms - 2)
    support.assert_same_bits(gradients, expected, f"{problem} {policy}, two SMs left")


@pytest.mark.parametrize("lengths, heads, kv_heads", [
    ((2048, 2048), 8, 8), ((515, 2049), 16, 2), ((2049, 1100), 32, 1), ((300, 140 * 128), 2, 1),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_divided_kv_tiles_have_the_same_bits_whole_and_in_parts(
    head_dim, lengths, heads, kv_heads, device, num_sms, perturbation
):
    """With as many CTAs as all heads have KV tiles, as one has, one fewer, few, and as many as start beside others."""
    problem = Problem(1, *lengths, heads, kv_heads, head_dim, False)
    inputs = support.random_inputs(problem, device)
    expected = expected_gradients(inputs, problem, "shift")
    kv_tiles = support.tiles_of(problem, "shift").num_kv_tiles
    for ctas in {kv_heads * kv_tiles, kv_tiles, kv_tiles - 1, 5, 1}:
        gradients = support.backward(inputs, problem, "shift", max(0, num_sms - ctas))
        support.assert_same_bits(gradients, expected, f"{problem}, {ctas} CTAs")
    for _ in range(10):
        perturbation.enqueue(4)
        gradients = support.backward(inputs, problem, "shift")
        support.assert_same_bits(gradients, expected, f"{problem}, beside other kernels")
    # Another order of sums, and nothing else.
    for name, x in expected_gradients(inputs, problem, "descending").items():
        difference = (x.double() - expected[name].double()).norm() / x.double().norm()
        assert difference < 2e-3, f"{problem} {name}: {difference:.1e}"

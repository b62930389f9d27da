"""The bit contract: gradients are a function of the inputs alone."""

import gpu_support as support
import pytest
import torch
from bit_checks import check_neighbours, check_sm_margins, check_under_load, expected_gradients
from gpu_support import Problem

CALLS = 200
CALLS_IN_FLIGHT = 8

# Several KV tiles a CTA, a last tile that is not full, grouped heads.
PROBLEMS = [
    pytest.param(Problem(2, 1100, 1100, 16, 4, head_dim, causal), id=f"{head_dim}-{'causal' if causal else 'full'}")
    for head_dim in (64, 128)
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


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_other_heads(causal, device):
    """The bits of one KV head's group do not depend on its place among the heads, nor on their number where that leaves
    the group whole (csrc/schedule/head_splits.h); but for spt_descending, whose heads have the bits of either policy."""
    one, many = Problem(1, 515, 515, 2, 1, 128, causal), Problem(1, 515, 515, 12, 6, 128, causal)
    inputs = support.random_inputs(one, device, seed=1)
    for policy in support.schedules(causal):
        for place in (0, 3, 5):
            expected = expected_gradients(inputs, one, support.order_of_head(policy, many, place))
            q, k, v, dout = support.random_qkv_dout(many, device, seed=2)
            for x, own in ((q, inputs.q), (k, inputs.k), (v, inputs.v), (dout, inputs.dout)):
                heads = own.shape[2]
                x[:, :, place * heads : (place + 1) * heads] = own
            gradients = support.backward(support.with_forward(many, q, k, v, dout), many, policy)
            for name, own in expected.items():
                heads = own.shape[2]
                among = gradients[name][:, :, place * heads : (place + 1) * heads]
                mismatch = support.first_mismatch(name, among, own)
                assert mismatch is None, f"{many} {policy}, KV head {place}: {mismatch}"

"""The bit contract: gradients are a function of the inputs alone."""

import gpu_support as support
import pytest
import torch
from gpu_load import Perturbation
from gpu_support import Inputs, Problem

CALLS = 200
CALLS_IN_FLIGHT = 8

# Several KV tiles a CTA, a last tile that is not full, grouped heads.
PROBLEMS = [
    pytest.param(Problem(2, 1100, 1100, 16, 4, head_dim, causal), id=f"{head_dim}-{'causal' if causal else 'full'}")
    for head_dim in (64, 128)
    for causal in (False, True)
]


def expected_gradients(inputs: Inputs, problem: Problem, policy: str) -> dict[str, torch.Tensor]:
    gradients = support.backward(inputs, problem, policy)
    support.assert_finite(gradients, f"{problem} {policy}")
    return gradients


@pytest.fixture
def perturbation(hopper):
    load = Perturbation()
    yield load
    load.stop()


@pytest.mark.parametrize("problem", PROBLEMS)
def test_200_calls_under_load(problem, perturbation, device):
    inputs = support.random_inputs(problem, device)
    for policy in support.schedules(problem.causal):
        expected = expected_gradients(inputs, problem, policy)
        for first in range(0, CALLS, CALLS_IN_FLIGHT):
            perturbation.enqueue(2 * CALLS_IN_FLIGHT)
            results = []
            for _ in range(CALLS_IN_FLIGHT):
                perturbation.move_allocations()
                results.append(support.backward(inputs, problem, policy))
            for call, gradients in enumerate(results, first):
                support.assert_same_bits(gradients, expected, f"{problem} {policy}, call {call} of {CALLS}")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_sm_margin(problem, device, num_sms):
    inputs = support.random_inputs(problem, device)
    for policy in support.schedules(problem.causal):
        expected = expected_gradients(inputs, problem, policy)
        fewest = 2 if support.needs_clusters(policy) else 1
        for sm_margin in (1, 2, 7, num_sms // 2, num_sms - 3, num_sms - 2, num_sms - fewest):
            gradients = support.backward(inputs, problem, policy, sm_margin)
            support.assert_same_bits(gradients, expected, f"{problem} {policy}, sm_margin={sm_margin}")


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
    alone = Problem(1, *lengths, 8, 2, head_dim, causal)
    batch = Problem(4, *lengths, 8, 2, head_dim, causal)
    inputs = support.random_inputs(alone, device, seed=1)
    policies = support.schedules(causal)
    expected = {policy: expected_gradients(inputs, alone, policy) for policy in policies}
    for place in range(batch.batch):
        q, k, v, dout = support.random_qkv_dout(batch, device, seed=2 + place)
        for x, own in ((q, inputs.q), (k, inputs.k), (v, inputs.v), (dout, inputs.dout)):
            x[place] = own[0]
        neighbours = support.with_forward(batch, q, k, v, dout)
        for name in ("out", "softmax_lse"):
            own, among = getattr(inputs, name), getattr(neighbours, name)[place : place + 1]
            mismatch = support.first_mismatch(name, among, own)
            assert mismatch is None, f"{batch} forward, place {place}: {mismatch}"
        for policy in policies:
            gradients = support.backward(neighbours, batch, policy)
            own = {name: x[place : place + 1] for name, x in gradients.items()}
            support.assert_same_bits(own, expected[policy], f"{batch} {policy}, place {place}")


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

"""Query heads split over claims, whose dK and dV are added up in order: accuracy, and the bit contract."""

import dataclasses

import gpu_support as support
import gradient_check
import pytest
import torch
from gpu_load import Perturbation
from gpu_support import Problem

CALLS = 100
CALLS_IN_FLIGHT = 4

# head_dim, (seqlen_q, seqlen_k, heads, kv_heads): splits, under both masks.
SPLITS = {
    64: {
        (2048, 2048, 8, 1): 4,
        (1024, 1024, 32, 4): 2,
        (3999, 4099, 6, 2): 3,
        (4100, 1300, 7, 1): 7,
        (1300, 2500, 12, 1): 4,
        (4000, 100, 4, 1): 4,
    },
    128: {
        (2048, 2048, 8, 1): 8,
        (1024, 1024, 32, 4): 4,
        (1999, 2049, 6, 2): 3,
        (2100, 1300, 7, 1): 7,
        (1300, 2500, 12, 1): 6,
        (4000, 100, 4, 1): 4,  # one KV tile, carried by all
    },
}
CASES = [
    pytest.param(Problem(1, *shape, head_dim, causal), splits, id=f"{shape}-{head_dim}-{'causal' if causal else 'full'}")
    for head_dim, shapes in SPLITS.items()
    for shape, splits in shapes.items()
    for causal in (False, True)
]
# Of claims that are long, and of claims that are many.
FEW = [case for case in CASES if case.values[0].heads in (8, 32)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("problem, splits", CASES)
def test_accuracy(problem, splits, dtype, device):
    assert support.head_splits(problem) == splits
    problem = dataclasses.replace(problem, dtype=dtype)
    lines = gradient_check.check(problem, device, support.schedules(problem.causal))
    assert not lines, f"{problem}:\n" + "\n".join(lines)


def test_several_sequences_and_a_padded_head_dim(device):
    problem = Problem(3, 1500, 1500, 8, 2, 72, True)
    assert support.head_splits(problem) == 2
    lines = gradient_check.check(problem, device, support.schedules(problem.causal))
    assert not lines, f"{problem}:\n" + "\n".join(lines)


def expected_gradients(inputs, problem, policy):
    gradients = support.backward(inputs, problem, policy)
    support.assert_finite(gradients, f"{problem} {policy}")
    return gradients


@pytest.mark.parametrize("problem, splits", FEW)
def test_same_bits_under_load(problem, splits, device):
    """Other kernels take SMs now and then, so that the splits of a KV tile run side by side or one after the other."""
    inputs = support.random_inputs(problem, device)
    load = Perturbation()
    for policy in support.schedules(problem.causal):
        expected = expected_gradients(inputs, problem, policy)
        for first in range(0, CALLS, CALLS_IN_FLIGHT):
            load.enqueue(2 * CALLS_IN_FLIGHT)
            results = []
            for _ in range(CALLS_IN_FLIGHT):
                load.move_allocations()
                results.append(support.backward(inputs, problem, policy))
            for call, gradients in enumerate(results, first):
                support.assert_same_bits(gradients, expected, f"{problem} {policy}, call {call} of {CALLS}")
    load.stop()


@pytest.mark.parametrize("problem, splits", FEW)
def test_same_bits_on_fewer_sms(problem, splits, device, num_sms):
    """Down to one CTA, which comes to the splits of a KV tile one after the other."""
    inputs = support.random_inputs(problem, device)
    for policy in support.schedules(problem.causal):
        expected = expected_gradients(inputs, problem, policy)
        fewest = 2 if support.needs_clusters(policy) else 1
        for sm_margin in (1, 7, num_sms // 2, num_sms - 3, num_sms - fewest):
            gradients = support.backward(inputs, problem, policy, sm_margin)
            support.assert_same_bits(gradients, expected, f"{problem} {policy}, sm_margin={sm_margin}")


@pytest.mark.parametrize("problem, splits", FEW)
def test_same_bits_in_a_batch(problem, splits, device):
    """Alone, too few claims for the GPU; at the ends and amid a batch of eight, whose other sequences change, enough."""
    inputs = support.random_inputs(problem, device, seed=1)
    batch = dataclasses.replace(problem, batch=8)
    policies = support.schedules(problem.causal)
    expected = {policy: expected_gradients(inputs, problem, policy) for policy in policies}
    for place in (0, 3, 7):
        q, k, v, dout = support.random_qkv_dout(batch, device, seed=2 + place)
        for x, own in ((q, inputs.q), (k, inputs.k), (v, inputs.v), (dout, inputs.dout)):
            x[place] = own[0]
        neighbours = support.with_forward(batch, q, k, v, dout)
        for policy in policies:
            gradients = support.backward(neighbours, batch, policy)
            own = {name: x[place : place + 1] for name, x in gradients.items()}
            support.assert_same_bits(own, expected[policy], f"{batch} {policy}, place {place}")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_order_free_has_the_same_dk_and_dv(head_dim, causal, device):
    """It goes through the query tiles as descending does, and differs in dQ alone."""
    problem = Problem(1, 2048, 2048, 8, 1, head_dim, causal)
    inputs = support.random_inputs(problem, device)
    ordered, order_free = (expected_gradients(inputs, problem, policy) for policy in ("descending", "order_free"))
    for name in ("dk", "dv"):
        mismatch = support.first_mismatch(name, order_free[name], ordered[name])
        assert mismatch is None, f"{problem}: {mismatch}"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_workspace(head_dim, device):
    """fp32 dQ and, for the sums that are carried, fp32 dK and dV, plus 2%."""
    problem = Problem(1, 2048, 2048, 8, 1, head_dim, True)
    inputs = support.random_inputs(problem, device)
    gradients = support.nan_gradients(inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    support.backward_into(gradients, inputs, problem, "auto")
    used = torch.cuda.max_memory_allocated() - before
    elements = inputs.q.numel() + inputs.k.numel() + inputs.v.numel()
    assert used <= 1.02 * 4 * elements + (1 << 16), used / (4 * elements)

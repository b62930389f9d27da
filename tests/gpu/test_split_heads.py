"""Query heads split over work tiles, whose dK and dV are added up in order: accuracy, and the bit contract."""

import dataclasses

import gpu_support as support
import gradient_check
import pytest
import torch
from bit_checks import check_neighbours, check_sm_margins, check_under_load, expected_gradients
from gpu_support import Problem

CALLS = 100
CALLS_IN_FLIGHT = 4

# (head_dim, causal, seqlen_q, seqlen_k, heads, kv_heads): splits.
SPLITS = {
    (64, False, 1024, 1024, 32, 1): 16,
    (64, False, 2048, 2048, 32, 1): 8,
    (64, True, 2048, 2048, 32, 1): 8,
    (64, False, 1300, 2500, 24, 1): 6,
    (96, False, 1300, 2500, 24, 1): 6,
    (96, True, 2048, 2048, 32, 1): 8,
    (128, False, 2048, 2048, 8, 1): 8,
    (128, False, 1024, 1024, 32, 1): 16,
    (128, True, 1024, 1024, 32, 1): 8,
    (128, False, 2048, 2048, 32, 2): 8,
    (128, True, 2048, 2048, 32, 2): 8,
    (128, False, 1300, 2500, 12, 1): 6,
    (128, False, 4000, 100, 4, 1): 4,  # one KV tile, summed over all
}
CASES = [
    pytest.param(
        Problem(1, *lengths, head_dim, causal), splits, id=f"{lengths}-{head_dim}-{'causal' if causal else 'full'}"
    )
    for (head_dim, causal, *lengths), splits in SPLITS.items()
]
# Of work tiles that are long, and of work tiles that are many.
FEW = [case for case in CASES if case.values[0].heads in (8, 32)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("problem, splits", CASES)
def test_accuracy(problem, splits, dtype, device):
    assert support.splits(problem) == splits
    problem = dataclasses.replace(problem, dtype=dtype)
    lines = gradient_check.check(problem, device, support.schedules(problem.causal))
    assert not lines, f"{problem}:\n" + "\n".join(lines)


def test_several_sequences_and_a_padded_head_dim(device):
    problem = Problem(3, 1500, 1500, 32, 1, 72, True)
    assert support.splits(problem) > 1
    lines = gradient_check.check(problem, device, support.schedules(problem.causal))
    assert not lines, f"{problem}:\n" + "\n".join(lines)


@pytest.mark.parametrize("problem, splits", FEW)
def test_same_bits_under_load(problem, splits, perturbation, device):
    """Other kernels take SMs now and then, so that the splits of a KV tile run side by side or one after the other."""
    inputs = support.random_inputs(problem, device)
    check_under_load(inputs, problem, perturbation, CALLS, CALLS_IN_FLIGHT)


@pytest.mark.parametrize("problem, splits", FEW)
def test_same_bits_on_fewer_sms(problem, splits, device, num_sms):
    """Down to one CTA, which comes to the splits of a KV tile one after the other."""
    inputs = support.random_inputs(problem, device)
    check_sm_margins(inputs, problem, num_sms, (1, 7, num_sms // 2, num_sms - 3))


@pytest.mark.parametrize("problem, splits", FEW)
def test_same_bits_in_a_batch(problem, splits, device):
    """Alone, too few work tiles for the GPU; at the ends and amid a batch of eight, whose other sequences change,
    enough."""
    check_neighbours(problem, 8, (0, 3, 7), device)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_order_free_has_the_same_dk_and_dv(head_dim, causal, device):
    """It goes through the query tiles as descending does, and differs in dQ alone."""
    problem = Problem(1, 2048, 2048, 8, 1, head_dim, causal)
    inputs = support.random_inputs(problem, device)
    ordered, order_free = (expected_gradients(inputs, problem, policy) for policy in ("descending", "order_free"))
    for name in ("dk", "dv"):
        mismatch = support.first_mismatch(name, order_free[name], ordered[name])
        assert mismatch is None, f"{problem}: {mismatch}"


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_workspace(head_dim, device):
    """fp32 dQ and, for the sums over splits, fp32 dK and dV, plus 2%."""
    problem = Problem(1, 2048, 2048, 8, 1, head_dim, True)
    used = support.workspace_bytes(problem, "auto", device)
    elements = 2048 * head_dim * (problem.heads + 2 * problem.kv_heads)
    assert used <= 1.02 * 4 * elements + (1 << 16), used / (4 * elements)

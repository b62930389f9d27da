"""The bit contract as checks of one problem under every policy that is defined for its mask.

Works on any device, as gpu_support does.
"""

import dataclasses
from collections.abc import Iterable

import gpu_support as support
import torch
from gpu_support import Inputs, Problem


def expected_gradients(inputs: Inputs, problem: Problem, policy: str) -> dict[str, torch.Tensor]:
    gradients = support.backward(inputs, problem, policy)
    support.assert_finite(gradients, f"{problem} {policy}")
    return gradients


def check_under_load(inputs: Inputs, problem: Problem, load, calls: int, calls_in_flight: int) -> None:
    """`load` is a gpu_load.Perturbation."""
    for policy in support.policies(problem):
        expected = expected_gradients(inputs, problem, policy)
        for first in range(0, calls, calls_in_flight):
            load.enqueue(2 * calls_in_flight)
            results = []
            for _ in range(calls_in_flight):
                load.move_allocations()
                results.append(support.backward(inputs, problem, policy))
            for call, gradients in enumerate(results, first):
                support.assert_same_bits(gradients, expected, f"{problem} {policy}, call {call} of {calls}")


def check_sm_margins(inputs: Inputs, problem: Problem, num_sms: int, margins: Iterable[int]) -> None:
    """At these margins, and with as few SMs left as the policy runs on."""
    for policy in support.policies(problem):
        expected = expected_gradients(inputs, problem, policy)
        fewest = 2 if support.needs_clusters(policy) else 1
        for sm_margin in (*margins, num_sms - fewest):
            gradients = support.backward(inputs, problem, policy, sm_margin)
            support.assert_same_bits(gradients, expected, f"{problem} {policy}, sm_margin={sm_margin}")


def check_neighbours(alone: Problem, sequences: int, places: Iterable[int], device: str) -> None:
    """The one sequence of `alone`, by itself and at places of a batch whose other sequences differ from place to
    place."""
    batch = dataclasses.replace(alone, batch=sequences)
    inputs = support.random_inputs(alone, device, seed=1)
    policies = support.policies(alone)
    expected = {policy: expected_gradients(inputs, alone, policy) for policy in policies}
    for place in places:
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


def check_heads(problem: Problem, device: str, policies: Iterable[str] = ("auto",)) -> None:
    """Every KV head and its query heads: among all heads, among the second half of them, alone, and in another
    order."""
    group, kv_heads = problem.heads // problem.kv_heads, problem.kv_heads
    q, k, v, dout = support.random_qkv_dout(problem, device)

    def query_heads(chosen: list[int]) -> list[int]:
        return [head * group + i for head in chosen for i in range(group)]

    def results(chosen: list[int], policy: str) -> dict[str, torch.Tensor]:
        """Of a call with these KV heads alone, in this order."""
        own = query_heads(chosen)
        part = dataclasses.replace(problem, heads=len(own), kv_heads=len(chosen))
        # Copies: each call has its heads side by side, as a call of one of several GPUs has.
        parts = ((q, own), (k, chosen), (v, chosen), (dout, own))
        inputs = support.with_forward(part, *(x[:, :, heads].clone() for x, heads in parts))
        forward = {"out": inputs.out, "softmax_lse": inputs.softmax_lse.transpose(1, 2)}
        gradients = support.backward(inputs, part, policy)
        support.assert_finite(gradients, f"{part} {policy}")
        return {**forward, **gradients}

    everyone = list(range(kv_heads))
    other_order = everyone[::-1] if kv_heads < 3 else everyone[1::2] + everyone[::2]
    calls = [other_order, *([head] for head in everyone)]
    if kv_heads > 1:
        calls.append(everyone[kv_heads // 2 :])
    for policy in policies:
        among_all = results(everyone, policy)
        for chosen in calls:
            for name, x in results(chosen, policy).items():
                heads = chosen if name in ("dk", "dv") else query_heads(chosen)
                mismatch = support.first_mismatch(name, x, among_all[name][:, :, heads])
                assert mismatch is None, f"{problem} {policy}, KV heads {chosen} of {kv_heads}: {mismatch}"

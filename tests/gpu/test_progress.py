"""The backward moves on while other kernels hold SMs, in proportion to the SMs that are left, and gives the same
bits."""

import time

import gpu_support as support
import pytest
import sm_holder
import torch
from column_support import FORMS
from gpu_support import Inputs, Problem
from products import pairwise

HOLD_LIMIT_S = 0.5
# A backward on the SMs that are left may take this much longer than their number explains, plus launches.
PROPORTION = 2.0
SLACK_MS = 2.0
# A cluster of two starts only on two free SMs of one GPC. With more free SMs than this there is such a pair (8 GPCs);
# with fewer the symmetric shift may have to wait for the holder, and is held to the same bits only.
FREE_SMS_FOR_A_CLUSTER = 9


class TimedBackward:
    """One backward on the current stream into outputs that exist already, so that nothing is allocated when it is
    held."""

    def __init__(self, inputs: Inputs, problem: Problem, policy: str):
        self.inputs, self.problem, self.policy = inputs, problem, policy
        self.gradients = support.nan_gradients(inputs)
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.launch()
        torch.cuda.synchronize()
        support.assert_finite(self.gradients, self.name)
        self.expected = {name: x.clone() for name, x in self.gradients.items()}
        self.launch()  # the workspace of the launches to come is now in the allocator's cache
        torch.cuda.synchronize()

    @property
    def name(self) -> str:
        return f"{self.problem} {self.policy}"

    def launch(self) -> None:
        self.start.record()
        support.backward_into(self.gradients, self.inputs, self.problem, self.policy)
        self.end.record()

    def clear(self) -> None:
        for x in self.gradients.values():
            x.fill_(float("nan"))

    def time_alone_ms(self) -> float:
        times = []
        for _ in range(3):
            self.launch()
            self.end.synchronize()
            times.append(self.start.elapsed_time(self.end))
        return min(times)

    def run_while_held(self, holder: sm_holder.SmHolder, held: int, must_finish: bool = True) -> float:
        """Milliseconds that the backward took; fails unless it gave the same bits, and ended while the SMs were
        held."""
        self.clear()
        with holder.hold(held, HOLD_LIMIT_S):
            self.launch()
            while not self.end.query() and holder.holding():
                time.sleep(1e-4)
            finished = self.end.query() and holder.holding()
        torch.cuda.synchronize()
        said = f"{self.name}: no end within {HOLD_LIMIT_S} s while a kernel held {held} SMs"
        assert finished or not must_finish, said
        support.assert_same_bits(self.gradients, self.expected, f"{self.name}, {held} SMs held")
        return self.start.elapsed_time(self.end)

    def check_held(self, holder: sm_holder.SmHolder, held: int, num_sms: int, alone_ms: float) -> None:
        in_proportion = not support.needs_clusters(self.policy) or num_sms - held >= FREE_SMS_FOR_A_CLUSTER
        took_ms = self.run_while_held(holder, held, must_finish=in_proportion)
        if not in_proportion:
            return
        limit_ms = PROPORTION * alone_ms * num_sms / (num_sms - held) + SLACK_MS
        assert took_ms <= limit_ms, (
            f"{self.name}: {took_ms:.2f} ms while a kernel held {held} of {num_sms} SMs, allowed {limit_ms:.2f} ms; "
            f"{alone_ms:.3f} ms alone"
        )


@pytest.mark.parametrize(
    "held, head_dim, causal", pairwise([1, 66, 116, 128, 129, 130, 131], [64, 128], [False, True]), ids=str
)
def test_every_policy_while_sms_are_held(held, head_dim, causal, holder, device, num_sms):
    if held >= num_sms:
        pytest.skip(f"the GPU has {num_sms} SMs")
    # More KV tiles than a GPU has SMs.
    problem = Problem(2, 1536, 1536, 16, 8, head_dim, causal)
    inputs = support.random_inputs(problem, device)
    failures = []
    for policy in support.schedules(causal):
        backward = TimedBackward(inputs, problem, policy)
        try:
            backward.check_held(holder, held, num_sms, backward.time_alone_ms())
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("held", [1, 66, 128, 131])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("causal, bounds", FORMS)
def test_masks_by_key_columns_while_sms_are_held(causal, bounds, head_dim, held, holder, device, num_sms):
    if held >= num_sms:
        pytest.skip(f"the GPU has {num_sms} SMs")
    problem = Problem(2, 1536, 1536, 16, 8, head_dim, causal, column_bounds=bounds, column_heads=True)
    backward = TimedBackward(support.random_inputs(problem, device), problem, "descending")
    backward.check_held(holder, held, num_sms, backward.time_alone_ms())


def test_the_plan_of_a_long_sequence_needs_one_sm(holder, device, num_sms):
    """A plan of clusters, even of two CTAs, did not start."""
    problem = Problem(1, 4096, 4096, 16, 8, 128, True, column_bounds=1)
    backward = TimedBackward(support.random_inputs(problem, device), problem, "descending")
    backward.check_held(holder, num_sms - 1, num_sms, backward.time_alone_ms())


@pytest.mark.parametrize("causal, column_bounds", [(False, 0), (True, 0), (True, 1), (False, 4)])
def test_every_number_of_held_sms(causal, column_bounds, holder, device, num_sms):
    problem = Problem(1, 512, 512, 16, 4, 128, causal, column_bounds=column_bounds)
    inputs = support.random_inputs(problem, device)
    backward = TimedBackward(inputs, problem, "auto")
    alone_ms = backward.time_alone_ms()
    for held in range(1, num_sms):
        backward.check_held(holder, held, num_sms, alone_ms)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("held", [66, 128, 131])
def test_split_heads_while_sms_are_held(held, causal, holder, device, num_sms):
    """The query heads of the KV head are split over work tiles, which wait for each other's dK and dV."""
    problem = Problem(1, 2048, 2048, 32, 1, 128, causal)
    inputs = support.random_inputs(problem, device)
    assert support.splits(problem) > 1
    for policy in support.schedules(causal):
        backward = TimedBackward(inputs, problem, policy)
        backward.check_held(holder, held, num_sms, backward.time_alone_ms())


@pytest.mark.parametrize("held", [1, 66, 127, 131])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_divided_kv_tiles_of_all_heads_together_while_sms_are_held(held, head_dim, holder, device, num_sms):
    """The launch counts on a CTA for each KV tile; few run, and heads are worked on in parts."""
    if held >= num_sms:
        pytest.skip(f"the GPU has {num_sms} SMs")
    kv_heads = num_sms // 16  # of two sequences of 8 KV tiles
    problem = Problem(2, 1024, 1024, 2 * kv_heads, kv_heads, head_dim, False)
    assert num_sms // 2 < 2 * kv_heads * support.tiles_of(problem, "shift").num_kv_tiles <= num_sms
    backward = TimedBackward(support.random_inputs(problem, device), problem, "shift")
    backward.check_held(holder, held, num_sms, backward.time_alone_ms())


@pytest.mark.parametrize("held", [1, 66, 120])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_two_streams_at_once(causal, held, holder, device):
    """Two backward passes share the SMs that a third kernel leaves: neither waits for a CTA that cannot start."""
    problem = Problem(2, 1024, 1024, 16, 4, 128, causal)
    policies = support.schedules(causal)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    pairs = [(a, b) for i, a in enumerate(policies) for b in policies[i:]]
    for names in pairs:
        runs = []
        for seed, (stream, policy) in enumerate(zip(streams, names)):
            inputs = support.random_inputs(problem, device, seed)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                runs.append(TimedBackward(inputs, problem, policy))
                runs[-1].clear()
        torch.cuda.synchronize()
        finished = False
        with holder.hold(held, HOLD_LIMIT_S):
            for _ in range(4):
                for stream, run in zip(streams, runs):
                    with torch.cuda.stream(stream):
                        run.launch()
            while holder.holding() and not finished:
                finished = all(run.end.query() for run in runs)
                time.sleep(1e-4)
        torch.cuda.synchronize()
        assert finished, f"{problem} {names} on two streams: no end within {HOLD_LIMIT_S} s with {held} SMs held"
        for run in runs:
            support.assert_same_bits(run.gradients, run.expected, f"{run.name}, on two streams, {held} SMs held")

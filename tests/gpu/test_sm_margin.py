"""`sm_margin` leaves SMs to others: in every kernel of both passes, and so that another kernel runs there meanwhile."""

import json
import time

import gpu_support as support
import pytest
import sm_holder
import torch
from gpu_support import Inputs, Problem
from torch.profiler import ProfilerActivity, profile

HOLD_LIMIT_S = 2.0
# Of the call's time: the other kernel is launched when this share has gone by, and must be running before the second
# one has, long before the first CTAs of a kernel that took every SM would end.
LAUNCHED_AT, RUNNING_BY = 0.2, 0.6
LEAST_MS = 20  # of the call, so that launches and polls are short beside it

MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def margins(num_sms: int) -> tuple[int, ...]:
    return 1, 8, num_sms // 2, num_sms - 2


def forward(inputs: Inputs, problem: Problem, sm_margin: int) -> None:
    support.forward(problem, inputs.q, inputs.k, inputs.v, sm_margin, columns=inputs.columns)


def kernels(run, path) -> dict[str, int]:
    """The largest grid, in CTAs, of each of our kernels that `run` launches, by name."""
    run()  # loads them
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    recorded.export_chrome_trace(str(path))
    found: dict[str, int] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "kernel" and "dash_attn::" in event["name"]:
            x, y, z = event["args"]["grid"]
            found[event["name"]] = max(found.get(event["name"], 0), x * y * z)
    return found


@MASKS
@pytest.mark.parametrize("column_bounds", [0, 2], ids=["no columns", "columns"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_no_kernel_has_more_ctas_than_sms_are_left(head_dim, column_bounds, causal, device, num_sms, tmp_path):
    """More work than SMs for every kernel; one CTA of each is at most on an SM, so fewer CTAs leave SMs free."""
    problem = Problem(8, 1100, 1100, 16, 8, head_dim, causal, column_bounds=column_bounds, column_heads=True)
    plans = 1 if column_bounds else 0  # kernels that plan a pass under a mask by key columns
    inputs = support.random_inputs(problem, device)
    failures = []
    for policy in ("forward", *support.policies(problem)):
        for sm_margin in margins(num_sms):
            if policy == "forward":
                found = kernels(lambda: forward(inputs, problem, sm_margin), tmp_path / "trace.json")
                assert len(found) == 1 + plans, found
            else:
                found = kernels(lambda: support.backward(inputs, problem, policy, sm_margin), tmp_path / "trace.json")
                at_the_least = 2 if (policy, head_dim) == ("shift", 128) else 3  # which has no conversion
                assert len(found) >= at_the_least + plans, f"preprocess, the main kernel, the conversion: {list(found)}"
            failures += [
                f"{policy}, sm_margin={sm_margin}: {ctas} CTAs of {name[:80]} on {num_sms - sm_margin} SMs"
                for name, ctas in found.items()
                if ctas > num_sms - sm_margin
            ]
    assert not failures, "\n".join(failures)


def share_until_held(run, holder: sm_holder.SmHolder, sms: int) -> float:
    """Runs the call, and beside it a kernel that takes `sms` whole SMs. Returns the share of the call's time at which
    all of them were taken; 1.0 or more where the call had ended first."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        start.record()
        run()
        end.record()
        end.synchronize()
    alone_s = 1e-3 * start.elapsed_time(end)
    assert alone_s >= 1e-3 * LEAST_MS, f"the call takes {1e3 * alone_s:.1f} ms, too short to see the other kernel start"
    with holder.prepared(sms, HOLD_LIMIT_S) as launch:
        start.record()
        run()
        end.record()
        while not start.query():
            pass
        began = time.perf_counter()
        while time.perf_counter() - began < LAUNCHED_AT * alone_s:
            pass
        launch()
        while holder.resident(sms) < sms and not end.query():
            pass
        taken = time.perf_counter() - began
        ended = end.query()
    torch.cuda.synchronize()
    return max(1.0, taken / alone_s) if ended else taken / alone_s


@MASKS
@pytest.mark.parametrize("which", ["forward", "descending", "order_free"])
def test_another_kernel_runs_on_the_sms_that_are_left(which, causal, holder, device, num_sms):
    problem = Problem(16 if causal else 8, 16384, 16384, 16, 16, 128, causal)
    inputs = support.random_inputs(problem, device)
    gradients = support.nan_gradients(inputs)
    for sm_margin in (1, 8, num_sms // 2):

        def run() -> None:
            if which == "forward":
                forward(inputs, problem, sm_margin)
            else:
                support.backward_into(gradients, inputs, problem, which, sm_margin)

        share = share_until_held(run, holder, sm_margin)
        assert share < RUNNING_BY, (
            f"{problem} {which}, sm_margin={sm_margin}: a kernel that needs {sm_margin} SMs had them only after "
            f"{share:.2f} of the call's time"
        )


def test_without_a_margin_no_sm_is_left(holder, device):
    """What the test above rests on: a call that uses every SM keeps the other kernel out."""
    problem = Problem(8, 16384, 16384, 16, 16, 128, False)
    inputs = support.random_inputs(problem, device)
    gradients = support.nan_gradients(inputs)
    share = share_until_held(lambda: support.backward_into(gradients, inputs, problem, "descending"), holder, 1)
    assert share > RUNNING_BY

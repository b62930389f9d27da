"""The project's way to measure time: CUDA events, a cold L2, each variant in separate blocks, the median.

Power limits the clock of a Hopper GPU, and calls draw different amounts of power. If calls alternated, a power-hungry
variant would profit from a frugal one, and an idle one would cool the chip for all. A variant is therefore measured
alone, in TURNS blocks, which spread over minutes so that drift affects all alike. For 0.1 s the clock still reflects
what ran before: 6% higher after a pause, 6% lower after a GEMM. Each block therefore begins with a longer warm-up, and
the order is random and reversed in each turn, so that no variant is always first.

A run of many shapes has no time for that: `short` blocks have a warm-up as long as the measurement, a few milliseconds.
The previous work then affects a figure by a few percent, which more turns have to average out.

On a machine without a GPU, the same interface measures with the host's clock, to test the programs; such figures are
meaningless.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

Call = Callable[[], object]

MIN_ROUNDS, MAX_ROUNDS = 3, 200  # per block
TURNS = 2
TRIAL_CALLS = 2
WARM_UP_S = 0.12
# Clocks for which the GPU idles before each sequence of calls so that the host runs ahead: about 1 ms.
HEAD_START_CLOCKS = 2_000_000
# The host gets another head start when it is fewer than this many calls ahead. Otherwise a call that is shorter than
# its launch would be charged with the host's time, which is longer for a baseline that goes through autograd than for
# us.
CALLS_AHEAD = 4


class CudaTimer:
    warm_up_s = WARM_UP_S

    def __init__(self, device: torch.device):
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(4 * l2_bytes, dtype=torch.uint8, device=device)

    def flush_l2(self) -> None:
        self._flush.zero_()

    def times_ms(self, call: Call, rounds: int, mark: Call = lambda: None) -> list[float]:
        """Returns the milliseconds of each of `rounds` calls with a cold L2. `mark` is called before and after each
        call, outside of its time."""
        events = []
        head_start = 0  # the last call before which the GPU idled
        for number in range(rounds):
            caught_up = number >= head_start + CALLS_AHEAD and events[number - CALLS_AHEAD][0].query()
            if number == 0 or caught_up:
                torch.cuda._sleep(HEAD_START_CLOCKS)
                head_start = number
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush_l2()
            mark()
            start.record()
            call()
            end.record()
            mark()
            events.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]


class HostTimer:
    warm_up_s = 0.0

    def times_ms(self, call: Call, rounds: int) -> list[float]:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return times


def rounds_in(seconds: float, call_s: float, least: int = MIN_ROUNDS) -> int:
    return int(min(MAX_ROUNDS, max(least, seconds / call_s)))


def warm_up(timer, call: Call) -> float:
    """Brings the GPU to the call's steady state. Returns the approximate seconds per call."""
    call_s = 1e-3 * min(timer.times_ms(call, TRIAL_CALLS))
    end = time.perf_counter() + timer.warm_up_s  # only from here: the first call may load or plan for longer
    while time.perf_counter() < end:
        timer.times_ms(call, rounds_in(end - time.perf_counter(), call_s))
    return call_s


def block_ms(timer, call: Call, min_time_s: float) -> list[float]:
    """Returns the times of one block of about `min_time_s`, after a warm-up."""
    call_s = warm_up(timer, call)
    return timer.times_ms(call, rounds_in(min_time_s, call_s))


def short_block_ms(timer, call: Call, min_time_s: float) -> list[float]:
    """Returns the times of one short block of a call that has run before. The warm-up is at most as long as the block,
    and a single call each for a long call."""
    call_s = 1e-3 * timer.times_ms(call, 1)[0]
    if call_s < min_time_s:
        timer.times_ms(call, rounds_in(min_time_s - call_s, call_s, least=1))
    return timer.times_ms(call, rounds_in(min_time_s, call_s, least=1))


class Elsewhere(Protocol):
    """A call that is timed in another process."""

    def block_ms(self, min_time_s: float) -> list[float]:
        """Returns the result of the function `block_ms` in that process."""


@dataclasses.dataclass(frozen=True)
class Timing:
    ms: float
    repeats_ms: tuple[float, ...]
    """The median of each block, which shows how well the figure repeats within the run."""


def measure(
    calls: dict[Hashable, Call | Elsewhere],
    *,
    device: torch.device,
    min_time_s: float = 0.15,
    turns: int = TURNS,
    short: bool = False,
) -> tuple[dict[Hashable, Timing], dict[Hashable, Exception]]:
    """Measures the median milliseconds of each call.

    Args:
        calls: the calls to time; a call with a method `block_ms` times itself.
        device: the device of the calls.
        min_time_s: seconds per call, in `turns` blocks of MIN_ROUNDS to MAX_ROUNDS rounds; short blocks have 1 to
            MAX_ROUNDS rounds.
        turns: the number of blocks of each call.
        short: whether to use short blocks, for calls that have run before and run in this process.

    Returns:
        The times, and the error of each call that raised and was left out.
    """
    timer = CudaTimer(device) if device.type == "cuda" else HostTimer()
    block_of = short_block_ms if short else block_ms
    errors, blocks = {}, {name: [] for name in calls}
    order = random.sample(list(calls), len(calls))
    for _ in range(turns):
        order.reverse()
        for name in order:
            call = calls[name]
            if name in errors:
                continue
            try:
                if hasattr(call, "block_ms"):
                    blocks[name].append(call.block_ms(min_time_s / turns))
                else:
                    blocks[name].append(block_of(timer, call, min_time_s / turns))
            except Exception as error:  # a baseline may raise anything for an unsupported shape
                errors[name] = error
    timings = {
        name: Timing(statistics.median(sum(found, [])), tuple(map(statistics.median, found)))
        for name, found in blocks.items()
        if name not in errors
    }
    return timings, errors

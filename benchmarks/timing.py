"""The one way this project measures time: CUDA events, a cold L2, each variant in blocks of its own, the median.

Power limits the clock of a Hopper GPU, and what a call draws is its own affair: measured in turns with others, call by
call, a hungry variant would borrow from a frugal one, and an idle one would cool the chip for all. So a variant is
measured alone, in TURNS blocks, so that what drifts over minutes serves all alike. For 0.1 s its clock is still that of
what ran before, or did not: 6% more after a pause, 6% less after a GEMM. So each block begins with a longer warm-up,
and the order is drawn and each turn is the other way round: nobody is always first.

A run of many shapes has no time for that: `short` blocks have a warm-up as long as what counts, a few milliseconds.
What ran before then moves a figure by a few percent, and more turns have to even it out.

On a machine without a GPU the same interface measures by the host's clock, to try the programs; such figures mean
nothing.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

Call = Callable[[], object]

MIN_ROUNDS, MAX_ROUNDS = 3, 200  # of a block
TURNS = 2
TRIAL_CALLS = 2
WARM_UP_S = 0.12
# Clocks the GPU idles before each sequence of calls, for the host to run ahead of it: about 1 ms.
HEAD_START_CLOCKS = 2_000_000
# The host gets another head start where it is no longer this many calls ahead. A call that is shorter than what the
# host takes to launch it would be given the host's time: a peer that goes through autograd needs more of it than we do.
CALLS_AHEAD = 4


class CudaTimer:
    warm_up_s = WARM_UP_S

    def __init__(self, device: torch.device):
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(4 * l2_bytes, dtype=torch.uint8, device=device)

    def flush_l2(self) -> None:
        self._flush.zero_()

    def times_ms(self, call: Call, rounds: int, mark: Call = lambda: None) -> list[float]:
        """Milliseconds of each of `rounds` calls with a cold L2; `mark` is called before and after each, outside its
        time."""
        events = []
        head_start = 0  # the call before which the GPU idled last
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

    def times_ms(self, call: Call, rounds: int, mark: Call = lambda: None) -> list[float]:
        times = []
        for _ in range(rounds):
            mark()
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
            mark()
        return times


def rounds_in(seconds: float, call_s: float, least: int = MIN_ROUNDS) -> int:
    return int(min(MAX_ROUNDS, max(least, seconds / call_s)))


def warm_up(timer, call: Call) -> float:
    """Brings the GPU to what the call makes of it; returns about how many seconds a call takes."""
    call_s = 1e-3 * min(timer.times_ms(call, TRIAL_CALLS))
    end = time.perf_counter() + timer.warm_up_s  # from here on: a first call may load or plan for longer than that
    while time.perf_counter() < end:
        timer.times_ms(call, rounds_in(end - time.perf_counter(), call_s))
    return call_s


def block_ms(timer, call: Call, min_time_s: float, mark: Call = lambda: None) -> list[float]:
    """Times of one block, of about `min_time_s`, after a warm-up."""
    call_s = warm_up(timer, call)
    return timer.times_ms(call, rounds_in(min_time_s, call_s), mark)


def short_block_ms(timer, call: Call, min_time_s: float) -> list[float]:
    """Times of one short block of a call that has run before. The warm-up is no longer than the block, and of a long
    call either is a single one."""
    call_s = 1e-3 * timer.times_ms(call, 1)[0]
    if call_s < min_time_s:
        timer.times_ms(call, rounds_in(min_time_s - call_s, call_s, least=1))
    return timer.times_ms(call, rounds_in(min_time_s, call_s, least=1))


class Elsewhere(Protocol):
    """A call that is timed where it runs: in another process."""

    def block_ms(self, min_time_s: float) -> list[float]:
        """What the function `block_ms` returns there."""


@dataclasses.dataclass(frozen=True)
class Timing:
    ms: float
    repeats_ms: tuple[float, ...]
    """The median of each block: how well the figure repeats within the run."""


def measure(
    calls: dict[Hashable, Call | Elsewhere],
    *,
    device: torch.device,
    min_time_s: float = 0.15,
    turns: int = TURNS,
    short: bool = False,
) -> tuple[dict[Hashable, Timing], dict[Hashable, Exception]]:
    """Median milliseconds of each call.

    Args:
        calls: what to time; one with a method `block_ms` is timed by it.
        device: where the calls run.
        min_time_s: time to spend on each call, in seconds, in `turns` blocks of MIN_ROUNDS to MAX_ROUNDS rounds, short
            ones of 1 to MAX_ROUNDS.
        turns: how often each call has its turn, a block.
        short: whether blocks are short ones, of calls that have run before and run here.

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
            except Exception as error:  # a peer may raise anything for a shape that it does not take
                errors[name] = error
    timings = {
        name: Timing(statistics.median(sum(found, [])), tuple(map(statistics.median, found)))
        for name, found in blocks.items()
        if name not in errors
    }
    return timings, errors

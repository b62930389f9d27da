"""The one way this project measures time: CUDA events, a cold L2, variants interleaved, the median.

On a machine without a GPU the same interface measures by the host's clock, to try the programs; such figures mean nothing.
"""

import statistics
import time
from collections.abc import Callable, Hashable

import torch

MIN_ROUNDS, MAX_ROUNDS = 5, 200
WARM_UP_CALLS = 2
# Clocks the GPU idles before each sequence of calls, for the host to run ahead of it: about 1 ms.
HEAD_START_CLOCKS = 2_000_000


class _CudaClock:
    def __init__(self, device: torch.device):
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(4 * l2_bytes, dtype=torch.uint8, device=device)

    def head_start(self) -> None:
        torch.cuda._sleep(HEAD_START_CLOCKS)

    def measure(self, call: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        call()
        end.record()
        return start, end

    def read_ms(self, measurements) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in measurements]


class _HostClock:
    def head_start(self) -> None:
        pass

    def measure(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def read_ms(self, measurements) -> list[float]:
        return list(measurements)


def median_ms(
    calls: dict[Hashable, Callable[[], object]], *, device: torch.device, min_time_s: float = 0.15
) -> tuple[dict[Hashable, float], dict[Hashable, Exception]]:
    """Median milliseconds of each call, measured in turns so that clocks and temperature serve all alike.

    Args:
        calls: what to time; each is called WARM_UP_CALLS times before.
        device: where the calls run.
        min_time_s: time to spend on each call on average, in seconds; there are MIN_ROUNDS to MAX_ROUNDS rounds.

    Returns:
        The times, and the error of each call that raised in its warm-up and was left out.
    """
    clock = _CudaClock(device) if device.type == "cuda" else _HostClock()
    works, errors = {}, {}
    for name, call in calls.items():
        try:
            for _ in range(WARM_UP_CALLS):
                call()
            clock.read_ms([])
            works[name] = call
        except Exception as error:  # a peer may raise anything for a shape that it does not take
            errors[name] = error
    if not works:
        return {}, errors

    def one_round():
        return {name: clock.measure(call) for name, call in works.items()}

    clock.head_start()
    round_s = 1e-3 * sum(clock.read_ms(one_round().values()))
    rounds = int(min(MAX_ROUNDS, max(MIN_ROUNDS, min_time_s * len(works) / round_s)))
    clock.head_start()
    measured = [one_round() for _ in range(rounds)]
    return {name: statistics.median(clock.read_ms([m[name] for m in measured])) for name in works}, errors

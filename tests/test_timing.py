"""How time is measured, with a GPU that only takes notes: a cold L2, a head start, blocks in turns, the median."""

import statistics
import types

import pytest
import torch

from benchmarks import timing

L2_BYTES = 1 << 20
CUDA = torch.device("cuda")


class FakeGpu:
    """Notes what is queued, in order. A call takes the next of `times`, in milliseconds, until it has none left."""

    def __init__(self, monkeypatch):
        self.queue, self.synchronized = [], True
        self.caught_up = False  # whether it has begun all that is queued, as a GPU does that waits for its host
        gpu = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                gpu.queue.append("record")
                self.at = gpu.clock

            def query(self):
                return gpu.caught_up

            def elapsed_time(self, end):
                assert gpu.synchronized, "read before the GPU was done"
                return end.at - self.at

        class Flush:
            def __init__(self, count, dtype, device):
                self.bytes = count * dtype.itemsize

            def zero_(self):
                gpu.queue.append(f"write {self.bytes}")
                gpu.synchronized = False

        self.clock = 0.0
        properties = types.SimpleNamespace(L2_cache_size=L2_BYTES)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda clocks: self.queue.append(f"sleep {clocks}"))
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(timing, "torch", types.SimpleNamespace(cuda=torch.cuda, empty=Flush, uint8=torch.uint8))

    def synchronize(self):
        self.queue.append("synchronize")
        self.synchronized = True

    def call(self, name, times):
        remaining = iter(times)

        def run():
            self.queue.append(name)
            self.clock += next(remaining)

        return run


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch)


def test_each_call_has_a_cold_l2_and_the_host_a_head_start(gpu):
    timer = timing.CudaTimer(CUDA)
    assert timer.times_ms(gpu.call("call", [3.0, 1.0, 2.0]), 3) == [3.0, 1.0, 2.0]
    head_start, *calls, end = gpu.queue
    name, clocks = head_start.split()
    assert name == "sleep" and int(clocks) >= 1_000_000  # half a millisecond at 2 GHz
    assert end == "synchronize"
    assert len(calls) == 12
    for first in range(0, 12, 4):
        flush, start, call, stop = calls[first : first + 4]
        name, size = flush.split()
        assert name == "write" and int(size) >= 2 * L2_BYTES, "more than the cache holds"
        assert (start, call, stop) == ("record", "call", "record"), "the flush is outside the time"


def test_a_host_that_falls_behind_gets_another_head_start(gpu):
    timer, calls = timing.CudaTimer(CUDA), 2 * timing.CALLS_AHEAD + 1
    timer.times_ms(gpu.call("call", [1.0] * calls), calls)
    assert sum(entry.startswith("sleep") for entry in gpu.queue) == 1, "a host that stays ahead"
    gpu.queue.clear()
    gpu.caught_up = True
    assert timer.times_ms(gpu.call("call", [1.0] * calls), calls) == [1.0] * calls
    started = [e.split()[0] for e in gpu.queue if e == "call" or e.startswith("sleep")]
    assert started == 2 * ["sleep", *timing.CALLS_AHEAD * ["call"]] + ["sleep", "call"], "enough calls between two"


def test_marks_are_outside_the_time(gpu):
    timer = timing.CudaTimer(CUDA)

    def mark():
        gpu.queue.append("mark")
        gpu.clock += 100.0

    assert timer.times_ms(gpu.call("call", [2.0]), 1, mark=mark) == [2.0]
    assert gpu.queue[2:] == ["mark", "record", "call", "record", "mark", "synchronize"]


def test_a_block_begins_with_a_warm_up_that_is_not_counted(gpu, monkeypatch):
    """However short a call is, and however long the first one takes: the host's clock here is the fake GPU's."""
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 1e-3 * gpu.clock)
    slow_at_first = [1024.0] + [1 / 64] * 100_000  # milliseconds, in binary
    times = timing.block_ms(timing.CudaTimer(CUDA), gpu.call("call", slow_at_first), min_time_s=0.2)
    assert set(times) == {1 / 64} and len(times) == timing.MAX_ROUNDS
    assert gpu.clock - slow_at_first[0] >= 1e3 * timing.WARM_UP_S + sum(times)


class Timer:
    """Hands out the times of calls, which return them."""

    warm_up_s = 0.0

    def __init__(self, device=None):
        pass

    def times_ms(self, call, rounds, mark=None):
        return [call() for _ in range(rounds)]


def test_blocks_take_turns_and_the_figure_is_the_median(monkeypatch):
    monkeypatch.setattr(timing, "CudaTimer", Timer)
    order = []

    def call(name, blocks):
        """In each block the trial calls, then three that count."""
        times = iter([t for block in blocks for t in [9.0] * timing.TRIAL_CALLS + block])

        def run():
            order.append(name)
            return next(times)

        return run

    calls = {"a": call("a", [[1.0, 2.0, 3.0], [4.0, 5.0, 100.0]]), "b": call("b", [[7.0, 7.0, 7.0], [8.0, 8.0, 8.0]])}
    timings, errors = timing.measure(calls, device=CUDA, min_time_s=0.0)
    block = timing.TRIAL_CALLS + timing.MIN_ROUNDS
    turns = [order[: 2 * block], order[2 * block :]]
    assert turns[0] in (block * ["a"] + block * ["b"], block * ["b"] + block * ["a"]) and not errors
    assert turns[1] == turns[0][::-1]
    assert timings["a"] == timing.Timing(3.5, (2.0, 5.0)), "of all calls, which a mean would not be"
    assert timings["b"] == timing.Timing(statistics.median([7.0, 8.0]), (7.0, 8.0))


def test_nobody_is_always_first(monkeypatch):
    monkeypatch.setattr(timing, "CudaTimer", Timer)
    timing.random.seed(0)
    firsts, order = [], []
    calls = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    for _ in range(90):
        order.clear()
        timing.measure(calls, device=CUDA, min_time_s=0.0)
        turns = order[: len(order) // 2], order[len(order) // 2 :]
        assert turns[0] == turns[1][::-1]
        firsts.append(order[0])
    assert all(10 < firsts.count(name) < 50 for name in "abc")  # of 90, 30 expected


def test_turns(monkeypatch):
    monkeypatch.setattr(timing, "CudaTimer", Timer)
    timings, _ = timing.measure({"a": lambda: 1.0}, device=CUDA, min_time_s=0.0, turns=5)
    assert timings["a"] == timing.Timing(1.0, (1.0,) * 5)


def test_what_raises_is_left_out():
    calls = []

    def fails():
        calls.append("fails")
        raise RuntimeError("not this shape")

    timings, errors = timing.measure(
        {"fails": fails, "works": lambda: calls.append("works")}, device=torch.device("cpu"), min_time_s=0.0
    )
    assert list(timings) == ["works"] and timings["works"].ms >= 0
    assert list(errors) == ["fails"] and "not this shape" in str(errors["fails"])
    assert calls.count("fails") == 1, "it has no second turn"
    assert calls.count("works") == timing.TURNS * (timing.TRIAL_CALLS + timing.MIN_ROUNDS)


def test_a_call_elsewhere_is_timed_there():
    class There:
        asked = []

        def block_ms(self, min_time_s):
            self.asked.append(min_time_s)
            return [1.0, 3.0, 8.0]

    timings, _ = timing.measure({"there": There()}, device=torch.device("cpu"), min_time_s=0.3)
    assert timings["there"] == timing.Timing(3.0, (3.0, 3.0)) and There.asked == [0.15, 0.15]

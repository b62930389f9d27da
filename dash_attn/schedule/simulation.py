"""Simulates a schedule in the DAG model of DASH (arXiv 2601.21824), on any number of SMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import _schedule
from .._schedule import Problem, Task

# Microseconds for one 64 x 128 tile at head_dim 128, measured on an H200: its products at the speed of a large cuBLAS
# GEMM (10.5 MFLOP at 6 TFLOP/s per SM), an ordered 32 KB add into L2, and one hop from SM to SM.
PRODUCT_TIME = 1.75
ADD_TIME = 0.95
SIGNAL_TIME = 0.58


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation. Times are in the unit of the costs."""

    schedule: str
    problem: Problem
    sms: int
    makespan: float
    """The time at which the last add ends."""
    critical_path: float
    """The makespan with one SM per KV tile, which no number of SMs can improve."""
    ideal: float
    """A lower bound for all schedules: the larger of all work spread evenly over the SMs, and the longest KV tile."""
    idle_share: float
    """The share of the SMs' time in which they neither multiply nor add."""
    num_tasks: int
    tasks: list[Task]
    """All tiles in the order in which their adds ended; empty unless ``record_tasks``."""

    @property
    def ratio(self) -> float:
        """makespan / ideal."""
        return self.makespan / self.ideal


def simulate(
    schedule: str,
    problem: Problem,
    *,
    sms: int,
    product_time: float = PRODUCT_TIME,
    add_time: float = ADD_TIME,
    signal_time: float = SIGNAL_TIME,
    mapping: str = "counter",
    launch_times: Sequence[float] = (),
    record_tasks: bool = False,
    **machine: float,
) -> Simulation:
    """Simulates a problem under a policy.

    The products of a tile take ``product_time`` and the add of its dQ partial takes ``add_time``, one after the other.
    The tiles of a KV tile run in sequence on one SM. An add starts at the earliest ``signal_time`` after the add of the
    previous rank has ended. This is the DAG model; ``machine`` adds effects that the model leaves out.

    Args:
        schedule: one of ``POLICIES``.
        problem: the result of ``dash_attn.schedule.problem`` for the same policy.
        sms: the number of SMs, at least ``problem.cta_group``; a cluster occupies ``cta_group`` SMs.
        product_time: the time of a tile's products, in any unit; default: microseconds on an H200.
        add_time: the time of an add, in the same unit.
        signal_time: the time from the end of an add to the start of the next, in the same unit.
        mapping: ``"counter"``: clusters take work from a counter, as in the kernel; ``"independent"``: CTAs that need
            not be resident together take the same work tile by tile; ``"published"``: the paper's static mapping,
            which needs as many SMs as KV tiles.
        launch_times: the time at which each cluster (without clusters, each SM) becomes resident; default: all at 0.
        record_tasks: whether to keep the times of every tile.
        machine: further costs and features of the kernel by name, the fields of ``SimulationOptions`` in
            ``csrc/model/simulator.h``, which defines them. All are off by default.

    Returns:
        The times of the simulation.

    Raises:
        TypeError: ``machine`` contains an unknown name.
        ValueError: an argument is out of range; the message names the argument.
        RuntimeError: the schedule makes no progress, because a resident CTA waits for one that is never launched.
    """
    options = _schedule.SimulationOptions()
    times = {"product_time": product_time, "add_time": add_time, "signal_time": signal_time}
    named: dict[str, Any] = {**times, **machine}
    named.update(sms=sms, mapping=mapping, launch_times=list(launch_times), record_tasks=record_tasks)
    for name, value in named.items():
        if not hasattr(options, name):
            raise TypeError(f"simulate() got an unexpected keyword argument {name!r}")
        setattr(options, name, value)
    played = _schedule.simulate(schedule, problem, options)
    # With staged partials, adds overlap with products.
    step = product_time * (1 - options.spread) if options.staging else product_time + add_time
    visits = max(problem.query_tiles_of(kv_tile)[1] for kv_tile in range(problem.num_kv_tiles))
    longest_tile = visits * problem.heads_per_split * step
    occupied = sms * played.makespan
    return Simulation(
        schedule=schedule,
        problem=problem,
        sms=sms,
        makespan=played.makespan,
        critical_path=_schedule.critical_path(schedule, problem, options),
        ideal=max(played.busy / sms, longest_tile),
        idle_share=1 - played.busy / occupied if occupied else 0.0,
        num_tasks=played.num_tasks,
        tasks=played.tasks,
    )

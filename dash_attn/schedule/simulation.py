"""A schedule played in the DAG model of DASH (arXiv 2601.21824), on any number of SMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import _schedule
from .._schedule import Problem, Task

# Microseconds for one 64 x 128 tile at head_dim 128, measured on an H200: its products at the rate of a large cuBLAS
# product (10.5 MFLOP at 6 TFLOP/s an SM), an ordered 32 KB add into L2, and one hop from SM to SM.
PRODUCT_TIME = 1.75
ADD_TIME = 0.95
SIGNAL_TIME = 0.58


@dataclass(frozen=True)
class Simulation:
    """What the model says of one schedule. Times are in the unit of the costs given."""

    schedule: str
    problem: Problem
    sms: int
    makespan: float
    """Time until the last add ends."""
    critical_path: float
    """Time with an SM for every KV tile: no number of SMs does better."""
    ideal: float
    """No schedule does better: the larger of all work spread evenly over the SMs, and the longest KV tile alone."""
    idle_share: float
    """Share of the SMs' time in which they neither multiply nor add."""
    num_tasks: int
    tasks: list[Task]
    """Every tile, in the order in which its add ended; empty unless ``record_tasks``."""

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
    """Plays a problem under a policy.

    A tile's products take ``product_time`` and the add of its dQ partial ``add_time``, one after the other; the tiles
    of a KV tile follow each other on one SM; an add starts ``signal_time`` after the add of the previous rank ended,
    or later. That is the DAG model; ``machine`` adds what it leaves out.

    Args:
        schedule: one of ``POLICIES``.
        problem: of ``dash_attn.schedule.problem``, for the same policy.
        sms: number of SMs, at least ``problem.cta_group``; a cluster occupies ``cta_group`` of them.
        product_time, add_time, signal_time: costs, in any one unit; by default microseconds on an H200.
        mapping: ``"counter"``, clusters take work from a counter as the kernel does; ``"independent"``, the same work
            taken tile by tile by CTAs that nothing keeps resident together; ``"published"``, the paper's static
            mapping, which needs as many SMs as KV tiles.
        launch_times: when each cluster becomes resident (each SM, without clusters); all at 0 when empty.
        record_tasks: whether to keep every tile's times.
        machine: further costs and features of the kernel by name: those of ``SimulationOptions`` in
            ``csrc/model/simulator.h``, where each is defined. All are off by default.

    Raises:
        TypeError: ``machine`` holds a name that is none.
        ValueError: an argument is out of range; the message names it.
        RuntimeError: the schedule makes no progress: a resident CTA waits for one that is never launched.
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
    # Staged partials are added while products go on.
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

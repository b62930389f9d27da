"""Gantt charts of simulated schedules, as PNG files. Drawing needs matplotlib, which is imported only then."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from ..pictures import check_picture, new_figure
from .simulation import Simulation

MAX_TASKS = 20_000
_LABELLED_TASKS = 400


def draw(simulations: Sequence[Simulation], path: str | PathLike[str], unit: str = "microseconds") -> None:
    """Draws simulations below each other on one time axis: a row per SM, a color per head, adds darker, waits blank.

    Args:
        simulations: results of ``simulate(..., record_tasks=True)``, at least one.
        path: the file to write; its suffix must be ``.png``.
        unit: the unit of the simulations' times, for the label of the axis.

    Raises:
        ValueError: ``path`` does not end in ``.png``, or a simulation has no tasks or more than ``MAX_TASKS``.
        ImportError: matplotlib is not installed.
    """
    check_picture(path, "a schedule")
    if not simulations:
        raise ValueError("simulations must hold at least one simulation, got none")
    for simulation in simulations:
        if not 0 < len(simulation.tasks) <= MAX_TASKS:
            raise ValueError(
                f"simulations must have between 1 and {MAX_TASKS} recorded tasks each, got "
                f"{len(simulation.tasks)} for {simulation.schedule!r}"
            )
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    heights = [max(1.2, 0.22 * simulation.sms) for simulation in simulations]
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.08)
    figure = new_figure(14, 0.8 + sum(heights) + 0.6 * len(heights), layout)
    rows = figure.subplots(len(simulations), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    palette = [colormaps["tab20"](index) for index in range(20)]
    for axes, simulation in zip(rows, simulations):
        heads = max(task.head for task in simulation.tasks) + 1
        boxes, colours = [], []
        for task in simulation.tasks:
            head = task.batch * heads + task.head
            light, dark = palette[(2 * head + 1) % 20], palette[2 * head % 20]
            boxes += [_box(task.sm, task.start, task.products_end), _box(task.sm, task.add_start, task.end)]
            colours += [light, dark]
        axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=0.3))
        if len(simulation.tasks) <= _LABELLED_TASKS:
            for task in simulation.tasks:
                middle = (task.start + task.products_end) / 2
                label = f"{task.kv_tile},{task.query_tile}"
                axes.text(middle, task.sm, label, ha="center", va="center", fontsize=5)
        axes.set_ylim(simulation.sms - 0.5, -0.5)
        axes.set_ylabel("SM")
        axes.set_title(
            f"{simulation.schedule}, {simulation.problem.mask}: "
            f"makespan {simulation.makespan:.4g}, {simulation.ratio:.3f} of ideal, "
            f"idle {simulation.idle_share:.1%}",
            loc="left",
            fontsize=9,
        )
    # A little longer than the longest simulation, so that its last box and the last tick label are not cut off.
    rows[-1].set_xlim(0, 1.02 * max(simulation.makespan for simulation in simulations))
    rows[-1].set_xlabel(f"{unit} (labels: KV tile, query tile; colors: head; dark: the add to dQ; blank: waiting)")
    figure.savefig(path)


def _box(row: int, start: float, end: float) -> list[tuple[float, float]]:
    return [(start, row - 0.45), (end, row - 0.45), (end, row + 0.45), (start, row + 0.45)]

"""A picture of where two runs differ, as a PNG file. Needs matplotlib, imported when it is drawn."""

from __future__ import annotations

import os

from .comparison import comparable, open_runs, what_differs
from .runs import Key, Run, merge_orders

_MAX_LABELS = 60
_BINS = 64
_SAME, _DIFFERS, _ABSENT = 0.0, 1.0, float("nan")


def draw(a: str | os.PathLike[str], b: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Draws which tensors differ in which steps, and where in the tensors those of the first such step differ.

    Args:
        a, b: folders that Recorders have written.
        path: file to write; its suffix must be ``.png``.

    Raises:
        ValueError: ``path`` is no PNG, or the runs cannot be compared.
        ImportError: matplotlib is missing.
    """
    if not str(path).endswith(".png"):
        raise ValueError(f"path must end in .png, got {str(path)!r}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"drawing receipts needs matplotlib: pip install matplotlib ({error})") from error
    one, other, steps = open_runs(a, b)
    try:
        order, differs, first = _scan(one, other, steps)
        blocks = _blocks(one, other, first, order)
    finally:
        one.close()
        other.close()
    table = [[differs[step].get(key, _ABSENT) for step in steps] for key in order]
    figure = Figure(figsize=(14, min(40.0, 2.0 + 0.16 * len(order))), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    colours = ListedColormap(["#d7e8d4", "#b3202a"]).with_extremes(bad="#ffffff")
    left.imshow(table, aspect="auto", cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    right.imshow(blocks, aspect="auto", cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    shown = range(0, len(order), -(-len(order) // _MAX_LABELS))
    left.set_yticks(list(shown), [str(order[place]) for place in shown], fontsize=6)
    columns = range(0, len(steps), -(-len(steps) // 12))
    left.set_xticks(list(columns), [str(steps[place]) for place in columns])
    left.set_xlabel("step")
    left.set_title("tensors in their order of execution: red differs, white was not compared", loc="left", fontsize=9)
    right.set_xticks([0, _BINS - 1], ["first", "last"])
    right.set_xlabel("blocks of the tensor")
    title = "no step differs" if first is None else f"blocks that differ in step {first}, white where not kept"
    right.set_title(title, loc="left", fontsize=9)
    figure.savefig(path)


def _scan(a: Run, b: Run, steps: list[int]) -> tuple[list[Key], dict[int, dict[Key, float]], int | None]:
    """The tensors, which differ in each step, and the first step in which one does."""
    order: list[Key] = []
    differs: dict[int, dict[Key, float]] = {}
    first = None
    for step in steps:
        of_a, of_b = a.step(step), b.step(step)
        keys, _ = comparable(of_a, of_b, (a.world_size, b.world_size))
        order = merge_orders(order, keys)
        differs[step] = {key: _DIFFERS if what_differs(of_a[key], of_b[key]) else _SAME for key in keys}
        if first is None and _DIFFERS in differs[step].values():
            first = step
    if not order:
        raise ValueError("the runs must have a tensor in common that can be compared, got none")
    return order, differs, first


def _blocks(a: Run, b: Run, step: int | None, order: list[Key]) -> list[list[float]]:
    """For each tensor, from its first block to its last, whether they differ in a step."""
    rows = []
    for key in order:
        one, other = (None, None) if step is None else (a.blocks(step, key), b.blocks(step, key))
        row = [_ABSENT] * _BINS
        if one and other:
            count = 1 + max(*one, *other)
            for place in range(_BINS):
                begin = place * count // _BINS
                numbers = range(begin, max(begin + 1, (place + 1) * count // _BINS))
                row[place] = _DIFFERS if any(one.get(n, 0) != other.get(n, 0) for n in numbers) else _SAME
        rows.append(row)
    return rows

"""Draws where two runs differ, as a PNG file. Drawing needs matplotlib, which is imported only then."""

from __future__ import annotations

import os

from ..pictures import check_picture, new_figure
from .comparison import open_runs
from .pairs import Progress, common_steps, compare_steps
from .runs import Key, Run, merge_orders
from .text import printable

_MAX_LABELS = 60
_LABEL = 100
# With more columns, each would be narrower than a pixel, which could hide a step.
_MAX_COLUMNS = 800
_BINS = 64
_SAME, _DIFFERS, _ABSENT = 0.0, 1.0, float("nan")


def draw(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
) -> None:
    """Draws which tensors differ in which steps, and which of their blocks differ in the first such step.

    Args:
        a: the folder that the Recorder of run a wrote.
        b: the folder that the Recorder of run b wrote.
        path: the file to write; its suffix must be ``.png``.
        progress: a function that is called after each step with the number of finished steps and the total.

    Raises:
        ValueError: ``path`` does not end in ``.png``, or the runs cannot be compared.
        ImportError: matplotlib is not installed.
    """
    check_picture(path, "receipts")
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    with open_runs(a, b) as (one, other):
        steps = common_steps(one, other)
        order, columns, first = _scan(one, other, steps, progress)
        blocks = _blocks(one, other, None if first is None else first[0], order)
    table = [[column.get(key, _ABSENT) for column in columns] for key in order]
    figure = new_figure(14, min(40.0, 2.5 + 0.16 * len(order)))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    meanings = {"#d7e8d4": "the same bits", "#b3202a": "different bits", "#ffffff": "not compared"}
    same, differs, absent = meanings
    colours = ListedColormap([same, differs]).with_extremes(bad=absent)
    left.imshow(table, aspect="auto", cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    right.imshow(blocks, aspect="auto", cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    shown = range(0, len(order), -(-len(order) // _MAX_LABELS))
    left.set_yticks(list(shown), [_label(order[place]) for place in shown], fontsize=6)
    ticks = range(0, len(columns), -(-len(columns) // 12))
    left.set_xticks(list(ticks), [str(steps[-(-place * len(steps) // len(columns))]) for place in ticks])
    left.set_xlabel("step")
    left.set_title("Tensors in their order of execution, by step", loc="left", fontsize=9)
    right.set_xticks([0, _BINS - 1], ["first", "last"])
    right.set_xlabel("blocks of the tensor")
    if first is None:
        title, message = "Blocks: no step differs", "The runs agree in every tensor that was compared"
    else:
        title = f"Blocks of the tensors in step {first[0]}"
        message = f"The runs first differ in step {first[0]}, at {_label(first[1])}"
    right.set_title(title, loc="left", fontsize=9)
    figure.suptitle(message, fontsize=12)
    patches = [Patch(facecolor=colour, edgecolor="#808080", label=text) for colour, text in meanings.items()]
    figure.legend(handles=patches, loc="outside upper right", ncols=3, fontsize=9)
    figure.savefig(path)


def _label(key: Key) -> str:
    """Returns a tensor's name as plain text that matplotlib does not parse as a formula."""
    text = printable(str(key))
    if len(text) > _LABEL:
        text = f"{text[: _LABEL // 2]}...{text[-_LABEL // 2 :]}"
    return text.replace("$", r"\$")


def _scan(
    a: Run, b: Run, steps: list[int], progress: Progress | None
) -> tuple[list[Key], list[dict[Key, float]], tuple[int, Key] | None]:
    """Returns the tensors, their state (same or different) in each column's steps, and the first difference: its step
    and tensor."""
    order: list[Key] = []
    count = min(len(steps), _MAX_COLUMNS)
    columns: list[dict[Key, float]] = [{} for _ in range(count)]
    first, known = None, None
    for place, found in enumerate(compare_steps(a, b, progress)):
        column = columns[place * count // len(steps)]
        if found.keys is not known:
            order, known = merge_orders(order, found.keys), found.keys
        if len(column) < len(order):
            column.update({key: _SAME for key in found.keys if key not in column})
        column.update(dict.fromkeys(found.differing, _DIFFERS))
        if first is None and found.differing:
            first = found.step, next(key for key in found.keys if key in found.differing)
    if not order:
        raise ValueError("the runs must have a comparable tensor in common, got none")
    return order, columns, first


def _blocks(a: Run, b: Run, step: int | None, order: list[Key]) -> list[list[float]]:
    """For each tensor, returns which of its blocks, from first to last, differ in a step."""
    rows = []
    of_a, of_b = ({}, {}) if step is None else (a.blocks(step), b.blocks(step))
    for key in order:
        one, other = of_a.get(key), of_b.get(key)
        row = [_ABSENT] * _BINS
        if one and other:
            count = 1 + max(*one, *other)
            for place in range(_BINS):
                begin = place * count // _BINS
                numbers = range(begin, max(begin + 1, (place + 1) * count // _BINS))
                row[place] = _DIFFERS if any(one.get(n, 0) != other.get(n, 0) for n in numbers) else _SAME
        rows.append(row)
    return rows

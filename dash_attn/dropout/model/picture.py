"""The model's pictures. Drawing needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from ...pictures import check_picture, new_figure
from .formulas import Row
from .judge import WITHIN, Judged


def draw(path: str, made: Sequence[Row]) -> None:
    """Draws the predicted ratios of both passes over the length, with a line per block.

    Raises:
        ValueError: the path does not end in .png.
        ImportError: matplotlib is not installed.
    """
    check_picture(path, "the model")
    figure = new_figure(11, 4.2)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, name in zip(axes, ("sequential", "fused")):
        for block in dict.fromkeys(row.block for row in made):
            own = [row for row in made if row.block is block]
            ratios = [getattr(row.both, name) / row.both.overlapped for row in own]
            axis.plot([row.seqlen for row in own], ratios, marker="o", label=block.name)
        axis.set(xscale="log", xlabel="sequence length", title=f"{name} / overlapped, forward and backward")
        axis.set_xticks(sorted({row.seqlen for row in made}), labels=sorted({row.seqlen for row in made}), minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle("Predicted; not all constants were measured")
    figure.savefig(path)


def draw_judged(path: str, found: Sequence[Judged], title: str) -> None:
    """Draws predicted over measured, with a panel per predicted time, a line per block and pass, and the tolerance.

    Raises:
        ValueError: there is nothing to draw, or the path does not end in .png.
        ImportError: matplotlib is not installed.
    """
    check_picture(path, "the model")
    if not found:
        raise ValueError("result must have rows of blocks that are both measured and predicted, got none")
    columns = list(dict.fromkeys(one.of for one in found))
    across = min(3, len(columns))
    down = -(-len(columns) // across)
    figure = new_figure(4.2 * across, 3.4 * down + 0.8)
    axes = figure.subplots(down, across, squeeze=False)
    colours = {block: f"C{i}" for i, block in enumerate(dict.fromkeys(one.block for one in found))}
    lines = {}
    for axis, of in zip(axes.flat, columns):
        axis.axhspan(1 - WITHIN, 1 + WITHIN, color="0.9", zorder=0)
        axis.axhline(1, color="0.6", linewidth=0.8)
        for key in dict.fromkeys((one.block, one.pass_) for one in found if one.of == of):
            own = sorted((o for o in found if o.of == of and (o.block, o.pass_) == key), key=lambda o: o.seqlen)
            (lines[key],) = axis.plot(
                [one.seqlen for one in own],
                [one.predicted / one.measured for one in own],
                color=colours[key[0]],
                linestyle="-" if key[1] == "forward" else "--",
                marker="o",
                markersize=4,
            )
        lengths = sorted({one.seqlen for one in found})
        axis.set(xscale="log", title=of, xlabel="sequence length", ylabel="predicted / measured")
        axis.set_xticks(lengths, labels=lengths, minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(columns) :]:
        axis.axis("off")
    labels = [f"{block}, {pass_}" for block, pass_ in lines]
    figure.legend(list(lines.values()), labels, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title)
    figure.savefig(path)

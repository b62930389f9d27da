"""The summary of a run of many shapes: `auto` over the best baselines of the same run, by head dim and mask."""

import collections

from benchmarks import compare
from benchmarks.compare import Comparison, Mean
from benchmarks.shapes import Shape

MINUTES = {"sharded": 8.5, "sharded_held_out": 2.5}  # for a run of these grids
WORST = 10
HEADS = ("backward over the best non-deterministic", "backward over the best deterministic", "forward over the best")


def ratios(rows: list[dict]) -> tuple[dict[Shape, float], dict[Shape, float], dict[Shape, float]]:
    """Returns, by shape, the ratios of the backward to the best non-deterministic and the best deterministic baseline,
    and of the forward to the best baseline, where both sides were measured."""

    def compared(pass_: str) -> list[Comparison]:
        figures = compare.figures(rows, pass_)
        return compare.compare(figures, figures)

    def over(found: list[Comparison], deterministic: bool) -> dict[Shape, float]:
        return {c.shape: c.ratio(peer) for c in found if (peer := c.best(deterministic))}

    backward, forward = compared("backward"), compared("forward")
    return over(backward, False), over(backward, True), over(forward, True)


def _cell(mean: Mean | None) -> str:
    return f"{mean.ratio:.3f}, minimum {mean.least:.2f} ({mean.shapes})" if mean else "-"


def summary(rows: list[dict]) -> str:
    """Formats geometric means, minima, numbers of shapes and the worst shapes; "" if nothing was compared."""
    found = ratios(rows)
    shapes = list(dict.fromkeys(shape for of in found for shape in of))
    if not shapes:
        return ""
    groups: dict[str, list[Shape]] = collections.defaultdict(list)
    for shape in shapes:
        groups[compare.group_of(shape)].append(shape)
    widths = [max(27, len(head)) for head in HEADS]
    lines = ["auto over the best baseline of the run: geometric mean, minimum (shapes)"]
    lines.append(f"{'':<12}  " + "  ".join(f"{head:>{w}}" for head, w in zip(HEADS, widths)))
    for name, group in [*groups.items(), ("all", shapes)]:
        means = [compare.mean_of({shape: of[shape] for shape in group if shape in of}) for of in found]
        lines.append(f"{name:<12}  " + "  ".join(f"{_cell(mean):>{w}}" for mean, w in zip(means, widths)))
    lines.append(f"the {WORST} worst shapes, by the first of the three ratios that was measured")
    first = {shape: next(of[shape] for of in found if shape in of) for shape in shapes}
    for shape in sorted(shapes, key=lambda shape: first[shape])[:WORST]:
        cells = (f"{of[shape]:.2f}" if shape in of else "-" for of in found)
        lines.append(f"  {shape!s:<36} " + "  ".join(f"{cell:>5}" for cell in cells))
    return "\n".join(lines)

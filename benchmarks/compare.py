"""Our throughput over the best peer's, shape by shape, with geometric means.

    python -m benchmarks.compare ours.json --peers peers.json

Without --peers, the peers are those of the same file. Either file may be a result of benchmarks.run, or a table whose rows hold
a shape and, for "backward" and "forward", TFLOP/s by peer: a number, or {"det": ..., "nondet": ...}. Where a file has no figures of "both",
they are worked out from every backward and the quickest forward of any peer.
"""

import argparse
import collections
import json
import math
import pathlib
from typing import NamedTuple

from benchmarks.shapes import PASSES, SHAPE_FIELDS, Shape

OURS = "dash_attn"


class Figure(NamedTuple):
    impl: str
    schedule: str | None
    deterministic: bool
    tflops: float

    def __str__(self) -> str:
        return f"{self.schedule or self.impl} {self.tflops:.1f}"


Figures = dict[Shape, list[Figure]]


class Comparison(NamedTuple):
    shape: Shape
    ours: Figure
    best_deterministic: Figure | None
    best_other: Figure | None

    def ratio(self, peer: Figure | None) -> float | None:
        return self.ours.tflops / peer.tflops if peer else None


def read(path: pathlib.Path, pass_: str) -> Figures:
    """The figures of one pass in a file of either form."""
    found: dict[str, Figures] = {p: collections.defaultdict(list) for p in PASSES}
    for row in json.loads(path.read_text())["rows"]:
        shape = Shape(*(row.get(field, "bf16") if field == "dtype" else row[field] for field in SHAPE_FIELDS))
        if "impl" in row:
            found[row["pass"]][shape].append(Figure(row["impl"], row["schedule"], row["deterministic"], row["tflops"]))
        else:
            for p in ("forward", "backward"):
                found[p][shape] += table_figures(row, p)
    if pass_ == "both" and not found["both"]:
        forwards = found["forward"]
        return {shape: pairs(forwards.get(shape, []), backwards) for shape, backwards in found["backward"].items()}
    return found[pass_]


def table_figures(row: dict, pass_: str) -> list[Figure]:
    figures = []
    for impl, value in row.get(pass_, {}).items():
        modes = value if isinstance(value, dict) else {"det": value}
        figures += [Figure(impl, None, mode == "det", tflops) for mode, tflops in modes.items()]
    return figures


def pairs(forwards: list[Figure], backwards: list[Figure]) -> list[Figure]:
    """Forward plus backward: each backward after the quickest forward. A backward takes 2.5 times a forward's operations."""
    forward = _best(forwards)
    if forward is None:
        return []

    def together(backward: Figure) -> float:
        return 3.5 / (1 / forward.tflops + 2.5 / backward.tflops)

    return [Figure(f"{forward.impl}+{b.impl}", None, b.deterministic, together(b)) for b in backwards]


def _best(figures: list[Figure]) -> Figure | None:
    return max(figures, key=lambda figure: figure.tflops, default=None)


def compare(ours: Figures, peers: Figures, schedule: str | None = None) -> list[Comparison]:
    """For each shape of ours that a peer has too: our best schedule (or the one named) and the best peers."""
    found = []
    for shape, figures in ours.items():
        own = _best([f for f in figures if f.impl == OURS and schedule in (None, f.schedule)])
        others = [f for f in peers.get(shape, []) if f.impl != OURS]
        if own and others:
            deterministic = _best([f for f in others if f.deterministic])
            found.append(Comparison(shape, own, deterministic, _best([f for f in others if not f.deterministic])))
    return found


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def report(comparisons: list[Comparison]) -> str:
    lines = [f"{'shape':<38} {'ours':>22} {'best deterministic':>22} {'ratio':>6} {'best other':>14} {'ratio':>6}"]
    groups = collections.defaultdict(lambda: ([], []))
    for comparison in comparisons:
        shape = comparison.shape
        cells = [f"{shape!s:<38}"]
        cells.append(f"{comparison.ours!s:>22}")
        for i, (peer, width) in enumerate(((comparison.best_deterministic, 22), (comparison.best_other, 14))):
            ratio = comparison.ratio(peer)
            cells += [f"{str(peer or '-'):>{width}}", f"{ratio:6.2f}" if ratio else f"{'-':>6}"]
            if ratio:
                groups[f"d{shape.head_dim} {shape.mask}"][i].append(ratio)
                groups["all"][i].append(ratio)
        lines.append(" ".join(cells))
    lines.append("")
    lines.append("geometric mean of the ratios: to the best deterministic peer, to the best other peer")
    for name in sorted(groups, key=lambda name: (name == "all", name)):
        means = [f"{geometric_mean(ratios):.3f} ({len(ratios)})" if ratios else "-" for ratios in groups[name]]
        lines.append(f"  {name:<14} {means[0]:>12} {means[1]:>12}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", type=pathlib.Path)
    parser.add_argument("--peers", type=pathlib.Path)
    parser.add_argument("--pass", dest="pass_", choices=PASSES, default="backward")
    parser.add_argument("--schedule", help="compare this schedule instead of the best one of each shape")
    arguments = parser.parse_args()
    ours = read(arguments.ours, arguments.pass_)
    peers = read(arguments.peers, arguments.pass_) if arguments.peers else ours
    comparisons = compare(ours, peers, arguments.schedule)
    if not comparisons:
        raise SystemExit(f"no shape of {arguments.ours} has both a figure of ours and one of a peer")
    print(report(comparisons))


if __name__ == "__main__":
    main()

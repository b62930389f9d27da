"""Our throughput over the baselines', shape by shape, with geometric means.

    python -m benchmarks.compare ours.json --peers peers.json
    python -m benchmarks.compare result.json --pass backward forward --grid sharded

Ours is one schedule, "auto" by default, and never a non-deterministic one. Without --peers, the baselines are those of
the same file, measured in the same run. The last lines of a pass give the geometric mean and the minimum of the ratios
for each baseline, with --grid over the shapes of that grid only. If a file has no figures of "both", they are computed:
ours from our two passes, and a baseline's from its backward and the fastest forward of any baseline.
"""

import argparse
import collections
import json
import math
import pathlib
import string
from typing import NamedTuple

from benchmarks.shapes import GRIDS, PASSES, Shape

OURS = "dash_attn"
DENSE = "dash_attn dense"  # our dense call on a variable-length batch of equal lengths, for comparison
BITS = "dash_attn bits"  # our call with dropout and existing bits, for comparison
OUR_OWN = (OURS, DENSE, BITS)
NAMES = {
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN",
    "dash-authors": "DASH",
}


class Figure(NamedTuple):
    impl: str
    schedule: str | None
    deterministic: bool
    tflops: float

    @property
    def name(self) -> str:
        return NAMES.get(self.impl, self.impl)


Figures = dict[Shape, list[Figure]]


class Peer(NamedTuple):
    """One baseline in one of its two modes, whatever its schedule."""

    impl: str
    deterministic: bool

    def __str__(self) -> str:
        return NAMES.get(self.impl, self.impl) + (", deterministic" if self.deterministic else "")


class Comparison(NamedTuple):
    shape: Shape
    ours: Figure
    peers: list[Figure]
    dense: Figure | None = None

    def best(self, deterministic: bool, impl: str | None = None) -> Figure | None:
        return _best([f for f in self.peers if f.deterministic == deterministic and impl in (None, f.impl)])

    def ratio(self, peer: Figure | None) -> float | None:
        return self.ours.tflops / peer.tflops if peer else None


class Mean(NamedTuple):
    """A geometric mean of ratios over a number of shapes, and the minimum with its shape."""

    ratio: float
    shapes: int
    least: float
    worst: Shape

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.shapes})"


def figures(rows: list[dict], pass_: str) -> Figures:
    """Returns the figures of one pass among the rows of a result."""
    found: dict[str, Figures] = {p: collections.defaultdict(list) for p in PASSES}
    for row in rows:
        figure = Figure(row["impl"], row["schedule"], row["deterministic"], row["tflops"])
        found[row["pass"]][Shape.of_row(row)].append(figure)
    if pass_ == "both" and not found["both"]:
        forwards = found["forward"]
        return {shape: pairs(forwards.get(shape, []), backwards) for shape, backwards in found["backward"].items()}
    return found[pass_]


def read(path: pathlib.Path, pass_: str) -> Figures:
    return figures(json.loads(path.read_text())["rows"], pass_)


def read_runs(path: pathlib.Path, pass_: str) -> dict[str, Figures]:
    """Returns the figures of runs that measured us and baselines together (`same_run`), by the run's name, if the file
    has them."""
    runs = collections.defaultdict(list)
    for row in json.loads(path.read_text()).get("same_run", []):
        runs[row["run"]].append(row)
    return {run: figures(rows, pass_) for run, rows in runs.items()}


def pairs(forwards: list[Figure], backwards: list[Figure]) -> list[Figure]:
    """Returns forward plus backward under the backward's name: each of ours after its own forward, and each baseline
    after the fastest forward of any. A backward takes 2.5 times a forward's operations."""

    def side(figure: Figure) -> str | None:
        return figure.impl if figure.impl in OUR_OWN else None

    found = []
    for backward in backwards:
        forward = _best([f for f in forwards if side(f) == side(backward)])
        if forward:
            found.append(backward._replace(tflops=3.5 / (1 / forward.tflops + 2.5 / backward.tflops)))
    return found


def _best(found: list[Figure]) -> Figure | None:
    return max(found, key=lambda figure: figure.tflops, default=None)


def compare(ours: Figures, peers: Figures, schedule: str = "auto") -> list[Comparison]:
    """Returns, for each shape at which this schedule of ours and a baseline (or our dense call) were measured, our
    figure and the others'.

    A forward has no schedule, and its figure is used for all of them.
    """
    found = []
    for shape, of_shape in ours.items():
        chosen = [f for f in of_shape if f.deterministic and f.schedule in (schedule, None)]
        own, dense = (_best([f for f in chosen if f.impl == impl]) for impl in (OURS, DENSE))
        others = [f for f in peers.get(shape, []) if f.impl not in OUR_OWN]
        if own and (others or dense):
            found.append(Comparison(shape, own, others, dense))
    return found


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def mean(comparisons: list[Comparison], deterministic: bool, impl: str | None = None) -> Mean | None:
    """Returns the mean over the shapes where a baseline, or the one named, was measured; None if there is none."""
    return mean_of({c.shape: c.ratio(peer) for c in comparisons if (peer := c.best(deterministic, impl))})


def dense_mean(comparisons: list[Comparison]) -> Mean | None:
    """Returns variable-length batches of equal lengths over our dense call on the same sequences, or None."""
    return mean_of({c.shape: c.ratio(c.dense) for c in comparisons if c.dense})


def mean_of(ratios: dict[Shape, float]) -> Mean | None:
    """Returns the mean of ratios, or None without ratios."""
    if not ratios:
        return None
    worst = min(ratios, key=ratios.get)
    return Mean(geometric_mean(list(ratios.values())), len(ratios), ratios[worst], worst)


def measured_peers(comparisons: list[Comparison]) -> list[Peer]:
    """Returns the measured baselines, deterministic ones first, by name."""
    found = {Peer(figure.impl, figure.deterministic) for c in comparisons for figure in c.peers}
    return sorted(found, key=lambda peer: (not peer.deterministic, str(peer)))


def footnotes(comparisons: list[Comparison]) -> tuple[dict[Shape, str], dict[str, list[Peer]]]:
    """Returns a letter per shape for the baselines that were not measured there ("" if none is missing), and the
    baselines that each letter stands for."""
    peers, letters, shapes = measured_peers(comparisons), {}, {}
    for comparison in comparisons:
        missing = tuple(p for p in peers if comparison.best(p.deterministic, p.impl) is None)
        if missing and missing not in letters:
            letters[missing] = string.ascii_lowercase[len(letters)]
        shapes[comparison.shape] = letters.get(missing, "")
    return shapes, {letter: list(missing) for missing, letter in letters.items()}


def group_of(shape: Shape) -> str:
    return f"d{shape.head_dim} {shape.mask}"


def report(comparisons: list[Comparison]) -> str:
    """Formats every shape with the best baselines, the missing ones, and the means: by group, and to each baseline."""
    notes, missing = footnotes(comparisons)
    heads = f"{'ours':>17} {'best deterministic':>24} {'ratio':>6} {'best other':>24} {'ratio':>6}"
    width = max([36, *(len(str(c.shape)) for c in comparisons)])
    lines = [f"{'shape':<{width}} {heads} not measured"]
    for comparison in comparisons:
        cells = [f"{comparison.shape!s:<{width}}"]
        cells.append(f"{comparison.ours.schedule or ''} {comparison.ours.tflops:.1f}".strip().rjust(17))
        for deterministic in (True, False):
            peer = comparison.best(deterministic)
            shown = f"{peer.name} {peer.tflops:.1f}" if peer else "-"
            cells += [f"{shown:>24}", f"{comparison.ratio(peer):6.2f}" if peer else f"{'-':>6}"]
        note = notes[comparison.shape]
        lines.append(" ".join([*cells, f"[{note}]" if note else ""]).rstrip())
    lines += [f"[{letter}] not measured here: {'; '.join(map(str, peers))}" for letter, peers in missing.items()]
    lines += [
        "",
        "geometric mean of the ratios (shapes): to the best deterministic baseline, to the best other baseline",
    ]
    groups = collections.defaultdict(list)
    for comparison in comparisons:
        groups[group_of(comparison.shape)].append(comparison)
    for name, group in [*sorted(groups.items()), ("all", comparisons)]:
        lines.append(f"  {name:<36} " + " ".join(f"{str(mean(group, d) or '-'):>12}" for d in (True, False)))
    lines += ["", "geometric mean and minimum of the ratios to each baseline, over the shapes where it was measured"]
    means = {str(peer): mean(comparisons, peer.deterministic, peer.impl) for peer in measured_peers(comparisons)}
    for deterministic, name in ((True, "the best deterministic"), (False, "the best other")):
        means[name] = mean(comparisons, deterministic)
    means[DENSE] = dense_mean(comparisons)
    for name, found in means.items():
        if found:
            lines.append(
                f"  {name:<36} {found!s:>12} of {len(comparisons)}, minimum {found.least:.3f} at {found.worst}"
            )
    return "\n".join(lines)


def of_grid(comparisons: list[Comparison], grid: str | None) -> list[Comparison]:
    """Returns the comparisons at the shapes of a grid, or all without a grid."""
    shapes = set(GRIDS[grid]()) if grid else None
    return [c for c in comparisons if shapes is None or c.shape in shapes]


def show(arguments: argparse.Namespace, pass_: str) -> None:
    """Prints the results of one pass."""
    ours = read(arguments.ours, pass_)
    peers_path = arguments.peers or arguments.ours
    peers = read(peers_path, pass_) if arguments.peers else ours
    comparisons = of_grid(compare(ours, peers, arguments.schedule), arguments.grid)
    if not comparisons:
        where = f" of the grid {arguments.grid}" if arguments.grid else ""
        raise SystemExit(
            f"error: no shape{where} has both a {pass_} of {OURS} with --schedule {arguments.schedule} in "
            f"{arguments.ours} and one of a baseline in {peers_path}"
        )
    same = "baselines of the same run" if not arguments.peers else f"baselines of {arguments.peers}, a different run"
    print(f"{pass_}: {same}\n{report(comparisons)}")
    for run, of_run in read_runs(peers_path, pass_).items():
        together = of_grid(compare(of_run, of_run, arguments.schedule), arguments.grid)
        if together:
            commit = json.loads(peers_path.read_text())["meta"]["same_run"][run]
            print(f"\n{pass_}: measured together with the baselines, {run} ({commit})\n{report(together)}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", type=pathlib.Path)
    parser.add_argument("--peers", type=pathlib.Path, help="result file with the baselines; default: the same file")
    parser.add_argument("--pass", dest="passes", nargs="+", choices=PASSES, default=["backward"])
    parser.add_argument("--schedule", default="auto", help="our schedule (default auto)")
    parser.add_argument("--grid", choices=GRIDS, help="leave out shapes that are not in this grid")
    arguments = parser.parse_args(argv)
    for number, pass_ in enumerate(arguments.passes):
        if number:
            print()
        show(arguments, pass_)


if __name__ == "__main__":
    main()

"""Compares predictions with measurements: errors, agreement of the ranking, a table and a plot.

python -m benchmarks.report machine.json calibration.json --png docs/model.png --document docs/model.md
"""

import argparse
import collections
import dataclasses
import itertools
import json
import operator
import pathlib
import statistics

from benchmarks import model, plot
from benchmarks.files import prose, with_block
from benchmarks.shapes import Shape, flops
from dash_attn import schedule

TIE = 0.01  # smaller differences are never significant


@dataclasses.dataclass(frozen=True)
class Compared:
    """One policy at one shape. `repeats` are the two measurements in microseconds, and `clocks` those of the main
    kernel."""

    shape: Shape
    policy: str
    repeats: tuple[float, float]
    clocks: float
    predicted: model.Prediction

    @property
    def us(self) -> float:
        return statistics.fmean(self.repeats)

    @property
    def times(self) -> tuple[float, float]:
        """Returns the microseconds of the whole call, measured and predicted."""
        return self.us, self.predicted.us

    @property
    def main_clocks(self) -> tuple[float, float]:
        """Returns the SM clocks of the main kernel, measured and predicted."""
        return self.clocks, self.predicted.clocks

    @property
    def error(self) -> float:
        return self.predicted.us / self.us - 1

    @property
    def clock_error(self) -> float:
        return self.predicted.clocks / self.clocks - 1

    @property
    def chaotic(self) -> bool:
        return model.is_chaotic(self.policy, self.shape.causal)


def compare(machine: model.Machine, calibration: dict) -> list[Compared]:
    found = []
    for row in calibration["grid"]:
        shape = Shape.of_row(row)
        around = model.around_us(machine, shape)
        clocks = statistics.fmean((us - around) * mhz for us, mhz in zip(row["us"], row["mhz"]))
        predicted = model.predict(machine, row["schedule"], model.Row(row))
        found.append(Compared(shape, row["schedule"], tuple(row["us"]), clocks, predicted))
    return found


def by_shape(rows: list[Compared]) -> dict[Shape, list[Compared]]:
    return {shape: list(group) for shape, group in itertools.groupby(rows, key=lambda row: row.shape)}


def noise(rows: list[Compared]) -> float:
    """Returns the relative difference beyond which two policies of a shape differ: twice the difference between the
    measurements of one policy, at the median over the shape's policies, and at least TIE."""
    spreads = [abs(row.repeats[0] - row.repeats[1]) / row.us for row in rows]
    return max(TIE, 2 * statistics.median(spreads))


TIMES, CLOCKS = operator.attrgetter("times"), operator.attrgetter("main_clocks")


def pairs(rows: list[Compared], of=TIMES) -> list[tuple[Compared, Compared, str]]:
    """Returns every two policies of a shape, the faster first: 'tie' within noise, 'agree', or 'differ' if the model
    ranks them the other way round."""
    found = []
    limit = noise(rows)
    for first, second in itertools.combinations(sorted(rows, key=of), 2):
        (measured, predicted), (measured_second, predicted_second) = of(first), of(second)
        if measured_second / measured - 1 <= limit:
            found.append((first, second, "tie"))
        else:
            found.append((first, second, "agree" if predicted < predicted_second else "differ"))
    return found


def is_automatic(row: Compared) -> bool:
    """Whether the policy is that of schedule="auto" at this shape."""
    shape = row.shape
    return row.policy == schedule.resolve("auto", causal=shape.causal, head_dim=shape.head_dim)


def best(rows: list[Compared]) -> tuple[Compared, Compared]:
    """Returns the fastest policy as measured, and the policy that the model would choose."""
    return min(rows, key=lambda row: row.us), min(rows, key=lambda row: row.predicted.us)


def summary(rows: list[Compared]) -> str:
    lines = ["| policy | mask | shapes | time: median | largest | clocks: median | largest |", "|---" * 7 + "|"]
    policies = dict.fromkeys((row.policy, row.shape.mask) for row in rows)
    for policy, mask in sorted(policies):
        chosen = [row for row in rows if (row.policy, row.shape.mask) == (policy, mask)]
        cells = [policy, mask, str(len(chosen))]
        for errors in ([abs(row.error) for row in chosen], [abs(row.clock_error) for row in chosen]):
            cells += [f"{statistics.median(errors):.1%}", f"{max(errors):.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ranking(rows: list[Compared]) -> str:
    shapes = by_shape(rows)
    lines = []
    for name, of in (("times", TIMES), ("clocks of the main kernel", CLOCKS)):
        found = [pair for group in shapes.values() for pair in pairs(group, of)]
        count = collections.Counter(kind for _, _, kind in found)
        counts = f"{count['agree']} ranked alike, {count['tie']} ties, {count['differ']} not"
        lines += [f"By {name}, {len(found)} pairs of policies: {counts}:", ""]
        for first, second, kind in found:
            if kind == "differ":
                measured, said = (after / before - 1 for before, after in zip(of(first), of(second)))
                order = f"{first.policy} before {second.policy} by {measured:.1%}"
                lines.append(f"- {first.shape}: {order}, the model says {said:+.1%}")
        lines.append("")
    bests = {shape: best(group) for shape, group in shapes.items()}
    losses = {shape: choice.us / fastest.us - 1 for shape, (fastest, choice) in bests.items()}
    worst = max(losses, key=losses.get)
    automatic = {row.shape: row.us / bests[row.shape][0].us for row in rows if is_automatic(row)}
    dearest = max(automatic, key=automatic.get)
    right = sum(loss <= noise(shapes[shape]) for shape, loss in losses.items())
    lines += [
        prose(
            f"""The model's choice is the fastest, or tied with it, at {right} of {len(shapes)} shapes; at worst it
            costs {losses[worst]:.1%} ({worst})."""
        ),
        "",
        prose(
            f"""The policy of "auto" takes {statistics.geometric_mean(automatic.values()):.3f} times as long as the
            fastest of these in geometric mean, at worst {automatic[dearest]:.3f} times ({dearest})."""
        ),
    ]
    return "\n".join(lines)


def table(rows: list[Compared]) -> str:
    """Tabulates microseconds, measured and predicted."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    lines = ["| shape | " + " | ".join(policies) + " |", "|---" * (len(policies) + 1) + "|"]
    for shape, group in by_shape(rows).items():
        cells = {row.policy: f"{row.us:,.0f} / {row.predicted.us:,.0f} ({row.error:+.1%})" for row in group}
        lines.append(f"| {shape} | " + " | ".join(cells.get(policy, "") for policy in policies) + " |")
    return "\n".join(lines)


def text(rows: list[Compared]) -> str:
    return "\n\n".join((summary(rows), ranking(rows), table(rows))) + "\n"


def draw(rows: list[Compared], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups: dict[str, list[Compared]] = {}
    series = plot.are_series({row.shape for row in rows})
    for row in rows:
        groups.setdefault(plot.panel_of(row.shape, series), []).append(row)
    policies = sorted({row.policy for row in rows})
    colours = dict(zip(policies, plt.get_cmap("tab10").colors))
    columns = 3
    lines = -(-len(groups) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(15, 4 * lines), squeeze=False)
    for axis, (panel, group) in zip(axes.flat, groups.items()):
        shapes = sorted({row.shape for row in group}, key=plot.size_of)
        places = {shape: shape.seqlen if series else i for i, shape in enumerate(shapes)}
        for policy in policies:
            line = sorted((row for row in group if row.policy == policy), key=lambda row: plot.size_of(row.shape))
            if not line:
                continue
            along = [places[row.shape] for row in line]
            work = [1e-6 * flops(row.shape, "backward") for row in line]
            style = dict(color=colours[policy])
            axis.plot(along, [w / row.predicted.us for row, w in zip(line, work)], "-", **style, label=policy)
            axis.plot(along, [w / row.us for row, w in zip(line, work)], "o", **style, markersize=5, mfc="none")
        if series:
            axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xticks(list(places.values()), [plot.place_of(shape, series) for shape in shapes])
        axis.set_title(panel, fontsize=10)
        axis.set_ylabel("TFLOP/s")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in list(axes.flat)[len(groups) :]:
        axis.axis("off")
    figure.suptitle("Whole backward: lines predicted, circles measured")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", type=pathlib.Path)
    parser.add_argument("calibration", type=pathlib.Path)
    parser.add_argument("--png", type=pathlib.Path, help="draw prediction and measurement into this file")
    parser.add_argument("--document", type=pathlib.Path, help="replace summary, ranking and table in this file")
    arguments = parser.parse_args(argv)
    rows = compare(model.read(arguments.machine), json.loads(arguments.calibration.read_text()))
    print(text(rows), end="")
    if arguments.document:
        arguments.document.write_text(with_block(arguments.document.read_text(), "benchmarks.report", text(rows)))
    if arguments.png:
        draw(rows, arguments.png)


if __name__ == "__main__":
    main()

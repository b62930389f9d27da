"""Shows how well the model predicts measured backwards with a forced number of splits of the query heads.

    python -m benchmarks.splits benchmarks/results/h200_2026-11-27_cb2c966_splits.json

The program prints the geometric mean of predicted over measured time, the spread of the ratios, and the share of cases
that are predicted within 5%: over all cases, by KV heads, by length and by splits. It takes about a minute; --most
leaves out larger problems.
"""

import argparse
import collections
import json
import math
import pathlib
import statistics
from collections.abc import Callable
from typing import NamedTuple

from benchmarks import compare, model
from benchmarks.shapes import Shape, flops

POLICY = "descending"
CLOSE = 0.05
COLUMNS = {"cases": 5, "mean": 8, "spread": 8, "least": 6, "most": 6, "within 5%": 9}  # with their widths


class Case(NamedTuple):
    """One number of splits at one shape."""

    shape: Shape
    splits: int
    us: float
    predicted_us: float

    @property
    def ratio(self) -> float:
        return self.predicted_us / self.us


def cases(machine: model.Machine, result: dict, head_dim: int, most_flops: float = math.inf) -> list[Case]:
    """Returns dense full and causal shapes of `head_dim` up to `most_flops` under POLICY, with every measured number of
    splits."""
    found = []
    for row in result["rows"]:
        if row["head_dim"] != head_dim or row["mask"] == "window" or "value_head_dim" in row:
            continue
        shape = Shape.of_row({"dtype": "bf16", **row})
        if flops(shape, "backward") > most_flops:
            continue
        for splits, ms in row["ms_by_splits"][POLICY].items():
            forced = model.Row({**shape.row(), "splits": int(splits)})
            found.append(Case(shape, int(splits), 1e3 * ms, model.predict(machine, POLICY, forced).us))
    return found


def line(name: str, group: list[Case]) -> str:
    ratios = [case.ratio for case in group]
    spread = statistics.pstdev(map(math.log, ratios))
    near = sum(abs(ratio - 1) <= CLOSE for ratio in ratios) / len(ratios)
    mean = compare.geometric_mean(ratios)
    cells = str(len(group)), f"{mean:.3f}", f"{spread:.3f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}", f"{near:.0%}"
    return f"{name:<18}" + "".join(f" {cell:>{width}}" for cell, width in zip(cells, COLUMNS.values()))


def report(found: list[Case]) -> str:
    keys: dict[str, Callable[[Case], int]] = {
        "KV heads": lambda case: case.shape.kv_heads,
        "seqlen": lambda case: case.shape.seqlen,
        "splits": lambda case: case.splits,
    }
    columns = "".join(f" {head:>{width}}" for head, width in COLUMNS.items())
    lines = [f"{'predicted/measured':<18}{columns}", line("all", found)]
    for name, key in keys.items():
        groups = collections.defaultdict(list)
        for case in found:
            groups[key(case)].append(case)
        lines += [line(f"{name} {value}", groups[value]) for value in sorted(groups)]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=pathlib.Path)
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=128)
    parser.add_argument("--most", type=float, default=math.inf, help="leave out backwards with more TFLOP")
    arguments = parser.parse_args(argv)
    result = json.loads(arguments.result.read_text())
    found = cases(model.read(model.MACHINE), result, arguments.head_dim, 1e12 * arguments.most)
    if not found:
        raise SystemExit(f"error: --most {arguments.most} leaves no shape of {arguments.result}")
    print(report(found))


if __name__ == "__main__":
    main()

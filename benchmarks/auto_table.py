"""Writes the table behind `schedule="auto"`: the fastest policy, shape by shape.

    python -m benchmarks.auto_table

The bits of a gradient follow from the policy, so the table may look at one sequence only: head_dim, mask, length, query heads
a KV head. The number of sequences and of SMs is no key. A policy is chosen for a full GPU and one a quarter as full, and only
where it gains more than a measurement errs, and loses as much at neither; else it is DEFAULT. Under the causal mask the times
are measured (`benchmarks.calibrate`); under the full mask, where policies differ by their code alone, the model's. Policies
that run in clusters are left out: "auto" has to go on wherever one SM is free.
"""

import argparse
import itertools
import json
import math
import pathlib
import statistics

from benchmarks import model
from benchmarks.shapes import HIDDEN, TOKENS, Shape
from dash_attn import _schedule, schedule

ROOT = pathlib.Path(__file__).parents[1]
MACHINE = ROOT / "benchmarks" / "results" / "machine_h200.json"
CALIBRATION = ROOT / "benchmarks" / "results" / "calibration_h200.json"
TABLE = ROOT / "dash_attn" / "schedule" / "auto_table.py"

DEFAULT = "descending"
MARGIN = 0.02
HEAD_DIMS = (64, 128)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUERIES_PER_KV = (1, 4, 8)

HEADER = '''"""The policy of schedule="auto". Written by `python -m benchmarks.auto_table` from measurements of an H200 and the model
fitted to others, in benchmarks/results; docs/model.md. A change changes the bits that "auto" gives.
"""

# Keys of a sequence; a length between two takes the next one, a longer one the last.
LENGTHS = {lengths}
# Query heads that share a KV head, taken likewise.
QUERIES_PER_KV = {queries_per_kv}
# [padded head_dim, causal, queries_per_kv]: for each length.
FASTEST = {{
{rows}
}}
'''


def loads(head_dim: int, causal: bool, length: int, queries_per_kv: int) -> list[Shape]:
    """A full GPU's worth of this kind of sequence, and a quarter of it."""
    found = []
    for share in (1, 4):
        heads = max(queries_per_kv, HIDDEN // head_dim)
        batch = TOKENS // share // length
        if batch == 0:
            batch, heads = 1, max(queries_per_kv, heads * TOKENS // share // length)
        mask = "causal" if causal else "full"
        found.append(Shape("bf16", head_dim, heads, heads // queries_per_kv, mask, length, batch))
    return found


def candidates(causal: bool) -> list[str]:
    """Not ascending under the causal mask, which may take ten times as long."""
    ordered = [policy for policy in schedule.fitting(causal=causal) if policy not in model.UNORDERED]
    return [p for p in ordered if _schedule.cta_group(p) == 1 and not (causal and p == "ascending")]


def measured_loads() -> list[Shape]:
    """What `benchmarks.calibrate` measures the candidates at."""
    kinds = itertools.product(HEAD_DIMS, LENGTHS, QUERIES_PER_KV)
    return [shape for head_dim, length, queries in kinds for shape in loads(head_dim, True, length, queries)]


class Times:
    """Microseconds of a backward: measured, or else the model's."""

    def __init__(self, machine: model.Machine, calibration: dict):
        self._machine = machine
        self._measured = {
            (row["schedule"], Shape.of_row(row)): statistics.fmean(row["us"]) for row in calibration["loads"]
        }

    def is_measured(self, policy: str, shape: Shape) -> bool:
        return (policy, shape) in self._measured

    def __call__(self, policy: str, shape: Shape) -> float:
        if self.is_measured(policy, shape):
            return self._measured[policy, shape]
        return model.predict(self._machine, policy, shape).us


def fastest(times: Times, head_dim: int, causal: bool, length: int, queries_per_kv: int) -> str:
    """The policy that gains most on average, if that is more than MARGIN and it loses more than MARGIN nowhere."""
    shapes = loads(head_dim, causal, length, queries_per_kv)
    gains = {
        policy: [math.log(times(DEFAULT, shape) / times(policy, shape)) for shape in shapes]
        for policy in candidates(causal)
    }
    safe = {policy: statistics.fmean(of_loads) for policy, of_loads in gains.items() if min(of_loads) > -MARGIN}
    best = max(safe, key=safe.get)
    return best if safe[best] > MARGIN else DEFAULT


def text(times: Times) -> str:
    rows = []
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            for queries_per_kv in QUERIES_PER_KV:
                policies = tuple(fastest(times, head_dim, causal, length, queries_per_kv) for length in LENGTHS)
                names = ", ".join(f'"{policy}"' for policy in policies)
                rows.append(f"    ({head_dim}, {causal}, {queries_per_kv}): ({names}),")
    return HEADER.format(lengths=LENGTHS, queries_per_kv=QUERIES_PER_KV, rows="\n".join(rows))


def read_times(machine: pathlib.Path = MACHINE, calibration: pathlib.Path = CALIBRATION) -> Times:
    return Times(model.read(machine), json.loads(calibration.read_text()))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=pathlib.Path, default=MACHINE)
    parser.add_argument("--calibration", type=pathlib.Path, default=CALIBRATION)
    parser.add_argument("--table", type=pathlib.Path, default=TABLE, help="write it here")
    arguments = parser.parse_args(argv)
    arguments.table.write_text(text(read_times(arguments.machine, arguments.calibration)))


if __name__ == "__main__":
    main()

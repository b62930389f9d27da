"""Writes the table behind `schedule="auto"`: the policy that the model of the machine has fastest, shape by shape.

    python -m benchmarks.auto_table

The bits of a gradient follow from the policy, so the table may look at one sequence and one head only: head_dim, mask,
length, query heads a KV head. The number of sequences and of SMs is no key. A policy is chosen for a full GPU and one a
quarter as full, and only where it gains more than the model errs; else it is DEFAULT. Policies that run in clusters are left
out: "auto" has to go on wherever one SM is free.
"""

import argparse
import math
import pathlib

from benchmarks import model
from benchmarks.shapes import Shape
from dash_attn import _schedule, schedule

ROOT = pathlib.Path(__file__).parents[1]
MACHINE = ROOT / "benchmarks" / "results" / "machine_h200.json"
TABLE = ROOT / "dash_attn" / "schedule" / "auto_table.py"

DEFAULT = "descending"
MARGIN = 0.02
HEAD_DIMS = (64, 128)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUERIES_PER_KV = (1, 4, 8)
TOKENS, HIDDEN = 16384, 2048

HEADER = '''"""The policy of schedule="auto". Written by `python -m benchmarks.auto_table` from benchmarks/results/machine_h200.json, the
model fitted to measurements of an H200; docs/model.md. A change changes the bits that "auto" gives.
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


def fastest(machine: model.Machine, head_dim: int, causal: bool, length: int, queries_per_kv: int) -> str:
    shapes = loads(head_dim, causal, length, queries_per_kv)

    def cost(policy: str) -> float:
        return math.fsum(math.log(model.predict(machine, policy, shape).us) for shape in shapes) / len(shapes)

    ordered = [policy for policy in schedule.fitting(causal=causal) if policy not in model.UNORDERED]
    costs = {policy: cost(policy) for policy in ordered if _schedule.cta_group(policy) == 1}
    best = min(costs, key=costs.get)
    return best if costs[DEFAULT] - costs[best] > MARGIN else DEFAULT


def text(machine: model.Machine) -> str:
    rows = []
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            for queries_per_kv in QUERIES_PER_KV:
                policies = tuple(fastest(machine, head_dim, causal, length, queries_per_kv) for length in LENGTHS)
                names = ", ".join(f'"{policy}"' for policy in policies)
                rows.append(f"    ({head_dim}, {causal}, {queries_per_kv}): ({names}),")
    return HEADER.format(lengths=LENGTHS, queries_per_kv=QUERIES_PER_KV, rows="\n".join(rows))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=pathlib.Path, default=MACHINE)
    parser.add_argument("--table", type=pathlib.Path, default=TABLE, help="write it here")
    arguments = parser.parse_args(argv)
    arguments.table.write_text(text(model.read(arguments.machine)))


if __name__ == "__main__":
    main()

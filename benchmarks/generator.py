"""Measures the generator of dropout bits alone.

    python -m benchmarks.generator --json generator.json

A row has the milliseconds of a call, the elements (bits) that it generates per second and the bytes that it writes.
Elements that it skips under a causal mask count in neither.
"""

import argparse
import pathlib

import torch

from benchmarks import files, run, timing
from benchmarks.shapes import GRIDS, Shape
from dash_attn.dropout import DropoutState, dropout_bits, layout

MAPPINGS = (("bit_sliced", 7), ("bit_sliced", 10), ("flash_attention_2", 7))
REACH_BLOCKS = 8  # blocks past the diagonal that are generated because a tile of the backward may read them


def shapes() -> list[Shape]:
    """Returns the shapes of the grid `dropout` with head_dim 128; the generator does not depend on the head dim."""
    return [shape for shape in GRIDS["dropout"]() if shape.head_dim == 128 and shape.dropout_p]


def blocks_of(shape: Shape) -> int:
    """Returns the number of blocks that are generated, of 32 queries and 32 keys: those within a tile of the mask."""
    of_row = layout.num_blocks(shape.seqlen)
    reached = (min(row + 1 + REACH_BLOCKS, of_row) if shape.causal else of_row for row in range(of_row))
    return shape.batch * shape.heads * sum(reached)


def call_of(shape: Shape, mapping: str, rounds: int, device: torch.device) -> timing.Call:
    """Generates the bits into an existing tensor, as both passes of attention do. A CPU has no such op, and allocates
    the tensor."""
    state = DropoutState.of(1, 2, device)
    sizes = dict(batch=shape.batch, heads=shape.heads, seqlen_q=shape.seqlen, seqlen_k=shape.seqlen)
    if device.type != "cuda":
        return lambda: dropout_bits(state, p=shape.dropout_p, mapping=mapping, rounds=rounds, **sizes)
    bits = torch.empty(layout.shape_of(*sizes.values()), dtype=torch.uint8, device=device)
    numbers = shape.seqlen, shape.seqlen, 0, shape.heads, 0, 0, mapping == "flash_attention_2", rounds
    every_key = shape.causal, -1, -1, 0
    return lambda: torch.ops.dash_attn_C.dropout_bits(bits, state.rng_state, shape.dropout_p, *numbers, *every_key, 0)


def measure(chosen: list[Shape], device: torch.device, min_time_s: float) -> list[dict]:
    rows = []
    for shape in chosen:
        calls = {of: call_of(shape, *of, device) for of in MAPPINGS}
        timings, errors = timing.measure(calls, device=device, min_time_s=min_time_s)
        for error in errors.values():
            raise error
        for (mapping, rounds), taken in timings.items():
            blocks = blocks_of(shape)
            figures = {"elements_per_s": 1024 * blocks / taken.ms * 1e3, "gb_per_s": 128 * blocks / taken.ms * 1e-6}
            rows.append({"mapping": mapping, "rounds": rounds, **shape.row(), "ms": round(taken.ms, 5), **figures})
    return rows


def table(rows: list[dict]) -> str:
    lines = [f"{'shape':<44} {'mapping':<17} {'rounds':>6} {'ms':>9} {'1e12 elements/s':>16} {'GB/s':>8}"]
    for row in rows:
        rate = f"{row['ms']:>9.4f} {row['elements_per_s'] * 1e-12:>16.2f} {row['gb_per_s']:>8.1f}"
        lines.append(f"{Shape.of_row(row)!s:<44} {row['mapping']:<17} {row['rounds']:>6} {rate}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="file for the result")
    parser.add_argument("--min-time", type=float, default=0.15, help="seconds per call (default 0.15)")
    parser.add_argument("--max-seqlen", type=int, default=1 << 30, help="leave out longer sequences")
    parser.add_argument("--tokens", type=int, help="tokens per shape, by its number of sequences; for short tests")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    chosen = [shape for shape in shapes() if shape.seqlen <= arguments.max_seqlen]
    if not chosen:
        raise SystemExit(f"error: --max-seqlen {arguments.max_seqlen} leaves no shape of the grid dropout")
    if arguments.tokens:
        chosen = [shape.of_tokens(arguments.tokens) for shape in chosen]
    rows = measure(chosen, device, arguments.min_time)
    if arguments.json:
        arguments.json.write_text(files.dumps({"meta": run.metadata(device), "rows": rows}))
    print(table(rows))


if __name__ == "__main__":
    main()

"""A model's projection to queries, keys and values, with the bits of dropout made after it, inside it and beside it.

    python -m benchmarks.linear_bits --json linear_bits.json

The rows of a batch of sequences under the causal mask, in bf16. The variants: torch's linear layer alone and ours
alone, without bits; the generator alone; torch's and then the generator on one stream; torch's with the generator on a
stream of its own (`dropout_bits_beside`); and ours with the bits (`linear_with_dropout_bits`). Before they are timed
ours is compared with torch's, and all bits with each other. A row is a shape and a probability: milliseconds of each
variant, and the TFLOP/s of the two layers alone.
"""

import argparse
import dataclasses
import pathlib

import torch
from torch.nn import functional

from benchmarks import files, run, timing
from dash_attn.dropout import DropoutState, dropout_bits, dropout_bits_beside, linear_with_dropout_bits

PROBABILITIES = (0.125, 0.1)  # one call of Philox a word, and two
TORCH, OURS, GENERATOR = "torch", "ours", "generator"
SEQUENTIAL, BESIDE, INSIDE = "torch, then generator", "torch, generator beside", "ours, with bits"


@dataclasses.dataclass(frozen=True)
class Layer:
    model: str
    depth: int
    columns: int
    heads: int  # of queries
    batch: int = 2
    seqlen: int = 8192

    @property
    def rows(self) -> int:
        return self.batch * self.seqlen

    def of_rows(self, rows: int) -> "Layer":
        """Two sequences of so many rows together: for a short trial."""
        return dataclasses.replace(self, batch=2, seqlen=rows // 2)


LAYERS = (
    Layer("Llama-3 8B", 4096, 6144, 32),
    Layer("Llama-3 70B", 8192, 10240, 64),
    Layer("Llama-2 7B", 4096, 12288, 32),
)


def calls_of(layer: Layer, p: float, device: torch.device) -> dict[str, timing.Call]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = (layer.rows, layer.depth), (layer.columns, layer.depth)
    x, weight = (torch.randn(s, generator=generator, device=device, dtype=torch.bfloat16) for s in shapes)
    state = DropoutState.of(1, 2, device)
    sizes = dict(p=p, batch=layer.batch, heads=layer.heads, seqlen_q=layer.seqlen, seqlen_k=layer.seqlen, causal=True)
    without = dict(sizes, batch=0)

    def sequential():
        return functional.linear(x, weight), dropout_bits(state, **sizes)

    def beside():
        with dropout_bits_beside(state, **sizes) as made:
            y = functional.linear(x, weight)
        return y, made.bits

    return {
        TORCH: lambda: (functional.linear(x, weight), None),
        OURS: lambda: (linear_with_dropout_bits(x, weight, state=state, **without)[0], None),
        GENERATOR: lambda: (None, dropout_bits(state, **sizes)),
        SEQUENTIAL: sequential,
        BESIDE: beside,
        INSIDE: lambda: linear_with_dropout_bits(x, weight, state=state, **sizes),
    }


def wrong_results(calls: dict[str, timing.Call], layer: Layer) -> list[str]:
    """What differs from torch's product, or from the generator's bits where a query sees a key of the block."""
    y, bits = calls[SEQUENTIAL]()
    blocks = torch.arange(bits.bits.shape[2], device=y.device)
    seen = blocks[:, None] >= blocks
    found = []
    for name, call in calls.items():
        other_y, other_bits = call()
        if other_y is not None and not ((other_y - y).float().norm() <= 4e-3 * y.float().norm()):
            found.append(f"{layer.model}: y of '{name}' differs from torch's")
        # A head at a time: all of them take memory.
        if other_bits is not None and any(
            not torch.equal(ours[seen], true[seen])
            for ours, true in zip(other_bits.bits.flatten(0, 1), bits.bits.flatten(0, 1))
        ):
            found.append(f"{layer.model}: bits of '{name}' differ from the generator's")
    return found


def measure(layers: list[Layer], device: torch.device, min_time_s: float) -> tuple[list[dict], list[str]]:
    """A row for each layer and probability, and a line for each that failed or was wrong."""
    rows, failures = [], []
    for layer in layers:
        for p in PROBABILITIES:
            try:
                with torch.no_grad():
                    calls = calls_of(layer, p, device)
                    wrong = wrong_results(calls, layer)
                    failures += wrong
                    timings, errors = (
                        timing.measure(calls, device=device, min_time_s=min_time_s) if not wrong else ({}, {})
                    )
            except Exception as error:  # one shape that fails, for lack of memory say, leaves the others
                failures.append(f"{layer.model}, p={p}: {type(error).__name__}: {error}")
                continue
            failures += [f"{layer.model}, p={p}, {name}: {error}" for name, error in errors.items()]
            if not timings:
                continue
            operations = 2 * layer.rows * layer.depth * layer.columns
            rates = {name: operations / timings[name].ms * 1e-9 for name in (TORCH, OURS) if name in timings}
            rows.append({
                **dataclasses.asdict(layer), "rows": layer.rows, "p": p,
                "ms": {name: round(taken.ms, 5) for name, taken in timings.items()},
                "repeats_ms": {name: [round(ms, 5) for ms in taken.repeats_ms] for name, taken in timings.items()},
                "tflops": {name: round(rate, 1) for name, rate in rates.items()},
            })  # fmt: skip
    return rows, failures


def table(rows: list[dict]) -> str:
    variants = (TORCH, OURS, GENERATOR, SEQUENTIAL, BESIDE, INSIDE)
    lines = [
        "Milliseconds; TFLOP/s of the two layers alone; and how many times as fast as one after the other.",
        "",
        f"| layer | p | {' | '.join(variants)} | TFLOP/s torch | ours | beside | with bits |",
        "|---|---|" + "---|" * (len(variants) + 4),
    ]
    for row in rows:
        ms = row["ms"]
        figures = [f"{ms[name]:.4f}" if name in ms else "" for name in variants]
        figures += [f"{row['tflops'][name]:.0f}" if name in row["tflops"] else "" for name in (TORCH, OURS)]
        figures += [
            f"{ms[SEQUENTIAL] / ms[name]:.3f}" if {SEQUENTIAL, name} <= ms.keys() else "" for name in (BESIDE, INSIDE)
        ]
        shape = f"{row['model']}, {row['rows']} x {row['columns']} x {row['depth']}"
        lines.append(f"| {shape} | {row['p']} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="write the result here")
    parser.add_argument("--min-time", type=float, default=0.1, help="seconds for each call (default 0.1)")
    parser.add_argument("--models", nargs="+", choices=[layer.model for layer in LAYERS], help="default: all")
    parser.add_argument("--rows", type=int, help="of every layer, in place of 16,384: for a short trial")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    layers = [layer for layer in LAYERS if not arguments.models or layer.model in arguments.models]
    if arguments.rows:
        layers = [layer.of_rows(arguments.rows) for layer in layers]
    rows, failures = measure(layers, device, arguments.min_time)
    if arguments.json:
        arguments.json.write_text(files.dumps({"meta": run.metadata(device), "rows": rows}))
    print(table(rows))
    for line in failures:
        print(f"failed: {line}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())

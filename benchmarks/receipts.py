"""The cost of receipts: fingerprints in bytes per second, and the share of a training step, predicted and measured.

    python -m benchmarks.receipts --json receipts.json

The first table shows the op alone, on one large tensor and on the many tensors of a model. The second table shows a
training step of a small transformer with and without a `Recorder` with default settings, in alternating blocks. The
time of a step is wall-clock time between synchronizations, so it includes the host's work. `--device cpu` tests the
program on a machine without a GPU; such figures are meaningless.
"""

import argparse
import dataclasses
import math
import pathlib
import statistics
import tempfile
import time

import torch

import dash_attn
from benchmarks import run, timing
from benchmarks.files import dumps
from dash_attn.receipts import DEFAULT_BLOCK, Recorder, Shard
from dash_attn.receipts.fingerprints import sums_of_parts

# An H200: memory bandwidth in bytes per second (reads get about nine tenths), SMs, and clocks per second under load.
MEMORY, READ_SHARE, SMS, CLOCK = 4.8e12, 0.9, 132, 1.7e9
# Lanes that an SM issues, and multiplies, per clock.
ISSUED, MULTIPLIED = 128, 64
LAUNCH_US, PIECES_OF_LAUNCH = 2.0, 56


@dataclasses.dataclass(frozen=True)
class Group:
    """Instructions for 8 words in the loop of the compiled kernel (CUDA 13.0); a 64-bit product counts as two."""

    instructions: float
    products: float


# By the bytes per word.
GROUPS = {1: Group(63, 38), 2: Group(60, 38), 4: Group(61, 39)}


def predicted_rates(word_bytes: int) -> dict[str, float]:
    """Returns the bytes per second that memory, issue and multiplication each allow; the minimum is the prediction."""
    group, size = GROUPS[word_bytes], 8 * word_bytes
    return {
        "memory": MEMORY * READ_SHARE,
        "issue": SMS * CLOCK * ISSUED / group.instructions * size,
        "products": SMS * CLOCK * MULTIPLIED / group.products * size,
    }


def predicted_ms(tensors: list[torch.Tensor]) -> float:
    """Returns the predicted milliseconds of one call for all tensors."""
    seconds = sum(
        tensor.numel() * tensor.dtype.itemsize / min(predicted_rates(min(4, tensor.dtype.itemsize)).values())
        for tensor in tensors
    )
    return 1e3 * seconds + 1e-3 * LAUNCH_US * math.ceil(len(tensors) / PIECES_OF_LAUNCH)


def measure_op(device: torch.device, elements: int) -> list[dict]:
    """Returns a row per set of tensors: all elements in one tensor, or in many as in a model."""
    sets: dict[str, list[torch.Tensor]] = {}
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        bits = torch.randint(256, (elements * dtype.itemsize,), device=device, dtype=torch.uint8)
        sets[f"one tensor, {dtype}"] = [bits.view(dtype)]
    one = sets["one tensor, torch.bfloat16"][0]
    sets["one tensor, torch.bfloat16, 2 bytes off"] = [one[1:]]
    sets["300 tensors, torch.bfloat16"] = list(one[: elements // 300 // 8 * 8 * 300].view(300, -1))
    sets["300 tensors of 4096 elements, torch.bfloat16"] = list(one[: 300 * 4096].view(300, -1))

    def call(tensors):
        parts = [(tensor, Shard.whole(tensor.shape)) for tensor in tensors]
        return lambda: sums_of_parts(parts, DEFAULT_BLOCK)

    timings, errors = timing.measure({name: call(tensors) for name, tensors in sets.items()}, device=device)
    for error in errors.values():
        raise error
    return [
        {
            "tensors": name,
            "bytes": sum(tensor.numel() * tensor.dtype.itemsize for tensor in sets[name]),
            "ms": of_name.ms,
            "repeats_ms": of_name.repeats_ms,
            "predicted_ms": predicted_ms(sets[name]),
        }
        for name, of_name in timings.items()
    ]


class Block(torch.nn.Module):
    def __init__(self, width: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.norms = torch.nn.ModuleList([torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)])
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        x = x + self.out(dash_attn.flash_attn_func(q, k, v, causal=True).flatten(2))
        return x + self.down(torch.nn.functional.silu(self.up(self.norms[1](x))))


@dataclasses.dataclass(frozen=True)
class Training:
    """The shape of a step; the defaults are a model of 1.1 billion parameters and 64k tokens in microbatches."""

    layers: int = 22
    width: int = 2048
    head_dim: int = 128
    seqlen: int = 4096
    batch: int = 4
    microbatches: int = 4

    @property
    def tokens(self) -> int:
        return self.seqlen * self.batch * self.microbatches


class Trainer:
    def __init__(self, training: Training, device: torch.device):
        self.training, self.device = training, device
        with device:
            blocks = [Block(training.width, training.head_dim) for _ in range(training.layers)]
        self.model = torch.nn.Sequential(*blocks).to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.x = torch.randn(training.batch, training.seqlen, training.width, device=device, dtype=torch.bfloat16)

    def step(self) -> None:
        for _ in range(self.training.microbatches):
            self.model(self.x).float().square().mean().backward()
        self.optimizer.step()

    def recorded(self) -> list[torch.Tensor]:
        """Returns what a recorder reads in a step with default settings: weights twice, gradients and state once."""
        weights = list(self.model.parameters())
        state = [value for one in self.optimizer.state.values() for value in one.values()]
        return weights + [weight.grad for weight in weights if weight.grad is not None] + state + weights

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, recorder: Recorder | None, first: int, steps: int) -> float:
        """Returns the mean seconds per step."""
        self.synchronize()
        start = time.perf_counter()
        for number in range(first, first + steps):
            if recorder is None:
                self.step()
            else:
                with recorder.step(number, data=self.x):
                    self.step()
            self.optimizer.zero_grad()
        self.synchronize()
        return (time.perf_counter() - start) / steps


def measure_step(device: torch.device, training: Training, turns: int, steps: int) -> dict:
    """Measures a step with and without receipts, in alternating blocks of steps, after a warm-up of each.

    The hooks are installed in both cases, so their cost outside of recorded steps does not affect the comparison.
    """
    trainer = Trainer(training, device)
    plain, with_receipts = [], []
    with tempfile.TemporaryDirectory() as folder:
        with Recorder(pathlib.Path(folder), model=trainer.model, optimizer=trainer.optimizer) as recorder:
            for turn in range(turns + 1):
                plain.append(trainer.seconds(None, 0, steps))
                with_receipts.append(trainer.seconds(recorder, turn * steps, steps))
            trainer.step()
            recorded = trainer.recorded() + [trainer.x]
            predicted = predicted_ms(recorded)
            read = sum(tensor.numel() * tensor.dtype.itemsize for tensor in recorded)
    shares = [b / a - 1 for a, b in zip(plain[1:], with_receipts[1:])]
    step_ms = 1e3 * statistics.median(plain[1:])
    return {
        **dataclasses.asdict(training),
        "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
        "bytes": read,
        "step_ms": step_ms,
        "with_receipts_ms": 1e3 * statistics.median(with_receipts[1:]),
        "share": statistics.median(shares),
        "shares": shares,
        "predicted_ms": predicted,
        "predicted_share": predicted / step_ms,
    }


def table(op: list[dict], step: dict) -> str:
    """Formats both results as text, predicted next to measured."""
    lines = [f"{'fingerprints of':<46}{'MB':>9}{'ms':>9}{'predicted':>11}{'GB/s':>8}{'predicted':>11}"]
    for row in op:
        rates = (1e-6 * row["bytes"] / row[key] for key in ("ms", "predicted_ms"))
        lines.append(
            "{:<46}{:>9.1f}{:>9.3f}{:>11.3f}{:>8.0f}{:>11.0f}".format(
                row["tensors"], 1e-6 * row["bytes"], row["ms"], row["predicted_ms"], *rates
            )
        )
    tokens = step["seqlen"] * step["batch"] * step["microbatches"]
    spread = f"{100 * min(step['shares']):.2f}% to {100 * max(step['shares']):.2f}%"
    lines += [
        f"a step of {1e-6 * step['parameters']:.0f} million parameters and {tokens} tokens: {step['step_ms']:.1f} ms, "
        f"with receipts {step['with_receipts_ms']:.1f} ms",
        f"share of receipts: {100 * step['share']:.2f}% (blocks {spread}), predicted "
        f"{100 * step['predicted_share']:.2f}% ({step['predicted_ms']:.2f} ms); the target is at most 0.50%",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--elements", type=int, default=1 << 29, help="elements of the large tensor")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps per block")
    for field in dataclasses.fields(Training):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    arguments = parser.parse_args(argv)
    if arguments.elements < 300 * 4096:
        parser.error(f"--elements must be at least {300 * 4096}, got {arguments.elements}")
    training = Training(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Training)})
    before = run.state(arguments.device)
    op = measure_op(arguments.device, arguments.elements)
    step = measure_step(arguments.device, training, arguments.turns, arguments.steps)
    print(table(op, step))
    if arguments.json is not None:
        meta = {**run.metadata(arguments.device), "before": before, "after": run.state(arguments.device)}
        arguments.json.write_text(dumps({"meta": meta, "op": op, "step": step}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

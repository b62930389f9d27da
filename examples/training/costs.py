"""The cost of determinism: tokens per second of {dash_attn, the fastest non-deterministic attention} x {the rest of the
step deterministic, non-deterministic}, and with receipts; and the share of attention in a step."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
from collections.abc import Iterator

import torch
import torch.distributed as dist

from dash_attn.receipts import Recorder

from .attention import make_attention
from .clock import Clock, StepTimes
from .layout import Layout
from .model import Shape
from .text import Text
from .trainer import Trainer

OURS = "dash_attn"
_TRIALS = 5


@dataclasses.dataclass(frozen=True)
class Variant:
    attention: str
    deterministic: bool
    receipts: bool = False

    def __str__(self) -> str:
        rest = "deterministic" if self.deterministic else "non-deterministic"
        return f"{self.attention}, the rest {rest}" + (", receipts of every step" if self.receipts else "")


def variants(peer: str | None) -> list[Variant]:
    names = [OURS] if peer is None else [OURS, peer]
    crossed = [Variant(name, deterministic) for name in names for deterministic in (True, False)]
    return [*crossed, Variant(OURS, True, receipts=True)]


def _attention_seconds(name: str, shape: Shape, layout: Layout, device: torch.device) -> float:
    """Returns the seconds of one call and its backward on this rank's sequences, the best of a few."""
    attend, clock = make_attention(name), Clock(device, 0)
    counts = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    size = (len(layout.own_sequences), layout.seqlen, shape.head_dim)
    q, k, v, gradient = (torch.randn(*size[:2], n, size[2], device=device, dtype=torch.bfloat16) for n in counts)
    for trial in range(_TRIALS):
        with clock.step(trial):
            out = attend(*(x.detach().requires_grad_() for x in (q, k, v)))
            out.backward(gradient)
    return min(times.seconds for times in clock.finished(wait=True))


def fastest(peers: list[str], shape: Shape, layout: Layout, device: torch.device) -> tuple[str | None, dict[str, str]]:
    """Returns the fastest attention, the same on all ranks, and a text about each candidate."""
    seconds, said = {}, {}
    for name in peers:
        try:
            seconds[name] = _attention_seconds(name, shape, layout, device)
            said[name] = f"{1000 * seconds[name]:.3f} ms per layer"
        except (ImportError, RuntimeError) as error:
            said[name] = f"not here: {str(error).splitlines()[0]}"
    found = [min(seconds, key=lambda name: seconds[name], default=None)]
    dist.broadcast_object_list(found, src=0)
    return found[0], said


class Bench:
    """A model at one length, which runs segments of steps of one variant after the other."""

    def __init__(
        self, shape: Shape, layout: Layout, device: torch.device, text: Text, folder: pathlib.Path, seed: int = 0
    ) -> None:
        self._layout, self._device, self._text, self._seed = layout, device, text, seed
        self._folder = folder / f"receipts_{layout.seqlen}"
        self._clock = Clock(device, shape.layers)
        self._trainer = Trainer(
            shape, layout, device, attention=OURS, deterministic=True, learning_rate=3e-4, seed=seed, clock=self._clock
        )
        self._next = 0

    @contextlib.contextmanager
    def _recorder(self, variant: Variant) -> Iterator[Recorder | None]:
        if not variant.receipts:
            yield None
            return
        trainer = self._trainer
        with Recorder(self._folder, model=trainer.model, optimizer=trainer.optimizer, resume=True) as recorder:
            yield recorder

    def segment(self, variant: Variant, steps: int) -> list[StepTimes]:
        """Returns the times of `steps` steps of a variant. One more step runs first, in which memory settles."""
        self._trainer.set_attention(variant.attention)
        self._trainer.set_deterministic(variant.deterministic)
        sizes = {"sequences": self._layout.sequences, "seqlen": self._layout.seqlen}
        with self._recorder(variant) as recorder:
            for _ in range(1 + steps):
                batch = self._text.batch(self._next, seed=self._seed, **sizes)
                with self._clock.step(self._next):
                    tokens, targets = (self._layout.cut_to(self._device, x) for x in (batch[:, :-1], batch[:, 1:]))
                    with contextlib.nullcontext() if recorder is None else recorder.step(self._next, tokens):
                        self._trainer.step(tokens, targets)
                self._next += 1
            return list(self._clock.finished(wait=True))[1:]


def share_of_attention(times: StepTimes) -> float:
    ms = sum(sum(times.milliseconds["attention", of_pass]) for of_pass in ("forward", "backward"))
    return ms / 1000 / times.seconds


def measure(bench: Bench, of_variants: list[Variant], *, rounds: int, steps: int) -> Iterator[dict[Variant, list]]:
    """Yields the times of all steps so far after each round, in which the variants alternate."""
    found: dict[Variant, list[StepTimes]] = {variant: [] for variant in of_variants}
    for _ in range(rounds):
        for variant in of_variants:
            found[variant] += bench.segment(variant, steps)
        yield found


def medians(found: dict[Variant, list[StepTimes]], tokens: int) -> list[dict]:
    """Returns a row per variant, with medians of its steps."""
    rows = []
    for variant, times in found.items():
        rates = sorted(tokens / step.seconds for step in times)
        quarter = len(rates) // 4
        rows.append({
            **dataclasses.asdict(variant), "tokens_per_second": statistics.median(rates),
            "quartiles": [rates[quarter], rates[-1 - quarter]], "steps": len(rates),
            "attention_share": statistics.median(map(share_of_attention, times)),
        })  # fmt: skip
    return rows


def markdown(results: list[dict]) -> str:
    """Formats `results`, which have the rows of each length. Ratios refer to the row with nothing deterministic."""
    lines = [
        "| tokens per sequence | attention | rest of the step | tokens/s | quartiles | ratio | share of attention |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        of_crossed = [row["tokens_per_second"] for row in result["rows"] if not row["receipts"]]
        for row in result["rows"]:
            rest = "deterministic" if row["deterministic"] else "non-deterministic"
            low, high = row["quartiles"]
            ratio = row["tokens_per_second"] / of_crossed[-1]
            lines.append(
                f"| {result['seqlen']:,} | {row['attention']} | {rest}{', with receipts' if row['receipts'] else ''} | "
                f"{row['tokens_per_second']:,.0f} | {low:,.0f} to {high:,.0f} | {ratio:.3f} | "
                f"{row['attention_share']:.1%} |"
            )
    return "\n".join(lines)

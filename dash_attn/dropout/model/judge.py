"""Compares predictions with measurements, for the rows of blocks in a result of `benchmarks.dropout_model`.

For each row the model is given the time of each GEMM alone, and of attention alone without dropout, ours and the
baseline's. With constants from other measurements (fit.py) it predicts the generator, attention with bits, the whole
block in sequence and overlapped, and the baseline's attention with dropout.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .fit import Fitted, Result
from .formulas import (
    BLOCKS,
    LENGTHS,
    MACHINES,
    Parts,
    Settings,
    Times,
    combined,
    generator_time,
    inside_time,
    times,
    use_time,
)

WITHIN = 0.10
"""The tolerated relative error."""
BESIDE = {"forward": "qkv", "backward": "out"}
"""The GEMM next to which the generator runs."""


@dataclasses.dataclass(frozen=True)
class Judged:
    """One time, in milliseconds. `measured_as` names the block with the same measurement, if that is another one."""

    block: str
    seqlen: int
    pass_: str
    of: str
    predicted: float
    measured: float
    measured_as: str | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_within(self) -> bool:
        return abs(self.error) <= WITHIN

    def __str__(self) -> str:
        return (
            f"{self.predicted:.3g} / {self.measured:.3g} ({self.error:+.1%}{'' if self.is_within else ', NOT within'})"
        )


def parts_of(row: Result, fitted: Fitted, settings: Settings) -> Parts:
    """Returns the times of the row's parts alone, in seconds: GEMMs and attention as measured, the others predicted."""
    machine, backward = fitted.machine, row["pass"] == "backward"
    return Parts(
        gemms=1e-3 * sum(row["gemm_ms"].values()),
        beside=1e-3 * row["gemm_ms"][BESIDE[row["pass"]]],
        attention=1e-3 * row["attention_ms"],
        use=use_time(row["pairs"], machine, settings, backward=backward),
        generator=generator_time(row["elements"], machine, settings),
        inside=inside_time(row["pairs"], machine, settings, backward=backward),
        calls=row["calls"],
    )


def combinations(row: Result, fitted: Fitted) -> Times | None:
    """Predicts the row's block in the three ways; None if a measurement that it needs is missing."""
    needed = (*BESIDE.values(), "up", "down")
    if not row.get("attention_ms") or any(name not in row.get("gemm_ms", {}) for name in needed):
        return None
    return combined(parts_of(row, fitted, fitted.settings), fitted.settings)


def judged(row: Result, fitted: Fitted) -> Iterator[Judged]:
    """Yields every time of the row that was both measured and predicted."""
    backward = row["pass"] == "backward"
    planes = fitted.settings.planes
    predicted: dict[str, tuple[float | None, float | None]] = {}
    for rounds, ms in row.get("generator_ms", {}).items():
        seconds = generator_time(row["elements"], fitted.machine, fitted.settings_of(int(rounds), planes))
        predicted[f"generator, {rounds} rounds"] = 1e3 * seconds, ms
    arguments = row["pairs"], fitted.machine, fitted.settings
    if row.get("attention_ms"):
        bits = row["attention_ms"] + 1e3 * use_time(*arguments, backward=backward)
        predicted["attention with bits"] = bits, row.get("attention_bits_ms")
    if whole := combinations(row, fitted):
        predicted["sequential"] = 1e3 * whole.sequential, row.get("sequential_ms")
        predicted["overlapped"] = 1e3 * whole.overlapped, row.get("overlapped_ms")
    if row.get("fa2_ms"):
        fused = row["fa2_ms"] + 1e3 * inside_time(*arguments, backward=backward)
        predicted["FlashAttention-2 with dropout"] = fused, row.get("fa2_dropout_ms")
    for of, (said, measured) in predicted.items():
        if said is not None and measured:
            yield Judged(row["block"], row["seqlen"], row["pass"], of, said, measured, row.get("measured_as"))


def every(result: Result, fitted: Fitted) -> list[Judged]:
    return [one for row in result.get("rows", ()) for one in judged(row, fitted)]


def verdict(found: Sequence[Judged]) -> str:
    """Counts the predictions within WITHIN, and lists the others. A measurement shared by several blocks counts
    once."""
    copies = {_shown(one.block, one.measured_as) for one in found if one.measured_as}
    found = [one for one in found if one.measured_as is None]
    if not found:
        return "No time of a block was both measured and predicted."
    missed = [one for one in found if not one.is_within]
    errors = [abs(one.error) for one in found]
    said = f"{len(found) - len(missed)} of {len(found)} predictions are within {WITHIN:.0%} of the measurement; "
    said += f"the median error is {statistics.median(errors):.1%}, the largest {max(errors):.1%}."
    columns = dict.fromkeys(one.of for one in found)
    counts = {of: [one.is_within for one in found if one.of == of] for of in columns}
    said += f" By time: {', '.join(f'{of} {sum(within)} of {len(within)}' for of, within in counts.items())}."
    if copies:
        said += f" Not counted: {', '.join(sorted(copies))}."
    if missed:
        said += " Not within: " + "; ".join(
            f"{one.of} of {one.block}, {one.seqlen}, {one.pass_} ({one.error:+.0%})" for one in missed
        )
        said += "."
    return said


def _shown(block: str, measured_as: str | None) -> str:
    return f"{block} (as {measured_as})" if measured_as else block


def table(found: Sequence[Judged]) -> str:
    """Formats a Markdown table with a row per block, length and pass: predicted / measured milliseconds and the
    error."""
    columns = list(dict.fromkeys(one.of for one in found))
    lines: dict[tuple[str, int, str], dict[str, str]] = {}
    for one in found:
        lines.setdefault((_shown(one.block, one.measured_as), one.seqlen, one.pass_), {})[one.of] = str(one)
    text = ["| block | seqlen | pass | " + " | ".join(columns) + " |", "|---" * (3 + len(columns)) + "|"]
    for (block, seqlen, pass_), cells in lines.items():
        text.append(f"| {block} | {seqlen} | {pass_} | " + " | ".join(cells.get(of, "-") for of in columns) + " |")
    return "\n".join(text)


def gains(result: Result, fitted: Fitted) -> list[dict[str, Any]]:
    """Returns the gain of each way, as ratios: `sequential` over `overlapped`, and attention with dropout over
    attention without, ours with bits and the baseline's."""
    found = []
    for row in result.get("rows", ()):
        gain = {name: row[name] for name in ("seqlen", "pass")}
        gain["block"] = _shown(row["block"], row.get("measured_as"))
        sequential, overlapped = row.get("sequential_ms"), row.get("overlapped_ms")
        if sequential and overlapped:
            gain["measured"] = sequential / overlapped
        if whole := combinations(row, fitted):
            gain["predicted"] = whole.sequential / whole.overlapped
        for name, dropped, plain in (
            ("bits", "attention_bits_ms", "attention_ms"),
            ("theirs", "fa2_dropout_ms", "fa2_ms"),
        ):
            if row.get(dropped) and row.get(plain):
                gain[name] = row[dropped] / row[plain]
        if sequential and row.get("gemm_ms") and row.get("generator_ms", {}).get("7"):
            gain["share"] = row["generator_ms"]["7"] / row["gemm_ms"].get(BESIDE[row["pass"]], float("inf"))
        found.append(gain)
    return found


def gains_verdict(found: Sequence[Mapping[str, Any]]) -> str:
    """Describes how far the predicted gain of overlapping is from the measured one, to which the given GEMMs add
    none."""
    both = [gain for gain in found if {"measured", "predicted"} <= gain.keys()]
    if not both:
        return "No gain of overlapping was both measured and predicted."
    worst = max(both, key=lambda gain: abs(gain["predicted"] - gain["measured"]))
    measured = [gain["measured"] for gain in both]
    return (
        f"The measured gain of overlapping on two streams over running in sequence is {min(measured):.3f} to "
        f"{max(measured):.3f}. The prediction is furthest off for {worst['block']}, {worst['seqlen']}, "
        f"{worst['pass']}: {worst['predicted']:.3f} instead of {worst['measured']:.3f}."
    )


def gains_table(found: Sequence[Mapping[str, Any]]) -> str:
    heads = {
        "share": "generator / concurrent GEMM",
        "measured": "sequential / overlapped, measured",
        "predicted": "predicted",
        "bits": "our attention: with bits / without",
        "theirs": "FlashAttention-2 in torch: with dropout / without",
    }
    shown = {name: head for name, head in heads.items() if any(name in gain for gain in found)}
    text = ["| block | seqlen | pass | " + " | ".join(shown.values()) + " |", "|---" * (3 + len(shown)) + "|"]
    for gain in found:
        cells = [f"{gain[name]:.3f}" if name in gain else "-" for name in shown]
        text.append(f"| {gain['block']} | {gain['seqlen']} | {gain['pass']} | {' | '.join(cells)} |")
    return "\n".join(text)


def elsewhere(fitted: Fitted, *, tokens: int = 16384, seqlens: Iterable[int] = LENGTHS) -> str:
    """Formats predictions for other machines, and for GEMMs twice as fast: the minimum and maximum ratios of a forward
    over the blocks. None of them was measured."""
    machines = {fitted.machine.name: fitted.machine}
    machines |= {name: fitted.on(name) for name in MACHINES if name != fitted.machine.name}
    gemms = fitted.machine.gemm_tflops
    doubled = dataclasses.replace(gemms, value=2 * gemms.value)
    machines[f"{fitted.machine.name}, GEMMs twice as fast"] = dataclasses.replace(fitted.machine, gemm_tflops=doubled)
    text = ["| predicted for | seqlen | sequential / overlapped | fused / overlapped |", "|---|---|---|---|"]
    for name, machine in machines.items():
        for seqlen in seqlens:
            whole = max(tokens // seqlen, 1) * seqlen
            ratios = []
            for block in BLOCKS.values():
                t = times(block, seqlen, machine, fitted.settings, tokens=whole, causal=True, backward=False)
                ratios.append((t.sequential / t.overlapped, t.fused / t.overlapped))
            cells = [f"{min(column):.3f} to {max(column):.3f}" for column in zip(*ratios)]
            text.append(f"| {name} | {seqlen} | {' | '.join(cells)} |")
    return "\n".join(text)

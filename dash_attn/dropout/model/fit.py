"""Fits the model's constants to the microbenchmarks of `benchmarks.dropout_model`.

The fit never uses the rows of blocks by which the model is judged (judge.py). All functions are pure.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .formulas import (
    DATA_SHEET,
    MACHINES,
    PEAK_TFLOPS,
    UNMEASURED,
    Figure,
    Machine,
    Settings,
    fused_rate,
    generator_rate,
    together,
    use_time,
)

Result = Mapping[str, Any]
"""A file of `benchmarks.dropout_model`: `meta`, and lists of rows."""


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The measured machine, and the other inputs of the model."""

    machine: Machine
    settings: Settings
    efficiencies: Mapping[tuple[int, int], Figure]
    """The efficiency of the generator, by rounds and planes."""

    def settings_of(self, rounds: int, planes: int) -> Settings:
        """Returns the settings for a generator. Without a measurement for these rounds and planes, the median of the
        others is used."""
        known = self.efficiencies.get((rounds, planes))
        if known is None and self.efficiencies:
            middle = statistics.median(figure.value for figure in self.efficiencies.values())
            known = Figure(middle, f"{UNMEASURED}: the median of other rounds and planes")
        changes: dict[str, Any] = {} if known is None else {"generator_efficiency": known}
        return dataclasses.replace(self.settings, rounds=rounds, planes=planes, **changes)

    def on(self, name: str) -> Machine:
        """Returns another machine of MACHINES: its own SMs, clock and peak, with the measured machine's rates for
        each."""
        other, source = MACHINES[name], f"{UNMEASURED}: as on the {self.machine.name}"
        peaks = PEAK_TFLOPS[name] / PEAK_TFLOPS.get(self.machine.name, PEAK_TFLOPS["h200"])
        lanes: dict[str, Any] = {
            field: Figure(getattr(self.machine, field).value, source)
            for field in ("imad_wide_lanes", "logic_lanes", "issue_lanes")
        }
        gemms = Figure(
            float(f"{self.machine.gemm_tflops.value * peaks:.4g}"), f"{UNMEASURED}: the same share of the peak"
        )
        return dataclasses.replace(other, gemm_tflops=gemms, **lanes)


def line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Returns (start, slope) of y = start + slope x with the least sum of squares of relative errors.

    Raises:
        ValueError: the points have fewer than two different x, or a y that is not above 0.
    """
    points = list(points)
    if len({x for x, _ in points}) < 2 or min(y for _, y in points) <= 0:
        raise ValueError(f"points must have at least two different x and every y above 0, got {points}")
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points)) / spread
    return mean_y - slope * mean_x, slope


def proportion(points: Iterable[tuple[float, float, float]]) -> float:
    """Returns the s for which s x explains y best, for (x, y, the value to which an error of y is relative)."""
    points = list(points)
    return sum(x * y / w**2 for x, y, w in points) / sum(x * x / w**2 for x, _, w in points)


def interference(pairs: Sequence[tuple[float, float, float]], fork: float = 0.0) -> tuple[float, float]:
    """Returns the (a, b) with which `together` best predicts the time of a GEMM and a generator that run at once.

    Args:
        pairs: seconds of (the GEMM alone, the generator alone, both at once).
        fork: additional seconds of two streams.

    Returns:
        Shares, to about 0.001. A pair that runs one after the other, or takes even longer, gives a and b of about 1,
        because no a and b predict more.
    """

    # The delay of the longer one, as a share of the other's time: x of the generator's if the GEMM is longer, and y of
    # the GEMM's if the generator is. The squared error has one valley in x and y, and a curved one in a and b.
    def error(x: float, y: float) -> float:
        a, b = _slowdowns(x, y)
        return sum(((together(t, r, a, b) + fork) / both - 1) ** 2 for t, r, both in pairs)

    step = 0.125
    best = min(((i * step, j * step) for i in range(8) for j in range(8)), key=lambda at: error(*at))
    while step > 1e-4:
        near = [(best[0] + i * step, best[1] + j * step) for i in range(-2, 3) for j in range(-2, 3)]
        better = min((at for at in near if 0 <= min(at) and max(at) <= _SERIAL), key=lambda at: error(*at))
        step, best = (step, better) if error(*better) < error(*best) else (step / 2, best)
    return _slowdowns(*best)


_SERIAL = 0.999


def _slowdowns(x: float, y: float) -> tuple[float, float]:
    """Returns (a, b) for x = a (1 + b) / (1 + a) and y = b (1 + a) / (1 + b), both below 1."""
    ratio = (1 - x) / (1 - y)  # (1 + b) / (1 + a)
    return x / ratio, y * ratio


def planes_of(p: float) -> int:
    """Returns the number of binary digits of p's threshold, which are generated in calls of 4."""
    from ..bits import keep_probability

    return 4 if round(256 * keep_probability(p)) % 16 == 0 else 8


def fitted(result: Result, name: str) -> Fitted:
    """Returns the constants of a result.

    Args:
        result: the result of `benchmarks.dropout_model`. Constants of missing parts keep their defaults and labels.
        name: the name of the file, for the sources.
    """
    source = f"measured: {name}"
    machine = _machine(result, source)
    settings = Settings(planes=planes_of(result["meta"]["p"]))
    generators = _by(result.get("generator", ()), lambda row: (row["rounds"], row["planes"]))
    starts, efficiencies = [], {}
    for (rounds, planes), rows in generators.items():
        if len({row["elements"] for row in rows}) < 2:
            continue
        start, slope = line((row["elements"], 1e-3 * row["ms"]) for row in rows)
        ideal = dataclasses.replace(settings, rounds=rounds, planes=planes, generator_efficiency=Figure(1.0, ""))
        efficiency = 1 / slope / generator_rate(machine, ideal)
        efficiencies[rounds, planes] = Figure(efficiency, f"{source}: over sizes, {rounds} rounds, {planes} planes")
        starts.append(1e6 * start)
    changes: dict[str, Any] = {}
    if starts:
        changes["generator_start_us"] = Figure(statistics.median(starts), f"{source}: over sizes")
    for row in result.get("overheads", ()):
        # A negative value is the noise of a difference of two times.
        told = row["how"] + (f", {row['us']}, set to 0" if row["us"] < 0 else "")
        changes[f"{row['of']}_us"] = Figure(max(0.0, row["us"]), f"{source}: {told}")
    fork = 1e-6 * changes.get("fork_us", settings.fork_us).value
    # An older result also has pairs of another kind than two streams.
    pairs = [
        (1e-3 * row["gemm_ms"], 1e-3 * row["generator_ms"], 1e-3 * row["both_ms"])
        for row in result.get("pairs", ())
        if row["where"] == "streams"
    ]
    if pairs:
        a, b = interference(pairs, fork)
        told = f"{source}: {len(pairs)} pairs on two streams"
        changes |= {"gemm_slowdown": Figure(round(a, 3), told), "generator_slowdown": Figure(round(b, 3), told)}
    settings = dataclasses.replace(settings, **changes)
    for rows, backward in ((_of_pass(result, "forward"), False), (_of_pass(result, "backward"), True)):
        settings = dataclasses.replace(settings, **_of_attention(rows, machine, settings, source, backward))
    known = Fitted(machine, settings, efficiencies)
    return dataclasses.replace(known, settings=known.settings_of(settings.rounds, settings.planes))


def _machine(result: Result, source: str) -> Machine:
    meta = result["meta"]
    gpu = (meta.get("gpu") or "CPU, meaningless").lower()
    name = next((name for name in MACHINES if name in gpu), gpu)
    known = MACHINES.get(name, MACHINES["h200"])
    changes: dict[str, Any] = {"name": name}
    if meta.get("sms"):
        changes["sms"] = Figure(meta["sms"], DATA_SHEET)
    gemms = result.get("gemm", ())
    if gemms:
        flops, ms = sum(row["flops"] for row in gemms), sum(row["ms"] for row in gemms)
        changes["gemm_tflops"] = Figure(float(f"{1e-9 * flops / ms:.4g}"), f"{source}: {len(gemms)} GEMMs together")
        clocks = [row["mhz"] for row in gemms if row.get("mhz")]
        if clocks:
            changes["clock_ghz"] = Figure(round(1e-3 * statistics.median(clocks), 3), f"{source}: during GEMMs")
    fields = {"imad.wide": "imad_wide_lanes", "lop3": "logic_lanes"}
    for row in result.get("instructions", ()):
        if row["instruction"] in fields:
            lanes = round(row["lanes"], 1)
            changes[fields[row["instruction"]]] = Figure(lanes, f"{source}: {row['instruction']} alone")
    return dataclasses.replace(known, **changes)


def _of_pass(result: Result, pass_: str) -> list[Result]:
    return [row for row in result.get("attention", ()) if row["pass"] == pass_]


def _of_attention(
    rows: Sequence[Result], machine: Machine, settings: Settings, source: str, backward: bool
) -> dict[str, Any]:
    """Returns the cost of using stored bits, and of generating random numbers inside a baseline."""
    found: dict[str, Any] = {}
    ours = [row for row in rows if row.get("plain_ms") and row.get("bits_ms")]
    if ours:
        field = "backward_use" if backward else "forward_use"
        changes: dict[str, Any] = {"exposed_use": Figure(1.0, ""), field: Figure(1.0, "")}
        one = dataclasses.replace(settings, **changes)
        instructions = proportion(
            (use_time(row["pairs"], machine, one, backward=backward), 1e-3 * (row["bits_ms"] - row["plain_ms"]),
             1e-3 * row["plain_ms"]) for row in ours
        )  # fmt: skip
        found[field] = Figure(round(instructions, 3), f"{source}: exposed instructions per element, {len(ours)} shapes")
        found["exposed_use"] = Figure(1.0, f"{source}: the instructions are the exposed ones")
    theirs = [row for row in rows if row.get("fa2_ms") and row.get("fa2_dropout_ms")]
    if theirs:
        field = "hidden_in_backward" if backward else "hidden_in_attention"
        exposed = proportion(
            (row["pairs"] / fused_rate(machine, settings), 1e-3 * (row["fa2_dropout_ms"] - row["fa2_ms"]),
             1e-3 * row["fa2_ms"]) for row in theirs
        )  # fmt: skip
        what = "f of torch's FlashAttention-2; below 0: slower than counted"
        found[field] = Figure(round(1 - exposed, 3), f"{source}: {what}, {len(theirs)} shapes")
    return found


def _by(rows: Iterable[Result], key: Callable[[Result], tuple[int, int]]) -> dict[tuple[int, int], list[Result]]:
    groups: dict[tuple[int, int], list[Result]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups

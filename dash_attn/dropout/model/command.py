"""The command: `python -m dash_attn.dropout.model`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from . import fit, judge, picture
from .formulas import (
    BLOCKS,
    LENGTHS,
    MACHINES,
    UNMEASURED,
    Figure,
    Machine,
    Row,
    Settings,
    constants,
    generator_rate,
    rows,
)

PACKAGED = pathlib.Path(__file__).with_name("h200.json")
"""The result of `benchmarks.dropout_model` that the package contains, if any."""


def table(made: Sequence[Row]) -> str:
    """Formats milliseconds of the forward, and ratios, as a Markdown table."""
    text = [
        "| block | seqlen | GEMMs, ms | attention | generator | fused | sequential | overlapped "
        "| seq. / overlapped | fused / overlapped | both passes: seq. | fused |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in made:
        t, both = row.forward, row.both
        numbers = [f"{1e3 * x:.2f}" for x in dataclasses.astuple(t)]
        ratios = [t.sequential / t.overlapped, t.fused / t.overlapped]
        ratios += [both.sequential / both.overlapped, both.fused / both.overlapped]
        numbers += [f"{ratio:.3f}" for ratio in ratios]
        text.append(f"| {row.block.name} | {row.seqlen} | {' | '.join(numbers)} |")
    return "\n".join(text)


def read(path: pathlib.Path) -> dict[str, Any]:
    """Reads a result of `benchmarks.dropout_model`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not such a result.
    """
    try:
        result = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"measured must be a JSON file of benchmarks.dropout_model, got {path}: {error}") from None
    meta = result.get("meta") if isinstance(result, dict) else None
    if not isinstance(meta, dict) or "p" not in meta:
        raise ValueError(f"measured must be a result of benchmarks.dropout_model, got {path}, whose meta has no p")
    return result


def title(result: Mapping[str, Any]) -> str:
    """Returns the title of a picture of the result."""
    return f"{result['meta'].get('gpu')}, commit {str(result['meta'].get('commit'))[:12]}: predicted / measured"


def report(result: Mapping[str, Any], fitted: fit.Fitted) -> str:
    """Formats predictions next to measurements, the gains, the constants, and predictions for other machines."""
    meta = result["meta"]
    found, gains = judge.every(result, fitted), judge.gains(result, fitted)
    parts = [
        f"Measured: {meta.get('gpu')}, CUDA {meta.get('cuda')}, torch {meta.get('torch')}, "
        f"commit {meta.get('commit')}, p = {meta['p']}, causal. The cells are predicted / measured milliseconds. The "
        "model is given the measured time of each GEMM of a block, and of attention without dropout:",
        judge.table(found),
        judge.verdict(found),
        "The gains, as ratios of measured times:",
        judge.gains_table(gains),
        judge.gains_verdict(gains),
        "The constants:",
        constants_table(fitted.machine, fitted.settings),
        "Predictions for other machines, which were not measured, as a range over the blocks' forwards. Other machines "
        "have their own SMs, clock and peak, and the measured machine's rates per SM, clock and peak:",
        judge.elsewhere(fitted),
    ]
    if left := meta.get("left_out"):
        parts.append(f"Not measured: {'; '.join(left)}.")
    return "\n\n".join(parts)


def constants_table(machine: Machine, settings: Settings) -> str:
    lines = (f"| {' | '.join(line)} |" for line in constants(machine, settings))
    return "\n".join(["| constant | value | source |", "|---|---|---|", *lines])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dash_attn.dropout.model",
        description="Predicts the time of a transformer block with attention's dropout fused, sequential and overlapped"
        " with the GEMM before attention. Needs no GPU. Constants that were not measured are marked as such.",
    )
    parser.add_argument(
        "--measured",
        metavar="FILE",
        help="a result of benchmarks.dropout_model: constants are fitted to its microbenchmarks, and predictions are "
        "compared with its blocks (default: the result that the package contains, if any)",
    )
    parser.add_argument("--gpu", choices=sorted(MACHINES), help="machine (default: the measured one, or h200)")
    parser.add_argument(
        "--blocks",
        nargs="+",
        choices=list(BLOCKS),
        default=list(BLOCKS),
        metavar="NAME",
        help=f"shapes (default: all of {', '.join(BLOCKS)})",
    )
    parser.add_argument(
        "--seqlens",
        nargs="+",
        type=int,
        default=list(LENGTHS),
        metavar="N",
        help=f"sequence lengths (default {' '.join(map(str, LENGTHS))})",
    )
    parser.add_argument(
        "--tokens", type=int, default=16384, metavar="N", help="tokens per batch; at least one sequence (default 16384)"
    )
    parser.add_argument("--mask", choices=["causal", "full"], default="causal", help="mask (default causal)")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of Philox (default 7)")
    parser.add_argument("--planes", type=int, choices=[4, 8], help="4 if 16 p is whole (default: as measured, or 8)")
    for field in dataclasses.fields(Settings):
        value = getattr(Settings(), field.name)
        if isinstance(value, Figure):
            told = f"{value.source.removeprefix(UNMEASURED + ': ')} (default: as measured, or {value.value:g})"
            parser.add_argument(_option(field.name), type=float, metavar="X", help=told)
    for name in _OF_MACHINE:
        parser.add_argument(_option(name), type=float, metavar="X", help="property of the machine (default: its own)")
    parser.add_argument(
        "--png",
        metavar="PATH",
        help="draw predicted over measured times, or the ratios without measurements; needs matplotlib",
    )
    return parser


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


_Owner = TypeVar("_Owner", Machine, Settings)
_OF_MACHINE = ("sms", "clock_ghz", "gemm_tflops", "imad_wide_lanes")
_SHARES = ("hidden_in_attention", "hidden_in_backward", "exposed_use", "generator_efficiency")


def _check(arguments: argparse.Namespace) -> None:
    """Raises a ValueError if a number is out of range."""
    for name, value in (*(("seqlens", n) for n in arguments.seqlens), *vars(arguments).items()):
        if name in ("tokens", "rounds", "seqlens") and isinstance(value, int) and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
        if name in _SHARES and value is not None and value > 1:
            raise ValueError(f"{name} must be at most 1, got {value}")
        may_be_zero = name not in (*_OF_MACHINE, "generator_efficiency")
        if isinstance(value, float) and not (0 <= value < float("inf") and (value > 0 or may_be_zero)):
            raise ValueError(
                f"{name} must be a finite number {'of at least' if may_be_zero else 'above'} 0, got {value}"
            )


def _given(arguments: argparse.Namespace, fitted: fit.Fitted | None) -> tuple[Machine, Settings]:
    """Returns the measured or default values, overridden by the command line."""
    if fitted is None:
        machine, settings = MACHINES[arguments.gpu or "h200"], Settings()
    else:
        is_measured = arguments.gpu in (None, fitted.machine.name)
        machine = fitted.machine if is_measured else fitted.on(arguments.gpu)
        settings = fitted.settings
    rounds, planes = arguments.rounds or settings.rounds, arguments.planes or settings.planes
    if fitted is not None:
        settings = fitted.settings_of(rounds, planes)
    settings = dataclasses.replace(settings, rounds=rounds, planes=planes)
    return _changed(machine, arguments), _changed(settings, arguments)


def _changed(owner: _Owner, arguments: argparse.Namespace) -> _Owner:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(owner):
        value, own = getattr(arguments, field.name, None), getattr(owner, field.name)
        if isinstance(own, Figure) and value is not None:
            changes[field.name] = Figure(value, "given")
    return dataclasses.replace(owner, **changes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables and the constants, and draws the requested picture."""
    given = _parser().parse_args(arguments)
    try:
        _check(given)
        path = pathlib.Path(given.measured) if given.measured else PACKAGED if PACKAGED.is_file() else None
        result = read(path) if path else None
        fitted = fit.fitted(result, path.name) if path and result else None
        machine, settings = _given(given, fitted)
        blocks = [BLOCKS[name] for name in given.blocks]
        made = rows(blocks, given.seqlens, machine, settings, tokens=given.tokens, causal=given.mask == "causal")
        found = judge.every(result, fitted) if result and fitted else []
        if given.png and found:
            assert result is not None
            picture.draw_judged(given.png, found, title(result))
        elif given.png:
            picture.draw(given.png, made)
    except (ValueError, KeyError, ImportError, OSError) as error:
        sys.exit(f"dash_attn.dropout.model: {error}")
    print(
        f"Predicted, {machine.name}, {given.mask} mask, {settings.rounds} rounds, {settings.planes} planes; the ",
        end="",
    )
    print(f"generator alone makes {generator_rate(machine, settings) / 1e12:.1f}e12 bits/s.\n\n{table(made)}\n")
    if result and fitted:
        print(report(result, fitted) + "\n")
    if fitted is None or (machine, settings) != (fitted.machine, fitted.settings):
        print(constants_table(machine, settings))

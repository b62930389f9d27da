"""Compares receipts of training runs: ``python -m dash_attn.receipts --help``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import sys
import time
from collections.abc import Iterator

from . import elements, picture
from .comparison import CODE, Comparison, Difference, compare
from .pairs import Progress
from .text import printable


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dash_attn.receipts",
        description="Compares receipts of training runs. Exit status: 0 if the runs agree, 1 if they differ, 2 if they "
        "cannot be compared, 3 if everything that was compared agrees but something was not compared.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    two_runs = commands.add_parser("compare", help="find the first step, tensor and block in which two runs differ")
    two_runs.add_argument("a", help="folder with the receipts of the first run")
    two_runs.add_argument("b", help="folder with the receipts of the second run")
    two_runs.add_argument("--json", action="store_true", help="print the result as JSON")
    two_runs.add_argument("--png", metavar="PATH", help="draw the differences of all steps; needs matplotlib")
    two_replays = commands.add_parser("elements", help="list the elements of a block that differ between two replays")
    two_replays.add_argument("a", help="folder that the replay of the first run wrote")
    two_replays.add_argument("b", help="folder that the replay of the second run wrote")
    return parser


def _coordinates(index: int, shape: tuple[int, ...]) -> list[int]:
    place = []
    for length in reversed(shape):
        index, coordinate = divmod(index, length)
        place.append(coordinate)
    return place[::-1]


def _where(first: Difference) -> list[str]:
    if first.blocks is None:
        return ["the run did not keep the block sums of this step; the replay keeps them"]
    some = ", ".join(map(str, first.blocks[:8])) + (", ..." if len(first.blocks) > 8 else "")
    lines = [f"{len(first.blocks)} of its {first.block_count} blocks: {some}"]
    if first.elements is not None:
        begin, end = first.elements
        lines.append(
            f"block {first.blocks[0]}: elements {begin} to {end - 1} of the shape {list(first.shape)}, "
            f"from {_coordinates(begin, first.shape)} to {_coordinates(end - 1, first.shape)}"
        )
    return lines


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Progress | None]:
    """Shows the progress on a terminal a few times a second."""
    if not sys.stderr.isatty():
        yield None
        return
    shown = time.monotonic()

    def show(done: int, of: int) -> None:
        nonlocal shown
        if (now := time.monotonic()) - shown > 0.2:
            shown = now
            print(f"\r{what}: {done} of {of} steps", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _text(found: Comparison) -> list[str]:
    span = f"{found.steps[0]}" if len(found.steps) == 1 else f"{found.steps[0]} to {found.steps[-1]}"
    facts = {name: " and ".join(value or "not recorded" for value in two) for name, two in found.facts.items()}
    lines = []
    if code := [f"{name} {facts[name]}" for name in CODE if name in facts]:
        lines.append(f"the runs used different code of dash_attn: {'; '.join(code)}")
        if "bits version" in facts:
            lines.append("  a new bits version changes results on purpose: docs/contract.md lists what changed")
    lines.append(f"compared {found.compared} records of {len(found.steps)} steps ({span})")
    lines += [f"  not compared: {what}: {why}" for why, what in found.not_compared.items()]
    lines += [f"  the runs differ in {name}: {two}" for name, two in facts.items() if name not in CODE]
    first = found.first
    if first is None:
        same = "the runs agree: no record differs"
        return [*lines, "no record that was compared differs" if found.not_compared else same]
    lines += [f"the runs first differ in step {first.step}", f"  first: {first.key}", f"  what differs: {first.what}"]
    lines += [f"  {line}" for line in _where(first)]
    if first.ranks:
        lines.append(f"  on ranks: {', '.join(map(str, first.ranks))}")
    if first.after is not None:
        lines.append(f"  the last record before it agrees: {first.after}")
    lines += [f"  likely cause: {first.cause}", f"    {first.reason}", "  differing records of this step:"]
    lines += [f"    {kind:<20}{differ} of {of}" for kind, (differ, of) in first.differing.items()]
    lines += ["  to replay the step in run a and in run b:", *(f"    {command}" for command in first.replay)]
    lines.append("  a replay that differs from its own run points to a hardware fault or a race; if both replays")
    lines.append("  repeat their runs, `python -m dash_attn.receipts elements` on their folders lists the elements")
    return lines


def _print(lines: list[str]) -> None:
    # Names come from the trainer, and a receipt may come from an untrusted source.
    print("\n".join(map(printable, lines)), flush=True)


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "elements":
            differing, lines = elements.compare(arguments.a, arguments.b)
            _print(lines)
            return 1 if differing else 0
        with _progress("comparing") as progress:
            found = compare(arguments.a, arguments.b, progress=progress)
        if arguments.json:
            print(json.dumps(dataclasses.asdict(found), indent=2), flush=True)
        else:
            _print(_text(found))
        if arguments.png is not None:
            with _progress("drawing") as progress:
                picture.draw(arguments.a, arguments.b, arguments.png, progress=progress)
            print(f"wrote {printable(arguments.png)}", file=sys.stderr)
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    if found.first is not None:
        return 1
    return 3 if found.not_compared else 0


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal cannot encode must not raise an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())

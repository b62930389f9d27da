"""Measures our backward and forward next to the installed baselines, and prints a table.

    python -m benchmarks.run --grid full --json result.json --png result.png
    python -m benchmarks.run --grid full --peers --pass backward forward --baseline older/_C.abi3.so --json result.json
    python -m benchmarks.run --grid sharded --pass backward forward --schedules auto order_free --json sharded.json
    python -m benchmarks.run --merge part1.json part2.json --json sharded.json

Results are compared with a float32 reference before they are timed. Wrong results are reported and left out.
"""

import argparse
import datetime
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

import torch

from benchmarks import baseline as baseline_library
from benchmarks import budget, check, compare, files, host, library, peers, plot, sharded, timing
from benchmarks.shapes import GRIDS, PASSES, SHAPE_FIELDS, Shape, flops

ROW_FIELDS = ("impl", "pass", "schedule", "deterministic", *SHAPE_FIELDS, "ms", "repeats_ms", "tflops")
MIN_TIME_S = 0.15  # per variant
COMMIT_VARIABLE = "DASH_ATTN_COMMIT"
# The files that affect the result of a run. Results that a run writes do not make the tree dirty.
MEASURED = ("csrc", "dash_attn", "build_support", "setup.py", "pyproject.toml", "benchmarks/*.py")
STATE = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "watts": "power.draw", "celsius": "temperature.gpu"}


def commit() -> str:
    """Returns the measured commit: of the working tree, with "-dirty" if relevant files differ from it, or from the
    environment if the tree has no history."""
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    git = ["git", "-C", str(pathlib.Path(__file__).parents[1])]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = [*git, "status", "--porcelain", "--", *MEASURED]
        changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("-dirty" if changed else "")


def nvidia_smi(device: torch.device, fields: list[str]) -> list[str] | None:
    """Returns the values of `nvidia-smi --query-gpu` for the device, without units; None if nvidia-smi fails."""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    query = ["nvidia-smi", f"--id=GPU-{gpu.removeprefix('GPU-')}", f"--query-gpu={','.join(fields)}"]
    try:
        found = subprocess.run([*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [value.strip() for value in found.stdout.strip().split(",")]


def state(device: torch.device) -> dict[str, str] | None:
    """Returns the current clocks in MHz, power in watts and temperature in degrees Celsius."""
    values = nvidia_smi(device, list(STATE.values())) if device.type == "cuda" else None
    return dict(zip(STATE, values)) if values else None


def metadata(device: torch.device) -> dict:
    cuda = device.type == "cuda"
    driver = nvidia_smi(device, ["driver_version"]) if cuda else None
    return {
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "driver": driver[0] if driver else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def measure(
    shape: Shape,
    implementations: list,
    passes: list[str],
    device: torch.device,
    min_time_s: float,
    turns: int = timing.TURNS,
    short: bool = False,
) -> tuple[list[dict], list[str]]:
    """Returns the rows of one shape, and a line per variant that failed or has wrong results. `short`: in short
    blocks."""
    tensors = peers.random_tensors(shape, device)
    reference = check.Reference(shape, tensors)
    calls, failures = {}, []
    for implementation in implementations:
        for variant in implementation.variants(shape):
            try:
                prepared = implementation.prepare(variant, shape, tensors)
            except Exception as error:  # a baseline may raise anything for an unsupported shape
                failures.append(f"{variant}: {_first_line(error)}")
                continue
            for pass_ in passes:
                # A forward has no schedule and is always deterministic: one row serves all variants.
                shown = peers.Variant(variant.impl, None, True) if pass_ == "forward" else variant
                if pass_ in prepared and (shown, pass_) not in calls:
                    calls[shown, pass_] = prepared[pass_]
    for (variant, pass_), call in list(calls.items()):
        if wrong := _wrong(call, reference):
            failures.append(f"{variant} {pass_}: {wrong}")
            del calls[variant, pass_]
    effort = dict(min_time_s=min_time_s, turns=turns, short=short)
    timings, errors = timing.measure(beside_each_other(calls), device=device, **effort)
    failures += [f"{variant} {pass_}: {_first_line(error)}" for (variant, pass_), error in errors.items()]
    rows = []
    for (variant, pass_), taken in timings.items():
        row = {"impl": variant.impl, "pass": pass_, "schedule": variant.schedule}
        figures = {"ms": round(taken.ms, 5), "repeats_ms": [round(ms, 5) for ms in taken.repeats_ms]}
        tflops = round(flops(shape, pass_) / taken.ms * 1e-9, 2)
        rows.append({**row, "deterministic": variant.deterministic, **shape.row(), **figures, "tflops": tflops})
    return rows, failures


def _wrong(call, reference: check.Reference) -> str | None:
    """Returns what is wrong with the results of a call; calls in another process are checked there."""
    if hasattr(call, "block_ms"):
        return None
    try:
        return reference.wrong(call(), own_mask=isinstance(call, peers.OwnMask))
    except Exception as error:  # a baseline may raise anything for an unsupported shape
        return _first_line(error)


def beside_each_other(calls: dict) -> dict:
    """Reorders calls: those of the older library and of our dense call follow ours of the same pass and schedule, so
    that drift affects all alike."""
    followers = (baseline_library.NAME, compare.DENSE, compare.BITS)
    first = {(pass_, variant.schedule): i for i, (variant, pass_) in enumerate(calls) if variant.impl == compare.OURS}

    def place(item):
        i, (variant, pass_) = item
        return (first.get((pass_, variant.schedule), i), i) if variant.impl in followers else (i, i)

    return {name: calls[name] for _, name in sorted(enumerate(calls), key=place)}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def column(row: dict) -> str:
    return str(peers.Variant(row["impl"], row["schedule"], row["deterministic"]))


def short(name: str) -> str:
    """Abbreviates our schedules to their own names."""
    ours = f"{peers.DashAttn.name} "
    return name.removeprefix(ours) if name != f"{ours}det" else name


def table(rows: list[dict]) -> str:
    """Formats TFLOP/s, a line per shape and a column per variant, in one block per pass."""
    blocks = []
    for pass_ in PASSES:
        chosen = [row for row in rows if row["pass"] == pass_]
        if not chosen:
            continue
        columns = list(dict.fromkeys(column(row) for row in chosen))
        figures: dict[Shape, dict[str, float]] = {}
        for row in chosen:
            shape = Shape.of_row(row)
            figures.setdefault(shape, {})[column(row)] = row["tflops"]
        heads = [short(name) for name in columns]
        widths = [max(6, len(head)) for head in heads]
        first = max(len(str(shape)) for shape in figures)
        lines = [f"{pass_}, TFLOP/s (ours by schedule)"]
        lines.append(" ".join([" " * first, *(f"{h:>{w}}" for h, w in zip(heads, widths))]))
        for shape, line in figures.items():
            cells = (f"{line[c]:{w}.1f}" if c in line else " " * (w - 1) + "-" for c, w in zip(columns, widths))
            lines.append(" ".join([f"{shape!s:<{first}}", *cells]))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


class Part(NamedTuple):
    """One of several parts of a grid, counted from 1."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        number, _, parts = text.partition("/")
        if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
            raise argparse.ArgumentTypeError(f"must be I/N with 1 <= I <= N, got {text!r}")
        return cls(int(number), int(parts))

    def of(self, shapes: list[Shape]) -> list[Shape]:
        """Returns every N-th of the shapes by their operations, dealt back and forth so that the parts take about the
        same time; in their original order."""
        ranked = sorted(shapes, key=lambda shape: -flops(shape, "backward"))
        there_and_back = [*range(1, self.parts + 1), *range(self.parts, 0, -1)]
        chosen = {shape for shape, part in zip(ranked, itertools.cycle(there_and_back)) if part == self.number}
        return [shape for shape in shapes if shape in chosen]

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--grid", choices=GRIDS, default="quick")
    result.add_argument("--pass", dest="passes", nargs="+", choices=PASSES, default=["backward"])
    result.add_argument(
        "--schedules",
        nargs="+",
        help="our policies to measure, including 'ascending' and the non-deterministic 'atomic' if they are built; "
        "default: all policies for users",
    )
    result.add_argument("--peers", nargs="*", choices=peers.PEERS, default=list(peers.PEERS))
    result.add_argument("--json", type=pathlib.Path, help="file for the result, written after every shape")
    result.add_argument("--png", type=pathlib.Path, help="draw the result into this file")
    time_of = result.add_mutually_exclusive_group()
    time_of.add_argument("--min-time", type=float, help=f"seconds per variant (default {MIN_TIME_S})")
    defaults = ", ".join(f"{minutes:g} of {grid}" for grid, minutes in sharded.MINUTES.items())
    time_of.add_argument("--minutes", type=float, help=f"minutes for all shapes, in short blocks (default {defaults})")
    result.add_argument(
        "--part", type=Part.parse, help="I/N: measure one of N parts of the grid, which take about the same time"
    )
    result.add_argument("--merge", type=pathlib.Path, nargs="+", help="join the results of parts without measuring")
    result.add_argument("--max-seqlen", type=int, help="leave out longer sequences")
    result.add_argument("--tokens", type=int, help="tokens per shape, by its number of sequences; for short tests")
    result.add_argument("--host", action="store_true", help="measure the host's cost of a small call")
    result.add_argument(
        "--turns", type=int, help=f"blocks per variant (default {timing.TURNS}, or {budget.TURNS} short ones)"
    )
    result.add_argument("--baseline", type=pathlib.Path, help="an older _C*.so to measure in turns with ours")
    result.add_argument(
        "--baseline-schedules", nargs="+", help="its policies; default: the same as ours, 'descending' for 'auto'"
    )
    result.add_argument(
        "--baseline-policies", nargs="+", default=list(library.POLICIES), help="policy names in its numbering"
    )
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return result


def check_schedules(names: list[str] | None) -> None:
    """Exits if a schedule is unknown, or if the kernels of this installation do not include it."""
    from dash_attn import build_record, schedule

    known = ["auto", *schedule.POLICIES, *schedule.YARDSTICKS]
    unknown = sorted(set(names or []) - set(known))
    if unknown:
        raise SystemExit(f"error: --schedules must be among {', '.join(known)}, got {', '.join(unknown)}")
    yardsticks = sorted(set(names or []) & set(schedule.YARDSTICKS))
    path = build_record.kernels_file() if yardsticks else None
    kernels = build_record.read(path).kernels if path else ()
    if yardsticks and not any(kernel.policies == "OrderedAndYardsticks" for kernel in kernels):
        raise SystemExit(
            f"error: --schedules must be built, but this build lacks {', '.join(yardsticks)}: rebuild the kernels with "
            "these and the other schedules to measure in DASH_ATTN_POLICIES (docs/install.md)"
        )


def chosen_shapes(arguments: argparse.Namespace) -> list[Shape]:
    shapes = [s for s in GRIDS[arguments.grid]() if not arguments.max_seqlen or s.seqlen <= arguments.max_seqlen]
    if arguments.tokens:
        shapes = [shape.of_tokens(arguments.tokens) for shape in shapes]
    return arguments.part.of(shapes) if arguments.part else shapes


def loads(shapes: list[Shape], implementations: list, passes: list[str]) -> list[budget.Load]:
    """Returns the number of calls of each shape: a forward serves all variants of an implementation."""
    found = []
    for shape in shapes:
        variants = [len(implementation.variants(shape)) for implementation in implementations]
        found.append(budget.Load(shape, {p: sum(min(n, 1) if p == "forward" else n for n in variants) for p in passes}))
    return found


def baseline_of(arguments: argparse.Namespace) -> baseline_library.Baseline:
    if not arguments.baseline.is_file():
        raise SystemExit(f"error: --baseline must be a compiled library, got {arguments.baseline}")
    from dash_attn import schedule

    named = arguments.baseline_schedules or arguments.schedules or schedule.POLICIES
    schedules = list(dict.fromkeys("descending" if name == "auto" else name for name in named))
    if unknown := set(schedules) - set(arguments.baseline_policies):
        raise SystemExit(f"error: --baseline-policies must include {', '.join(sorted(unknown))}")
    return baseline_library.Baseline.of_library(arguments.baseline, schedules, arguments.baseline_policies)


def against_baseline(rows: list[dict]) -> str:
    """Formats our time over the older library's, in geometric mean and at worst, by pass and schedule of ours. It is
    compared with the same schedule, or with the library's fastest at the shape if it lacks the schedule ("auto")."""
    theirs: dict[tuple, dict[str | None, float]] = {}
    for row in rows:
        if row["impl"] == baseline_library.NAME:
            theirs.setdefault((row["pass"], Shape.of_row(row)), {})[row["schedule"]] = row["ms"]
    ratios: dict[tuple, dict[Shape, float]] = {}
    for row in rows:
        of_shape = theirs.get((row["pass"], Shape.of_row(row)), {})
        if row["impl"] == compare.OURS and of_shape:
            before = of_shape.get(row["schedule"], min(of_shape.values()))
            ratios.setdefault((row["pass"], row["schedule"]), {})[Shape.of_row(row)] = row["ms"] / before
    lines = ["time over the older library's"]
    for (pass_, schedule), found in ratios.items():
        worst = max(found, key=found.get)
        lines.append(
            f"  {pass_} {schedule or ''}: {compare.geometric_mean(list(found.values())):.4f} in geometric mean over "
            f"{len(found)} shapes, at worst {found[worst]:.4f} ({worst})"
        )
    return "\n".join(lines)


def against_plain(rows: list[dict]) -> str:
    """Formats our throughput over that of the same shape without scores, by pass and kind of scores, under "auto" or
    the only schedule measured."""
    ours = [row for row in rows if row["impl"] == compare.OURS]
    schedules = {row["schedule"] for row in ours}
    ms = {(row["pass"], Shape.of_row(row)): row["ms"] for row in ours
          if row["schedule"] in (None, "auto") or len(schedules - {None}) == 1}  # fmt: skip
    lines = ["throughput over that without changed scores"]
    for (pass_, shape), taken in ms.items():
        if shape.scores and (pass_, shape.plain) in ms:
            lines.append(f"  {pass_} {shape}: {ms[pass_, shape.plain] / taken:.3f}")
    return "\n".join(lines) if len(lines) > 1 else ""


def minutes_of(arguments: argparse.Namespace) -> float | None:
    """Returns the minutes for all shapes in short blocks; None if each variant has its own time."""
    by_grid = None if arguments.min_time is not None else sharded.MINUTES.get(arguments.grid)
    minutes = by_grid if arguments.minutes is None else arguments.minutes
    if minutes is None:
        return None
    if arguments.baseline:
        raise SystemExit("error: --baseline needs --min-time, because its process has no short blocks")
    if minutes <= 0:
        raise SystemExit(f"error: --minutes must be above 0, got {minutes}")
    return minutes


def parts_and_versions(arguments: argparse.Namespace, implementations: list) -> dict:
    """Returns the entries of `meta` for the part of the grid, if it is one, and for the baselines."""
    found = {"part": str(arguments.part)} if arguments.part else {}
    versions = {peer.name: peer.version() for peer in implementations if peer.name in compare.NAMES}
    return {**found, "impls": versions} if versions else found


def _what_left_none(arguments: argparse.Namespace) -> str:
    return f"--part {arguments.part}" if arguments.part else f"--max-seqlen {arguments.max_seqlen}"


def show(result: dict, arguments: argparse.Namespace) -> None:
    """Prints and draws a result as the arguments request."""
    rows = result["rows"]
    parts = [table(rows), against_plain(rows)]
    if arguments.baseline:
        parts.append(against_baseline(rows))
    if arguments.merge or arguments.grid in sharded.MINUTES:
        parts.append(sharded.summary(rows))
    print("\n" + "\n\n".join(filter(None, parts)), flush=True)
    if arguments.png:
        plot.draw(result, arguments.png)


def merge(arguments: argparse.Namespace) -> int:
    try:
        result = files.merged({str(path): json.loads(path.read_text()) for path in arguments.merge})
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: --merge must be results of the parts of one run: {error}") from None
    if arguments.json:
        arguments.json.write_text(files.dumps(result))
    show(result, arguments)
    return 0


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    check_schedules(arguments.schedules)
    if arguments.merge:
        return merge(arguments)
    minutes = minutes_of(arguments)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"error: --device must be available, got {arguments.device} without a CUDA device")
    if arguments.host:
        result = {"meta": {**metadata(device), "before": state(device)}, "rows": host.measure(device)}
        if arguments.json:
            arguments.json.write_text(files.dumps(result))
        print(host.table(result["rows"]))
        return 0
    ours = (peers.DashAttn, peers.DashAttnDense, peers.DashAttnBits)
    implementations = [implementation(arguments.schedules) for implementation in ours]
    for name in arguments.peers:
        peer = peers.PEERS[name]()
        if reason := peer.unavailable(device):
            print(f"left out {name}: {reason}", flush=True)
        else:
            implementations.append(peer)
    shapes = chosen_shapes(arguments)
    if not shapes:
        raise SystemExit(f"error: {_what_left_none(arguments)} leaves no shape of the grid {arguments.grid}")
    if arguments.baseline:
        implementations.append(baseline_of(arguments))

    result = {"meta": {**metadata(device), **parts_and_versions(arguments, implementations), "before": state(device)}}
    result["rows"] = []
    turns = arguments.turns or (budget.TURNS if minutes else timing.TURNS)
    effort = dict(min_time_s=arguments.min_time or MIN_TIME_S, turns=turns, short=minutes is not None)
    ahead = loads(shapes, implementations, arguments.passes) if minutes else []
    started = time.monotonic()
    failed = 0
    several = len(arguments.passes) > 1
    for number, shape in enumerate(shapes, 1):
        if minutes:
            block_s = budget.block_s(ahead[number - 1 :], started + 60 * minutes - time.monotonic(), turns)
            effort["min_time_s"] = turns * block_s
        rows, failures = measure(shape, implementations, arguments.passes, device, **effort)
        result["rows"] += rows
        figures = ", ".join(f"{short(column(r))} {r['tflops']:.0f}" + f" ({r['pass']})" * several for r in rows)
        print(f"[{number}/{len(shapes)} {time.monotonic() - started:4.0f} s] {shape}: {figures}", flush=True)
        for line in failures:
            print(f"    failed: {line}", flush=True)
        failed += sum(line.startswith((peers.DashAttn.name, baseline_library.NAME)) for line in failures)
        result["meta"]["after"] = state(device)
        if arguments.json:
            arguments.json.write_text(files.dumps(result))
    if arguments.baseline:
        implementations[-1].close()
    show(result, arguments)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

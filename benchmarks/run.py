"""Measures our backward and forward beside the peers that are installed, and prints a table.

    python -m benchmarks.run --grid full --json result.json --png result.png
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import time

import torch

from benchmarks import host, peers, plot, timing
from benchmarks.shapes import GRIDS, PASSES, SHAPE_FIELDS, Shape, flops

ROW_FIELDS = ("impl", "pass", "schedule", "deterministic", *SHAPE_FIELDS, "ms", "tflops")
COMMIT_VARIABLE = "DASH_ATTN_COMMIT"


def commit() -> str:
    """The commit measured: of the working tree, or of the environment where the tree came without its history."""
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    git = ["git", "-C", str(pathlib.Path(__file__).parents[1])]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("-dirty" if changed else "")


def driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def metadata(device: torch.device) -> dict[str, str | None]:
    cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "driver": driver() if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def measure(
    shape: Shape, implementations: list, passes: list[str], device: torch.device, min_time_s: float
) -> tuple[list[dict], list[str]]:
    """Rows of one shape, and a line for each variant that failed."""
    tensors = peers.random_tensors(shape, device)
    calls, failures = {}, []
    for implementation in implementations:
        for variant in implementation.variants(shape):
            try:
                prepared = implementation.prepare(variant, shape, tensors)
            except Exception as error:  # whatever a peer raises for a shape that it does not take
                failures.append(f"{variant}: {_first_line(error)}")
                continue
            for pass_ in passes:
                # A forward has no schedule and is deterministic anyway: one row serves all variants.
                shown = peers.Variant(variant.impl, None, True) if pass_ == "forward" else variant
                calls.setdefault((shown, pass_), prepared[pass_])
    times, errors = timing.median_ms(calls, device=device, min_time_s=min_time_s)
    failures += [f"{variant} {pass_}: {_first_line(error)}" for (variant, pass_), error in errors.items()]
    rows = []
    for (variant, pass_), ms in times.items():
        shown = {field: getattr(shape, field) for field in SHAPE_FIELDS}
        row = {"impl": variant.impl, "pass": pass_, "schedule": variant.schedule, "deterministic": variant.deterministic}
        rows.append({**row, **shown, "ms": round(ms, 5), "tflops": round(flops(shape, pass_) / ms * 1e-9, 2)})
    return rows, failures


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def column(row: dict) -> str:
    return str(peers.Variant(row["impl"], row["schedule"], row["deterministic"]))


def short(name: str) -> str:
    """Our schedules go by their own names."""
    ours = f"{peers.DashAttn.name} "
    return name.removeprefix(ours) if name != f"{ours}det" else name


def table(rows: list[dict]) -> str:
    """TFLOP/s, a line a shape and a column a variant; one block for each pass."""
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
            cells = (f"{line[name]:{w}.1f}" if name in line else " " * (w - 1) + "-" for name, w in zip(columns, widths))
            lines.append(" ".join([f"{shape!s:<{first}}", *cells]))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--grid", choices=GRIDS, default="quick")
    result.add_argument("--pass", dest="passes", nargs="+", choices=PASSES, default=["backward"])
    result.add_argument("--schedules", nargs="+", help="policies of ours to measure, also 'atomic', which is not deterministic; default: every one that users can choose")
    result.add_argument("--peers", nargs="*", choices=peers.PEERS, default=list(peers.PEERS))
    result.add_argument("--json", type=pathlib.Path, help="write the result here, after every shape")
    result.add_argument("--png", type=pathlib.Path, help="draw the result here")
    result.add_argument("--min-time", type=float, default=0.15, help="seconds for each variant of a shape (default 0.15)")
    result.add_argument("--max-seqlen", type=int, help="leave longer sequences out")
    result.add_argument("--tokens", type=int, help="batch size times seqlen, instead of 16384: for a short trial")
    result.add_argument("--host", action="store_true", help="measure what a small call costs the host, and nothing else")
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return result


def check_schedules(names: list[str] | None) -> None:
    from dash_attn import schedule

    known = ["auto", *schedule.POLICIES, *schedule.YARDSTICKS]
    unknown = sorted(set(names or []) - set(known))
    if unknown:
        raise SystemExit(f"--schedules must be of {', '.join(known)}; got {', '.join(unknown)}")


def chosen_shapes(arguments: argparse.Namespace) -> list[Shape]:
    shapes = [s for s in GRIDS[arguments.grid]() if not arguments.max_seqlen or s.seqlen <= arguments.max_seqlen]
    if arguments.tokens:
        shapes = [Shape(**{**vars(s), "batch": max(1, arguments.tokens // s.seqlen)}) for s in shapes]
    return shapes


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    check_schedules(arguments.schedules)
    device = torch.device(arguments.device)
    if arguments.host:
        result = {"meta": metadata(device), "rows": host.measure(device)}
        if arguments.json:
            arguments.json.write_text(dumps(result))
        print(host.table(result["rows"]))
        return 0
    implementations = [peers.DashAttn(arguments.schedules)]
    for name in arguments.peers:
        peer = peers.PEERS[name]()
        if reason := peer.unavailable(device):
            print(f"left out {name}: {reason}", flush=True)
        else:
            implementations.append(peer)

    result = {"meta": metadata(device), "rows": []}
    shapes = chosen_shapes(arguments)
    if not shapes:
        raise SystemExit(f"--max-seqlen {arguments.max_seqlen} leaves no shape of the grid {arguments.grid}")
    started = time.monotonic()
    failed = 0
    several = len(arguments.passes) > 1
    for number, shape in enumerate(shapes, 1):
        rows, failures = measure(shape, implementations, arguments.passes, device, arguments.min_time)
        result["rows"] += rows
        figures = ", ".join(f"{short(column(r))} {r['tflops']:.0f}" + f" ({r['pass']})" * several for r in rows)
        print(f"[{number}/{len(shapes)} {time.monotonic() - started:4.0f} s] {shape}: {figures}", flush=True)
        for line in failures:
            print(f"    failed: {line}", flush=True)
        failed += sum(line.startswith(peers.DashAttn.name) for line in failures)
        if arguments.json:
            arguments.json.write_text(dumps(result))
    print("\n" + table(result["rows"]), flush=True)
    if arguments.png:
        plot.draw(result, arguments.png)
    return 1 if failed else 0


def dumps(result: dict) -> str:
    """JSON with a line for each row."""
    rows = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    return f'{{\n "meta": {json.dumps(result["meta"])},\n "rows": [\n{rows}\n ]\n}}\n'


if __name__ == "__main__":
    sys.exit(main())

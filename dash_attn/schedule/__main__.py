"""Compares the policies for a shape in the DAG model: ``python -m dash_attn.schedule --help``."""

from __future__ import annotations

import argparse
import sys

from ..commands import exit_status
from . import fitting, gantt, problem, resolve, simulate
from .simulation import ADD_TIME, PRODUCT_TIME, SIGNAL_TIME, Simulation

MAX_TILES = 20_000_000  # per policy: the simulator processes about four million tiles per second


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dash_attn.schedule",
        description="Simulates every policy that is defined for a mask, for one shape of the backward, in the DAG "
        "model: the products of each tile, then the add of its dQ partial in the policy's order. Needs no GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    shape = parser.add_argument_group("shape")
    shape.add_argument("--seqlen-q", type=int, default=8192, metavar="N", help="queries")
    shape.add_argument("--seqlen-k", type=int, default=None, metavar="N", help="keys; default: as many as queries")
    shape.add_argument("--head-dim", type=int, default=128, metavar="N", help="selects the kernel's tile size")
    shape.add_argument("--batch", type=int, default=2, metavar="N", help="sequences")
    shape.add_argument("--heads", type=int, default=16, metavar="N", help="query heads")
    shape.add_argument("--kv-heads", type=int, default=None, metavar="N", help="KV heads; default: as many as heads")
    shape.add_argument("--mask", choices=["causal", "full", "both"], default="both", help="mask, bottom-right aligned")
    shape.add_argument("--tile-q", type=int, default=None, metavar="N", help="queries per tile; default: the kernel's")
    shape.add_argument("--tile-k", type=int, default=None, metavar="N", help="keys per tile; default: the kernel's")
    model = parser.add_argument_group("machine and costs (default: microseconds on an H200; any unit of time)")
    model.add_argument("--sms", type=int, default=132, metavar="N", help="streaming multiprocessors")
    model.add_argument("--cta-group", type=int, default=None, metavar="C", help="cluster size; default: the kernel's")
    swizzle = "number of interleaved heads; default: the kernel's, and for shift one head after the other"
    model.add_argument("--head-swizzle", type=int, default=None, metavar="N", help=swizzle)
    model.add_argument("--product-time", type=float, default=PRODUCT_TIME, metavar="T", help="products of one tile")
    model.add_argument("--add-time", type=float, default=ADD_TIME, metavar="T", help="add of one dQ partial")
    model.add_argument("--signal-time", type=float, default=SIGNAL_TIME, metavar="T", help="hop to the next rank")
    parser.add_argument(
        "--png",
        default=None,
        metavar="PATH",
        help=f"draw the Gantt charts of a small shape; needs matplotlib and at most {gantt.MAX_TASKS} tiles per policy",
    )
    return parser


def _unit(arguments: argparse.Namespace) -> str:
    costs = arguments.product_time, arguments.add_time, arguments.signal_time
    return "microseconds" if costs == (PRODUCT_TIME, ADD_TIME, SIGNAL_TIME) else "the unit of the costs given"


def _check(arguments: argparse.Namespace) -> None:
    """Raises a ValueError for a shape that would divide by zero or run for hours."""
    for name in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "tile_q", "tile_k"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _played(arguments: argparse.Namespace, *, causal: bool, seqlen_k: int) -> list[Simulation]:
    names = ("head_dim", "batch", "heads", "kv_heads", "tile_q", "tile_k", "cta_group", "head_swizzle")
    sizes = {name: getattr(arguments, name) for name in names}
    results = []
    for policy in fitting(causal=causal, head_dim=arguments.head_dim):
        tiles = problem(policy, arguments.seqlen_q, seqlen_k, causal=causal, **sizes)
        count = arguments.batch * arguments.heads * tiles.num_query_tiles * tiles.num_kv_tiles
        if count > MAX_TILES:
            raise ValueError(
                f"batch * heads * query tiles * KV tiles must be at most {MAX_TILES}, got {arguments.batch} * "
                f"{arguments.heads} * {tiles.num_query_tiles} * {tiles.num_kv_tiles}"
            )
        results.append(
            simulate(
                policy,
                tiles,
                sms=arguments.sms,
                product_time=arguments.product_time,
                add_time=arguments.add_time,
                signal_time=arguments.signal_time,
                record_tasks=arguments.png is not None,
            )
        )
    return results


def _table(arguments: argparse.Namespace, results: list[Simulation], *, causal: bool, seqlen_k: int) -> str:
    automatic = resolve("auto", causal=causal, head_dim=arguments.head_dim)
    lines = [
        f"{'causal' if causal else 'full'} mask, {arguments.seqlen_q} queries, {seqlen_k} keys, "
        f"{arguments.batch} x {arguments.heads} heads, {arguments.sms} SMs; times in {_unit(arguments)}",
        f"  {'schedule':<23}{'makespan':>8}{'idle share':>12}{'critical path':>15}{'of ideal':>10}",
    ]
    for result in results:
        name = result.schedule + (" (auto)" if result.schedule == automatic else "")
        times = f"{result.makespan:>8.6g}{result.idle_share:>12.1%}{result.critical_path:>15.6g}"
        lines.append(f"  {name:<23}{times}{result.ratio:>10.3f}")
    lines.append(f"  ideal {results[0].ideal:.6g}: all work spread evenly, or the longest KV tile if that is longer")
    return "\n".join(lines)


def _show(arguments: argparse.Namespace) -> None:
    masks = {"causal": [True], "full": [False], "both": [True, False]}[arguments.mask]
    seqlen_k = arguments.seqlen_q if arguments.seqlen_k is None else arguments.seqlen_k
    _check(arguments)
    drawn = []
    for causal in masks:
        results = _played(arguments, causal=causal, seqlen_k=seqlen_k)
        print(_table(arguments, results, causal=causal, seqlen_k=seqlen_k), flush=True)
        drawn += results
    if arguments.png is not None:
        gantt.draw(drawn, arguments.png, unit=_unit(arguments))
        print(f"wrote {arguments.png}")


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return exit_status(lambda: _show(arguments), ValueError, ImportError, OSError)


if __name__ == "__main__":
    sys.exit(main())

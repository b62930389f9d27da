"""Attention over the GPUs of one host: its share of the ideal, compared with torch's and ring-flash-attn's.

    python -m benchmarks.context_parallel --json context_parallel.json

A call is the forward and the backward through autograd. The ideal is the time of one GPU for the whole in the same run,
divided by the number of GPUs. The results of every implementation are first compared with those of one GPU (ours must
have the same bits), and then the implementations alternate in rounds. A time is the largest over all ranks, from a
point that all GPUs have reached together, and a figure is the median over all rounds. The hosts get a head start as in
benchmarks.timing, so that the GPUs are measured and not the hosts.

The command starts a process per GPU. A baseline that fails is reported and left out. If a baseline kills the processes
or hangs, they start a second time without it. `--device cpu` tries out the program; such figures are meaningless.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import run
from benchmarks.context_parallel_peers import RESULTS, ROWS, Implementation, OneGpu, Ranks, Whole, candidates
from benchmarks.files import dumps
from dash_attn.distributed import shard, ulysses
from dash_attn.distributed.channel import channel_of

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # KV heads unless others are asked for
SHARE_OF_IDEAL = 0.88
"""The required share of the ideal."""
NEAR = 0.03
"""The largest error of bf16 results with another order of sums: the norm of the difference over the norm."""
ONE, OURS, MOVEMENTS = "one GPU", "dash_attn", "the movements"
# NVLink multicast stays off: it gains nothing here, and not every host supports it.
NCCL_SETTINGS = {"NCCL_NVLS_ENABLE": "0"}
TIMEOUT_S = 60
STARTS = 4
OURS_IS_WRONG = 3  # the exit status of a rank that finished with a wrong result of ours
# Clocks for which GPUs idle before a call so that their hosts run ahead: about 4 ms, longer than the ranks' agreement.
HEAD_START_CLOCKS = 8_000_000
WARM_UP_S = 0.1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=None, help="default: 4 if there are as many GPUs, else 2")
    parser.add_argument("--seqlens", type=int, nargs="+", default=[65_536, 131_072], metavar="N")
    parser.add_argument("--kv-heads", type=int, default=KV_HEADS, metavar="N", help="fewer than ranks gather keys")
    parser.add_argument("--rounds", type=int, default=4, help="turns per implementation")
    parser.add_argument("--block", type=float, default=0.6, help="seconds per turn, with 1 to 10 calls")
    parser.add_argument("--limit", type=float, default=400, help="seconds for the whole program")
    parser.add_argument("--leave-out", nargs="*", default=[], metavar="NAME", help="rows of the table to leave out")
    parser.add_argument("--json", type=pathlib.Path, default=None, help="file for the results")
    parser.add_argument("--stage", type=pathlib.Path, default=None, help=argparse.SUPPRESS)
    return parser


# The parent process.


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    arguments = parser.parse_args(argv)
    if "RANK" in os.environ:
        return _of_rank(arguments)
    gpus = torch.cuda.device_count()
    ranks = arguments.ranks or (4 if gpus >= 4 else 2)
    if arguments.device == "cuda" and gpus < ranks:
        parser.error(f"--ranks must be at most the number of GPUs, {gpus}, got {ranks} (--device cpu is for tests)")
    kv_heads = arguments.kv_heads
    if kv_heads < 1 or HEADS % kv_heads:
        parser.error(f"--kv-heads must divide the {HEADS} heads, got {kv_heads}")
    if ranks < 1 or (kv_heads % ranks and ranks < kv_heads):
        parser.error(f"--ranks must divide the {kv_heads} KV heads, or be more, got {ranks}")
    for seqlen in arguments.seqlens:
        if seqlen < 1 or seqlen % (2 * ranks):
            parser.error(f"--seqlens must be multiples of twice the ranks, {2 * ranks}, got {seqlen}")
    return _start(arguments, argv, ranks)


def _start(arguments: argparse.Namespace, argv: list[str], ranks: int) -> int:
    """Starts the ranks, again without an implementation that has ended them, and returns the exit status."""
    deadline = time.monotonic() + arguments.limit
    left_out = list(arguments.leave_out)
    with tempfile.TemporaryDirectory() as folder:
        stage = pathlib.Path(folder) / "stage"
        for _ in range(STARTS):
            options = [*argv, "--stage", str(stage), "--leave-out", *left_out]
            is_right, why = _run_ranks(options, ranks, deadline)
            if not why:
                ended = set(left_out) - set(arguments.leave_out)
                return 0 if is_right and not any(name.startswith(OURS) for name in ended) else 1
            name = stage.read_text() if stage.exists() else "the start"
            print(f"ended during {name}: {why}", flush=True)
            if name not in (*ROWS, MOVEMENTS) or name in left_out or time.monotonic() > deadline:
                return 1
            left_out.append(name)
            print(f"starting again without {name}", flush=True)
    return 1


def _run_ranks(options: list[str], ranks: int, deadline: float) -> tuple[bool, str]:
    """Returns whether all results of ours are right, and why the ranks ended early ("" if they did not)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment = os.environ | settings
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "benchmarks.context_parallel", *options]
    processes = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    try:
        while True:
            codes = [process.poll() for process in processes]
            if any(code not in (None, 0, OURS_IS_WRONG) for code in codes):
                return False, f"exit statuses {codes} (None: still running)"
            if None not in codes:
                return not any(codes), ""
            if time.monotonic() > deadline:
                return False, "no time left (--limit)"
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()


# One rank.


def _of_rank(arguments: argparse.Namespace) -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = arguments.device == "cuda"
    os.environ.update(NCCL_SETTINGS)
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    hosts = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=2 * TIMEOUT_S))
    ranks = Ranks(rank, size, device, DeviceMesh(arguments.device, list(range(size))), hosts)
    failed = _measure(arguments, ranks)
    sys.stdout.flush()
    ranks.barrier()
    dist.destroy_process_group()
    return OURS_IS_WRONG if failed else 0


def _measure(arguments: argparse.Namespace, ranks: Ranks) -> bool:
    """Measures every length, and prints and writes the results so far. Returns whether a result of ours is wrong."""
    meta = {**run.metadata(ranks.device), "ranks": ranks.size, "before": run.state(ranks.device)}
    if ranks.device.type == "cuda":
        meta |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), **NCCL_SETTINGS}
    result: dict[str, Any] = {"meta": meta, "rows": [], "movements": [], "left_out": []}
    for name in arguments.leave_out:
        result["left_out"].append({"impl": name, "why": "left out on request, or because it ended the processes"})
    failed = False
    if ranks.rank == 0:
        known = ", ".join(f"{key} {value}" for key, value in meta.items() if isinstance(value, str))
        print(known if ranks.device.type == "cuda" else "a test on CPUs, whose figures are meaningless", flush=True)
    for seqlen in arguments.seqlens:
        began = time.monotonic()
        rows, movements, left_out = _of_length(arguments, ranks, seqlen)
        result["rows"] += rows
        result["movements"] += movements
        result["left_out"] += left_out
        meta["after"] = run.state(ranks.device)
        failed |= any(row["impl"].startswith(OURS) for row in left_out)
        failed |= any(row["impl"].startswith(OURS) and not _same_bits(row) for row in rows)
        if ranks.rank == 0:
            print(table(rows, movements, left_out, ranks.size), flush=True)
            print(f"  took {time.monotonic() - began:.0f} s\n", flush=True)
            if arguments.json is not None:
                arguments.json.write_text(dumps(result))
    return failed


def _of_length(arguments: argparse.Namespace, ranks: Ranks, seqlen: int) -> tuple[list[dict], list[dict], list[dict]]:
    shape = {"seqlen": seqlen, "heads": HEADS, "kv_heads": arguments.kv_heads, "head_dim": HEAD_DIM, "dtype": "bf16"}
    shape |= {"mask": "causal", "batch": 1, "ranks": ranks.size}
    whole = _whole_tensors(ranks, seqlen, arguments.kv_heads)
    one = OneGpu(ranks)
    _stage(arguments, ranks, ONE)
    reference = _reference(one, ranks, whole)
    chosen: dict[str, Implementation] = {ONE: one}
    about_ms, errors, left_out = {ONE: _time_of(one, ranks, whole, 1)[-1]}, {}, []
    for name, ways in candidates(ranks, arguments.kv_heads).items():
        if name in arguments.leave_out:
            continue
        _stage(arguments, ranks, name)
        found, whys = _fastest_right_one(ways, ranks, whole, reference)
        if found is None:
            left_out.append({"seqlen": seqlen, "impl": name, "why": "; ".join(dict.fromkeys(whys))})
            continue
        chosen[name], about_ms[name], errors[name] = found
    del reference

    blocks: dict[str, list[list[float]]] = {name: [] for name in chosen}
    for number in range(arguments.rounds):
        order = list(chosen)
        for name in order if number % 2 == 0 else order[::-1]:
            _stage(arguments, ranks, name)
            calls = min(10, max(1, round(1e3 * arguments.block / about_ms[name])))
            blocks[name].append(_time_of(chosen[name], ranks, whole, calls, about_ms[name]))
    _stage(arguments, ranks, MOVEMENTS)
    by_heads = ranks.size <= arguments.kv_heads
    found = _movements(ranks, whole) if by_heads and MOVEMENTS not in arguments.leave_out else []
    movements = [{**shape, **movement} for movement in found]
    ms = {name: statistics.median(sum(found, [])) for name, found in blocks.items()}
    rows = [
        {
            **shape, "impl": name, "note": implementation.note, "ms": ms[name],
            "rounds_ms": [statistics.median(block) for block in blocks[name]],
            "of_ideal": ms[ONE] / ranks.size / ms[name], "errors": errors.get(name),
        }
        for name, implementation in chosen.items()
    ]  # fmt: skip
    return rows, movements, left_out


def _stage(arguments: argparse.Namespace, ranks: Ranks, name: str) -> None:
    """Tells the parent process what is running, in case it ends the processes."""
    if arguments.stage is not None and ranks.rank == 0:
        arguments.stage.write_text(name)


def _whole_tensors(ranks: Ranks, seqlen: int, kv_heads: int) -> Whole:
    generator = torch.Generator(ranks.device).manual_seed(seqlen)
    heads = {"q": HEADS, "k": kv_heads, "v": kv_heads, "dout": HEADS}
    whole = {}
    for name, count in heads.items():
        options: dict[str, Any] = dict(generator=generator, device=ranks.device, dtype=torch.bfloat16)
        whole[name] = torch.randn(1, seqlen, count, HEAD_DIM, **options)
        dist.broadcast(whole[name], 0)
    return whole


def _reference(one: Implementation, ranks: Ranks, whole: Whole) -> Whole:
    """Returns the results of one GPU, which rank 0 sends to all ranks."""
    with one.block(whole) as call:
        results = call() if ranks.rank == 0 else tuple(torch.empty_like(whole[x]) for x in ("dout", "q", "k", "v"))
    found = dict(zip(RESULTS, (x.contiguous() for x in results)))
    for x in found.values():
        dist.broadcast(x, 0)
    return found


def _fastest_right_one(
    ways: Sequence[Callable[[], Implementation]], ranks: Ranks, whole: Whole, reference: Whole
) -> tuple[tuple[Implementation, float, dict] | None, list[str]]:
    """Returns the fastest implementation, its milliseconds and its errors, and why others were left out. All ranks come
    to the same result."""
    best, whys = None, []
    for way in ways:
        implementation, errors, why = None, {}, ""
        try:
            implementation = way()
            if best is not None and not getattr(implementation, "grouped", True):
                continue  # repeated KV heads are more work, only for kernels without grouped heads
            with implementation.block(whole) as call:
                errors = _errors(implementation.pairs(call(), reference))
        except Exception as error:  # a baseline may raise anything
            why = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        everyones = ranks.gathered((why, errors))
        for rank, (of_rank, _) in enumerate(everyones):
            if of_rank:
                why = why or f"rank {rank}: {of_rank}"
        if not why:
            assert implementation is not None
            errors = _together([found for _, found in everyones])
            if not all(error["relative"] <= NEAR for error in errors.values()):
                why = f"too far from the results of one GPU: {errors}"
        if why:
            note = f"{implementation.note}: " if implementation is not None else ""
            whys.append(f"{note}{why}")
            continue
        ms = _time_of(implementation, ranks, whole, 2)[-1]
        if best is None or ms < best[1]:
            best = implementation, ms, errors
    return best, whys


def _errors(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, tuple[bool, float, float]]:
    """Returns for each result whether its bits are as expected, and the squares of the difference and of the norm."""
    found = {}
    for name, (actual, expected) in zip(RESULTS, pairs, strict=True):
        if actual.shape != expected.shape:
            raise ValueError(f"{name} must have shape {tuple(expected.shape)}, got {tuple(actual.shape)}")
        same = torch.equal(actual.view(torch.int16), expected.view(torch.int16))
        exact = expected.float()
        difference = (actual.float() - exact).square().sum(dtype=torch.float64)
        found[name] = same, float(difference), float(exact.square().sum(dtype=torch.float64))
    return found


def _together(of_ranks: list[dict[str, tuple[bool, float, float]]]) -> dict[str, dict]:
    found = {}
    for name in RESULTS:
        same, differences, squares = zip(*(errors[name] for errors in of_ranks))
        found[name] = {"same_bits": all(same), "relative": (sum(differences) / sum(squares)) ** 0.5}
    return found


def _time_of(
    implementation: Implementation, ranks: Ranks, whole: Whole, calls: int, about_ms: float | None = None
) -> list[float]:
    """Returns the milliseconds of some calls after a warm-up, the largest of all ranks."""
    warm_up = 1 if about_ms is None else max(1, round(1e3 * WARM_UP_S / about_ms))
    times: list[float] = []
    if implementation.alone and ranks.rank != 0:
        times = [0.0] * calls
    else:
        with implementation.block(whole) as call:
            times = _times_ms(call, ranks, warm_up + calls, together=not implementation.alone)[warm_up:]
    return [max(of_ranks) for of_ranks in zip(*ranks.gathered(times))]


def _times_ms(call: Callable[[], object], ranks: Ranks, calls: int, together: bool = True) -> list[float]:
    """Returns the milliseconds of each call on this rank, from a point that all GPUs have reached together."""
    times = []
    one = torch.ones(1, dtype=torch.int32, device=ranks.device)
    for _ in range(calls):
        if together:
            ranks.barrier()
        if ranks.device.type == "cpu":
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START_CLOCKS)
        if together:
            dist.all_reduce(one, op=dist.ReduceOp.MAX, group=ranks.mesh.get_group())
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def _movements(ranks: Ranks, whole: Whole) -> list[dict]:
    """Measures only the all-to-alls: as in a call, and NCCL's with as many bytes and without the copies around it."""
    group = ranks.mesh.get_group()
    size, seqlen, kv_heads = ranks.size, whole["q"].shape[1], whole["k"].shape[2]
    if size == 1:
        return []
    found = []
    for layout in ("contiguous", "zigzag"):
        split = ulysses.Split(channel_of(group), "benchmark", layout, seqlen, seqlen, HEADS, kv_heads, False)
        q, k, v, dout = (shard(x, ranks.rank, size, dim=1, layout=layout) for x in whole.values())
        of_heads = split.rows_to_heads("benchmark", [q, k, v], [False, True, True])
        moves: dict[str, tuple[Callable[[], object], list]] = {
            "q, k, v to heads": (lambda s=split, x=[q, k, v]: s.rows_to_heads("b", x, [False, True, True]), [q, k, v]),
            "out to rows": (lambda s=split, x=of_heads[:1]: s.heads_to_rows("b", x, [False]), [q]),
            "dout to heads": (lambda s=split, x=[dout]: s.rows_to_heads("b", x, [False]), [dout]),
            "dq, dk, dv to rows": (lambda s=split, x=of_heads: s.heads_to_rows("b", x, [False, True, True]), of_heads),
        }
        for name, (move, tensors) in moves.items():
            found.append(_movement(ranks, f"{layout}: {name}", move, sum(x.nbytes for x in tensors)))
    source, target = torch.empty_like(q), torch.empty_like(q)
    raw = functools.partial(dist.all_to_all_single, target.view(-1), source.view(-1), group=group)
    found.append(_movement(ranks, "all_to_all_single of torch, as many bytes as q", raw, q.nbytes))
    return found


def _movement(ranks: Ranks, name: str, move: Callable[[], object], of_rank: int) -> dict:
    times = ranks.gathered(_times_ms(move, ranks, 12)[2:])
    ms = statistics.median(max(of_ranks) for of_ranks in zip(*times))
    leaving = of_rank * (ranks.size - 1) // ranks.size
    return {"movement": name, "ms": ms, "bytes": leaving, "gbs": 1e-6 * leaving / ms}


def table(rows: list[dict], movements: list[dict], left_out: list[dict], ranks: int) -> str:
    """Formats the results of one length, with the targets."""
    times = {row["impl"]: row["ms"] for row in rows}
    first = rows[0]
    lines = [
        f"{first['seqlen']:,} tokens, {first['heads']}/{first['kv_heads']} heads of {first['head_dim']}, bf16, causal, "
        f"forward and backward, {ranks} GPUs: one GPU takes {times[ONE]:.2f} ms, so the ideal is "
        f"{times[ONE] / ranks:.2f} ms",
        f"  {'':<44}{'ms':>9}{'of ideal':>10}{'/contig.':>10}{'/zigzag':>9}  rounds, ms; largest relative error",
    ]
    ours = [times.get(f"dash_attn {layout}") for layout in ("contiguous", "zigzag")]
    for row in rows[1:]:
        over = "".join(f"{row['ms'] / x if x else float('nan'):>{width}.2f}" for x, width in zip(ours, (10, 9)))
        error = f"{max(x['relative'] for x in row['errors'].values()):.1e}"
        if row["impl"].startswith(OURS):
            error = "bits of one GPU" if _same_bits(row) else f"WRONG, bits differ from one GPU: {row['errors']}"
        spread = f"{min(row['rounds_ms']):.2f} to {max(row['rounds_ms']):.2f}"
        lines.append(f"  {row['impl']:<44}{row['ms']:>9.2f}{row['of_ideal']:>10.3f}{over}  {spread}; {error}")
        lines.append(f"      {row['note']}")
    lines.append("  /contig., /zigzag: time over that of dash_attn in this layout; above 1 is slower than dash_attn")
    lines += [f"  left out {row['impl']}: {row['why']}" for row in left_out]
    for row in movements:
        lines.append(f"  {row['movement']:<50}{row['ms']:>9.3f} ms{row['gbs']:>8.0f} GB/s out of each GPU")
    for layout in ("contiguous", "zigzag"):
        taken = sum(row["ms"] for row in movements if row["movement"].startswith(f"{layout}: "))
        if (whole := times.get(f"dash_attn {layout}")) and taken:
            lines.append(f"  all-to-alls of {layout}: {taken:.2f} ms, {taken / whole:.1%} of the call")
    peers = {name: ms for name, ms in times.items() if not name.startswith((OURS, ONE))}
    for layout, ms in zip(("contiguous", "zigzag"), ours):
        if ms is None:
            lines.append(f"  {layout}: FAILED, no time")
            continue
        share = times[ONE] / ranks / ms
        enough = _yes(share >= SHARE_OF_IDEAL)
        lines.append(f"  {layout}: at least {SHARE_OF_IDEAL} of the ideal: {enough} ({share:.3f})")
        lines += [f"  {layout}: not slower than {name}: {_yes(ms <= peer)}" for name, peer in peers.items()]
    return "\n".join(lines)


def _same_bits(row: dict) -> bool:
    return all(error["same_bits"] for error in row["errors"].values())


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


if __name__ == "__main__":
    sys.exit(main())

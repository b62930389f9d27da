"""Measures the constants of the machine model on this GPU, and the grid that the model has to predict.

    python -m benchmarks.calibrate --json calibration.json

There are four parts: latencies (`latency.cu`); probes, small problems that each show one cost (below); the kernels
around the main one; and every ordered policy at every shape of a grid, twice, to show how far two measurements of one
thing differ. `benchmarks.model` fits the model and `benchmarks.report` compares it, both without a GPU. The program
takes about a minute on an H200. The probes need a build with the policy `ascending`:
DASH_ATTN_POLICIES=ascending,shift,symmetric_shift.
"""

import argparse
import collections
import dataclasses
import itertools
import pathlib
import statistics
import sys
import tempfile
import time

import torch

from benchmarks import latency, model, peers, run, timing
from benchmarks.files import dumps
from benchmarks.shapes import DENSE_GRIDS, Shape
from dash_attn import _schedule, schedule

HEAD_DIMS = (64, 128)


@dataclasses.dataclass(frozen=True)
class Probe:
    """One backward. `sms` is the number of SMs that it may use."""

    shows: str
    head_dim: int
    mask: str
    schedule: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    sms: int

    @property
    def causal(self) -> bool:
        return self.mask == "causal"


def probes(sms: int, tile_shapes: dict[int, tuple[int, int]]) -> list[Probe]:
    """Returns the problems that show one cost each, which `benchmarks.model` fits together."""
    found = []
    for head_dim, (tile_q, tile_k) in tile_shapes.items():

        def add(shows, queries, keys, *, batch=1, mask="full", schedule="ascending", on=sms, heads=1, kv_heads=1):
            found.append(
                Probe(shows, head_dim, mask, schedule, batch, heads, kv_heads, queries * tile_q, keys * tile_k, on)
            )

        rows = tile_k // tile_q
        # A work tile: few steps, and several work tiles per SM.
        for work_tiles in (1, 4, 12):
            add("work tile", 2, 1, batch=sms * work_tiles)
        # A step with adds, whose predecessors have finished.
        for steps in (8, 32):
            add("step", steps, 4, batch=sms)
        # The code of each kernel: many steps on a full GPU; only with the causal mask, where no order is better.
        for name in ("ascending", "descending", "spt", "shift"):
            add("code", 24 * rows, 24, batch=sms // 4, schedule=name)
        for name in ("descending", "spt", "symmetric_shift"):
            add("code", 16 * rows, 16, mask="causal", schedule=name, on=2 if name == "symmetric_shift" else 1)
        # A single SM, without any queue.
        for steps in (16, 64):
            add("alone", steps, 4, on=1)
        # An ordered chain: one query tile, where each KV tile waits for the previous one.
        for keys in (32, 96):
            add("hop", 1, keys)
            add("hop", 1, keys, on=8)
        # The causal kernel, on a full GPU and with few SMs.
        for tiles, batch in ((4, sms), (4, 4 * sms), (16, sms // 2)):
            for name in ("descending", "spt", "symmetric_shift"):
                add("causal", tiles * rows, tiles, batch=batch, mask="causal", schedule=name)
        for on in (8, sms // 4):
            for name in ("ascending", "descending", "spt", "symmetric_shift"):
                add("few SMs", 16 * rows, 16, batch=4, mask="causal", schedule=name, on=on)
    return found


def prepare(probe: Probe):
    """Returns a function that runs the probe's backward."""
    import dash_attn  # noqa: F401  registers the ops

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(seqlen, heads):
        size = (probe.batch, seqlen, heads, probe.head_dim)
        return torch.randn(size, generator=generator, device="cuda").to(torch.bfloat16)

    q, dout = normal(probe.seqlen_q, probe.heads), normal(probe.seqlen_q, probe.heads)
    k, v = normal(probe.seqlen_k, probe.kv_heads), normal(probe.seqlen_k, probe.kv_heads)
    pack = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"))
    arguments = dict(pack, softmax_scale=probe.head_dim**-0.5, causal=probe.causal, window_left=-1, window_right=-1,
                     attention_chunk=0)  # fmt: skip
    out, softmax_lse = torch.ops.dash_attn.forward(q, k, v, **arguments)
    gradients = tuple(torch.empty_like(t) for t in (q, k, v))
    margin = torch.cuda.get_device_properties(0).multi_processor_count - probe.sms
    scores = dict(sinks=None, alibi_slopes=None, dsoftmax_lse=None, dsinks=None, softcap=0.0)
    number = schedule.policy_number(probe.schedule)  # the checked op accepts only the users' policies
    return lambda: torch.ops.dash_attn_C.backward(
        dout, q, k, v, out, softmax_lse, *gradients, **arguments, **scores, schedule=number, sm_margin=margin
    )


def kernel_times(library, timer: timing.CudaTimer, call, repeats: int = 12) -> dict[str, float]:
    """Returns the median microseconds of the call and of each of the backward's kernels by name, warm and with a cold
    L2, and the SM clock in MHz."""
    from torch.profiler import ProfilerActivity, profile

    ticks = latency.Ticks(library, 2 * repeats)
    marks = itertools.count()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        timing.warm_up(timer, call)
        whole = timer.times_ms(call, repeats, mark=lambda: ticks.mark(next(marks)))
    spans = collections.defaultdict(list)
    for event in recorded.events():
        for kernel in ("preprocess", "backward", "convert"):
            if f"{kernel}_kernel" in event.name:
                spans[kernel].append((event.time_range.start, event.time_range.end))
    spans = {name: sorted(found)[-repeats:] for name, found in spans.items()}
    times = {name: [end - start for start, end in found] for name, found in spans.items()}
    # The main kernel is launched early, and waits for the end of the previous one.
    times["backward"] = [end - before for (_, end), (_, before) in zip(spans["backward"], spans["preprocess"])]
    medians = {name: round(statistics.median(found), 2) for name, found in times.items()}
    clock = round(statistics.median(ticks.mhz() or [0.0]))
    return {"us": round(1e3 * statistics.median(whole), 2), "mhz": clock, **medians}


def measure(library, timer: timing.CudaTimer, call, min_time_s: float) -> dict:
    """Returns the median microseconds of a block of calls, and the SM clock in MHz."""
    ticks = latency.Ticks(library, 2 * timing.MAX_ROUNDS)
    marks = itertools.count()
    times = timing.block_ms(timer, call, min_time_s, mark=lambda: ticks.mark(next(marks)))
    return {"us": round(1e3 * statistics.median(times), 2), "mhz": round(statistics.median(ticks.mhz() or [0.0]))}


def measure_probes(library, timer, sms: int) -> list[dict]:
    rows = []
    tiles = {head_dim: schedule.tile_shape(head_dim) for head_dim in HEAD_DIMS}
    for probe in probes(sms, tiles):
        call = prepare(probe)
        rows.append({**vars(probe), **kernel_times(library, timer, call, 6)})
    return rows


def measure_kernels(library, timer) -> list[dict]:
    """Measures the kernels around the main one, over a range of sizes."""
    rows = []
    for head_dim, heads in ((64, 32), (128, 16)):
        for tokens in (512, 2048, 8192, 16384, 32768):
            shape = Shape("bf16", head_dim, heads, heads, "full", 512, tokens // 512)
            variant = peers.Variant(peers.DashAttn.name, "descending", True)
            tensors = peers.random_tensors(shape, torch.device("cuda"))
            call = peers.DashAttn().prepare(variant, shape, tensors)["backward"]
            rows.append({**shape.row(), **kernel_times(library, timer, call)})
    return rows


def measure_policies(library, timer, shape: Shape, policies, min_time_s: float) -> list[dict]:
    """Measures every policy at one shape, twice."""
    ours = peers.DashAttn(policies)
    tensors = peers.random_tensors(shape, torch.device("cuda"))
    calls = {v.schedule: ours.prepare(v, shape, tensors)["backward"] for v in ours.variants(shape)}
    both = [{name: measure(library, timer, call, min_time_s) for name, call in calls.items()} for _ in range(2)]
    rows = []
    for name in calls:
        measured = {key: [each[name][key] for each in both] for key in ("us", "mhz")}
        rows.append({**shape.row(), "schedule": name, "splits": model.tiles_of(name, shape).splits, **measured})
    return rows


def measure_grid(library, timer, grid: str, max_seqlen: int, min_time_s: float) -> list[dict]:
    ordered = [policy for policy in (*schedule.POLICIES, *schedule.YARDSTICKS) if _schedule.is_ordered(policy)]
    shapes = [shape for shape in DENSE_GRIDS[grid]() if shape.seqlen <= max_seqlen]
    return [row for shape in shapes for row in measure_policies(library, timer, shape, ordered, min_time_s)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True, help="file for the measurements")
    parser.add_argument("--grid", choices=DENSE_GRIDS, default="full", help="shapes to predict (default full)")
    parser.add_argument("--max-seqlen", type=int, default=32768, help="leave out longer sequences of the grid")
    parser.add_argument("--min-time", type=float, default=0.06, help="seconds per measurement of a variant")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: this program measures a GPU, and found none", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    run.check_schedules(["ascending"])
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    result = {"meta": {**run.metadata(device), "sms": sms}}
    started = time.monotonic()

    def part(name, measure):
        result[name] = measure()
        arguments.json.write_text(dumps(result))
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        library = latency.build(pathlib.Path(folder))
    timer = timing.CudaTimer(device)
    part("latency", lambda: latency.measure(library, sms))
    part("probes", lambda: measure_probes(library, timer, sms))
    part("kernels", lambda: measure_kernels(library, timer))
    part("grid", lambda: measure_grid(library, timer, arguments.grid, arguments.max_seqlen, arguments.min_time))
    return 0


if __name__ == "__main__":
    sys.exit(main())

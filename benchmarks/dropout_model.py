"""Measures the constants of the model of dropout's cost, and the transformer blocks that the model has to predict.

    python -m benchmarks.dropout_model --json dropout_model.json --png dropout_model.png

Microbenchmarks come first, and only they fit the model's constants: instruction rates (`instruction_rates.cu`), the
generator and GEMMs over sizes, attention of 16 heads, a GEMM and the generator on two streams, and the cost of one more
call and of a second stream. Blocks follow, forwards before backwards: each GEMM alone, attention without dropout and
with existing bits, the generator, all of them in sequence, and with the generator next to a GEMM; and torch's
FlashAttention-2, which generates its random numbers inside, with and without dropout.

The file is written after every part. Parts for which `--seconds` leaves no time are skipped, and the file lists them.
The last lines are those of `python -m dash_attn.dropout.model --measured FILE`. On a machine without a GPU, `--tiny`
runs everything at meaningless sizes.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import itertools
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator

import torch

from benchmarks import dropout_block as blocks
from benchmarks import files, run, timing
from benchmarks.shapes import Shape
from dash_attn.dropout import model
from dash_attn.dropout.model import BLOCKS, Block

SOURCE = pathlib.Path(__file__).with_name("instruction_rates.cu")
INSTRUCTIONS = ("lop3", "imad.wide", "lop3 and imad.wide", "rounds of philox")  # in the order of the source
REPEATS = 256
PART_SECONDS = 30.0  # the time limit of a part
LONG_BLOCK_S = 0.03  # a block that takes longer is measured in one turn
ROUNDS = (7, 10)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that are measured. The micro shapes differ from the blocks' shapes."""

    blocks: dict[str, Block]
    seqlens: tuple[int, ...] = (2048, 8192, 32768)
    tokens: int = 16384
    generators: tuple[tuple[int, int], ...] = ((1, 2048), (4, 4096), (16, 8192), (32, 16384))  # heads, seqlen
    gemms: tuple[blocks.Gemm, ...] = tuple(
        blocks.Gemm(16384, depth, columns)
        for depth, columns in ((3072, 3072), (5120, 5120), (3072, 12288), (10240, 5120), (5120, 20480))
    )
    attention: tuple[int, ...] = (1024, 4096, 16384)  # lengths, for 16,384 tokens and 16 heads
    pairs: tuple[tuple[blocks.Gemm, tuple[int, ...]], ...] = (  # a GEMM, and heads of the concurrent generators
        (blocks.Gemm(16384, 5120, 5120), (4, 16, 64, 160)),
        (blocks.Gemm(4096, 5120, 5120), (4, 16, 48)),
    )
    pair_seqlen: int = 16384
    small: int = 1024  # rows, depth and columns of GEMMs that show the cost of a call
    heads: int = 16


def tiny(block: Block) -> Block:
    """Returns a small block for tests without a GPU."""
    heads = 2 if block.heads == block.kv_heads else 4
    kv_heads = heads if block.heads == block.kv_heads else 2
    return dataclasses.replace(block, width=64, heads=heads, kv_heads=kv_heads, hidden=96)


TINY = Sizes(
    blocks={name: tiny(block) for name, block in BLOCKS.items()},
    seqlens=(32, 64),
    tokens=64,
    generators=((1, 64), (2, 128)),
    gemms=(blocks.Gemm(64, 32, 32), blocks.Gemm(64, 64, 96)),
    attention=(32, 64),
    pairs=((blocks.Gemm(64, 64, 64), (1, 2)),),
    pair_seqlen=64,
    small=16,
    heads=2,
)


@dataclasses.dataclass
class Bench:
    """Where and how to measure, and what failed."""

    device: torch.device
    sizes: Sizes
    p: float
    min_time_s: float
    failures: list[str] = dataclasses.field(default_factory=list)

    def ms(self, calls: dict[Hashable, timing.Call | None], turns: int = timing.TURNS) -> dict[Hashable, float]:
        """Returns the milliseconds of each call, measured in turns. A call that raises is missing and is a failure."""
        chosen = {name: call for name, call in calls.items() if call is not None}
        timings, errors = timing.measure(chosen, device=self.device, min_time_s=self.min_time_s, turns=turns)
        self.failures += [f"{name}: {type(error).__name__}: {str(error)[:200]}" for name, error in errors.items()]
        return {name: round(taken.ms, 5) for name, taken in timings.items()}

    def stream(self) -> "torch.cuda.Stream | None":
        return torch.cuda.Stream() if self.device.type == "cuda" else None


def build(folder: pathlib.Path) -> ctypes.CDLL:
    """Compiles SOURCE into a library."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    nvcc = next((found for h in homes if h and (found := shutil.which("nvcc", path=f"{h}/bin"))), shutil.which("nvcc"))
    if nvcc is None:
        raise RuntimeError(f"nvcc must be on PATH or in CUDA_HOME, to compile {SOURCE.name} for the measurement")
    library = folder / f"lib{SOURCE.stem}.so"
    command = [nvcc, "-O2", "-shared", "-Xcompiler", "-fPIC", "-arch=sm_90", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


class Ticks:
    """Time stamps on a stream, which give the SM clock between two of them."""

    def __init__(self, library: ctypes.CDLL, count: int):
        self._library, self._marks = library, torch.zeros((count, 3), dtype=torch.int64, device="cuda")

    def mark(self, index: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._library.tick(ctypes.c_void_p(self._marks.data_ptr() + 24 * index), stream)

    def mhz(self) -> list[float]:
        """Returns the clock between marks 2 i and 2 i + 1, if they ran on one SM."""
        marks = self._marks.tolist()
        pairs = zip(marks[::2], marks[1::2])
        return [1e3 * (b[0] - a[0]) / (b[1] - a[1]) for a, b in pairs if a[2] == b[2] and b[1] > a[1]]


def instructions(bench: Bench, library: ctypes.CDLL, sms: int, stream: int) -> Iterator[dict]:
    clocks, out = (torch.zeros(sms, dtype=dtype, device=bench.device) for dtype in (torch.int64, torch.int32))
    for kind, name in enumerate(INSTRUCTIONS):
        for _ in range(3):
            pointers = (ctypes.c_void_p(t.data_ptr()) for t in (clocks, out))
            if error := library.measure_rate(kind, sms, REPEATS, *pointers, ctypes.c_void_p(stream)):
                raise RuntimeError(f"measure_rate({kind}) returned CUDA error {error}")
        executed = library.rate_threads() * library.rate_instructions(kind) * REPEATS
        yield {"instruction": name, "lanes": round(executed / statistics.median(clocks.tolist()), 2)}


def generators(bench: Bench) -> Iterator[dict]:
    other = 0.1 if model.planes_of(bench.p) == 4 else 0.125
    for p, (heads, seqlen) in itertools.product((bench.p, other), bench.sizes.generators):
        made = blocks.Generator(1, heads, seqlen, p, bench.device, causal=False)
        for rounds, ms in bench.ms({rounds: made.call(rounds) for rounds in ROUNDS}).items():
            elements = heads * (-(-seqlen // 32) * 32) ** 2
            yield {"rounds": rounds, "planes": model.planes_of(p), "p": p, "elements": elements, "ms": ms}


def gemms(bench: Bench, library: ctypes.CDLL | None) -> Iterator[dict]:
    for gemm in bench.sizes.gemms:
        call = blocks.gemm_calls(gemm, bench.device)["forward"]
        ms = bench.ms({"gemm": call}).get("gemm")
        if ms is None:
            continue
        row = {**dataclasses.asdict(gemm), "flops": gemm.flops, "ms": ms}
        if library is not None:
            ticks, marks = Ticks(library, 64), itertools.count()
            timing.CudaTimer(bench.device).times_ms(call, 32, mark=lambda: ticks.mark(next(marks)))
            row["mhz"] = round(statistics.median(ticks.mhz() or [0.0]))
        yield row


def attention(bench: Bench) -> Iterator[dict]:
    sizes = bench.sizes
    for seqlen in sizes.attention:
        batch = max(1, sizes.tokens // seqlen)
        shape = Shape("bf16", 128, sizes.heads, sizes.heads, "causal", seqlen, batch, dropout_p=bench.p)
        generator = blocks.Generator(batch, sizes.heads, seqlen, bench.p, bench.device)
        calls = blocks.attention_calls(shape, generator, bench.device, bench.failures)
        pairs = batch * sizes.heads * seqlen**2 / 2
        for pass_, products in (("forward", 4), ("backward", 10)):
            ms = bench.ms({name: of_pass[pass_] for name, of_pass in calls.items()})
            yield {
                "pass": pass_, "seqlen": seqlen, "batch": batch, "heads": sizes.heads, "pairs": pairs,
                "flops": products * 128 * pairs, **{f"{name}_ms": value for name, value in ms.items()},
            }  # fmt: skip


def pairs(bench: Bench) -> Iterator[dict]:
    """Measures a GEMM and a generator alone and on two streams; `gemm_end_ms` and `generator_end_ms` are the times at
    which each of them ended."""
    side, seqlen = bench.stream(), bench.sizes.pair_seqlen
    for gemm, all_heads in bench.sizes.pairs:
        for heads in all_heads:
            product = blocks.gemm_calls(gemm, bench.device)["forward"]
            generator = blocks.Generator(1, heads, seqlen, bench.p, bench.device, causal=False)
            calls = {"gemm": product, "generator": generator.call()}
            ends = Ends(calls, bench.device)
            both = blocks.beside(ends.noted("gemm"), ends.noted("generator"), side)
            ms = bench.ms({**calls, "both": ends.begun(both)})
            shape = {**dataclasses.asdict(gemm), "elements": heads * seqlen**2}
            if {"gemm", "generator", "both"} <= ms.keys():
                yield {"where": "streams", **shape, **{f"{name}_ms": ms[name] for name in ms}, **ends.medians_ms()}


class Ends:
    """The times at which several calls within another one end, from its begin; only on a GPU."""

    def __init__(self, calls: dict[str, timing.Call], device: torch.device):
        self._calls, self._is_cuda = calls, device.type == "cuda"
        self._starts: list[torch.cuda.Event] = []
        self._ends: dict[str, list[torch.cuda.Event]] = {name: [] for name in calls}

    def _record(self, events: list) -> None:
        if self._is_cuda:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

    def begun(self, call: timing.Call) -> timing.Call:
        def noted() -> None:
            self._record(self._starts)
            call()

        return noted

    def noted(self, name: str) -> timing.Call:
        def noted() -> None:
            self._calls[name]()
            self._record(self._ends[name])

        return noted

    def medians_ms(self) -> dict[str, float]:
        if not self._is_cuda:
            return {}
        torch.cuda.synchronize()
        return {
            f"{name}_end_ms": round(statistics.median(s.elapsed_time(e) for s, e in zip(self._starts, ends)), 5)
            for name, ends in self._ends.items()
        }


def overheads(bench: Bench) -> Iterator[dict]:
    """Yields constants of the model in microseconds, under their names (`of`)."""
    size, count = bench.sizes.small, 8
    gemm = blocks.Gemm(size, size, size)
    calls = [blocks.gemm_calls(gemm, bench.device)["forward"] for _ in range(count)]
    generator = blocks.Generator(1, 1, 32, bench.p, bench.device).call()
    together = blocks.beside(calls[0], generator, bench.stream())
    ms = bench.ms({"one": calls[0], "all": blocks.in_turn(calls), "generator": generator, "beside": together})
    if {"one", "all"} <= ms.keys():
        further = 1e3 * (ms["all"] - count * ms["one"]) / (count - 1)
        yield {
            "of": "call",
            "us": round(further, 3),
            "how": f"{count} GEMMs of {size} in one stream, less {count} alone",
        }
    if {"one", "generator", "beside"} <= ms.keys():
        forked = 1e3 * (ms["beside"] - max(ms["one"], ms["generator"]))
        yield {"of": "fork", "us": round(forked, 3), "how": f"a GEMM of {size} with the bits of one block beside it"}


def rows_of(block: Block, seqlen: int, pass_: str, bench: Bench) -> dict:
    """Measures a block's forward or backward."""
    tokens = max(bench.sizes.tokens // seqlen, 1) * seqlen
    batch, device = tokens // seqlen, bench.device
    of_gemms = blocks.gemms_of(block, tokens)
    generator = blocks.Generator(batch, block.heads, seqlen, bench.p, device)
    shape = Shape("bf16", 128, block.heads, block.kv_heads, "causal", seqlen, batch, dropout_p=bench.p)
    prepared = blocks.attention_calls(shape, generator, device, bench.failures)
    attention = {name: of[pass_] for name, of in prepared.items()}
    each = {name: blocks.gemm_calls(gemm, device)[pass_] for name, gemm in of_gemms.items()}
    with_bits = attention.get("bits")
    whole = blocks.Pass(pass_, each, with_bits or (lambda: None), generator.call(), bench.stream())
    wholes = {"sequential": whole.sequential(), "overlapped": whole.overlapped()}
    flops = sum(gemm.flops for gemm in of_gemms.values()) * (2 if pass_ == "backward" else 1)
    ms = bench.ms(
        {
            **{("gemm", name): call for name, call in each.items()},
            **{("attention", name): call for name, call in attention.items()},
            **{("generator", rounds): generator.call(rounds) for rounds in ROUNDS},
            **(wholes if with_bits else {}),
        },
        turns=1 if flops / 600e12 > LONG_BLOCK_S else timing.TURNS,
    )
    row = {
        "block": block.name, "seqlen": seqlen, "tokens": tokens, "pass": pass_, "calls": whole.calls,
        "pairs": block.pairs(tokens, seqlen, True), "elements": block.generated(tokens, seqlen, True),
        "gemm_ms": {name: ms[key] for name in each if (key := ("gemm", name)) in ms},
        "generator_ms": {str(rounds): ms[key] for rounds in ROUNDS if (key := ("generator", rounds)) in ms},
    }  # fmt: skip
    names = {"plain": "attention_ms", "bits": "attention_bits_ms", "fa2": "fa2_ms", "fa2_dropout": "fa2_dropout_ms"}
    row |= {shown: ms[key] for name, shown in names.items() if (key := ("attention", name)) in ms}
    return row | {f"{name}_ms": ms[name] for name in ("sequential", "overlapped") if name in ms}


def jobs(sizes: Sizes) -> list[tuple[str, int, str]]:
    """Returns (block, length, pass) in the order of measurement: fast ones first, backwards last."""
    shapes = itertools.product(("forward", "backward"), sizes.blocks, sizes.seqlens)

    def weight(job: tuple[str, str, int]) -> tuple:
        pass_, name, seqlen = job
        block, tokens = sizes.blocks[name], max(sizes.tokens, seqlen)
        return pass_ == "backward", block.projection_flops(tokens) + block.other_flops(tokens), seqlen

    return [(name, seqlen, pass_) for pass_, name, seqlen in sorted(shapes, key=weight)]


class Late(BaseException):
    """A part exceeded its time. Not an Exception, so that the handlers of single calls do not catch it."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises Late in a body that takes longer, as soon as Python can."""

    def late(*_: object) -> None:
        raise Late(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Recording:
    """The result, which is written after every part. A failing part does not hide the others."""

    def __init__(self, path: pathlib.Path | None, meta: dict, bench: Bench, seconds: float):
        self.result: dict = {"meta": {**meta, "left_out": [], "failures": bench.failures}}
        self._path, self._bench, self._seconds, self._started = path, bench, seconds, time.monotonic()

    def part(self, name: str, told: str, measure: Callable[[], Iterator[dict]]) -> None:
        """Adds the rows that `measure` yields to the list `name`."""
        spent = time.monotonic() - self._started
        if spent > self._seconds:
            self.result["meta"]["left_out"].append(told)
            self._write()
            return
        rows = self.result.setdefault(name, [])
        try:
            with limited(PART_SECONDS):
                for row in measure():
                    rows.append(row)
        except (Exception, Late) as error:  # anything that a GPU or a baseline raises
            self._bench.failures.append(f"{told}: {type(error).__name__}: {str(error).strip()[:300]}")
            print(f"    failed: {self._bench.failures[-1]}", flush=True)
        if self._bench.device.type == "cuda":
            torch.cuda.empty_cache()
        self.result["meta"]["after"] = run.state(self._bench.device)
        self._write()
        print(f"[{time.monotonic() - self._started:5.1f} s] {told}", flush=True)

    def _write(self) -> None:
        if self._path:
            self._path.write_text(files.dumps(self.result))


def measure_all(recording: Recording, bench: Bench, folder: pathlib.Path) -> None:
    library: ctypes.CDLL | None = None
    if bench.device.type == "cuda":

        def built() -> Iterator[dict]:
            nonlocal library
            library = build(folder)
            sms = torch.cuda.get_device_properties(bench.device).multi_processor_count
            yield from instructions(bench, library, sms, torch.cuda.current_stream().cuda_stream)

        recording.part("instructions", "rates of instructions", built)
    recording.part("generator", "the generator over sizes", lambda: generators(bench))
    recording.part("gemm", "GEMMs over sizes", lambda: gemms(bench, library))
    recording.part("pairs", "GEMM and generator on two streams", lambda: pairs(bench))
    recording.part("overheads", "further calls, a second stream", lambda: overheads(bench))
    recording.part("attention", "attention of 16 heads", lambda: attention(bench))
    done: dict[tuple, dict] = {}
    for name, seqlen, pass_ in jobs(bench.sizes):
        block = bench.sizes.blocks[name]
        shape = *dataclasses.astuple(dataclasses.replace(block, name="")), seqlen, pass_

        def row_of() -> Iterator[dict]:
            if shape not in done:
                done[shape] = rows_of(block, seqlen, pass_, bench)
                yield done[shape]
            else:  # two models may share a block
                yield {**done[shape], "block": name, "measured_as": done[shape]["block"]}

        recording.part("rows", f"{name}, {seqlen}, {pass_}", row_of)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--json", type=pathlib.Path, help="file for the result, written after every part")
    result.add_argument("--png", help="draw predicted over measured times; needs matplotlib")
    result.add_argument("--p", type=float, default=0.125, help="the probability of dropping (default 1/8)")
    result.add_argument("--blocks", nargs="+", choices=list(BLOCKS), default=list(BLOCKS), metavar="NAME",
                        help=f"default: all of {', '.join(BLOCKS)}")  # fmt: skip
    result.add_argument("--seqlens", nargs="+", type=int, help="lengths of the blocks (default 2048 8192 32768)")
    result.add_argument("--seconds", type=float, default=90.0, help="start no part after this time (default 90)")
    result.add_argument("--min-time", type=float, default=0.04, help="seconds per call (default 0.04)")
    result.add_argument("--tiny", action="store_true", help="use meaningless sizes, to test the program")
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"error: --device must be available, got {arguments.device} without a CUDA device")
    if device.type != "cuda" and not arguments.tiny:
        raise SystemExit(f"error: --tiny must be given without a GPU, got --device {arguments.device}")
    if not 0 < arguments.p < 1:
        raise SystemExit(f"error: --p must be above 0 and below 1, got {arguments.p}")
    base = TINY if arguments.tiny else Sizes(blocks=BLOCKS)
    chosen = {name: base.blocks[name] for name in arguments.blocks}
    sizes = dataclasses.replace(base, blocks=chosen, seqlens=tuple(arguments.seqlens or base.seqlens))
    bench = Bench(device, sizes, arguments.p, arguments.min_time)
    meta = {**run.metadata(device), "p": arguments.p, "before": run.state(device)}
    if device.type == "cuda":
        meta["sms"] = torch.cuda.get_device_properties(device).multi_processor_count
    recording = Recording(arguments.json, meta, bench, arguments.seconds)
    with tempfile.TemporaryDirectory() as folder:
        measure_all(recording, bench, pathlib.Path(folder))
    try:
        fitted = model.fitted(recording.result, arguments.json.name if arguments.json else "this run")
        print("\n" + model.report(recording.result, fitted))
        if arguments.png:
            found = model.every(recording.result, fitted)
            model.draw_judged(arguments.png, found, model.title(recording.result))
    except Exception as error:  # failed parts may leave too little data; the measurements are in the file
        bench.failures.append(f"the report: {type(error).__name__}: {error}")
    for line in bench.failures:
        print(f"failed: {line}", flush=True)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())

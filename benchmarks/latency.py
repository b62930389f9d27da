"""The latencies of `latency.cu`: reads of another SM's word, hops of an ordered chain, bulk adds."""

import ctypes
import os
import pathlib
import shutil
import statistics
import subprocess

import torch

SOURCE = pathlib.Path(__file__).with_suffix(".cu")
TILE_BYTES = 32768  # of the dQ partial of one tile, at both head dims
WORDS, HOPS, ADDS = 256, 2048, 400
ADDED_TILES = 512  # 16 MiB, which the interleaved heads keep in L2


def build(folder: pathlib.Path, source: pathlib.Path = SOURCE) -> ctypes.CDLL:
    """Compiles a source next to this file into a library."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    nvcc = next((found for h in homes if h and (found := shutil.which("nvcc", path=f"{h}/bin"))), shutil.which("nvcc"))
    if nvcc is None:
        raise RuntimeError(f"nvcc must be on PATH or in CUDA_HOME, to compile {source.name} for the measurement")
    library = folder / f"lib{source.stem}.so"
    command = [nvcc, "-O2", "-shared", "-Xcompiler", "-fPIC", "-arch=sm_90", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def split_in_two(values: list[float]) -> float:
    """Returns the threshold that splits sorted values so that the two sides differ most and vary least."""
    values = sorted(values)
    total, count, best, threshold, left = sum(values), len(values), -1.0, values[0], 0.0
    for i in range(1, count):
        left += values[i - 1]
        between = i * (count - i) * (left / i - (total - left) / (count - i)) ** 2
        if between > best and values[i - 1] < values[i]:
            best, threshold = between, (values[i - 1] + values[i]) / 2
    return threshold


def measure(library: ctypes.CDLL, sms: int) -> dict:
    """Returns nanoseconds and clocks. Each kernel runs once to be loaded, and once for the result."""
    stream = torch.cuda.current_stream().cuda_stream
    stride = library.word_stride()
    words = torch.zeros(HOPS * stride, dtype=torch.int32, device="cuda")
    sums = torch.zeros(ADDED_TILES * TILE_BYTES // 4, dtype=torch.float32, device="cuda")

    def call(function, *arguments):
        packed = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
        if error := getattr(library, function)(*packed, ctypes.c_void_p(stream)):
            raise RuntimeError(f"{function} returned CUDA error {error}")
        torch.cuda.synchronize()

    clocks = torch.zeros((sms, WORDS), dtype=torch.int32, device="cuda")
    for _ in range(2):
        call("measure_reads", sms, words, WORDS, clocks)
    reads = clocks.flatten().tolist()
    threshold = split_in_two(reads[:: len(reads) // 4096 or 1])
    near, far = [c for c in reads if c < threshold], [c for c in reads if c >= threshold]
    result = {
        "read_clocks": {
            "near": statistics.median(near),
            "far": statistics.median(far),
            "far_share": round(len(far) / len(reads), 3),
            "least": min(reads),
            "most": max(reads),
        }
    }
    chain = {}
    ends = torch.zeros(2, dtype=torch.int64, device="cuda")
    for ctas in (2, 8, sms):
        for size in (0, TILE_BYTES):
            taken = []
            for _ in range(4):
                words.zero_()
                call("measure_chain", ctas, words, sums, HOPS, size, ends)
                start, end = ends.tolist()
                taken.append((end - start) / HOPS)
            chain[f"{ctas} CTAs, {size} bytes"] = round(statistics.median(taken[1:]), 1)
    result["hop_ns"] = chain
    adds = {}
    mean = torch.zeros(sms, dtype=torch.float32, device="cuda")
    for ctas in (1, sms):
        for period in (0, 4000):
            for _ in range(2):
                call("measure_adds", ctas, sums, ADDED_TILES, ADDS, period, mean)
            adds[f"{ctas} CTAs, every {period} clocks"] = round(mean[:ctas].mean().item(), 1)
    result["add_clocks"] = adds
    starts = torch.zeros(sms, dtype=torch.int64, device="cuda")
    for _ in range(3):
        call("measure_starts", sms, starts)
    order = sorted(starts.tolist())
    result["launch_ns"] = order[-1] - order[0]
    return result


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

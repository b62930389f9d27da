"""Kernels of csrc/ compiled for the host and run on emulated CTAs (tests/emulator): threads take turns in a random
order, and who waits for what never comes is reported. What it cannot say: whether registers are fenced before products,
what a weak memory model would let pass, or a kernel that starts before another ends; what clusters do; and how fast
anything is."""

import concurrent.futures
import os
import pathlib
import platform
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
EMULATOR = ROOT / "tests" / "emulator"
ROWS = ("64", "96", "128", "192x128", "192", "256")
# A change of the source: dQ is made of its sums by who adds last, however small a call is. That changes no bits.
ALWAYS_FINISHES = ("placement/finishing.h", "kFewestWorkTiles = 1024", "kFewestWorkTiles = 0")


def source(folder: pathlib.Path, *changes: tuple[str, str, str]) -> pathlib.Path:
    """A copy of the sources in which what is PTX is the host's. `changes`: a file in which a text, which stands there
    once, becomes another."""
    csrc = shutil.copytree(ROOT / "csrc", folder / "csrc")
    for file, before, after in changes:
        text = (csrc / file).read_text()
        assert text.count(before) == 1
        (csrc / file).write_text(text.replace(before, after))
    shutil.copytree(EMULATOR / "overlay", csrc, dirs_exist_ok=True)
    gemm = csrc / "device" / "gemm.h"
    # Empty statements that hold values in registers: of x86 here.
    gemm.write_text(gemm.read_text().replace('"+f"', '"+x"').replace('"=f"', '"=x"'))
    warp_roles = csrc / "device" / "warp_roles.h"
    text, found = re.subn(
        r"extern __shared__ (\w+) (\w+)\[\];",
        r"auto* const \2 = reinterpret_cast<\1*>(emulator::machine->shared());",
        warp_roles.read_text(),
    )
    assert found == 1
    warp_roles.write_text(text)
    return csrc


def kernel_of(call: dict[str, object]) -> str:
    """The C++ types of the one kernel that serves a call."""
    dtype = {"bf16": "BFloat16", "fp16": "Float16"}[call.get("dtype", "bf16")]
    mask = {"full": "Full", "causal": "Causal", "window": "Windowed"}[call.get("mask", "full")]
    if "columns" in call or "max_logits" in call:
        mask = "Columns"
    score = "Dropout" if "dropout" in call else "Plain"
    policy = {"shift": "Shift", "order_free": "OrderFree"}.get(call.get("schedule"), "Ordered")
    return f"{dtype},{mask},{score},{policy}"


def compiler(csrc: pathlib.Path, row: str) -> list[str | pathlib.Path]:
    """The command that compiles files of tests/emulator for a row of the table of tiles."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None or platform.machine() != "x86_64":
        pytest.skip("no C++ compiler for x86-64 is on this machine")
    # Values may be read as another type, as in CUDA. -O2 takes half as long again, and its programs are no faster.
    flags = ["-O1", "-march=native", "-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing"]
    flags += [f"-I{folder}" for folder in (EMULATOR, EMULATOR / "include", csrc)] + [f"-DEMULATED_DIMS=Dims{row}"]
    return [found, *flags, "-include", EMULATOR / "cuda_names.h"]


def build(
    csrc: pathlib.Path,
    sources: list[str | pathlib.Path],
    row: str,
    program: pathlib.Path,
    only: dict[str, object] | None = None,
) -> pathlib.Path:
    """Compiles files of tests/emulator and links them with objects; into an object where `program` is one.
    With the one kernel that serves the call `only`, which takes a fraction of the time."""
    command = compiler(csrc, row) + ["-c"] * (program.suffix == ".o")
    command += [] if only is None else [f"-DEMULATED_ONLY={kernel_of(only)}"]
    subprocess.run([*command, *(EMULATOR / name for name in sources), "-o", program], check=True)
    return program


def build_rows(
    csrc: pathlib.Path,
    sources: list[str | pathlib.Path],
    folder: pathlib.Path,
    rows: tuple[str, ...] = ROWS,
    only: dict[str, object] | None = None,
) -> dict[str, pathlib.Path]:
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = pool.map(lambda row: build(csrc, sources, row, folder / f"program_{row}", only), rows)
        return dict(zip(rows, programs))


class SharedObject:
    """The object of a file of tests/emulator, compiled once for all sources that are the same to it."""

    def __init__(self, name: str, folder: pathlib.Path) -> None:
        self.name, self.folder = name, folder
        self.objects: dict[str, pathlib.Path] = {}  # by the preprocessed text

    def of(self, csrc: pathlib.Path) -> pathlib.Path:
        preprocess = [*compiler(csrc, ROWS[0]), "-E", "-P", EMULATOR / self.name]
        text = subprocess.run(preprocess, check=True, capture_output=True, text=True).stdout
        if text not in self.objects:
            self.objects[text] = build(csrc, [self.name], ROWS[0], self.folder / f"{len(self.objects)}.o")
        return self.objects[text]


def run(program: pathlib.Path, **call) -> subprocess.CompletedProcess:
    arguments = [f"{name}={value}" for name, value in call.items()]
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=600)
    # An error of the test, and no fault of the kernel.
    if "no kernel serves this" in result.stdout:
        raise LookupError(f"{program} has no kernel for {call}")
    return result


def check(program: pathlib.Path, machines: tuple[tuple[int, int], ...], **call) -> str:
    """Right, and the same bits on every machine, which is (SMs, the order in which threads have their turns). Returns
    the bits' digest."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda machine: run(program, **call, sms=machine[0], seed=machine[1]), machines))
    for (sms, seed), result in zip(machines, results):
        assert result.returncode == 0, f"{call}, {sms} SMs, seed {seed}: {result.stdout}{result.stderr}"
    digests = {result.stdout for result in results}
    assert len(digests) == 1, call
    return digests.pop()

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


def build(csrc: pathlib.Path, sources: list[str | pathlib.Path], row: str, program: pathlib.Path) -> pathlib.Path:
    """Of files of tests/emulator and objects, for a row of the table of tiles; an object where `program` is one."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no C++ compiler for x86-64 is on this machine")
    # As CUDA compiles: values may be looked at as others.
    flags = ["-O2", "-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", "-include", EMULATOR / "cuda_names.h"]
    flags += [f"-I{folder}" for folder in (EMULATOR, EMULATOR / "include", csrc)] + [f"-DEMULATED_DIMS=Dims{row}"]
    flags += ["-c"] * (program.suffix == ".o")
    subprocess.run([compiler, *flags, *(EMULATOR / name for name in sources), "-o", program], check=True)
    return program


def build_rows(folder: pathlib.Path, sources: list[str | pathlib.Path]) -> dict[str, pathlib.Path]:
    csrc = source(folder)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = pool.map(lambda row: build(csrc, sources, row, folder / f"program_{row}"), ROWS)
        return dict(zip(ROWS, programs))


def run(program: pathlib.Path, **call) -> subprocess.CompletedProcess:
    arguments = [f"{name}={value}" for name, value in call.items()]
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=600)


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

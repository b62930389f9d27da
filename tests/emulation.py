"""Kernels of csrc/ compiled for the host and run on emulated CTAs (tests/emulator): threads take turns in a random
order, and who waits for what never comes is reported. What it cannot say: whether registers are fenced before products,
what a weak memory model would let pass, or a kernel that starts before another ends; what clusters do; and how fast
anything is."""

import concurrent.futures
import functools
import os
import pathlib
import platform
import re
import shutil
import subprocess
import tempfile
import threading

import pytest

ROOT = pathlib.Path(__file__).parents[1]
EMULATOR = ROOT / "tests" / "emulator"
ROWS = ("64", "96", "128", "192x128", "192", "256")
# The files that a program has in common for all rows of the table of tiles, by its name.
SHARED = {"forward": ["forward.cpp", "products.cpp"], "backward": ["backward.cpp", "stages.cpp", "products.cpp"]}
OBJECTS: dict[str, pathlib.Path] = {}  # of these files, by the preprocessed text
OBJECTS_FOLDER, OBJECTS_LOCK = tempfile.TemporaryDirectory(), threading.Lock()
# Hooks by which an option of a call (call.h) replaces a choice of the plans that changes no bits.
CHOICES = (
    ("launch/backward_plan.cu", "  TileGrid mean = grid;\n",
     "  if (emulator::finishes_dq) { return *emulator::finishes_dq; }\n  TileGrid mean = grid;\n"),
    ("launch/forward_plan.cu", "return a.pages.exists() ||", "return emulator::has_short_tiles || a.pages.exists() ||"),
)  # fmt: skip


def source(folder: pathlib.Path, *changes: tuple[str, str, str]) -> pathlib.Path:
    """A copy of the sources in which what is PTX is the host's. `changes`: a file in which a text, which stands there
    once, becomes another."""
    csrc = shutil.copytree(ROOT / "csrc", folder / "csrc")
    for file, before, after in (*CHOICES, *changes):
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
    """The C++ types of the one kernel that serves a call, or of those for any dtype or mask."""
    dtype = {"bf16": "BFloat16", "fp16": "Float16", "any": "BFloat16,Float16"}[call.get("dtype", "bf16")]
    masks = {"full": "Full", "causal": "Causal", "window": "Windowed", "any": "Full,Causal,Windowed"}
    mask = "Columns" if "columns" in call or "max_logits" in call else masks[call.get("mask", "full")]
    score = "Dropout" if "dropout" in call else "Plain"
    policy = {"shift": "Shift", "order_free": "OrderFree"}.get(call.get("schedule"), "Ordered")
    return f"{dtype},{mask},{score},{policy}"


def compiler(csrc: pathlib.Path, row: str) -> list[str | pathlib.Path]:
    """The command that compiles files of tests/emulator for a row of the table of tiles."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None or platform.machine() != "x86_64":
        pytest.skip("no C++ compiler for x86-64 is on this machine")
    # Values may be read as another type, as in CUDA. -O2 takes half as long again, and its programs are no faster.
    command = [found, "-O1", "-march=native", "-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing"]
    with OBJECTS_LOCK:
        precompiled(*command)
    folders = (OBJECTS_FOLDER.name, EMULATOR, EMULATOR / "include", csrc)
    names = [f"-DEMULATED_DIMS=Dims{row}", "-include", "cuda_names.h"]
    return [*command, *(f"-I{folder}" for folder in folders), *names]


@functools.cache
def precompiled(*command: str) -> None:
    """What all sources include first."""
    name = f"{OBJECTS_FOLDER.name}/cuda_names.h.gch"
    subprocess.run([*command, "-w", "-x", "c++-header", EMULATOR / "cuda_names.h", "-o", name], check=True)


def shared_object(csrc: pathlib.Path, name: str) -> pathlib.Path:
    """The object of a file of tests/emulator, compiled once for all sources that are the same to it."""
    command = [*compiler(csrc, ROWS[0]), EMULATOR / name]
    text = subprocess.run([*command, "-E", "-P"], check=True, capture_output=True, text=True).stdout
    with OBJECTS_LOCK:
        if text not in OBJECTS:
            found = pathlib.Path(OBJECTS_FOLDER.name) / f"{len(OBJECTS)}.o"
            subprocess.run([*command, "-c", "-o", found], check=True)
            OBJECTS[text] = found
        return OBJECTS[text]


def build(
    csrc: pathlib.Path,
    name: str,
    row: str,
    program: pathlib.Path,
    only: dict[str, object] | None = None,
) -> pathlib.Path:
    """Builds the program "forward" or "backward" with the kernels of one row of the table of tiles, or only those that
    serve the call `only`, which takes a fraction of the time."""
    command = [*compiler(csrc, row), *([] if only is None else [f"-DEMULATED_ONLY={kernel_of(only)}"])]
    files = [EMULATOR / f"{name}_kernels.cpp", *(shared_object(csrc, file) for file in SHARED[name])]
    subprocess.run([*command, *files, "-o", program], check=True)
    return program


def build_rows(
    csrc: pathlib.Path,
    name: str,
    folder: pathlib.Path,
    rows: tuple[str, ...] = ROWS,
    only: dict[str, object] | None = None,
) -> dict[str, pathlib.Path]:
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = pool.map(lambda row: build(csrc, name, row, folder / f"{name}_{row}", only), rows)
        return dict(zip(rows, programs))


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
    sms, seeds = (",".join(map(str, numbers)) for numbers in zip(*machines))
    result = run(program, **call, sms=sms, seed=seeds)
    assert result.returncode == 0, f"{call}: {result.stdout}{result.stderr}"
    return result.stdout

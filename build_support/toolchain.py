"""Finds the CUDA compiler and what the extensions link with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


def find_cuda_home() -> Path | None:
    """Root of the CUDA toolkit: CUDA_HOME, the nvcc on PATH (which may be a wrapper), or /usr/local/cuda."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    if nvcc:
        dryrun = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True)
        top = re.search(r"^#\$ TOP=(.+)$", dryrun.stderr + dryrun.stdout, re.MULTILINE)
        candidates.append(top.group(1) if top else str(Path(nvcc).resolve().parent.parent))
    candidates.append("/usr/local/cuda")
    for candidate in candidates:
        if candidate and (Path(candidate) / "bin" / "nvcc").is_file():
            return Path(candidate).resolve()
    return None


def nvcc_release(cuda_home: Path) -> str:
    """nvcc's release, such as '13.0'."""
    text = subprocess.run([cuda_home / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    if match is None:
        raise SystemExit(f"{cuda_home}/bin/nvcc --version states no release:\n{text}")
    return match.group(1)


def torch_cuda_library_dir(torch_lib: Path, work: Path, compiler: str) -> Path:
    """Directory with a libtorch_cuda.so to link with.

    A CPU torch has none. _C must name it as needed all the same, because a CUDA torch defines the current stream
    there, so an empty library of that name takes its place at link time; it is never loaded.
    """
    if (torch_lib / "libtorch_cuda.so").is_file():
        return torch_lib
    stub = work / "libtorch_cuda.so"
    if not stub.is_file():
        work.mkdir(parents=True, exist_ok=True)
        flags = ["-shared", "-x", "c", os.devnull, "-Wl,-soname,libtorch_cuda.so", "-o", str(stub)]
        subprocess.run([compiler, *flags], check=True)
    return work


def default_jobs() -> int:
    """Compilations at once: the processors this process may use, at about 4 GB of memory each."""
    processors = len(os.sched_getaffinity(0))
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return processors
    return max(1, min(processors, memory // (4 << 30)))


def put_ninja_on_path() -> bool:
    """Whether ninja can be run; a ninja package of this Python counts though its scripts are not on PATH."""
    if shutil.which("ninja"):
        return True
    directories = [Path(sys.executable).parent]
    try:
        import ninja

        directories.append(Path(ninja.BIN_DIR))
    except ImportError:
        pass
    for directory in directories:
        if (directory / "ninja").is_file():
            os.environ["PATH"] = f"{directory}{os.pathsep}{os.environ.get('PATH', '')}"
            return True
    return False

"""Finds what the extensions are compiled with, says clearly what is missing, and holds the compilers' flags."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Older releases lack functions of the runtime that the launches call. What was tried is in docs/install.md.
OLDEST_CUDA = "12.5"
# With an older one, ptxas gives up the overlap of products in some kernels, which are slower then.
FULL_SPEED_CUDA = "13.0"


def required_version(package: str) -> str:
    """The version of a build requirement that pyproject.toml states, such as '2.11' for torch."""
    match = re.search(rf'"{package}[=>]=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    if match is None:
        raise ValueError(f"pyproject.toml states no version of {package}")
    return match.group(1)


def release(version: str) -> tuple[int, ...]:
    """'2.11.0+cu130' as (2, 11)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


OLDEST_TORCH = required_version("torch")

# The stable ABI of the oldest torch, so that one binary serves it and every later one.
_TARGET = "0x{:02x}{:02x}000000000000".format(*release(OLDEST_TORCH))
STABLE_ABI = ["-std=c++17", "-DNDEBUG", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={_TARGET}"]
OPS_CXX = ["-O3", *STABLE_ABI, "-g0", "-Wall", "-fvisibility=hidden"]
OPS_NVCC = [
    "-O3",
    *STABLE_ABI,
    "-gencode=arch=compute_90a,code=sm_90a",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fvisibility=hidden",
]
# The newest torch's own C++ API needs C++20.
AUTOGRAD_CXX = ["-O2", "-std=c++20", "-g0", "-Wall", "-fvisibility=hidden"]
SCHEDULE_CXX = ["-O2", "-std=c++17", "-g0", "-Wall", "-fvisibility=hidden"]
BINDINGS = {
    "torch_ops.cpp": OPS_CXX,
    "cache_ops.cpp": OPS_CXX,
    "dropout_ops.cpp": OPS_CXX,
    "fingerprint_ops.cpp": OPS_CXX,
    "autograd.cpp": AUTOGRAD_CXX,
    "fingerprint.cpp": AUTOGRAD_CXX,
    "schedule_module.cpp": SCHEDULE_CXX,
}


def check_setuptools(version: str) -> None:
    """Ends the build where setuptools cannot read pyproject.toml; it would say so in a way that helps nobody."""
    oldest = required_version("setuptools")
    if release(version) < release(oldest):
        raise SystemExit(
            f"building dash_attn needs setuptools {oldest} or newer, got {version}: pip install -U setuptools"
        )


def check_torch(version: str) -> None:
    """Ends the build where torch is older than the oldest that the sources compile with."""
    if release(version) < release(OLDEST_TORCH):
        raise SystemExit(
            f"dash_attn needs torch {OLDEST_TORCH} or newer, this Python ({sys.executable}) has {version}: "
            f"pip install 'torch>={OLDEST_TORCH}'"
        )


def check_cuda(nvcc: str, torch: str | None) -> None:
    """Ends the build where nvcc's release is too old or is not of torch's CUDA (None for a CPU torch)."""
    if release(nvcc) < release(OLDEST_CUDA):
        raise SystemExit(f"nvcc is of CUDA {nvcc}; the kernels need {OLDEST_CUDA} or newer (docs/install.md)")
    if torch is not None and release(nvcc)[0] != release(torch)[0]:
        raise SystemExit(
            f"nvcc is of CUDA {nvcc}, torch of CUDA {torch}: the major versions must agree "
            "(CUDA_HOME chooses the toolkit)"
        )
    if release(nvcc) < release(FULL_SPEED_CUDA):
        slower = f"some kernels that CUDA {nvcc} compiles are slower than those of {FULL_SPEED_CUDA}"
        print(f"dash_attn: {slower} (docs/install.md)", flush=True)


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


def cudart(cuda_home: Path) -> tuple[Path, str]:
    """The folder of the shared libcudart and what to link with; a toolkit from PyPI has it under its soname alone.

    It is shared, not static: torch has loaded the library of this soname before ours, so the device guard, the stream
    and the kernels meet one runtime.
    """
    for folder in (cuda_home / "lib64", cuda_home / "lib"):
        if (folder / "libcudart.so").is_file():
            return folder, "cudart"
        if found := sorted(folder.glob("libcudart.so.[0-9]*")):
            return folder, f":{found[0].name}"
    raise SystemExit(f"CUDA_HOME must have libcudart.so in lib64 or lib, got {cuda_home} (docs/install.md)")


def stub_library(name: str, folder: Path, compiler: str) -> Path:
    """An empty library to link with, which is never loaded: one of that name takes its place."""
    stub = folder / name
    if not stub.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        flags = ["-shared", "-x", "c", os.devnull, f"-Wl,-soname,{name}", "-o", str(stub)]
        subprocess.run([*shlex.split(compiler), *flags], check=True)
    return stub


def torch_cuda_library_dir(torch_lib: Path, work: Path, compiler: str) -> Path:
    """Directory with a libtorch_cuda.so to link with.

    A CPU torch has none. _C must name it as needed all the same, because a CUDA torch defines the current stream there.
    """
    if (torch_lib / "libtorch_cuda.so").is_file():
        return torch_lib
    return stub_library("libtorch_cuda.so", work, compiler).parent


def shared_libstdcxx(compiler: str) -> list[str]:
    """What to link with so that an extension shares the libstdc++ of torch.

    Some Pythons link with -static-libstdc++, and some machines have the static library alone to link with. Streams of a
    second libstdc++ in the process crash when they write a number, such as that of an error message.
    """
    name = "libstdc++.so.6"
    command = [*shlex.split(compiler), f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return [found] if found not in ("", name) else []


def default_jobs() -> int:
    """Compilations at once: the processors this process may use, at about 4 GB of memory each."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // (4 << 30)))


def put_ninja_on_path() -> bool:
    """Whether ninja can be run; a ninja package of this Python counts though its scripts are not on PATH."""
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is not None:
        import ninja

        folders = [ninja.BIN_DIR, str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        os.environ["PATH"] = os.pathsep.join(folders)
    return shutil.which("ninja") is not None

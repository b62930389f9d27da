"""Compiles the two libraries that fit one version alone for other versions than those of this Python.

`_autograd` uses torch's C++ API and fits one minor version of torch; `_schedule` uses pybind11 and fits one version of
Python. Both are small, so that one wheel holds them for every supported version (tools/build_wheel.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import check_torch_headers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_support"))

import identity  # noqa: E402
import toolchain  # noqa: E402

_COMPILER = os.environ.get("CXX", "c++")
_SHARED = ["-DNDEBUG", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}"]
_ASK = "import json, sysconfig as s; print(json.dumps([s.get_path('include'), s.get_config_var('EXT_SUFFIX')]))"


def _compile(target: Path, sources: list[Path], flags: list[str]) -> Path:
    subprocess.run([_COMPILER, *flags, *map(str, sources), "-o", str(target)], check=True)
    print(target.name, flush=True)
    return target


def autograd(torch: str, folder: Path) -> Path:
    """`_autograd` for a version of torch, such as 2.11.0, from the headers that its wheel on the index has.

    Raises:
        check_torch_headers.NotToBeHad: the index does not have them.
    """
    include = check_torch_headers.headers(torch)
    folders = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]
    stubs = [toolchain.stub_library(name, folder / "stub", _COMPILER) for name in ("libc10.so", "libtorch_cpu.so")]
    origin = identity.write(ROOT, folder / torch, torch)
    names = [name for name, flags in toolchain.BINDINGS.items() if flags is toolchain.AUTOGRAD_CXX]
    release = ".".join(map(str, toolchain.release(torch)))
    return _compile(
        folder / f"_autograd_torch{release}.so",
        [*(ROOT / "csrc" / "bindings" / name for name in names), origin, *stubs],
        [*toolchain.AUTOGRAD_CXX, *_SHARED, *(f"-isystem{path}" for path in folders), "-Wl,--no-as-needed"],
    )


def schedule(python: str, folder: Path) -> Path:
    """`_schedule` for a Python, which is a program."""
    import pybind11

    asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=True).stdout
    include, suffix = json.loads(asked)
    return _compile(
        folder / f"_schedule{suffix}",
        [ROOT / "csrc" / "bindings" / "schedule_module.cpp", identity.write(ROOT, folder, "any")],
        [*toolchain.SCHEDULE_CXX, *_SHARED, f"-isystem{include}", f"-isystem{pybind11.get_include()}"],
    )

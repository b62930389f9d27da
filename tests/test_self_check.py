"""What the self-check of a device says of its kernel's results; tests/gpu/test_self_check_on_gpu.py runs the kernel."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SUMS, READ, WRITTEN = "does not keep subnormal numbers", "a TMA load does not clip", "a TMA store does not clip"


@pytest.fixture(scope="module")
def problem_of(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    program = tmp_path_factory.mktemp("self_check") / "program"
    source = ROOT / "tests" / "self_check_on_host.cpp"
    subprocess.run([compiler, "-std=c++17", f"-I{ROOT / 'csrc'}", source, "-o", program], check=True)
    return lambda *wrong: subprocess.check_output([program, *map(str, wrong)], text=True)


def test_a_device_that_does_what_is_needed(problem_of):
    assert problem_of("sums", 0, 0) == ""


@pytest.mark.parametrize("facts, places, message", [("sums", 4, SUMS), ("read", 8, READ), ("written", 16, WRITTEN)])
def test_every_fact_counts(problem_of, facts, places, message):
    assert all(message in problem_of(facts, place, 1) for place in range(places))

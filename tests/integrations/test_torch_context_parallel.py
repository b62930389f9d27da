"""PyTorch's context parallelism with dash_attn in each process; they talk by gloo."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import dash_attn.integrations.torch as door

pytest.importorskip("torch.distributed.tensor.experimental._context_parallel", exc_type=ImportError)
if not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

import torch_context_parallel_support as support  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]
SEQLEN = 64


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return support.runs(tmp_path_factory, "cpu", SEQLEN)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("case", range(len(support.CASES)), ids=map(str, support.CASES))
def test_processes(results, case, processes):
    support.check(results(processes), case, SEQLEN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, script, arguments, words",
    [
        ([], "torch_sdpa.py", ["--steps", "2", "--seqlen", "16"], "dash_attn: .* the same bits in both runs"),
        (["-m", "torch.distributed.run", "--nproc-per-node", "2"], "context_parallel.py", ["--seqlen", "32"],
         "2 processes on cpu, 32 tokens\nsame bits in both runs: True"),
    ],
    ids=["torch_sdpa", "context_parallel"],
)  # fmt: skip
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the examples are larger")
def test_examples(launcher, script, arguments, words):
    command = [sys.executable, *launcher, str(ROOT / "examples" / script), *arguments]
    package = str(pathlib.Path(door.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(words, done.stdout), done.stdout

"""Groups that are a part of the job, gradients that only some ranks ask for, what is refused; the example."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest
from rank_processes import run_ranks

import dash_attn

ROOT = pathlib.Path(__file__).parents[1]
NAMES = (
    "in a part of the job",
    "a gradient of the log-sum-exp on one rank",
    "only some gradients",
    "a rank that is given nothing",
    "no second differentiation",
    "a checkpoint",
    "saved tensors elsewhere",
    "lazy negatives",
    "transforms",
    "slopes with a gradient",
    "a mesh of one row",
    "three dimensions",
    "a part of a mesh",
    "a mesh",
    "a layout",
    "a flag",
    "checks of one process",
    "one value in other words",
    "no gradients",
    "groups end when they are destroyed",
)


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    @functools.cache
    def run():
        logs = run_ranks("context_parallel_edges.py", 3, tmp_path_factory.mktemp("edges"))
        return [json.loads(log.splitlines()[-1]) for log in logs]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_holds_on_every_rank(held, name):
    assert held()[0].keys() == set(NAMES)
    assert [of_rank[name] for of_rank in held()] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_calls_that_are_repeated(tmp_path, ranks):
    """What tests/gpu does under load: context parallelism in both layouts, and parts of the heads."""
    for log in run_ranks("context_parallel_load.py", ranks, tmp_path, "512", "2"):
        counts = json.loads(log.splitlines()[-1])
        assert len(counts) == (4 if ranks == 1 else 5)
        assert all(set(of_call.values()) == {0} for of_call in counts.values()), counts


@pytest.mark.slow
def test_the_example_by_torchrun():
    package = pathlib.Path(dash_attn.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples/context_parallel_ulysses.py"), "--seqlen", "300"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("out yes, softmax_lse yes, dq yes, dk yes, dv yes") == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["context_parallel.py", "context_parallel_ulysses.py"])
def test_an_example_without_torchrun(name):
    environment = {key: x for key, x in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(pathlib.Path(dash_attn.__file__).parents[1])}
    done = subprocess.run([sys.executable, ROOT / "examples" / name], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"start this example with torchrun: torchrun --nproc-per-node 2 examples/{name}\n"

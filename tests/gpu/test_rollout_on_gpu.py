"""examples/rollout.py on a GPU: with Megatron's batch-invariant products, every ratio of the policies is 1.0."""

import pathlib
import subprocess
import sys

import pytest

ROLLOUT = pathlib.Path(__file__).parents[2] / "examples" / "rollout.py"


def test_rollout(tmp_path):
    pytest.importorskip("megatron.core")
    pytest.importorskip("triton")
    command = [sys.executable, str(ROLLOUT), "--folder", str(tmp_path), "--products", "megatron"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("training with dash_attn: 0 ratios differ from 1.0, by up to 0\n") == 2
    assert "step 0 on cuda with products megatron" in done.stdout

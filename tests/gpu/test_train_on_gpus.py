"""examples/train.py on GPUs: a run repeats, killed and resumed too, and another attention's parts, on every layout that
this machine has the GPUs for."""

import pathlib
import subprocess
import sys

import pytest
import torch

PROOF = pathlib.Path(__file__).parents[2] / "examples" / "train_proof.py"
SIZES = ["--layers", "4", "--seqlen", "2048", "--receipts-every", "1", "--timeout", "120"]
JOBS = 4  # at a time: starting a process takes longer than its steps


@pytest.mark.alone
def test_training_repeats(tmp_path):
    layouts = [name for name, gpus in (("1", 1), ("2", 2), ("2c2", 2), ("4c2", 4)) if gpus <= torch.cuda.device_count()]
    command = [sys.executable, str(PROOF), "--out", str(tmp_path / "proof"), "--layouts", *layouts]
    command += ["--jobs", str(JOBS), *SIZES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("yes ") == 3 * len(layouts)

"""vLLM's engine with dash_attn as its attention backend, where a vLLM for CPUs is installed."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

PROGRAM = pathlib.Path(__file__).parent / "vllm_program.py"
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(model)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_sequence_has_the_log_probabilities_that_it_has_alone(found):
    assert [x["shared"] for x in found["together"]] == [0, 0, 0, 64, 32]
    assert found["batch sizes"] == [1, 4]
    for together, alone in zip(found["together"], found["alone"], strict=True):
        assert alone["shared"] == 0 and together["tokens"] == alone["tokens"]
        assert together["log_probabilities"] == alone["log_probabilities"]


def test_log_probabilities_of_a_rollout_are_those_of_a_pack(found):
    assert found["pack"] == [x["log_probabilities"] for x in found["together"]]


def test_a_pack_has_the_bits_of_training(found):
    """Of attention, in every layer."""
    assert found["sequences of a pack"] == [4, 4, 1, 1] and found["training"] == [True] * 4

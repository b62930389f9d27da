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


# A model and the rows of a step: mistral has windows, and with 64 rows prompts take several steps.
@pytest.fixture(scope="module", params=["llama 512", "mistral 512", "mistral 64"])
def found(tmp_path_factory, request):
    model = tmp_path_factory.mktemp("model")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(PROGRAM), str(model), *request.param.split()]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"in one step": request.param.endswith(" 512")}


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
    assert found["sequences of a pack"] == ([4, 4, 1, 1] if found["in one step"] else [1, 1])
    assert found["training"] == [True] * len(found["training"])

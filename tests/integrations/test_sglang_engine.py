"""SGLang's engine with dash_attn as its attention backend, where an SGLang that runs on CPUs is installed."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)
tomllib = pytest.importorskip("tomllib")

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
GROUP = "sglang.srt.plugins"
LAYERS, NEW = 2, 12
PROMPTS, SHARED = (70, 5, 40, 68, 35), (64, 0, 32, 64, 32)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ("model", "records", "installed")}
    # As an installed package states its entry points.
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    lines = [f"{name} = {place}" for name, place in (stated | {"recorder": "sglang_recorder:register"}).items()]
    info = folders["installed"] / "dash_attn-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dash-attn\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    path = [str(folders["installed"]), str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(path), "DASH_ATTN_TEST_RECORDS": str(folders["records"])}
    command = [sys.executable, str(HERE / "sglang_program.py"), str(folders["model"])]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_sequence_has_the_log_probabilities_of_another_batch(found):
    together = found["together"]
    assert [x["shared"] for x in together] == [*SHARED]
    assert [x["number"] for x in found["pairs"]] == [0, 1, 2, 3, 4, 0]
    for x in found["pairs"]:
        assert x["shared"] == 0 and len(x["log_probabilities"]) == NEW
        assert [together[x["number"]][name] for name in ("tokens", "log_probabilities")] == [
            x["tokens"], x["log_probabilities"]
        ]  # fmt: skip


def test_every_row_of_attention_has_the_bits_of_training(found):
    """Those of prompts and decoding are those of a pack, which the function for training returns too."""
    assert found["sequences of a pack"] == [5] * LAYERS and found["training"] == [True] * LAYERS
    whole = LAYERS * (sum(PROMPTS) + len(PROMPTS) * (NEW - 1))
    assert found["equal"] == found["rows"] == {"together": whole - LAYERS * sum(SHARED), "pair": whole}

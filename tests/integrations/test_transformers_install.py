"""How transformers comes to know dash_attn, and what is said where it cannot."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("kernels")

import importlib.metadata

import transformers
from transformers_support import make_model, random_ids

import dash_attn
from dash_attn.integrations.transformers import NAME, install, uninstall

FOLDER = pathlib.Path(dash_attn.__file__).parent / "integrations" / "transformers_kernel"
ENTRY = f"{NAME}={FOLDER}"
# A process of its own, in which a connection to anything is an error.
OFFLINE = """
import socket
def connect(*arguments):
    raise AssertionError(f"a connection: {arguments}")
socket.socket.connect = socket.getaddrinfo = connect
import sys
sys.path[:0] = sys.argv[1:]
"""
TRAIN = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from dash_attn.integrations.transformers import install
config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = AutoModelForCausalLM.from_config(config, attn_implementation=install(), dtype=torch.bfloat16)
ids = torch.arange(9)[None]
model(ids, labels=ids).loss.backward()
assert model.config._attn_implementation == "dash-attn/flash"
assert not (model.model.layers[0].self_attn.q_proj.weight.grad == 0).all()
print("trained")
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    yield
    uninstall()


def run(code, **environment):
    root = pathlib.Path(dash_attn.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-c", OFFLINE + code, str(root)],
        env={**os.environ, **environment}, cwd="/", capture_output=True, text=True,
    )  # fmt: skip


def test_needs_no_network(tmp_path):
    process = run(TRAIN, HF_HOME=str(tmp_path / "none"))
    assert process.returncode == 0 and "trained" in process.stdout, process.stderr
    assert not (tmp_path / "none").exists()


def test_the_environment_reaches_other_processes():
    install()
    process = run(TRAIN.replace("attn_implementation=install()", f"attn_implementation={NAME!r}"))
    assert process.returncode == 0 and "trained" in process.stdout, process.stderr


def test_install_and_uninstall():
    check = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    assert install() == NAME == install()
    assert os.environ["LOCAL_KERNELS"] == ENTRY
    uninstall()
    assert "LOCAL_KERNELS" not in os.environ
    assert transformers.PreTrainedModel._check_and_adjust_attn_implementation is check
    uninstall()


@pytest.mark.parametrize("others", ["a/b=/somewhere", "a/b=/somewhere:c/d=/else where"])
def test_entries_of_others_stay(others, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", others)
    install()
    install()
    assert os.environ["LOCAL_KERNELS"] == f"{others}:{ENTRY}"
    uninstall()
    assert os.environ["LOCAL_KERNELS"] == others


def test_another_folder_of_the_name_raises(monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"{NAME}=/somewhere")
    with pytest.raises(ValueError, match=f"^LOCAL_KERNELS must map {NAME} to {FOLDER} or leave it out, got .*where$"):
        install()
    assert os.environ["LOCAL_KERNELS"] == f"{NAME}=/somewhere"


def test_a_folder_that_cannot_be_named_raises(monkeypatch):
    monkeypatch.setattr("dash_attn.integrations.transformers._FOLDER", pathlib.Path("/a:b"))
    with pytest.raises(ValueError, match="^LOCAL_KERNELS cannot hold a folder with a colon in its path, got /a:b$"):
        install()


def test_missing_transformers_raises():
    process = run("sys.modules['transformers'] = None\nfrom dash_attn.integrations.transformers import *\ninstall()")
    assert "ImportError: dash-attn/flash needs transformers: pip install 'transformers>=5.16'" in process.stderr


@pytest.mark.parametrize("installed", [None, "0.15.0", "99.0"])
def test_other_kernels_raise(installed, monkeypatch):
    def version(name, actual=importlib.metadata.version):
        if name != "kernels":
            return actual(name)
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    message = f"^transformers .* loads {NAME} through kernels and needs version .*, below .*, got {installed or 'none'}"
    with pytest.raises(ImportError, match=message):
        install()
    assert "LOCAL_KERNELS" not in os.environ


def test_old_transformers_raise(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.15.1")
    with pytest.raises(ImportError, match=f"^{NAME} needs transformers 5.16 or newer, got 5.15.1$"):
        install()


def test_unknown_transformers_raise(monkeypatch):
    monkeypatch.delattr(transformers.PreTrainedModel, "_check_and_adjust_attn_implementation")
    with pytest.raises(ImportError, match=f"^{NAME} does not support transformers "):
        install()


def test_models_that_list_other_implementations():
    """Those of a list without flash attention that has sinks need something else of it: no kernel takes its place."""
    install()
    listing = type("Listing", (transformers.LlamaForCausalLM,), {"_compatible_flash_implementations": ["some/sparse"]})
    config = make_model("llama", "eager").config
    config._attn_implementation = NAME
    with pytest.raises(ValueError, match=r"^attn_implementation must be one of \['some/sparse'\] for Listing, got "):
        listing(config)


def test_models_with_sinks_change_no_class():
    listed = list(transformers.GptOssForCausalLM._compatible_flash_implementations)
    install()
    model = make_model("gpt_oss", NAME)
    assert model.config._attn_implementation == NAME
    assert transformers.GptOssForCausalLM._compatible_flash_implementations == listed


def test_models_without_flash_attention_raise():
    install()
    config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="^attn_implementation must not be .* T5Model, which has no flash attention"):
        transformers.AutoModel.from_config(config, attn_implementation=NAME)


def test_an_implementation_chosen_later():
    install()
    model = make_model("gpt_oss", "eager")
    model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == NAME
    model(random_ids(1, 5)).logits.sum().backward()


def test_example():
    root = pathlib.Path(__file__).parents[2]
    if not (root / "examples").is_dir():
        pytest.skip("the examples are not beside the tests")
    path = str(pathlib.Path(dash_attn.__file__).parents[1])
    process = subprocess.run(
        [sys.executable, "examples/train_transformers.py", "--steps", "2"],
        env={**os.environ, "PYTHONPATH": path}, cwd=root, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("the second run has the same bytes in every loss and weight: yes\n")

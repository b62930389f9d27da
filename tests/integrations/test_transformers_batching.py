"""Continuous batching of transformers: the log-probabilities of its rollouts have the bits of a training pack."""

import contextlib
import types

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("kernels")

from batching_support import NEW, batches_of_paged_calls, by_rows, check_against_a_pack, generate
from transformers.generation.continuous_batching import initialization
from transformers.utils.generic import is_flash_attention_requested
from transformers_support import CONFIGS, LAYERS, make_model
from transformers_support import installed as installed  # an autouse fixture

from dash_attn.integrations.transformers import NAME, install, uninstall


@contextlib.contextmanager
def on_a_gpu(monkeypatch):
    """Lets transformers give attention tables of pages, as only on a GPU. Yields the batch sizes of such calls."""
    with monkeypatch.context() as patch:
        decide = initialization.ensure_decode_fast_path_is_available

        def decided(*args):
            with pytest.MonkeyPatch.context() as cuda:
                cuda.setattr(torch.cuda, "is_available", lambda: True)
                decide(*args)

        patch.setattr(initialization, "ensure_decode_fast_path_is_available", decided)
        yield batches_of_paged_calls(patch)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_keys(name):
    model = make_model(name, NAME).eval()
    counts = by_rows(model)
    outputs = generate(model)
    rows = sum(len(x.prompt_ids) + NEW - 1 for x in outputs)
    # Two pages of the last prompt are the first prompt's, except where a layer has a window.
    assert sum(counts) == (rows - 32 if name == "llama" else rows)
    check_against_a_pack(model, outputs)


def test_paged_keys(monkeypatch):
    model = make_model("llama", NAME).eval()
    by_rows(model)
    with on_a_gpu(monkeypatch) as batches:
        outputs = generate(model)
    # Steps in which every sequence decodes one token read pages.
    assert len(batches) >= LAYERS * (NEW - 2) and max(batches) == 4
    check_against_a_pack(model, outputs)


def test_only_dash_attn_gets_another_answer():
    asked = initialization.is_flash_attention_requested
    assert asked(types.SimpleNamespace(_attn_implementation=NAME), version=[2, 3])
    assert asked(requested_attention_implementation="flash_attention_2", version=2)
    assert not asked(requested_attention_implementation="flash_attention_4", version=[2, 3])
    assert not asked(requested_attention_implementation="sdpa")
    install()
    assert initialization.is_flash_attention_requested is asked
    uninstall()
    assert initialization.is_flash_attention_requested is is_flash_attention_requested

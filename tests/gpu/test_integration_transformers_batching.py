"""Continuous batching of transformers on a GPU: decoding reads pages, with the bits of training."""

import pathlib
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("kernels")

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "integrations"))

from batching_support import NEW, batches_of_paged_calls, by_rows, check_against_a_pack, generate
from transformers_support import LAYERS, make_model
from transformers_support import installed as installed  # an autouse fixture

from dash_attn.integrations.transformers import NAME


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_decoding_reads_pages(monkeypatch, use_cuda_graph):
    model = make_model("llama", NAME, device="cuda").eval()
    by_rows(model)
    batches = batches_of_paged_calls(monkeypatch)
    outputs = generate(model, use_cuda_graph=use_cuda_graph)
    if not use_cuda_graph:
        assert len(batches) >= LAYERS * (NEW - 2) and max(batches) == 4
    assert batches
    check_against_a_pack(model, outputs)


def test_window_layers_read_packed_keys():
    model = make_model("gemma2", NAME, device="cuda").eval()
    by_rows(model)
    check_against_a_pack(model, generate(model))

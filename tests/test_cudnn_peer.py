"""How cuDNN's deterministic backward is asked for, with a cuDNN that only takes notes."""

import math
import sys
import types

import pytest
import torch

from benchmarks import peers
from benchmarks.shapes import Shape


class Output:
    def set_output(self, wanted):
        self.is_output = wanted
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self


class Graph:
    made: list["Graph"] = []

    def __init__(self, **options):
        self.options, self.steps = options, []
        self.made.append(self)

    def tensor_like(self, x):
        return ("like", x)

    def sdpa_backward(self, **arguments):
        self.arguments, self.outputs = arguments, (Output(), Output(), Output())
        return self.outputs

    def get_workspace_size(self):
        return 48

    def execute(self, places, workspace, handle):
        self.places, self.workspace, self.handle = places, workspace, handle
        for number, output in enumerate(self.outputs):
            places[output].fill_(number)

    def __getattr__(self, step):
        return lambda *_: self.steps.append(step)


@pytest.fixture
def cudnn(monkeypatch):
    fake = types.SimpleNamespace(
        create_handle=lambda: "handle",
        set_stream=lambda handle, stream: None,
        data_type=types.SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32"),
        heur_mode=types.SimpleNamespace(A="A"),
        pygraph=Graph,
    )
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(Graph, "made", [])
    return fake


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_graph_is_of_a_deterministic_backward(cudnn, mask, monkeypatch):
    shape = Shape("bf16", 64, 4, 2, mask, 96, 3)
    x = peers.random_tensors(shape, torch.device("cpu"))
    out, lse = torch.zeros_like(x.q).transpose(1, 2), torch.zeros(3, 4, 96, 1)
    forwards = []

    def forward(*arguments, scale):
        forwards.append((arguments[6], scale))
        return out, lse, None

    aten = types.SimpleNamespace(_scaled_dot_product_cudnn_attention=forward)
    monkeypatch.setattr(peers.torch, "ops", types.SimpleNamespace(aten=aten))
    peer = peers.CudnnDeterministic()
    (variant,) = peer.variants(shape)
    assert variant == peers.Variant("cudnn", None, True)
    calls = peer.prepare(variant, shape, x)
    assert list(calls) == ["backward"] and forwards == [(mask == "causal", 1 / math.sqrt(64))]
    results = calls["backward"]()
    (graph,) = Graph.made
    arguments = graph.arguments
    assert arguments["use_deterministic_algorithm"] is True and arguments["use_causal_mask"] is (mask == "causal")
    assert arguments["attn_scale"] == 1 / math.sqrt(64) and graph.options["io_data_type"] == "bf16"
    given = {name: arguments[name][1].shape for name in ("q", "k", "v", "o", "dO", "stats")}
    of_queries, of_keys = (3, 4, 96, 64), (3, 2, 96, 64)
    assert given == dict(q=of_queries, k=of_keys, v=of_keys, o=of_queries, dO=of_queries, stats=(3, 4, 96, 1))
    assert [output.dim for output in graph.outputs] == [list(of_queries), list(of_keys), list(of_keys)]
    for output, like in zip(graph.outputs, (x.q, x.k, x.v)):
        assert output.is_output is True and output.stride == list(like.transpose(1, 2).stride())
    steps = ["validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"]
    assert graph.steps == steps and graph.workspace.numel() == 48 and graph.handle == "handle"
    assert len(graph.places) == 6 + 3
    assert [r.shape for r in results] == [x.q.shape, x.k.shape, x.v.shape] and [r.max() for r in results] == [0, 1, 2]


def test_what_it_does_not_take(monkeypatch):
    peer, shape = peers.CudnnDeterministic(), Shape("bf16", 64, 4, 2, "causal", 96, 3)
    for options in (dict(dropout_p=0.1), dict(scores="alibi"), dict(mask="window", window=(8, 0))):
        assert peer.variants(Shape(**{**vars(shape), **options})) == []
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peer.unavailable(torch.device("cuda")) == "the package nvidia-cudnn-frontend is not installed"

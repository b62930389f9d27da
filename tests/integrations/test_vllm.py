"""The classes of vLLM's backend, with stand-ins for the classes of vLLM from which they derive."""

import enum
import importlib
import subprocess
import sys
import types
from typing import Generic, TypeVar

import pytest
import torch

from dash_attn import flash_attn_varlen_func
from dash_attn.integrations import vllm as integration

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 32, 16
PAST, NEW = (20, 0, 33, 5), (1, 7, 1, 12)  # decoding sequences among sequences with rows of a prompt
LENGTHS = [past + new for past, new in zip(PAST, NEW)]
T = TypeVar("T")
FEATURES = {
    "plain": {}, "window": {"sliding_window": 8}, "softcap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.05]}, "sinks": {"sinks": torch.tensor([0.5, 1, -1, 2]).bfloat16()},
}  # fmt: skip


class Impl(Generic[T]):
    pass


class Builder(Generic[T]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        pass


@pytest.fixture
def backend(monkeypatch):
    """The module of the classes, on stand-ins."""
    classes = {
        "AttentionBackend": type("AttentionBackend", (), {}), "AttentionImpl": Impl,
        "AttentionMetadata": type("AttentionMetadata", (), {}), "AttentionMetadataBuilder": Builder,
        "AttentionType": enum.Enum("AttentionType", {"DECODER": "decoder", "ENCODER": "encoder"}, type=str),
        "CommonAttentionMetadata": types.SimpleNamespace, "MultipleOf": lambda base: f"multiple of {base}",
    }  # fmt: skip
    registry = {
        "AttentionBackendEnum": types.SimpleNamespace(__members__={}),
        "register_backend": lambda name, path: registry["AttentionBackendEnum"].__members__.update({name: path}),
    }
    contents = {"backend": classes, "backends": {}, "backends.registry": registry}
    for name in ("vllm", "vllm.v1", "vllm.v1.attention"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, content in contents.items():
        module = types.ModuleType(f"vllm.v1.attention.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    name = "dash_attn.integrations.vllm_backend"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def make_impl(backend, **settings):
    return backend.DashAttentionImpl(HEADS, HEAD_DIM, 0.2, KV_HEADS, **settings)


def whole_sequences():
    """q, k and v of all rows of the sequences."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def rows_of_step(x):
    """The rows that a step computes, with rows of padding after them."""
    rows = torch.cat([y[past:] for y, past in zip(x.split(LENGTHS), PAST)])
    return torch.cat([rows, torch.full((3, *x.shape[1:]), torch.nan, dtype=x.dtype)])


def pages(layout, k, v):
    """vLLM's cache with the keys before the step, and NaN elsewhere; and the table of pages."""
    table = torch.randperm(14, generator=torch.Generator().manual_seed(1)).int()[:12].view(4, 3)
    shape = (14, KV_HEADS, BLOCK, 2 * HEAD_DIM)
    order = {"LBHNC": (0, 1, 2, 3), "LBNHC": (0, 2, 1, 3)}[layout]
    memory = torch.full([shape[i] for i in order], torch.nan, dtype=torch.bfloat16)
    cache = memory.permute(order)  # each order is its own inverse
    assert cache.shape == shape
    for number, both in enumerate(torch.cat((k, v), dim=-1).split(LENGTHS)):
        for row in range(PAST[number]):
            cache[table[number, row // BLOCK], :, row % BLOCK] = both[row]
    return cache, table


def metadata(backend, table, causal=True):
    """What the builder makes of a step with one more sequence, of padding, which has no rows."""
    offsets = torch.tensor([0, *NEW, 0]).cumsum(0).int()
    common = types.SimpleNamespace(
        num_actual_tokens=sum(NEW) + 2, query_start_loc=offsets, seq_lens=torch.tensor([*LENGTHS, 0]).int(),
        block_table_tensor=torch.cat((table, torch.full((1, 3), -1).int())), causal=causal, max_query_len=max(NEW),
    )  # fmt: skip
    return build(backend, common)


def build(backend, common):
    builder = backend.DashAttentionBackend.get_builder_cls()(None, [], None, torch.device("cpu"))
    return builder.build(0, common)


def in_training(q, k, v, settings):
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    window = settings.get("sliding_window")
    slopes = settings.get("alibi_slopes")
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max(LENGTHS), max(LENGTHS), softmax_scale=0.2, causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0), softcap=settings.get("logits_soft_cap", 0.0),
        alibi_slopes=None if slopes is None else torch.tensor(slopes), s_aux=settings.get("sinks"),
    )  # fmt: skip
    return rows_of_step(out)[: sum(NEW)]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_step_has_the_bits_of_training(backend, feature, layout):
    q, k, v = whole_sequences()
    cache, table = pages(layout, k, v)
    impl = make_impl(backend, **FEATURES[feature])
    output = torch.full((sum(NEW) + 3, HEADS, HEAD_DIM), 7.0, dtype=torch.bfloat16)
    step = [rows_of_step(x) for x in (q, k, v)]
    result = impl.forward(None, *step, cache, metadata(backend, table), output)
    assert result is output and torch.equal(output[: sum(NEW)], in_training(q, k, v, FEATURES[feature]))
    assert output[-1].eq(7).all()  # beyond the rows of the step
    # The pages hold all keys now, and a layer that shares them reads them without writing.
    before = cache.clone()
    shares = make_impl(backend, **FEATURES[feature], kv_sharing_target_layer_name="layers.0")
    again = shares.forward(None, step[0], None, None, cache, metadata(backend, table), torch.zeros_like(output))
    assert torch.equal(again[: sum(NEW)], output[: sum(NEW)])
    assert torch.equal(cache.view(torch.int16), before.view(torch.int16))


def test_a_step_in_which_all_sequences_decode(backend):
    """A row for each sequence, of which the last one is padding, and no offsets."""
    q, k, v = whole_sequences()
    cache, table = pages("LBNHC", k, v)
    impl = make_impl(backend)
    whole = torch.empty(sum(NEW) + 2, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    impl.forward(None, *(rows_of_step(x) for x in (q, k, v)), cache, metadata(backend, table), whole)
    before = cache.clone()
    ends = torch.tensor(LENGTHS).cumsum(0) - 1  # the last row of each sequence, once more
    for number, length in enumerate(LENGTHS):
        cache[table[number, (length - 1) // BLOCK], :, (length - 1) % BLOCK] = torch.nan
    common = types.SimpleNamespace(
        num_actual_tokens=5, query_start_loc=torch.tensor([0, 1, 2, 3, 4, 4]).int(),
        seq_lens=torch.tensor([*LENGTHS, 0]).int(), causal=True, max_query_len=1,
        block_table_tensor=torch.cat((table, torch.full((1, 3), -1).int())),
    )  # fmt: skip
    step = [torch.cat([x[ends], torch.full_like(x[:2], torch.nan)]) for x in (q, k, v)]
    batch, output = build(backend, common), torch.full((6, HEADS, HEAD_DIM), 7.0).bfloat16()
    assert batch.decodes and not metadata(backend, table).decodes
    result = impl.forward(None, *step, cache, batch, output)
    expected = in_training(q, k, v, {})[torch.tensor(NEW).cumsum(0) - 1]
    assert result is output and torch.equal(output[:4], expected)
    assert output[-1].eq(7).all()
    assert torch.equal(cache.view(torch.int16), before.view(torch.int16))


def test_measuring_memory_returns_zeros(backend):
    output = torch.ones(5, HEADS, HEAD_DIM)
    assert not make_impl(backend).forward(None, None, None, None, None, None, output).any()


@pytest.mark.parametrize("settings, message", [
    ({"kv_cache_dtype": "fp8"},
     "DASH_ATTN must have kv_cache_dtype one of ('auto', 'float16', 'bfloat16'), got 'fp8'"),
    ({"attn_type": "encoder"}, "DASH_ATTN must have attn_type decoder, got 'encoder'"),
    ({"alibi_slopes": [0.5], "logits_soft_cap": 2.0},
     "DASH_ATTN must have alibi_slopes None with a soft cap, got [0.5]"),
])  # fmt: skip
def test_unsupported_layers(backend, settings, message):
    with pytest.raises(NotImplementedError) as raised:
        make_impl(backend, **settings)
    assert str(raised.value) == message


def test_unsupported_calls(backend):
    with pytest.raises(NotImplementedError, match="^DASH_ATTN must have output_scale None"):
        make_impl(backend).forward(None, None, None, None, None, None, torch.ones(1), output_scale=torch.ones(1))
    with pytest.raises(NotImplementedError, match="^DASH_ATTN must have causal=True in every batch, got False$"):
        metadata(backend, torch.zeros(4, 3).int(), causal=False)


def test_what_vllm_asks_the_backend(backend):
    ours = backend.DashAttentionBackend
    assert ours.get_name() == "DASH_ATTN" and ours.get_impl_cls() is backend.DashAttentionImpl
    assert ours.get_supported_kernel_block_sizes() == ["multiple of 16"]
    assert [ours.supports_head_size(n) for n in (32, 96, 256, 100, 512)] == [True, True, True, False, False]
    assert ours.supports_compute_capability((9, 0)) and not ours.supports_compute_capability((8, 0))
    assert ours.supports_sink() and ours.supports_sliding_window() and ours.supports_batch_invariance()


def test_registering_twice_changes_nothing(backend):
    members = sys.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum.__members__
    assert integration.register() == integration.register() == "DASH_ATTN"
    assert members == {"DASH_ATTN": f"{backend.__name__}.DashAttentionBackend"}


def test_why_unavailable(backend, monkeypatch):
    assert integration.why_unavailable() is None
    monkeypatch.delitem(sys.modules, backend.__name__)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backend", None)
    assert "vllm.v1.attention.backend" in integration.why_unavailable()


def test_without_vllm():
    code = "from dash_attn.integrations.vllm import register\nsys.modules['vllm'] = None\nregister()"
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True)
    assert "ImportError: DASH_ATTN needs vLLM with a registry of attention backends" in done.stderr

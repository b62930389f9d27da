"""The class of SGLang's backend, with stand-ins for the classes of SGLang that it imports."""

import enum
import importlib
import subprocess
import sys
import types

import pytest
import torch

from dash_attn import flash_attn_varlen_func
from dash_attn.integrations import sglang as integration

HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 32, 16
PAST, NEW = (20, 0, 33, 5), (1, 7, 1, 12)
LENGTHS = [past + new for past, new in zip(PAST, NEW)]
SINKS = torch.tensor([0.5, 1, -1, 2]).bfloat16()
FEATURES = {"plain": {}, "window": {"sliding_window_size": 7}, "softcap": {"logit_cap": 2.0}, "sinks": {"sinks": SINKS}}


class Mode:
    """SGLang's ForwardMode: what a batch does."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name

    def __getattr__(self, name):
        return lambda: name == f"is_{self.name}"


class Pool:
    """SGLang's pool of keys and values, a row for each place."""

    def __init__(self, places):
        self.k, self.v = (torch.full((places, KV_HEADS, HEAD_DIM), torch.nan).bfloat16() for _ in range(2))

    def get_key_buffer(self, layer):
        return self.k

    def get_value_buffer(self, layer):
        return self.v

    def set_kv_buffer(self, layer, places, k, v):
        self.k[places], self.v[places] = k, v


class WindowPool(Pool):
    pass


@pytest.fixture
def backend(monkeypatch):
    """The module of the class, on stand-ins."""
    parallel = types.SimpleNamespace(attn_cp_size=1, dcp_enabled=False)
    registry, chosen = {}, []
    contents = {
        "layers.attention.base_attn_backend": {"AttentionBackend": type("AttentionBackend", (), {})},
        "layers.attention.attention_registry": {
            "ATTENTION_BACKENDS": registry,
            "register_attention_backend": lambda name: lambda create: registry.update({name: create}),
        },
        "layers.radix_attention": {"AttentionType": enum.Enum("AttentionType", ["DECODER", "ENCODER_ONLY"])},
        "mem_cache.memory_pool": {
            "KVWriteLoc": types.SimpleNamespace(for_layer=lambda batch, layer: batch.out_cache_loc)
        },
        "mem_cache.swa_memory_pool": {"SWAKVPool": WindowPool},
        "runtime_context": {"get_parallel": lambda: parallel},
        "arg_groups.choices": {
            f"add_{name}attention_backend_choices": chosen.extend
            for name in ("", "deterministic_", "radix_supported_deterministic_")
        },
    }
    names = ["layers", "layers.attention", "mem_cache", "arg_groups"]
    for name in ["sglang", "sglang.srt", *(f"sglang.srt.{x}" for x in [*names, *contents])]:
        module = types.ModuleType(name)
        vars(module).update(contents.get(name.removeprefix("sglang.srt."), {}))
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["sglang.srt.arg_groups"].choices = sys.modules["sglang.srt.arg_groups.choices"]
    name = "dash_attn.integrations.sglang_backend"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def make_runner(**changes):
    config = types.SimpleNamespace(
        is_encoder_decoder=changes.pop("is_encoder_decoder", False),
        hf_config=types.SimpleNamespace(architectures=["X"]),
    )
    settings = {
        "page_size": PAGE, "kv_cache_dtype": torch.bfloat16, "use_mla_backend": False,
        "token_to_kv_pool": Pool(14 * PAGE),
        "req_to_token_pool": types.SimpleNamespace(req_to_token=torch.full((9, 64), -1).int()),
    }  # fmt: skip
    return types.SimpleNamespace(model_config=config, **settings | changes)


def make_layer(backend, **changes):
    settings = {
        "attn_type": backend.AttentionType.DECODER, "is_cross_attention": False, "xai_temperature_len": -1,
        "layer_id": 0, "tp_q_head_num": HEADS, "qk_head_dim": HEAD_DIM, "scaling": 0.2, "sliding_window_size": -1,
        "logit_cap": 0.0,
    }  # fmt: skip
    return types.SimpleNamespace(**settings | changes)


def whole_sequences():
    """q, k and v of all rows of the sequences."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def fill(runner, k, v):
    """Writes the keys before the step to pages of the pool in any order. Returns the requests' rows, and all places."""
    pages = torch.randperm(13, generator=torch.Generator().manual_seed(1))[:12].view(4, 3) + 1
    requests = torch.tensor([7, 2, 5, 3])
    places = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
    for number, (x, y) in enumerate(zip(k.split(LENGTHS), v.split(LENGTHS))):
        # SGLang fills a request's row up to its length.
        runner.req_to_token_pool.req_to_token[requests[number], : LENGTHS[number]] = places[
            number, : LENGTHS[number]
        ].int()
        runner.token_to_kv_pool.set_kv_buffer(
            None, places[number, : PAST[number]], x[: PAST[number]], y[: PAST[number]]
        )
    return requests, places


def make_batch(mode, requests, places, lengths, counts):
    new = [row[length - count : length] for row, length, count in zip(places, lengths, counts)]
    return types.SimpleNamespace(
        forward_mode=Mode(mode), spec_info=None, req_pool_indices=requests, seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths), extend_seq_lens=torch.tensor(counts).int(), out_cache_loc=torch.cat(new),
    )  # fmt: skip


def in_training(q, k, v, settings):
    """The outputs of all rows, by sequences."""
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    window = settings.get("sliding_window_size")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max(LENGTHS), max(LENGTHS), softmax_scale=0.2, causal=True,
        window_size=(-1, -1) if window is None else (window, 0), softcap=settings.get("logit_cap", 0.0),
        s_aux=settings.get("sinks"),
    ).split(LENGTHS)  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_a_step_has_the_bits_of_training(backend, feature):
    settings = dict(FEATURES[feature])
    q, k, v = whole_sequences()
    expected = in_training(q, k, v, settings)
    sinks = {"sinks": settings.pop("sinks")} if feature == "sinks" else {}
    runner, layer = make_runner(), make_layer(backend, **settings)
    requests, places = fill(runner, k, v)
    ours = backend.DashAttentionBackend(runner)
    # All sequences as a prompt that goes on, in one batch; then the last rows again, as two that decode.
    batch = make_batch("extend", requests, places, LENGTHS, NEW)
    rows = [torch.cat([y[past:] for y, past in zip(x.split(LENGTHS), PAST)]) for x in (q, k, v)]
    ours.init_forward_metadata(batch)
    out = ours.forward_extend(rows[0].flatten(1), *rows[1:], layer, batch, **sinks)
    assert torch.equal(out, torch.cat([x[past:] for x, past in zip(expected, PAST)]).flatten(1))
    two = [2, 0]
    batch = make_batch("decode", requests[two], places[two], [LENGTHS[i] for i in two], [1, 1])
    last = [torch.stack([x.split(LENGTHS)[i][-1] for i in two]) for x in (q, k, v)]
    ours.init_forward_metadata(batch)
    before = runner.token_to_kv_pool.k.clone()
    out = ours.forward_decode(last[0].flatten(1), *last[1:], layer, batch, **sinks)
    assert torch.equal(out, torch.stack([expected[i][-1] for i in two]).flatten(1))
    assert torch.equal(before.view(torch.int16), runner.token_to_kv_pool.k.view(torch.int16))
    # A layer that shares the keys of another one has none of its own.
    again = ours.forward_decode(last[0].flatten(1), None, None, layer, batch, save_kv_cache=False, **sinks)
    assert torch.equal(again, out)


@pytest.mark.parametrize("changes, message", [
    ({"page_size": 1}, "page_size a multiple of 16 (--page-size 64), got 1"),
    ({"kv_cache_dtype": torch.float8_e4m3fn}, "kv_cache_dtype bfloat16 or float16, got torch.float8_e4m3fn"),
    ({"use_mla_backend": True}, "models without MLA, got ['X']"),
    ({"is_encoder_decoder": True}, "models without cross attention, got ['X']"),
    ({"token_to_kv_pool": WindowPool(16)}, f"one pool of keys (--disable-hybrid-swa-memory), got {WindowPool}"),
])  # fmt: skip
def test_unsupported_models(backend, changes, message):
    with pytest.raises(NotImplementedError) as raised:
        backend.DashAttentionBackend(make_runner(**changes))
    assert str(raised.value) == f"dash_attn must have {message}"


@pytest.mark.parametrize("name, value", [("attn_cp_size", 2), ("dcp_enabled", True)])
def test_unsupported_parallelism(backend, name, value):
    setattr(backend.get_parallel(), name, value)
    with pytest.raises(NotImplementedError, match=f"^dash_attn must have {name} "):
        backend.DashAttentionBackend(make_runner())


def test_unsupported_batches_and_calls(backend):
    ours, nothing = backend.DashAttentionBackend(make_runner()), torch.zeros(0, HEADS * HEAD_DIM)
    batch = make_batch("extend", torch.zeros(1).long(), torch.arange(4)[None], [4], [4])
    for changed in ({"forward_mode": Mode("target_verify")}, {"spec_info": object()}):
        with pytest.raises(NotImplementedError, match="without speculative decoding"):
            ours.init_forward_metadata(types.SimpleNamespace(**vars(batch) | changed))
    ours.init_forward_metadata(types.SimpleNamespace(forward_mode=Mode("idle")))
    assert ours.forward_metadata is None
    ours.init_forward_metadata(batch)
    for layer, arguments, message in (
        (make_layer(backend), {"k_rope": nothing}, "calls without other arguments, got ['k_rope']"),
        (make_layer(backend), {"return_lse": True}, "calls without other arguments, got ['return_lse']"),
        (make_layer(backend, is_cross_attention=True), {}, "attn_type decoder, got AttentionType.DECODER"),
        (make_layer(backend, xai_temperature_len=8), {}, "xai_temperature_len -1, got 8"),
    ):
        with pytest.raises(NotImplementedError) as raised:
            ours.forward_extend(nothing, None, None, layer, batch, **arguments)
        assert str(raised.value) == f"dash_attn must have {message}"
    with pytest.raises(NotImplementedError, match="without CUDA graphs"):
        ours.init_cuda_graph_state(8, 8)


def test_registering_twice_changes_nothing(backend):
    registry = sys.modules["sglang.srt.layers.attention.attention_registry"].ATTENTION_BACKENDS
    assert integration.register() == integration.register() == "dash_attn"
    assert [*registry] == ["dash_attn"]
    assert isinstance(registry["dash_attn"](make_runner()), backend.DashAttentionBackend)


def test_why_unavailable(backend, monkeypatch):
    assert integration.why_unavailable() is None
    monkeypatch.delitem(sys.modules, backend.__name__)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", None)
    assert "sglang.srt.runtime_context" in integration.why_unavailable()


def test_without_sglang():
    code = "import sys\nfrom dash_attn.integrations.sglang import register\nsys.modules['sglang'] = None\nregister()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: dash_attn needs SGLang with a registry of attention backends" in done.stderr

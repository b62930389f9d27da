"""Tiny models of transformers, and what their outputs and gradients are."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from rounded import rounded
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig, Qwen3Config
from transformers.modeling_utils import AttentionInterface

from dash_attn.integrations.transformers import install, uninstall

WINDOW = 5
LAYERS = 2
VOCABULARY = 64
# With weights of this size attention is uneven enough for windows, caps and sinks to matter.
_SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
CONFIGS = {
    "llama": LlamaConfig(**_SIZES),
    "gemma2": Gemma2Config(**_SIZES, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=16),
    # Every token goes to every expert: a choice would be another one in another precision.
    "gpt_oss": GptOssConfig(**_SIZES, num_local_experts=2, num_experts_per_tok=2, sliding_window=WINDOW),
    "qwen3": Qwen3Config(**_SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """transformers knows dash_attn during a test of a module that imports this fixture."""
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    install()
    yield
    uninstall()


def make_model(name, attention, dtype=torch.bfloat16, seed=0, device="cpu", **changes):
    """One of CONFIGS with random weights, which are those of bf16 in any dtype, and the same on any device."""
    config = copy.deepcopy(CONFIGS[name])
    config.update(changes)
    torch.manual_seed(seed)
    weights = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation="eager", dtype=dtype
    )
    model.load_state_dict(weights.state_dict())
    return model.to(device).train()


@contextlib.contextmanager
def attention_in(dtype):
    """Every attention takes q, k and v rounded to bf16 and computes in `dtype`; the rest of a model keeps its own.

    rounded.py says why.
    """
    original = AttentionInterface.get_interface

    def get_interface(self, name, default):
        function = original(self, name, default)

        def attention(module, query, key, value, attention_mask=None, **arguments):
            inputs = [rounded(x, dtype) for x in (query, key, value)]
            if attention_mask is not None and attention_mask.is_floating_point():
                # A row of infinities, of padding, would be NaN.
                attention_mask = attention_mask.clamp(min=torch.finfo(torch.bfloat16).min).to(dtype)
            out, weights = function(module, *inputs, attention_mask, **arguments)
            return out.to(query.dtype), weights

        return attention

    with mock.patch.object(AttentionInterface, "get_interface", get_interface):
        yield


def with_attention_in(dtype, call, make, attention):
    """`call` of the model that `make(attention, torch.float64)` gives, with its attention in `dtype`."""
    with attention_in(dtype):
        return call(make(attention, torch.float64))


def random_ids(*shape, seed=1):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def cotangent(shape, seed=2):
    return torch.randn(*shape, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def logits_and_gradients(model, ids, d_logits, **arguments):
    """Of one call; rows of `d_logits` that are 0 are rows that do not count."""
    model.zero_grad()
    logits = model(ids, use_cache=False, **arguments).logits
    logits.backward(d_logits.to(logits.dtype))
    counts = d_logits.abs().sum(-1) > 0
    return logits.detach()[counts], gradients(model)


def run_sequences(model, sequences, d_logits):
    """Each sequence by itself, gradients added up."""
    model.zero_grad()
    logits = []
    for ids, d in zip(sequences, d_logits, strict=True):
        logits.append(model(ids[None], use_cache=False).logits[0])
        logits[-1].backward(d.to(logits[-1].dtype))
    return torch.cat(logits).detach(), gradients(model)


def positions(lengths):
    """position_ids of a pack."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def train(model, lengths, steps, between=lambda: None, one_batch=False):
    """Losses of steps on packs, and the gradients of the last; calls `between` in each. The loss of random tokens falls
    for certain where all steps have `one_batch`."""
    device = model.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        ids = random_ids(1, sum(lengths), seed=0 if one_batch else step).to(device)
        optimizer.zero_grad()
        between()
        loss = model(ids, position_ids=positions(lengths).to(device), labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, gradients(model)


def error(actual, expected):
    """Relative error in the 2-norm: of logits, or of gradients, each parameter's over the norm of its own."""
    if isinstance(actual, dict):
        # What a router of two experts gets nearly cancels: rounding is all there is of it.
        names = [name for name in expected if ".router." not in name]
        parts = [(actual[name].double() - expected[name]).flatten() / expected[name].norm() for name in names]
        return float(torch.cat(parts).norm()) / len(parts) ** 0.5
    return float((actual.double() - expected).norm() / expected.norm())

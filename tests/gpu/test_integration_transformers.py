"""Tiny models of transformers with the kernels: the call goes to them, is right, and gradients repeat byte by byte."""

import functools
import pathlib
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("transformers")
pytest.importorskip("kernels")

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "integrations"))

import loss_curves as curves
import transformers_support as support
from kernel_counts import kernels_in
from transformers_support import CONFIGS, LAYERS, error, logits_and_gradients, make_model

from dash_attn.integrations.transformers import NAME, install, uninstall

LENGTHS = (700, 37, 1100, 211)
# Large enough that key tiles of one head are worked on at once, which is where an order is needed.
LARGE = dict(
    hidden_size=512, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
    initializer_range=0.05,
)  # fmt: skip
STEPS = 4
REPEATS = 3
CURVE_SHAPE, CURVE_STEPS = (4, 4096), 10
TRIES = 10


@pytest.fixture(autouse=True)
def door(monkeypatch):
    """transformers knows dash_attn, and torch takes kernels of its own that repeat."""
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    install()
    yield
    uninstall()
    torch.use_deterministic_algorithms(False)


def check(make, call, call_eager):
    """What `call` returns of a model is no further off than what `call_eager` does of one with eager attention in bf16.

    Returns how often each kernel ran.
    """
    actual, counts = kernels_in(lambda: support.with_attention_in(torch.bfloat16, call, make, NAME))
    eager, exact = (
        support.with_attention_in(dtype, call_eager, make, "eager") for dtype in (torch.bfloat16, torch.float64)
    )
    for ours, theirs, expected in zip(actual, eager, exact, strict=True):
        assert error(ours, expected) <= error(theirs, expected) < 0.1
    return counts


def to(device, *tensors):
    return [tensor.to(device) for tensor in tensors]


def assert_same_bits(actual, expected):
    for (losses, gradients), (other_losses, others) in zip(actual, expected, strict=True):
        assert all(map(torch.equal, losses, other_losses))
        assert all(torch.equal(gradients[name], others[name]) for name in gradients)


@pytest.mark.parametrize("how", ["batch", "padding", "pack"])
@pytest.mark.parametrize("name", CONFIGS)
def test_against_eager(name, how, device):
    rows, seqlen = (1, 400) if how == "pack" else (2, 300)
    ids, d_logits = to(device, support.random_ids(rows, seqlen), support.cotangent((rows, seqlen)))
    arguments, parts = {}, [(0, slice(None)), (1, slice(None))]
    if how == "padding":
        # On the right, where positions need no change.
        mask = torch.ones_like(ids)
        mask[0, 130:] = 0
        d_logits[0, 130:] = 0
        arguments, parts = {"attention_mask": mask}, [(0, slice(130)), (1, slice(None))]
    elif how == "pack":
        lengths = (150, 1, 249)
        arguments["position_ids"] = support.positions(lengths).to(device)
        parts = [(0, slice(0, 150)), (0, slice(150, 151)), (0, slice(151, 400))]
    sequences, of_sequences = ([x[part] for part in parts] for x in (ids, d_logits))
    counts = check(
        functools.partial(make_model, name, device=device),
        lambda model: logits_and_gradients(model, ids, d_logits, **arguments),
        lambda model: support.run_sequences(model, sequences, of_sequences),
    )
    assert counts == [LAYERS, LAYERS]


@pytest.mark.parametrize("flag", ["0", "1"])
@pytest.mark.parametrize("name", CONFIGS)
def test_training_repeats_byte_by_byte(name, flag, device, perturbation, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", flag)

    def run():
        model = make_model(name, NAME, device=device, **LARGE)
        return support.train(model, LENGTHS, STEPS, between=lambda: perturbation.enqueue(8))

    expected, counts = kernels_in(run)
    assert counts == [STEPS * LAYERS, STEPS * LAYERS]
    assert len({float(loss) for loss in expected[0]}) == STEPS
    assert_same_bits([run() for _ in range(REPEATS)], [expected] * REPEATS)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_generate(name, device):
    new, starts, tokens = 8, (60, 0, 21, 149) * 2, []
    (ids,) = to(device, support.random_ids(len(starts), 150))
    mask = torch.stack([torch.arange(150, device=device) >= start for start in starts]).long()

    def generate(model):
        arguments = dict(attention_mask=mask, max_new_tokens=new, output_logits=True, return_dict_in_generate=True)
        generated = model.eval().generate(ids, **arguments)
        tokens.extend(generated.sequences)
        return torch.stack(generated.logits, dim=1)[None]

    def logits_of_tokens(model):
        of_each = [model.eval()(x[None, start:]).logits[0, -new - 1 : -1] for x, start in zip(tokens, starts)]
        return torch.stack(of_each)[None]

    counts = check(functools.partial(make_model, name, device=device), generate, logits_of_tokens)
    assert counts == [new * LAYERS, 0]


def test_losses_repeat_where_those_of_atomic_adds_do_not(device, perturbation, capsys):
    """A training with ours has the same losses, bit by bit, and two with PyTorch's flash attention have not.

    The rest of a step is deterministic, by `door`; with warn_only PyTorch's flash attention keeps its atomic adds.
    """

    def run(attention):
        model = make_model("llama", attention, device=device, **LARGE)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return curves.losses(model, CURVE_SHAPE, CURVE_STEPS, between=lambda: perturbation.enqueue(4))

    ours, counts = kernels_in(lambda: run(NAME))
    assert counts == [CURVE_STEPS * LAYERS] * 2
    assert curves.first_that_differs(lambda: run(NAME), ours, REPEATS) is None
    theirs, counts = kernels_in(lambda: run("sdpa"))
    assert counts == [0, 0]
    differs = curves.first_that_differs(lambda: run("sdpa"), theirs, TRIES)
    with capsys.disabled():
        print(f"\ntransformers: PyTorch's flash attention has other losses in run {differs} after the first")
    if differs is None:
        pytest.skip(f"the losses with PyTorch's flash attention were the same in {TRIES + 1} runs, as ours were")

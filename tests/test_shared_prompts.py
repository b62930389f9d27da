"""examples/shared_prompts.py: shared prompts change nothing but roundings, and the example notices what is wrong."""

import itertools
import pathlib
import re
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from dash_attn.masks import hidden_rows

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

import shared_prompts  # noqa: E402
from training.clock import Clock  # noqa: E402
from training.model import Shape  # noqa: E402

CPU = torch.device("cpu")
SHAPE = Shape(layers=2, width=32, heads=4, kv_heads=2, hidden=48)
SMALL = ["--width", "32", "--heads", "2", "--kv-heads", "1", "--hidden", "48"]
ATTENTION, CALLS = shared_prompts.flash_attn_varlen_func, itertools.count()


@pytest.fixture(autouse=True)
def _as_without_a_gpu(monkeypatch):
    """The example chooses tiny sizes. The variable that it sets is restored."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def dense_attention(pack):
    """Attention to all pairs that the sequences, causality and the mask of a pack leave, in any precision."""
    visible = torch.zeros(pack.tokens.numel(), pack.tokens.numel(), dtype=torch.bool)
    for start, end in zip(pack.offsets.tolist(), pack.offsets[1:].tolist()):
        rows = slice(start, end)
        visible[rows, rows] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if pack.mask is not None:
            visible[rows, rows] &= ~hidden_rows(pack.mask[0, rows], 0, end - start, causal=True)

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True).transpose(1, 2)

    return attend


def test_gradients_are_those_without_sharing():
    """In fp32, with dense attention under the masks of both packs."""
    groups = shared_prompts.sampled(prompts=2, prompt=9, answers=8, answer=7)
    separate = [one for group in groups for one in group.separated()]
    model, found = shared_prompts.model_of(SHAPE, Clock(CPU, SHAPE.layers), CPU).float(), []
    for of_pack in (groups, separate):
        pack = shared_prompts.pack_of(of_pack, SHAPE.head_dim, CPU)
        model.zero_grad()
        shared_prompts.backward(model, pack, dense_attention(pack))
        found.append({name: x.grad for name, x in model.named_parameters()})
    exact = shared_prompts.gradients_in_fp32(
        model, [shared_prompts.pack_of([one], SHAPE.head_dim, CPU) for one in separate]
    )
    for other in found:
        for name, distance in shared_prompts.distances(other, exact).items():
            assert distance < 1e-5 * exact[name].norm(), name


def test_a_pack_computes_a_prompt_once():
    """Two answers, to a prompt of 4 tokens and to one of 2 tokens."""
    tokens = torch.arange(100)
    groups = [
        shared_prompts.Group(tokens[:4], [tokens[10:13], tokens[20:22]], [3.0, -4.0]),
        shared_prompts.Group(tokens[50:52], [tokens[60:61], tokens[70:72]], [5.0, 6.0]),
    ]
    pack = shared_prompts.pack_of(groups, 2, CPU)
    assert pack.tokens[0].tolist() == [0, 1, 2, 3, 10, 11, 12, 20, 21, 50, 51, 60, 70, 71]
    assert (pack.offsets.tolist(), pack.longest) == ([0, 9, 14], 9)
    assert pack.mask[0, :, 0].tolist() == [9, 9, 9, 9, 7, 7, 7, 9, 9, 5, 5, 3, 5, 5]
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 4, 5, 0, 1, 2, 2, 3])
    assert torch.equal(pack.angles[0], positions.float().cos()[:, None, None])
    assert pack.predicting.tolist() == [3, 4, 5, 3, 7, 10, 10, 12]
    assert pack.targets.tolist() == [10, 11, 12, 20, 21, 60, 70, 71]
    assert pack.weights.tolist() == [1, 1, 1, -2, -2, 5, 3, 3]


def test_advantages_are_normalized_in_each_group():
    for group in shared_prompts.sampled(prompts=3, prompt=5, answers=8, answer=6):
        advantages = 3 * 8 * torch.tensor(group.weights)
        torch.testing.assert_close(torch.stack([advantages.mean(), advantages.std()]), torch.tensor([0.0, 1.0]))
        assert all(3 <= len(answer) <= 6 for answer in group.answers)


def test_the_example(capsys):
    assert shared_prompts.main([]) == 0
    tokens, relative, of_error, bits = capsys.readouterr().out.splitlines()
    without, shared = (int(number) for number in re.findall(r"(\d+) with", tokens.replace(",", "")))
    assert without == shared + 2 * 7 * 40
    assert float(re.search(r"[\d.]+e-\d+", relative)[0]) < 0.01 and of_error.endswith("), within the bar of 2")
    assert bits == "bits of two runs with sharing: equal"


def sees_other_answers(*arguments, startend_row_indices, **options):
    return ATTENTION(*arguments, **options)


def differs_from_call_to_call(*arguments, **options):
    return ATTENTION(*arguments, **options) * (1 + next(CALLS) * 2**-7)


@pytest.mark.parametrize(
    "attention, line",
    [(sees_other_answers, "NOT within the bar"), (differs_from_call_to_call, "runs with sharing: NOT")],
)
def test_the_example_fails_if_attention_is_wrong(attention, line, monkeypatch, capsys):
    monkeypatch.setattr(shared_prompts, "flash_attn_varlen_func", attention)
    assert shared_prompts.main(["--prompt", "9", "--answer", "5", *SMALL]) == 1
    assert line in capsys.readouterr().out


def test_times(capsys):
    """The clock of a CPU is another one, but the marks are the same."""
    packs = {"all": shared_prompts.pack_of(shared_prompts.sampled(1, 9, 2, 5), SHAPE.head_dim, CPU)}
    clock = Clock(CPU, SHAPE.layers)
    shared_prompts.report_times(clock, shared_prompts.model_of(SHAPE, clock, CPU), packs, rounds=3)
    assert re.fullmatch(r"time all: [\d.]+ ms, of which attention [\d.]+ ms\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--answers", "1"], "--answers must be at least 2, got 1"),
        (["--prompt", "1"], "--prompt must be at least 2, got 1"),
        (["--kv-heads", "0"], "--kv-heads must be at least 1, got 0"),
        (["--kv-heads", "3"], "--kv-heads must divide --heads 4, got 3"),
    ],
)
def test_errors(options, message, capsys):
    with pytest.raises(SystemExit):
        shared_prompts.main(["--heads", "4", *options])
    assert capsys.readouterr().err.endswith(f"error: {message}\n")

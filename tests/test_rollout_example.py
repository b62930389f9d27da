"""examples/rollout.py: log-probabilities of a rollout are those of training, whatever else is generated and packed."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

import rollout  # noqa: E402
from training.attention import make_attention  # noqa: E402
from training.clock import Clock  # noqa: E402
from training.generation import PAGE_ROWS, Generator, Rows  # noqa: E402
from training.layout import Layout  # noqa: E402
from training.model import Llama  # noqa: E402
from training.products import PRODUCTS  # noqa: E402
from training.text import Text  # noqa: E402

from dash_attn.receipts import compare  # noqa: E402

SIZES = rollout.SIZES["cpu"]


def make_model():
    clock = Clock(torch.device("cpu"), SIZES.shape.layers)
    model = Llama(SIZES.shape, make_attention("dash_attn"), clock, Layout(0, 1, 1, 1, 1), seed=0)
    return model.to(torch.bfloat16)


def generate(model, sequences, *, batch):
    generator = Generator(model, sum(-(-s.limit // PAGE_ROWS) for s in sequences), seed=0)
    generator(sequences, batch=batch)
    return generator


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder and the printed lines of the example's two steps."""
    folder = tmp_path_factory.mktemp("rollout")
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *text: lines.append(" ".join(map(str, text))))
        assert rollout.main(["--folder", str(folder)]) == 0
    return folder, lines


def test_every_ratio_is_one_with_dash_attn_in_training(run):
    folder, lines = run
    for step in (0, 1):  # before and after the weights change
        found = compare(folder / f"step_{step}" / "rollout", folder / f"step_{step}" / "dash_attn")
        assert found.first is None and not found.not_compared
        assert found.compared == 3 * (4 * SIZES.shape.layers + 1)  # packs of q, k, v, out of each layer, and the result
    assert lines.count("  training with dash_attn: 0 ratios differ from 1.0, by up to 0") == 2
    assert sum("224 shared" in line for line in lines) == 2


def test_receipts_name_the_output_of_another_attention(run):
    folder, lines = run
    first = compare(folder / "step_0" / "rollout", folder / "step_0" / "sdpa").first
    assert (first.key.name, first.after.name) == ("layers.0.attention.out", "layers.0.attention.v")
    assert 0 < len(first.blocks) < first.block_count
    assert f"    receipts: pack 0 differs first in {len(first.blocks)} rows of layers.0.attention.out" in lines


@pytest.fixture(scope="module")
def generated():
    """A model, and sequences that were generated four at a time with shared pages."""
    model, sequences = make_model(), rollout.prompts(Text(), SIZES, 0)
    with PRODUCTS["one_row"]():
        generator = generate(model, sequences, batch=SIZES.batch)
    # The first of each prompt computes what is not in whole pages of the sequences before.
    lengths = [s.prompt for s in sequences]
    assert generator.computed + generator.shared == sum(lengths) and generator.shared >= 5 * 2 * PAGE_ROWS
    assert len({len(s.tokens) for s in sequences}) > 1
    return model, sequences


def test_a_sequence_is_generated_alike_alone(generated):
    model, sequences = generated
    for one, expected in zip(rollout.prompts(Text(), SIZES, 0), sequences, strict=True):
        with PRODUCTS["one_row"]():
            assert generate(model, [one], batch=1).shared == 0
        assert one.tokens == expected.tokens and len(one.tokens) == one.limit
        assert torch.equal(torch.stack(one.log_probabilities), torch.stack(expected.log_probabilities))


@pytest.mark.parametrize("rows", [60, 160, 1000])
@torch.no_grad()
def test_every_pack_has_the_bits_of_the_rollout(generated, rows):
    model, sequences = generated
    packs = rollout.packs_of(sequences, rows)
    assert sorted(s.number for pack in packs for s in pack) == [s.number for s in sequences]
    assert len(packs) == {60: 6, 160: 3, 1000: 1}[rows]
    for of_pack in packs:
        with PRODUCTS["one_row"]():
            new = rollout.log_probabilities(model, rollout.Pack(of_pack, "cpu"), "dash_attn", Rows())
        assert torch.equal(new, torch.stack([x for s in of_pack for x in s.log_probabilities]))


@torch.no_grad()
def test_another_token_of_the_prompt_is_seen(generated):
    """The comparison can fail: a ratio depends on every key of its sequence, and on no other sequence."""
    model, sequences = generated
    changed, other = (rollout.prompts(Text(), SIZES, 0)[i] for i in (0, 5))
    for copy, original in ((changed, sequences[0]), (other, sequences[5])):
        copy.tokens[:] = original.tokens
    changed.tokens[0] ^= 1
    with PRODUCTS["one_row"]():
        new = rollout.log_probabilities(model, rollout.Pack([changed, other], "cpu"), "dash_attn", Rows())
    of_changed, of_other = new.split([len(sequences[i].log_probabilities) for i in (0, 5)])
    assert not torch.equal(of_changed, torch.stack(sequences[0].log_probabilities))
    assert torch.equal(of_other, torch.stack(sequences[5].log_probabilities))


def test_one_row_calls_functions_with_one_shape():
    x, weight = torch.randn(3, 5, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    shapes = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (torch.nn.functional.linear, torch.nn.functional.silu):
                shapes.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    with Seen(), PRODUCTS["one_row"]():
        out = torch.nn.functional.silu(torch.nn.functional.linear(x, weight))
    assert shapes == [(1, 8)] * 15 + [(1, 4)] * 15
    expected = torch.nn.functional.silu(x @ weight.t())
    torch.testing.assert_close(out, expected)
    for actual, wanted in zip(*(torch.autograd.grad(y.square().sum(), (x, weight)) for y in (out, expected))):
        torch.testing.assert_close(actual, wanted)


def test_megatron_products_take_the_place_of_linear_layers(monkeypatch):
    """In the forward and the backward, with torch's product in place of the kernel, which needs a GPU."""
    kernels = pytest.importorskip("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    calls = []
    monkeypatch.setattr(kernels, "matmul_persistent", lambda a, b: (calls.append((a.shape, b.shape)), a @ b)[1])
    layer, x = torch.nn.Linear(8, 4, bias=False), torch.randn(3, 5, 8, requires_grad=True)
    with PRODUCTS["megatron"]():
        out = layer(x)
    expected = layer(x)
    gradients = [torch.autograd.grad(y.square().sum(), (x, layer.weight)) for y in (out, expected)]
    assert calls == [((15, 8), (8, 4)), ((15, 4), (4, 8)), ((4, 15), (15, 8))]
    torch.testing.assert_close((out, *gradients[0]), (expected, *gradients[1]))


def test_megatron_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(rollout, "why_no_kernels_run", lambda: "no GPU")
    with pytest.raises(SystemExit):
        rollout.main(["--products", "megatron"])
    assert "--products must be one_row without a GPU that runs the kernels, got megatron" in capsys.readouterr().err

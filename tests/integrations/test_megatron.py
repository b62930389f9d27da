"""dash_attn as Megatron-core's core attention: against Megatron's own, and what is refused."""

import contextlib
import types
from typing import NamedTuple

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import example_support  # noqa: E402
import megatron_support as support  # noqa: E402
import torch  # noqa: E402
from float64_reference import attention_float64, attention_in_dtype, relative_error  # noqa: E402
from interface_support import assert_same_bits, kernel_calls, randn  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from rounded import distances  # noqa: E402

from dash_attn import flash_attn_func  # noqa: E402
from dash_attn.integrations.megatron import DashAttention, with_dash_attention  # noqa: E402

SETTINGS = {
    "plain": {},
    "grouped": {"num_query_groups": 2},
    "window": {"window_size": (7, 0)},
    "window in every other layer": {"window_size": (7, 0), "window_attn_skip_freq": 2},
    "off-by-one": {"softmax_type": "off-by-one"},
    "sinks": {"softmax_type": "learnable", "num_query_groups": 1},
    "scale": {"softmax_scale": 0.3},
    "scale by layer": {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
}


@pytest.fixture(scope="module", autouse=True)
def megatron(tmp_path_factory):
    with support.process_group(tmp_path_factory.mktemp("megatron") / "store"):
        yield


def core(kind=DashAttention, mask_type=AttnMaskType.causal, attention_type="self", dtype=torch.bfloat16, **settings):
    torch.manual_seed(0)  # of sinks
    softmax_scale = settings.get("softmax_scale")
    arguments = {"attn_mask_type": mask_type, "attention_type": attention_type, "softmax_scale": softmax_scale}
    return kind(config=support.config_of(dtype, **settings), layer_number=1, **arguments)


def qkv(seqlen=24, batch=3, heads=4, kv_heads=4, dtype=torch.bfloat16, draw=0):
    """(seqlen, batch, heads, 16), and a gradient of the output."""
    shapes = [(seqlen, batch, heads, 16), *[(seqlen, batch, kv_heads, 16)] * 2, (seqlen, batch, heads * 16)]
    *inputs, dout = (randn(*shape, seed=seed).detach().to(dtype) for seed, shape in enumerate(shapes, 4 * draw))
    return [x.requires_grad_() for x in inputs], dout


def results(module, inputs, dout, *arguments, **keywords):
    out = module(*inputs, *arguments, **keywords)
    return out, *torch.autograd.grad(out, [*inputs, *module.parameters()], dout)


def errors(found, expected):
    return [((x.double() - y.double()).norm() / y.double().norm()).item() for x, y in zip(found, expected, strict=True)]


def causal_mask(seqlen):
    """True where a query does not see a key, as Megatron's own attention takes it."""
    return torch.ones(1, 1, seqlen, seqlen, dtype=torch.bool).triu(1)


def padding_mask(lengths, seqlen):
    return (torch.arange(seqlen) >= torch.tensor(lengths)[:, None])[:, None, None]


@pytest.mark.parametrize("name", SETTINGS)
def test_model_is_as_accurate_as_with_megatrons_attention(name):
    runs = []

    @contextlib.contextmanager
    def counted():
        with kernel_calls() as calls:
            yield
        runs.append([kernel for kernel, _ in calls])

    found = support.accuracy(support.tokens(), draws=4, ours_in=counted, **SETTINGS[name])
    assert runs == [["forward"] * 2 + ["backward"] * 2] * 4
    found.pop("loss")  # one number, which has float32's rounding too
    assert all(ours <= theirs for ours, theirs in found.values()), found


@pytest.mark.parametrize("mask_type", (AttnMaskType.causal, AttnMaskType.no_mask))
@pytest.mark.parametrize("name", SETTINGS)
def test_attention_is_as_accurate_as_megatrons(name, mask_type):
    settings = SETTINGS[name]
    mask = causal_mask(24) if mask_type == AttnMaskType.causal else None
    kinds = {"ours": (DashAttention, torch.bfloat16), "theirs": (DotProductAttention, torch.bfloat16)}
    kinds["exact"] = DotProductAttention, torch.float64
    found = {kind: [] for kind in kinds}
    # The gradient of the sinks is four numbers of each draw.
    for draw in range(16):
        inputs, dout = qkv(heads=4, kv_heads=settings.get("num_query_groups", 4), draw=draw)
        for kind, (core_attention, dtype) in kinds.items():
            # Sinks of more bits, whose gradient would otherwise be rounded alike with either attention.
            module = core(core_attention, mask_type, dtype=dtype, **settings).to(
                torch.promote_types(dtype, torch.float32)
            )
            leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
            found[kind].append(results(module, leaves, dout.to(dtype), mask))
    ours, theirs = (distances(found[kind], found["exact"]) for kind in ("ours", "theirs"))
    assert all(a <= b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


def test_values_of_another_head_dim():
    """Multi-latent attention, whose layers need TransformerEngine even where its core attention is another."""
    arguments = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self", "softmax_scale": 0.2}
    module = DashAttention(config=support.config_of(), layer_number=1, k_channels=24, v_channels=16, **arguments)
    inputs = [randn(20, 2, 4, columns, seed=seed).detach() for seed, columns in enumerate((24, 24, 16))]
    q, k, v = (x.permute(1, 2, 0, 3).double() for x in inputs)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2)
    assert errors([module(*inputs)], [expected.permute(2, 0, 1, 3).flatten(2)])[0] < 2.0**-8


def test_sequences_have_the_bits_of_a_dense_batch():
    """Heads of all sequences stand side by side in the call."""
    inputs, dout = qkv(heads=4, kv_heads=2)
    dense = [x.transpose(0, 1) for x in inputs]
    out = flash_attn_func(*dense, causal=True)
    gradients = torch.autograd.grad(out, inputs, dout.unflatten(-1, (4, -1)).transpose(0, 1))
    expected = (out.transpose(0, 1).flatten(2), *gradients)
    assert_same_bits(results(core(num_query_groups=2), inputs, dout), expected)


@pytest.mark.parametrize("settings", ({}, {"window_size": (5, 3)}, {"softmax_type": "learnable"}))
@pytest.mark.parametrize("mask_type", (AttnMaskType.padding, AttnMaskType.padding_causal))
def test_padded_sequences_have_the_bits_that_they_have_alone(mask_type, settings):
    lengths, seqlen = (24, 7, 0), 24
    inputs, dout = qkv(seqlen)
    module = core(mask_type=mask_type, **settings)
    out, *gradients = results(module, inputs, dout, padding_mask(lengths, seqlen))
    alone_type = AttnMaskType.causal if mask_type == AttnMaskType.padding_causal else AttnMaskType.no_mask
    for b, length in enumerate(lengths):
        if length:
            part = [x[:length, b : b + 1].detach().requires_grad_() for x in inputs]
            found = out[:length, b : b + 1], *(x[:length, b : b + 1] for x in gradients[:3])
            alone = results(module, part, dout[:length, b : b + 1], attn_mask_type=alone_type)
            assert_same_bits(found, alone[:4])
        assert not any(x[length:, b].any() for x in (out, *gradients[:3]))


@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("settings", ({}, {"window_size": (5, 0)}, {"softmax_type": "off-by-one"}))
def test_packed_sequences_have_the_bits_that_they_have_alone(settings, padded):
    lengths, rows = (9, 0, 14), (12, 1, 16) if padded else (9, 0, 14)
    starts = [sum(rows[:i]) for i in range(4)]
    inputs, dout = ([x[:, 0].detach() for x in tensors] for tensors in (qkv(sum(rows))[0], [qkv(sum(rows))[1]]))
    inputs = [x.requires_grad_() for x in inputs]
    offsets = torch.tensor([sum(lengths[:i]) for i in range(4)], dtype=torch.int32)
    of_rows = torch.tensor(starts, dtype=torch.int32) if padded else None
    packed = PackedSeqParams("thd", offsets, offsets, of_rows, of_rows, max(rows), max(rows))
    module = core(**settings)
    found = results(module, inputs, dout[0], packed_seq_params=packed)
    assert found[0].shape == (sum(rows), 64)
    for start, length in zip(starts, lengths):
        if length:
            here = slice(start, start + length)
            part = [x[here, None].detach().requires_grad_() for x in inputs]
            alone = results(module, part, dout[0][here, None])
            assert_same_bits([x[here, None] for x in found], alone)


def test_decoding_step_sees_all_keys():
    inputs, _ = qkv()
    query = inputs[0][-1:]
    out = core()(query, *inputs[1:], None, attn_mask_type=AttnMaskType.no_mask)
    batches = [x.detach().transpose(0, 1) for x in (query, *inputs[1:])]
    exact, eager = (formula(*batches).out for formula in (attention_float64, attention_in_dtype))
    assert relative_error(out.unflatten(2, (4, 16)).transpose(0, 1), exact) <= relative_error(eager, exact)
    assert_same_bits([out], [core()(query, *inputs[1:], attn_mask_type=AttnMaskType.causal_bottom_right)])


@pytest.mark.parametrize("recompute", ("attention", "layers"))
def test_recomputation_changes_no_bits(recompute):
    settings = {
        "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }[recompute]
    inputs = support.tokens()
    plain = support.loss_and_gradients(support.gpt(True), inputs)
    with kernel_calls() as calls:
        again = support.loss_and_gradients(support.gpt(True, **settings), inputs)
    assert [kernel for kernel, _ in calls].count("forward") == 4
    assert_same_bits(again.values(), plain.values())


def _train_on_rank(rank, ranks, folder):
    support.rank_environment()
    with support.process_group(folder / "store", rank, ranks):
        found = support.loss_and_gradients(support.gpt(True, num_query_groups=2), support.tokens())
        with_sinks = support.gpt(True, num_query_groups=2, softmax_type="learnable")
        assert support.loss_and_gradients(with_sinks, support.tokens())["loss"].isfinite()
        sinks = with_sinks.decoder.layers[0].self_attention.core_attention.sharded_state_dict()["softmax_offset"]
        torch.save((found, sinks.global_shape, sinks.global_offset), folder / f"rank{rank}.pt")


@pytest.mark.slow
def test_tensor_parallel_ranks_train_as_one(tmp_path):
    ranks = 2
    torch.multiprocessing.spawn(_train_on_rank, (ranks, tmp_path), ranks)
    of_ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(ranks)]
    expected = support.loss_and_gradients(support.gpt(True, num_query_groups=2), support.tokens())
    assert all(errors([found["loss"]], [expected["loss"]])[0] < 1e-3 for found, _, _ in of_ranks)
    assert [(shape, offset) for _, shape, offset in of_ranks] == [((4,), (0,)), ((4,), (2,))]
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    together = torch.cat([found[name] for found, _, _ in of_ranks])
    assert errors([together], [expected[name]])[0] < 0.02


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_dropout": 0.1}, r"attention_dropout must be 0.0 \(--attention-dropout 0\), got 0.1"),
        ({"context_parallel_size": 2}, r"context_parallel_size must be 1 \(use dash_attn.distributed .* got 2"),
        ({"fp8_dot_product_attention": True}, "fp8_dot_product_attention must be False, got True"),
        ({"qk_clip": True}, "qk_clip must be False, got True"),
        ({"log_max_attention_logit": True}, "log_max_attention_logit must be False, got True"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(NotImplementedError, match=message):
        core(**settings)


def test_calls_that_are_refused():
    (query, key, value), _ = qkv()
    mask = padding_mask((24, 5, 3), 24)
    with pytest.raises(NotImplementedError, match="attn_mask_type must be a type other than arbitrary"):
        core()(query, key, value, mask, attn_mask_type=AttnMaskType.arbitrary)
    with pytest.raises(NotImplementedError, match="attention_bias must be None"):
        core()(query, key, value, attention_bias=torch.zeros(1))
    with pytest.raises(NotImplementedError, match="num_splits must be None or 1, got 4"):
        core()(query, key, value, num_splits=4)
    with pytest.raises(
        ValueError, match="query and key must have the same length with attn_mask_type causal .* got 3 and 24"
    ):
        core()(query[:3], key, value)
    with pytest.raises(ValueError, match=r"attention_mask must be .* \(3, 1, 1, 24\), got \(1, 1, 24, 24\) with 24"):
        core(mask_type=AttnMaskType.padding)(query, key, value, causal_mask(24))
    with pytest.raises(ValueError, match="attention_mask must have its padding at the end"):
        core(mask_type=AttnMaskType.padding)(query, key, value, mask.flip(-1))
    with pytest.raises(NotImplementedError, match="attention_mask must be None or one tensor, got a tuple"):
        core(mask_type=AttnMaskType.padding)(query, key, value, (mask, mask))
    with pytest.raises(NotImplementedError, match="packed_seq_params.qkv_format must be 'thd', got sbhd"):
        core()(query, key, value, packed_seq_params=PackedSeqParams("sbhd"))
    pack = [x[:, 0] for x in (query, key, value)]
    offsets = torch.tensor([0, 24], dtype=torch.int32)
    ranks = PackedSeqParams("thd", offsets, offsets)
    ranks.cp_group = types.SimpleNamespace(size=lambda: 2)
    with pytest.raises(
        NotImplementedError,
        match=r"cp_group must be of one rank \(use dash_attn.distributed .* got 2: dash_attn supports",
    ):
        core()(*pack, packed_seq_params=ranks)
    with pytest.raises(
        NotImplementedError, match="attn_mask_type must be no_mask, padding or causal_bottom_right in a"
    ):
        core(attention_type="cross")(*pack, packed_seq_params=PackedSeqParams("thd", offsets, offsets))


def test_masks_under_a_causal_type():
    """Megatron passes the causal one, which changes no bits; one that keeps documents apart would be ignored."""
    inputs, dout = qkv()
    expected = results(core(), inputs, dout)
    for mask in (causal_mask(24), causal_mask(24).expand(3, -1, -1, -1)):
        assert_same_bits(results(core(), inputs, dout, mask), expected)
    of_last = inputs[0][-2:], *inputs[1:], causal_mask(24)[:, :, -2:]
    core(mask_type=AttnMaskType.causal_bottom_right)(*of_last)
    documents = causal_mask(24).expand(3, -1, -1, -1).clone()
    documents[1, :, 10:, :10] = True
    with pytest.raises(ValueError, match="must be the causal mask .* got another mask: drop --reset-attention-mask"):
        core()(*inputs, documents)
    shapes = r"must be None or \(1, 1, 24, 24\) or \(3, 1, 24, 24\) with a causal attn_mask_type, got \(3, 1, 1, 24\)"
    with pytest.raises(ValueError, match=shapes):
        core()(*inputs, padding_mask((24, 5, 3), 24))


class NamedLayers(NamedTuple):
    first: ModuleSpec
    core_attention: type


def test_specs_in_dicts_and_named_tuples():
    layer = get_gpt_layer_local_spec()
    changed = with_dash_attention({"layers": NamedLayers(layer, DotProductAttention), "name": "gpt"})
    assert type(changed["layers"]) is NamedLayers and changed["name"] == "gpt"
    assert changed["layers"].core_attention is DashAttention
    assert changed["layers"].first.submodules.self_attention.submodules.core_attention is DashAttention


def test_specs():
    layer = get_gpt_layer_local_spec()
    changed = with_dash_attention(layer)
    assert layer.submodules.self_attention.submodules.core_attention is DotProductAttention
    assert changed.submodules.self_attention.submodules.core_attention is DashAttention
    assert changed.submodules.mlp == layer.submodules.mlp
    assert with_dash_attention(changed) == changed
    block = get_gpt_decoder_block_spec(support.config_of(), use_transformer_engine=False)
    for layer in with_dash_attention(block).layer_specs:
        assert layer.submodules.self_attention.submodules.core_attention is DashAttention
    with pytest.raises(ValueError, match="spec must hold a core_attention, got ModuleSpec without one"):
        with_dash_attention(ModuleSpec(module=DotProductAttention))

    class TEDotProductAttention:
        """Stands for TransformerEngine's, which needs a GPU's libraries."""

    of_engine = ModuleSpec(module=TEDotProductAttention, params={"softmax_scale": 0.5})
    layer.submodules.self_attention.submodules.core_attention = of_engine
    changed = with_dash_attention(layer).submodules.self_attention.submodules.core_attention
    assert changed.module is DashAttention and changed.params == of_engine.params
    layer.submodules.self_attention.submodules.core_attention = torch.nn.Identity
    with pytest.raises(ValueError, match="must be one of DotProductAttention, TEDotProductAttention, got Identity"):
        with_dash_attention(layer)


@pytest.mark.slow
def test_example():
    assert example_support.last_line("megatron_gpt.py") == "the second run has the same losses, bit by bit"

"""Tiny models of transformers with dash_attn, against their eager attention in float64 and in bf16.

What the functions of dash_attn compute is tested elsewhere; here it is that transformers calls them with what its
models mean: masks, packs, windows, caps and sinks.
"""

import functools
import random

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("kernels")

import loss_curves as curves
import transformers_support as support
from interface_support import kernel_calls
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers_support import CONFIGS, LAYERS, WINDOW, error, logits_and_gradients, make_model
from transformers_support import installed as installed  # an autouse fixture

from dash_attn.integrations.transformers import NAME


def check(make, call, call_eager=None):
    """What `call` returns of a model, or `call_eager` of one with eager attention, which takes another way.

    With ours it is not further off than with eager attention in bf16. Returns our kernels' calls.
    """
    with kernel_calls() as calls:
        actual = support.with_attention_in(torch.bfloat16, call, make, NAME)
    eager, exact = (
        support.with_attention_in(dtype, call_eager or call, make, "eager") for dtype in (torch.bfloat16, torch.float64)
    )
    for ours, theirs, expected in zip(actual, eager, exact, strict=True):
        assert error(ours, expected) <= error(theirs, expected) < 0.1
    return calls


def check_packed(name, call, sequences, d_logits):
    """`call` of a model with all sequences in one call, against each sequence alone."""
    calls = check(
        functools.partial(make_model, name), call, lambda model: support.run_sequences(model, sequences, d_logits)
    )
    assert [kernel for kernel, _ in calls] == ["forward"] * LAYERS + ["backward"] * LAYERS
    return [arguments for _, arguments in calls]


@pytest.mark.parametrize("name", CONFIGS)
def test_batch(name):
    ids, d_logits = support.random_ids(2, 23), support.cotangent((2, 23))
    calls = check(functools.partial(make_model, name), lambda model: logits_and_gradients(model, ids, d_logits))
    windows = {"llama": [-1, -1], "qwen3": [-1, WINDOW - 1]}.get(name, [WINDOW - 1, -1])
    assert [kernel for kernel, _ in calls] == ["forward"] * LAYERS + ["backward"] * LAYERS
    assert [arguments["window_left"] for _, arguments in calls] == windows + windows[::-1]
    for _, arguments in calls:
        assert arguments["causal"] and arguments["cu_seqlens_q"] is None
        assert arguments["softcap"] == (2.0 if name == "gemma2" else 0.0)
        assert (arguments["sinks"] is not None) == (name == "gpt_oss")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_padding_mask(name, side):
    lengths, seqlen = (17, 9, 23), 23
    ids, d_logits = support.random_ids(3, seqlen), support.cotangent((3, seqlen))
    mask = torch.stack([torch.arange(seqlen) < length for length in lengths])
    if side == "left":
        mask = mask.flip(1)
    d_logits[~mask] = 0
    sequences, parts = ([x[i, mask[i]] for i in range(3)] for x in (ids, d_logits))
    # As generate counts them: the first token that is no padding has position 0.
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    calls = check_packed(
        name,
        lambda model: logits_and_gradients(model, ids, d_logits, attention_mask=mask.long(), position_ids=positions),
        sequences,
        parts,
    )
    for arguments in calls:
        assert arguments["cu_seqlens_q"].tolist() == arguments["cu_seqlens_k"].tolist() == [0, 17, 26, 49]


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("name", CONFIGS)
def test_pack(name, how):
    lengths = (7, 13, 1, 9)
    offsets = [0, 7, 20, 21, 30]
    ids, d_logits = support.random_ids(30), support.cotangent((30,))
    arguments = {"position_ids": support.positions(lengths)}
    if how == "cu_seq_lens":
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        arguments |= dict(cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=13, max_length_k=13)
    calls = check_packed(
        name,
        lambda model: logits_and_gradients(model, ids[None], d_logits[None], **arguments),
        ids.split(lengths),
        d_logits.split(lengths),
    )
    for arguments in calls:
        assert arguments["cu_seqlens_q"].tolist() == arguments["cu_seqlens_k"].tolist() == offsets


@pytest.mark.parametrize("name", CONFIGS)
def test_generate(name):
    """The logits of each new token, against those of the whole sequence without cache and padding."""
    ids, new = support.random_ids(2, 12), 8
    starts = (4, 0)
    mask = torch.stack([torch.arange(12) >= start for start in starts]).long()
    tokens = []

    def generate(model):
        generated = model.eval().generate(
            ids, attention_mask=mask, max_new_tokens=new, output_logits=True, return_dict_in_generate=True
        )
        logits = torch.stack(generated.logits, dim=1)
        assert torch.equal(logits.argmax(-1), generated.sequences[:, 12:])
        tokens.extend(generated.sequences)
        return logits[None]

    @torch.no_grad()
    def logits_of_tokens(model):
        of_each = [model.eval()(x[None, start:]).logits[0, -new - 1 : -1] for x, start in zip(tokens, starts)]
        return torch.stack(of_each)[None]

    calls = check(functools.partial(make_model, name), generate, logits_of_tokens)
    assert [kernel for kernel, _ in calls] == ["forward"] * new * LAYERS


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_checkpointing(name):
    ids, d_logits = support.random_ids(2, 23), support.cotangent((2, 23))
    model = make_model(name, NAME)
    logits, gradients = logits_and_gradients(model, ids, d_logits)
    model.gradient_checkpointing_enable()
    with kernel_calls() as calls:
        again, others = logits_and_gradients(model, ids, d_logits)
    assert [kernel for kernel, _ in calls].count("forward") == 2 * LAYERS
    assert torch.equal(again, logits)
    assert all(torch.equal(others[key], gradients[key]) for key in gradients)


def test_training_repeats_byte_by_byte(monkeypatch):
    def train(seed=0):
        model = make_model("gpt_oss", NAME, seed=seed)
        losses, _ = support.train(model, (20, 3, 14), steps=4, one_batch=True)
        return losses, list(model.parameters())

    losses, weights = train()
    assert losses[-1] < losses[0]
    for flag in ("0", "1"):
        monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", flag)
        again, others = train()
        assert all(map(torch.equal, again, losses)) and all(map(torch.equal, others, weights))
    other_losses, _ = train(seed=1)
    assert not any(map(torch.equal, other_losses, losses))


def test_losses_repeat_where_those_of_sums_in_any_order_do_not():
    """The twin of the test on GPUs, where the order in which atomic adds arrive is by chance; here it is drawn."""
    chance = random.Random(0)
    AttentionInterface.register(curves.NOISY, curves.noisy_attention(chance))
    AttentionMaskInterface.register(curves.NOISY, AttentionMaskInterface()["sdpa"])

    def run(attention):
        return curves.losses(make_model("llama", attention), (2, 32), steps=6, one_batch=True)

    try:
        ours, noisy = run(NAME), run(curves.NOISY)
        assert ours[-1] < ours[0] and noisy[-1] < noisy[0]
        assert curves.first_that_differs(lambda: run(NAME), ours, tries=3) is None
        assert curves.first_that_differs(lambda: run(curves.NOISY), noisy, tries=3) is not None
        # It is the order alone: without chance these repeat too.
        chance.seed(1)
        noisy = run(curves.NOISY)
        chance.seed(1)
        assert torch.equal(run(curves.NOISY), noisy)
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(curves.NOISY, None)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiled(name):
    torch._dynamo.reset()
    ids, d_logits = support.random_ids(2, 23), support.cotangent((2, 23))
    model = make_model(name, NAME)
    logits, gradients = logits_and_gradients(model, ids, d_logits)
    compiled = torch.compile(model, backend="aot_eager")
    with kernel_calls() as calls:
        again, others = logits_and_gradients(compiled, ids, d_logits)
    assert [kernel for kernel, _ in calls] == ["forward"] * LAYERS + ["backward"] * LAYERS
    assert torch.equal(again, logits)
    assert all(torch.equal(others["_orig_mod." + key], gradients[key]) for key in gradients)


def test_compiled_with_symbolic_numbers():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ids, d_logits = support.random_ids(2, 23), support.cotangent((2, 23))
    model = make_model("llama", NAME)
    logits, gradients = logits_and_gradients(model, ids, d_logits)
    compiled = torch.compile(model, backend="eager", dynamic=True)
    again, others = logits_and_gradients(compiled, ids, d_logits)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(again, logits)
    assert all(torch.equal(others["_orig_mod." + key], gradients[key]) for key in gradients)


def test_packs_by_position_ids_train_with_dropout():
    """transformers passes the longest length of such a pack in a tensor."""

    def train(**changes):
        return support.train(make_model("llama", NAME, **changes), (20, 3, 14), steps=2)

    (losses, gradients), (again, others) = (train(attention_dropout=0.1) for _ in range(2))
    assert all(map(torch.equal, again, losses))
    assert all(torch.equal(others[key], gradients[key]) for key in gradients)
    assert not torch.equal(train()[0][0], losses[0])


@torch.no_grad()
def test_encoder():
    """ModernBERT: no causal mask, windows to both sides in some layers, padding."""
    from transformers import AutoModel, ModernBertConfig

    def make(attention, dtype):
        config = ModernBertConfig(
            vocab_size=support.VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=4, local_attention=8, global_attn_every_n_layers=2, initializer_range=0.2,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        )  # fmt: skip
        torch.manual_seed(0)
        return AutoModel.from_config(config, attn_implementation=attention, dtype=torch.bfloat16).to(dtype).eval()

    ids, mask = support.random_ids(2, 23), torch.ones(2, 23).long()
    mask[0, 15:] = 0
    calls = check(make, lambda model: model(ids, attention_mask=mask).last_hidden_state[mask.bool()][None])
    masks = [[arguments[key] for key in ("causal", "window_left", "window_right")] for _, arguments in calls]
    assert masks == [[False, -1, -1], [False, 4, 4], [False, -1, -1]]
    assert all(arguments["cu_seqlens_k"].tolist() == [0, 15, 38] for _, arguments in calls)


@torch.no_grad()
def test_vision_tower():
    """Qwen2.5-VL's: one call for all images, and another for all their windows."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

    def make(attention, dtype):
        config = qwen.Qwen2_5_VLVisionConfig(
            depth=2, hidden_size=64, intermediate_size=96, num_heads=4, out_hidden_size=32, patch_size=4,
            window_size=16, fullatt_block_indexes=[1], initializer_range=0.2,
        )  # fmt: skip
        tower = qwen.Qwen2_5_VisionTransformerPretrainedModel
        torch.manual_seed(0)
        return tower._from_config(config, attn_implementation=attention, dtype=torch.bfloat16).to(dtype).eval()

    images = torch.tensor([[1, 8, 6], [2, 4, 4]])
    patches = torch.randn(80, 96, generator=torch.Generator().manual_seed(0)).double()
    calls = check(make, lambda model: model(patches, grid_thw=images).pooler_output[None])
    offsets = [arguments["cu_seqlens_q"].tolist() for _, arguments in calls]
    assert offsets == [[0, 16, 24, 40, 48, 64, 80], [0, 48, 64, 80]]
    assert not any(arguments["causal"] for _, arguments in calls)


def test_dropout_follows_torchs_generator():
    model, ids = make_model("llama", NAME, attention_dropout=0.1), support.random_ids(1, 5)

    def logits(seed):
        torch.manual_seed(seed)
        return model(ids).logits

    assert torch.equal(logits(1), logits(1)) and not torch.equal(logits(1), logits(2))
    model.eval()
    assert torch.equal(logits(1), logits(2))


def test_float32_raises():
    model = make_model("llama", NAME, torch.float32)
    with pytest.raises(TypeError, match="^q must be torch.bfloat16 or torch.float16, got torch.float32"):
        model(support.random_ids(1, 5))
    with torch.autocast("cpu", torch.bfloat16):
        model(support.random_ids(1, 5))

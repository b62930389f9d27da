"""Four-dimensional attention masks in tiny models of transformers, against their eager attention."""

import functools

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("kernels")

import transformers_support as support
from interface_support import kernel_calls
from test_transformers import check
from transformers import modeling_flash_attention_utils
from transformers_support import LAYERS, logits_and_gradients, make_model
from transformers_support import installed as installed  # an autouse fixture

from dash_attn.integrations import _transformers_masks
from dash_attn.integrations.transformers import NAME

SEQLEN = 23
TOKEN = torch.arange(SEQLEN)
CAUSAL = TOKEN[:, None] >= TOKEN
MASKS = {
    "documents": CAUSAL & ((TOKEN[:, None] < 9) == (TOKEN < 9)),
    # Two branches, of the tokens 6 to 14 and of the later ones.
    "tree": CAUSAL & ~((TOKEN[:, None] >= 15) & (TOKEN >= 6) & (TOKEN < 15)),
    # The tokens of the prefix see each other in both directions.
    "prefix": CAUSAL | (TOKEN < 7),
}


def as_given(visible, dtype):
    """(2, 1, seqlen, seqlen): the mask of both sequences, as bool or as numbers to add."""
    mask = visible.expand(2, 1, -1, -1).contiguous()
    if dtype is torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("which", MASKS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss"])
def test_masks_of_all_pairs(name, which, dtype):
    """The mask replaces those of the model, windows too, as with eager attention."""
    ids, d_logits = support.random_ids(2, SEQLEN), support.cotangent((2, SEQLEN))
    mask, number = as_given(MASKS[which], dtype), as_given(MASKS[which], torch.float32)

    def call(model):
        return logits_and_gradients(model, ids, d_logits, attention_mask=mask)

    def call_eager(model):
        return logits_and_gradients(model, ids, d_logits, attention_mask=number)

    calls = check(functools.partial(make_model, name), call, call_eager)
    assert [kernel for kernel, _ in calls] == ["forward"] * LAYERS + ["backward"] * LAYERS
    for _, arguments in calls:
        columns = arguments["startend_row_indices"]
        assert columns.shape == (2, 1, SEQLEN, 2 if which == "prefix" else 1)
        assert arguments["causal"] == (which != "prefix") and arguments["window_left"] == -1


def test_a_mask_is_converted_once_for_all_layers(monkeypatch):
    converted = []
    monkeypatch.setattr(
        _transformers_masks.masks, "from_dense_mask",
        lambda visible, convert=_transformers_masks.masks.from_dense_mask: converted.append(1) or convert(visible),
    )  # fmt: skip
    model, ids, mask = make_model("llama", NAME), support.random_ids(2, SEQLEN), as_given(MASKS["tree"], torch.bool)
    first = model(ids, attention_mask=mask).logits
    assert len(converted) == 1 and torch.equal(model(ids, attention_mask=mask).logits, first) and len(converted) == 1
    mask.copy_(as_given(MASKS["documents"], torch.bool))
    assert not torch.equal(model(ids, attention_mask=mask).logits, first) and len(converted) == 2


def test_another_implementation_between_two_calls():
    """transformers then loads this one again."""
    model = make_model("llama", NAME)
    ids, mask = support.random_ids(2, SEQLEN), as_given(MASKS["tree"], torch.bool)
    expected = model(ids, attention_mask=mask).logits
    plain = model(ids).logits
    modeling_flash_attention_utils._loaded_implementation = "another"
    assert torch.equal(model(ids).logits, plain) and modeling_flash_attention_utils._loaded_implementation == NAME
    assert torch.equal(model(ids, attention_mask=mask).logits, expected)


REFUSED = [
    ((TOKEN[:, None] + TOKEN) % 3 > 0, ValueError, "visible must hide at most two runs of queries from each key"),
    (CAUSAL.long(), TypeError, "attention_mask must be of dtype bool or floating-point, got torch.int64"),
    (-CAUSAL.float(), ValueError, "attention_mask must hold 0 and numbers of at most -10000 only"),
]


@pytest.mark.parametrize("mask, error, message", REFUSED, ids=[message for _, _, message in REFUSED])
def test_masks_that_raise(mask, error, message):
    model = make_model("llama", NAME)
    with kernel_calls() as calls, pytest.raises(error, match=message):
        model(support.random_ids(2, SEQLEN), attention_mask=mask.expand(2, 1, -1, -1))
    assert not calls


def test_a_softcap_raises():
    model = make_model("gemma2", NAME)
    with pytest.raises(NotImplementedError, match="softcap must be 0.0 with startend_row_indices, got 2"):
        model(support.random_ids(2, SEQLEN), attention_mask=as_given(MASKS["tree"], torch.bool))


def test_compiled():
    torch._dynamo.reset()
    model, ids, mask = make_model("llama", NAME), support.random_ids(2, SEQLEN), as_given(MASKS["tree"], torch.bool)
    expected = model(ids, attention_mask=mask).logits
    assert torch.equal(torch.compile(model, backend="eager")(ids, attention_mask=mask).logits, expected)

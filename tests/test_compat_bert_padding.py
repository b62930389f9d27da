"""dash_attn.compat.bert_padding: padded batches to packs and back, and gradients through both."""

import importlib.util

import pytest
import torch
from interface_support import randn

from dash_attn.compat import bert_padding
from dash_attn.compat.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
@pytest.mark.parametrize("trailing", [(), (3,), (2, 4)])
def test_unpad_and_pad(dtype, trailing):
    hidden = randn(3, 5, *trailing)
    tokens, indices, cu_seqlens, max_seqlen, used = unpad_input(hidden, MASK.to(dtype))
    where = MASK.bool()
    assert torch.equal(tokens, hidden[where]) and indices.tolist() == [1, 2, 4, 10, 11, 12, 13, 14]
    assert cu_seqlens.tolist() == [0, 3, 3, 8] and used.tolist() == [3, 0, 5]
    assert (cu_seqlens.dtype, used.dtype, indices.dtype) == (torch.int32, torch.int32, torch.int64)
    assert max_seqlen == 5 and type(max_seqlen) is int
    padded = pad_input(tokens, indices, 3, 5)
    assert torch.equal(padded, hidden * where.view(3, 5, *(1,) * len(trailing)))
    (gradient,) = torch.autograd.grad(padded.float().square().sum(), hidden)
    assert torch.equal(gradient, 2 * padded.detach())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_places_that_are_not_used(dtype):
    unused = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).to(dtype)
    hidden = randn(3, 5, 2)
    tokens, indices, cu_seqlens, max_seqlen, used = unpad_input(hidden, MASK.to(dtype), unused)
    assert indices.tolist() == [0, 1, 2, 4, 6, 10, 11, 12, 13, 14] and cu_seqlens.tolist() == [0, 4, 5, 10]
    assert max_seqlen == 5 and used.tolist() == [3, 0, 5] and torch.equal(tokens, hidden.flatten(0, 1)[indices])


def test_tensors_of_any_strides():
    hidden = randn(5, 3, 2).transpose(0, 1)
    tokens, indices, *_ = unpad_input(hidden, MASK)
    assert torch.equal(tokens, hidden[MASK.bool()])
    assert torch.equal(pad_input(tokens, indices, 3, 5), hidden * MASK[..., None])


def test_concatenated_sequences():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 0, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    hidden = randn(4, 6, 2)
    tokens, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(hidden, lengths)
    places = [*range(5), *range(6, 11), *range(18, 24)]
    assert indices.tolist() == places and torch.equal(tokens, hidden.flatten(0, 1)[places])
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32
    assert max_seqlen == 6 and type(max_seqlen) is int


def test_gradients_of_rows():
    """Also of rows that are taken twice, whose gradients are added."""
    values, indices = randn(4, 3, dtype=torch.float64), torch.tensor([2, 0, 2, 1])
    assert torch.autograd.gradcheck(index_first_axis, (values, indices))
    assert torch.autograd.gradcheck(index_put_first_axis, (values, torch.tensor([5, 0, 3, 1]), 7))
    assert torch.equal(index_put_first_axis(values, torch.tensor([5, 0, 3, 1]), 7)[[5, 0, 3, 1]], values)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_gradients_of_rows_are_deterministic():
    """Of rows that are taken thousands of times, by two threads."""
    rows = randn(4, 64, dtype=torch.float32)
    indices = torch.randint(0, 4, (20000,), generator=torch.Generator().manual_seed(0))
    gradient = randn(20000, 64, dtype=torch.float32, seed=1).detach()
    first, *others = (torch.autograd.grad(index_first_axis(rows, indices), rows, gradient)[0] for _ in range(20))
    assert all(torch.equal(other, first) for other in others)


def test_a_batch_of_nothing():
    for batch, seqlen in ((0, 5), (2, 0), (0, 0)):
        hidden, mask = torch.zeros(batch, seqlen, 3), torch.zeros(batch, seqlen, dtype=torch.int64)
        tokens, indices, cu_seqlens, longest, used = unpad_input(hidden, mask)
        assert tokens.shape == (0, 3) and cu_seqlens.tolist() == [0] * (batch + 1) and used.tolist() == [0] * batch
        assert longest == 0 and pad_input(tokens, indices, batch, seqlen).shape == hidden.shape
        tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(hidden, mask)
        assert tokens.shape == (0, 3) and cu_seqlens.tolist() == [0] and longest == 0


HIDDEN = torch.zeros(2, 8, 1)
ONES = torch.ones(2, 8, dtype=torch.int64)
SHAPE = "{} must be (batch, seqlen) like hidden_states, of shape {}, got {}"
LENGTHS = "attention_mask_in_length must hold lengths with a sum of at most seqlen=8 per row, got others"
INDICES = "indices must be from 0 to 15, the last row of the result, got others"


@pytest.mark.parametrize("function, arguments, error, message", [
    (unpad_input, (HIDDEN, ONES[:, :4]), ValueError, SHAPE.format("attention_mask", (2, 8, 1), (2, 4))),
    (unpad_input, (HIDDEN[:, 0, 0], ONES[:, 0]), ValueError, SHAPE.format("attention_mask", (2,), (2,))),
    (unpad_input, (HIDDEN, ONES, ONES[:1]), ValueError, SHAPE.format("unused_mask", (2, 8, 1), (1, 8))),
    (unpad_input, (HIDDEN, None), TypeError, "attention_mask must be a torch.Tensor, got None (NoneType)"),
    (unpad_input, (HIDDEN, ONES.float()), TypeError,
     "attention_mask must be of bool or an integer dtype, got torch.float32"),
    (unpad_input, (HIDDEN, 2 * ONES), ValueError, "attention_mask must hold only 0 and 1, got other values"),
    (unpad_input, (HIDDEN, -ONES), ValueError, "attention_mask must hold only 0 and 1, got other values"),
    (unpad_input, (HIDDEN, ONES, ONES), ValueError,
     "attention_mask + unused_mask must hold only 0 and 1, got other values"),
    (unpad_input_for_concatenated_sequences, (HIDDEN, torch.tensor([[9, 3, 0, 0, 0, 0, 0, 0], [2] + [0] * 7])),
     ValueError, LENGTHS),
    (unpad_input_for_concatenated_sequences, (HIDDEN, torch.tensor([[4, -3, 0, 0, 0, 0, 0, 0], [2] + [0] * 7])),
     ValueError, LENGTHS),
    (unpad_input_for_concatenated_sequences, (HIDDEN, ONES[:, :1]), ValueError,
     SHAPE.format("attention_mask_in_length", (2, 8, 1), (2, 1))),
    (unpad_input_for_concatenated_sequences, (HIDDEN, ONES.bool()), TypeError,
     "attention_mask_in_length must be of an integer dtype, got torch.bool"),
    (pad_input, (HIDDEN[0], ONES[0].cumsum(0) + 8, 2, 8), ValueError, INDICES),
    (pad_input, (HIDDEN[0], ONES[0].cumsum(0) - 2, 2, 8), ValueError, INDICES),
    (pad_input, (HIDDEN[0], ONES[0, :7], 2, 8), ValueError,
     "indices must have one entry per row of the values, of shape (8, 1), got (7,)"),
    (pad_input, (HIDDEN[0], ONES[0].int(), 2, 8), TypeError, "indices must be torch.int64, got torch.int32"),
])  # fmt: skip
def test_errors(function, arguments, error, message):
    with pytest.raises(error) as raised:
        function(*arguments)
    assert str(raised.value) == message


def test_rearrange_is_that_of_einops():
    if importlib.util.find_spec("einops") is None:
        assert not hasattr(bert_padding, "rearrange")
    else:
        assert bert_padding.rearrange is importlib.import_module("einops").rearrange

"""Bits of dropout that are made beside other work, bits for a mask, and bits that the backward makes again."""

from dataclasses import replace

import pytest
import torch
from float64_reference import visible_keys
from test_dropout import results, saved_for_backward, tensors
from torch.nn import functional

from dash_attn import flash_attn_func, flash_attn_varlen_func
from dash_attn.dropout import DropoutState, dropout_bits, dropout_bits_beside

BF16 = torch.bfloat16
SIZES = {"batch": 2, "heads": 4, "seqlen_q": 40, "seqlen_k": 40}
STATE = DropoutState.of(3, 5)
OF_BITS = {"state": STATE, "p": 0.2, **SIZES}


def bits_like(**arguments):
    return dropout_bits(STATE, **{"p": 0.2, **SIZES, **arguments})


@pytest.mark.parametrize("arguments", [
    {"rounds": 10}, {"mapping": "flash_attention_2"}, {"first_head": 2, "total_heads": 9},
    {"first_query": 32, "first_key": 64}, {"p": 0.0}, {"seqlen_q": 0}, {"batch": 0},
], ids=str)  # fmt: skip
def test_bits_are_those_of_dropout_bits(arguments):
    with dropout_bits_beside(**{**OF_BITS, **arguments, "keep_bits": True}) as beside:
        pass
    found, expected = beside.bits, bits_like(**arguments)
    assert torch.equal(found.bits, expected.bits)
    assert {**vars(found), "bits": None} == {**vars(expected), "bits": None}


def attention(inputs, dout, bits, **arguments):
    return results(flash_attn_func, inputs, dout, dropout_p=0.2, dropout_bits=bits, **arguments)


@pytest.mark.parametrize("own_states", [False, True])
def test_the_backward_makes_bits_again(own_states):
    *inputs, dout = tensors(2, 40)
    state = DropoutState(torch.arange(4).view(2, 2)) if own_states else STATE
    arguments = {**OF_BITS, "state": state}
    with dropout_bits_beside(**arguments) as beside:
        pass
    expected = attention(inputs, dout, dropout_bits(**arguments))
    for found in (beside.bits, dropout_bits(**arguments, keep_bits=False)):
        assert all(map(torch.equal, attention(inputs, dout, found), expected))
        assert {x.dtype for x in saved_for_backward(dropout_bits=found)} == {BF16, torch.float32, torch.int64}


def test_a_state_that_is_refilled_after_the_bits_were_made():
    *inputs, dout = tensors(2, 40)
    expected = attention(inputs, dout, dropout_bits(**OF_BITS))
    state = DropoutState(STATE.rng_state.clone())
    arguments = {**OF_BITS, "state": state, "keep_bits": False}
    with dropout_bits_beside(**arguments) as beside:
        pass
    found = beside.bits, dropout_bits(**arguments)
    state.rng_state.fill_(7)
    assert all(torch.equal(x, y) for one in found for x, y in zip(attention(inputs, dout, one), expected))


def test_the_backward_of_a_pack_makes_bits_again():
    *inputs, dout = tensors(60)
    offsets = torch.tensor([0, 40, 60], dtype=torch.int32)
    arguments = {"dropout_p": 0.2, "causal": True}
    kept, made_again = (
        results(
            flash_attn_varlen_func, inputs, dout, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=hint,
            max_seqlen_k=hint, dropout_bits=bits_like(keep_bits=keep), **arguments,
        )
        for keep, hint in ((True, 40), (False, 1))  # bits say themselves how long sequences may be
    )  # fmt: skip
    assert all(map(torch.equal, kept, made_again))


@pytest.mark.parametrize("mask", [
    {"causal": True}, {"window_size": (10, 5)}, {"causal": True, "window_size": (10, -1)}, {"attention_chunk": 16},
], ids=str)  # fmt: skip
def test_bits_for_a_mask(mask):
    *inputs, dout = tensors(2, 40)
    expected = attention(inputs, dout, bits_like(), **mask)
    with dropout_bits_beside(**OF_BITS, **mask) as beside:
        pass
    for found in (beside.bits, bits_like(**mask)):
        assert all(map(torch.equal, attention(inputs, dout, found, **mask), expected))


@pytest.mark.parametrize("of_bits, of_call", [
    ({"causal": True}, {"causal": True, "window_size": (10, -1)}),
    ({"causal": True}, {"window_size": (70, 0)}),
    ({"window_size": (10, 0)}, {"causal": True, "window_size": (10, 9)}),
    ({"window_size": (40, -1)}, {"causal": True, "window_size": (10, -1)}),
    ({"window_size": (-1, 30)}, {"causal": True}),
    ({"window_size": (60, 30)}, {"window_size": (10, 5)}),
    ({"attention_chunk": 64}, {"attention_chunk": 16}),
    ({"attention_chunk": 64}, {"attention_chunk": 64, "causal": True}),
    ({"attention_chunk": 96, "causal": True}, {"attention_chunk": 32, "window_size": (9, 0)}),
], ids=str)  # fmt: skip
def test_bits_for_a_mask_that_hides_less(of_bits, of_call):
    """Also where the blocks of bits that are left out on a GPU hold something else."""
    *inputs, dout = tensors(2, 150)
    lengths = {"seqlen_q": 150, "seqlen_k": 150}
    every, found = bits_like(**lengths), bits_like(**lengths, **of_bits)
    limits = {"window": found.window_size, "attention_chunk": found.attention_chunk}
    seen = functional.pad(visible_keys(150, 150, found.causal, **limits), (0, 10, 0, 10))
    left_out = ~seen.view(5, 32, 5, 32).any(3).any(1)
    assert left_out.any()
    found.bits[:, :, left_out] ^= 255
    expected = attention(inputs, dout, every, **of_call)
    assert all(map(torch.equal, attention(inputs, dout, found, **of_call), expected))
    assert not torch.equal(attention(inputs, dout, every)[0], attention(inputs, dout, replace(found, **NO_MASK))[0])


NO_MASK = {"causal": False, "window_size": (-1, -1), "attention_chunk": 0}
OF_MASK = (
    "dropout_bits must be made for a mask no narrower than the call's, causal=False, window_size=(-1, 7), "
    "attention_chunk={}, got bits for causal={}, window_size={}, attention_chunk={}"
)


@pytest.mark.parametrize("bits, message", [
    ({"causal": True}, OF_MASK.format(12, True, (-1, -1), 0)),
    ({"window_size": (3, 7)}, OF_MASK.format(12, False, (3, 7), 0)),
    ({"window_size": (-1, 6)}, OF_MASK.format(12, False, (-1, 6), 0)),
    ({"attention_chunk": 6}, OF_MASK.format(12, False, (-1, -1), 6)),
    ({"attention_chunk": 32}, OF_MASK.format(12, False, (-1, -1), 32)),
    ({"window_size": (-1, 7), "seqlen_k": 39},
     "dropout_bits made for a mask must have the call's 40 queries and 40 keys, got bits for 40 and 39"),
], ids=str)  # fmt: skip
def test_bits_for_another_mask_raise(bits, message):
    *inputs, dout = tensors(2, 40)
    with pytest.raises(ValueError) as raised:
        attention(inputs, dout, bits_like(**bits), window_size=(-1, 7), attention_chunk=12)
    assert str(raised.value) == message


def test_bits_of_chunks_are_for_no_call_without():
    *inputs, dout = tensors(2, 40)
    with pytest.raises(ValueError, match="^dropout_bits must be made for a mask no narrower than the call's, "):
        attention(inputs, dout, bits_like(attention_chunk=8))


def test_bits_for_a_mask_are_of_no_pack():
    *inputs, _ = tensors(80)
    offsets = torch.tensor([0, 40, 80], dtype=torch.int32)
    message = r"^dropout_bits must be made without a mask for a variable-length batch, got bits for causal=True, window"
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(
            *inputs, offsets, offsets, 40, 40, dropout_p=0.2, dropout_bits=bits_like(causal=True), causal=True
        )


def test_bits_beside_are_there_when_the_block_has_ended():
    message = "^bits are available only after the block of dropout_bits_beside has ended, got none yet$"
    beside = dropout_bits_beside(**OF_BITS)
    with beside:
        with pytest.raises(RuntimeError, match=message):
            _ = beside.bits
    assert torch.equal(beside.bits.bits, bits_like().bits) and not beside.bits.keep_bits
    with (
        pytest.raises(RuntimeError, match="^a dropout_bits_beside can be entered only once, got a second time$"),
        beside,
    ):
        pass
    failed = dropout_bits_beside(**OF_BITS)
    with pytest.raises(KeyError), failed:
        raise KeyError
    with pytest.raises(RuntimeError, match=message):
        _ = failed.bits


@pytest.mark.parametrize("change, error, message", [
    ({"state": 3}, TypeError, "state must be a DropoutState, got int"),
    ({"causal": 2}, TypeError, "causal must be a bool, got 2"),
    ({"sm_margin": -1}, ValueError,
     "sm_margin must be at least 0 and less than the SMs of the GPU (at most 144 on Hopper), got -1"),
    ({"keep_bits": None}, TypeError, "keep_bits must be a bool, got None (NoneType)"),
    ({"rounds": 10}, ValueError,
     "keep_bits must be True with rounds=10, because the backward generates bits only with rounds=7, got False"),
    ({"mapping": "flash_attention_2"}, ValueError,
     "keep_bits must be True with mapping='flash_attention_2', because the backward generates bits only with "
     "mapping='bit_sliced', got False"),
    ({"total_heads": 8}, ValueError,
     "keep_bits must be True with total_heads=8, because the backward generates bits only with total_heads=4, "
     "got False"),
    ({"first_key": 32}, ValueError,
     "keep_bits must be True with first_key=32, because the backward generates bits only with first_key=0, "
     "got False"),
], ids=str)  # fmt: skip
def test_errors(change, error, message):
    with pytest.raises(error) as raised:
        dropout_bits_beside(**{**OF_BITS, **change})
    assert str(raised.value) == message

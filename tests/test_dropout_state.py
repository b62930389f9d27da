"""States of dropout and the errors of `dash_attn.dropout`."""

import math

import numpy as np
import pytest
import torch

from dash_attn.dropout import DropoutState, dropout_bits, keep_probability

SIZES = {"p": 0.1, "batch": 2, "heads": 2, "seqlen_q": 8, "seqlen_k": 8}


def test_states_are_reproducible_under_manual_seed():
    torch.manual_seed(7)
    first, second = DropoutState.draw(), DropoutState.draw(batch=3)
    torch.manual_seed(7)
    assert torch.equal(DropoutState.draw().rng_state, first.rng_state)
    assert torch.equal(DropoutState.draw(batch=3).rng_state, second.rng_state)
    assert first.rng_state.shape == (2,) and second.rng_state.shape == (3, 2)
    assert not torch.equal(DropoutState.draw().rng_state, first.rng_state)
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    drawn = [DropoutState.draw(generator=generator).rng_state for generator in generators]
    assert torch.equal(*drawn)


def test_states_of_numbers_use_all_bits():
    state = DropoutState.of(2**64 - 1, 2**63)
    assert state.rng_state.tolist() == [-1, -(2**63)]
    assert torch.equal(dropout_bits(state, **SIZES).bits, dropout_bits(DropoutState.of(-1, -(2**63)), **SIZES).bits)


def test_empty_sizes():
    for empty in ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}):
        sizes = {**SIZES, **empty}
        mask = dropout_bits(DropoutState.of(1), **sizes).mask()
        assert mask.shape == (sizes["batch"], 2, sizes["seqlen_q"], sizes["seqlen_k"])


P = "p must be from 0 to below 1 in fp32, got "


@pytest.mark.parametrize("arguments, error, message", [
    ({"p": 1.0}, ValueError, P + "1.0"),
    ({"p": 1 - 1e-12}, ValueError, P + "0.999999999999"),
    ({"p": -0.1}, ValueError, P + "-0.1"),
    ({"p": math.nan}, ValueError, P + "nan"),
    ({"p": "0.1"}, TypeError, "p must be a number from 0 to below 1, got '0.1'"),
    ({"p": torch.tensor(0.1)}, TypeError, "p must be a number from 0 to below 1, got a tensor of shape ()"),
    ({"p": True}, TypeError, "p must be a number from 0 to below 1, got True"),
    ({"batch": -1}, ValueError, "batch must be from 0 to 65536, got -1"),
    ({"batch": 65537}, ValueError, "batch must be from 0 to 65536, got 65537"),
    ({"batch": 2.0}, TypeError, "batch must be an int, got 2.0"),
    ({"heads": 0}, ValueError, "heads must be from 1 to 65536, got 0"),
    ({"seqlen_q": 2**30}, ValueError, "seqlen_q must be from 0 to 1073741823, got 1073741824"),
    ({"seqlen_k": -1}, ValueError, "seqlen_k must be from 0 to 1073741823, got -1"),
    ({"mapping": "cudnn"}, ValueError, "mapping must be one of 'bit_sliced', 'flash_attention_2', got 'cudnn'"),
    ({"p": np.array([0.1, 0.2])}, TypeError,
     "p must be a number from 0 to below 1, got numpy.ndarray of shape (2,)"),
    ({"p": 10**400}, ValueError, P + "an integer of 1329 bits"),
    ({"rounds": 5}, ValueError, "rounds must be one of 7, 10, got 5"),
    ({"rounds": 7.0}, TypeError, "rounds must be an int, got 7.0"),
    ({"rounds": np.array([7, 10])}, TypeError, "rounds must be an int, got numpy.ndarray of shape (2,)"),
    ({"mapping": "flash_attention_2", "rounds": 10}, ValueError,
     "rounds must be 7 with mapping='flash_attention_2', got 10"),
    ({"first_head": -1}, ValueError, "first_head must be from 0 to 65534, got -1"),
    ({"first_head": 3, "total_heads": 4}, ValueError, "total_heads must be from 5 to 65536, got 4"),
    ({"first_query": 16}, ValueError, "first_query must be a multiple of 32, got 16"),
    ({"first_key": -32}, ValueError, "first_key must be from 0 to 1073741815, got -32"),
    ({"state": DropoutState(torch.zeros(3, 2, dtype=torch.int64))}, ValueError,
     "state must have one row for each of the 2 sequences, got 3"),
    ({"state": torch.zeros(2, dtype=torch.int64)}, TypeError, "state must be a DropoutState, got Tensor"),
    ({"state": DropoutState(torch.zeros(2, dtype=torch.int64, device="meta"))}, NotImplementedError,
     "state must be on the CPU or a CUDA device, got meta"),
])  # fmt: skip
def test_errors(arguments, error, message):
    arguments = {"state": DropoutState.of(1), **SIZES, **arguments}
    with pytest.raises(error) as raised:
        dropout_bits(arguments.pop("state"), **arguments)
    assert str(raised.value) == message


@pytest.mark.parametrize("state, error, message", [
    ([1, 2], TypeError, "rng_state must be a torch.Tensor, got [1, 2]"),
    (torch.zeros(2), TypeError, "rng_state must be torch.int64, got torch.float32"),
    (torch.zeros(3, dtype=torch.int64), ValueError, "rng_state must have shape (2,) or (batch, 2), got (3,)"),
    (torch.zeros((), dtype=torch.int64), ValueError, "rng_state must have shape (2,) or (batch, 2), got ()"),
])  # fmt: skip
def test_errors_of_states(state, error, message):
    with pytest.raises(error) as raised:
        DropoutState(state)
    assert str(raised.value) == message


def test_errors_of_numbers():
    with pytest.raises(ValueError, match="^seed must be from -9223372036854775808 to 18446744073709551615, got "):
        DropoutState.of(2**64)
    with pytest.raises(ValueError, match="^batch must be from 0 to 1073741823, got -1$"):
        DropoutState.draw(batch=-1)
    with pytest.raises(ValueError, match="^p must be from 0 to below 1 in fp32, got 1.5$"):
        keep_probability(1.5)

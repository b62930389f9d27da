"""The generator of dropout's bits: on the GPU it makes, byte for byte, what the host makes."""

import pytest
import torch
import torch.nn.functional as F
from float64_reference import visible_keys

from dash_attn import flash_attn_func
from dash_attn.dropout import DropoutState, dropout_bits, layout

SIZES = dict(batch=3, heads=5, seqlen_q=135, seqlen_k=1100)
MAPPINGS = [("bit_sliced", 7), ("bit_sliced", 10), ("flash_attention_2", 7)]
MAPPING = pytest.mark.parametrize("mapping, rounds", MAPPINGS)
REACH = 127  # of the largest tile of the backward
STATES = {
    "small": (3, 5),
    "high words": (2**63 + 12345, (0xDEADBEEF << 32) + 0xFFFFFFF0),
    "all ones": (2**64 - 1, 2**64 - 1),
}


def state_of(name: str, batch: int, own: bool, device: str) -> DropoutState:
    seed, offset = STATES[name]
    states = [DropoutState.of(seed + b if seed < 2**63 else seed - b, offset - b).rng_state for b in range(batch)]
    return DropoutState((torch.stack(states) if own else states[0]).to(device))


def assert_as_on_the_host(state: DropoutState, **arguments) -> None:
    found = dropout_bits(state, **arguments).bits
    expected = dropout_bits(DropoutState(state.rng_state.cpu()), **arguments).bits
    assert found.device == state.rng_state.device
    differ = (found.cpu() != expected).nonzero()
    assert not len(differ), f"{arguments}: {len(differ)} bytes differ, the first at {differ[0].tolist()}"


@MAPPING
@pytest.mark.parametrize("own", [False, True], ids=["one state", "own states"])
def test_probabilities(own, mapping, rounds, device):
    for p in (0.1, 0.125, 0.5, 1e-30, 1e-6, 0.999, 1 - 2**-24):
        assert_as_on_the_host(state_of("small", 3, own, device), p=p, mapping=mapping, rounds=rounds, **SIZES)


@MAPPING
@pytest.mark.parametrize("name", STATES)
def test_states(name, mapping, rounds, device):
    for own in (False, True):
        assert_as_on_the_host(state_of(name, 3, own, device), p=0.1, mapping=mapping, rounds=rounds, **SIZES)


@MAPPING
def test_shards(mapping, rounds, device):
    state = state_of("high words", 3, False, device)
    for where in (
        dict(first_head=2, total_heads=9), dict(first_query=4096), dict(first_key=2**20),
        dict(first_head=7, total_heads=2**16, first_query=2**29, first_key=2**29 + 32),
    ):  # fmt: skip
        assert_as_on_the_host(state, p=0.1, mapping=mapping, rounds=rounds, **SIZES, **where)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (31, 33), (32, 512), (33, 513), (1, 16400), (2049, 1), (0, 9)])
def test_lengths(seqlen_q, seqlen_k, device):
    sizes = dict(batch=2, heads=3, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    assert_as_on_the_host(state_of("small", 2, True, device), p=0.1, **sizes)


def test_more_lines_than_warps(device):
    """So that each warp makes several."""
    assert_as_on_the_host(state_of("small", 2, False, device), p=0.125, batch=2, heads=16, seqlen_q=2048, seqlen_k=600)


def test_a_state_that_is_not_contiguous(device):
    state = torch.arange(12, device=device).view(2, 6).mT[1::2]
    assert state.shape == (3, 2) and not state.is_contiguous()
    assert_as_on_the_host(DropoutState(state), p=0.1, **SIZES)


def far_blocks(seqlen_q: int, seqlen_k: int, **mask) -> torch.Tensor:
    """bool (blocks of queries, blocks of keys): without any pair of a query and a key that it sees, REACH rows around
    the block or in it."""
    blocks = [layout.num_blocks(length) for length in (seqlen_q, seqlen_k)]
    seen = torch.zeros(32 * blocks[0], 32 * blocks[1], dtype=torch.bool)
    seen[:seqlen_q, :seqlen_k] = visible_keys(seqlen_q, seqlen_k, **mask)
    padded = F.pad(seen[None].float(), (REACH,) * 4)
    near = F.max_pool2d(padded, 32 + 2 * REACH, stride=32)
    return near[0] == 0


@pytest.mark.parametrize("mask", [
    dict(causal=False), dict(causal=True), dict(causal=False, window=(100, 40)), dict(causal=True, attention_chunk=70),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("lengths", [(600, 600), (300, 1000), (1000, 300)], ids=str)
def test_only_dead_blocks_are_left_out(lengths, mask, device):
    """What the raw op leaves keeps the poison: no tile of the backward with a pair that is seen has it."""
    sizes = dict(batch=2, heads=3, seqlen_q=lengths[0], seqlen_k=lengths[1])
    state = state_of("small", 2, True, device)
    whole = dropout_bits(state, p=0.1, **sizes).bits
    left, right = mask.get("window", (-1, -1))
    found = [torch.full_like(whole, poison) for poison in (0xA5, 0x5A)]
    for bits in found:
        torch.ops.dash_attn_C.dropout_bits(
            bits, state.rng_state, 0.1, *lengths, 0, 3, 0, 0, False, 7, mask["causal"], left, right,
            mask.get("attention_chunk", 0), 0,
        )  # fmt: skip
    far = far_blocks(*lengths, **mask).to(device)
    written = (found[0] == found[1]).all(dim=-1)
    assert bool((written | far).all()), "a block that a tile with a query that sees a key reaches was not written"
    assert torch.equal(found[0][written], whole[written])
    for bits, poison in zip(found, (0xA5, 0x5A)):
        assert bool((bits[~written] == poison).all()), "a line was written in part"
    # Of a window's or a chunk's blocks between the first and the last that are near none is left out; causal, none but
    # the far ones, where every query sees a key.
    if mask == dict(causal=False) or (mask == dict(causal=True) and lengths[0] <= lengths[1]):
        assert torch.equal(~written, far.expand_as(written))


@pytest.mark.parametrize("of_bits, of_call", [
    (dict(causal=True), dict(causal=True, window_size=(100, 0))),
    (dict(window_size=(-1, 90)), dict(causal=True)),
    (dict(window_size=(300, 200)), dict(window_size=(100, 40))),
    (dict(attention_chunk=280), dict(attention_chunk=70)),
], ids=str)  # fmt: skip
def test_bits_for_a_mask_that_hides_less(of_bits, of_call, device):
    """Serve a call as bits for every pair do, whatever is where blocks were left out."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 600, 4, 64, device=device, generator=generator).bfloat16().unbind(0)
    sizes = dict(p=0.1, batch=2, heads=4, seqlen_q=600, seqlen_k=600)
    results = []
    for mask in ({}, of_bits):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        bits = dropout_bits(DropoutState.of(1, 2, device), **sizes, **mask)
        out = flash_attn_func(*leaves, dropout_p=0.1, dropout_bits=bits, **of_call)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert all(map(torch.equal, *results))


def test_fewer_sms_make_the_same_bits(device, num_sms):
    state, sizes = state_of("small", 2, True, device), dict(batch=2, heads=8, seqlen_q=700, seqlen_k=900)
    whole = dropout_bits(state, p=0.1, **sizes).bits
    for sm_margin in (1, num_sms // 2, num_sms - 1):
        bits = torch.zeros_like(whole)
        torch.ops.dash_attn_C.dropout_bits(
            bits, state.rng_state, 0.1, 700, 900, 0, 8, 0, 0, False, 7, False, -1, -1, 0, sm_margin
        )
        assert torch.equal(bits, whole), sm_margin


def test_states_are_drawn_on_the_gpu(device):
    torch.manual_seed(1)
    first, second = DropoutState.draw(device), DropoutState.draw(device, batch=4)
    assert first.rng_state.is_cuda and tuple(second.rng_state.shape) == (4, 2)
    torch.manual_seed(1)
    assert torch.equal(DropoutState.draw(device).rng_state, first.rng_state)
    assert len(set(second.rng_state.flatten().tolist())) == 8
    # High words too: 64 bits are drawn.
    assert (second.rng_state >> 32).any(dim=0).all()

"""A linear layer that makes bits of dropout, bits made beside other work, and bits that the backward makes again."""

import itertools
from dataclasses import replace

import pytest
import torch
from float64_reference import visible_keys
from test_dropout import results, saved_for_backward, tensors
from torch.nn import functional

from dash_attn import _schedule, flash_attn_func, flash_attn_varlen_func
from dash_attn.dropout import DropoutState, dropout_bits, dropout_bits_beside, linear_with_dropout_bits

BF16 = torch.bfloat16
SIZES = {"batch": 2, "heads": 4, "seqlen_q": 40, "seqlen_k": 40}
STATE = DropoutState.of(3, 5)
OF_BITS = {"state": STATE, "p": 0.2, **SIZES}


def operands(*rows, depth=24, columns=16, dtype=BF16, bias=True, seed=0):
    """x, weight, bias and the gradient of y."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (*rows, depth), (columns, depth), (columns,), (*rows, columns)
    x, weight, b, dy = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return [y.requires_grad_() for y in (x, weight, b)[: 2 + bias]], dy


def bits_like(**arguments):
    return dropout_bits(STATE, **{"p": 0.2, **SIZES, **arguments})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("rows", [(5,), (2, 40), (2, 3, 4), (), (0,)], ids=str)
def test_output_and_gradients_are_those_of_torchs_linear(rows, dtype, bias):
    inputs, dy = operands(*rows, dtype=dtype, bias=bias)
    y, bits = linear_with_dropout_bits(*inputs, **OF_BITS)
    expected = functional.linear(*inputs)
    assert y.shape == expected.shape and y.dtype == dtype and torch.equal(y, expected)
    of_ours, of_torch = (torch.autograd.grad(out, inputs, dy) for out in (y, expected))
    assert all(map(torch.equal, of_ours, of_torch))
    assert torch.equal(bits.bits, bits_like().bits) and not bits.bits.requires_grad


def test_gradients_that_nobody_wants_are_not_made():
    for wanted in itertools.product((False, True), repeat=3):
        inputs, dy = operands(5)
        for x, wants in zip(inputs, wanted):
            x.requires_grad_(wants)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            y, _ = linear_with_dropout_bits(*inputs, **OF_BITS)
        assert y.requires_grad == any(wanted)
        assert len(saved) == wanted[0] + wanted[1], wanted
        if any(wanted):
            y.backward(dy)
        assert [x.grad is not None for x in inputs] == list(wanted)


def test_second_derivatives():
    inputs, dy = operands(5)
    dy.requires_grad_()
    found = []
    for layer in (lambda *x: linear_with_dropout_bits(*x, **OF_BITS)[0], functional.linear):
        dx, dweight, _ = torch.autograd.grad(layer(*inputs), inputs, dy, create_graph=True)
        found.append(torch.autograd.grad(dx.sum() + (dweight * dweight).sum(), [inputs[0], inputs[1], dy]))
    assert all(map(torch.equal, *found))


def test_only_autograd_differentiates_it():
    """Nothing else must count the output as constant."""
    (x, weight), _ = operands(5, bias=False)

    def call(x):
        return linear_with_dropout_bits(x, weight, **OF_BITS)[0].float().sum()

    def of_dual_tensors(x):
        with torch.autograd.forward_ad.dual_level(), torch.no_grad():
            call(torch.autograd.forward_ad.make_dual(x, x))

    for function in (torch.func.grad(call), lambda x: torch.func.jvp(call, (x,), (x,)), of_dual_tensors):
        with pytest.raises(NotImplementedError, match="^linear_with_dropout_bits must not be called under transforms"):
            function(x.detach())


def test_operands_of_any_strides():
    inputs = [x.detach().round() for x in operands(7, 6)[0]]  # sums of whole numbers are exact in any order
    x = torch.stack([inputs[0]] * 2, dim=-1)[..., 0]
    weight, bias = (torch.stack([y] * 3, dim=-1)[..., 1] for y in inputs[1:])
    y, _ = linear_with_dropout_bits(x.transpose(0, 1), weight, bias, **OF_BITS)
    assert torch.equal(y, functional.linear(inputs[0].transpose(0, 1), *inputs[1:]))


@pytest.mark.parametrize("arguments", [
    {"rounds": 10}, {"mapping": "flash_attention_2"}, {"first_head": 2, "total_heads": 9},
    {"first_query": 32, "first_key": 64}, {"p": 0.0}, {"seqlen_q": 0}, {"batch": 0},
], ids=str)  # fmt: skip
def test_bits_are_those_of_dropout_bits(arguments):
    inputs, _ = operands(5)
    keep = {"keep_bits": True}
    _, bits = linear_with_dropout_bits(*inputs, **{**OF_BITS, **arguments, **keep})
    with dropout_bits_beside(**{**OF_BITS, **arguments, **keep}) as beside:
        pass
    expected = bits_like(**arguments)
    for found in (bits, beside.bits):
        assert torch.equal(found.bits, expected.bits)
        assert {**vars(found), "bits": None} == {**vars(expected), "bits": None}


def test_autocast():
    inputs, _ = operands(5, dtype=torch.float32)
    with torch.autocast("cpu", BF16):
        y, _ = linear_with_dropout_bits(*inputs, **OF_BITS)
        assert y.dtype == BF16 and torch.equal(y, functional.linear(*inputs))
    y.sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in inputs)


NUMBERS = (STATE.rng_state, 0.2, 2, 4, 40, 40, 0, 4, 0, 0, "bit_sliced", 7, False, -1, -1, 0, 0)


@pytest.mark.parametrize("bias", [False, True])
def test_the_op_follows_torchs_rules(bias):
    inputs, _ = operands(5, bias=bias)
    arguments = (*inputs, *([] if bias else [None]), *NUMBERS)
    torch.library.opcheck(torch.ops.dash_attn.linear_with_dropout_bits.default, arguments)


def test_compiled_layers():
    inputs, dy = operands(5)

    def layer(x, weight, bias, rng_state):
        return torch.ops.dash_attn.linear_with_dropout_bits(x, weight, bias, rng_state, *NUMBERS[1:])

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y, bits = compiled(*inputs, STATE.rng_state)
    assert torch.equal(y, functional.linear(*inputs)) and torch.equal(bits, bits_like().bits)
    expected = torch.autograd.grad(functional.linear(*inputs), inputs, dy)
    assert all(map(torch.equal, torch.autograd.grad(y, inputs, dy), expected))


def test_a_compiled_model():
    """The public functions, as one graph."""
    x, weight = torch.randn(2, 40, 24).to(BF16), torch.randn(3 * 4 * 16, 24).to(BF16)

    def model(x):
        qkv, bits = linear_with_dropout_bits(x, weight, **OF_BITS, keep_bits=False)
        q, k, v = qkv.unflatten(-1, (3, 4, 16)).unbind(2)
        return flash_attn_func(q, k, v, dropout_p=0.2, dropout_bits=bits)

    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


def attention(inputs, dout, bits, **arguments):
    return results(flash_attn_func, inputs, dout, dropout_p=0.2, dropout_bits=bits, **arguments)


@pytest.mark.parametrize("own_states", [False, True])
def test_the_backward_makes_bits_again(own_states):
    *inputs, dout = tensors(2, 40)
    state = DropoutState(torch.arange(4).view(2, 2)) if own_states else STATE
    arguments = {**OF_BITS, "state": state}
    _, bits = linear_with_dropout_bits(*operands(5)[0], **arguments)
    with dropout_bits_beside(**arguments) as beside:
        pass
    expected = attention(inputs, dout, dropout_bits(**arguments))
    for found in (bits, beside.bits, dropout_bits(**arguments, keep_bits=False)):
        assert all(map(torch.equal, attention(inputs, dout, found), expected))
        assert {x.dtype for x in saved_for_backward(dropout_bits=found)} == {BF16, torch.float32, torch.int64}


def test_a_state_that_is_refilled_after_the_bits_were_made():
    *inputs, dout = tensors(2, 40)
    expected = attention(inputs, dout, dropout_bits(**OF_BITS))
    state = DropoutState(STATE.rng_state.clone())
    arguments = {**OF_BITS, "state": state, "keep_bits": False}
    _, bits = linear_with_dropout_bits(*operands(5)[0], **arguments)
    with dropout_bits_beside(**arguments) as beside:
        pass
    found = bits, beside.bits, dropout_bits(**arguments)
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
    _, bits = linear_with_dropout_bits(*operands(5)[0], **OF_BITS, **mask)
    for found in (bits, bits_like(**mask)):
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
    message = "^bits must be asked for when the block of dropout_bits_beside has ended, got none yet$"
    beside = dropout_bits_beside(**OF_BITS)
    with beside:
        with pytest.raises(RuntimeError, match=message):
            _ = beside.bits
    assert torch.equal(beside.bits.bits, bits_like().bits) and not beside.bits.keep_bits
    with pytest.raises(RuntimeError, match="^a dropout_bits_beside must be entered once, got a second time$"), beside:
        pass
    failed = dropout_bits_beside(**OF_BITS)
    with pytest.raises(KeyError), failed:
        raise KeyError
    with pytest.raises(RuntimeError, match=message):
        _ = failed.bits


def t(*shape, dtype=BF16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


X = "x must be (..., depth), the depth a multiple of 8 above 0, got "
WEIGHT = "weight must be (columns, 24), the columns a multiple of 8 above 0, got "


@pytest.mark.parametrize("change, error, message", [
    ({"x": 1}, TypeError, "x must be a torch.Tensor, got 1"),
    ({"x": t(5, 24, dtype=torch.float32)}, TypeError, "x must be torch.bfloat16 or torch.float16, got torch.float32"),
    ({"weight": t(16, 24, dtype=torch.float16)}, TypeError,
     "weight must be torch.bfloat16 as x is, got torch.float16"),
    ({"bias": t(16, dtype=torch.float32)}, TypeError, "bias must be torch.bfloat16 as x is, got torch.float32"),
    ({"x": t(5, 20)}, ValueError, X + "(5, 20)"),
    ({"x": t(5, 0)}, ValueError, X + "(5, 0)"),
    ({"x": t()}, ValueError, X + "()"),
    ({"weight": t(16, 32)}, ValueError, WEIGHT + "(16, 32)"),
    ({"weight": t(12, 24)}, ValueError, WEIGHT + "(12, 24)"),
    ({"weight": t(0, 24)}, ValueError, WEIGHT + "(0, 24)"),
    ({"weight": t(24)}, ValueError, WEIGHT + "(24,)"),
    ({"bias": t(8)}, ValueError, "bias must be (16,), got (8,)"),
    ({"bias": t(1, 16)}, ValueError, "bias must be (16,), got (1, 16)"),
    ({"weight": t(16, 24, device="meta")}, ValueError, "weight must be on the device of x, cpu, got meta"),
    ({"x": t(5, 24, device="meta")}, ValueError, "weight must be on the device of x, meta, got cpu"),
    ({"state": 3}, TypeError, "state must be a DropoutState, got int"),
    ({"p": 1.0}, ValueError, "p must be from 0 to below 1 in fp32, got 1.0"),
    ({"heads": 0}, ValueError, "heads must be from 1 to 65536, got 0"),
    ({"causal": 2}, TypeError, "causal must be a bool, got 2"),
    ({"sm_margin": -1}, ValueError,
     "sm_margin must be at least 0 and less than the SMs of the GPU (at most 144 on Hopper), got -1"),
    ({"keep_bits": None}, TypeError, "keep_bits must be a bool, got None (NoneType)"),
    ({"rounds": 10}, ValueError,
     "keep_bits must be True with rounds=10 (the backward makes bits again of rounds=7 alone), got False"),
    ({"mapping": "flash_attention_2"}, ValueError,
     "keep_bits must be True with mapping='flash_attention_2' (the backward makes bits again of mapping='bit_sliced' "
     "alone), got False"),
    ({"total_heads": 8}, ValueError,
     "keep_bits must be True with total_heads=8 (the backward makes bits again of total_heads=4 alone), got False"),
    ({"first_key": 32}, ValueError,
     "keep_bits must be True with first_key=32 (the backward makes bits again of first_key=0 alone), got False"),
], ids=str)  # fmt: skip
def test_errors(change, error, message):
    given = {"x": t(5, 24), "weight": t(16, 24), "bias": t(16), **OF_BITS, **change}
    with pytest.raises(error) as raised:
        linear_with_dropout_bits(**given)
    assert str(raised.value) == message


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("rows, columns", [(1, 8), (129, 512), (1000, 264), (2049, 2304), (16384, 6144)])
def test_every_tile_has_one_place(rows, columns, cluster):
    places = _schedule.linear_tiles(rows, columns, cluster=cluster)
    found = sum(places, [])
    row_tiles, column_tiles = -(-rows // 128), -(-columns // 256)
    wanted = set(itertools.product(range(row_tiles), range(column_tiles)))
    assert len(set(found)) == len(found) and wanted <= set(found)
    # What a cluster does beyond is less than a tile for each of its columns.
    assert len(found) - len(wanted) == (-row_tiles % cluster) * column_tiles
    for tiles in places:
        assert len({column for _, column in tiles}) == 1
        assert [row for row, _ in tiles] == list(range(tiles[0][0], tiles[0][0] + cluster))
    # Those of a time lie close together.
    if len(places) >= 64 * 4:
        block = sum(places[:64], [])
        assert len({row for row, _ in block}) == 8 * cluster and len({column for _, column in block}) == 8

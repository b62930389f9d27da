"""Head dims of every size up to 256, and a V whose head_dim differs from that of Q and K."""

import itertools
import math

import pytest
import torch
from float64_reference import (
    NEAR,
    attention_float64,
    attention_rounded,
    cancellation_bounds,
    error_limits,
    relative_error,
    visible_keys,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from interface_support import GRADIENTS, kernel_calls, out_and_gradients, randn

from dash_attn import (
    _schedule,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    schedule,
)
from dash_attn.tile_order import tile_order

ROWS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
# Rows of the table, and pairs of both orders that are padded to them: by TMA, or by copies where no multiple of 8.
PAIRS = [(192, 128), (192, 192), (256, 256), (128, 192), (136, 24), (40, 72), (200, 96), (8, 256), (9, 31), (250, 131)]


def tensors(head_dim, value_head_dim, seqlen_q=150, seqlen_k=170, heads=4, kv_heads=2, batch=1, dtype=torch.bfloat16):
    """q, k, v and dout."""
    q = randn(batch, seqlen_q, heads, head_dim, dtype=dtype, seed=1)
    k = randn(batch, seqlen_k, kv_heads, head_dim, dtype=dtype, seed=2)
    v = randn(batch, seqlen_k, kv_heads, value_head_dim, dtype=dtype, seed=3)
    return q, k, v, randn(batch, seqlen_q, heads, value_head_dim, dtype=dtype, seed=4).detach()


def test_each_pair_has_the_smallest_row_that_holds_it():
    for qk, v in itertools.product(range(1, 257), repeat=2):
        holding = [row for row in ROWS if qk <= row[0] and v <= row[1]]
        assert _schedule.padded_head_dims(qk, v) == min(holding, key=sum), (qk, v)
    assert _schedule.MAX_HEAD_DIM == 256
    assert _schedule.padded_head_dims(100) == (128, 128)


@pytest.mark.parametrize("qk, v, argument", [(0, 8, "head_dim"), (257, 8, "head_dim"), (8, 0, "value_head_dim")])
def test_no_row_of_the_table_has_a_head_dim_out_of_range(qk, v, argument):
    for function in (_schedule.padded_head_dims, schedule.tile_shape):
        with pytest.raises(ValueError, match=rf"^{argument} must be in \[1, 257\), got"):
            function(qk, v)


def test_a_pair_has_the_tiles_of_its_row():
    for (qk, v), row in {(150, 100): (192, 128), (100, 150): (192, 192), (1, 193): (256, 256)}.items():
        for tile_shape in (_schedule.backward_tile_shape, _schedule.forward_tile_shape):
            assert tile_shape(qk, v) == tile_shape(*row)
        arguments = {"causal": True, "group_size": 2}
        assert tile_order("auto", 500, 600, head_dim=qk, value_head_dim=v, **arguments) == (
            tile_order("auto", 500, 600, head_dim=row[0], value_head_dim=row[1], **arguments)
        )


@pytest.mark.parametrize("mask", [{"causal": False}, {"causal": True}, {"causal": True, "window": (40, 0)}], ids=str)
@pytest.mark.parametrize("head_dim, value_head_dim", PAIRS)
def test_outputs_and_gradients(head_dim, value_head_dim, mask):
    q, k, v, dout = tensors(head_dim, value_head_dim)
    arguments = {"causal": mask["causal"], "window_size": mask.get("window", (-1, -1))}
    out, dq, dk, dv = out_and_gradients(flash_attn_func, (q, k, v), dout, **arguments)
    assert out.shape == dout.shape and out.is_contiguous() == (value_head_dim % 8 == 0)
    exact = attention_float64(q, k, v, dout, **mask)
    limits = error_limits(exact, q, k, v, dout, out, rounded_factors=False, **mask)
    for name, actual in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv)):
        assert (actual.double() - getattr(exact, name)).norm() <= limits[name], name


@pytest.mark.parametrize("head_dim, value_head_dim", [(192, 128), (24, 256), (10, 6)])
def test_the_scale_is_that_of_queries_and_keys(head_dim, value_head_dim):
    q, k, v, dout = tensors(head_dim, value_head_dim)
    by_default = out_and_gradients(flash_attn_func, (q, k, v), dout)
    by_hand = out_and_gradients(flash_attn_func, (q, k, v), dout, softmax_scale=head_dim**-0.5)
    assert all(map(torch.equal, by_default, by_hand))


@pytest.mark.parametrize("head_dim, value_head_dim", PAIRS)
def test_what_the_kernels_are_given(head_dim, value_head_dim):
    """Each tensor with its own head dim, padded to a multiple of 8 and no further."""
    q, k, v, dout = tensors(head_dim, value_head_dim, 5, 6)
    with kernel_calls() as calls:
        out_and_gradients(flash_attn_func, (q, k, v), dout)
    qk, of_v = (math.ceil(d / 8) * 8 for d in (head_dim, value_head_dim))
    (_, forward), (_, backward) = calls
    given = {"q": qk, "k": qk, "v": of_v, "out": of_v}
    gradients = {"dout": of_v, "dq": qk, "dk": qk, "dv": of_v}
    for arguments, expected in ((forward, given), (backward, given | gradients)):
        assert {name: arguments[name].shape[-1] for name in expected} == expected


@pytest.mark.parametrize("policy", schedule.fitting(causal=True, head_dim=256))
@pytest.mark.parametrize("head_dim, value_head_dim", [(192, 128), (64, 200), (256, 256)])
def test_a_sequence_of_a_pack_has_the_bits_that_it_has_alone(head_dim, value_head_dim, policy):
    lengths = [(70, 90), (0, 40), (130, 60), (5, 0)]
    total_q, total_k = map(sum, zip(*lengths))
    q, k, v, dout = (x.detach().squeeze(0) for x in tensors(head_dim, value_head_dim, total_q, total_k))
    offsets = [torch.tensor([0, *itertools.accumulate(side)], dtype=torch.int32) for side in zip(*lengths)]
    options = {"causal": True, "schedule": policy}

    def of_pack(q, k, v):
        return flash_attn_varlen_func(q, k, v, *offsets, 130, 90, **options)

    packed = out_and_gradients(of_pack, [x.requires_grad_() for x in (q, k, v)], dout)
    rows_q, rows_k = ([slice(*pair) for pair in itertools.pairwise(side.tolist())] for side in offsets)
    for queries, keys in zip(rows_q, rows_k):
        inputs = [x.detach()[None, rows].requires_grad_() for x, rows in ((q, queries), (k, keys), (v, keys))]
        alone = out_and_gradients(lambda *x: flash_attn_func(*x, **options), inputs, dout[None, queries])
        for of_packed, of_one, rows in zip(packed, alone, (queries, queries, keys, keys), strict=True):
            assert torch.equal(of_packed[rows], of_one[0])


@settings(max_examples=25, deadline=None)
@given(
    dims=st.tuples(st.integers(1, 256), st.integers(1, 256)),
    lengths=st.tuples(st.integers(1, 140), st.integers(1, 140)),
    group=st.sampled_from([1, 2, 4]),
    causal=st.booleans(),
    order_free=st.booleans(),
)
def test_any_pair_in_fp16(dims, lengths, group, causal, order_free):
    policy = "order_free" if order_free and max(dims) <= 128 else "auto"
    inputs = tensors(*dims, *lengths, heads=4, kv_heads=4 // group, dtype=torch.float16)
    q, k, v, dout = inputs
    results = out_and_gradients(lambda *x: flash_attn_func(*x, causal=causal, schedule=policy), (q, k, v), dout)
    q, k, v, out = (x.detach() for x in (q, k, v, results[0]))
    exact = attention_float64(q, k, v, dout, causal=causal)
    rounded = attention_rounded(q, k, v, dout, out, rounded_factors=False, causal=causal)
    # Where a query sees one key alone, dq and what it adds to dk cancel to 0.
    visible = visible_keys(*lengths, causal)
    limits = cancellation_bounds(q, k, v, dout, dims[0] ** -0.5, visible & (visible.sum(dim=1, keepdim=True) == 1))
    limits |= {name: NEAR * (rounded[name] - getattr(exact, name)).norm() + limits.get(name, 0) for name in GRADIENTS}
    # P is rounded before it is normalised, and so to other neighbours: by 2^-11 at most, as the output is.
    limits["out"] = NEAR * 2**-11 * (attention_float64(q, k, v.abs(), causal=causal).out.norm() + exact.out.norm())
    for name, actual in zip(("out", *GRADIENTS), results, strict=True):
        assert actual.shape == getattr(exact, name).shape
        assert (actual.double() - getattr(exact, name)).norm() <= limits[name], name


def test_scores_sinks_and_the_gradient_of_the_log_sum_exp():
    """What changes scores looks at q and k alone, and the output at v."""
    q, k, v, dout = tensors(72, 24, 60, 50)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(5)).requires_grad_()
    slopes = torch.linspace(0.01, 0.2, 4)
    wide = torch.cat((v, torch.zeros_like(v)), dim=-1)[..., :48]
    wide_dout = torch.cat((dout, torch.zeros_like(dout)), dim=-1)
    for options in ({"softcap": 3.0}, {"alibi_slopes": slopes}, {}):

        def with_sinks(q, k, v, sinks, options=options):
            out, lse, _ = flash_attn_func(q, k, v, learnable_sink=sinks, return_attn_probs=True, **options)
            return torch.cat((out.float().flatten(), lse.flatten()))

        cotangent = torch.linspace(-1, 1, 4 * 60)
        narrow_dout = torch.cat((dout.float().flatten(), cotangent))
        padded_dout = torch.cat((wide_dout.float().flatten(), cotangent))
        narrow = out_and_gradients(with_sinks, (q, k, v, sinks), narrow_dout)
        wide_inputs = (q, k, wide.detach().requires_grad_(), sinks)
        padded = out_and_gradients(with_sinks, wide_inputs, padded_dout)
        outputs = padded[0][: 2 * dout.numel()].view(1, 60, 4, 48), narrow[0][: dout.numel()].view(1, 60, 4, 24)
        assert torch.equal(outputs[0][..., :24], outputs[1])
        for actual, expected in zip(narrow[1:], padded[1:], strict=True):
            assert relative_error(actual, expected[..., : actual.shape[-1]]) < 1e-6


def test_queries_without_keys_have_their_sinks():
    q, k, v, _ = tensors(40, 24, 7, 0)
    sinks = torch.arange(4.0).requires_grad_()
    out, lse, _ = flash_attn_func(q, k, v, learnable_sink=sinks, return_attn_probs=True)
    assert out.shape == (1, 7, 4, 24) and not out.any()
    assert torch.equal(lse, sinks.detach()[None, :, None].expand(1, 4, 7))
    gradients = torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v, sinks))
    assert [g.shape for g in gradients[:3]] == [q.shape, k.shape, v.shape]
    assert gradients[3].tolist() == [7.0] * 4


def test_packed_tensors_have_one_head_dim():
    q, k, v, dout = tensors(256, 256, 30, 30, heads=2, kv_heads=2)
    separate = out_and_gradients(flash_attn_func, (q, k, v), dout)
    kv = torch.stack((k, v), dim=2).detach().requires_grad_()
    out, dq, dkv = out_and_gradients(flash_attn_kvpacked_func, (q, kv), dout)
    assert all(map(torch.equal, (out, dq, *dkv.unbind(2)), separate))
    qkv = torch.stack((q, k, v), dim=2).detach().requires_grad_()
    out, dqkv = out_and_gradients(flash_attn_qkvpacked_func, (qkv,), dout)
    assert all(map(torch.equal, (out, *dqkv.unbind(2)), separate))


def test_meta_tensors_and_compile():
    q, k, v, dout = (x.detach() for x in tensors(72, 20, 12, 14))
    on_meta = [x.to("meta").requires_grad_() for x in (q, k, v)]
    out, lse, _ = flash_attn_func(*on_meta, return_attn_probs=True)
    assert out.shape == dout.shape and lse.shape == (1, 4, 12)
    gradients = torch.autograd.grad(out, on_meta, dout.to("meta"))
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected = out_and_gradients(flash_attn_func, inputs, dout)
    assert all(map(torch.equal, out_and_gradients(compiled, inputs, dout), expected))


@pytest.mark.parametrize(
    "place, shape, message",
    [
        (0, (2, 20, 4, 16), "dout must have the shape of q with the head_dim of v, (2, 20, 4, 24), got (2, 20, 4, 16)"),
        (4, (2, 20, 4, 16), "out must have the shape of q with the head_dim of v, (2, 20, 4, 24), got (2, 20, 4, 16)"),
        (6, (2, 20, 4, 24), "dq must have the shape of q, (2, 20, 4, 16), got (2, 20, 4, 24)"),
        (8, (2, 30, 2, 16), "dv must have the shape of v, (2, 30, 2, 24), got (2, 30, 2, 16)"),
        (3, (2, 30, 2, 20), "v must have a head_dim that is a multiple of 8, got 20"),
    ],
)
def test_the_backward_op_says_which_head_dim_is_wrong(place, shape, message):
    q, k, v, dout = (x.detach() for x in tensors(16, 24, 20, 30, batch=2))
    settings_ = (None, None, None, None, 0.25, True, -1, -1, 0)
    out, lse = torch.ops.dash_attn.forward(q, k, v, *settings_)
    arguments = [dout, q, k, v, out, lse, *map(torch.empty_like, (q, k, v)), *settings_, "auto", 0]
    torch.ops.dash_attn.backward(*arguments)
    arguments[place] = torch.zeros(shape, dtype=torch.bfloat16)
    with pytest.raises(ValueError) as error:
        torch.ops.dash_attn.backward(*arguments)
    assert str(error.value) == message


def test_what_order_free_noise_is_measured_by():
    """A row's limit has the columns of K squared and those of V once: pairs with the same product decide alike."""
    row = {"exponent": 16, "min_step_product": 600.0, "keys": 256, "tiles": 2}
    decisions = set()
    for dout_norm in (2.0**i for i in range(-6, 7)):
        same, coarser = (
            {_schedule.row_needs_order(dout_norm=dout_norm, head_dim=qk, value_head_dim=v, **row) for qk, v in pairs}
            for pairs in ([(64, 32), (32, 128), (128, 8)], [(128, 32)])
        )
        assert len(same) == 1
        decisions.add((same.pop(), coarser.pop()))
    assert decisions == {(True, True), (False, True), (False, False)}

"""The private functions of dash_attn.compat.flash_attn_2 and flash_attn_3: values, gradients and conventions."""

import pytest
import torch
from compat_support import MASKS, dense, packed, public, with_lse_of_no_key
from interface_support import assert_same_bits, kernel_calls

from dash_attn.compat import flash_attn_2, flash_attn_3

SCALE = 0.21
MODULES = {"flash_attn_2": flash_attn_2, "flash_attn_3": flash_attn_3}
module_names = pytest.mark.parametrize("name", MODULES)
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def sides(mask):
    left, right = mask.get("window_size", (-1, -1))
    return {"window_size_left": left, "window_size_right": right}


def forward(name, tensors, offsets=(), *, softcap=0.0, alibi_slopes=None, **mask):
    """All four results, with the arguments by name as frameworks give them."""
    causal = mask.get("causal", False)
    if name == "flash_attn_3":
        lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), offsets))
        arguments = dict(softmax_scale=SCALE, causal=causal, softcap=softcap, **sides(mask), **lengths)
        return flash_attn_3._flash_attn_forward(*tensors, **arguments)
    arguments = dict(dropout_p=0.0, softmax_scale=SCALE, causal=causal, **sides(mask), softcap=softcap)
    arguments |= dict(alibi_slopes=alibi_slopes, return_softmax=False)
    if offsets:
        return flash_attn_2._flash_attn_varlen_forward(*tensors, *offsets, **arguments)
    return flash_attn_2._flash_attn_forward(*tensors, **arguments)


def backward(name, dout, tensors, out, lse, gradients, offsets=(), *, softcap=0.0, alibi_slopes=None, **mask):
    """softmax_d."""
    causal = mask.get("causal", False)
    if name == "flash_attn_3":
        lengths = (*offsets[:2], None, None, *offsets[2:]) if offsets else (None,) * 6
        arguments = dict(softmax_scale=SCALE, is_causal=causal, softcap=softcap, **sides(mask))
        return flash_attn_3._flash_attn_backward(dout, *tensors, out, lse, *lengths, *gradients, **arguments)
    arguments = dict(dropout_p=0.0, softmax_scale=SCALE, causal=causal, **sides(mask), softcap=softcap)
    arguments |= dict(alibi_slopes=alibi_slopes, deterministic=False, rng_state=None)
    function = flash_attn_2._flash_attn_varlen_backward if offsets else flash_attn_2._flash_attn_backward
    return function(dout, *tensors, out, lse, *gradients, *offsets, **arguments)


def poisoned(tensors):
    return [torch.full_like(x, torch.nan) for x in tensors]


@module_names
@masks
@pytest.mark.parametrize("scores", [{}, {"softcap": 3.0}], ids=["plain", "softcap"])
def test_dense_is_the_public_function(name, mask, scores):
    *tensors, dout = dense()
    out, lse, *_ = forward(name, tensors, **mask, **scores)
    expected_out, expected_lse, *expected = public(tensors, dout, softmax_scale=SCALE, **mask, **scores)
    no_key = expected_lse == torch.inf
    assert no_key.any() == bool(mask)
    assert_same_bits((out, lse), (expected_out, with_lse_of_no_key(expected_lse, -torch.inf)))
    gradients = poisoned(tensors)
    backward(name, dout, tensors, out, lse, gradients, **mask, **scores)
    assert_same_bits(gradients, expected)


@module_names
@masks
@pytest.mark.parametrize("max_seqlen", [25, torch.tensor(25)], ids=["int", "tensor"])
def test_pack_is_the_public_function(name, mask, max_seqlen):
    *tensors, dout, cu_seqlens_q, cu_seqlens_k = packed()
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen, max_seqlen
    out, lse, *_ = forward(name, tensors, offsets, **mask)
    expected_out, expected_lse, *expected = public(tensors, dout, offsets, softmax_scale=SCALE, **mask)
    assert (lse[:, 33:] == -torch.inf).all()
    assert_same_bits((out, lse), (expected_out, with_lse_of_no_key(expected_lse, -torch.inf)))
    gradients = poisoned(tensors)
    backward(name, dout, tensors, out, lse, gradients, offsets, **mask)
    assert_same_bits(gradients, expected)


@module_names
def test_results_beside_the_output(name):
    *tensors, dout = dense()
    third, fourth = forward(name, tensors)[2:]
    assert third.shape == (0,)
    if name == "flash_attn_2":
        assert third.dtype == torch.bfloat16 and fourth.shape == (2,) and fourth.dtype == torch.int64
        assert not fourth.any()
    else:
        assert fourth.shape == (0,) and {third.dtype, fourth.dtype} == {torch.float32}


def test_slopes_of_flash_attention_2():
    *tensors, dout = dense()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    out, lse, *_ = forward("flash_attn_2", tensors, causal=True, alibi_slopes=slopes)
    expected = public(tensors, dout, softmax_scale=SCALE, causal=True, alibi_slopes=slopes)
    gradients = poisoned(tensors)
    backward("flash_attn_2", dout, tensors, out, lse, gradients, causal=True, alibi_slopes=slopes)
    assert_same_bits((out, *gradients), (expected[0], *expected[2:]))


def test_wrapped_names_are_the_functions():
    for name in ("forward", "backward", "varlen_forward", "varlen_backward"):
        assert getattr(flash_attn_2, f"_wrapped_flash_attn_{name}") is getattr(flash_attn_2, f"_flash_attn_{name}")


@module_names
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("is_pack", [False, True])
def test_backward_takes_either_infinity(name, value, is_pack):
    """Queries that see no key get gradients 0, and none reach keys; no NaN comes from exp(inf)."""
    offsets = ()
    if is_pack:
        *tensors, dout, cu_seqlens_q, cu_seqlens_k = packed()
        offsets = cu_seqlens_q, cu_seqlens_k, 25, 12
    else:
        *tensors, dout = dense()
    out, lse, *_ = forward(name, tensors, offsets, causal=True)
    gradients = {}
    for marker in (value, -torch.inf):
        gradients[marker] = poisoned(tensors)
        backward(name, dout, tensors, out, with_lse_of_no_key(lse, marker), gradients[marker], offsets, causal=True)
    assert_same_bits(gradients[value], gradients[-torch.inf])
    dq, dk, dv = gradients[value]
    blind = lse.isinf().transpose(-1, -2)
    assert blind.any() and (dq[blind] == 0).all() and all(x.isfinite().all() for x in (dq, dk, dv))


@module_names
def test_softmax_d_of_a_dense_batch(name):
    *tensors, dout = dense(130)
    out, lse, *_ = forward(name, tensors)
    d = backward(name, dout, tensors, out, lse, poisoned(tensors))
    assert d.shape == (2, 4, 256) and d.dtype == torch.float32 and not d[:, :, 130:].any()
    expected = (dout.double() * out.double()).sum(-1).transpose(1, 2)
    torch.testing.assert_close(d[:, :, :130].double(), expected, rtol=1e-5, atol=1e-5)


@module_names
def test_softmax_d_of_a_pack(name):
    *tensors, dout, cu_seqlens_q, cu_seqlens_k = packed()
    offsets = cu_seqlens_q, cu_seqlens_k, 25, 12
    out, lse, *_ = forward(name, tensors, offsets)
    d = backward(name, dout, tensors, out, lse, poisoned(tensors), offsets)
    assert d.shape == (4, 40 + 4 * 128)
    expected = torch.zeros(d.shape, dtype=torch.float64)
    sums = (dout.double() * out.double()).sum(-1).T
    for b, (start, end) in enumerate(((0, 25), (25, 25), (25, 33), (33, 40))):
        expected[:, start + 128 * b : end + 128 * b] = sums[:, start:end]
    torch.testing.assert_close(d.double(), expected, rtol=1e-5, atol=1e-5)


@module_names
@pytest.mark.parametrize("missing", [(0,), (1, 2), (0, 1, 2)])
def test_gradients_may_be_left_out(name, missing):
    *tensors, dout = dense()
    out, lse, *_ = forward(name, tensors)
    expected = public(tensors, dout, softmax_scale=SCALE)[2:]
    gradients = poisoned(tensors)
    given = [None if i in missing else gradient for i, gradient in enumerate(gradients)]
    backward(name, dout, tensors, out, lse, given)
    for actual, truth in zip(given, expected):
        assert actual is None or torch.equal(actual, truth)


@module_names
def test_gradients_go_where_they_are_wanted(name):
    """Into views, as of one tensor for all three."""
    *tensors, dout = dense(heads=2, seqlen_k=40)
    out, lse, *_ = forward(name, tensors, causal=True)
    dqkv = torch.full((2, 40, 3, 2, 32), torch.nan).bfloat16()
    backward(name, dout, tensors, out, lse, dqkv.unbind(2), causal=True)
    assert_same_bits(dqkv.unbind(2), public(tensors, dout, softmax_scale=SCALE, causal=True)[2:])


@module_names
def test_causal_mask_by_the_window(name):
    """TransformerEngine passes causal and a right side of 0."""
    *tensors, dout = dense()
    expected = forward(name, tensors, causal=True)
    for mask in ({"causal": True, "window_size": (-1, 0)}, {"window_size": (-1, 0)}):
        assert_same_bits(forward(name, tensors, **mask)[:2], expected[:2])


@module_names
def test_compiled(name):
    """One graph, with the ops in it, for forward and backward."""
    *tensors, dout = dense()

    def both(q, k, v, dout):
        out, lse, *_ = forward(name, (q, k, v), causal=True)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        return out, lse, *gradients, backward(name, dout, (q, k, v), out, lse, gradients, causal=True)

    with torch.no_grad():
        expected = both(*tensors, dout)
        actual = torch.compile(both, backend="aot_eager", fullgraph=True)(*tensors, dout)
    assert_same_bits(actual, expected)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_kernels_get_what_is_asked_for():
    *tensors, dout, cu_seqlens_q, cu_seqlens_k = packed()
    offsets = cu_seqlens_q, cu_seqlens_k, 25, 12
    with kernel_calls() as calls:
        out, lse, *_ = forward("flash_attn_3", tensors, offsets, window_size=(5, 2), softcap=2.0)
        backward("flash_attn_3", dout, tensors, out, lse, poisoned(tensors), offsets, window_size=(5, 2), softcap=2.0)
    for _, arguments in calls:
        assert (arguments["window_left"], arguments["window_right"], arguments["causal"]) == (5, 2, False)
        assert (arguments["softmax_scale"], arguments["softcap"]) == (SCALE, 2.0)
        assert torch.equal(arguments["cu_seqlens_q"], cu_seqlens_q)
    assert [name for name, _ in calls] == ["forward", "backward"]


def test_lengths_in_use_of_flash_attention_2():
    *tensors, dout, cu_seqlens_q, cu_seqlens_k = packed()
    used = torch.tensor([5, 12, 2, 0], dtype=torch.int32)
    offsets = cu_seqlens_q, cu_seqlens_k, 25, 12
    expected = public(tensors, dout, offsets, causal=True, seqused_k=used)
    actual = flash_attn_2._flash_attn_varlen_forward(*tensors, *offsets, 0.0, None, True, seqused_k=used)
    assert torch.equal(actual[0], expected[0])


def test_chunks_and_margin_of_flash_attention_3():
    *tensors, dout = dense()
    with kernel_calls() as calls:
        out, lse, *_ = flash_attn_3._flash_attn_forward(*tensors, causal=True, attention_chunk=16, sm_margin=3)
        flash_attn_3._flash_attn_backward(dout, *tensors, out, lse, is_causal=True, sm_margin=5)
    (_, forward_arguments), (_, backward_arguments) = calls
    assert (forward_arguments["sm_margin"], backward_arguments["sm_margin"]) == (3, 5)
    assert torch.equal(out, public(tensors, dout, causal=True, attention_chunk=16)[0])


def test_forward_of_flash_attention_3_has_a_gradient():
    """There it is an op with a derivative."""
    *tensors, dout = dense()
    inputs = [x.clone().requires_grad_() for x in tensors]
    out = flash_attn_3._flash_attn_forward(*inputs, softmax_scale=SCALE, causal=True)[0]
    gradients = torch.autograd.grad(out, inputs, dout)
    assert_same_bits(gradients, public(tensors, dout, softmax_scale=SCALE, causal=True)[2:])

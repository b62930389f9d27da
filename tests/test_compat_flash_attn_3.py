"""FlashAttention-3's public functions, and what its private ones take beside dense batches and packs."""

import pytest
import torch
from compat_support import MASKS, dense, packed, public, with_lse_of_no_key
from float64_reference import attention_float64
from interface_support import assert_same_bits

from dash_attn.compat import flash_attn_3


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_dense(mask):
    *tensors, dout = dense()
    expected_out, expected_lse, *expected = public(tensors, dout, **mask, softcap=2.0, sm_margin=1)
    inputs = [x.clone().requires_grad_() for x in tensors]
    out, lse = flash_attn_3.flash_attn_func(*inputs, **mask, softcap=2.0, sm_margin=1, return_attn_probs=True)
    assert_same_bits((out, lse), (expected_out, with_lse_of_no_key(expected_lse, -torch.inf)))
    assert_same_bits(torch.autograd.grad(out, inputs, dout), expected)
    assert torch.equal(flash_attn_3.flash_attn_func(*tensors, **mask, softcap=2.0), out)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_pack(mask):
    *tensors, dout, cu_seqlens_q, cu_seqlens_k = packed()
    offsets = cu_seqlens_q, cu_seqlens_k, 25, torch.tensor(12)
    used = {"seqused_q": int32(20, 0, 8, 7), "seqused_k": int32(9, 12, 7, 0)}
    expected_out, expected_lse, *expected = public(tensors, dout, offsets, **mask, **used)
    inputs = [x.clone().requires_grad_() for x in tensors]
    # By position up to seqused_k, as FlashAttention-3 has them.
    out, lse = flash_attn_3.flash_attn_varlen_func(*inputs, *offsets, *used.values(), **mask, return_attn_probs=True)
    assert_same_bits((out, lse), (expected_out, with_lse_of_no_key(expected_lse, -torch.inf)))
    assert_same_bits(torch.autograd.grad(out, inputs, dout), expected)


def test_qkv_in_one_tensor():
    q, k, v, dout = dense(20, 20)
    qkv = torch.cat((q, k, v), dim=2).requires_grad_()
    expected_out, expected_lse, *expected = public((q, k, v), dout, causal=True, softmax_scale=0.3)
    out, lse = flash_attn_3.flash_attn_qkvpacked_func(qkv, 0.3, True, num_heads_q=4, return_attn_probs=True)
    assert_same_bits((out, lse), (expected_out, expected_lse))
    assert torch.equal(torch.autograd.grad(out, qkv, dout)[0], torch.cat(expected, dim=2))


def test_sinks():
    *tensors, dout = dense()
    sinks = torch.tensor([0.5, -1.0, 2.0, -torch.inf])
    expected = public(tensors, dout, causal=True, learnable_sink=sinks)
    out, lse = flash_attn_3.flash_attn_func(*tensors, causal=True, s_aux=sinks, return_attn_probs=True)
    assert torch.equal(out, expected[0])
    # The sink is the log-sum-exp of a query that sees no key, where there is one.
    assert torch.equal(lse[:, :3], expected[1][:, :3]) and (lse[:, 3, 0] == -torch.inf).all()


@pytest.mark.parametrize("given", [("q",), ("k",), ("q", "k"), ("seqused_q",), ("seqused_k",), ("seqused_q", "k")])
@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=["full", "causal"])
def test_lengths_on_one_side(given, mask):
    """Dense tensors with seqused, and a pack opposite a dense batch, are packs with gaps."""
    q, k, v, dout = dense(20, 30)
    rows = {"q": int32(0, 20, 40), "k": int32(0, 30, 60)}
    used = {"seqused_q": int32(20, 11), "seqused_k": int32(30, 17)}
    lengths = {f"cu_seqlens_{name}": rows[name] for name in given if name in rows}
    lengths |= {name: used[name] for name in given if name in used}
    flat = [x.flatten(0, 1) for x in (q, k, v, dout)]
    whole = {"seqused_q": lengths.get("seqused_q"), "seqused_k": lengths.get("seqused_k")}
    offsets = (rows["q"], rows["k"], 20, 30)
    expected_out, expected_lse, *expected = public(flat[:3], flat[3], offsets, **mask, **whole)
    expected_lse = with_lse_of_no_key(expected_lse, -torch.inf)

    tensors = [flat[0] if "q" in given else q, *(flat[1:3] if "k" in given else (k, v))]
    own_dout = flat[3] if "q" in given else dout
    max_seqlens = {"max_seqlen_q": 20, "max_seqlen_k": 30}
    out, lse, *_ = flash_attn_3._flash_attn_forward(*tensors, **lengths, **max_seqlens, **mask)
    assert torch.equal(out.flatten(0, -3), expected_out) and out.shape == tensors[0].shape
    if "q" in given:
        assert torch.equal(lse, expected_lse)
    else:
        assert lse.shape == (2, 4, 20) and torch.equal(lse.transpose(0, 1).flatten(1), expected_lse)
    gradients = [torch.full_like(x, torch.nan) for x in tensors]
    lengths = {name.replace("seqused", "sequed"): x for name, x in lengths.items()}
    arguments = dict(zip(("dq", "dk", "dv"), gradients)) | lengths | {"is_causal": mask.get("causal", False)}
    flash_attn_3._flash_attn_backward(own_dout, *tensors, out, lse, **arguments)
    assert_same_bits([x.flatten(0, -3) for x in gradients], expected)


def test_output_goes_where_it_is_wanted():
    *tensors, _ = dense()
    out = torch.full((2, 40, 8, 32), torch.nan).bfloat16()[:, :, ::2]
    result = flash_attn_3._flash_attn_forward(*tensors, out_=out)[0]
    assert result is out and torch.equal(out, flash_attn_3.flash_attn_func(*tensors))


def test_scheduler_metadata_says_nothing():
    metadata = flash_attn_3.get_scheduler_metadata(2, 1, 30, 4, 2, 32, int32(3, 4))
    assert metadata.shape == (0,) and metadata.dtype == torch.int32


def parts():
    """Attention over three parts of the keys, fp32; the first 14 queries see nothing of the third."""
    q, k, v, _ = (x.double() for x in dense(24, 58, heads=2, kv_heads=2))
    pieces = [(q, k[:, s], v[:, s]) for s in (slice(0, 24), slice(24, 48), slice(48, 58))]
    results = [attention_float64(*piece, causal=i == 2) for i, piece in enumerate(pieces)]
    hidden = results[2].softmax_lse == torch.inf
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 32**-0.5
    scores[:, :, :, 48:].masked_fill_(~torch.ones(24, 10).tril(10 - 24).bool(), -torch.inf)
    return results, hidden, scores.softmax(-1) @ v.transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("marker", [torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_combine(marker, dtype):
    results, hidden, expected, expected_lse = parts()
    assert hidden.any()
    # NaN where a query sees no key of a part.
    blind = [x.softmax_lse.isinf().transpose(1, 2)[..., None] for x in results]
    out = torch.stack([x.out.float().masked_fill(no_key, torch.nan) for x, no_key in zip(results, blind)])
    lse = torch.stack([with_lse_of_no_key(x.softmax_lse.float(), marker).transpose(1, 2) for x in results])
    given = torch.empty(expected.transpose(1, 2).shape, dtype=dtype) if dtype else None
    merged, merged_lse = flash_attn_3.flash_attn_combine(out, lse, given, dtype)
    assert dtype is None or merged is given
    limits = {"rtol": 2.0**-10, "atol": 1e-6} if dtype else {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(merged.double(), expected.transpose(1, 2), **limits)
    torch.testing.assert_close(merged_lse.double(), expected_lse.transpose(1, 2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("parts, batch, seqlen, heads", [(3, 2, 37, 3), (8, 3, 50, 5), (5, 1, 20, 1)])
def test_rows_combined_alone_have_the_same_bits(parts, batch, seqlen, heads):
    generator = torch.Generator().manual_seed(parts)
    out = torch.randn(parts, batch, seqlen, heads, 16, generator=generator)
    lse = torch.randn(parts, batch, seqlen, heads, generator=generator)
    together = flash_attn_3.flash_attn_combine(out, lse)
    for b in range(batch):
        for row in range(seqlen):
            one = (slice(None), slice(b, b + 1), slice(row, row + 1))
            alone = flash_attn_3.flash_attn_combine(out[one].clone(), lse[one].clone())
            assert all(torch.equal(x, y[one[1:]]) for x, y in zip(alone, together))


def test_combine_of_nothing():
    out, lse = flash_attn_3.flash_attn_combine(torch.zeros(3, 1, 2, 1, 8), torch.full((3, 1, 2, 1), -torch.inf))
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("change, error, message", [
    ({"out_partial": torch.zeros(3, 1, 2, 1, 8).half()}, TypeError,
     "out_partial must be torch.float32, got torch.float16"),
    ({"lse_partial": torch.zeros(3, 1, 2, 2)}, ValueError,
     "lse_partial must have shape (parts, batch, seqlen_q, heads) like out_partial, got (3, 1, 2, 2)"),
    ({"out_dtype": torch.float64}, TypeError,
     "out_dtype must be torch.float32, torch.bfloat16, torch.float16 or None, got torch.float64"),
    ({"out": torch.zeros(1, 2, 1, 8), "out_dtype": torch.float16}, ValueError,
     "out must have shape and dtype (1, 2, 1, 8) of torch.float16, got (1, 2, 1, 8) of torch.float32"),
])  # fmt: skip
def test_combine_refuses(change, error, message):
    arguments = {"out_partial": torch.zeros(3, 1, 2, 1, 8), "lse_partial": torch.zeros(3, 1, 2, 1)} | change
    with pytest.raises(error) as raised:
        flash_attn_3.flash_attn_combine(**arguments)
    assert str(raised.value) == message

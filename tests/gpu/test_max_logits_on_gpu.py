"""The largest logits that the forward's kernels find: near float64, with bits that only the head and the sequence
determine, and without a trace in the other results."""

import math

import pytest
import torch
from float64_reference import PLAIN, Scores, visible_keys

from dash_attn import flash_attn_func, flash_attn_varlen_func, masks

HEAD_DIMS = pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 20)},
    "chunk": {"causal": True, "attention_chunk": 150},
}
# (batch, seqlen_q, seqlen_k, heads, kv_heads): in the second, heads share tiles without the largest logits.
SHAPES = [(2, 700, 900, 4, 2), (3, 17, 900, 16, 2), (1, 900, 700, 2, 1)]


def inputs_of(shape, head_dims, device, dtype=torch.bfloat16, seed=0):
    batch, seqlen_q, seqlen_k, heads, kv_heads = shape
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*sizes):
        return torch.randn(*sizes, generator=generator, device=device).to(dtype)

    dim, value_dim = head_dims
    q, k = randn(batch, seqlen_q, heads, dim), randn(batch, seqlen_k, kv_heads, dim)
    return q, k, randn(batch, seqlen_k, kv_heads, value_dim)


def truth(q, k, scores=PLAIN, *, causal=False, window_size=(-1, -1), attention_chunk=0):
    keys = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    products = torch.einsum("bqhd,bkhd->bhqk", q.double(), keys) * q.shape[-1] ** -0.5
    seen = visible_keys(q.shape[1], k.shape[1], causal, q.device, window=window_size, attention_chunk=attention_chunk)
    return scores.of(products).masked_fill(~seen, -math.inf).flatten(2).amax(-1)


def check(q, k, v, scores=PLAIN, **mask):
    given = {"learnable_sink": scores.sinks, **mask}
    out, lse, _, found = flash_attn_func(q, k, v, return_attn_probs=True, return_max_logits=True, **given)
    torch.testing.assert_close(found.double(), truth(q, k, scores, **mask), rtol=1e-5, atol=1e-5)
    plain_out, plain_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **given)
    assert torch.equal(out, plain_out) and torch.equal(lse, plain_lse)
    return found


@HEAD_DIMS
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_against_float64(shape, mask, head_dims, device):
    for dtype in (torch.bfloat16, torch.float16):
        check(*inputs_of(shape, head_dims, device, dtype), **MASKS[mask])


@HEAD_DIMS
@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_logits_below_zero(mask, head_dims, device):
    """Near zero, where scores are compared with limits of either sign, and far below."""
    q, k, v = inputs_of(SHAPES[0], head_dims, device)
    for factor in (0.01, 1.0, 8.0):
        found = check(q.abs(), -k.abs() * factor, v, **MASKS[mask])
        assert (found < 0).all()
    # A head whose logits are below zero but for one.
    q, k = q.abs(), -k.abs()
    k[:, 333, 0] *= -1
    found = check(q, k, v, **MASKS[mask])
    assert (found[:, :2] > 0).all() and (found[:, 2:] < 0).all()


@HEAD_DIMS
@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_sinks(mask, head_dims, device):
    q, k, v = inputs_of(SHAPES[0], head_dims, device)
    check(q, k, v, Scores(sinks=torch.arange(4, device=device) + 50.0), **MASKS[mask])


def test_unsupported_scores_raise(device):
    q, k, v = inputs_of(SHAPES[0], (64, 64), device)
    for name, given in (
        ("alibi_slopes", {"alibi_slopes": torch.ones(4, device=device)}),
        ("softcap", {"softcap": 2.0}),
        ("dropout", {"dropout_p": 0.1}),
    ):
        with pytest.raises(
            NotImplementedError, match=f"return_max_logits must be False with {name} on a GPU, got True"
        ):
            flash_attn_func(q, k, v, return_max_logits=True, **given)


@HEAD_DIMS
@torch.no_grad()
def test_columns(head_dims, device):
    q, k, v = inputs_of((1, 600, 600, 4, 2), head_dims, device)
    documents = torch.arange(600, device=device)[None] // 170
    columns = masks.document_mask(documents)
    _, found = flash_attn_func(q, k, v, causal=True, startend_row_indices=columns, return_max_logits=True)
    expected = torch.stack(
        [truth(*(x[:, documents[0] == i] for x in (q, k)), causal=True) for i in range(int(documents.max()) + 1)]
    ).amax(0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@HEAD_DIMS
@torch.no_grad()
def test_bits_of_packs_heads_and_sms(head_dims, device, num_sms):
    lengths = [(300, 400), (0, 50), (60, 0), (1, 700), (513, 129)]
    rows_q, rows_k = (sum(pair[side] for pair in lengths) + 9 for side in (0, 1))
    q = inputs_of((1, rows_q, rows_k, 4, 2), head_dims, device)[0][0]
    k, v = (x[0] for x in inputs_of((1, rows_q, rows_k, 4, 2), head_dims, device)[1:])
    q[-9:], k[-9:] = math.nan, math.inf  # of no sequence
    ends = [torch.tensor([0, *(pair[side] for pair in lengths)]).cumsum(0) for side in (0, 1)]
    offsets = [end.to(torch.int32).to(device) for end in ends]

    def of_pack(*tensors, **more):
        return flash_attn_varlen_func(*tensors, *offsets, 513, 700, causal=True, return_max_logits=True, **more)[1]

    expected = of_pack(q, k, v)
    for sm_margin in (1, num_sms // 2, num_sms - 2):
        assert torch.equal(of_pack(q, k, v, sm_margin=sm_margin), expected)
    assert torch.equal(of_pack(q[:, 2:], k[:, 1:], v[:, 1:]), expected[:, 2:])
    assert all(torch.equal(of_pack(q, k, v), expected) for _ in range(20))
    for i, found in enumerate(expected):
        queries, keys = (slice(int(end[i]), int(end[i + 1])) for end in ends)
        own = (q[None, queries], k[None, keys], v[None, keys])
        assert torch.equal(flash_attn_func(*own, causal=True, return_max_logits=True)[1][0], found)
        if 0 in lengths[i]:
            assert (found == -math.inf).all()
        else:
            torch.testing.assert_close(found[None].double(), truth(*own[:2], causal=True), rtol=1e-5, atol=1e-5)


@HEAD_DIMS
@pytest.mark.parametrize("has_sinks", [False, True])
@torch.no_grad()
def test_a_pack_with_a_window_grouped_heads_and_unused_rows(has_sinks, head_dims, device):
    """One of the sequences uses none of its keys."""
    lengths, used = [(300, 400), (60, 20), (513, 700)], [(290, 333), (60, 0), (400, 690)]
    rows_q, rows_k = (sum(pair[side] for pair in lengths) for side in (0, 1))
    q, k, v = (x[0] for x in inputs_of((1, rows_q, rows_k, 8, 2), head_dims, device))
    offsets_q, offsets_k = (
        torch.tensor([0, *(pair[side] for pair in lengths)], device=device).cumsum(0, dtype=torch.int32)
        for side in (0, 1)
    )
    seqused_q, seqused_k = (
        torch.tensor([pair[side] for pair in used], device=device, dtype=torch.int32) for side in (0, 1)
    )

    sinks = torch.arange(8, device=device) + 50.0 if has_sinks else None

    def call(**more):
        return flash_attn_varlen_func(
            q, k, v, offsets_q, offsets_k, 513, 700, seqused_q=seqused_q, seqused_k=seqused_k,
            window_size=(100, 20), return_attn_probs=True, learnable_sink=sinks, **more,
        )  # fmt: skip

    out, lse, _, found = call(return_max_logits=True)
    plain_out, plain_lse, _ = call()
    for i, (queries, keys) in enumerate(used):
        first_q, first_k = int(offsets_q[i]), int(offsets_k[i])
        own_q, own_k = slice(first_q, first_q + queries), slice(first_k, first_k + keys)
        assert torch.equal(out[own_q], plain_out[own_q]) and torch.equal(lse[:, own_q], plain_lse[:, own_q])
        if keys == 0:
            assert (found[i] == -math.inf).all() and not out[own_q].any()
            assert (lse[:, own_q] == (math.inf if sinks is None else sinks[:, None])).all()
        else:
            expected = truth(q[None, own_q], k[None, own_k], window_size=(100, 20))
            torch.testing.assert_close(found[i : i + 1].double(), expected, rtol=1e-5, atol=1e-5)


@HEAD_DIMS
@torch.no_grad()
def test_rows_whose_scores_are_all_minus_infinity_have_the_same_bits(head_dims, device):
    """Of a call without columns. Under a mask by key columns such rows count as rows that see no key."""
    q, k, v = inputs_of(SHAPES[0], head_dims, device)
    q[..., 0], k[:, :300, :, 0] = 1.0, -math.inf
    out, lse, _, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, return_max_logits=True)
    plain_out, plain_lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(lse, plain_lse) and (lse == -math.inf).any()
    torch.testing.assert_close(out, plain_out, rtol=0, atol=0, equal_nan=True)


@HEAD_DIMS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@torch.no_grad()
def test_scores_that_are_no_numbers(value, head_dims, device):
    """They concern their head alone. A score of -inf is no larger than a hidden key."""
    q, k, v = inputs_of(SHAPES[0], head_dims, device)
    q[0, :, 1, 0] = 1.0
    k[0, 400, 0] = 0.0
    _, expected = flash_attn_func(q, k, v, causal=True, return_max_logits=True)
    k[0, 400, 0, 0] = value
    q[0, :, 0] = 1.0
    _, found = flash_attn_func(q, k, v, causal=True, return_max_logits=True)
    if value == -math.inf:
        assert not found.isnan().any()
    else:
        assert found[0, :2].isnan().all()
    assert torch.equal(found[0, 2:], expected[0, 2:]) and torch.equal(found[1], expected[1])


@HEAD_DIMS
def test_gradients_have_the_same_bits(head_dims, device):
    inputs = [x.requires_grad_() for x in inputs_of(SHAPES[0], head_dims, device)]
    out = flash_attn_func(*inputs, causal=True)
    expected = torch.autograd.grad(out.float().sum(), inputs)
    out, max_logits = flash_attn_func(*inputs, causal=True, return_max_logits=True)
    assert not max_logits.requires_grad
    found = torch.autograd.grad(out.float().sum(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_a_graph_starts_anew_in_every_replay(device):
    q, k, v = inputs_of(SHAPES[0], (128, 128), device)
    call = lambda: flash_attn_func(q, k, v, return_max_logits=True)[1]  # noqa: E731
    with torch.no_grad():
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call()
        graph.replay()
        first = found.clone()
        q.mul_(0.25)
        graph.replay()
        assert torch.equal(first, 4 * found) and torch.equal(found, call())

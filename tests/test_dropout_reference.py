"""Dropout in the reference: the formula in float64, and its roundings in 16 bits."""

import pytest
import torch
from dropout_float64 import gradients
from float64_reference import PLAIN, Scores
from products import pairwise

from dash_attn import reference
from dash_attn.dropout import MAPPINGS, DropoutState, dropout_bits
from dash_attn.schedule import fitting
from dash_attn.tile_order import tile_order

WINDOWS = [
    {"causal": False}, {"causal": True}, {"causal": False, "window": (5, 3)}, {"causal": True, "window": (9, -1)},
    {"causal": False, "attention_chunk": 7},
]  # fmt: skip


def tensors(seqlen_q, seqlen_k, *, heads=4, kv_heads=2, head_dim=16, value_head_dim=None, batch=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seqlen_q * 1000 + seqlen_k)
    value_head_dim = value_head_dim or head_dim
    shapes = [(seqlen_q, heads, head_dim), (seqlen_k, kv_heads, head_dim), (seqlen_k, kv_heads, value_head_dim)]
    shapes.append((seqlen_q, heads, value_head_dim))
    return [torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def mask_of(q, k, p, seed=1, **mode):
    sizes = {"batch": q.shape[0], "heads": q.shape[2], "seqlen_q": q.shape[1], "seqlen_k": k.shape[1]}
    return dropout_bits(DropoutState.of(seed), p=p, **sizes, **mode).mask()


def run(q, k, v, dout, keep, p, *, order, scale=0.25, dlse=None, scores=PLAIN, **mask):
    """The reference's (out, softmax_lse, dq, dk, dv and, where there are sinks, dsinks)."""
    common = {"softmax_scale": scale, "softcap": scores.softcap, "alibi_slopes": scores.alibi_slopes, **mask}
    dropout = {"keep": keep, "dropout_p": p}
    out, lse = reference.forward(q, k, v, sinks=scores.sinks, **common, **dropout)
    grads = reference.backward(dout, q, k, v, out, lse, dsoftmax_lse=dlse, order=order, **common, **dropout)
    if scores.sinks is not None:
        grads = *grads, reference.sink_gradient(dout, out, lse, scores.sinks, dlse).sum(0)
    return out, lse, *grads


def small_order(schedule, q, k, **mask):
    group_size = q.shape[2] // k.shape[2]
    tiles = {"tile_q": 4, "tile_k": 8, "head_dim": q.shape[3], "group_size": group_size}
    return tile_order(schedule, q.shape[1], k.shape[1], **tiles, **mask)


# What is dropped depends on an element's place alone, and not on why the element is visible.
CASES = pairwise(
    WINDOWS,
    [(1, 1), (17, 33), (33, 17), (40, 40), (7, 65)],
    [(2, 2), (4, 2), (3, 1)],
    [0.1, 0.125, 0.9],
    list(MAPPINGS),
)


@pytest.mark.parametrize("mask, lengths, heads, p, mapping", CASES, ids=str)
def test_formulas_in_float64(mask, lengths, heads, p, mapping):
    inputs = q, k, *_ = tensors(*lengths, heads=heads[0], kv_heads=heads[1])
    keep = mask_of(q, k, p, mapping=mapping)
    actual = run(*inputs, keep, p, order=small_order("descending", q, k, **mask), **mask)
    for a, e in zip(actual, gradients(*inputs, keep, p, softmax_scale=0.25, **mask), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scores", [
    Scores(sinks=torch.tensor([0.5, -torch.inf, 2.0, -1.0], dtype=torch.float64)), Scores(softcap=2.0),
    Scores(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64)),
], ids=["sinks", "softcap", "slopes"])  # fmt: skip
@pytest.mark.parametrize("mask", WINDOWS)
def test_formulas_beside_changed_scores_and_a_gradient_of_the_log_sum_exp(mask, scores):
    inputs = q, k, v, _ = tensors(19, 26, value_head_dim=8)
    dlse = torch.randn(2, 4, 19, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    keep = mask_of(q, k, 0.3)
    settings = {"dlse": dlse, "scores": scores, **mask}
    actual = run(*inputs, keep, 0.3, order=small_order("descending", q, k, **mask), **settings)
    for a, e in zip(actual, gradients(*inputs, keep, 0.3, softmax_scale=0.25, **settings), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


def test_log_sum_exp_and_probabilities_do_not_know_dropout():
    inputs = q, k, v, _ = tensors(40, 40)
    keep = mask_of(q, k, 0.5)
    order = small_order("descending", q, k, causal=True)
    dropped = run(*inputs, keep, 0.5, order=order, causal=True)
    whole = run(*inputs, None, 0.0, order=order, causal=True)
    assert torch.equal(dropped[1], whole[1])
    assert not torch.allclose(dropped[0], whole[0])
    all_kept = run(*inputs, torch.ones_like(keep), 0.0, order=order, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(all_kept, whole))


def norms_of_errors(actual, truth):
    return [(a.double() - t).norm().item() for a, t in zip(actual, truth)]


SCHEDULES = fitting(causal=True, dropout=True)


@pytest.mark.parametrize(
    "schedule, head_dim, dtype", pairwise(SCHEDULES, [64, 128], [torch.bfloat16, torch.float16]), ids=str
)
def test_accuracy(schedule, head_dim, dtype):
    """Errors against float64 are at most those of the same formula in eager PyTorch at the inputs' dtype."""
    inputs = q, k, *_ = tensors(256, 256, head_dim=head_dim, dtype=dtype)
    p, settings = 0.125, {"softmax_scale": head_dim**-0.5, "causal": True}
    keep = mask_of(q, k, p)
    order = tile_order(schedule, 256, 256, head_dim=head_dim, group_size=2, causal=True)
    actual = run(*inputs, keep, p, order=order, scale=head_dim**-0.5, causal=True)
    assert [x.dtype for x in actual] == [dtype, torch.float32, dtype, dtype, dtype]
    truth = gradients(*inputs, keep, p, **settings)
    eager = gradients(*inputs, keep, p, dtype=dtype, **settings)
    ours, theirs = norms_of_errors(actual, truth), norms_of_errors(eager, truth)
    for name, error, limit in zip(("out", "lse", "dq", "dk", "dv"), ours, theirs):
        assert error <= limit, name


def test_order_free_orders_are_refused():
    q, k, v, dout = tensors(64, 64, head_dim=64)
    order = tile_order("order_free", 64, 64, head_dim=64, group_size=2, causal=True)
    with pytest.raises(ValueError, match="^order must not be order-free with keep, got an order-free one$"):
        run(q, k, v, dout, mask_of(q, k, 0.25), 0.25, order=order, scale=0.125, causal=True)


@pytest.mark.parametrize("mask", WINDOWS)
def test_signs_of_probabilities_say_what_is_dropped(mask):
    q, k, v, _ = tensors(20, 33, dtype=torch.float16)
    q *= 30  # so that some probabilities are too small for fp16
    keep = mask_of(q, k, 0.4)
    _, lse = reference.forward(q, k, v, softmax_scale=0.25, **mask)
    signed = reference.signed_probabilities(q, k, lse, softmax_scale=0.25, keep=keep, **mask)
    seen = signed != 0
    assert torch.equal((signed > 0)[seen], keep[seen]) and not (signed > 0)[~seen].any()
    rows = signed.double().abs().sum(-1)
    has_keys = lse.isfinite()
    assert torch.equal(seen.any(-1), has_keys)
    torch.testing.assert_close(rows[has_keys], torch.ones_like(rows[has_keys]), rtol=2e-3, atol=2e-3)


def test_the_mean_over_masks_is_attention_without_dropout():
    """At p = 1/2, where 128 of 256 random bytes keep an element: 1 / (1 - p) is the inverse of their share."""
    q, k, v, _ = tensors(16, 16, heads=2, kv_heads=2, batch=1)
    p, draws = 0.5, 4096
    many = [x.expand(draws, -1, -1, -1) for x in (q, k, v)]
    keep = mask_of(many[0], many[1], p)
    out, _ = reference.forward(*many, softmax_scale=0.25, causal=False, keep=keep, dropout_p=p)
    whole, _ = reference.forward(q, k, v, softmax_scale=0.25, causal=False)
    deviation = out.std(dim=0, keepdim=True) / draws**0.5
    # 512 normal deviates are within 6 of their own but for a chance of 1e-6.
    assert ((out.mean(dim=0, keepdim=True) - whole).abs() <= 6 * deviation).all()

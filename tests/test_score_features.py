"""Softcap, ALiBi, sinks and the gradient of the log-sum-exp on CPU tensors: accuracy, bits and what they mean."""

import itertools
import math

import pytest
import torch
from float64_reference import PLAIN, Scores, attention_float64, attention_in_dtype, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from interface_support import FUNCTIONS, assert_same_bits, inputs_of, kernel_calls, qkv_tensors
from mask_support import CAUSAL, FULL, name_of, public, window
from pack_support import Pack
from products import pairwise
from score_support import NAMES, assert_as_alone, dense, draw, failures, packed, results_of

from dash_attn import flash_attn_func, flash_attn_qkvpacked_func, reference
from dash_attn.schedule import POLICIES, fitting
from dash_attn.tile_order import tile_order

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
MASKS = [FULL, CAUSAL, window(7, 3), window(20, -1, causal=True), window(-1, -1, 16, causal=True)]
KINDS = {
    "softcap": dict(softcap=1.5),
    "alibi": dict(alibi="heads"),
    "alibi of sequences": dict(alibi="batch"),
    "sinks": dict(sinks=FP32),
    "log-sum-exp": dict(lse_gradient=True),
    "softcap, sinks, log-sum-exp": dict(softcap=3.0, sinks=FP32, lse_gradient=True),
    "alibi, sinks, log-sum-exp": dict(alibi="batch", sinks=FP32, lse_gradient=True),
}
KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(
    "mask, lengths, kind", pairwise(MASKS, [(1, 1), (17, 33), (33, 17), (40, 40), (65, 7)], list(KINDS)), ids=str
)
def test_formulas_in_float64(mask, lengths, kind):
    """In small tiles, of which some are dead and some are cut."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(lengths[0], 4), (lengths[1], 2), (lengths[1], 2), (lengths[0], 4)]
    q, k, v, dout = (torch.randn(2, s, h, 8, generator=generator, dtype=FP64) for s, h in shapes)
    scores = Scores(*(x.double() if isinstance(x, torch.Tensor) else x for x in draw(2, 4, lengths[0], **KINDS[kind])))
    expected = attention_float64(q, k, v, dout, softmax_scale=0.7, scores=scores, **mask)
    common = dict(softmax_scale=0.7, softcap=scores.softcap, alibi_slopes=scores.alibi_slopes, **mask)
    out, lse = reference.forward(q, k, v, sinks=scores.sinks, **common)
    for policy in fitting(**mask):
        order = tile_order(policy, *lengths, head_dim=8, tile_q=4, tile_k=8, **mask)
        gradients = reference.backward(dout, q, k, v, out, lse, dsoftmax_lse=scores.dsoftmax_lse, order=order, **common)
        torch.testing.assert_close((out, lse, *gradients), expected[:5], rtol=1e-12, atol=1e-12)
    if scores.sinks is not None:
        dsinks = reference.sink_gradient(dout, out, lse, scores.sinks, scores.dsoftmax_lse).sum(dim=0)
        torch.testing.assert_close(dsinks, expected.dsinks, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(7, 3)], ids=name_of)
@KIND
def test_float64_reference_agrees_with_autograd(kind, mask):
    """Of the plain formula, with the sink as one more score."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 4), (19, 2), (19, 2), (12, 4)]
    q, k, v, dout = (torch.randn(2, s, h, 8, generator=generator, dtype=FP64) for s, h in shapes)
    scores = Scores(*(x.double() if isinstance(x, torch.Tensor) else x for x in draw(2, 4, 12, **KINDS[kind])))
    formula = dict(softmax_scale=-0.7, scores=scores, **mask)
    expected, actual = (f(q, k, v, dout, **formula) for f in (attention_in_dtype, attention_float64))
    torch.testing.assert_close(tuple(actual), tuple(expected), rtol=1e-12, atol=1e-12)


@st.composite
def problems(draw_one):
    """Where most queries see some keys: of one key alone, D is the product of dO and a rounded value, which eager
    PyTorch does not round."""
    length = st.one_of(st.integers(16, 24), st.integers(16, 200))
    kv_heads, group = draw_one(st.sampled_from([1, 2])), draw_one(st.sampled_from([1, 2, 3]))
    side = st.one_of(st.just(-1), st.integers(8, 16), st.integers(8, 200))
    chunk = st.one_of(st.just(0), st.just(0), st.integers(16, 100))
    mask = dict(causal=draw_one(st.booleans()), window=draw_one(st.tuples(side, side)), attention_chunk=draw_one(chunk))
    type_of_scores = draw_one(st.sampled_from([{}, {"softcap": 1.5}, {"softcap": 20.0}, {"alibi": "heads"},
                                               {"alibi": "batch"}]))  # fmt: skip
    sinks = draw_one(st.sampled_from([None, FP32, BF16, torch.float16, FP64]))
    head_dim = draw_one(st.sampled_from([40, 64, 96, 128, 192, 256]))
    others = ("spt", "order_free") if head_dim <= 128 and not type_of_scores else ("spt",)
    return dict(
        seqlen_q=draw_one(st.one_of(length, st.integers(1, 9))), seqlen_k=draw_one(length),
        heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim,
        dtype=draw_one(st.sampled_from([BF16, torch.float16])),
        mask=mask, softmax_scale=draw_one(st.sampled_from([None, 0.4, -0.3])),
        kind=dict(type_of_scores, sinks=sinks, lse_gradient=draw_one(st.booleans())),
        seed=draw_one(st.integers(0, 99)), schedule=draw_one(st.sampled_from(["auto", *others])),
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True)
@given(problems())
def test_accuracy_of_products_of_features(problem):
    p = problem
    shape = (p["seqlen_q"], p["seqlen_k"], p["heads"], p["kv_heads"], p["head_dim"])
    # The norm of few rows' error is up to chance, ours and PyTorch's alike.
    batch = max(2, 512 // p["seqlen_q"])
    q, k, v, dout = (x.detach() for x in qkv_tensors(*shape, batch=batch, dtype=p["dtype"]))
    scores = draw(batch, p["heads"], p["seqlen_q"], seed=p["seed"], **p["kind"])
    found = dense(q, k, v, dout, scores, softmax_scale=p["softmax_scale"], schedule=p["schedule"], **public(p["mask"]))
    assert failures(found, q, k, v, dout, scores, softmax_scale=p["softmax_scale"], **p["mask"]) == []
    assert scores.sinks is None or found["dsinks"].dtype == scores.sinks.dtype


def scores_of_pack(pack, kind, seed=0):
    """The gradient of the log-sum-exp is NaN in rows of no sequence."""
    drawn = draw(len(pack.sequences()), 4, 1, seed=seed, **KINDS[kind])
    if drawn.dsoftmax_lse is None:
        return drawn
    dlse = torch.randn(4, pack.q.shape[0], generator=torch.Generator().manual_seed(seed))
    return drawn._replace(dsoftmax_lse=dlse.masked_fill(pack.outside()[0], math.nan))


@pytest.mark.parametrize("mask", MASKS, ids=name_of)
@KIND
def test_every_sequence_of_a_pack_has_the_bits_that_it_has_alone(kind, mask):
    lengths = [(70, 90), (0, 4), (64, 40), (5, 0), (1, 200), (130, 130)]
    used = [(66, 70), (0, 3), (64, 40), (5, 0), (1, 128), (100, 130)]
    for pack in (Pack.of(lengths, tail=3), Pack.of(lengths, used=used, first=2, tail=9)):
        scores = scores_of_pack(pack, kind)
        for schedule in ("auto", "spt" if scores.softcap or scores.alibi_slopes is not None else "order_free"):
            arguments = dict(schedule=schedule, **public(mask))
            assert_as_alone(pack, scores, packed(pack, scores, **arguments), **arguments)


@KIND
def test_neighbours_reach_no_sequence(kind):
    """But for the sum of the sinks' gradient, which is of all."""
    pack = Pack.of([(70, 90), (64, 40), (30, 130)], used=[(66, 70), (64, 40), (5, 128)], first=3, tail=20)
    scores = scores_of_pack(pack, kind)
    clean = packed(pack, scores, causal=True)
    outside_q, outside_k = pack.outside()
    for x, rows in ((pack.q, outside_q), (pack.dout, outside_q), (pack.k, outside_k), (pack.v, outside_k)):
        x[rows] = math.nan
    assert_same_bits(packed(pack, scores, causal=True).values(), clean.values())


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_the_sinks_gradient_does_not_depend_on_the_pack(heads):
    """Three sequences in a batch, in a pack, in a pack of another order, and alone."""
    q, k, v, dout = (x.detach() for x in qkv_tensors(33, 50, *heads, batch=3))
    scores = draw(3, 4, 33, sinks=FP32, lse_gradient=True)
    of_sequences = [
        dense(*(x[b : b + 1] for x in (q, k, v, dout)), scores._replace(dsoftmax_lse=scores.dsoftmax_lse[b : b + 1]))
        for b in range(3)
    ]
    terms = [found["dsinks"] for found in of_sequences]
    assert torch.equal(dense(q, k, v, dout, scores)["dsinks"], terms[0] + terms[1] + terms[2])
    for order in itertools.permutations(range(3)):
        rows = [torch.cat([x[b] for b in order]) for x in (q, k, v, dout)]
        pack = Pack(*rows, [0, 33, 66, 99], [0, 50, 100, 150], None, None)
        dlse = torch.cat([scores.dsoftmax_lse[b] for b in order], dim=1)
        found = packed(pack, scores._replace(dsoftmax_lse=dlse))["dsinks"]
        assert torch.equal(found, terms[order[0]] + terms[order[1]] + terms[order[2]])


@KIND
@pytest.mark.parametrize("schedule", ["auto", *POLICIES])
def test_same_bits_every_time(schedule, kind):
    mask = CAUSAL if schedule in fitting(causal=True) or schedule == "auto" else FULL
    q, k, v, dout = (x.detach() for x in qkv_tensors(200, 300, head_dim=64))
    scores = draw(2, 4, 200, **KINDS[kind])
    changed = bool(scores.softcap) or scores.alibi_slopes is not None
    if schedule not in ("auto", *fitting(**mask, head_dim=64, changed_scores=changed)):
        with pytest.raises(ValueError, match=f"'{schedule}'"):
            dense(q, k, v, dout, scores, schedule=schedule, **mask)
        return
    first, again = (dense(q, k, v, dout, scores, schedule=schedule, **mask, sm_margin=n) for n in (0, 5))
    assert_same_bits(again.values(), first.values())


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_nothing_asked_for_is_nothing_changed(function):
    """Zero and None are no cap and no slopes; slopes of 0 and sinks of -inf change no bits."""
    inputs = inputs_of(function, seqlen=40)
    dout = torch.randn(1, 40, 2, 8).bfloat16()
    expected = results_of(function, inputs, dout, PLAIN, causal=True)
    nowhere = torch.full((2,), -math.inf)
    for scores in (Scores(softcap=None), Scores(alibi_slopes=torch.zeros(1, 2)), Scores(sinks=nowhere),
                   Scores(dsoftmax_lse=torch.zeros(1, 2, 40))):  # fmt: skip
        found = results_of(function, inputs, dout, scores, causal=True)
        zero = found.pop("dsinks", None)
        assert zero is None or not zero.any()
        assert_same_bits(found.values(), expected.values())


def test_both_names_of_a_sink():
    q, k, v, _ = qkv_tensors(20, 30)
    sink = torch.randn(4)
    assert torch.equal(flash_attn_func(q, k, v, s_aux=sink), flash_attn_func(q, k, v, learnable_sink=sink))


def test_off_by_one_softmax_is_a_sink_of_zero():
    q, k, v, dout = (x.detach() for x in qkv_tensors(40, 50, kv_heads=4))
    out = flash_attn_func(q, k, v, learnable_sink=torch.zeros(4))
    exps = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()).mul(32**-0.5).exp()
    expected = torch.einsum("bhij,bjhd->bihd", exps / (1 + exps.sum(-1, keepdim=True)), v.double())
    eager = attention_in_dtype(q, k, v, scores=Scores(sinks=torch.zeros(4))).out
    assert relative_error(out, expected) <= relative_error(eager, expected)


def test_a_sink_outside_of_the_kernel():
    """out * sigmoid(LSE - s), by a log-sum-exp with a gradient: what models do with kernels that have no sinks."""
    *inputs, dout = qkv_tensors(40, 50, head_dim=64, dtype=torch.float16)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out, lse, _ = flash_attn_func(*inputs, causal=True, return_attn_probs=True)
    outside = out * (lse - sinks[:, None]).sigmoid().transpose(1, 2)[..., None]
    inside = flash_attn_func(*inputs, causal=True, s_aux=sinks)
    detached, scores = [x.detach() for x in inputs], Scores(sinks=sinks.detach())
    exact, eager = (f(*detached, dout, causal=True, scores=scores) for f in (attention_float64, attention_in_dtype))
    for out in (inside, outside):
        found = dict(zip(("dq", "dk", "dv", "dsinks"), torch.autograd.grad(out, (*inputs, sinks), dout.to(out.dtype))))
        for name, actual in {"out": out, **found}.items():
            truth = getattr(exact, name)
            assert relative_error(actual, truth) <= relative_error(getattr(eager, name), truth), name


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=name_of)
def test_merging_two_partial_attentions(mask):
    """Of the first and the other keys, in plain torch by their log-sum-exp: the whole, and its gradients."""
    *inputs, dout = qkv_tensors(60, 100, head_dim=64)
    q, k, v = inputs
    # Every query sees the first 40 keys, under either mask.
    out_1, lse_1, _ = flash_attn_func(q, k[:, :40], v[:, :40], return_attn_probs=True)
    out_2, lse_2, _ = flash_attn_func(q, k[:, 40:], v[:, 40:], **mask, return_attn_probs=True)
    lse = torch.logaddexp(lse_1, lse_2)
    weights = ((part - lse).exp().transpose(1, 2)[..., None] for part in (lse_1, lse_2))
    merged = sum(out * weight for out, weight in zip((out_1, out_2), weights))
    with torch.no_grad():
        truth = attention_float64(q, k, v, dout, **mask)
    found = (merged, *torch.autograd.grad(merged, inputs, dout.to(merged.dtype)))
    assert (lse - truth.softmax_lse).abs().max() < 1e-5
    for name, x in zip(("out", "dq", "dk", "dv"), found):
        assert relative_error(x, getattr(truth, name)) < 5e-3, name


def test_a_gradient_of_the_log_sum_exp_alone():
    """Where the output has none, it is zeros."""
    *inputs, dout = qkv_tensors(30, 40)
    sinks, dlse = torch.randn(4).requires_grad_(), torch.randn(2, 4, 30)
    _, lse, _ = flash_attn_func(*inputs, learnable_sink=sinks, return_attn_probs=True)
    found = torch.autograd.grad(lse, (*inputs, sinks), dlse)
    scores = Scores(sinks=sinks.detach(), dsoftmax_lse=dlse)
    expected = dense(*(x.detach() for x in inputs), torch.zeros_like(dout), scores)
    assert_same_bits(found, [expected[name] for name in NAMES[2:]])
    assert not found[2].any() and found[0].any()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_only_what_is_asked_for_is_computed():
    *inputs, dout = qkv_tensors(30, 40)
    sinks = torch.randn(4)
    for needs, wants in itertools.product((False, True), (False, True)):
        sinks.requires_grad_(needs)
        with kernel_calls() as calls:
            out, lse, _ = flash_attn_func(*inputs, s_aux=sinks, return_attn_probs=True)
            torch.autograd.grad(out, [*inputs, sinks] if needs and wants else inputs, dout)
        _, backward = calls[-1]
        assert (backward["dsinks"] is not None) == (needs and wants) and backward["dsoftmax_lse"] is None
        assert torch.equal(backward["sinks"], sinks)


def test_sinks_alone_may_require_a_gradient():
    q, k, v, dout = (x.detach() for x in qkv_tensors(30, 40))
    sinks = torch.randn(4, requires_grad=True)
    (found,) = torch.autograd.grad(flash_attn_func(q, k, v, s_aux=sinks), sinks, dout)
    assert torch.equal(found, dense(q, k, v, dout, Scores(sinks=sinks.detach()))["dsinks"])


def test_queries_that_see_no_key():
    """Output 0; the log-sum-exp is the sink, whose gradient is then the log-sum-exp's. Where it is infinite, NaN in
    its gradient is not looked at."""
    q, k, v, dout = (x.detach() for x in qkv_tensors(50, 20))
    sinks = torch.tensor([0.5, -math.inf, 3.0, -2.0])
    dlse = torch.randn(2, 4, 50)
    dlse[:, 1, :30] = math.nan
    found = dense(q, k, v, dout, Scores(sinks=sinks, dsoftmax_lse=dlse), causal=True)
    expected = sinks.masked_fill(sinks == -math.inf, math.inf)[None, :, None].expand(2, 4, 30)
    assert torch.equal(found["softmax_lse"][:, :, :30], expected)
    assert not found["out"][:, :30].any() and not found["dq"][:, :30].any()
    assert all(x.isfinite().all() for name, x in found.items() if name != "softmax_lse") and found["dsinks"][1] == 0


@pytest.mark.parametrize("lengths", [(5, 0), (0, 5), (0, 0)])
@pytest.mark.parametrize("is_pack", [False, True])
def test_no_keys_or_no_queries_at_all(is_pack, lengths):
    sinks = torch.tensor([0.5, -1.0, 2.0, -math.inf])
    scores = Scores(sinks=sinks)
    if is_pack:
        pack = Pack.of([lengths, (lengths[0], 0)], tail=2)
        scores = scores._replace(dsoftmax_lse=torch.randn(4, pack.q.shape[0]))
        found = packed(pack, scores)
        assert_as_alone(pack, scores, found)
        bare = pack._replace(k=pack.k[:0], v=pack.v[:0], offsets_k=[0, 0, 0])
        found = packed(bare, scores)
        own = found["softmax_lse"][:, : 2 * lengths[0]]
        assert (found["softmax_lse"][:, 2 * lengths[0] :] == math.inf).all()
    else:
        q, k, v, dout = (x.detach() for x in qkv_tensors(*lengths))
        scores = scores._replace(dsoftmax_lse=torch.randn(2, 4, lengths[0]))
        found = dense(q, k, v, dout, scores)
        own = found["softmax_lse"].transpose(0, 1).flatten(1)
    assert torch.equal(own, sinks.masked_fill(sinks == -math.inf, math.inf)[:, None].expand_as(own))
    assert not any(found[name].any() for name in ("out", "dq", "dk", "dv"))
    dlse = scores.dsoftmax_lse
    used = dlse[:, : 2 * lengths[0]].sum(1) if is_pack else dlse.sum((0, 2))
    torch.testing.assert_close(found["dsinks"], used.masked_fill(sinks == -math.inf, 0.0))


def test_slopes_of_any_strides():
    q, k, v, _ = qkv_tensors(30, 40)
    slopes = torch.rand(2, 4)
    expected = flash_attn_func(q, k, v, alibi_slopes=slopes)
    assert torch.equal(flash_attn_func(q, k, v, alibi_slopes=slopes.t().contiguous().t()), expected)
    same = slopes[0].expand(2, 4)
    assert torch.equal(flash_attn_func(q, k, v, alibi_slopes=same), flash_attn_func(q, k, v, alibi_slopes=slopes[0]))


def test_one_tensor_of_queries_keys_and_values():
    q, k, v, dout = (x.detach() for x in qkv_tensors(30, 30, kv_heads=4))
    scores = draw(2, 4, 30, softcap=2.0, sinks=BF16, lse_gradient=True)
    expected = dense(q, k, v, dout, scores)
    found = results_of(flash_attn_qkvpacked_func, [torch.stack((q, k, v), dim=2)], dout, scores)
    gradients = [expected[name] for name in ("dq", "dk", "dv")]
    expected |= {"dqkv": torch.stack(gradients, dim=2)}
    assert_same_bits(found.values(), [expected[name] for name in found])

"""Masks by key columns, startend_row_indices, on CPU tensors: accuracy, bits, gradients and errors."""

import itertools

import pytest
import torch
import torch._dynamo.testing
from column_support import (
    FORMS,
    NAMES,
    draw_columns,
    failures,
    hidden_pairs,
    hides_nothing,
    inputs_of_head,
    part_of,
    results,
)
from float64_reference import Scores, attention_float64
from interface_support import FUNCTIONS, assert_same_bits, inputs_of, kernel_calls, qkv_tensors
from mask_support import CAUSAL, FULL, name_of, public, window
from pack_support import Pack

from dash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    masks,
    reference,
)
from dash_attn.tile_order import tile_order

FP64 = torch.float64
FORM = pytest.mark.parametrize("causal, bounds", FORMS)
WINDOWS = [{}, {"window": (9, 4)}, {"window": (20, -1), "attention_chunk": 12}]


def formula(q, k, v, dout, columns, scores, causal, **arguments):
    """float64, one KV head of one sequence at a time; dsinks summed over the sequences."""
    group = q.shape[2] // k.shape[2]
    found = []
    for b in range(q.shape[0]):
        heads = []
        for g in range(k.shape[2]):
            hidden = hidden_pairs(columns[b, g % columns.shape[1]], q.shape[1], causal)
            of_queries, of_keys = slice(g * group, (g + 1) * group), slice(g, g + 1)
            own = (q[b : b + 1, :, of_queries], k[b : b + 1, :, of_keys], v[b : b + 1, :, of_keys])
            sinks = None if scores.sinks is None else scores.sinks[of_queries]
            dlse = scores.dsoftmax_lse[b : b + 1, of_queries]
            of_heads = Scores(sinks=sinks, dsoftmax_lse=dlse)
            heads.append(attention_float64(
                *own, dout[b : b + 1, :, of_queries], scores=of_heads, hidden=hidden, causal=causal, **arguments
            ))  # fmt: skip
        found.append([torch.cat(parts, dim=1 if i == 1 else 2) for i, parts in enumerate(zip(*(h[:5] for h in heads)))])
        found[-1].append(None if scores.sinks is None else torch.cat([h.dsinks for h in heads]))
    *rest, dsinks = zip(*found)
    return [torch.cat(parts) for parts in rest], None if scores.sinks is None else sum(dsinks)


@pytest.mark.parametrize("lengths", [(1, 1), (40, 40), (17, 33), (33, 17)])
@pytest.mark.parametrize("arguments", WINDOWS, ids=str)
@FORM
def test_formulas_in_float64(causal, bounds, arguments, lengths):
    """In small tiles, of which some are hidden as a whole, with a mask for each KV head and with one for all."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(lengths[0], 4), (lengths[1], 2), (lengths[1], 2), (lengths[0], 4)]
    q, k, v, dout = (torch.randn(2, s, h, 8, generator=generator, dtype=FP64) for s, h in shapes)
    dlse = torch.randn(2, 4, lengths[0], generator=generator, dtype=FP64)
    for heads, sinks in itertools.product((1, 2), (None, torch.tensor([-1.0, 0.5, -torch.inf, 2.0], dtype=FP64))):
        columns = draw_columns(2, heads, *lengths, causal, bounds, seed=heads)
        scores = Scores(sinks=sinks, dsoftmax_lse=dlse)
        expected, dsinks = formula(q, k, v, dout, columns, scores, causal, softmax_scale=0.7, **arguments)
        common = dict(softmax_scale=0.7, causal=causal, startend_row_indices=columns, **arguments)
        out, lse = reference.forward(q, k, v, sinks=sinks, **common)
        order = tile_order("descending", *lengths, head_dim=8, tile_q=4, tile_k=8, causal=causal, **arguments)
        gradients = reference.backward(dout, q, k, v, out, lse, dsoftmax_lse=dlse, order=order, **common)
        torch.testing.assert_close([out, lse, *gradients], expected, rtol=1e-12, atol=1e-12)
        if sinks is not None:
            actual = reference.sink_gradient(dout, out, lse, sinks, dlse).sum(dim=0)
            torch.testing.assert_close(actual, dsinks, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(64, (200, 200)), (128, (130, 260)), (40, (300, 130))], ids=str)
@FORM
def test_accuracy(causal, bounds, shape):
    head_dim, lengths = shape
    q, k, v, dout = (x.detach() for x in qkv_tensors(*lengths, 4, 2, head_dim))
    for arguments in ({}, {"window": (100, 30)}):
        columns = draw_columns(2, 2, *lengths, causal, bounds, seed=1)
        given = public({"causal": causal, **arguments})
        found = results(q, k, v, dout, columns, **given)
        assert failures(found, q, k, v, dout, columns, causal=causal, **arguments) == []


@FORM
def test_accuracy_with_sinks(causal, bounds):
    inputs = [x.detach() for x in qkv_tensors(200, 260, head_dim=64, batch=1)]
    sinks, columns = torch.tensor([0.5, -1.0, 2.0, 0.0]), draw_columns(1, 2, 200, 260, causal, bounds)
    found = results(*inputs, columns, learnable_sink=sinks, causal=causal)
    assert failures(found, *inputs, columns, sinks=sinks, causal=causal) == []


def test_the_rule_pair_by_pair():
    for causal, bounds in FORMS:
        columns = draw_columns(2, 3, 30, 40, causal, bounds)
        found = masks.hidden_rows(columns, 4, 29, causal=causal)
        for b, h in itertools.product(range(2), range(3)):
            assert torch.equal(found[b, h], hidden_pairs(columns[b, h], 30, causal)[4:29])


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(70, 20), window(-1, -1, 96, causal=True)], ids=name_of)
def test_a_mask_that_hides_nothing_changes_no_bit(mask):
    q, k, v, dout = qkv_tensors(200, 150)
    sinks = torch.randn(4)
    for causal, bounds in FORMS:
        if causal == mask["causal"]:
            columns = hides_nothing(2, 150, causal, bounds)
            found = results(q, k, v, dout, columns, learnable_sink=sinks, **public(mask))
            expected = results(q, k, v, dout, None, learnable_sink=sinks, **public(mask))
            assert_same_bits(found.values(), expected.values())


@FORM
def test_bits_depend_on_the_sequence_and_the_kv_head_alone(causal, bounds):
    q, k, v, dout = (x.detach() for x in qkv_tensors(150, 140))
    columns = draw_columns(2, 2, 150, 140, causal, bounds)
    first = results(q, k, v, dout, columns, causal=causal)
    assert_same_bits(results(q, k, v, dout, columns, causal=causal).values(), first.values())
    for b, g in itertools.product(range(2), range(2)):
        own = inputs_of_head(q, k, v, dout, b, g)
        alone = results(*own, columns[b : b + 1, g : g + 1], causal=causal)
        assert_same_bits(alone.values(), part_of(first, b, g, 2).values())


@FORM
def test_keys_that_a_query_does_not_see_change_no_bit_of_its_row(causal, bounds):
    q, k, v, _ = (x.detach() for x in qkv_tensors(150, 140, batch=1))
    columns = draw_columns(1, 1, 150, 140, causal, bounds)
    hidden = hidden_pairs(columns[0, 0], 150, causal)
    out = flash_attn_func(q, k, v, causal=causal, startend_row_indices=columns)
    for row in (0, 77, 149):
        others = hidden[row][None, :, None, None]
        changed = (torch.where(others, x.flip(1) * 3, x) for x in (k, v))
        found = flash_attn_func(q, *changed, causal=causal, startend_row_indices=columns)
        assert torch.equal(found[:, row], out[:, row])


@FORM
@pytest.mark.parametrize("heads", [1, 2])
def test_every_sequence_of_a_pack_has_the_bits_that_it_has_alone(causal, bounds, heads):
    used = [(66, 70), (0, 3), (64, 40), (5, 0), (40, 130)]
    pack = Pack.of([(70, 90), (0, 4), (64, 40), (5, 0), (40, 200)], used=used, first=2, tail=9)
    columns = draw_columns(1, heads, 66, pack.k.shape[0], causal, bounds)[0]
    inputs = [x.requires_grad_() for x in (pack.q, pack.k, pack.v)]
    arguments = {"causal": causal, "window_size": (60, -1), **pack.used()}
    out, lse, _ = flash_attn_varlen_func(
        *inputs, *pack.offsets(), startend_row_indices=columns, return_attn_probs=True, **arguments
    )
    dq, dk, dv = torch.autograd.grad(out, inputs, pack.dout)
    for queries, keys in pack.sequences():
        own = [x.detach()[None, rows] for x, rows in zip((*inputs, pack.dout), (queries, keys, keys, queries))]
        alone = results(*own, columns[None, :, keys], causal=causal, window_size=(60, -1))
        parts = (out[queries], lse[:, queries], dq[queries], dk[keys], dv[keys])
        assert_same_bits(parts, (alone[name][0] for name in NAMES))
    rows_q, rows_k = pack.outside()
    assert not any(x[rows].any() for x, rows in ((out, rows_q), (dq, rows_q), (dk, rows_k), (dv, rows_k)))


def test_what_is_not_finite_stays_in_its_document():
    """Documents of whole tiles: a tile of which a row sees no key, and its neighbours see none either."""
    length = 256  # a multiple of the tiles
    q, k, v, dout = (x.detach() for x in qkv_tensors(2 * length, 2 * length, batch=2))
    # One document in the first sequence, and two in the second.
    columns = torch.full((2, 1, 2 * length, 1), 2 * length, dtype=torch.int32)
    columns[1, :, :length] = length
    clean = results(q, k, v, dout, columns, causal=True)
    for x in (q, k, v, dout):
        x[1, :length] = torch.nan
    found = results(q, k, v, dout, columns, causal=True)
    for name in NAMES:
        rows = (slice(None), slice(length, None)) if name == "softmax_lse" else slice(length, None)
        assert torch.equal(found[name][0], clean[name][0]) and torch.equal(found[name][1][rows], clean[name][1][rows])
        assert found[name][1].isnan().any()


@FORM
def test_all_functions_agree(causal, bounds):
    columns = draw_columns(1, 1, 9, 9, causal, bounds)
    found = []
    for function in FUNCTIONS:
        inputs = inputs_of(function)
        out = function(*inputs, causal=causal, startend_row_indices=columns)
        found.append((out, torch.cat([x.flatten() for x in _parts(torch.autograd.grad(out.sum(), inputs), function)])))
    for other in found[1:]:
        assert_same_bits(other, found[0])


def _parts(gradients, function):
    """dq, dk and dv."""
    if function is flash_attn_kvpacked_func:
        return gradients[0], *gradients[1].unbind(2)
    return gradients[0].unbind(2) if function is flash_attn_qkvpacked_func else gradients


def test_layouts_of_the_mask():
    """Any strides are taken; the kernel gets bounds side by side, and keys one after the other."""
    q, k, v, dout = (x.detach() for x in qkv_tensors(20, 30))
    columns = draw_columns(2, 2, 20, 30, False, 4)
    expected = results(q, k, v, dout, columns)
    for given in (columns.mT.contiguous().mT, columns.transpose(0, 2).contiguous().transpose(0, 2)):
        with kernel_calls() as calls:
            assert_same_bits(results(q, k, v, dout, given).values(), expected.values())
        for _, arguments in calls:
            assert arguments["startend_row_indices"].stride()[2:] == (4, 1)
    of_all = columns[:1, :1].expand(2, 2, -1, -1)
    with kernel_calls() as calls:
        found = results(q, k, v, dout, of_all)
    assert all(arguments["startend_row_indices"].stride()[:2] == (0, 0) for _, arguments in calls)
    assert_same_bits(found.values(), results(q, k, v, dout, of_all.contiguous()).values())


def test_no_keys():
    q, k, v, dout = (x.detach() for x in qkv_tensors(5, 0))
    columns = torch.empty(2, 1, 0, 2, dtype=torch.int32)
    found = results(q, k, v, dout, columns, learnable_sink=torch.ones(4))
    assert not found["out"].any() and (found["softmax_lse"] == 1).all() and not found["dsinks"].any()


def test_a_mask_that_changes_before_the_backward_is_noticed():
    q, k, v, _ = qkv_tensors(5, 5)
    columns = torch.full((2, 1, 5, 1), 3, dtype=torch.int32)
    out = flash_attn_func(q, k, v, causal=True, startend_row_indices=columns)
    columns.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@FORM
def test_ops(causal, bounds):
    q, k, v, dout = (x.detach() for x in qkv_tensors(20, 30, head_dim=16))
    columns = {"startend_row_indices": draw_columns(2, 2, 20, 30, causal, bounds)}
    mask = (None, None, None, None, 0.25, causal, -1, -1, 0)
    torch.library.opcheck(torch.ops.dash_attn.forward.default, (q, k, v, *mask), columns)
    out, lse = torch.ops.dash_attn.forward(q, k, v, *mask, **columns)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    arguments = (dout, q, k, v, out, lse, *gradients, *mask, "auto", 0)
    torch.library.opcheck(torch.ops.dash_attn.backward.default, arguments, columns)


@FORM
def test_compiles_to_one_graph(causal, bounds):
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    q, k, v, dout = qkv_tensors(20, 30)
    for seed in range(2):
        columns = draw_columns(2, 1, 20, 30, causal, bounds, seed=seed)
        arguments = {"causal": causal, "startend_row_indices": columns}
        found, expected = (f(q, k, v, **arguments) for f in (compiled, flash_attn_func))
        assert torch.equal(found, expected)
        assert_same_bits(*(torch.autograd.grad(x, (q, k, v), dout) for x in (found, expected)))


def test_a_compiled_graph_makes_its_mask_and_serves_other_lengths():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(q, k, v, ids):
        return flash_attn_func(q, k, v, causal=True, startend_row_indices=masks.document_mask(ids))

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for seqlen in (20, 31, 47):
        inputs = (*qkv_tensors(seqlen, seqlen, batch=1)[:3], torch.arange(seqlen)[None] // 7)
        assert torch.equal(compiled(*inputs), layer(*inputs))
    assert counter.frame_count == 2


def test_vmap_over_masks():
    q, k, v, dout = (x.detach() for x in qkv_tensors(20, 30))
    columns = torch.stack([draw_columns(2, 1, 20, 30, True, 2, seed=seed) for seed in range(3)])

    def loss(q, k, v, columns):
        return (flash_attn_func(q, k, v, causal=True, startend_row_indices=columns) * dout).sum()

    found = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(None, None, None, 0))(q, k, v, columns)
    for i, of_call in enumerate(columns):
        expected = results(q, k, v, dout, of_call, causal=True)
        assert_same_bits((x[i] for x in found), (expected[name] for name in ("dq", "dk", "dv")))


def test_batched_gradients():
    inputs = [x.detach().requires_grad_() for x in qkv_tensors(20, 30)[:3]]
    columns = draw_columns(2, 1, 20, 30, True, 1)
    out = flash_attn_func(*inputs, causal=True, startend_row_indices=columns)
    douts = torch.randn(3, *out.shape).bfloat16()
    found = torch.autograd.grad(out, inputs, douts, is_grads_batched=True, retain_graph=True)
    for i, dout in enumerate(douts):
        assert_same_bits((x[i] for x in found), torch.autograd.grad(out, inputs, dout, retain_graph=True))


def columns_of(*shape, dtype=torch.int32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


NAME = "startend_row_indices"
SHAPE = f"{NAME} must have shape (batch, 1 or kv_heads, seqlen_k, n) = (2, 1 or 2, 30, n), got "
BOUNDS = f"{NAME} must have a last dimension of "
GIVEN = f"{NAME} is given"
ERRORS = [
    ({NAME: columns_of(2, 1, 30, 2, dtype=torch.int64)}, TypeError, f"{NAME} must be torch.int32, got torch.int64"),
    ({NAME: columns_of(2, 1, 30, 2, device="meta")}, ValueError, f"{NAME} must be on the device of q, cpu, got meta"),
    ({NAME: columns_of(2, 30, 2)}, ValueError, SHAPE + "(2, 30, 2)"),
    ({NAME: columns_of(1, 1, 30, 2)}, ValueError, SHAPE + "(1, 1, 30, 2)"),
    ({NAME: columns_of(2, 4, 30, 2)}, ValueError, SHAPE + "(2, 4, 30, 2)"),
    ({NAME: columns_of(2, 1, 20, 2)}, ValueError, SHAPE + "(2, 1, 20, 2)"),
    ({NAME: columns_of(2, 1, 30, 1)}, ValueError, BOUNDS + "2 or 4 with causal=False, got 1"),
    ({NAME: columns_of(2, 1, 30, 0)}, ValueError, BOUNDS + "2 or 4 with causal=False, got 0"),
    ({NAME: columns_of(2, 1, 30, 4), "causal": True}, ValueError, BOUNDS + "1 or 2 with causal=True, got 4"),
    ({NAME: columns_of(2, 1, 30, 1), "window_size": (5, 0)}, ValueError, BOUNDS + "2 or 4 with causal=False, got 1"),
    ({"dropout_p": 0.5}, NotImplementedError, f"dropout_p must be 0.0 ({GIVEN}), got 0.5"),
    ({"softcap": 20.0}, NotImplementedError, f"softcap must be 0.0 with {NAME}, got 20"),
    ({"alibi_slopes": torch.ones(4)}, NotImplementedError,
     f"alibi_slopes must be None with {NAME}, got a tensor of shape (4,)"),
    *(({"schedule": schedule, "causal": causal}, NotImplementedError,
       f"schedule must be 'auto' or 'descending' with {NAME}, got '{schedule}'")
      for schedule, causal in (("spt", True), ("shift", False), ("symmetric_shift", True), ("order_free", True))),
]  # fmt: skip


@pytest.mark.parametrize("change, error, message", ERRORS)
def test_errors(change, error, message):
    q, k, v, _ = qkv_tensors(20, 30)
    with kernel_calls() as calls, pytest.raises(error) as caught:
        flash_attn_func(q, k, v, **{NAME: columns_of(2, 1, 30, 2), **change})
    assert str(caught.value) == message and not calls


def test_errors_of_packs():
    pack = Pack.of([(20, 30), (5, 6)])

    def call(columns, **arguments):
        return flash_attn_varlen_func(*pack[:3], *pack.offsets(), startend_row_indices=columns, **arguments)

    with pytest.raises(ValueError) as caught:
        call(columns_of(1, 1, 36, 2))
    assert (
        str(caught.value) == f"{NAME} must have shape (1 or kv_heads, total_k, n) = (1 or 2, 36, n), got (1, 1, 36, 2)"
    )
    with pytest.raises(NotImplementedError, match=r"startend_row_indices must be None \(block_table is given\), got"):
        call(columns_of(1, 36, 2), block_table=torch.zeros(2, 1, dtype=torch.int32))


def test_the_ops_refuse_dropout_and_gradients_in_the_masks_memory():
    q, k, v, dout = (x.detach() for x in qkv_tensors(20, 30, head_dim=16))
    columns = columns_of(2, 1, 30, 2)
    mask = (None, None, None, None, 0.25, False, -1, -1, 0)
    dropout = {"rng_state": torch.zeros(2, dtype=torch.int64), "dropout_p": 0.5}
    with pytest.raises(NotImplementedError, match=f"dropout_p must be 0.0 with {NAME}, got 0.5"):
        torch.ops.dash_attn.forward(q, k, v, *mask, **dropout, startend_row_indices=columns)
    out, lse = torch.ops.dash_attn.forward(q, k, v, *mask, startend_row_indices=columns)
    memory = torch.zeros(2 * 1 * 30 * 2 + v.numel(), dtype=torch.int32)
    columns, dv = memory[:120].view(2, 1, 30, 2), memory.view(torch.bfloat16)[: v.numel()].view_as(v)
    with pytest.raises(ValueError, match=f"dv must not share memory with {NAME}"):
        torch.ops.dash_attn.backward(
            dout, q, k, v, out, lse, torch.empty_like(q), torch.empty_like(k), dv, *mask, "auto", 0,
            startend_row_indices=columns,
        )  # fmt: skip


def test_meta_tensors():
    q, k, v, _ = (x.detach().to("meta") for x in qkv_tensors(20, 30))
    assert flash_attn_func(q, k, v, startend_row_indices=columns_of(2, 1, 30, 2, device="meta")).shape == q.shape
    with pytest.raises(ValueError, match="must have a last dimension of 2 or 4"):
        flash_attn_func(q, k, v, startend_row_indices=columns_of(2, 1, 30, 1, device="meta"))

"""Masks by key columns, startend_row_indices, on a GPU: accuracy, the bit contract, graphs, and the helpers."""

import functools
import itertools
import random

import column_support as columns_of
import gpu_support as support
import pack_checks
import pytest
import torch
from column_support import FORMS, draw_columns, failures, hidden_pairs, hides_nothing, inputs_of_head, part_of, results
from gpu_support import Problem
from kernel_names import kernels, ours
from pack_support import offsets_of
from torch.nn.attention.flex_attention import create_block_mask

import dash_attn
from dash_attn import masks, schedule

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FORM = pytest.mark.parametrize("causal, bounds", FORMS)
HEAD_DIMS = pytest.mark.parametrize(
    "head_dims", ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)), ids=str
)
LENGTHS = ((65, 300), (129, 129), (515, 515), (300, 700), (700, 300), (1300, 1100))
WINDOWS = ({}, {"window": (127, 64)}, {"window": (200, -1), "attention_chunk": 300})


def public(window):
    return {"window_size" if name == "window" else name: value for name, value in window.items()}


def drawn(head_dims, shape, causal, bounds, device, *, dtype=torch.bfloat16, mask_heads=None, seed=0):
    """q, k, v, dout and a mask; `shape`: batch, both lengths, heads and KV heads."""
    problem = Problem(*shape, head_dims[0], causal, dtype=dtype, value_head_dim=head_dims[1])
    batch, seqlen_q, seqlen_k, _, kv_heads = shape
    columns = draw_columns(batch, mask_heads or kv_heads, seqlen_q, seqlen_k, causal, bounds, seed=seed)
    return *support.random_qkv_dout(problem, device, seed), columns.to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@HEAD_DIMS
@FORM
def test_accuracy(causal, bounds, head_dims, dtype, device):
    for i, lengths in enumerate(LENGTHS):
        heads, window = ((4, 4), (8, 2))[i % 2], WINDOWS[i % 3]
        *inputs, columns = drawn(
            head_dims, (2, *lengths, *heads), causal, bounds, device, dtype=DTYPES[dtype],
            mask_heads=(1, None)[i // 2 % 2], seed=i,
        )  # fmt: skip
        found = results(*inputs, columns, causal=causal, **public(window))
        lines = failures(found, *inputs, columns, rounded_factors=True, causal=causal, **window)
        assert not lines, f"{lengths} {heads} {window}:\n" + "\n".join(lines)


@HEAD_DIMS
@FORM
def test_accuracy_over_many_tiles_with_sinks(causal, bounds, head_dims, device):
    *inputs, columns = drawn(head_dims, (1, 2049, 2500, 4, 2), causal, bounds, device)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], device=device)
    found = results(*inputs, columns, learnable_sink=sinks, causal=causal)
    lines = failures(found, *inputs, columns, rounded_factors=True, sinks=sinks, causal=causal)
    assert not lines, "\n".join(lines)


@HEAD_DIMS
@FORM
def test_same_bits_under_load_and_on_fewer_sms(causal, bounds, head_dims, perturbation, device, num_sms):
    *inputs, columns = drawn(head_dims, (2, 1100, 1100, 16, 4), causal, bounds, device)
    dlse = torch.randn(2, 16, 1100, device=device)
    call = functools.partial(results, *inputs, columns, causal=causal, dlse=dlse)
    first = call()
    for i in range(20):
        perturbation.enqueue(4)
        support.assert_same_bits(call(), first, f"call {i}")
    for margin in (1, 17, num_sms - 1):
        support.assert_same_bits(call(sm_margin=margin), first, f"sm_margin={margin}")


@pytest.mark.parametrize("mask_heads", [1, 2])
@FORM
def test_several_ctas_plan_a_long_sequence_as_one_does(causal, bounds, mask_heads, device):
    """With sm_margin, one CTA plans a head of a sequence."""
    shape = (2, 300, 7000, 4, 2)
    *inputs, columns = drawn((128, 128), shape, causal, bounds, device, mask_heads=mask_heads)
    call = functools.partial(results, *inputs, columns, causal=causal)
    support.assert_same_bits(call(), call(sm_margin=1), f"{mask_heads} heads of the mask")


@pytest.mark.parametrize("window", [{}, {"window_size": (100, 30)}, {"window_size": (-1, 9), "attention_chunk": 256}])
@HEAD_DIMS
@FORM
def test_a_mask_that_hides_nothing_changes_no_bit(causal, bounds, head_dims, window, device):
    *inputs, _ = drawn(head_dims, (2, 515, 700, 8, 2), causal, bounds, device)
    columns = hides_nothing(2, 700, causal, bounds, device)
    arguments = {"causal": causal, **window}
    support.assert_same_bits(results(*inputs, columns, **arguments), results(*inputs, None, **arguments), str(window))


@HEAD_DIMS
@FORM
def test_bits_depend_on_the_sequence_and_the_kv_head_alone(causal, bounds, head_dims, device):
    *inputs, columns = drawn(head_dims, (3, 515, 400, 8, 2), causal, bounds, device)
    whole = results(*inputs, columns, causal=causal)
    for b, g in itertools.product(range(3), range(2)):
        alone = results(*inputs_of_head(*inputs, b, g), columns[b : b + 1, g : g + 1], causal=causal)
        support.assert_same_bits(alone, part_of(whole, b, g, 4), f"sequence {b}, KV head {g}")


@pytest.mark.parametrize("mask_heads", [1, 2])
@HEAD_DIMS
@FORM
def test_every_sequence_of_a_pack_has_the_bits_that_it_has_alone(causal, bounds, head_dims, mask_heads, device):
    chance = random.Random(bounds)
    lengths = [(700, 700), (0, 5), (129, 300), (5, 0), (1, 64), (chance.randrange(999), chance.randrange(999)), (64, 1)]
    queries, keys = (offsets_of([pair[side] for pair in lengths]) for side in (0, 1))
    total_q, total_k = queries[-1] + 7, keys[-1] + 7
    *inputs, columns = drawn(
        head_dims, (1, total_q, total_k, 8, 2), causal, bounds, device, mask_heads=mask_heads, seed=1
    )
    rows = [x[0].requires_grad_() for x in inputs[:3]]
    offsets = [torch.tensor(x, dtype=torch.int32, device=device) for x in (queries, keys)]
    out, lse, _ = dash_attn.flash_attn_varlen_func(
        *rows, *offsets, 700, 999, causal=causal, startend_row_indices=columns[0], return_attn_probs=True
    )
    dq, dk, dv = torch.autograd.grad(out, rows, inputs[3][0])
    assert not any(x[end:].any() for x, end in ((out, queries[-1]), (dq, queries[-1]), (dk, keys[-1]), (dv, keys[-1])))
    for number, (own, own_keys) in enumerate(zip(itertools.pairwise(queries), itertools.pairwise(keys))):
        q_rows, k_rows = slice(*own), slice(*own_keys)
        sequence = [x.detach()[:, y] for x, y in zip(inputs, (q_rows, k_rows, k_rows, q_rows))]
        alone = results(*sequence, columns[:, :, k_rows], causal=causal)
        parts = (out[q_rows], lse[:, q_rows], dq[q_rows], dk[k_rows], dv[k_rows])
        found = dict(zip(columns_of.NAMES, (x.detach()[None] for x in parts)))
        support.assert_same_bits(found, alone, f"sequence {number} of {lengths}")


@pytest.mark.parametrize("column_heads", [False, True], ids=["one mask", "a mask for each KV head"])
@HEAD_DIMS
@FORM
def test_packs_with_gaps_and_used_lengths(causal, bounds, head_dims, column_heads, device):
    """The rows outside the sequences, and sometimes a whole sequence, are garbage."""
    common = dict(value_head_dim=head_dims[1], column_bounds=bounds, column_heads=column_heads)
    pool = pack_checks.Pool(Problem(1, 0, 0, 4, 2, head_dims[0], causal, **common), device)
    # The pack begins behind row 0, has gaps between its sequences, and ends before the last row.
    rows = (
        pack_checks.Rows(2700, (3, 703, 710, 900, 1130, 1160, 2000), (700, 0, 65, 129, 30, 300)),
        pack_checks.Rows(2500, (5, 705, 750, 900, 1130, 1130, 2000), (700, 40, 129, 65, 0, 515)),
    )
    sequences = [pool.get(*own) for own in zip(rows[0].lengths, rows[1].lengths)]
    packs = [pack_checks.make_pack(sequences, *rows, poisoned=poisoned) for poisoned in (None, 2)]
    assert all(x is not None for x in (packs[0].seqused_q, packs[0].seqused_k))
    chance = random.Random(bounds)
    packs += [pack_checks.random_pack(pool, chance) for _ in range(6)]
    for pack in packs:
        pack_checks.assert_as_alone(pack, {"auto": pack_checks.varlen_attention(pack, "auto")})


@HEAD_DIMS
@FORM
def test_keys_that_a_query_does_not_see_change_no_bit_of_its_row(causal, bounds, head_dims, device):
    q, k, v, _, columns = drawn(head_dims, (1, 515, 700, 4, 1), causal, bounds, device)
    hidden = hidden_pairs(columns[0, 0].cpu(), 515, causal).to(device)
    call = functools.partial(dash_attn.flash_attn_func, causal=causal, startend_row_indices=columns)
    out = call(q, k, v)
    for row in (0, 130, 300, 514):
        others = hidden[row][None, :, None, None]
        found = call(q, *(torch.where(others, x.flip(1) * 3, x) for x in (k, v)))
        assert torch.equal(found[:, row], out[:, row]), f"row {row}"


@HEAD_DIMS
def test_what_is_not_finite_stays_in_its_document(head_dims, device):
    """Documents of 1920 rows, a multiple of the tiles: no tile has rows of both. The other sequence is one document."""
    length = 1920
    *inputs, _ = drawn(head_dims, (2, 2 * length, 2 * length, 4, 2), True, 1, device)
    ids = torch.zeros(2, 2 * length, dtype=torch.int32, device=device)
    ids[1, length:] = 1
    columns = masks.document_mask(ids)
    clean = results(*inputs, columns, causal=True)
    for x in inputs:
        x[1, :length] = torch.nan
    found = results(*inputs, columns, causal=True)
    for name, x in found.items():
        rows = (1, slice(None), slice(length, None)) if name == "softmax_lse" else (1, slice(length, None))
        assert torch.equal(x[0], clean[name][0]) and torch.equal(x[rows], clean[name][rows]), name


def documents_of(length, seqlen, device):
    return (torch.arange(seqlen, device=device) // length).int()[None]


@HEAD_DIMS
def test_a_nan_query_spoils_its_row_alone(head_dims, device):
    """Of the outputs that have a row for each query. dK and dV of nearby keys may become NaN."""
    length, nearby = 1920, 640  # a multiple of the tiles, and more than a query tile, a KV tile and a document
    *inputs, _ = drawn(head_dims, (2, 3 * length, 3 * length, 4, 2), True, 1, device)
    ids = documents_of(70, 3 * length, device)
    ids[:, :length] = -1
    columns = masks.document_mask(ids).expand(2, -1, -1, -1)
    clean = results(*inputs, columns, causal=True)
    for row in (length + 75, 2 * length - 1):
        dirty = inputs[0].clone()
        dirty[1, row] = torch.nan
        found = results(dirty, *inputs[1:], columns, causal=True)
        for name in ("out", "softmax_lse", "dq"):
            x, expected = (y[name] if name != "softmax_lse" else y[name].transpose(1, 2) for y in (found, clean))
            assert x[1, row].isnan().all(), f"{name} of row {row}"
            x[1, row] = expected[1, row]
            assert support.first_mismatch(name, x, expected) is None, f"other rows than {row}"
        for name in ("dk", "dv"):
            keys = slice(max(length, row - nearby), row + nearby)
            assert found[name][1, row].isnan().all(), f"{name} of row {row}"
            found[name][1, keys] = clean[name][1, keys]
            assert support.first_mismatch(name, found[name], clean[name]) is None, f"keys far from {row}"


@HEAD_DIMS
def test_which_rows_an_infinite_value_spoils_is_up_to_the_sequence(head_dims, device, num_sms):
    """A GPU with few heads for its SMs could have query tiles of fewer rows. From head_dim 128 on, queries 320 to 383
    see KV tiles before and after the value's, which is loaded for queries before 320."""
    *inputs, _ = drawn(head_dims, (64, 640, 640, 2, 1), True, 1, device)
    inputs[2][::3, 170] = torch.inf
    columns = shared_prefix(160, 4, device)
    call = functools.partial(results, causal=True)
    whole = call(*inputs, columns.expand(64, -1, -1, -1))
    assert not whole["out"][0].isfinite().all() and whole["out"][1].isfinite().all()
    for b in (0, 1, 63):
        own, expected = inputs_of_head(*inputs, b, 0), part_of(whole, b, 0, 2)
        for margin in (0, num_sms - 1):
            found = call(*own, columns, sm_margin=margin)
            support.assert_same_bits(found, expected, f"sequence {b} alone, sm_margin={margin}")
    found = call(*inputs, columns.expand(64, -1, -1, -1), sm_margin=num_sms - 1)
    support.assert_same_bits(found, whole, "one SM")


def shared_prefix(length, nodes, device):
    """The mask of a prefix and of documents that see it, all of the same length, stored one after the other."""
    return masks.prefix_tree_mask([-1] + [0] * (nodes - 1), [length] * nodes).to(device)


@pytest.mark.alone
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_accuracy_of_documents_far_from_their_prefix(head_dims, device):
    """Between the live KV tiles of a document and those of the prefix are words without any."""
    columns = shared_prefix(300, 54, device)
    *inputs, _ = drawn(head_dims, (1, 54 * 300, 54 * 300, 2, 1), True, 1, device)
    found = results(*inputs, columns, causal=True)
    lines = failures(found, *inputs, columns, rounded_factors=True, causal=True)
    assert not lines, "\n".join(lines)


@HEAD_DIMS
def test_documents_of_a_long_sequence_are_a_pack(head_dims, device):
    """The tiles lie differently, and so the bits differ."""
    length, count = 300, 54
    *inputs, _ = drawn(head_dims, (1, count * length, count * length, 4, 2), True, 1, device)
    columns = masks.document_mask(documents_of(length, count * length, device))
    found = results(*inputs, columns, causal=True)
    offsets = torch.tensor(offsets_of([length] * count), dtype=torch.int32, device=device)
    rows = [x[0].detach().requires_grad_() for x in inputs[:3]]
    out, lse, _ = dash_attn.flash_attn_varlen_func(
        *rows, offsets, offsets, length, length, causal=True, return_attn_probs=True
    )
    assert ((found["softmax_lse"][0] - lse).abs() <= 1e-5 * (1 + lse.abs())).all()
    for name, expected in zip(("out", *support.GRADIENTS), (out, *torch.autograd.grad(out, rows, inputs[3][0]))):
        expected = expected.detach().float()
        size = expected.norm(dim=-1)
        off = (found[name][0].float() - expected).norm(dim=-1) - 0.03 * (size + size.mean())
        assert off.max() <= 0, f"{name}: row and head {divmod(int(off.argmax()), off.shape[1])}"


@FORM
def test_layouts_of_the_mask(causal, bounds, device):
    *inputs, columns = drawn((128, 128), (2, 515, 400, 4, 2), causal, bounds, device)
    expected = results(*inputs, columns, causal=causal)
    unaligned = torch.empty(columns.numel() + 1, dtype=torch.int32, device=device)[1:].view_as(columns).copy_(columns)
    for given in (columns.mT.contiguous().mT, columns.transpose(0, 2).contiguous().transpose(0, 2), unaligned):
        support.assert_same_bits(results(*inputs, given, causal=causal), expected, f"strides {given.stride()}")
    of_all = columns[:1, :1].expand(2, 2, -1, -1)
    support.assert_same_bits(
        results(*inputs, of_all, causal=causal), results(*inputs, of_all.contiguous(), causal=causal), "expanded"
    )


@HEAD_DIMS
@FORM
def test_a_graph_is_replayed_with_other_masks(causal, bounds, head_dims, device):
    """And the host does not wait."""
    shape = (2, 700, 900, 8, 2)
    *inputs, columns = drawn(head_dims, shape, causal, bounds, device)
    leaves = [x.requires_grad_() for x in inputs[:3]]

    def step():
        out = dash_attn.flash_attn_func(*leaves, causal=causal, startend_row_indices=columns)
        return out.detach(), *torch.autograd.grad(out, leaves, inputs[3])

    step()  # loads the kernels before the capture
    with support.host_must_not_wait(f"{causal} {bounds}"):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    others = [draw_columns(2, 2, 700, 900, causal, bounds, seed=seed).to(device) for seed in range(1, 4)]
    for new in (*others, hides_nothing(2, 900, causal, bounds, device).expand_as(columns)):
        columns.copy_(new)
        expected = step()
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        names = ("out", *support.GRADIENTS)
        support.assert_same_bits(dict(zip(names, captured)), dict(zip(names, expected)), "graph replay")


def test_helpers_do_not_wait_and_agree_with_those_on_a_cpu(device):
    ids = torch.arange(4000).div(700, rounding_mode="floor").expand(2, -1)
    lengths = torch.tensor([100, 2000])
    tree = torch.tensor([[-1, 0, 1, 1, 0], [-1, -1, 1, 2, 3]]), torch.tensor([[900, 800, 700, 600, 500]] * 2)
    calls = [
        lambda *x: masks.document_mask(*x),
        lambda *x: masks.document_mask(*x, causal=False),
        lambda *x: masks.prefix_lm_mask(*x, 4000),
        lambda *x: masks.prefix_tree_mask(*x, 4000),
    ]
    for call, given in zip(calls, ((ids,), (ids,), (lengths,), tree)):
        there = [x.to(device) for x in given]
        expected = call(*given)
        call(*there)
        with support.host_must_not_wait("a helper"):
            found = call(*there)
        assert torch.equal(found.cpu(), expected)


def test_a_block_mask_is_converted_on_its_device(device):
    document = (torch.arange(1000) // 300).to(device)

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (document[q] == document[kv])

    columns, causal = masks.from_block_mask(create_block_mask(mask_mod, None, None, 1000, 1000, device=device))
    assert causal and torch.equal(columns, masks.document_mask(document[None]))


def test_unsupported_combinations_raise_before_a_launch(device):
    *inputs, columns = drawn((128, 128), (1, 300, 300, 4, 2), True, 1, device)
    for change in (
        {"dropout_p": 0.1}, {"softcap": 10.0}, {"alibi_slopes": torch.ones(4, device=device)},
        *({"schedule": name} for name in schedule.POLICIES if name != "descending"),
    ):  # fmt: skip

        def call(change=change):
            with pytest.raises(NotImplementedError, match="startend_row_indices"):
                results(*inputs, columns, causal=True, **change)

        assert not ours(kernels(call), ""), change


@pytest.mark.parametrize("causal, bounds", [(True, 1), (False, 4)])
def test_the_kernels_raise_under_other_schedules_before_a_launch(causal, bounds, device):
    """dash_attn_C is called without the checks of the public functions."""
    problem = Problem(1, 300, 300, 4, 2, 128, causal, column_bounds=bounds)
    inputs = support.random_inputs(problem, device)
    gradients = support.nan_gradients(inputs)
    arguments = support.of_scores(problem, inputs.scores, inputs.columns)

    def backward(name):
        number = schedule.policy_number(name)
        torch.ops.dash_attn_C.backward(
            *inputs.tensors(), *gradients.values(), **arguments, dsoftmax_lse=None, dsinks=None, schedule=number,
            sm_margin=0,
        )  # fmt: skip

    def raising(name):
        with pytest.raises(RuntimeError, match="no (backward )?kernel .*schedule"):
            backward(name)

    for name in schedule.POLICIES:
        if name != "descending":
            assert not ours(kernels(lambda name=name: raising(name)), ""), name
    assert all(x.isnan().all() for x in gradients.values())
    backward("descending")
    support.assert_finite(gradients, "descending")

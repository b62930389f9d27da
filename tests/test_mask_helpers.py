"""dash_attn.masks: each helper's tensor, pair by pair, against what its mask means."""

import itertools

import pytest
import torch
from column_support import FORMS, draw_columns, hidden_pairs
from float64_reference import visible_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from dash_attn import flash_attn_func, masks


def pairs_of(columns, causal, seqlen_q=None):
    """(batch, heads, seqlen_q, seqlen_k): what a call with the mask sees."""
    batch, heads, seqlen_k, _ = columns.shape
    seqlen_q = seqlen_k if seqlen_q is None else seqlen_q
    seen = visible_keys(seqlen_q, seqlen_k, causal)
    return torch.stack([
        torch.stack([seen & ~hidden_pairs(columns[b, h], seqlen_q, causal) for h in range(heads)]) for b in range(batch)
    ])  # fmt: skip


def assert_is_mask(columns, keys, bounds):
    """Whether it is what the ops take."""
    assert columns.dtype == torch.int32 and columns.dim() == 4 and columns.shape[2:] == (keys, bounds)


@pytest.mark.parametrize("causal, bounds", [(True, 1), (False, 2)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_documents(causal, bounds, dtype):
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 0, 0], [5, 5, 5, 5, 5, 5, 5, 5], [1, 2, 3, 4, 4, 3, 2, 2]], dtype=dtype)
    columns = masks.document_mask(ids, causal=causal)
    assert_is_mask(columns, 8, bounds)
    # A number that comes back is another document.
    documents = torch.cat((torch.zeros(3, 1), (ids[:, 1:] != ids[:, :-1]).cumsum(1)), dim=1)
    expected = documents[:, :, None] == documents[:, None, :]
    expected = expected & visible_keys(8, 8, causal)
    assert torch.equal(pairs_of(columns, causal)[:, 0], expected)
    assert masks.document_mask(ids[:, :0], causal=causal).shape == (3, 1, 0, bounds)
    assert torch.equal(masks.document_mask(ids), masks.document_mask(ids, causal=True))


def test_prefixes():
    lengths = torch.tensor([0, 1, 4, 7, 9, -3])
    columns = masks.prefix_lm_mask(lengths, 7)
    assert_is_mask(columns, 7, 2)
    query, key = torch.arange(7)[:, None], torch.arange(7)
    for seen, length in zip(pairs_of(columns, False)[:, 0], lengths):
        assert torch.equal(seen, (key < length) | (key <= query))


def seen_in_tree(parents, lengths, seqlen):
    """Token by token."""
    nodes = [node for node, length in enumerate(lengths) for _ in range(length)]
    seen = torch.zeros(seqlen, seqlen, dtype=torch.bool)
    for query, node in enumerate(nodes):
        path = {node}
        while parents[node] >= 0:
            node = parents[node]
            path.add(node)
        for key in range(query + 1):
            seen[query, key] = nodes[key] in path
    return seen


@st.composite
def trees(draw):
    """Parents in depth-first order, and lengths, some of them 0."""
    parents, path = [], []
    for node in range(draw(st.integers(0, 12))):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents, [draw(st.integers(0, 4)) for _ in parents]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(trees(), st.integers(0, 5))
def test_trees(tree, padding):
    parents, lengths = tree
    seqlen = sum(lengths) + padding
    tensors = (torch.tensor(x, dtype=torch.int32) for x in tree)
    columns = masks.prefix_tree_mask(*tensors, seqlen)
    assert_is_mask(columns, seqlen, 1)
    assert torch.equal(pairs_of(columns, True)[0, 0], seen_in_tree(parents, lengths, seqlen))
    if parents and not padding:
        assert torch.equal(masks.prefix_tree_mask(parents, lengths), columns)


def test_a_batch_of_trees():
    parents, lengths = [[-1, 0, 0, -1], [-1, 0, 1, -1]], [[3, 2, 1, 0], [1, 1, 4, 2]]
    columns = masks.prefix_tree_mask(torch.tensor(parents), torch.tensor(lengths))
    for seen, *tree in zip(pairs_of(columns, True)[:, 0], parents, lengths):
        assert torch.equal(seen, seen_in_tree(*tree, 8))


def test_a_shared_question_is_a_tree_of_two_levels():
    """Each answer has the bits of the question with this answer alone, up to where its keys stand."""
    columns = masks.prefix_tree_mask([-1, 0, 0], [5, 3, 4])
    q, k, v = torch.randn(3, 1, 12, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = flash_attn_func(q, k, v, causal=True, startend_row_indices=columns)
    for answer in (slice(5, 8), slice(8, 12)):
        own = [torch.cat((x[:, :5], x[:, answer]), dim=1) for x in (q, k, v)]
        torch.testing.assert_close(out[:, answer], flash_attn_func(*own, causal=True)[:, 5:], rtol=0.01, atol=0.01)


NODES = "must have shape (nodes,) or (batch, nodes), got "
EARLIER = "parents must be -1 or the number of an earlier node, got "
ORDER = "parents must be in depth-first order: the node before, one of its ancestors, or -1, got "
ERRORS = [
    (lambda: masks.document_mask([0, 1]), TypeError, "ids must be a torch.Tensor, got [0, 1]"),
    (lambda: masks.document_mask(torch.zeros(2, 3)), TypeError, "ids must be of an integer dtype, got torch.float32"),
    (lambda: masks.document_mask(torch.arange(3)), ValueError, "ids must have shape (batch, seqlen), got (3,)"),
    (lambda: masks.prefix_lm_mask(torch.zeros(2, 3).int(), 4), ValueError,
     "lengths must have shape (batch,), got (2, 3)"),
    (lambda: masks.prefix_lm_mask(torch.arange(3), -1), ValueError, "seqlen must be an int of at least 0, got -1"),
    (lambda: masks.prefix_lm_mask(torch.arange(3), 2.0), TypeError, "seqlen must be an int of at least 0, got 2.0"),
    (lambda: masks.prefix_tree_mask([0.5], [1]), TypeError, "parents must be of an integer dtype, got torch.float32"),
    (lambda: masks.prefix_tree_mask([[[-1]]], [1]), ValueError, f"parents {NODES}(1, 1, 1)"),
    (lambda: masks.prefix_tree_mask([-1, 0], [1]), ValueError,
     "lengths must have the shape and the device of parents, (1, 2) and cpu, got (1, 1) and cpu"),
    (lambda: masks.prefix_tree_mask([-1, 1], [1, 1]), ValueError, EARLIER + "1 for node 1 of sequence 0"),
    (lambda: masks.prefix_tree_mask([[-1, 0], [-1, -2]], [[1, 1]] * 2), ValueError,
     EARLIER + "-2 for node 1 of sequence 1"),
    (lambda: masks.prefix_tree_mask([-1, 0, 0, 1], [1] * 4), ValueError, ORDER + "1 for node 3 of sequence 0"),
    (lambda: masks.prefix_tree_mask([-1, -1, 1, 0], [1] * 4), ValueError, ORDER + "0 for node 3 of sequence 0"),
    (lambda: masks.prefix_tree_mask([-1, 0], [1, -1]), ValueError,
     "lengths must be at least 0, got -1 for node 1 of sequence 0"),
    (lambda: masks.prefix_tree_mask([-1, 0], [3, 4], 6), ValueError,
     "lengths must have a sum of at most seqlen, 6, in every sequence, got more"),
    (lambda: masks.from_dense_mask(torch.ones(3, 3)), TypeError, "visible must be torch.bool, got torch.float32"),
    (lambda: masks.from_dense_mask(torch.ones(1, 3, 3).bool()), ValueError,
     "visible must have shape (seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k), got (1, 3, 3)"),
    (lambda: masks.from_block_mask(torch.ones(3, 3)), TypeError,
     "block_mask must be a BlockMask, got a tensor of shape (3, 3)"),
]  # fmt: skip


@pytest.mark.parametrize("call, error, message", ERRORS, ids=[message for _, _, message in ERRORS])
def test_errors(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def test_nothing_is_read_from_the_device():
    """Fake tensors have no values to read."""
    with FakeTensorMode():
        ids = torch.zeros(2, 9, dtype=torch.int32)
        assert masks.document_mask(ids).shape == (2, 1, 9, 1)
        assert masks.prefix_lm_mask(ids[:, 0], 9).shape == (2, 1, 9, 2)
        assert masks.prefix_tree_mask(ids, ids, 9).shape == (2, 1, 9, 1)


@pytest.mark.parametrize("lengths", [(1, 1), (20, 20), (9, 25), (25, 9)])
@pytest.mark.parametrize("causal, bounds", FORMS)
def test_dense_masks_and_back(causal, bounds, lengths, monkeypatch):
    monkeypatch.setattr(masks, "_PAIRS", 70)  # a few keys at a time
    for seed in range(5):
        seen = pairs_of(draw_columns(2, 2, *lengths, causal, bounds, seed=seed), causal, lengths[0])
        if not causal:  # what sees a later key
            seen[0, 0, 0, -1] = True
        found = masks.from_dense_mask(seen)
        assert_is_mask(found.startend_row_indices, lengths[1], found.startend_row_indices.shape[3])
        assert torch.equal(pairs_of(found.startend_row_indices, found.causal, lengths[0]), seen)
        if causal:
            assert found.causal and found.startend_row_indices.shape[3] <= bounds


def test_forms_of_dense_masks():
    """The fewest bounds that say it."""
    query, key = torch.arange(12)[:, None], torch.arange(12)
    causal, band = key <= query, (query >= 3) & (query < 5)
    of_forms = {
        (True, 1): causal, (True, 2): causal & ~(band & (key < 2)), (False, 2): (key - query).abs() < 3,
        (False, 4): ~(band | (query == 8)) | (key > 6),
    }  # fmt: skip
    assert of_forms.keys() == set(FORMS)
    for (is_causal, bounds), seen in of_forms.items():
        found = masks.from_dense_mask(seen)
        assert (found.causal, found.startend_row_indices.shape) == (is_causal, (1, 1, 12, bounds))
    nothing, everything = (torch.full((12, 12), value) for value in (False, True))
    for seen in (nothing, everything, everything[:0], everything[:, :0]):
        found = masks.from_dense_mask(seen)
        assert torch.equal(pairs_of(found.startend_row_indices, found.causal, len(seen))[0, 0], seen)


def test_the_first_key_that_cannot_be_said(monkeypatch):
    seen = torch.ones(2, 2, 12, 8, dtype=torch.bool)
    seen[0, 1, ::3, 7] = seen[1, 0, 1::3, 5] = seen[1, 1, :2, 2] = False
    for pairs in (2**24, 50):
        monkeypatch.setattr(masks, "_PAIRS", pairs)
        with pytest.raises(ValueError) as caught:
            masks.from_dense_mask(seen)
        expected = (
            "visible must hide at most two runs of queries from each key, got 4 runs for key 5 in sequence 1, head 0"
        )
        assert str(caught.value) == expected


DOCUMENT = torch.arange(300) // 70
MODS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "documents": lambda b, h, q, kv: (q >= kv) & (DOCUMENT[q] == DOCUMENT[kv]),
    "window": lambda b, h, q, kv: (q - kv).abs() <= 40,
    "prefix": lambda b, h, q, kv: (kv < 50 + 30 * b) | (q >= kv),
    "heads": lambda b, h, q, kv: (q >= kv) & ((q - kv < 100) | (h == 0)),
    "all": lambda b, h, q, kv: q >= 0,
}


@pytest.mark.parametrize("name", MODS)
def test_block_masks(name, monkeypatch):
    monkeypatch.setattr(masks, "_PAIRS", 2**16)
    for batch, heads in ((None, None), (2, 2)):
        if batch is None and name in ("prefix", "heads"):
            continue
        block_mask = create_block_mask(MODS[name], batch, heads, 300, 290, device="cpu")
        found = masks.from_block_mask(block_mask)
        expected = create_mask(MODS[name], batch, heads, 300, 290, device="cpu")
        assert torch.equal(pairs_of(found.startend_row_indices, found.causal, 300), expected)


def test_blocks_of_block_masks():
    """Absent blocks hide, and full ones show what mask_mod hides."""
    counts, indices = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    full_counts, full = torch.tensor([[[0, 1]]], dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(
        counts, indices, full_counts, full, BLOCK_SIZE=16, mask_mod=lambda b, h, q, kv: q % 16 >= kv % 16
    )
    triangle, none, all_ = torch.ones(16, 16).tril().bool(), torch.zeros(16, 16).bool(), torch.ones(16, 16).bool()
    expected = torch.cat((torch.cat((triangle, none), dim=1), torch.cat((all_, triangle), dim=1)))
    found = masks.from_block_mask(block_mask)
    assert torch.equal(pairs_of(found.startend_row_indices, found.causal)[0, 0], expected)


def test_a_block_mask_that_cannot_be_said():
    checkered = create_block_mask(lambda b, h, q, kv: (q + kv) % 3 > 0, None, None, 128, 128, device="cpu")
    with pytest.raises(
        ValueError, match="block_mask must hide at most two runs .* got 43 runs for key 0 in sequence 0"
    ):
        masks.from_block_mask(checkered)


def test_what_the_conversions_give_is_what_a_call_takes():
    q, k, v = torch.randn(3, 2, 30, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    for seen in (torch.ones(30, 30).bool().tril(), torch.ones(30, 30).bool().tril(3)):
        indices, causal = masks.from_dense_mask(seen)
        out = flash_attn_func(q, k, v, causal=causal, startend_row_indices=indices.expand(2, -1, -1, -1))
        scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 4
        p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        torch.testing.assert_close(out.double(), torch.einsum("bhij,bjhd->bihd", p, v.double()), rtol=0.02, atol=0.02)


def test_helpers_agree_with_the_conversion():
    ids = torch.tensor([[0, 0, 1, 1, 1, 2]])
    for causal, columns in itertools.chain(
        ((causal, masks.document_mask(ids, causal=causal)) for causal in (True, False)),
        [(True, masks.prefix_tree_mask([-1, 0, 0], [2, 3, 1]))],
    ):
        found = masks.from_dense_mask(pairs_of(columns, causal))
        assert found.causal == causal and torch.equal(found.startend_row_indices, columns)

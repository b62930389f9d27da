"""New keys of unequal lengths, FlashAttention-3's cu_seqlens_k_new, on CPU tensors."""

import pytest
import torch
from cache_support import FORMS, fill

from dash_attn.compat import flash_attn_3

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, CAPACITY = 4, 2, 32, 16, 60
LENGTHS, NEW_LENGTHS = (40, 5, 0, 23), (3, 0, 17, 1)
MASKS = pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": torch.tensor([9, 0])}], ids=str)


def randn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def filled(form):
    """A cache, and its arguments in FlashAttention-3's names."""
    keys = [randn(n, KV_HEADS, HEAD_DIM, seed=10 + b) for b, n in enumerate(LENGTHS)]
    values = [randn(n, KV_HEADS, VALUE_DIM, seed=20 + b) for b, n in enumerate(LENGTHS)]
    cache = fill(form, keys, values, CAPACITY)
    cache.arguments = {name.replace("block_table", "page_table"): x for name, x in cache.arguments.items()}
    return cache


def new_keys(lengths=NEW_LENGTHS, before=0, behind=0):
    """k, v and offsets, with rows of no sequence that hold NaN before and behind those of the sequences."""
    end = before + sum(lengths)
    k, v = randn(end + behind, KV_HEADS, HEAD_DIM, seed=5), randn(end + behind, KV_HEADS, VALUE_DIM, seed=6)
    for x in (k, v):
        x[:before] = x[end:] = torch.nan
    return k, v, int32(before, *(before + sum(lengths[: b + 1]) for b in range(len(lengths))))


def queries():
    return randn(14, HEADS, HEAD_DIM, seed=1), int32(0, 9, 10, 10, 13)


def appended(function, cache, k, v, offsets, **arguments):
    q, cu_seqlens_q = queries()
    return function(
        q, cache.k_cache, cache.v_cache, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=offsets,
        return_softmax_lse=True, **cache.arguments, **arguments,
    )[:2]  # fmt: skip


def one_by_one(cache, k, v, offsets, **arguments):
    """The same of each sequence by itself, in a dense call that appends to the same cache."""
    q, cu_seqlens_q = queries()
    outs, lses = [], []
    for b in range(len(offsets) - 1):
        rows, own = slice(offsets[b], offsets[b + 1]), slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        of_sequence = {name: x[b : b + 1] for name, x in cache.arguments.items()}
        if "cache_batch_idx" in of_sequence:
            of_sequence["page_table"] = cache.arguments.get("page_table")
        elif "page_table" not in of_sequence:
            of_sequence["cache_batch_idx"] = int32(b)
        per_sequence = {name: x[b : b + 1] if name == "rotary_seqlens" else x for name, x in arguments.items()}
        out, lse, *_ = flash_attn_3.flash_attn_with_kvcache(
            q[None, own], cache.k_cache, cache.v_cache, k[None, rows], v[None, rows], return_softmax_lse=True,
            **of_sequence, **per_sequence,
        )  # fmt: skip
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


def assert_same_caches(one, other):
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@MASKS
def test_every_sequence_has_the_bits_that_it_has_alone(form, mask):
    """Beside rows of no sequence, which are written nowhere."""
    cache, expected_cache = filled(form), filled(form)
    k, v, offsets = new_keys(before=2, behind=3)
    out, lse = appended(flash_attn_3.flash_attn_with_kvcache, cache, k, v, offsets, **mask)
    expected, expected_lse = one_by_one(expected_cache, k, v, offsets, **mask)
    assert_same_caches(cache, expected_cache)
    assert torch.equal(out[:13], expected) and torch.equal(lse[:, :13], expected_lse)
    assert not out[13].any() and (lse[:, 13] == -torch.inf).all()


@pytest.mark.parametrize("form", ["plain", "paged_indexed"])
@pytest.mark.parametrize("own_positions", [{}, {"rotary_seqlens": int32(3, 20, 0, 29)}], ids=["places", "own"])
@pytest.mark.parametrize("causal", [False, True])
def test_rotation(form, own_positions, causal):
    """The table has no row beyond those that the sequences need; rows of no sequence look up none."""
    angles = randn(43 if not own_positions else 32, 8, seed=3, dtype=torch.float32)
    arguments = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": causal, **own_positions}
    cache, expected_cache = filled(form), filled(form)
    k, v, offsets = new_keys(before=2, behind=30)
    if causal and not own_positions:  # query 8 of sequence 0 is beyond the table
        arguments["rotary_cos"], arguments["rotary_sin"] = (torch.cat((x, x[:6])) for x in (angles.cos(), angles.sin()))
    out, lse = appended(flash_attn_3.flash_attn_with_kvcache, cache, k, v, offsets, **arguments)
    expected, expected_lse = one_by_one(expected_cache, k, v, offsets, **arguments)
    assert_same_caches(cache, expected_cache)
    assert torch.equal(out[:13], expected) and torch.equal(lse[:, :13], expected_lse)


@pytest.mark.parametrize("form", ["plain", "indexed", "paged", "paged_indexed"])
@pytest.mark.parametrize("behind", [0, 4])
def test_no_sequence_takes_any(form, behind):
    cache, expected_cache = filled(form), filled(form)
    k, v, offsets = new_keys((0, 0, 0, 0), behind=behind)
    out, _ = appended(flash_attn_3.flash_attn_with_kvcache, cache, k, v, offsets)
    assert_same_caches(cache, expected_cache)
    q, cu_seqlens_q = queries()
    expected = flash_attn_3.flash_attn_with_kvcache(
        q, cache.k_cache, cache.v_cache, cu_seqlens_q=cu_seqlens_q, **cache.arguments
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("form", FORMS)
def test_compiled_and_on_meta_tensors(form):
    """One graph, in which no length is read."""
    cache, compiled_cache = filled(form), filled(form)
    k, v, offsets = new_keys(before=1, behind=2)
    compiled = torch.compile(flash_attn_3.flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    results = [
        appended(function, of, k, v, offsets, causal=True)
        for function, of in ((flash_attn_3.flash_attn_with_kvcache, cache), (compiled, compiled_cache))
    ]
    torch.compiler.reset()
    assert all(map(torch.equal, *results))
    assert_same_caches(cache, compiled_cache)
    arguments = {name: x.to("meta") for name, x in cache.arguments.items()}
    tensors = [x.to("meta") for x in (*queries(), cache.k_cache, cache.v_cache, k, v, offsets)]
    q, cu_seqlens_q, k_cache, v_cache, k, v, offsets = tensors
    out = flash_attn_3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=offsets, **arguments
    )
    assert out.shape == (14, HEADS, VALUE_DIM)


@pytest.mark.parametrize("offsets", [(0, 3, 2, 21, 21), (-1, 3, 3, 20, 21), (0, 3, 3, 20, 22)], ids=str)
def test_offsets_out_of_range_are_the_ops_error(offsets):
    """Where they are not read beforehand, as on a GPU: before anything is written."""
    cache, before = filled("plain"), filled("plain")
    k, v, _ = new_keys()
    compiled = torch.compile(flash_attn_3.flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="cu_seqlens_k_new must hold non-decreasing offsets"):
        appended(compiled, cache, k, v, int32(*offsets))
    torch.compiler.reset()
    assert_same_caches(cache, before)


def test_private_forward():
    """With its names for the same arguments."""
    k, v, offsets = new_keys()
    cache, other = filled("paged_indexed"), filled("paged_indexed")
    expected, expected_lse = appended(flash_attn_3.flash_attn_with_kvcache, cache, k, v, offsets, causal=True)
    names = {"cache_seqlens": "seqused_k", "cache_batch_idx": "kv_batch_idx", "page_table": "page_table"}
    arguments = {names[name]: x for name, x in other.arguments.items()}
    q, cu_seqlens_q = queries()
    out, lse, *_ = flash_attn_3._flash_attn_forward(
        q, other.k_cache, other.v_cache, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=offsets, causal=True,
        **arguments,
    )  # fmt: skip
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert_same_caches(cache, other)


@pytest.mark.parametrize("function", [flash_attn_3.flash_attn_with_kvcache, flash_attn_3._flash_attn_forward])
def test_positions_without_a_rotation_change_nothing(function):
    cache = filled("plain")
    q = randn(4, 3, HEADS, HEAD_DIM, seed=1)
    if function is flash_attn_3._flash_attn_forward:
        lengths, hint = {"seqused_k": cache.arguments["cache_seqlens"]}, {"seqlens_rotary": int32(1, 2, 3, 4)}
    else:
        lengths, hint = cache.arguments, {"rotary_seqlens": int32(1, 2, 3, 4)}
    out, expected = (function(q, cache.k_cache, cache.v_cache, causal=True, **lengths, **extra) for extra in (hint, {}))
    assert torch.equal(out[0] if isinstance(out, tuple) else out, expected[0] if isinstance(out, tuple) else expected)

"""What csrc/contract/mask.h and tile_grid.h say of a mask, against all pairs of a query and a key: the masks of no
window, windows of all widths on each side, and chunks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_support import CAUSAL, FULL, WINDOWS, masks, name_of, window

from dash_attn import _schedule


def sees(mask, query, key, seqlen_q, seqlen_k):
    """As FlashAttention defines it, in Python's own integers: its division rounds downwards."""
    own = query + seqlen_k - seqlen_q
    left, right = mask.get("window", (-1, -1))
    right = 0 if mask["causal"] else right
    chunk = mask.get("attention_chunk", 0)
    return (
        (left < 0 or key >= own - left)
        and (right < 0 or key <= own + right)
        and (chunk == 0 or key // chunk == own // chunk)
    )


def elements(range_) -> list[int]:
    first, count = range_
    return list(range(first, first + count))


LENGTHS = st.one_of(st.integers(1, 40), st.integers(1, 1300))


@settings(max_examples=600, deadline=None)
@given(masks(), LENGTHS, LENGTHS, st.data())
def test_keys_and_queries(mask, seqlen_q, seqlen_k, data):
    lengths = (seqlen_q, seqlen_k)
    query, key = data.draw(st.integers(0, seqlen_q - 1)), data.draw(st.integers(0, seqlen_k - 1))
    keys = [j for j in range(seqlen_k) if sees(mask, query, j, *lengths)]
    queries = [i for i in range(seqlen_q) if sees(mask, i, key, *lengths)]
    assert elements(_schedule.keys_of(*lengths, query, **mask)) == keys
    assert elements(_schedule.queries_of(*lengths, key, **mask)) == queries


@pytest.mark.parametrize("mask", [FULL, CAUSAL, *WINDOWS], ids=name_of)
def test_every_pair_of_small_lengths(mask):
    for seqlen_q in range(1, 14):
        for seqlen_k in range(1, 14):
            lengths = (seqlen_q, seqlen_k)
            ranges = [_schedule.keys_of(*lengths, query, **mask) for query in range(seqlen_q)]
            for query, range_ in enumerate(ranges):
                assert elements(range_) == [j for j in range(seqlen_k) if sees(mask, query, j, *lengths)]
            for key in range(seqlen_k):
                queries = [i for i in range(seqlen_q) if sees(mask, i, key, *lengths)]
                assert elements(_schedule.queries_of(*lengths, key, **mask)) == queries
            # Also where the range is empty: what a tile sees follows from its first and last row.
            for bounds in ([first for first, _ in ranges], [first + count for first, count in ranges]):
                assert bounds == sorted(bounds)
            seen = _schedule.visible_keys(
                seqlen_q=seqlen_q, seqlen_k=seqlen_k, first_query=0, end_query=seqlen_q, **mask
            )
            assert seen == [(first, first + count) for first, count in ranges]


@settings(max_examples=400, deadline=None)
@given(masks(), LENGTHS, LENGTHS, st.sampled_from([64, 96, 128]), st.integers(1, 200), st.data())
def test_kv_tiles_of_queries(mask, seqlen_q, seqlen_k, tile_k, rows, data):
    """As the forward asks for the rows of a warpgroup, which may reach past the end of the queries."""
    lengths = (seqlen_q, seqlen_k)
    first = data.draw(st.integers(0, seqlen_q - 1))
    existing = range(first, min(first + rows, seqlen_q))
    seen, whole = _schedule.kv_tiles_of_queries(*lengths, tile_k, first, first + rows, **mask)
    tiles = [range(start, min(start + tile_k, seqlen_k)) for start in range(0, seqlen_k, tile_k)]
    inside = [t for t, keys in enumerate(tiles) if any(sees(mask, i, j, *lengths) for i in existing for j in keys)]
    all_seen = [
        t
        for t, keys in enumerate(tiles)
        if len(keys) == tile_k and all(sees(mask, i, j, *lengths) for i in existing for j in (keys[0], keys[-1]))
    ]
    assert elements(seen) == inside
    assert elements(whole) == all_seen


# What is asked for decides the kernel: not the lengths, to which any of these may be wide enough.
KINDS = [
    (FULL, "full"), (window(-1, -1), "full"), (window(-7, -2), "full"), (window(2**31, 2**40), "full"),
    (CAUSAL, "causal"), (window(-1, 0), "causal"), (window(-1, 5, causal=True), "causal"),
    (window(2**30, 0), "causal"), (window(2**30, 2**30, causal=True), "causal"),
    (window(0, 0), "window"), (window(5, -1), "window"), (window(-1, 5), "window"), (window(5, 5), "window"),
    (window(5, -1, causal=True), "window"), (window(10**6, 10**6), "window"), (window(-1, -1, 8), "window"),
    (window(-1, -1, 8, causal=True), "window"), (window(-1, -1, 2**30), "full"), (window(-1, 0, 2**30), "causal"),
]  # fmt: skip


@pytest.mark.parametrize("mask, kind", KINDS, ids=str)
def test_which_kernel_a_mask_takes(mask, kind):
    assert _schedule.mask_name(**mask) == kind


def test_chunks_are_at_least_0():
    with pytest.raises(ValueError, match=r"attention_chunk must be in \[0, 2147483648\), got -1"):
        _schedule.keys_of(5, 5, 0, causal=True, attention_chunk=-1)


@given(divisor=st.integers(1, 2**31 - 1), multiple=st.integers(0, 2**31), offset=st.integers(-2, 2))
def test_division(divisor, multiple, offset):
    for dividend in (multiple, multiple * divisor + offset, 2**31 - 1):
        dividend = max(0, min(dividend, 2**31 - 1))
        assert _schedule.divide(dividend, divisor) == divmod(dividend, divisor)


def test_division_by_every_power_of_two():
    for shift in range(31):
        for divisor in {max(1, 2**shift - 1), 2**shift, min(2**shift + 1, 2**31 - 1)}:
            for dividend in (0, divisor - 1, divisor, 2**30 - 1, 2**31 - 1, (2**31 - 1) // divisor * divisor - 1):
                assert _schedule.divide(dividend, divisor) == divmod(dividend, divisor)

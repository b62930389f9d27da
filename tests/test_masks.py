"""What csrc/schedule/mask.h and tile_grid.h say of a mask, against all pairs of a query and a key: also of the band,
which only a GPU test has kernels for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_attn import _schedule

BAND_KEYS = 500
SEES = {
    "full": lambda query, key, lengths: True,
    "causal": lambda query, key, lengths: key <= query + lengths[1] - lengths[0],
    "band": lambda query, key, lengths: query - BAND_KEYS < key <= query,
}


def elements(range_) -> list[int]:
    first, count = range_
    return list(range(first, first + count))


@pytest.mark.parametrize("mask", SEES)
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 1300), st.integers(1, 1300), st.data())
def test_keys_and_queries(mask, seqlen_q, seqlen_k, data):
    lengths = (seqlen_q, seqlen_k)
    query, key = data.draw(st.integers(0, seqlen_q - 1)), data.draw(st.integers(0, seqlen_k - 1))
    keys = [j for j in range(seqlen_k) if SEES[mask](query, j, lengths)]
    queries = [i for i in range(seqlen_q) if SEES[mask](i, key, lengths)]
    assert elements(_schedule.keys_of(mask, *lengths, query)) == keys
    assert elements(_schedule.queries_of(mask, *lengths, key)) == queries


@pytest.mark.parametrize("mask", SEES)
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 1300), st.integers(1, 1300), st.sampled_from([64, 128]), st.integers(1, 200), st.data())
def test_kv_tiles_of_queries(mask, seqlen_q, seqlen_k, tile_k, rows, data):
    """As the forward asks for the rows of a warpgroup, which may reach past the end of the queries."""
    lengths = (seqlen_q, seqlen_k)
    first = data.draw(st.integers(0, seqlen_q - 1))
    existing = range(first, min(first + rows, seqlen_q))
    seen, whole = _schedule.kv_tiles_of_queries(mask, *lengths, tile_k, first, first + rows)
    tiles = [range(start, min(start + tile_k, seqlen_k)) for start in range(0, seqlen_k, tile_k)]
    sees = SEES[mask]
    inside = [t for t, keys in enumerate(tiles) if any(sees(i, j, lengths) for i in existing for j in keys)]
    all_seen = [
        t
        for t, keys in enumerate(tiles)
        if len(keys) == tile_k and all(sees(i, j, lengths) for i in existing for j in (keys[0], keys[-1]))
    ]
    assert elements(seen) == inside
    assert elements(whole) == all_seen

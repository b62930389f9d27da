"""A chunk of queries by a chunk of keys, as the kernels see it: its mask and its orders are those of the whole, cut."""

import itertools

import pytest

from dash_attn import _schedule, schedule

MASKS = {
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(37, 0)),
    "window on both sides": dict(causal=False, window=(20, 45)),
    "window of few keys": dict(causal=False, window=(1, 1)),
    "left unbounded": dict(causal=False, window=(-1, 9)),
    "right unbounded": dict(causal=False, window=(9, -1)),
    "chunks": dict(causal=True, attention_chunk=33),
    "chunks and a window": dict(causal=False, window=(20, 10), attention_chunk=16),
}
TILE_Q, TILE_K = 4, 8


def chunks(rows, size):
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def of_chunk(rows_q, rows_k, queries, keys, mask):
    """The problem of a chunk as the launch makes it."""
    return _schedule.Problem(
        len(queries), len(keys), tile_q=TILE_Q, tile_k=TILE_K, **mask,
        first_own_key=queries.start + rows_k - rows_q - keys.start, keys_before=keys.start,
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["descending", "ascending", "spt"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(96, 96), (90, 101), (41, 120), (120, 41)], ids=str)
def test_the_order_of_a_chunk_is_that_of_the_whole(lengths, mask, policy):
    whole = _schedule.Problem(*lengths, tile_q=TILE_Q, tile_k=TILE_K, **MASKS[mask])
    visits, adds = schedule.visit_order(policy, whole), schedule.add_order(policy, whole)
    for queries, keys in itertools.product(chunks(lengths[0], 24), chunks(lengths[1], 32)):
        part = of_chunk(*lengths, queries, keys, MASKS[mask])
        of_q = range(queries.start // TILE_Q, -(-queries.stop // TILE_Q))
        of_k = range(keys.start // TILE_K, -(-keys.stop // TILE_K))
        assert (part.num_query_tiles, part.num_kv_tiles) == (len(of_q), len(of_k))
        for kv, visited in zip(of_k, schedule.visit_order(policy, part)):
            assert [q + of_q.start for q in visited] == [q for q in visits[kv] if q in of_q]
        for q, added in zip(of_q, schedule.add_order(policy, part)):
            assert [kv + of_k.start for kv in added] == [kv for kv in adds[q] if kv in of_k]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(96, 96), (41, 120), (120, 41)], ids=str)
def test_what_is_masked_in_a_chunk_is_what_is_masked_in_the_whole(lengths, mask):
    """Tile by tile; a tile past the end of the keys is of the last chunk alone."""
    whole = _schedule.Problem(*lengths, tile_q=TILE_Q, tile_k=TILE_K, **MASKS[mask])
    for queries, keys in itertools.product(chunks(lengths[0], 24), chunks(lengths[1], 32)):
        part = of_chunk(*lengths, queries, keys, MASKS[mask])
        for q, kv in itertools.product(range(part.num_query_tiles), range(part.num_kv_tiles)):
            start, count = part.query_tiles_of(kv)
            if not start <= q < start + count:
                continue
            of_whole = whole.needs_masking(q + queries.start // TILE_Q, kv + keys.start // TILE_K)
            assert part.needs_masking(q, kv) == of_whole


@pytest.mark.parametrize("argument", [{"first_own_key": 1 << 29}, {"keys_before": -1}], ids=str)
def test_what_is_no_chunk_is_refused(argument):
    with pytest.raises(ValueError, match=f"{next(iter(argument))} must be in"):
        _schedule.Problem(8, 8, tile_q=4, tile_k=4, causal=True, **argument)

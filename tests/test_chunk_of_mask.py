"""A chunk of queries by a chunk of keys, as the kernels see it: its mask and its orders are those of the whole, cut."""

import itertools

import pytest

from dash_attn import _schedule, schedule
from dash_attn.distributed import gathered, parts
from dash_attn.distributed.layout import Rows

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
FAR = 1 << 28  # more keys than there are: a bound that bounds nothing, of a mask that is a window all the same
# What calls that carry sums, whose kernels see every mask as a window, make of other masks: MaskRule::as_window.
AS_WINDOWS = {"full": (dict(causal=False), (FAR, FAR)), "causal": (dict(causal=True), (FAR, 0))}


def chunks(rows, size):
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def of_chunk(rows_q, rows_k, queries, keys, mask):
    """The problem of a chunk as the launch makes it."""
    return _schedule.Problem(
        len(queries), len(keys), tile_q=TILE_Q, tile_k=TILE_K, **mask,
        first_own_key=queries.start + rows_k - rows_q - keys.start, keys_before=keys.start,
    )  # fmt: skip


def tiles_of(problem):
    """Whether each (query tile, KV tile) that is visited needs masking."""
    visited = {kv: problem.query_tiles_of(kv) for kv in range(problem.num_kv_tiles)}
    return {
        (q, kv): problem.needs_masking(q, kv)
        for kv, (start, count) in visited.items()
        for q in range(start, start + count)
    }


@pytest.mark.parametrize("policy", ["descending", "spt"])
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


@pytest.mark.parametrize("mask", AS_WINDOWS)
@pytest.mark.parametrize("lengths", [(96, 96), (90, 101), (41, 120), (120, 41)], ids=str)
def test_a_chunk_has_the_same_tiles_as_a_window(lengths, mask):
    own, window = AS_WINDOWS[mask]
    for queries, keys in itertools.product(chunks(lengths[0], 24), chunks(lengths[1], 32)):
        part = of_chunk(*lengths, queries, keys, own)
        as_window = of_chunk(*lengths, queries, keys, dict(causal=False, window=window))
        assert (part.mask, as_window.mask) == (mask, "window")
        assert tiles_of(part) == tiles_of(as_window)
        ranks = [[problem.kv_tiles_of(q) for q, _ in tiles_of(part)] for problem in (part, as_window)]
        assert ranks[0] == ranks[1]


@pytest.mark.parametrize("argument", [{"first_own_key": 1 << 29}, {"keys_before": -1}], ids=str)
def test_what_is_no_chunk_is_refused(argument):
    with pytest.raises(ValueError, match=f"{next(iter(argument))} must be in"):
        _schedule.Problem(8, 8, tile_q=4, tile_k=4, causal=True, **argument)


def seen_by(mask, rows_q, rows_k, first, end):
    if rows_k == 0:
        return [(0, 0)] * (end - first)
    seen = _schedule.visible_keys(**mask, seqlen_q=rows_q, seqlen_k=rows_k, first_query=first, end_query=end)
    return [(0, 0) if start >= stop else (start, stop) for start, stop in seen]


@pytest.mark.parametrize("mask", [name for name in MASKS if name != "chunks and a window"])
@pytest.mark.parametrize("lengths", [(96, 96), (90, 101), (41, 120), (120, 41)], ids=str)
def test_the_forward_of_a_run_sees_what_the_whole_sees(lengths, mask):
    """With its last query aligned with the last of the keys that it is given."""
    whole = parts.MaskOfWhole(**({"window": (-1, -1), "attention_chunk": 0} | MASKS[mask]))
    for start, stop in itertools.combinations(range(0, lengths[0] + 1, 7), 2):
        end, of_run = gathered._keys_of_run(whole, Rows(start, stop), *lengths)
        found = seen_by(of_run._asdict(), stop - start, end, 0, stop - start)
        assert found == seen_by(whole._asdict(), *lengths, start, stop)


@pytest.mark.parametrize("policy", ["descending", "spt"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(96, 96), (41, 120), (120, 41)], ids=str)
def test_query_tiles_that_have_a_sum(lengths, mask, policy):
    """Those to which keys before the chunk's have been added, in the order of dQ."""
    whole = parts.MaskOfWhole(**({"window": (-1, -1), "attention_chunk": 0} | MASKS[mask]))
    rule = parts.Rule(policy, 1.0, whole, 0)
    adds = schedule.add_order(policy, _schedule.Problem(*lengths, tile_q=TILE_Q, tile_k=TILE_K, **MASKS[mask]))
    for queries, keys in itertools.product(chunks(lengths[0], 24), chunks(lengths[1], 32)):
        chunk = parts.Chunk(*lengths, queries.start, keys.start)
        own = range(keys.start // TILE_K, -(-keys.stop // TILE_K))
        descends = policy == "spt"
        expected = [
            q - queries.start // TILE_Q
            for q in range(queries.start // TILE_Q, -(-queries.stop // TILE_Q))
            if any(kv >= own.stop if descends else kv < own.start for kv in adds[q])
        ]
        found = parts._tiles_with_dq(rule, chunk, len(queries), len(keys), (TILE_Q, TILE_K))
        assert list(found) == expected

"""Which ranks work on which sequences of a pack: every row once, and about as much for each rank."""

import random

import pytest

from dash_attn.distributed.assignment import Pair, assign, cut_for_all, work_of
from dash_attn.distributed.layout import Rows
from dash_attn.distributed.parts import MaskOfWhole

FULL, CAUSAL = MaskOfWhole(False, (-1, -1), 0), MaskOfWhole(True, (-1, -1), 0)
WINDOW, CHUNKS = MaskOfWhole(True, (127, 0), 0), MaskOfWhole(True, (-1, -1), 100)
TILES = (80, 128)


def pack(lengths):
    pairs, start = [], 3  # rows of no sequence come before
    for length in lengths:
        pairs.append(Pair(Rows(start, start + length), Rows(2 * start, 2 * start + length)))
        start += length
    return tuple(pairs)


def work_of_ranks(assignment, mask, ranks):
    of_cut = sum(work_of(mask, *map(len, pair)) for pair in assignment.cut) / ranks
    return [of_cut + sum(work_of(mask, *map(len, pair)) for pair in pairs) for pairs in assignment.of_ranks]


@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW, CHUNKS], ids=["full", "causal", "window", "chunks"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_every_row_has_one_rank_and_ranks_have_as_much_to_do(ranks, mask):
    chance = random.Random(ranks)
    for lengths in ([100] * 64, [5000, 3, 40, 900, 17, 1], [1 << chance.randrange(14) for _ in range(50)], [1000]):
        pairs = pack(lengths)
        found = assign(pairs, ranks, mask, TILES)
        for of_ranks, side in ((found.queries, 0), (found.keys, 1)):
            rows = sorted(row for runs in of_ranks for run in runs for row in range(*run))
            assert rows == sorted(row for pair in pairs for row in range(*pair[side]))
        work = work_of_ranks(found, mask, ranks)
        assert max(work) <= 1.1 * sum(work) / ranks + 1e-6
        assert sorted([*found.cut, *(pair for of_rank in found.of_ranks for pair in of_rank)]) == sorted(pairs)


def test_short_sequences_are_not_cut():
    assert assign(pack([100] * 64), 8, CAUSAL, TILES).cut == ()
    assert assign(pack([8000, *[100] * 64]), 8, CAUSAL, TILES).cut == pack([8000])


def test_chunks_are_of_whole_tiles():
    """From the first row of the sequence, wherever that is in the pack."""
    found = cut_for_all(Pair(Rows(7, 4007), Rows(11, 5011)), 3, TILES)
    for of_ranks, first, unit in ((found.queries, 7, 640), (found.keys, 11, 128)):
        borders = sorted(run.start - first for runs in of_ranks for run in runs)
        assert len(borders) == 6 and all(border % unit == 0 for border in borders)


def test_what_has_no_queries_or_no_keys_is_nobodys():
    without_keys = Pair(Rows(0, 9), Rows(4, 4))
    found = assign((without_keys, Pair(Rows(9, 9), Rows(4, 8))), 2, FULL, TILES)
    assert found.queries == found.keys == ((), ())


def test_the_assignment_is_a_function_of_the_lengths():
    """So that every rank finds the same one: no order of the sequences changes it."""
    pairs = pack([300, 200, 300, 1000, 200, 7])
    assert assign(pairs, 4, CAUSAL, TILES) == assign(pairs[::-1], 4, CAUSAL, TILES)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW, CHUNKS], ids=["full", "causal", "window", "chunks"])
def test_work_is_about_what_is_seen(mask):
    def seen(queries, keys):
        own = [query + keys - queries for query in range(queries)]
        return sum(
            not (mask.causal and key > p)
            and not (mask.window[0] >= 0 and key < p - mask.window[0])
            and not (mask.attention_chunk and key // mask.attention_chunk != p // mask.attention_chunk)
            for p in own
            for key in range(keys)
        )

    for lengths in ((900, 900), (300, 900), (640, 1280)):
        most = 2.2 if mask == CHUNKS else 1.2  # a chunk is seen by half, as a rule
        assert seen(*lengths) / 1.2 <= work_of(mask, *lengths) <= most * seen(*lengths)

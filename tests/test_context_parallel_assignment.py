"""Which ranks work on which sequences of a pack: every row once, and about as much for each rank."""

import random
import time
import types

import pytest

from dash_attn.distributed import gathered
from dash_attn.distributed.assignment import Pair, assign, cut_for_all, work_of
from dash_attn.distributed.layout import Rows, rows_of_rank
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


def seen_by(mask, queries, keys, query):
    own = query + keys - queries
    first = max(0, own - mask.window[0]) if mask.window[0] >= 0 else 0
    end = min(keys, own + 1) if mask.causal else keys
    if mask.attention_chunk:
        first = max(first, own // mask.attention_chunk * mask.attention_chunk)
    return max(0, end - first)


def work_of_ranks(found, pairs, mask):
    """Pairs of a query and a key that it sees, of the rows that each rank has."""
    of_row = {}
    for pair in pairs:
        for query, row in enumerate(range(*pair.queries)):
            of_row[row] = seen_by(mask, len(pair.queries), len(pair.keys), query)
    return [sum(of_row[row] for run in runs for row in range(*run)) for runs in found.queries]


@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW, CHUNKS], ids=["full", "causal", "window", "chunks"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_every_row_has_one_rank(ranks, mask):
    chance = random.Random(ranks)
    for lengths in ([100] * 64, [5000, 3, 40, 900, 17, 1], [1 << chance.randrange(14) for _ in range(50)], [1000]):
        pairs = pack(lengths)
        found = assign(pairs, ranks, mask, TILES)
        for of_ranks, side in ((found.queries, 0), (found.keys, 1)):
            rows = sorted(row for runs in of_ranks for run in runs for row in range(*run))
            assert rows == sorted(row for pair in pairs for row in range(*pair[side]))
        assert sorted([*found.cut, *(pair for of_rank in found.of_ranks for pair in of_rank)]) == sorted(pairs)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=["full", "causal", "window"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_have_about_as_much_to_do(ranks, mask):
    """Where sequences are short enough to be dealt, or long enough to be cut into several units for each chunk."""
    chance = random.Random(ranks)
    many = [50 + chance.randrange(200) for _ in range(40 * ranks)]
    for lengths in (many, [20000 * ranks, *many], [9000 * ranks, 7000 * ranks]):
        work = work_of_ranks(assign(pack(lengths), ranks, mask, (64, 128)), pack(lengths), mask)
        assert max(work) <= 1.15 * sum(work) / ranks


def test_cutting_is_left_where_it_does_not_help():
    """Sequences of fewer units than chunks would leave ranks without any."""
    lengths = [750 + 65 * number for number in range(12)]
    found = assign(pack(lengths), 8, CAUSAL, TILES)
    assert found.cut == ()
    work = work_of_ranks(found, pack(lengths), CAUSAL)
    assert max(work) <= 1.6 * sum(work) / 8


def test_many_sequences_are_assigned_in_no_time():
    began = time.process_time()  # which other processes do not lengthen
    assign(pack([700 + number for number in range(2000)]), 512, CAUSAL, TILES)
    assert time.process_time() - began < 5


def test_short_sequences_are_not_cut():
    assert assign(pack([100] * 64), 8, CAUSAL, TILES).cut == ()
    assert assign(pack([16000, *[100] * 64]), 8, CAUSAL, TILES).cut == pack([16000])


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
        return sum(seen_by(mask, queries, keys, query) for query in range(queries))

    for lengths in ((900, 900), (300, 900), (640, 1280)):
        assert seen(*lengths) / 1.1 <= work_of(mask, *lengths) <= 1.1 * seen(*lengths)


@pytest.mark.parametrize("layout, mask, is_even", [
    ("contiguous", CAUSAL, False), ("zigzag", CAUSAL, True), ("contiguous", FULL, True), ("contiguous", WINDOW, True),
    ("contiguous", MaskOfWhole(True, (8191, 0), 0), False), ("contiguous", MaskOfWhole(False, (-1, 8192), 0), True),
    ("contiguous", CHUNKS, True),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("keys", [8192, 0])
def test_rows_move_where_the_mask_makes_their_work_uneven(layout, mask, is_even, keys):
    def runs(rank, of_keys):
        return rows_of_rank(8192, rank, 4, layout)

    split = types.SimpleNamespace(rows_q=8192, rows_k=keys, channel=types.SimpleNamespace(size=4), runs=runs)
    assert gathered._is_even(split, mask, TILES) == (is_even or not keys)

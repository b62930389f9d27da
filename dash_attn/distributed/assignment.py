"""Which ranks work on which sequences where every rank can have any rows: a pure function of the lengths.

A sequence is worked on by one rank, as in a pack of its own, or is cut for all of them (`plan`). Long ones are cut, as
many as it takes to give all ranks about as much to do. Nothing of this shows in a bit: a sequence has those that it has
alone, and a cut one those of one process.
"""

from __future__ import annotations

import functools
import heapq
from typing import NamedTuple

from .layout import Rows, chunks_of_rank, num_chunks
from .parts import MaskOfWhole
from .plan import chunks_of_tiles
from .redistribute import RowsOfRanks

LAYOUT = "zigzag"
"""Of the sequences that are cut: rows are moved anyway."""
_ENOUGH = 1.1  # of the mean: the most that a rank may have to do, if cutting changes it


class Pair(NamedTuple):
    """Rows of the queries and of the keys of a sequence, in the tensors."""

    queries: Rows
    keys: Rows


class Assignment(NamedTuple):
    cut: tuple[Pair, ...]
    """The sequences that all ranks work on, one after the other."""
    of_ranks: tuple[tuple[Pair, ...], ...]
    """Those that each rank works on alone."""
    queries: RowsOfRanks
    """The rows that each rank is to have: those of the sequences of its own, then, of each that is cut, its chunks."""
    keys: RowsOfRanks


@functools.lru_cache(maxsize=16)
def assign(sequences: tuple[Pair, ...], ranks: int, mask: MaskOfWhole, tiles: tuple[int, int]) -> Assignment:
    """
    Args:
        sequences: in any order, without rows in common.
        ranks: that share them.
        mask: of each of them.
        tiles: queries and keys in a tile of the backward.
    """
    # Without keys, or without queries, there is nothing to do.
    sequences = tuple(pair for pair in sequences if len(pair.queries) and len(pair.keys))
    work = {pair: work_of(mask, len(pair.queries), len(pair.keys)) for pair in sequences}
    by_work = sorted(sequences, key=lambda pair: (-work[pair], pair))
    mean = sum(work.values()) / ranks
    for count in range(len(by_work) + 1):
        of_ranks, most = _spread(by_work[count:], work, ranks)
        if most + sum(work[pair] for pair in by_work[:count]) / ranks <= _ENOUGH * mean:
            break
    return assignment_of(tuple(by_work[:count]), of_ranks, tiles)


def assignment_of(cut: tuple[Pair, ...], of_ranks: tuple[tuple[Pair, ...], ...], tiles: tuple[int, int]) -> Assignment:
    ranks = len(of_ranks)
    queries, keys = (
        tuple(
            (
                *(pair[side] for pair in of_ranks[rank]),
                *(rows for pair in cut for rows in rows_of_cut(pair[side], rank, ranks, tiles[side])),
            )
            for rank in range(ranks)
        )
        for side in (0, 1)
    )
    return Assignment(cut, of_ranks, queries, keys)


def cut_for_all(pair: Pair, ranks: int, tiles: tuple[int, int]) -> Assignment:
    """Of one sequence, which all ranks work on."""
    return assignment_of((pair,), ((),) * ranks, tiles)


def rows_of_cut(rows: Rows, rank: int, ranks: int, tile: int) -> list[Rows]:
    """The rows that a rank has of a sequence that is cut, where that begins with rows.start."""
    chunks = chunks_of_tiles(len(rows), num_chunks(ranks, LAYOUT), tile)
    own = (chunks[number] for number in chunks_of_rank(rank, ranks, LAYOUT))
    return [Rows(rows.start + chunk.start, rows.start + chunk.stop) for chunk in own]


def work_of(mask: MaskOfWhole, queries: int, keys: int) -> float:
    """About how many pairs of a query and a key there are that it sees."""
    left, right = mask.window[0], 0 if mask.causal else mask.window[1]
    # As in a band of diagonals, whose ends are not cut off.
    seen = keys if left < 0 or right < 0 else min(keys, left + right + 1)
    if mask.attention_chunk:
        seen = min(seen, mask.attention_chunk)
    if mask.causal and left < 0 and seen == keys:
        return queries * keys - queries * min(queries, keys) / 2
    return float(queries * seen)


def _spread(by_work: list[Pair], work: dict[Pair, float], ranks: int) -> tuple[tuple[tuple[Pair, ...], ...], float]:
    """The longest first, each to the rank that has least to do; and what the busiest has."""
    loads = [(0.0, rank) for rank in range(ranks)]
    of_ranks: list[list[Pair]] = [[] for _ in range(ranks)]
    for pair in by_work:
        load, rank = loads[0]
        of_ranks[rank].append(pair)
        heapq.heapreplace(loads, (load + work[pair], rank))
    return tuple(tuple(sorted(pairs)) for pairs in of_ranks), max(load for load, _ in loads)

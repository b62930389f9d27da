"""Which ranks work on which sequences when every rank can receive any rows: a pure function of the lengths.

One rank works on a sequence as on a batch of its own, or all ranks work on it together (`plan`). Among the sequences
that are long enough, the longest are cut: as few as give all ranks about the same work. The choice does not affect any
bits, because each sequence has the bits that it has alone, and a cut sequence has those of one process.
"""

from __future__ import annotations

import functools
import heapq
from typing import NamedTuple

from .. import _schedule
from .layout import Rows, chunks_of_rank, num_chunks
from .parts import MaskOfWhole
from .plan import chunks_of_tiles
from .redistribute import RowsOfRanks

LAYOUT = "zigzag"
"""The layout of cut sequences, whose rows are moved anyway."""
ENOUGH = 1.1
"""How much more work than the mean a rank may have before another sequence is cut."""
_SAMPLES = 32  # queries of a run for which the visible keys are counted


class Pair(NamedTuple):
    """The rows of a sequence in the tensors of queries and keys."""

    queries: Rows
    keys: Rows


class Assignment(NamedTuple):
    cut: tuple[Pair, ...]
    """The sequences that all ranks work on, one after the other."""
    of_ranks: tuple[tuple[Pair, ...], ...]
    """The sequences that each rank works on alone."""
    queries: RowsOfRanks
    """The rows that each rank needs: its own sequences, and then its chunks of each cut sequence."""
    keys: RowsOfRanks


@functools.lru_cache(maxsize=16)
def assign(sequences: tuple[Pair, ...], ranks: int, mask: MaskOfWhole, tiles: tuple[int, int]) -> Assignment:
    """Assigns sequences to ranks.

    Args:
        sequences: the sequences in any order, without common rows.
        ranks: the number of ranks.
        mask: the mask of each sequence.
        tiles: queries and keys per tile of the backward.
    """
    # Sequences without keys or without queries need no work.
    sequences = tuple(pair for pair in sequences if len(pair.queries) and len(pair.keys))
    work = {pair: work_of(mask, len(pair.queries), len(pair.keys)) for pair in sequences}
    by_work = sorted(sequences, key=lambda pair: (-work[pair], pair))
    mean = sum(work.values()) / ranks
    of_cuts = [0.0] * ranks
    found = []
    # Try to cut the longest 0, 1, 2, ... sequences.
    for count in range(len(by_work) + 1):
        found.append(_spread(by_work[count:], work, of_cuts))
        if found[-1][1] <= ENOUGH * mean or count == len(by_work) or not _can_be_cut(by_work[count], ranks, tiles):
            break
        for rank, more in enumerate(work_of_cut(mask, by_work[count], ranks, tiles)):
            of_cuts[rank] += more
    best = min(range(len(found)), key=lambda count: found[count][1])
    return _assignment(tuple(by_work[:best]), found[best][0], tiles)


def cut_for_all(pair: Pair, ranks: int, tiles: tuple[int, int]) -> Assignment:
    """Returns the assignment of one sequence that all ranks work on."""
    return _assignment((pair,), ((),) * ranks, tiles)


def work_of_cut(mask: MaskOfWhole, pair: Pair, ranks: int, tiles: tuple[int, int]) -> list[float]:
    """Returns the work of each rank on a sequence that is cut."""
    lengths = len(pair.queries), len(pair.keys)
    of_ranks = _rows_of_cut(Rows(0, lengths[0]), ranks, tiles[0])
    return [sum(work_of(mask, *lengths, run) for run in runs) for runs in of_ranks]


@functools.lru_cache(maxsize=8192)
def work_of(mask: MaskOfWhole, queries: int, keys: int, run: Rows | None = None) -> float:
    """Estimates the number of visible (query, key) pairs, for a run of queries or for all."""
    run = run or Rows(0, queries)
    samples = min(len(run), _SAMPLES)
    seen = 0
    for number in range(samples):
        query = run.start + (2 * number + 1) * len(run) // (2 * samples)
        ((first, end),) = _schedule.visible_keys(
            causal=mask.causal, window=mask.window, attention_chunk=mask.attention_chunk, seqlen_q=queries,
            seqlen_k=keys, first_query=query, end_query=query + 1,
        )  # fmt: skip
        seen += end - first
    return seen * len(run) / samples if samples else 0.0


def _can_be_cut(pair: Pair, ranks: int, tiles: tuple[int, int]) -> bool:
    """Whether every rank gets rows in each of its chunks."""
    return all(len(run) for runs in _rows_of_cut(pair.queries, ranks, tiles[0]) for run in runs)


def _assignment(cut: tuple[Pair, ...], of_ranks: tuple[tuple[Pair, ...], ...], tiles: tuple[int, int]) -> Assignment:
    queries, keys = (
        [
            [pair[side] for pair in pairs] + [run for of_rank in cuts for run in of_rank]
            for pairs, *cuts in zip(of_ranks, *(_rows_of_cut(pair[side], len(of_ranks), tiles[side]) for pair in cut))
        ]
        for side in (0, 1)
    )
    return Assignment(cut, of_ranks, *(tuple(map(tuple, rows)) for rows in (queries, keys)))


def _rows_of_cut(rows: Rows, ranks: int, tile: int) -> list[list[Rows]]:
    """Returns each rank's rows of a cut sequence that begins at row rows.start of the tensor."""
    chunks = [
        Rows(rows.start + chunk.start, rows.start + chunk.stop)
        for chunk in chunks_of_tiles(len(rows), num_chunks(ranks, LAYOUT), tile)
    ]
    return [[chunks[number] for number in chunks_of_rank(rank, ranks, LAYOUT)] for rank in range(ranks)]


def _spread(
    by_work: list[Pair], work: dict[Pair, float], loads: list[float]
) -> tuple[tuple[tuple[Pair, ...], ...], float]:
    """Gives the longest sequence first to the least busy rank, on top of `loads`. Returns the largest load as well."""
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    of_ranks: list[list[Pair]] = [[] for _ in loads]
    for pair in by_work:
        load, rank = heap[0]
        of_ranks[rank].append(pair)
        heapq.heapreplace(heap, (load + work[pair], rank))
    return tuple(tuple(sorted(pairs)) for pairs in of_ranks), max(load for load, _ in heap)

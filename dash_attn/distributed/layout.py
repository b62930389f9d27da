"""Which rows of a sequence each rank has."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

LAYOUTS = ("contiguous", "zigzag")
"""`contiguous`: the sequence is cut into one chunk for each rank. `zigzag`: it is cut into two, and rank r has chunk r
from the front and chunk r from the back, so that all ranks have as much to do under the causal mask."""

# Chunks that are not all equal end at multiples of this: whole tiles of keys, as the order of sums sees them.
ROWS_OF_A_UNIT = 128


class Rows(NamedTuple):
    """Rows `start` up to `stop` of a sequence."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def chunks(seqlen: int, count: int) -> tuple[Rows, ...]:
    """A sequence cut into `count` chunks.

    They are equal where the length divides, and elsewhere `chunks_of_units` of 128 rows.
    """
    if seqlen % count == 0:
        each = seqlen // count
        return tuple(Rows(each * number, each * (number + 1)) for number in range(count))
    return chunks_of_units(seqlen, count, ROWS_OF_A_UNIT)


@functools.lru_cache(maxsize=256)
def chunks_of_units(seqlen: int, count: int, unit: int) -> tuple[Rows, ...]:
    """A sequence cut into `count` chunks that end at multiples of `unit` rows and differ by at most that, the last one
    with rows cut short; a short sequence leaves the last chunks empty."""
    each, longer = divmod(-(-seqlen // unit), count)
    ends = [min(seqlen, unit * (each * number + min(number, longer))) for number in range(count + 1)]
    return tuple(Rows(start, stop) for start, stop in zip(ends, ends[1:]))


def chunks_of_rank(rank: int, ranks: int, layout: str) -> tuple[int, ...]:
    """The numbers of a rank's chunks, in the order in which its rows lie."""
    return (rank,) if layout == "contiguous" else (rank, 2 * ranks - 1 - rank)


def num_chunks(ranks: int, layout: str) -> int:
    return ranks if layout == "contiguous" else 2 * ranks


def places_of(runs: Sequence[Rows]) -> list[Rows]:
    """Where a rank has its runs, which lie one behind the other."""
    ends = [0, *itertools.accumulate(map(len, runs))]
    return [Rows(start, stop) for start, stop in zip(ends, ends[1:])]


def rank_of_chunk(chunk: int, ranks: int, layout: str) -> int:
    return chunk if layout == "contiguous" else min(chunk, 2 * ranks - 1 - chunk)


def rows_of_rank(seqlen: int, rank: int, ranks: int, layout: str = "contiguous") -> list[Rows]:
    """The runs of rows of a sequence that a rank has, in the order in which it has them; some may be empty.

    Args:
        seqlen: rows of the whole sequence or pack, at least 0.
        rank, ranks: the rank in its group, and how many the group has.
        layout: one of `LAYOUTS`.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """
    check_layout(layout)
    if seqlen < 0:
        raise ValueError(f"seqlen must be at least 0, got {seqlen}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be from 0 to ranks - 1, got rank={rank}, ranks={ranks}")
    cut = chunks(seqlen, num_chunks(ranks, layout))
    return [cut[number] for number in chunks_of_rank(rank, ranks, layout)]


def shard(tensor: Tensor, rank: int, ranks: int, *, dim: int, layout: str = "contiguous") -> Tensor:
    """The rows of `tensor` that a rank has, a copy.

    Args:
        tensor: the same whole tensor on every rank.
        rank, ranks, layout: as in `rows_of_rank`.
        dim: the dimension of the sequence: 1 in a dense batch, 0 in a pack, the last of a log-sum-exp.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """
    runs = rows_of_rank(tensor.shape[dim], rank, ranks, layout)
    pieces = [tensor.narrow(dim, run.start, len(run)) for run in runs]
    return pieces[0].clone() if len(pieces) == 1 else _concatenated(pieces, dim)


def _concatenated(pieces: list[Tensor], dim: int) -> Tensor:
    shape = list(pieces[0].shape)
    shape[dim] = sum(piece.shape[dim] for piece in pieces)
    whole = pieces[0].new_empty(shape)
    start = 0
    for piece in pieces:
        whole.narrow(dim, start, piece.shape[dim]).copy_(piece)
        start += piece.shape[dim]
    return whole


def check_layout(layout: object) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")

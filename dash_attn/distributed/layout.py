"""The rows of a sequence that each rank holds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

LAYOUTS = ("contiguous", "zigzag")
"""`contiguous` cuts the sequence into one chunk per rank. `zigzag` cuts it into two per rank: rank r has chunk r from
the front and chunk r from the back, so that all ranks have the same work under the causal mask."""

# Unless all chunks are equal, they end at multiples of this: whole tiles of keys in the order of sums.
ROWS_OF_A_UNIT = 128


class Rows(NamedTuple):
    """The rows of a sequence from `start` up to `stop`, exclusive."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def chunks(seqlen: int, count: int) -> tuple[Rows, ...]:
    """Cuts a sequence into `count` chunks.

    The chunks are equal if `count` divides the length, and `chunks_of_units` of 128 rows otherwise.
    """
    if seqlen % count == 0:
        each = seqlen // count
        return tuple(Rows(each * number, each * (number + 1)) for number in range(count))
    return chunks_of_units(seqlen, count, ROWS_OF_A_UNIT)


@functools.lru_cache(maxsize=256)
def chunks_of_units(seqlen: int, count: int, unit: int) -> tuple[Rows, ...]:
    """Cuts a sequence into `count` chunks that end at multiples of `unit` rows and differ by one unit at most.

    The last chunk with rows is cut short. The last chunks of a short sequence are empty.
    """
    each, longer = divmod(-(-seqlen // unit), count)
    ends = [min(seqlen, unit * (each * number + min(number, longer))) for number in range(count + 1)]
    return tuple(Rows(start, stop) for start, stop in zip(ends, ends[1:]))


def chunks_of_rank(rank: int, ranks: int, layout: str) -> tuple[int, ...]:
    """Returns the numbers of a rank's chunks, in the order of the rank's rows."""
    return (rank,) if layout == "contiguous" else (rank, 2 * ranks - 1 - rank)


def num_chunks(ranks: int, layout: str) -> int:
    return ranks if layout == "contiguous" else 2 * ranks


def places_of(runs: Sequence[Rows]) -> list[Rows]:
    """Returns the places of runs in a rank's rows, in which the runs follow each other."""
    ends = [0, *itertools.accumulate(map(len, runs))]
    return [Rows(start, stop) for start, stop in zip(ends, ends[1:])]


def rank_of_chunk(chunk: int, ranks: int, layout: str) -> int:
    return chunk if layout == "contiguous" else min(chunk, 2 * ranks - 1 - chunk)


def rows_of_rank(seqlen: int, rank: int, ranks: int, layout: str = "contiguous") -> list[Rows]:
    """Returns the runs of rows that a rank holds of a sequence, in the order in which the rank holds them.

    Args:
        seqlen: the number of rows of the whole sequence or variable-length batch, at least 0.
        rank: the rank within its group.
        ranks: the number of ranks in the group.
        layout: one of `LAYOUTS`.

    Returns:
        One run per chunk of the rank. A run may be empty.

    Raises:
        ValueError: an argument is out of range; the message names the argument.
    """
    check_layout(layout)
    if seqlen < 0:
        raise ValueError(f"seqlen must be at least 0, got {seqlen}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be from 0 to ranks - 1, got rank={rank}, ranks={ranks}")
    cut = chunks(seqlen, num_chunks(ranks, layout))
    return [cut[number] for number in chunks_of_rank(rank, ranks, layout)]


def shard(tensor: Tensor, rank: int, ranks: int, *, dim: int, layout: str = "contiguous") -> Tensor:
    """Copies the rows of `tensor` that a rank holds.

    Args:
        tensor: the whole tensor, the same on every rank.
        rank: the rank within its group.
        ranks: the number of ranks in the group.
        dim: the dimension of the sequence: 1 for a dense batch, 0 for a variable-length batch, the last dimension for a
            log-sum-exp.
        layout: one of `LAYOUTS`.

    Returns:
        A contiguous tensor with this rank's rows in dimension `dim`.

    Raises:
        ValueError: an argument is out of range; the message names the argument.
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

"""Describes a part of a tensor as rows of words, the form that the op `dash_attn_C::fingerprint_blocks` takes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .shards import Range, Shard


class Piece(NamedTuple):
    """Equally spaced rows of words, in the part's memory and in the whole tensor."""

    offset: int
    """The index of the first word in the part's memory."""
    rows: int
    columns: int
    """Words per row."""
    pitch: int
    """Words from one row to the next in the part's memory."""
    first: int
    """The number of the first word in the whole tensor."""
    stride: int
    """Words from one row to the next in the whole tensor."""


class _Span(NamedTuple):
    local: int
    whole: int
    length: int


def _spans(ranges: tuple[Range, ...]) -> list[_Span]:
    """Returns where ranges begin in the part and in the whole, and their lengths. Adjacent ranges become one span."""
    spans: list[_Span] = []
    at = 0
    for start, stop in ranges:
        if start == stop:
            continue
        if spans and spans[-1].whole + spans[-1].length == start:
            spans[-1] = spans[-1]._replace(length=spans[-1].length + stop - start)
        else:
            spans.append(_Span(at, start, stop - start))
        at += stop - start
    return spans


@functools.lru_cache(maxsize=1 << 14)
def pieces_of(shard: Shard, per: int) -> tuple[Piece, ...]:
    """Returns the pieces of a contiguous tensor that is this part of a whole; none for a part without elements.

    A part that is cut in one dimension has one piece per range of that dimension, and a part that is cut in two
    dimensions has one per pair of ranges. With more cut dimensions, each index of the outer ones has its own pieces.

    Args:
        shard: the part.
        per: words per element: 1, 2 or 4.
    """
    if shard.numel == 0:
        return ()
    spans = [_spans(of_dim) for of_dim in shard.ranges]
    is_cut = [of_dim != [_Span(0, 0, length)] for of_dim, length in zip(spans, shard.shape)]
    cut = [dim for dim, value in enumerate(is_cut) if value]
    shape, local = shard.shape, shard.local_shape
    if not cut:
        words = per * shard.numel
        return (Piece(0, 1, words, words, 0, words),)

    # The innermost cut dimension gives the columns; the next one, with the whole dimensions in between, gives the rows.
    inner, row_dim = cut[-1], cut[-2] if len(cut) > 1 else -1
    word, rows = per, 1
    for length in shape[inner + 1 :]:
        word *= length
    for length in shape[row_dim + 1 : inner]:
        rows *= length
    row_spans = [_Span(0, 0, 1)] if row_dim < 0 else spans[row_dim]
    local_rows, whole_rows = (rows, rows) if row_dim < 0 else (rows * local[row_dim], rows * shape[row_dim])
    outer = [0]
    for dim in range(max(row_dim, 0)):
        indices = [index for span in spans[dim] for index in range(span.whole, span.whole + span.length)]
        outer = [before * shape[dim] + index for before in outer for index in indices]
    return tuple(
        Piece(
            offset=((number * local_rows + row.local * rows) * local[inner] + column.local) * word,
            rows=row.length * rows,
            columns=column.length * word,
            pitch=local[inner] * word,
            first=((whole * whole_rows + row.whole * rows) * shape[inner] + column.whole) * word,
            stride=shape[inner] * word,
        )
        for number, whole in enumerate(outer)
        for row in row_spans
        for column in spans[inner]
    )


def places(piece: Piece, low: int, high: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Locates the words `low` to `high` of a piece, counted row by row.

    Returns:
        The words' indices in the part's memory, and their numbers in the whole tensor; both int64 (high - low,).
    """
    number = torch.arange(low, high, device=device)
    row, column = number // piece.columns, number % piece.columns
    return piece.offset + row * piece.pitch + column, piece.first + row * piece.stride + column

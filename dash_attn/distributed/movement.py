"""Pieces of tensors from every rank to every rank of a group, in one collective that only copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .channel import Channel

_ALIGNMENT = 16  # bytes: of every piece, so that it can be seen as any dtype


class Piece(NamedTuple):
    """What is known of a piece before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """With the bytes that fill it up to the alignment."""
        exact = math.prod(self.shape) * self.dtype.itemsize
        return -(-exact // _ALIGNMENT) * _ALIGNMENT


def exchange_pieces(
    channel: Channel, what: str, to_ranks: Sequence[Sequence[Tensor]], from_ranks: Sequence[Sequence[Piece]]
) -> list[list[Tensor]]:
    """Sends `to_ranks[r]` to each rank r, and returns what came from each, which `from_ranks` describes.

    Args:
        channel: of the group.
        what: the call, for messages.
        to_ranks: for each rank of the group the pieces that it gets, all on one device, which is that of the group.
        from_ranks: for each rank the pieces that it sends here. Ranks must have agreed on them.

    Raises:
        RankError: a rank died or stalls, where tensors are on the CPU. On a GPU nobody waits here; there the watchdog
            of the group looks.
    """
    sent = [[Piece(tuple(x.shape), x.dtype) for x in pieces] for pieces in to_ranks]
    device = next(x.device for pieces in to_ranks for x in pieces)
    source = torch.empty(sum(map(_bytes_of, sent)), dtype=torch.uint8, device=device)
    target = torch.empty(sum(map(_bytes_of, from_ranks)), dtype=torch.uint8, device=device)
    for views, pieces in zip(_views(source, sent), to_ranks):
        for view, piece in zip(views, pieces):
            view.copy_(piece)
    splits = [_bytes_of(pieces) for pieces in from_ranks], [_bytes_of(pieces) for pieces in sent]
    if device.type == "cpu":
        channel.wait(lambda: dist.all_to_all_single(target, source, *splits, group=channel.group, async_op=True), what)
    else:
        dist.all_to_all_single(target, source, *splits, group=channel.group)
    return _views(target, from_ranks)


def _bytes_of(pieces: Sequence[Piece]) -> int:
    return sum(piece.num_bytes for piece in pieces)


def _views(buffer: Tensor, ranks: Sequence[Sequence[Piece]]) -> list[list[Tensor]]:
    """The pieces that lie in `buffer` one behind the other."""
    views, start = [], 0
    for pieces in ranks:
        of_rank = []
        for piece in pieces:
            exact = buffer[start : start + math.prod(piece.shape) * piece.dtype.itemsize]
            of_rank.append(exact.view(piece.dtype).view(piece.shape))
            start += piece.num_bytes
        views.append(of_rank)
    return views

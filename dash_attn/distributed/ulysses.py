"""From shards of rows to shards of heads and back: the movement of DeepSpeed-Ulysses (arXiv 2309.14509).

Every rank of a group gets all rows of some heads, works on them as one process would, and gives the rows back. Nothing
is added on the way, and a head's bits do not depend on the other heads of a call, so all bits are those of one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .channel import Channel, RankError
from .layout import Rows, rows_of_rank
from .movement import Piece, exchange_pieces


@dataclass(frozen=True)
class Split:
    """How a call is divided: over rows outside of the attention, over heads inside. Equal on all ranks."""

    channel: Channel
    name: str
    """Of the function, for messages."""
    layout: str
    rows_q: int
    rows_k: int
    """Of the whole sequence or pack."""
    heads: int
    kv_heads: int
    check_values: bool

    def heads_of_rank(self, rank: int, *, of_keys: bool) -> Rows:
        """KV heads are spread evenly, the first ranks having one more; query heads stay with theirs."""
        each, longer = divmod(self.kv_heads, self.channel.size)
        start = each * rank + min(rank, longer)
        stop = start + each + (rank < longer)
        group = 1 if of_keys else self.heads // self.kv_heads
        return Rows(start * group, stop * group)

    def runs(self, rank: int, *, of_keys: bool) -> list[Rows]:
        return rows_of_rank(self.rows_k if of_keys else self.rows_q, rank, self.channel.size, self.layout)

    def rows_to_heads(self, what: str, tensors: Sequence[Tensor], of_keys: Sequence[bool]) -> list[Tensor]:
        """(batch, rows of this rank, heads, ...) to (batch, rows, heads of this rank, ...)."""
        size, me = self.channel.size, self.channel.rank
        sent = [
            [x[:, :, slice(*self.heads_of_rank(rank, of_keys=side))] for x, side in zip(tensors, of_keys)]
            for rank in range(size)
        ]
        expected = []
        for rank in range(size):
            pieces = []
            for x, side in zip(tensors, of_keys):
                rows = sum(map(len, self.runs(rank, of_keys=side)))
                heads = len(self.heads_of_rank(me, of_keys=side))
                pieces.append(Piece((x.shape[0], rows, heads, *x.shape[3:]), x.dtype))
            expected.append(pieces)
        received = exchange_pieces(self.channel, what, sent, expected)
        results = []
        for number, (x, side) in enumerate(zip(tensors, of_keys)):
            heads = len(self.heads_of_rank(me, of_keys=side))
            whole = x.new_empty(x.shape[0], self.rows_k if side else self.rows_q, heads, *x.shape[3:])
            for rank in range(size):
                start = 0
                for run in self.runs(rank, of_keys=side):
                    whole[:, slice(*run)] = received[rank][number][:, start : start + len(run)]
                    start += len(run)
            results.append(whole)
        return results

    def heads_to_rows(self, what: str, tensors: Sequence[Tensor], of_keys: Sequence[bool]) -> list[Tensor]:
        """The inverse of `rows_to_heads`."""
        size, me = self.channel.size, self.channel.rank
        sent = [
            [
                torch.cat([x[:, slice(*run)] for run in self.runs(rank, of_keys=side)], dim=1)
                for x, side in zip(tensors, of_keys)
            ]
            for rank in range(size)
        ]
        expected = []
        for rank in range(size):
            pieces = []
            for x, side in zip(tensors, of_keys):
                rows = sum(map(len, self.runs(me, of_keys=side)))
                heads = len(self.heads_of_rank(rank, of_keys=side))
                pieces.append(Piece((x.shape[0], rows, heads, *x.shape[3:]), x.dtype))
            expected.append(pieces)
        received = exchange_pieces(self.channel, what, sent, expected)
        return [torch.cat([of_rank[number] for of_rank in received], dim=2) for number in range(len(tensors))]

    def gather_heads(self, what: str, of_heads: Tensor) -> Tensor:
        """(heads of this rank,) to (heads,), on every rank."""
        size = self.channel.size
        counts = [len(self.heads_of_rank(rank, of_keys=False)) for rank in range(size)]
        expected = [[Piece((count,), of_heads.dtype)] for count in counts]
        return torch.cat([x for (x,) in exchange_pieces(self.channel, what, [[of_heads]] * size, expected)])


class RowsToHeads(torch.autograd.Function):
    """q, k and v of this rank's rows, and the sinks of all heads, to those of this rank's heads."""

    @staticmethod
    def forward(ctx, split, q, k, v, sinks):
        ctx.set_materialize_grads(False)
        ctx.split, ctx.dtypes = split, [None if x is None else x.dtype for x in (q, k, v, sinks)]
        results = split.rows_to_heads(split.name, [q, k, v], [False, True, True])
        ctx.shapes = [x.shape for x in results]
        heads = split.heads_of_rank(split.channel.rank, of_keys=False)
        return (*results, None if sinks is None else sinks[slice(*heads)].clone())

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv, dsinks):
        split = ctx.split
        what = f"the backward of {split.name}"
        gradients = [
            x if x is not None else torch.zeros(shape, dtype=dtype, device=_device_of(dq, dk, dv))
            for x, shape, dtype in zip((dq, dk, dv), ctx.shapes, ctx.dtypes)
        ]
        gradients = split.heads_to_rows(what, gradients, [False, True, True])
        # Of each head one rank has the gradient, complete: it is copied to all.
        return None, *gradients, None if dsinks is None else split.gather_heads(what, dsinks)


class HeadsToRows(torch.autograd.Function):
    """Output and log-sum-exp of this rank's heads to those of its rows; the latter with heads last."""

    @staticmethod
    def forward(ctx, split, out, lse):
        ctx.set_materialize_grads(False)
        ctx.split, ctx.of_rows = split, None
        out_rows, lse_rows = split.heads_to_rows(split.name, [out, lse], [False, False])
        ctx.like = [(x.shape, x.dtype, x.device) for x in (out_rows, lse_rows)]
        return out_rows, lse_rows

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        split = ctx.split
        what = f"the backward of {split.name}"
        record: dict[str, Any] = {"dout": dout is not None, "dlse": dlse is not None}
        if split.check_values:
            record["values"] = not_finite({"dout": dout, "the gradient of softmax_lse": dlse})
        records = split.channel.exchange(what, record)
        require_finite(split.channel, what, records)
        # What no rank has a gradient of has none in one process either, and other bits than with one that is 0.
        given = [any(record[key] for record in records) for key in ("dout", "dlse")]
        gradients = [
            x if x is not None else torch.zeros(shape, dtype=dtype, device=device)
            for x, (shape, dtype, device) in zip((dout, dlse), ctx.like)
        ]
        used = [x for x, is_given in zip(gradients, given) if is_given]
        if not used:
            return None, None, None
        moved = iter(split.rows_to_heads(what, used, [False] * len(used)))
        return None, *(next(moved) if is_given else None for is_given in given)


def not_finite(named: Mapping[str, Tensor | None]) -> list[str]:
    """The names of the tensors that hold a NaN or an infinity. Waits for their device."""
    return [name for name, x in named.items() if x is not None and not bool(x.isfinite().all())]


def require_finite(channel: Channel, what: str, records: list[dict]) -> None:
    for rank, record in enumerate(records):
        if record.get("values"):
            names = ", ".join(record["values"])
            raise RankError(f"{what} cannot be done: {names} of {channel.name([rank])} must be finite", (rank,))


def _device_of(*tensors: Tensor | None) -> torch.device:
    return next(x.device for x in tensors if x is not None)

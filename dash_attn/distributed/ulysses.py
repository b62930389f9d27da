"""From shards of rows to shards of heads and back: the data movement of DeepSpeed-Ulysses (arXiv 2309.14509).

Every rank of a group receives all rows of some heads, computes attention as one process would, and returns the rows.
Nothing is added on the way, and a head's bits do not depend on the other heads of a call, so all bits are those of one
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .agreement import agreed_gradients
from .channel import Channel
from .derivative import first_order
from .layout import Rows, places_of, rows_of_rank
from .movement import Move, exchange


@dataclass(frozen=True)
class Split:
    """How a call is divided: over rows outside of attention, over heads inside. Equal on all ranks."""

    channel: Channel
    name: str
    """The name of the function, for messages."""
    layout: str
    rows_q: int
    rows_k: int
    """Rows of the whole sequence or variable-length batch."""
    heads: int
    kv_heads: int
    check_values: bool
    gradients_agreed: bool = False
    """Whether the ranks have already agreed on the gradients of the results."""

    def heads_of_rank(self, rank: int, *, of_keys: bool) -> Rows:
        """KV heads are spread evenly, with one more on the first ranks. Query heads stay with their KV heads."""
        each, longer = divmod(self.kv_heads, self.channel.size)
        start = each * rank + min(rank, longer)
        stop = start + each + (rank < longer)
        group = 1 if of_keys else self.heads // self.kv_heads
        return Rows(start * group, stop * group)

    def runs(self, rank: int, *, of_keys: bool) -> list[Rows]:
        """Returns a rank's rows, within the rows that the ranks hold together."""
        return rows_of_rank(self.rows_k if of_keys else self.rows_q, rank, self.channel.size, self.layout)

    def runs_here(self, *, of_keys: bool) -> list[Rows]:
        """Returns this rank's runs, in the rank's own rows."""
        return places_of(self.runs(self.channel.rank, of_keys=of_keys))

    def rows_to_heads(self, what: str, tensors: Sequence[Tensor], of_keys: Sequence[bool]) -> list[Tensor]:
        """Moves (batch, rows of this rank, heads, ...) to (batch, rows, heads of this rank, ...)."""
        results, moves = [], []
        for x, side in zip(tensors, of_keys):
            heads = len(self.heads_of_rank(self.channel.rank, of_keys=side))
            results.append(x.new_empty(x.shape[0], self.rows_k if side else self.rows_q, heads, *x.shape[3:]))
            moves += [Move(own, whole) for own, whole in self._pairs(x, results[-1], side)]
        exchange(self.channel, what, moves)
        return results

    def heads_to_rows(self, what: str, tensors: Sequence[Tensor], of_keys: Sequence[bool]) -> list[Tensor]:
        """The inverse of `rows_to_heads`."""
        results, moves = [], []
        for x, side in zip(tensors, of_keys):
            rows = sum(map(len, self.runs_here(of_keys=side)))
            heads = self.kv_heads if side else self.heads
            results.append(x.new_empty(x.shape[0], rows, heads, *x.shape[3:]))
            moves += [Move(whole, own) for own, whole in self._pairs(results[-1], x, side)]
        exchange(self.channel, what, moves)
        return results

    def _pairs(self, of_rows: Tensor, of_heads: Tensor, of_keys: bool) -> list[tuple[list[Tensor], list[Tensor]]]:
        """For each run, pairs this rank's rows of each rank's heads with each rank's rows of this rank's heads."""
        ranks = range(self.channel.size)
        heads = [slice(*self.heads_of_rank(rank, of_keys=of_keys)) for rank in ranks]
        runs = [self.runs(rank, of_keys=of_keys) for rank in ranks]
        return [
            (
                [of_rows[:, slice(*place), heads[rank]] for rank in ranks],
                [of_heads[:, slice(*runs[rank][number])] for rank in ranks],
            )
            for number, place in enumerate(self.runs_here(of_keys=of_keys))
        ]

    def gather_heads(self, what: str, of_heads: Tensor) -> Tensor:
        """Gathers (heads of this rank,) into (heads,) on every rank."""
        result = of_heads.new_empty(self.heads)
        ranks = range(self.channel.size)
        parts = [result[slice(*self.heads_of_rank(rank, of_keys=False))] for rank in ranks]
        exchange(self.channel, what, [Move([of_heads] * len(ranks), parts)])
        return result


class RowsToHeads(torch.autograd.Function):
    """Moves q, k and v of this rank's rows, and the sinks of all heads, to those of this rank's heads."""

    @staticmethod
    def forward(ctx, split, q, k, v, sinks):
        ctx.set_materialize_grads(False)
        ctx.split, ctx.dtypes = split, [None if x is None else x.dtype for x in (q, k, v, sinks)]
        # The smaller tensors move first, while q is made contiguous.
        k, v, q = split.rows_to_heads(split.name, [k, v, q], [True, True, False])
        results = q, k, v
        ctx.shapes = [x.shape for x in results]
        heads = split.heads_of_rank(split.channel.rank, of_keys=False)
        return (*results, None if sinks is None else sinks[slice(*heads)].clone())

    @staticmethod
    @first_order
    def backward(ctx, _, dq, dk, dv, dsinks):
        split = ctx.split
        if dq is None and dk is None and dv is None:  # on every rank, because the ranks have agreed on the gradients
            return (None,) * 5
        what = f"the backward of {split.name}"
        gradients = [
            x if x is not None else torch.zeros(shape, dtype=dtype, device=_device_of(dq, dk, dv))
            for x, shape, dtype in zip((dq, dk, dv), ctx.shapes, ctx.dtypes)
        ]
        gradients = split.heads_to_rows(what, gradients, [False, True, True])
        # For each head, one rank has the complete gradient, which is copied to all.
        return None, *gradients, None if dsinks is None else split.gather_heads(what, dsinks)


class HeadsToRows(torch.autograd.Function):
    """Moves the output, and the log-sum-exp unless it is None, of this rank's heads to this rank's rows. The
    log-sum-exp has its heads last."""

    @staticmethod
    def forward(ctx, split, out, lse):
        ctx.set_materialize_grads(False)
        ctx.split = split
        tensors = [x for x in (out, lse) if x is not None]
        of_rows = split.heads_to_rows(split.name, tensors, [False] * len(tensors))
        ctx.like = [(x.shape, x.dtype, x.device) for x in of_rows]
        return *of_rows, *([None] if lse is None else [])

    @staticmethod
    @first_order
    def backward(ctx, _, dout, dlse):
        split = ctx.split
        what = f"the backward of {split.name}"
        agreed = agreed_gradients(split.channel, what, dout, dlse, ctx.like, split.check_values)
        used = [x for x in agreed if x is not None]
        if not used:
            return None, None, None
        moved = iter(split.rows_to_heads(what, used, [False] * len(used)))
        return None, *(None if x is None else next(moved) for x in agreed)


def _device_of(*tensors: Tensor | None) -> torch.device:
    return next(x.device for x in tensors if x is not None)

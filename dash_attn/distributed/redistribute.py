"""Moves rows from the ranks that hold them to the ranks that work on them, and moves results back.

Nothing is added: every row is copied, and its gradient is copied back.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .agreement import agreed_gradients
from .channel import Channel
from .derivative import first_order
from .layout import Rows, places_of
from .movement import Move, exchange

RowsOfRanks = tuple[tuple[Rows, ...], ...]
"""For each rank, its runs of rows in the rank's own order."""


class Route(NamedTuple):
    """Where rows come from and where they go."""

    total: int
    """The total number of rows."""
    source: RowsOfRanks
    """The source: contains every row of `target` once."""
    target: RowsOfRanks
    """The target: contains no row twice."""

    def back(self) -> Route:
        return Route(self.total, self.target, self.source)


class Places(NamedTuple):
    """A rank's rows in its own order, by the rank that they go to or come from. Both ends of a pair take the rows in
    the order of the whole."""

    sent: list[slice | Tensor]
    received: list[slice | Tensor]
    """For each rank a slice if its rows are consecutive, and a tensor of indices otherwise."""
    are_all: bool
    """Whether every row of the target is received."""


class MoveRows(torch.autograd.Function):
    """Moves tensors (batch, this rank's rows in the source of their route, ...) to the target of their route."""

    @staticmethod
    def forward(ctx, channel: Channel, what: str, routes: Sequence[Route], *tensors: Tensor):
        ctx.set_materialize_grads(False)
        ctx.channel, ctx.what, ctx.routes = channel, what, routes
        results = _moved(channel, what, routes, tensors)
        ctx.like = [(x.shape, x.dtype, x.device) for x in results]
        return tuple(results)

    @staticmethod
    @first_order
    def backward(ctx, _, *gradients):
        what, routes = f"the backward of {ctx.what}", [route.back() for route in ctx.routes]
        if all(x is None for x in gradients):  # on every rank, because the ranks have agreed on the output's gradient
            return (None,) * (3 + len(gradients))
        given = [
            torch.zeros(shape, dtype=dtype, device=device) if x is None else x
            for x, (shape, dtype, device) in zip(gradients, ctx.like)
        ]
        return None, None, None, *_moved(ctx.channel, what, routes, given)


class MoveResultsBack(torch.autograd.Function):
    """Moves the output and the log-sum-exp, (batch, rows, heads, ...), along one route. Rows without a source have an
    output of 0 and a log-sum-exp of +inf."""

    @staticmethod
    def forward(ctx, channel: Channel, what: str, route: Route, check_values: bool, agreed: bool, out, lse):
        ctx.set_materialize_grads(False)
        ctx.channel, ctx.what, ctx.route, ctx.check_values, ctx.agreed = channel, what, route, check_values, agreed
        out, lse = _moved(channel, what, [route] * 2, [out, lse], (0.0, torch.inf))
        ctx.like = [(x.shape, x.dtype, x.device) for x in (out, lse)]
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, _, dout, dlse):
        what = f"the backward of {ctx.what}"
        gradients = [dout, dlse]
        if not ctx.agreed:
            gradients = agreed_gradients(ctx.channel, what, dout, dlse, ctx.like, ctx.check_values)
        used = [x for x in gradients if x is not None]
        moved = iter(_moved(ctx.channel, what, [ctx.route.back()] * len(used), used))
        return (None,) * 5 + tuple(None if x is None else next(moved) for x in gradients)


def _moved(
    channel: Channel,
    what: str,
    routes: Sequence[Route],
    tensors: Sequence[Tensor],
    fill: Iterable[float] = itertools.repeat(0.0),
) -> list[Tensor]:
    """Moves tensors along routes. Rows without a source are filled with `fill`."""
    results, moves, scattered = [], [], []
    for route, x, value in zip(routes, tensors, fill):
        sent, received, are_all = _places(route, channel.rank, x.device)
        shape = (x.shape[0], sum(map(len, route.target[channel.rank])), *x.shape[2:])
        result = x.new_empty(shape) if are_all else x.new_full(shape, value)
        # Slices are sent from where they lie, and received where they belong.
        landing = []
        for places in received:
            if isinstance(places, slice):
                landing.append(result[:, places])
            else:
                landing.append(x.new_empty(x.shape[0], len(places), *x.shape[2:]))
                scattered.append((result, places, landing[-1]))
        moves.append(Move([_taken(x, places) for places in sent], landing))
        results.append(result)
    exchange(channel, what, moves)
    for result, places, rows in scattered:
        result.index_copy_(1, places, rows)
    return results


def _taken(x: Tensor, places: slice | Tensor) -> Tensor:
    return x[:, places] if isinstance(places, slice) else x.index_select(1, places)


@functools.lru_cache(maxsize=4)  # a call uses a route for queries and a route for keys, in both directions
def _places(route: Route, rank: int, device: torch.device) -> Places:
    """Returns a rank's places. Indices are on the device, for which the first call for a route waits."""
    (from_rank, from_place), (to_rank, to_place) = (_owners(route.total, side) for side in (route.source, route.target))
    ranks = len(route.source)
    sent = _by_rank(from_place, to_rank, from_rank == rank, ranks)
    received = _by_rank(to_place, from_rank, to_rank == rank, ranks)
    are_all = sum(map(len, received)) == sum(map(len, route.target[rank]))
    return Places([_run_of(x, device) for x in sent], [_run_of(x, device) for x in received], are_all)


def _run_of(places: Tensor, device: torch.device) -> slice | Tensor:
    """Returns a slice if the places are consecutive, and otherwise their tensor on the device."""
    if len(places) == 0:
        return slice(0, 0)
    if (places.diff() == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places.to(device)


def _owners(total: int, of_ranks: RowsOfRanks) -> tuple[Tensor, Tensor]:
    """Returns the rank that holds each row, or -1, and the row's place on that rank."""
    owner, place = torch.full((total,), -1), torch.zeros(total, dtype=torch.int64)
    for rank, runs in enumerate(of_ranks):
        for run, own in zip(runs, places_of(runs)):
            owner[slice(*run)] = rank
            place[slice(*run)] = torch.arange(*own)
    return owner, place


def _by_rank(place: Tensor, other: Tensor, is_here: Tensor, ranks: int) -> list[Tensor]:
    """For each rank, returns the places of the rows that are here and on that rank, in the order of the whole."""
    rows = (is_here & (other >= 0)).nonzero().squeeze(1)
    of_rows = other[rows]
    by_rank = place[rows[of_rows.argsort(stable=True)]]
    return list(by_rank.split(of_rows.bincount(minlength=ranks).tolist()))

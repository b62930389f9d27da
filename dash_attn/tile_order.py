"""The order in which the backward processes tiles, which determines a reference's bits, as lists that tests permute."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import schedule as _schedule


class TileOrder(NamedTuple):
    """Tiles, and the two orders that determine the bits of a backward; the same for every head of every sequence."""

    tile_q: int
    """Queries per query tile; the last tile may be shorter."""
    tile_k: int
    """Keys per KV tile; the last tile may be shorter."""
    visits: list[list[int]]
    """For each KV tile, the query tiles that it visits, in order: the order of the sums dK and dV."""
    adds: list[list[int]]
    """For each query tile, the KV tiles that contribute to it, in order: the order of the sum dQ."""
    heads_together: bool = False
    """Whether all query heads of a split take a step before any takes the next one: the order of dK and dV."""
    splits: int = 1
    """The parts into which the query heads of a KV head are divided, whose dK and dV are added in ascending order."""
    order_free: bool = False
    """Whether dQ is summed in the fixed point of `dash_attn.order_free`, independent of order; never in float64."""


@functools.lru_cache(maxsize=64)
def tile_order(
    schedule: str,
    seqlen_q: int,
    seqlen_k: int,
    *,
    head_dim: int,
    value_head_dim: int | None = None,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    group_size: int = 1,
    tile_q: int | None = None,
    tile_k: int | None = None,
) -> TileOrder:
    """Returns the order in which the kernel works under a policy, which is the same for every head.

    Args:
        schedule: a name of `dash_attn.schedule.POLICIES`, or "auto".
        seqlen_q, seqlen_k: the numbers of queries and keys, at least 1.
        head_dim, value_head_dim: columns of q and k, and of v (default: the same), which select the tile size unless it
            is given.
        causal, window, attention_chunk: the mask, as in `forward`.
        group_size: the number of query heads that share a KV head, which affects the splits.
        tile_q, tile_k: queries and keys per tile; default: the kernel's.

    Raises:
        ValueError: an argument is out of range, or the policy is not defined for this mask.
    """
    mask: dict[str, Any] = {"causal": causal, "window": window, "attention_chunk": attention_chunk}
    head_dims: dict[str, Any] = {"head_dim": head_dim, "value_head_dim": value_head_dim}
    policy = _schedule.resolve(schedule, **head_dims, **mask)
    problem = _schedule.problem(
        policy,
        seqlen_q,
        seqlen_k,
        **mask,
        **head_dims,
        heads=group_size,
        kv_heads=1,
        tile_q=tile_q,
        tile_k=tile_k,
    )
    return TileOrder(
        problem.tile_q,
        problem.tile_k,
        _schedule.visit_order(policy, problem),
        _schedule.add_order(policy, problem),
        _schedule.heads_together(policy, problem),
        problem.splits,
        policy == "order_free",
    )


def order_of_chunk(whole: TileOrder, query_tiles: range, kv_tiles: range) -> TileOrder:
    """Returns the part of an order that contains some query tiles and KV tiles, renumbered from 0."""
    visits = [[q - query_tiles.start for q in whole.visits[kv] if q in query_tiles] for kv in kv_tiles]
    adds = [[kv - kv_tiles.start for kv in whole.adds[q] if kv in kv_tiles] for q in query_tiles]
    return whole._replace(visits=visits, adds=adds)


def steps(order: TileOrder, group_size: int) -> Iterator[tuple[int, int, int, bool]]:
    """Yields (query head of the group, KV tile, query tile, whether the product ends its split), in order."""
    tiles = list(_interleave(order))
    queries = group_size // order.splits
    for split in range(order.splits):
        heads = range(split * queries, (split + 1) * queries)
        if order.heads_together:
            steps = [(head, *pair) for pair in tiles for head in heads]
        else:
            steps = [(head, *pair) for head in heads for pair in tiles]
        for number, step in enumerate(steps, 1):
            yield *step, number == len(steps)


def _interleave(order: TileOrder) -> Iterator[tuple[int, int]]:
    """Yields (KV tile, query tile) in a sequence that keeps both orders, like a GPU with room for every KV tile."""
    step = [0] * len(order.visits)
    semaphore = [0] * len(order.adds)
    runnable = list(reversed(range(len(order.visits))))
    while runnable:
        kv_tile = runnable.pop()
        visits = order.visits[kv_tile]
        while step[kv_tile] < len(visits):
            q_tile = visits[step[kv_tile]]
            adds = order.adds[q_tile]
            if semaphore[q_tile] == len(adds) or adds[semaphore[q_tile]] != kv_tile:
                break
            yield kv_tile, q_tile
            step[kv_tile] += 1
            semaphore[q_tile] += 1
            if semaphore[q_tile] < len(adds):
                runnable.append(adds[semaphore[q_tile]])
    if any(done < len(visits) for done, visits in zip(step, order.visits)) or any(
        done < len(adds) for done, adds in zip(semaphore, order.adds)
    ):
        raise ValueError("order must have visits and adds of the same tiles that do not wait for each other in a cycle")

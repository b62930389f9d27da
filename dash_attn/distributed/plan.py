"""The plan of context parallelism with more ranks than KV heads: which rank computes what, and when it sends what.

Every rank has all keys and values, gathered, and its own queries, so each row of dQ is summed on one rank. dK and dV of
a chunk of keys are sums over the queries of all ranks. An accumulator in fp32 goes from rank to rank in the order in
which one process visits the query tiles. Nothing is added out of that order, so the bits are those of one process.

The plan is a pure function of the shape, which every rank computes for itself, and `carry` runs it.
`dash_attn.schedule`
gives the order of one process, which is cut here at the borders of the chunks.
"""

from __future__ import annotations

import collections
import heapq
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import schedule as _schedule
from ..reference import FORWARD_ROWS
from .layout import Rows, check_layout, chunks_of_units, num_chunks, rank_of_chunk

MOST_UNITS = 8192
"""The most units that a plan may cut the keys or queries into. The order of every unit is computed."""


class Task(NamedTuple):
    """A chunk of keys by a chunk of queries, for some query heads of one KV head: one launch of the backward."""

    kv_head: int
    split: int
    """The split of the KV head's query heads."""
    first_head: int
    heads: int
    """Query heads that are processed together, counted within the group of the KV head."""
    kv_chunk: int
    query_chunk: int


class Message(NamedTuple):
    """What a task of one rank passes on to a task of another rank, or to the rank that owns a chunk of keys.

    `sums` are the running sums of dK and dV of a chunk, in fp32. `total` is the sum over the splits so far, in fp32.
    `result` is the final, rounded result.
    """

    kind: str
    of: Task
    """The task that produces the message."""
    sender: int
    receiver: int


class Action(NamedTuple):
    """An action of a rank: prepare to `receive` a message, begin to `send` one, or `run` a task."""

    kind: str
    what: Task | Message


@dataclass(frozen=True)
class Plan:
    """What every rank does, in order.

    Only `run` waits for other ranks: for what its task `needs`. All messages have one order, the order in which their
    tasks end in the list schedule, and every rank begins its own messages in that order. Messages may therefore wait
    for each other as in one queue: the first message that has not been received has no other before it at either end,
    and its task needs none of the later messages.
    """

    ranks: int
    layout: str
    policy: str
    actions: list[list[Action]]
    """The actions of each rank."""
    needs: dict[Task, list[Message]] = field(repr=False)
    """For each task that continues the sums of another rank, the messages that it needs."""
    work: dict[Task, float] = field(repr=False)
    """The amount of work of each task, in pairs of a query and a key for one head; estimated at borders."""
    chains: dict[tuple[int, int, int], list[Task]] = field(repr=False)
    """For each (KV head, split, chunk of keys), the tasks in the order in which dK and dV are summed."""
    dq_orders: dict[tuple[int, int, int], list[Task]] = field(repr=False)
    """For each (KV head, first query head, chunk of queries), the tasks in the order in which dQ is summed."""

    def tasks(self, rank: int) -> list[Task]:
        return [action.what for action in self.actions[rank] if isinstance(action.what, Task)]

    def rank_of(self, task: Task) -> int:
        return rank_of_chunk(task.query_chunk, self.ranks, self.layout)


def make_plan(
    seqlen_q: int,
    seqlen_k: int,
    ranks: int,
    *,
    layout: str = "contiguous",
    heads: int = 1,
    kv_heads: int | None = None,
    head_dim: int = 128,
    value_head_dim: int | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    schedule: str = "auto",
    hop_work: float = 0.0,
) -> Plan:
    """Makes the plan of one sequence's backward.

    Args:
        seqlen_q, seqlen_k: the numbers of queries and keys, at least 1; each is cut into `chunks_of_tiles`.
        ranks: the number of ranks that gather, at least 1.
        layout: the chunks of each rank, for queries and keys alike; one of `dash_attn.distributed.LAYOUTS`.
        heads, kv_heads: the heads on each rank; heads is a multiple of kv_heads (default: heads).
        head_dim, value_head_dim, causal, window, attention_chunk, schedule: as in `dash_attn.schedule.problem`. The
            policy must visit query tiles, and add to them, in one direction.
        hop_work: the time of a message, in the unit of `Plan.work`. It affects when tasks run, but not the order of
            sums.

    Raises:
        ValueError: an argument is out of range, or the policy's order cannot be cut into chunks; the message says
            which.
    """
    check_layout(layout)
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    shape: dict[str, Any] = {"causal": causal, "window": window, "attention_chunk": attention_chunk}
    shape |= {"head_dim": head_dim, "value_head_dim": value_head_dim, "heads": heads, "kv_heads": kv_heads}
    policy = _schedule.resolve(schedule, **{k: x for k, x in shape.items() if k not in ("heads", "kv_heads")})
    kernel = _schedule.problem(policy, seqlen_q, seqlen_k, **shape)
    if kernel.cta_group > 1 or _schedule.divides(policy):
        raise ValueError(
            f"schedule must be a policy with visits in one direction, whole KV tiles and no clusters, got {policy!r}"
        )
    grid = _ChunkGrid.of(policy, kernel, shape, num_chunks(ranks, layout))
    together = _schedule.heads_together(policy, kernel)
    chains, dq_orders = _orders(grid, kernel.kv_heads, kernel.group_size, kernel.splits, together)
    work = {
        task: task.heads * grid.work[task.kv_chunk, task.query_chunk] for chain in chains.values() for task in chain
    }
    before = _dependencies(chains, dq_orders)
    rank = {task: rank_of_chunk(task.query_chunk, ranks, layout) for task in work}
    starts = _list_schedule(work, before, rank, ranks, hop_work)
    leaves, needs = _messages(chains, rank, ranks, layout)
    actions = _actions(starts, work, rank, ranks, leaves)
    return Plan(ranks, layout, policy, actions, needs, work, chains, dq_orders)


@dataclass(frozen=True)
class _ChunkGrid:
    """The order of one head's sums, cut at the borders of the chunks."""

    visits: dict[int, list[int]]
    """For each chunk of keys that is visible, its chunks of queries, in order."""
    adds: dict[int, list[int]]
    """For each chunk of queries, its chunks of keys, in order."""
    work: dict[tuple[int, int], float]

    @staticmethod
    def of(policy: str, kernel: _schedule.Problem, shape: dict[str, Any], count: int) -> _ChunkGrid:
        unit_q, of_q = _units(kernel.seqlen_q, count, kernel.tile_q)
        unit_k, of_k = _units(kernel.seqlen_k, count, kernel.tile_k)
        coarse = _schedule.problem(
            policy, kernel.seqlen_q, kernel.seqlen_k, **shape, tile_q=unit_q, tile_k=unit_k, cta_group=1, splits=1
        )
        visits = _by_chunk(_schedule.visit_order(policy, coarse), of_k, of_q, "visits")
        adds = _by_chunk(_schedule.add_order(policy, coarse), of_q, of_k, "adds")
        work = {(j, i): 0.0 for j, chunks_of_q in visits.items() for i in chunks_of_q}
        for kv_unit, j in enumerate(of_k):
            first, visited = coarse.query_tiles_of(kv_unit)
            for unit in range(first, first + visited):
                share = 0.5 if coarse.needs_masking(unit, kv_unit) else 1.0
                work[j, of_q[unit]] += share * unit_q * unit_k
        return _ChunkGrid(visits, adds, work)


def chunks_of_tiles(seqlen: int, count: int, tile: int) -> tuple[Rows, ...]:
    """Returns the chunks that queries or keys are cut into.

    Chunks consist of whole tiles of the backward and of the reference's forward, and of enough of these that there are
    at most MOST_UNITS units.
    """
    rows = math.lcm(tile, FORWARD_ROWS)
    return chunks_of_units(seqlen, count, rows * max(1, -(-seqlen // (rows * MOST_UNITS))))


def _units(seqlen: int, count: int, tile: int) -> tuple[int, list[int]]:
    """Returns the rows of the largest unit that divides all chunks, and the chunk of each unit."""
    cut = [chunk for chunk in chunks_of_tiles(seqlen, count, tile) if len(chunk)]
    borders = [chunk.stop for chunk in cut[:-1]]
    unit = math.gcd(*borders) if borders else tile * -(-seqlen // tile)
    return unit, [number for number, chunk in enumerate(cut) for _ in range(-(-len(chunk) // unit))]


def _by_chunk(of_units: list[list[int]], own: list[int], other: list[int], name: str) -> dict[int, list[int]]:
    """For each chunk, returns the chunks that its units visit, in the order that is common to all units."""
    sequences = []
    for units in of_units:
        of_unit = [other[unit] for unit in units]
        sequences.append([x for x, before in zip(of_unit, [None, *of_unit]) if x != before])
    steps = {(b > a) - (b < a) for sequence in sequences for a, b in zip(sequence, sequence[1:])}
    if len(steps) > 1:
        raise ValueError(f"schedule must be a policy whose {name} go in one direction, got one whose {name} do not")
    found: dict[int, set[int]] = {}
    for chunk, sequence in zip(own, sequences):
        found.setdefault(chunk, set()).update(sequence)
    return {chunk: sorted(reached, reverse=steps == {-1}) for chunk, reached in found.items() if reached}


def _orders(
    grid: _ChunkGrid, kv_heads: int, group_size: int, splits: int, together: bool
) -> tuple[dict[tuple[int, int, int], list[Task]], dict[tuple[int, int, int], list[Task]]]:
    """Returns the chains of dK and dV, and the orders of dQ."""
    of_split = group_size // splits
    at_once = of_split if together else 1
    chains, dq_orders = {}, {}
    for kv_head in range(kv_heads):
        for split in range(splits):
            runs = range(split * of_split, (split + 1) * of_split, at_once)
            for j, visited in grid.visits.items():
                tasks = [Task(kv_head, split, head, at_once, j, i) for head in runs for i in visited]
                chains[kv_head, split, j] = tasks
            for head in runs:
                for i, added in grid.adds.items():
                    dq_orders[kv_head, head, i] = [Task(kv_head, split, head, at_once, j, i) for j in added]
    return chains, dq_orders


def _dependencies(
    chains: dict[tuple[int, int, int], list[Task]], dq_orders: dict[tuple[int, int, int], list[Task]]
) -> dict[Task, list[Task]]:
    """For each task, returns the tasks whose sums it continues."""
    before: dict[Task, list[Task]] = {task: [] for chain in chains.values() for task in chain}
    for tasks in (*chains.values(), *dq_orders.values()):
        for earlier, later in zip(tasks, tasks[1:]):
            before[later].append(earlier)
    for (kv_head, split, j), chain in chains.items():
        if split:
            before[chain[-1]].append(chains[kv_head, split - 1, j][-1])
    return before


def _list_schedule(
    work: dict[Task, float], before: dict[Task, list[Task]], rank: dict[Task, int], ranks: int, hop: float
) -> list[tuple[float, Task]]:
    """Returns (start, task) in the order of starts: a free rank takes the ready task with the longest way to the end.

    Every task starts after the tasks whose sums it continues have ended. In this order no wait points forward, so ranks
    that keep the order cannot wait for each other in a cycle.
    """
    after: dict[Task, list[Task]] = {task: [] for task in work}
    for task, earlier in before.items():
        for one in earlier:
            after[one].append(task)
    behind = _longest_ways(work, before, after)
    missing = {task: len(earlier) for task, earlier in before.items()}
    ready_at = {task: 0.0 for task in work}
    # Events in order of time: a task becomes ready, or a rank becomes free.
    events = [(0.0, 0, task) for task, count in missing.items() if not count]
    heapq.heapify(events)
    ready: list[list[tuple[float, Task]]] = [[] for _ in range(ranks)]
    free_at, started = [0.0] * ranks, []
    while events:
        now = events[0][0]
        touched = set()
        while events and events[0][0] == now:
            _, kind, item = heapq.heappop(events)
            if kind == 0:
                heapq.heappush(ready[rank[item]], (-behind[item], item))
            touched.add(rank[item])
        for r in sorted(touched):
            if free_at[r] > now or not ready[r]:
                continue
            task = heapq.heappop(ready[r])[1]
            started.append((now, task))
            free_at[r] = end = now + work[task]
            heapq.heappush(events, (end, 1, task))
            for later in after[task]:
                ready_at[later] = max(ready_at[later], end + (hop if rank[later] != r else 0.0))
                missing[later] -= 1
                if not missing[later]:
                    heapq.heappush(events, (ready_at[later], 0, later))
    if len(started) != len(work):
        raise ValueError("schedule must have orders of dK and dV and of dQ that can be kept together")
    return started


def _longest_ways(
    work: dict[Task, float], before: dict[Task, list[Task]], after: dict[Task, list[Task]]
) -> dict[Task, float]:
    """Returns the work on the longest way from each task's start to the end."""
    missing = {task: len(later) for task, later in after.items()}
    done = [task for task, count in missing.items() if not count]
    longest: dict[Task, float] = {}
    for task in done:
        longest[task] = work[task] + max((longest[later] for later in after[task]), default=0.0)
        for earlier in before[task]:
            missing[earlier] -= 1
            if not missing[earlier]:
                done.append(earlier)
    return longest


def _messages(
    chains: dict[tuple[int, int, int], list[Task]], rank: dict[Task, int], ranks: int, layout: str
) -> tuple[dict[Task, list[Message]], dict[Task, list[Message]]]:
    """Returns the messages that each task produces, and those that each task needs."""
    leaves: dict[Task, list[Message]] = {}
    needs: dict[Task, list[Message]] = {}
    for (kv_head, split, j), chain in chains.items():
        pairs = [("sums", earlier, later) for earlier, later in zip(chain, chain[1:])]
        following = chains.get((kv_head, split + 1, j))
        if following:
            pairs.append(("total", chain[-1], following[-1]))
        for kind, earlier, later in pairs:
            if rank[earlier] != rank[later]:
                message = Message(kind, earlier, rank[earlier], rank[later])
                leaves.setdefault(earlier, []).append(message)
                needs.setdefault(later, []).append(message)
        owner = rank_of_chunk(j, ranks, layout)
        if not following and rank[chain[-1]] != owner:
            leaves.setdefault(chain[-1], []).append(Message("result", chain[-1], rank[chain[-1]], owner))
    return leaves, needs


def _actions(
    starts: list[tuple[float, Task]],
    work: dict[Task, float],
    rank: dict[Task, int],
    ranks: int,
    leaves: dict[Task, list[Message]],
) -> list[list[Action]]:
    """Returns each rank's tasks in the order of their starts, with its messages in the order of their tasks' ends.

    A message is sent after its task. Its receiver prepares for it as soon as the earlier messages have begun.
    """
    queues: list[collections.deque[Message]] = [collections.deque() for _ in range(ranks)]
    for _, task in sorted(starts, key=lambda started: started[0] + work[started[1]]):
        for message in leaves.get(task, []):
            queues[message.sender].append(message)
            queues[message.receiver].append(message)
    actions: list[list[Action]] = [[] for _ in range(ranks)]

    def receive(r: int) -> None:
        while queues[r] and queues[r][0].receiver == r:
            actions[r].append(Action("receive", queues[r].popleft()))

    for r in range(ranks):
        receive(r)
    for _, task in starts:
        r = rank[task]
        actions[r].append(Action("run", task))
        actions[r] += [Action("send", queues[r].popleft()) for _ in leaves.get(task, [])]
        receive(r)
    return actions

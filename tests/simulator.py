"""Plays the work tiles of a backward on any number of CTAs, over the orders that the kernels are compiled from.

Every wait of the kernel is a wait for a counter: the adds to a sum of dQ or of dK and dV, the numbers that have been
taken, the first part of a divided KV tile. The simulator keeps the time of every increment. It thereby computes the
lengths of the DAG model of DASH (arXiv 2601.21824): the products of a tile, then its add when the add of the previous
rank has ended, tile after tile of a KV tile on one SM. With a random generator it ignores the times and lets any CTA
that can continue take the next number. Here, a partial that waits for its turn delays the next products, and all sums
are ordered. The kernel waits for less.
"""

import collections
import contextlib
import heapq
import itertools
import random
from typing import NamedTuple

from dash_attn import _schedule
from dash_attn.schedule import Problem, groups, num_groups, ranks, steps, visit_order, walk, work_tile


class Stuck(RuntimeError):
    """CTAs wait for work that no running CTA will do."""


class Work(NamedTuple):
    """The work tile of a CTA. `adds` are the sums of dQ, with the rank of its partial in each."""

    kv_head: tuple[int, int]  # with the sequence
    kv_tile: int
    split: int
    part: int | None  # of a divided KV tile
    adds: list[tuple[tuple[int, int, int], int]]


class Simulator:
    def __init__(self, policy: str, problem: Problem, *, in_clusters: bool = True):
        """Without clusters, CTAs take the KV tiles of a group one by one and need not run at the same time."""
        self.problem, self.of_tile = problem, {}
        divides = _schedule.divides(policy)
        visits, rank = visit_order(policy, problem), ranks(policy, problem)
        walks = [walk(policy, problem, kv) for kv in range(problem.num_kv_tiles)]
        parts = collections.defaultdict(list)
        for group, members in enumerate(groups(policy, problem)):
            for kv in members:
                first, count = steps(policy, problem, group, kv)
                parts[kv].append(range(first, first + count))

        def work(number: int, member: int) -> Work | None:
            found = work_tile(policy, problem, number, member)
            if found is None:
                return None
            batch, kv_head, kv, split = found
            head = kv_head * problem.group_size + split * problem.heads_per_split
            seen = self.of_tile.setdefault(found, [])
            walked = [(step, (batch, head + h, visits[kv][step])) for step, h in walks[kv]]
            adds = [(sum_, rank[kv][sum_[2]]) for step, sum_ in walked if step in parts[kv][len(seen)]]
            seen.append(Work((batch, kv_head), kv, split, len(seen) if divides else None, adds))
            return seen[-1]

        members = range(problem.cta_group)
        self.numbers = [[work(number, member) for member in members] for number in range(num_groups(policy, problem))]
        if not in_clusters:
            self.numbers = [[work] for works in self.numbers for work in works]
        self.end_of_firsts = {
            (work.kv_head, work.split): number + 1
            for number, works in enumerate(self.numbers)
            for work in works
            if work and work.part == 0
        }

    def play(
        self, clusters: int, *, product: float = 1.0, add: float = 0.0,
        generator: random.Random | None = None, late: int = 0, ahead: bool = False,
    ) -> float:  # fmt: skip
        """Returns the time of the last add.

        Args:
            clusters: the number of clusters, or of CTAs without clusters, that ever run.
            product: the time of the products of a tile.
            add: the time of an add.
            generator: chooses who takes the next number; default: who is first.
            late: the number of clusters that start when the others cannot continue, with a generator.
            ahead: whether a CTA takes its next number when it begins with a work tile, instead of when it has ended it.

        Raises:
            Stuck: the work does not end.
        """
        raised, waiting = collections.defaultdict(list), collections.defaultdict(list)
        queue: list[tuple] = []
        given, whole, serial = collections.defaultdict(list), {}, itertools.count()

        def push(agent, clock, priority=None):
            if priority is None:
                priority = generator.random() if generator else clock
            heapq.heappush(queue, (priority, next(serial), clock, agent))

        def increment(counter, clock):
            raised[counter].append(clock)
            for own, agent in waiting.pop((counter, len(raised[counter])), ()):
                push(agent, max(own, clock))

        def give(receiver, what, clock):
            given[receiver].append(what)
            increment(receiver, clock)

        def loader(cluster, member):
            """Takes the numbers of a CTA, at most one of them ahead of its work."""
            cta, clock, until = (cluster, member), 0.0, 0
            if member == 0:
                increment("running", clock)
            for number_of_cluster in itertools.count(1):
                clock = yield ("begun" if ahead else "ended", cta), len(given[cta]), clock
                if member == 0:
                    clock = yield "taken", until, clock
                    clock = yield None, 0, clock
                    number = len(raised["taken"])
                    if number < len(self.numbers):
                        increment("taken", clock)
                    give(("cluster", cluster), number, clock)
                else:
                    clock = yield ("cluster", cluster), number_of_cluster, clock
                number = given["cluster", cluster][number_of_cluster - 1]
                if number == len(self.numbers):
                    give(cta, None, clock)
                    return
                work = self.numbers[number][member]
                if work and work.part is not None:
                    is_whole = whole.setdefault(work.kv_head, len(raised["running"]) >= self.problem.num_kv_tiles)
                    if is_whole and work.part == 1:
                        continue
                    if is_whole:
                        until = self.end_of_firsts[work.kv_head, work.split]
                        second = self.of_tile[(*work.kv_head, work.kv_tile, work.split)][1]
                        work = work._replace(part=None, adds=work.adds + second.adds)
                if work:
                    give(cta, work, clock)

        def worker(cta):
            clock = 0.0
            for number in itertools.count(1):
                clock = yield cta, number, clock
                work = given[cta][number - 1]
                if work is None:
                    return
                increment(("begun", cta), clock)
                tile = work.kv_head, work.kv_tile
                if work.part == 0:  # the memory of its dK and dV is that of the split before
                    clock = yield ("second parts begun", *tile), work.split, clock
                if work.part == 1:
                    clock = yield ("first parts", *tile), work.split + 1, clock
                    increment(("second parts begun", *tile), clock)
                for sum_, rank in work.adds:
                    clock = yield sum_, rank, clock + product
                    clock += add
                    increment(sum_, clock)
                if work.part == 0:
                    increment(("first parts", *tile), clock)
                else:
                    clock = yield ("splits", *tile), work.split, clock
                    increment(("splits", *tile), clock)
                increment(("ended", cta), clock)

        def run(agent, clock):
            """Runs an agent until it has to wait. An agent that names no counter lets others go first."""
            with contextlib.suppress(StopIteration):
                while True:
                    counter, value, own = agent.send(clock)
                    if counter is None:
                        return push(agent, own)
                    if len(raised[counter]) < value:
                        return waiting[counter, value].append((own, agent))
                    clock = max(own, raised[counter][value - 1]) if value else own

        for cluster, member in itertools.product(range(clusters), range(len(self.numbers[0]))):
            push(loader(cluster, member), None, cluster + 1 if cluster >= clusters - late else 0)
            push(worker((cluster, member)), None, 0)
        while queue:
            _, _, clock, agent = heapq.heappop(queue)
            run(agent, clock)
        if waiting:
            raise Stuck(f"no progress: {len(waiting)} waits do not end, among them {next(iter(waiting))}")
        adds = collections.Counter(sum_ for works in self.of_tile.values() for work in works for sum_, _ in work.adds)
        assert {sum_: len(raised[sum_]) for sum_ in adds} == adds
        return max(raised[sum_][-1] for sum_ in adds)

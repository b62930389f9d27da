"""Compares two runs step by step: which tensors are comparable, and which differ. Equal steps cost almost nothing."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator

from .receipt import Row
from .runs import Key, Run, Whole, merge_orders
from .shards import Shard
from .store import unpack

Progress = Callable[[int, int], None]
"""A function that is called with the number of finished steps and the total."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """One step of two runs.

    Attributes:
        step: the number of the step.
        keys: the comparable tensors in their order of execution. Steps with the same records share one list.
        left_out: for each reason, the number of tensors that cannot be compared.
        differing: the tensors of `keys` that differ.
        rows: the records of the ranks of run a and of run b.
    """

    step: int
    keys: list[Key]
    left_out: dict[str, int]
    differing: set[Key]
    rows: tuple[list[Row], list[Row]]


def what_differs(one: Whole, other: Whole) -> str | None:
    """Describes how a tensor differs between two runs, or between its copies in one run; None if it does not."""
    if one.shape != other.shape:
        return f"the shape: {list(one.shape)} and {list(other.shape)}"
    if one.dtype != other.dtype:
        return f"the dtype: {one.dtype} and {other.dtype}"
    for name, whole in (("a", one), ("b", other)):
        if whole.copies_differ:
            groups = " and ".join(f"ranks {list(ranks)}" for ranks in whole.copies_differ)
            return f"its copies in run {name}: {groups} have different bits"
    return None if one.sum == other.sum else "the bits"


def same_layout(a: dict[Key, Whole], b: dict[Key, Whole], world_sizes: tuple[int, int]) -> bool:
    """Whether the ranks hold the same parts in both runs, as far as their records show."""
    if world_sizes[0] != world_sizes[1]:
        return False
    for key in a.keys() & b.keys():
        if key.rank is None and a[key].shape == b[key].shape:
            places = [{(part.rank, part.entry.shard) for part in run[key].parts} for run in (a, b)]
            if places[0] != places[1]:
                return False
    return True


def comparable(
    a: dict[Key, Whole], b: dict[Key, Whole], world_sizes: tuple[int, int]
) -> tuple[list[Key], dict[str, int]]:
    """Returns the comparable tensors of a step in their order of execution, and why the others are not comparable."""
    left_out: dict[str, int] = {}
    keys = []
    alike = same_layout(a, b, world_sizes)
    for key in merge_orders(list(a), list(b)):
        why = None
        if key.rank is not None and not alike:
            why = "belongs to one rank, and the layouts of the runs differ (give the tensor a Shard)"
        elif key not in a or key not in b:
            why = f"only in run {'a' if key in a else 'b'}"
        else:
            for name, whole in (("a", a[key]), ("b", b[key])):
                if whole.problem is not None:
                    why = f"run {name}: {whole.problem}"
        if why is None:
            keys.append(key)
        else:
            left_out[why] = left_out.get(why, 0) + 1
    return keys, left_out


class _Plan:
    """Everything about a pair of steps that depends on the recorded tensors but not on their sums."""

    def __init__(self, a: Run, b: Run, rows: tuple[list[Row], list[Row]]) -> None:
        self._runs = runs = a, b
        self.keys, self.left_out = comparable(a.tensors(rows[0]), b.tensors(rows[1]), (a.world_size, b.world_size))
        self._compared = set(self.keys)
        entries = [
            [receipt.entries(number) for receipt, (number, _) in zip(run.receipts, of_run)]
            for run, of_run in zip(runs, rows)
        ]
        self._of_ranks = a.keys(rows[0]) if entries[0] == entries[1] else None
        # Where two ranks hold copies, if both runs have recorded the same tensors.
        self._copies: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        first: dict[tuple[Key, Shard], tuple[int, int]] = {}
        for rank, keys in enumerate(self._of_ranks or ()):
            for place, (key, entry) in enumerate(zip(keys, entries[0][rank])):
                if key in self._compared and first.setdefault((key, entry.shard), (rank, place)) != (rank, place):
                    other, place_there = first[key, entry.shard]
                    there, here = self._copies.setdefault((other, rank), ([], []))
                    there.append(place_there)
                    here.append(place)

    def differing(self, rows: tuple[list[Row], list[Row]]) -> set[Key]:
        """The tensors that differ between the rows of two runs, or between the copies of one run."""
        if self._of_ranks is None:
            one, other = (run.tensors(of_run) for run, of_run in zip(self._runs, rows))
            return {key for key in self.keys if what_differs(one[key], other[key]) is not None}
        # Copies that differ only in run b also differ from the copies of run a.
        found = self._copies_that_differ(rows[0])
        for keys, (_, one_sums), (_, other_sums) in zip(self._of_ranks, *rows):
            if one_sums != other_sums:
                found.update(k for k, x, y in zip(keys, unpack("q", one_sums), unpack("q", other_sums)) if x != y)
        return found & self._compared

    def _copies_that_differ(self, rows: list[Row]) -> set[Key]:
        found: set[Key] = set()
        if not self._copies or self._of_ranks is None:
            return found
        sums = [unpack("q", of_rank) for _, of_rank in rows]
        for (there, here), (places_there, places_here) in self._copies.items():
            one, other = operator.itemgetter(*places_there)(sums[there]), operator.itemgetter(*places_here)(sums[here])
            if one != other:
                places = zip(places_there, places_here)
                found.update(self._of_ranks[here][y] for x, y in places if sums[there][x] != sums[here][y])
        return found


def common_steps(a: Run, b: Run) -> list[int]:
    """Returns the steps that all ranks of both runs have recorded."""
    return sorted(set(a.steps) & set(b.steps))


def compare_steps(a: Run, b: Run, progress: Progress | None = None) -> Iterator[Compared]:
    """Compares the steps that both runs have recorded, one after the other."""
    plans: dict[tuple[tuple[int, ...], ...], _Plan] = {}
    steps = common_steps(a, b)
    for done, step in enumerate(steps, 1):
        rows = a.rows(step), b.rows(step)
        sequences = tuple(tuple(number for number, _ in of_run) for of_run in rows)
        if (plan := plans.get(sequences)) is None:
            plan = plans[sequences] = _Plan(a, b, rows)
        yield Compared(step, plan.keys, plan.left_out, plan.differing(rows), rows)
        if progress is not None:
            progress(done, len(steps))

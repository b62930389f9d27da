"""Combines the receipts of all ranks of a run: adds up the parts of each tensor and compares its copies."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Sequence

from .receipt import Receipt, Row
from .shards import Shard, why_not_whole
from .store import Entry, rank_file, unpack

_MODULUS = 1 << 64


@dataclasses.dataclass(frozen=True)
class Key:
    """The identity of a tensor within a step.

    `time` counts the records of one kind and name. `rank` is the rank that owns the tensor alone, or None if several
    ranks hold parts or copies of it.
    """

    kind: str
    name: str
    time: int
    rank: int | None

    def __str__(self) -> str:
        again = f", number {self.time + 1} of this name" if self.time else ""
        of_rank = "" if self.rank is None else f", rank {self.rank}"
        return f"{self.kind} {self.name}{again}{of_rank}"


@dataclasses.dataclass(frozen=True)
class Part:
    """One rank's part of a tensor."""

    rank: int
    entry: Entry
    sum: int


@dataclasses.dataclass(frozen=True)
class Whole:
    """A tensor over all ranks. `copies_differ` lists the groups of ranks whose copies of one part differ."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]
    sum: int | None
    problem: str | None
    copies_differ: tuple[tuple[int, ...], ...]


class Run:
    """The receipts of all ranks of a run.

    Args:
        path: the folder that a Recorder wrote.

    Raises:
        ValueError: the folder does not hold exactly one receipt per rank of one run, or a file is damaged.
        OSError: a file cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        files = sorted(self.path.glob("rank_*.sqlite"))
        if not files:
            raise ValueError(f"the folder must hold receipts (rank_00000.sqlite, ...), got {self.path}")
        with contextlib.ExitStack() as opened:
            self.receipts = [opened.enter_context(contextlib.closing(Receipt(file))) for file in files]
            self._check()
            self._opened = opened.pop_all()
        first = self.receipts[0]
        self.world_size, self.block, self.meta = first.world_size, first.block, first.meta
        self._complete: dict[tuple[Shard, ...], str | None] = {}

    def _check(self) -> None:
        first = self.receipts[0]
        for receipt in self.receipts:
            if (receipt.world_size, receipt.block) != (first.world_size, first.block):
                raise ValueError(f"{receipt.path} and {first.path} must have the same world size and block size")
            if receipt.path != rank_file(self.path, receipt.rank) or receipt.rank >= first.world_size:
                raise ValueError(f"{receipt.path} is the receipt of rank {receipt.rank} of {first.world_size}")
        missing = sorted(set(range(first.world_size)) - {receipt.rank for receipt in self.receipts})
        if missing:
            raise ValueError(f"{self.path} has no receipts of ranks {missing} of {first.world_size}")

    @property
    def steps(self) -> list[int]:
        """Steps that every rank has recorded."""
        common = set(self.receipts[0].steps)
        for receipt in self.receipts[1:]:
            common &= set(receipt.steps)
        return sorted(common)

    @property
    def unfinished(self) -> list[int]:
        """Steps that some rank has not recorded to their end, because it died or because an error ended the step."""
        found = set().union(*(receipt.steps for receipt in self.receipts)) - set(self.steps)
        return sorted(found.union(*(receipt.unfinished for receipt in self.receipts)))

    def rows(self, step: int) -> list[Row]:
        """Returns the records of each rank for a step, still encoded."""
        return [receipt.row(step) for receipt in self.receipts]

    def keys(self, rows: Sequence[Row]) -> list[list[Key]]:
        """Returns the tensors of each rank's row."""
        return [
            [key_of(entry, receipt.rank) for entry in receipt.entries(sequence)]
            for receipt, (sequence, _) in zip(self.receipts, rows)
        ]

    def tensors(self, rows: Sequence[Row]) -> dict[Key, Whole]:
        """Returns the tensors of a step in their order of execution.

        A tensor that only other ranks recorded comes after the tensor that precedes it on those ranks.
        """
        order: list[Key] = []
        parts: dict[Key, list[Part]] = {}
        for receipt, keys, (sequence, sums) in zip(self.receipts, self.keys(rows), rows):
            order = merge_orders(order, keys)
            for key, entry, number in zip(keys, receipt.entries(sequence), unpack("q", sums)):
                parts.setdefault(key, []).append(Part(receipt.rank, entry, number % _MODULUS))
        return {key: self._whole(parts[key]) for key in order}

    def _whole(self, parts: Sequence[Part]) -> Whole:
        entry = parts[0].entry
        shape, dtype = entry.shard.shape, entry.dtype
        other = next((p for p in parts if (p.entry.shard.shape, p.entry.dtype) != (shape, dtype)), None)
        if other is not None:
            problem = (
                f"rank {parts[0].rank} has {list(shape)} of {dtype}, rank {other.rank} has "
                f"{list(other.entry.shard.shape)} of {other.entry.dtype}"
            )
            return Whole(shape, dtype, tuple(parts), None, problem, ())
        by_shard: dict[Shard, list[Part]] = {}
        for part in parts:
            by_shard.setdefault(part.entry.shard, []).append(part)
        distinct = tuple(by_shard)
        if distinct not in self._complete:
            self._complete[distinct] = why_not_whole([shard for shard in distinct if shard.numel] or distinct[:1])
        if (incomplete := self._complete[distinct]) is not None:
            return Whole(shape, dtype, tuple(parts), None, incomplete, ())
        total = 0
        differ: list[tuple[int, ...]] = []
        for copies in by_shard.values():
            by_sum: dict[int, list[int]] = {}
            for part in copies:
                by_sum.setdefault(part.sum, []).append(part.rank)
            if len(by_sum) > 1:
                differ = differ or sorted(map(tuple, by_sum.values()), key=len, reverse=True)
            total += copies[0].sum
        return Whole(shape, dtype, tuple(parts), total % _MODULUS, None, tuple(differ))

    def blocks(self, step: int) -> dict[Key, dict[int, int]]:
        """Returns each tensor's block sums by block number, modulo 2^64; empty unless every rank has kept them."""
        total: dict[Key, dict[int, int]] = {}
        seen: set[tuple[Key, Shard]] = set()
        for receipt in self.receipts:
            kept = receipt.blocks(step)
            if kept is None:
                return {}
            for entry, sums in kept.items():
                key = key_of(entry, receipt.rank)
                if (key, entry.shard) in seen:
                    continue
                seen.add((key, entry.shard))
                of_key = total.setdefault(key, {})
                for number, value in enumerate(sums, entry.first_block):
                    of_key[number] = (of_key.get(number, 0) + value) % _MODULUS
        return total

    def blocks_of_ranks(self, step: int, key: Key) -> dict[int, dict[int, int]]:
        """Returns the block sums of each rank's part of a tensor, for the ranks that have kept them."""
        found: dict[int, dict[int, int]] = {}
        for receipt in self.receipts:
            for entry, sums in (receipt.blocks(step) or {}).items():
                if key_of(entry, receipt.rank) == key:
                    found[receipt.rank] = {n: value % _MODULUS for n, value in enumerate(sums, entry.first_block)}
        return found

    def close(self) -> None:
        """Closes the files."""
        self._opened.close()


def key_of(entry: Entry, rank: int) -> Key:
    """Returns the tensor that a rank's entry is a part or a copy of."""
    return Key(entry.kind, entry.name, entry.time, rank if entry.local else None)


def merge_orders(order: Sequence[Key], other: Sequence[Key]) -> list[Key]:
    """Inserts the keys that only `other` has into `order`, each after its predecessor in `other`."""
    known = set(order)
    following: dict[Key | None, list[Key]] = {}
    before: Key | None = None
    for key in other:
        if key in known:
            before = key
        else:
            following.setdefault(before, []).append(key)
    if not following:
        return list(order)
    merged = following.get(None, [])[:]
    for key in order:
        merged.append(key)
        merged += following.get(key, [])
    return merged

"""A receipt as a file: SQLite, one a rank, written as the run goes.

    meta(key, value)              what the run is: rank, world size, block, versions, the command
    tensor(id, ...)               what is recorded: name, kind, which time in a step, whole shape, dtype, part, scope
    sequence(id, tensors)         ids of tensors in the order of execution, int32; steps that are alike share one
    step(step, ...)               the sum of each tensor of its sequence, int64
    blocks(step, sums)            the sums of all their blocks, one tensor after the other; kept for some steps only

Numbers in BLOBs are little-endian. Fingerprints are in the file as int64, of which the unsigned number is meant.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import json
import pathlib
import sqlite3
import sys
import time
from collections.abc import Iterable, Sequence

from .fingerprints import FINGERPRINT
from .shards import Shard

FORMAT = "1"
_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE tensor(
    id INTEGER PRIMARY KEY, name TEXT, kind TEXT, time INTEGER, shape TEXT, dtype TEXT, ranges TEXT, local INTEGER,
    first_block INTEGER, blocks INTEGER
);
CREATE TABLE sequence(id INTEGER PRIMARY KEY, tensors BLOB UNIQUE);
CREATE TABLE step(step INTEGER PRIMARY KEY, finished REAL, complete INTEGER, sequence INTEGER, sums BLOB);
CREATE TABLE blocks(step INTEGER PRIMARY KEY, sums BLOB);
"""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor that a rank records.

    `time` counts the records of one name and kind in a step, from 0. `local` says that the tensor belongs to its rank
    alone, so that no other rank has a part or a copy of it. `first_block` and `blocks` say which blocks this part has
    words of.
    """

    name: str
    kind: str
    time: int
    dtype: str
    shard: Shard
    local: bool
    first_block: int
    blocks: int


@dataclasses.dataclass(frozen=True)
class Step:
    """What a rank has recorded of a step: entries in their order of execution, and an int64 sum for each."""

    entries: tuple[Entry, ...]
    sums: Sequence[int]


def rank_file(folder: pathlib.Path, rank: int) -> pathlib.Path:
    """Where the receipt of a rank is."""
    return folder / f"rank_{rank:05d}.sqlite"


def _little_endian(numbers: array.array[int]) -> array.array[int]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def pack(code: str, numbers: Iterable[int]) -> bytes:
    """Numbers as a BLOB; `code` is "q" for int64 and "i" for int32."""
    return _little_endian(array.array(code, numbers)).tobytes()


def unpack(code: str, blob: bytes) -> array.array[int]:
    """The numbers of a BLOB."""
    numbers: array.array[int] = array.array(code)
    numbers.frombytes(blob)
    return _little_endian(numbers)


class Writer:
    """Appends the steps of one rank. It is used by one thread at a time.

    Args:
        path: the file.
        meta: what the run is.
        resume: go on with a file that exists. A step that is written again replaces the old one and all after it.

    Raises:
        FileExistsError: the file exists, and `resume` is False.
        ValueError: the file is of another format, fingerprint, block or world size.
    """

    def __init__(self, path: pathlib.Path, meta: dict[str, str], *, resume: bool = False) -> None:
        exists = path.exists()
        if exists and not resume:
            raise FileExistsError(
                f"path must be a folder without receipts of rank {meta['rank']}, got {path.parent}; "
                "resume=True goes on with them"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        # The recorder's thread writes, and another one closes.
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        # A process that dies loses nothing that was committed; a machine that loses power may.
        self._database.execute("PRAGMA synchronous = OFF")
        meta = {"format": FORMAT, "fingerprint": FINGERPRINT, **meta}
        if exists:
            self._check_same_run(path, meta)
        else:
            with self._transaction():
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._database.execute(statement)
        with self._transaction():
            self._database.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta.items())
        self._ids = {entry: number for number, entry in _entries(self._database).items()}
        self._sequences = {bytes(blob): i for i, blob in self._database.execute("SELECT id, tensors FROM sequence")}
        self._seen = not exists

    @contextlib.contextmanager
    def _transaction(self):
        self._database.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _check_same_run(self, path: pathlib.Path, meta: dict[str, str]) -> None:
        old = dict(self._database.execute("SELECT key, value FROM meta"))
        for key in ("format", "fingerprint", "block", "world_size"):
            if old.get(key) != meta[key]:
                self._database.close()
                raise ValueError(
                    f"path must hold receipts of {key} {meta[key]} to go on with, got {path} of {old.get(key)}"
                )

    def _id(self, entry: Entry) -> int:
        if entry not in self._ids:
            number = self._ids[entry] = len(self._ids)
            shard = entry.shard
            self._database.execute(
                "INSERT INTO tensor VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (number, entry.name, entry.kind, entry.time, json.dumps(shard.shape), entry.dtype,
                 json.dumps(shard.ranges), entry.local, entry.first_block, entry.blocks),
            )  # fmt: skip
        return self._ids[entry]

    def write(
        self,
        step: int,
        entries: Sequence[Entry],
        sums: Sequence[int],
        blocks: bytes,
        *,
        complete: bool,
        forget: int,
    ) -> None:
        """Writes a step: the sums of the entries and of all their blocks. Blocks of the step `forget` are dropped."""
        with self._transaction():
            if not self._seen:
                # What an earlier process did after its last checkpoint is done again.
                self._database.execute("DELETE FROM step WHERE step >= ?", (step,))
                self._database.execute("DELETE FROM blocks WHERE step >= ?", (step,))
                self._seen = True
            order = pack("i", [self._id(entry) for entry in entries])
            if order not in self._sequences:
                self._sequences[order] = len(self._sequences)
                self._database.execute("INSERT INTO sequence VALUES (?, ?)", (self._sequences[order], order))
            row = (step, time.time(), complete, self._sequences[order], pack("q", sums))
            self._database.execute("INSERT OR REPLACE INTO step VALUES (?, ?, ?, ?, ?)", row)
            self._database.execute("INSERT OR REPLACE INTO blocks VALUES (?, ?)", (step, blocks))
            self._database.execute("DELETE FROM blocks WHERE step = ?", (forget,))

    def close(self) -> None:
        self._database.close()


def _entries(database: sqlite3.Connection) -> dict[int, Entry]:
    found = {}
    for number, name, kind, count, shape, dtype, ranges, local, first, blocks in database.execute(
        "SELECT id, name, kind, time, shape, dtype, ranges, local, first_block, blocks FROM tensor"
    ):
        shard = Shard(tuple(json.loads(shape)), tuple(tuple(map(tuple, of_dim)) for of_dim in json.loads(ranges)))
        found[number] = Entry(name, kind, count, dtype, shard, bool(local), first, blocks)
    return found


class Receipt:
    """The receipt of one rank, to read.

    Raises:
        ValueError: the file is no receipt that this version can read.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        # Only to read, and beside a process that may be writing.
        self._database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=30)
        try:
            self.meta: dict[str, str] = dict(self._database.execute("SELECT key, value FROM meta"))
            self.steps = [row[0] for row in self._database.execute("SELECT step FROM step ORDER BY step")]
            self.unfinished = {row[0] for row in self._database.execute("SELECT step FROM step WHERE NOT complete")}
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{path} is no receipt: {error}") from None
        for key, wanted in (("format", FORMAT), ("fingerprint", FINGERPRINT)):
            if self.meta.get(key) != wanted:
                raise ValueError(f"{path} has {key} {self.meta.get(key)}, this version of dash_attn reads {wanted}")
        self.rank = int(self.meta["rank"])
        self.world_size = int(self.meta["world_size"])
        self.block = int(self.meta["block"])
        self._entries: dict[int, Entry] = {}
        self._sequences: dict[int, tuple[Entry, ...]] = {}

    def _sequence(self, number: int) -> tuple[Entry, ...]:
        if number not in self._sequences:
            (blob,) = self._database.execute("SELECT tensors FROM sequence WHERE id = ?", (number,)).fetchone()
            ids = unpack("i", blob)
            if any(i not in self._entries for i in ids):
                self._entries = _entries(self._database)
            self._sequences[number] = tuple(self._entries[i] for i in ids)
        return self._sequences[number]

    def step(self, step: int) -> Step | None:
        """What was recorded of a step; None where nothing was."""
        row = self._database.execute("SELECT sequence, sums FROM step WHERE step = ?", (step,)).fetchone()
        return None if row is None else Step(self._sequence(row[0]), unpack("q", row[1]))

    def blocks(self, step: int) -> dict[Entry, Sequence[int]] | None:
        """The sums of the blocks of each tensor of a step; None where they were not kept."""
        row = self._database.execute("SELECT sums FROM blocks WHERE step = ?", (step,)).fetchone()
        recorded = self.step(step)
        if row is None or recorded is None:
            return None
        sums, at = unpack("q", row[0]), 0
        found: dict[Entry, Sequence[int]] = {}
        for entry in recorded.entries:
            found[entry] = sums[at : at + entry.blocks]
            at += entry.blocks
        return found

    def close(self) -> None:
        self._database.close()

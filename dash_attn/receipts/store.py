"""Stores a receipt as a SQLite file, one per rank, while the run goes on. receipt.py reads the file.

    meta(key, value)              the run: rank, world size, block, versions, command
    tensor(id, ...)               a recorded tensor: name, kind, time within the step, whole shape, dtype, part, scope
    sequence(id, tensors)         ids of tensors in the order of execution, int32; equal steps share a sequence
    step(step, ...)               the sum of each tensor of the step's sequence, int64
    blocks(step, sums)            the block sums of these tensors, one tensor after the other; kept for some steps only

Numbers in BLOBs are little-endian. Fingerprints, which are unsigned, are stored as the int64 of the same bits. The last
column of every table is a checksum of the row (`row_crc`), so that a reader can distinguish damage from a difference.

While a run goes on, a write-ahead log (`-wal` and `-shm`) lies next to the file. A reader therefore never blocks the
writer, and a killed process leaves whole steps. `Writer.close` folds the log into the file. The writer holds a SQLite
lock on an empty file `.lock`, which keeps a second writer out.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import functools
import json
import pathlib
import sqlite3
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence

from .fingerprints import FINGERPRINT
from .shards import Shard

FORMAT = "2"
LOCK_WAIT_S = 30.0  # how long to wait for another connection's lock on a receipt
_COLUMNS = {
    "meta": "key TEXT PRIMARY KEY, value TEXT",
    "tensor": "id INTEGER PRIMARY KEY, name TEXT, kind TEXT, time INTEGER, shape TEXT, dtype TEXT, ranges TEXT, "
    "local INTEGER, first_block INTEGER, blocks INTEGER",
    "sequence": "id INTEGER PRIMARY KEY, tensors BLOB UNIQUE",
    "step": "step INTEGER PRIMARY KEY, finished REAL, complete INTEGER, sequence INTEGER, sums BLOB",
    "blocks": "step INTEGER PRIMARY KEY, sums BLOB",
}
_SCHEMA = {table: f"CREATE TABLE {table}({columns}, crc INTEGER)" for table, columns in _COLUMNS.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor that a rank records.

    `time` counts the records of one name and kind in a step, from 0. `local` says that the tensor belongs to its rank
    alone, so that no other rank has a part or a copy of it. `first_block` and `blocks` give the blocks that this part
    has words of.
    """

    name: str
    kind: str
    time: int
    dtype: str
    shard: Shard
    local: bool
    first_block: int
    blocks: int


def rank_file(folder: pathlib.Path, rank: int) -> pathlib.Path:
    """Returns the path of a rank's receipt."""
    return folder / f"rank_{rank:05d}.sqlite"


def _little_endian(numbers: array.array[int]) -> array.array[int]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def pack(code: str, numbers: Iterable[int]) -> bytes:
    """Encodes numbers as a BLOB; `code` is "q" for int64 and "i" for int32."""
    return _little_endian(array.array(code, numbers)).tobytes()


def unpack(code: str, blob: bytes) -> array.array[int]:
    """Decodes the numbers of a BLOB."""
    numbers: array.array[int] = array.array(code)
    numbers.frombytes(blob)
    return _little_endian(numbers)


def row_crc(table: str, row: Iterable[object]) -> int:
    """Computes the checksum of a table's row from the values that SQLite returns."""
    crc = zlib.crc32(table.encode())
    for value in row:
        content = value if isinstance(value, bytes) else repr(value).encode()
        crc = zlib.crc32(content, zlib.crc32(b"%d " % len(content), crc))
    return crc


def checked(table: str, row: tuple) -> tuple:
    """Verifies a row and returns it without its checksum.

    Raises:
        ValueError: the checksum does not match the row.
    """
    *values, crc = row
    if crc != row_crc(table, values):
        raise ValueError(f"a row of its table {table} does not match its checksum")
    return tuple(values)


def is_locked(error: sqlite3.Error) -> bool:
    """Whether the error says that another connection holds a lock (Python 3.10 has no error codes)."""
    return "locked" in str(error)


class Writer:
    """Appends the steps of one rank. Only one thread may use the writer at a time.

    Args:
        path: the file.
        meta: the description of the run.
        resume: continue an existing file. A step that is written again replaces the old one and all steps after it.

    Raises:
        FileExistsError: the file exists, and `resume` is False.
        ValueError: the file has another format, fingerprint, block size, rank or world size; the file is damaged or
            locked; another writer has it open; or its .lock file is not empty.
        OSError: SQLite cannot write into the folder.
    """

    def __init__(self, path: pathlib.Path, meta: dict[str, str], *, resume: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            opened.enter_context(contextlib.closing(_lock(path)))
            exists = path.exists()
            if exists and not resume:
                raise FileExistsError(
                    f"path must be a folder without receipts of rank {meta['rank']}, got {path.parent}; "
                    "resume=True continues them"
                )
            # SQLite reopens the log of a closed receipt, for which it needs exclusive access to the file.
            locked = (
                f"path must hold receipts that no other process has locked, got {path}, which has been locked for more "
                f"than {LOCK_WAIT_S:g} seconds: close the process that reads it"
            )
            damaged = f"path must hold receipts that can be continued, got {path}, which is not a receipt"
            with _explained(path, locked=locked, damaged=damaged):
                # One thread writes, and another thread closes the connection.
                self._database = sqlite3.connect(
                    path, timeout=LOCK_WAIT_S, check_same_thread=False, isolation_level=None
                )
                opened.enter_context(contextlib.closing(self._database))
                # Text that is not valid UTF-8 then fails the checksum of its row.
                self._database.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
                self._begin(path, {"format": FORMAT, "fingerprint": FINGERPRINT, **meta})
            self._opened = opened.pop_all()
        self._seen = not exists

    def _begin(self, path: pathlib.Path, meta: dict[str, str]) -> None:
        (mode,) = self._database.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise OSError(f"path must be on a file system that supports shared memory, got {path.parent}")
        # The death of the process loses nothing that was committed; a power failure may.
        self._database.execute("PRAGMA synchronous = OFF")
        with self._transaction():
            # A process that was killed right after it started leaves a file without tables.
            if tables := dict(self._database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")):
                if tables != _SCHEMA:
                    raise ValueError(
                        f"path must hold receipts that can be continued, got {path}, whose tables are not of format "
                        f"{FORMAT}"
                    )
                self._check_same_run(path, meta)
                (found,) = self._database.execute("PRAGMA quick_check(1)").fetchone()
                if found != "ok":
                    what = found.splitlines()[-1]
                    raise ValueError(f"path must hold receipts that can be continued, got {path}, damaged: {what}")
            else:
                for statement in _SCHEMA.values():
                    self._database.execute(statement)
            for row in meta.items():
                self._insert("meta", row)
        try:
            self._ids = {entry: number for number, entry in read_entries(self._database).items()}
            sequences = [checked("sequence", row) for row in self._database.execute("SELECT * FROM sequence")]
        except ValueError as error:
            raise ValueError(f"path must hold receipts that can be continued, got {path}, damaged: {error}") from None
        self._sequences = {blob: number for number, blob in sequences}

    @contextlib.contextmanager
    def _transaction(self):
        # IMMEDIATE takes the write lock here, and not in the middle of the transaction.
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _insert(self, table: str, row: Sequence[object]) -> None:
        marks = ", ".join("?" * (len(row) + 1))
        self._database.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", (*row, row_crc(table, row)))

    def _check_same_run(self, path: pathlib.Path, meta: dict[str, str]) -> None:
        old = dict(self._database.execute("SELECT key, value FROM meta"))
        for key in ("format", "fingerprint", "block", "rank", "world_size"):
            if old.get(key) != meta[key]:
                raise ValueError(f"path must hold receipts whose {key} is {meta[key]}, got {path} with {old.get(key)}")

    def _id(self, entry: Entry) -> int:
        if entry not in self._ids:
            number = self._ids[entry] = len(self._ids)
            shape, ranges = json.dumps(entry.shard.shape), json.dumps(entry.shard.ranges)
            self._insert(
                "tensor",
                (number, entry.name, entry.kind, entry.time, shape, entry.dtype, ranges, int(entry.local),
                 entry.first_block, entry.blocks),
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
        """Writes a step: the sums of its entries and of all their blocks. Drops the block sums of the step `forget`."""
        with self._transaction():
            if not self._seen:
                # A resumed run repeats the steps that an earlier process recorded after its last checkpoint.
                self._database.execute("DELETE FROM step WHERE step >= ?", (step,))
                self._database.execute("DELETE FROM blocks WHERE step >= ?", (step,))
                self._seen = True
            order = pack("i", [self._id(entry) for entry in entries])
            if order not in self._sequences:
                self._sequences[order] = len(self._sequences)
                self._insert("sequence", (self._sequences[order], order))
            self._insert("step", (step, time.time(), int(complete), self._sequences[order], pack("q", sums)))
            self._insert("blocks", (step, blocks))
            self._database.execute("DELETE FROM blocks WHERE step = ?", (forget,))

    def close(self) -> None:
        with self._opened:
            try:
                # The receipt becomes a single file, which can be copied and read from a read-only file system.
                self._database.execute("PRAGMA busy_timeout = 0")
                self._database.execute("PRAGMA journal_mode = DELETE")
            except sqlite3.OperationalError as error:
                # A reader has the file open, so the log stays. It is read together with the file.
                if not is_locked(error):
                    raise


@contextlib.contextmanager
def _explained(path: pathlib.Path, *, locked: str, damaged: str) -> Iterator[None]:
    """Turns SQLite's errors in the block into errors about the argument `path`."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if is_locked(error):
            raise ValueError(locked) from None
        raise OSError(f"path must be a folder in which SQLite can write, got {path.parent}: {error}") from None
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{damaged}: {error}") from None


def _lock(path: pathlib.Path) -> sqlite3.Connection:
    """Returns a lock that ends with this process in any case and that forked processes do not inherit."""
    file = path.with_suffix(".lock")
    locked = (
        f"path must be a folder that no other recorder writes to, got {path.parent}: another recorder has "
        f"{path.name} open"
    )
    with _explained(path, locked=locked, damaged=f"path must be a folder whose .lock files are empty, got {file}"):
        lock = sqlite3.connect(file, timeout=0, check_same_thread=False, isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
    return lock


def read_entries(database: sqlite3.Connection) -> dict[int, Entry]:
    """Reads the tensors of a receipt, by their ids.

    Raises:
        ValueError: a row is damaged.
    """
    found = {}
    for row in database.execute("SELECT * FROM tensor"):
        number, name, kind, time, shape, dtype, ranges, local, first, blocks = checked("tensor", row)
        shard = Shard(tuple(json.loads(shape)), tuple(tuple(map(tuple, of_dim)) for of_dim in json.loads(ranges)))
        found[number] = Entry(name, kind, time, dtype, shard, bool(local), first, blocks)
    return found

"""Reads a receipt: while its process writes it, after that process was killed, and from read-only file systems."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence

import torch

from .fingerprints import FINGERPRINT, block_span
from .store import FORMAT, LOCK_WAIT_S, Entry, checked, is_locked, read_entries, unpack

_MODULUS = 1 << 64
_WRONG_CONTENT = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError

Row = tuple[int, bytes]
"""The number of the step's sequence of tensors, and their sums as int64."""
NO_ROW: Row = (-1, b"")


class _UnreadableError(ValueError):
    """An error whose message already names the file."""


class Receipt:
    """Reads the receipt of one rank. Never writes into the receipt's folder.

    Every method raises the errors of the constructor.

    Raises:
        ValueError: the file is not a receipt that this version can read, or it is damaged or locked.
        OSError: the file cannot be read.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._entries: dict[int, Entry] = {}
        self._sequences: dict[int, tuple[Entry, ...]] = {-1: ()}
        self._kept: tuple[int, dict[Entry, Sequence[int]] | None] | None = None
        with contextlib.ExitStack() as opened:
            with self._reading():
                try:
                    self._open(path, opened, "ro")
                except sqlite3.OperationalError as error:
                    if is_locked(error):
                        raise
                    # A killed process leaves a journal or log, which SQLite must be able to replay into a writable
                    # file.
                    folder = pathlib.Path(opened.enter_context(tempfile.TemporaryDirectory()))
                    for name in (path.name, f"{path.name}-journal", f"{path.name}-wal"):
                        if name == path.name or path.with_name(name).exists():
                            shutil.copyfile(path.with_name(name), folder / name)  # without its permissions
                    self._open(folder / path.name, opened, "rw")
                self._read()
            self._opened = opened.pop_all()

    def _open(self, path: pathlib.Path, opened: contextlib.ExitStack, mode: str) -> None:
        uri = f"{path.resolve().as_uri()}?mode={mode}"
        self._database = opened.enter_context(contextlib.closing(sqlite3.connect(uri, uri=True, timeout=LOCK_WAIT_S)))
        # The checksums of rows do not reveal missing rows; this check does.
        (found,) = self._database.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise ValueError(found)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns any error about the file's content into one ValueError that names the file."""
        try:
            yield
        except _UnreadableError:
            raise
        except (sqlite3.Error, *_WRONG_CONTENT) as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, sqlite3.Error) and is_locked(error):
                reason = f"another process has kept the file locked for more than {LOCK_WAIT_S:g} seconds"
            raise _UnreadableError(f"{self.path} cannot be read as a receipt: {reason}") from None

    def _read(self) -> None:
        rows = list(self._database.execute("SELECT * FROM meta"))
        found = {row[0]: row[1] for row in rows}
        for key, wanted in (("format", FORMAT), ("fingerprint", FINGERPRINT)):
            if found.get(key) != wanted:
                raise ValueError(f"its {key} is {found.get(key)}, but this version of dash_attn reads {wanted}")
        self.meta: dict[str, str] = dict(checked("meta", row) for row in rows)
        if missing := {"folder", "command"} - self.meta.keys():
            raise ValueError(f"its table meta lacks {' and '.join(sorted(missing))}")
        self.rank = int(self.meta["rank"])
        self.world_size = int(self.meta["world_size"])
        self.block = int(self.meta["block"])
        self.steps: list[int] = []
        self.unfinished: set[int] = set()
        for row in self._database.execute("SELECT * FROM step ORDER BY step"):
            step, _, complete, _, _ = checked("step", row)
            self.steps.append(step)
            if not complete:
                self.unfinished.add(step)

    def row(self, step: int) -> Row:
        """Returns the records of a step, or NO_ROW if the step has none."""
        with self._reading():
            found = self._database.execute("SELECT * FROM step WHERE step = ?", (step,)).fetchone()
            if found is None:
                return NO_ROW
            *_, sequence, sums = checked("step", found)
            if len(sums) != 8 * len(self.entries(sequence)):
                raise ValueError(f"step {step} does not have one sum per tensor")
            return sequence, sums

    def entries(self, sequence: int) -> tuple[Entry, ...]:
        """Returns the tensors of a sequence in their order of execution."""
        if sequence not in self._sequences:
            with self._reading():
                found = self._database.execute("SELECT * FROM sequence WHERE id = ?", (sequence,)).fetchone()
                if found is None:
                    raise ValueError(f"sequence {sequence} is missing")
                ids = unpack("i", checked("sequence", found)[1])
                if any(i not in self._entries for i in ids):
                    self._entries = read_entries(self._database)
                    for entry in self._entries.values():
                        self._check(entry)
                self._sequences[sequence] = tuple(self._entries[i] for i in ids)
        return self._sequences[sequence]

    def _check(self, entry: Entry) -> None:
        dtype = getattr(torch, entry.dtype)
        if not isinstance(dtype, torch.dtype) or not isinstance(entry.name, str) or not isinstance(entry.kind, str):
            raise ValueError(f"a tensor entry is invalid: {entry}")
        if block_span(entry.shard, dtype, self.block) != (entry.first_block, entry.blocks):
            raise ValueError(f"the blocks of {entry.kind} {entry.name} do not match its shape")

    def blocks(self, step: int) -> dict[Entry, Sequence[int]] | None:
        """Returns the block sums of each tensor of a step; None if they were not kept."""
        if self._kept is None or self._kept[0] != step:
            with self._reading():
                self._kept = step, self._blocks(step)
        return self._kept[1]

    def _blocks(self, step: int) -> dict[Entry, Sequence[int]] | None:
        # One statement reads both rows, because a writing process may replace the step between two statements.
        both = self._database.execute("SELECT * FROM step JOIN blocks USING (step) WHERE step = ?", (step,)).fetchone()
        if both is None:
            return None
        *_, sequence, of_tensors = checked("step", both[:6])
        _, of_blocks = checked("blocks", (step, *both[6:]))
        sums, at = unpack("q", of_blocks), 0
        found: dict[Entry, Sequence[int]] = {}
        for entry, whole in zip(self.entries(sequence), unpack("q", of_tensors), strict=True):
            found[entry] = sums[at : at + entry.blocks]
            at += entry.blocks
            if (sum(found[entry]) - whole) % _MODULUS:
                raise ValueError(f"the blocks of {entry.kind} {entry.name} in step {step} do not add up to its sum")
        if at != len(sums):
            raise ValueError(f"step {step} has {len(sums)} block sums, but its tensors have {at} blocks")
        return found

    def close(self) -> None:
        self._opened.close()

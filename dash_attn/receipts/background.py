"""A thread that waits for the GPU instead of the trainer and writes each step when its sums have arrived."""

from __future__ import annotations

import ctypes
import dataclasses
import queue
import threading
from collections.abc import Collection, Sequence

import torch

from .store import Entry, Writer, pack, unpack

# The number of steps that may wait for the GPU or the disk. The trainer blocks when there are more.
_QUEUE = 16


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A step whose sums may still be in flight.

    `sums` holds the block sums of each entry, and `streams` are the CUDA streams that compute them.
    """

    step: int
    entries: Sequence[Entry]
    sums: Sequence[torch.Tensor]
    streams: Collection[torch.cuda.Stream]
    complete: bool
    forget: int


@dataclasses.dataclass(frozen=True)
class _Arriving:
    recorded: Recorded
    # For each device: the indices of its entries, their sums concatenated on the host, and the event of the copy's end.
    rows: list[tuple[list[int], torch.Tensor, torch.cuda.Event | None]]


def _send(recorded: Recorded) -> _Arriving:
    """Starts the copies to the host without waiting for them."""
    of_device: dict[torch.device, list[int]] = {}
    for place, sums in enumerate(recorded.sums):
        of_device.setdefault(sums.device, []).append(place)
    rows = []
    for stream in recorded.streams:
        # The sums are concatenated on the current stream, but a tap may have been called on another stream.
        torch.cuda.current_stream(stream.device).wait_stream(stream)
    for device, places in of_device.items():
        row = torch.cat([recorded.sums[place] for place in places])
        event = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
                host.copy_(row, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            row = host
        rows.append((places, row.cpu(), event))
    return _Arriving(recorded, rows)


def _write(writer: Writer, arriving: _Arriving) -> None:
    recorded = arriving.recorded
    found: dict[int, list[int]] = {}
    for places, row, event in arriving.rows:
        if event is not None:
            event.synchronize()
        numbers, at = unpack("q", ctypes.string_at(row.data_ptr(), 8 * row.numel())) if row.numel() else [], 0
        for place in places:
            count = recorded.entries[place].blocks
            found[place] = list(numbers[at : at + count])
            at += count
    ordered = [found[place] for place in range(len(recorded.entries))]
    sums = [wrap(sum(of_blocks)) for of_blocks in ordered]
    blocks = pack("q", [number for of_blocks in ordered for number in of_blocks])
    writer.write(recorded.step, recorded.entries, sums, blocks, complete=recorded.complete, forget=recorded.forget)


def wrap(number: int) -> int:
    """Returns the int64 that equals a number modulo 2^64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


class BackgroundWriter:
    """Writes steps in order, in a thread of its own.

    Raises:
        RuntimeError: from `put` and `close`, if an earlier step could not be written. The message gives the reason.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._queue: queue.Queue[_Arriving | None] = queue.Queue(_QUEUE)
        self._error: BaseException | None = None
        # A daemon thread, so that a trainer that ends with an error does not hang.
        self._thread = threading.Thread(target=self._run, name="dash_attn.receipts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (arriving := self._queue.get()) is not None:
            # The queue is emptied even after an error, so that the trainer does not wait forever.
            if self._error is None:
                try:
                    _write(self._writer, arriving)
                except BaseException as error:  # any error must reach the trainer's thread
                    self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"receipts could not be written: {self._error}") from self._error

    def put(self, recorded: Recorded) -> None:
        """Queues a step. Blocks only while too many steps are in flight."""
        self._check()
        self._queue.put(_send(recorded))

    def close(self) -> None:
        """Writes the remaining steps and closes the file."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
            self._writer.close()
        self._check()

"""Streams of one GPU that take turns, so that the end of one task is filled by the beginning of another.

A chunk under the causal mask has long and short work tiles, and a task ends when its longest does. Where the next one
does not go on with the same sums, its thread blocks take the SMs that are free by then. A CPU has one turn after the
other.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_STREAMS = 2


class Held(NamedTuple):
    """A tensor that others may still use."""

    x: Tensor
    wait: Callable[[], object]
    """Called before it is used: of a GPU's, the current stream waits then, not the host."""


class Turns:
    """A context, in which all that the current stream will have behind it is done in `turn` and `message`.

    Args:
        like: a tensor of the device.
    """

    def __init__(self, like: Tensor):
        self._like = like
        self._is_cuda = like.is_cuda
        self._streams: collections.deque[torch.cuda.Stream] = collections.deque()
        # By their sizes and dtypes, those that have been free for longest first.
        self._free: dict[tuple[int, torch.dtype], collections.deque[Held]] = collections.defaultdict(collections.deque)
        if self._is_cuda:
            self._outer = torch.cuda.current_stream(like.device)
            self._messages, *streams = _streams_of(like.device)
            self._streams += streams
            for stream in (self._messages, *self._streams):
                stream.wait_stream(self._outer)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Around a task: it runs beside those of other turns, and after those of whose tensors it has called `wait`."""
        if not self._is_cuda:
            yield
            return
        self._streams.rotate()
        with torch.cuda.stream(self._streams[0]):
            yield

    @contextlib.contextmanager
    def message(self) -> Iterator[None]:
        """Around the beginning of a message, which no task's turn is to hold up."""
        if not self._is_cuda:
            yield
            return
        with torch.cuda.stream(self._messages):
            yield

    def begun(self) -> Callable[[], object]:
        """What waits for all that has been begun in this turn."""
        if not self._is_cuda:
            return _nothing
        event = torch.cuda.Event()
        event.record()
        return lambda: torch.cuda.current_stream().wait_event(event)

    def take(self, size: int, dtype: torch.dtype) -> Held:
        """Space of one dimension. Its memory is the outer stream's, so that it may be freed behind the context.

        The spaces that were given back last are not handed out: a task that took one would wait for the message in it.
        """
        if len(free := self._free[size, dtype]) > _STREAMS:
            return free.popleft()
        if not self._is_cuda:
            return Held(self._like.new_empty(size, dtype=dtype), _nothing)
        with torch.cuda.stream(self._outer):
            return Held(self._like.new_empty(size, dtype=dtype), _nothing)

    def give_back(self, x: Tensor, wait: Callable[[], object]) -> None:
        """Space that has been taken, free when `wait` says so."""
        self._free[x.numel(), x.dtype].append(Held(x, wait))

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """The outer stream waits for all turns, and, unless there was an error, for what has been given back."""
        if error is None:
            for held in (held for free in self._free.values() for held in free):
                held.wait()
        # After an error too: the outer stream's memory, which they use, is about to be freed.
        if self._is_cuda:
            for stream in (self._messages, *self._streams):
                self._outer.wait_stream(stream)


@functools.cache
def _streams_of(device: torch.device) -> list[torch.cuda.Stream]:
    """Always the same: torch's allocator keeps memory for each stream that had some."""
    return [torch.cuda.Stream(device) for _ in range(1 + _STREAMS)]


def _nothing() -> None:
    pass

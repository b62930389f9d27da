"""Streams of one GPU that take turns, so that the beginning of one task fills the GPU at the end of another.

A chunk under the causal mask has long and short work tiles, and a task ends only with its longest. If the next task
does not continue the same sums, its thread blocks run on the SMs that are already free. On a CPU, the turns run one
after the other.
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
    """A tensor that other streams may still use."""

    x: Tensor
    wait: Callable[[], object]
    """Call this before you use the tensor. On a GPU the current stream waits, not the host."""


class Turns:
    """A context manager whose `turn` and `message` contain all work that the current stream will later depend on.

    Args:
        like: a tensor on the device.
    """

    def __init__(self, like: Tensor):
        self._like = like
        self._is_cuda = like.is_cuda
        self._streams: collections.deque[torch.cuda.Stream] = collections.deque()
        # Free spaces by size and dtype, the longest free first.
        self._free: dict[tuple[int, torch.dtype], collections.deque[Held]] = collections.defaultdict(collections.deque)
        if self._is_cuda:
            self._outer = torch.cuda.current_stream(like.device)
            self._messages, *streams = _streams_of(like.device)
            self._streams += streams
            for stream in (self._messages, *self._streams):
                stream.wait_stream(self._outer)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Encloses a task, which runs concurrently with other turns except those whose tensors it has waited for."""
        if not self._is_cuda:
            yield
            return
        self._streams.rotate()
        with torch.cuda.stream(self._streams[0]):
            yield

    @contextlib.contextmanager
    def message(self) -> Iterator[None]:
        """Encloses the start of a message, which no task's turn may delay."""
        if not self._is_cuda:
            yield
            return
        with torch.cuda.stream(self._messages):
            yield

    def begun(self) -> Callable[[], object]:
        """Returns a function that waits for everything started in this turn."""
        if not self._is_cuda:
            return _nothing
        event = torch.cuda.Event()
        event.record()
        return lambda: torch.cuda.current_stream().wait_event(event)

    def take(self, size: int, dtype: torch.dtype) -> Held:
        """Returns space of one dimension. Its memory belongs to the outer stream and may be freed after the context.

        The spaces that were given back last are not reused: a task that took one would wait for the message in it.
        """
        if len(free := self._free[size, dtype]) > _STREAMS:
            return free.popleft()
        if not self._is_cuda:
            return Held(self._like.new_empty(size, dtype=dtype), _nothing)
        with torch.cuda.stream(self._outer):
            return Held(self._like.new_empty(size, dtype=dtype), _nothing)

    def give_back(self, x: Tensor, wait: Callable[[], object]) -> None:
        """Returns space that was taken. The space is free after `wait`."""
        self._free[x.numel(), x.dtype].append(Held(x, wait))

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """The outer stream waits for all turns and, unless there was an error, for the spaces that were given back."""
        if error is None:
            for held in (held for free in self._free.values() for held in free):
                held.wait()
        # Also after an error: the turns use memory of the outer stream, which is about to be freed.
        if self._is_cuda:
            for stream in (self._messages, *self._streams):
                self._outer.wait_stream(stream)


@functools.cache
def _streams_of(device: torch.device) -> list[torch.cuda.Stream]:
    """Returns the same streams every time, because torch's allocator keeps memory for each stream that had some."""
    return [torch.cuda.Stream(device) for _ in range(1 + _STREAMS)]


def _nothing() -> None:
    pass

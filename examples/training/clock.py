"""Times of steps, and of attention and MLP in each layer, from marks that cause no waiting.

On a GPU a mark is a CUDA event on the compute stream. Nothing waits for it: the marks of a step are read when the last
one has passed, while later steps are being computed (MegaScale, arXiv 2402.15627, section 5.1). On a CPU a mark is the
current time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

REGIONS = ("attention", "mlp")
PASSES = ("forward", "backward")
Mark = Any  # torch.cuda.Event, or float seconds


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """The times of one step on one rank: seconds, and milliseconds by (region, pass) with one value per layer."""

    step: int
    seconds: float
    milliseconds: dict[tuple[str, str], list[float]]


class _Begin(torch.autograd.Function):
    """Marks the begin of a region in the forward, and its end in the backward."""

    @staticmethod
    def forward(ctx: Any, clock: Clock, region: str, layer: int, *tensors: torch.Tensor) -> Any:
        ctx.place = clock, region, layer
        clock.note(region, "forward", layer, 0)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        clock, region, layer = ctx.place
        clock.note(region, "backward", layer, 1)
        return None, None, None, *gradients


class _End(torch.autograd.Function):
    """Marks the end of a region in the forward, and its begin in the backward."""

    @staticmethod
    def forward(ctx: Any, clock: Clock, region: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        ctx.place = clock, region, layer
        clock.note(region, "forward", layer, 1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        clock, region, layer = ctx.place
        clock.note(region, "backward", layer, 0)
        return None, None, None, gradient


class Clock:
    """The clock of one rank.

    Args:
        device: cpu or cuda.
        layers: the number of layers of the model.
        inside: a function that is called within every region, before its end, with the region's name, pass and layer;
            for injected faults.
    """

    def __init__(
        self, device: torch.device, layers: int, inside: Callable[[str, str, int], None] | None = None
    ) -> None:
        self._cuda, self._layers, self._inside = device.type == "cuda", layers, inside
        self._free: list[Mark] = []
        self._marks: dict[tuple[str, str, int, int], Mark] = {}
        self._waiting: collections.deque[tuple[int, Mark, Mark, dict]] = collections.deque()
        self.step_number: int | None = None
        self.place = "before the first region"

    def mark(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self, region: str, of_pass: str, layer: int, end: int) -> None:
        """Marks the begin (0) or end (1) of a region."""
        self.place = f"the {of_pass} of layer {layer}'s {region}" if not end else f"after {self.place}"
        if end and self._inside is not None:
            self._inside(region, of_pass, layer)
        if self.step_number is not None:
            self._marks[region, of_pass, layer, end] = self.mark()

    def begin(self, region: str, layer: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Marks the begin of a region. Use the result in place of `tensors`."""
        return _Begin.apply(self, region, layer, *tensors)

    def end(self, region: str, layer: int, result: torch.Tensor) -> torch.Tensor:
        """Marks the end of a region. Use the returned tensor in place of `result`."""
        return _End.apply(self, region, layer, result)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Encloses a step."""
        self.step_number, self._marks = number, {}
        start = self.mark()
        yield
        self._waiting.append((number, start, self.mark(), self._marks))
        self.step_number = None

    def finished(self, *, wait: bool = False) -> Iterator[StepTimes]:
        """Yields the steps that the device has finished since the last call, in order; with `wait`, all steps."""
        while self._waiting:
            number, start, stop, marks = self._waiting[0]
            if self._cuda and not stop.query():
                if not wait:
                    return
                stop.synchronize()
            self._waiting.popleft()
            found: dict[tuple[str, str], list[float]] = {}
            for region in REGIONS:
                for of_pass in PASSES:
                    keys = [(region, of_pass, layer) for layer in range(self._layers)]
                    if all((*key, 1) in marks for key in keys):
                        found[region, of_pass] = [self._between(marks[(*key, 0)], marks[(*key, 1)]) for key in keys]
            yield StepTimes(number, self._between(start, stop) / 1000, found)
            if self._cuda:
                self._free += [start, stop, *marks.values()]

    def _between(self, start: Mark, stop: Mark) -> float:
        return start.elapsed_time(stop) if self._cuda else 1000 * (stop - start)

"""What a run leaves in its folder: config.json, losses.txt of rank 0, and times/rank_00000.jsonl of every rank.

Losses and times are written when the device has them, so that nothing waits; `flush` waits. A run that goes on from a
checkpoint writes the steps after it again.
"""

from __future__ import annotations

import collections
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .clock import Clock, StepTimes

CONFIG, LOSSES, TIMES, CHECKPOINTS, TRACES = "config.json", "losses.txt", "times", "checkpoints", "traces"
# What may be another when a run goes on: where, how and by what it is computed.
_MAY_CHANGE = {"ranks", "context", "order", "device", "attention", "deterministic", "peak_tflops", "text"}


def check_config(folder: pathlib.Path, config: dict[str, Any], *, resume: bool) -> None:
    """Whether the run of a folder can begin, or go on.

    Raises:
        FileExistsError: there is one, and `resume` is False.
        ValueError: the one that is there is of another model, data or optimizer.
    """
    path = folder / CONFIG
    if not path.exists():
        return
    if not resume:
        raise FileExistsError(f"--out must be a folder without a run, got {str(folder)!r}; --resume goes on with it")
    old = json.loads(path.read_text())
    for name, value in config.items():
        if name not in _MAY_CHANGE and old.get(name) != value:
            raise ValueError(f"the run in --out {str(folder)!r} has {name} {old.get(name)}, got {value}")


def _kept(path: pathlib.Path, before: int, step_of: Callable[[str], int]) -> list[str]:
    """The lines of a file that are of steps before `before`; the last may have been cut short."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n") and step_of(line) < before]


class Files:
    """Of one rank.

    Args:
        folder, rank: where, and whose.
        start: the step that the run begins with; lines of it and of later ones are done again.
        config: of the run.
        show: called with the step, the loss and the times of each step, in order, on rank 0.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        rank: int,
        start: int,
        config: dict[str, Any],
        show: Callable[[int, float, StepTimes], None],
    ) -> None:
        (folder / TIMES).mkdir(parents=True, exist_ok=True)
        self._show, self._is_first = show, rank == 0
        self._losses: collections.deque[tuple[int, torch.Tensor]] = collections.deque()
        times, losses = folder / TIMES / f"rank_{rank:05d}.jsonl", folder / LOSSES
        lines = _kept(times, start, lambda line: json.loads(line)["step"])
        self._times_file = times.open("w")
        self._times_file.writelines(lines)
        if self._is_first:
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            lines = _kept(losses, start, lambda line: int(line.split()[0]))
            self._losses_file = losses.open("w")
            self._losses_file.writelines(lines)

    def put_loss(self, step: int, loss: torch.Tensor) -> None:
        """Within the step's marks: what has been copied when they have passed."""
        if loss.is_cuda:
            host = torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True)
            loss = host.copy_(loss, non_blocking=True)
        self._losses.append((step, loss))

    def write(self, times: Iterable[StepTimes]) -> None:
        """The steps that are done."""
        for found in times:
            record = {"step": found.step, "seconds": found.seconds}
            record |= {f"{region} {of_pass}": ms for (region, of_pass), ms in found.milliseconds.items()}
            self._times_file.write(json.dumps(record) + "\n")
            step, loss = self._losses.popleft()
            assert step == found.step
            if self._is_first:
                value = loss.item()
                # Every bit of it, and the number for people.
                self._losses_file.write(f"{step} {value.hex()} {value:.6f}\n")
                self._show(step, value, found)

    def flush(self, clock: Clock) -> None:
        """Waits for the steps that are on their way, and hands all to the disk."""
        self.write(clock.finished(wait=True))
        self._times_file.flush()
        if self._is_first:
            self._losses_file.flush()

    def close(self, clock: Clock) -> None:
        self.flush(clock)
        self._times_file.close()
        if self._is_first:
            self._losses_file.close()

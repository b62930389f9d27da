"""The files in a run's folder: config.json, losses.txt of rank 0, and times/rank_00000.jsonl of every rank.

Losses and times are written when the device has computed them, so that nothing waits; `flush` waits. A run that
continues from a checkpoint rewrites the steps after it. A kill at any moment keeps every line of the steps before that
checkpoint.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .clock import Clock, StepTimes
from .safe_files import replace_text

CONFIG, LOSSES, TIMES, CHECKPOINTS, TRACES = "config.json", "losses.txt", "times", "checkpoints", "traces"
# The settings that may change when a run continues: where, how and with which software it is computed.
_MAY_CHANGE = {"ranks", "context", "order", "device", "attention", "deterministic", "peak_tflops", "text"}


def read_config(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns the configuration of a run; None if there is no config.json.

    Raises:
        ValueError: the file is truncated or damaged.
    """
    path = folder / CONFIG
    if not path.exists():
        return None
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError(f"it holds a {type(config).__name__}")
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} must be a JSON object with the run's settings, got a damaged file ({error}); restore it"
        ) from None
    return config


def check_config(folder: pathlib.Path, config: dict[str, Any], *, resume: bool) -> None:
    """Checks that a run can begin or continue in a folder.

    Raises:
        FileExistsError: the folder holds a run, and `resume` is False.
        ValueError: the existing run has another model, data or optimizer, or its config.json is damaged.
    """
    if not resume:
        if any((folder / name).exists() for name in (CONFIG, LOSSES, CHECKPOINTS)):
            raise FileExistsError(
                f"--out must be a folder without a run, got {str(folder)!r}; --resume continues the run"
            )
        return
    old = read_config(folder)
    if old is None:
        return
    for name, value in config.items():
        if name not in _MAY_CHANGE and old.get(name) != value:
            raise ValueError(f"the run in --out {str(folder)!r} has {name} {old.get(name)}, got {value}")


def read_lines(path: pathlib.Path, step_of: Callable[[str], int]) -> list[tuple[int, str]]:
    """Returns the lines of a file, each with its step; none without a file. A truncated last line is ignored.

    Raises:
        ValueError: a line has no step.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True) if path.exists() else []):
        if line.endswith("\n"):
            try:
                found.append((step_of(line), line))
            except (ValueError, KeyError, TypeError, IndexError):
                raise ValueError(
                    f"{str(path)!r} must have lines of steps, got a damaged line {number + 1}: {line[:40]!r}"
                ) from None
    return found


def step_of_times(line: str) -> int:
    return json.loads(line)["step"]


def step_of_loss(line: str) -> int:
    return int(line.split()[0])


def _keep_before(path: pathlib.Path, step: int, step_of: Callable[[str], int]) -> None:
    """Removes the lines of `step` and later steps from a file, which is complete at every moment."""
    replace_text(path, "".join(line for of_step, line in read_lines(path, step_of) if of_step < step))


class Files:
    """The files of one rank.

    Args:
        folder: the folder of the run.
        rank: the rank.
        start: the step at which the run begins; lines of this and later steps are written again.
        config: the configuration of the run.
        show: a function that is called with the step, the loss and the times of each step, in order, on rank 0.
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
        times = folder / TIMES / f"rank_{rank:05d}.jsonl"
        _keep_before(times, start, step_of_times)
        # Line-buffered, so that a kill loses only the line that is being written.
        self._times_file = times.open("a", buffering=1)
        if self._is_first:
            replace_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
            # Files of ranks that the run no longer has.
            for other in (folder / TIMES).glob("rank_*.jsonl"):
                if int(other.stem.removeprefix("rank_")) >= config["ranks"]:
                    _keep_before(other, start, step_of_times)
            _keep_before(folder / LOSSES, start, step_of_loss)
            self._losses_file = (folder / LOSSES).open("a", buffering=1)

    def put_loss(self, step: int, loss: torch.Tensor) -> None:
        """Copies the loss within the step's marks, so that it has arrived when they have passed."""
        if loss.is_cuda:
            host = torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True)
            loss = host.copy_(loss, non_blocking=True)
        self._losses.append((step, loss))

    def write(self, times: Iterable[StepTimes]) -> None:
        """Writes the steps that are finished."""
        for found in times:
            record = {"step": found.step, "seconds": found.seconds}
            record |= {f"{region} {of_pass}": ms for (region, of_pass), ms in found.milliseconds.items()}
            self._times_file.write(json.dumps(record) + "\n")
            step, loss = self._losses.popleft()
            assert step == found.step
            if self._is_first:
                value = loss.item()
                # The exact value, and a decimal for readers.
                self._losses_file.write(f"{step} {value.hex()} {value:.6f}\n")
                self._show(step, value, found)

    def flush(self, clock: Clock) -> None:
        """Waits for the steps in flight, and until all lines are on the disk."""
        self.write(clock.finished(wait=True))
        for file in (self._times_file, *([self._losses_file] if self._is_first else [])):
            file.flush()
            os.fsync(file.fileno())

    def close(self, clock: Clock) -> None:
        self.flush(clock)
        self._times_file.close()
        if self._is_first:
            self._losses_file.close()

"""Faults that a run injects into itself, to show that they are detected."""

from __future__ import annotations

import os
import signal
import time

import torch

_SMALL = 1 << 19  # bytes: torch's allocator keeps tensors of up to 1 MiB separate
# Approximately the H200's clock rate; a sleeping kernel counts cycles.
_CYCLES_PER_MS = 1_700_000


class Fault:
    """A fault to inject: `kill:RANK:STEP` or `slow:RANK:MILLISECONDS`.

    `kill` ends a rank's process in the forward of a step. `slow` delays every attention and MLP of a rank, forward and
    backward, by so many milliseconds (on a GPU with a kernel that sleeps).

    Raises:
        ValueError: `text` has another form, or the rank is not one of `ranks`.
    """

    def __init__(self, text: str | None, rank: int, ranks: int, device: torch.device) -> None:
        self.step: int | None = None
        self._kind, self._number, self._device = "", 0.0, device
        if text is None:
            return
        kind, _, rest = text.partition(":")
        of_rank, _, number = rest.partition(":")
        try:
            where, self._number = int(of_rank), float(number)
            if kind not in ("kill", "slow") or not 0 <= where < ranks:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"--fault must be kill:RANK:STEP or slow:RANK:MILLISECONDS for one of {ranks} ranks, got {text!r}"
            ) from None
        self._kind = kind if where == rank else ""

    def __call__(self, region: str, of_pass: str, layer: int) -> None:
        if self._kind == "kill" and self.step == self._number and of_pass == "forward" and layer == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._kind == "slow":
            if self._device.type == "cuda":
                torch.cuda._sleep(int(self._number * _CYCLES_PER_MS))
            else:
                time.sleep(self._number / 1000)


def leave_stale_memory(device: torch.device, gib: float) -> None:
    """Fills memory with NaN and frees it, so that torch's allocator reuses it for the next allocations.

    Raises:
        ValueError: `gib` is negative, or it is not 0 and the device is a CPU.
    """
    if gib < 0 or gib and device.type != "cuda":
        raise ValueError(f"--stale-memory must be at least 0, and 0 without a GPU, got {gib:g} on {device.type}")
    # Bytes with all bits set are NaN in every floating-point type.
    sizes = [int(gib * (1 << 30)), *[_SMALL] * 256] if gib else []
    held = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
    del held

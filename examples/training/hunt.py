"""A hunt for a run that does not repeat: many equal runs of one process, several at a time, compared with each other.

`examples/train_proof.py --hunt` is its command.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import torch

from dash_attn.receipts import Comparison, compare

from .files import LOSSES

RECEIPTS = "receipts"
_GRACE_S = 30
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def all_threads() -> dict[str, str]:
    """Returns this process's environment without limits on the number of CPU threads."""
    return {name: value for name, value in os.environ.items() if name not in _THREADS}


def visible_gpus() -> list[str]:
    """Returns the GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (named.split(",") if named else [str(gpu) for gpu in range(64)])[: torch.cuda.device_count()]


def _end(process: subprocess.Popen) -> None:
    """Ends a session, with SIGTERM first: torchrun's workers have their own sessions, which only torchrun can end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end:
            process.poll()
            os.killpg(process.pid, 0)  # raises an error when no process is left
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def beside(commands: list[str], folder: pathlib.Path) -> Iterator[list[str]]:
    """Runs shell commands in a loop during the block. Their output goes to FOLDER/load_0.log and so on.

    Yields a list that receives a text whenever a command fails, because the requested load is then missing.
    """
    ended = threading.Event()
    failed: list[str] = []

    def keep(command: str, log: pathlib.Path) -> None:
        with log.open("w") as file:
            while not ended.is_set():
                # A new session, so that all of its processes can be ended.
                process = subprocess.Popen(
                    command, shell=True, start_new_session=True, stdout=file, stderr=subprocess.STDOUT
                )
                while process.poll() is None and not ended.wait(0.1):
                    pass
                if process.poll():
                    failed.append(f"{command!r} ended with status {process.returncode}, see {log}")
                _end(process)
                ended.wait(1)

    threads = [threading.Thread(target=keep, args=(c, folder / f"load_{n}.log")) for n, c in enumerate(commands)]
    for thread in threads:
        thread.start()
    try:
        yield failed
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def differ(one: pathlib.Path, other: pathlib.Path) -> Comparison | None:
    """Compares two runs' receipts; returns None if the receipts and the losses are the same."""
    found = compare(one / RECEIPTS, other / RECEIPTS)
    equal = (one / LOSSES).read_bytes() == (other / LOSSES).read_bytes()
    return None if equal and found.first is None and not found.not_compared else found


def hunt(
    start: Callable[[int], pathlib.Path | None], runs: int, *, jobs: int, seconds: float, say: Callable[[str], None]
) -> list[list[pathlib.Path]]:
    """Makes runs and returns groups of runs with the same losses and receipts, the largest group first.

    Only the folder of the first run of each group is kept.

    Args:
        start: a function that makes the run of a number and returns its folder, or None for a run that failed.
        runs: the number of runs.
        jobs: the number of concurrent runs.
        seconds: the time after which no further run starts.
        say: a function that is called immediately with a text about each run that begins another group.
    """
    groups: list[list[pathlib.Path]] = []
    end = time.monotonic() + seconds

    def in_time(number: int) -> pathlib.Path | None:
        return start(number) if time.monotonic() < end else None

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(in_time, number) for number in range(runs)]
        try:
            for done in concurrent.futures.as_completed(waiting):
                if (folder := done.result()) is None:
                    continue
                parting = None
                for group in groups:
                    found = differ(group[0], folder)
                    if found is None:
                        group.append(folder)
                        shutil.rmtree(folder)
                        break
                    parting = parting or (group[0], found)
                else:
                    groups.append([folder])
                    if parting is not None:
                        say(_text(*parting, folder))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return sorted(groups, key=len, reverse=True)


def _text(one: pathlib.Path, found: Comparison, other: pathlib.Path) -> str:
    first = found.first
    if first is None:
        return f"{other.name} differs from {one.name} only in losses; not compared: {found.not_compared}"
    counts = ", ".join(f"{kind} {some} of {of}" for kind, (some, of) in first.differing.items())
    blocks = "?" if first.blocks is None else len(first.blocks)
    return (
        f"{other.name} differs from {one.name} in step {first.step}, first at {first.key}: {first.what}, {blocks} of "
        f"{first.block_count} blocks; equal before it: {first.after}; likely cause {first.cause}; in this step {counts}"
    )

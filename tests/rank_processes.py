"""Processes that are the ranks of one group: how tests start them, and how they find each other."""

import datetime
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import torch.distributed as dist

import dash_attn

LIMIT_S = 600
GRACE_S = 20  # for the others to end when one has failed


def run_ranks(
    script: str,
    ranks: int,
    folder: pathlib.Path,
    *arguments: str,
    must_succeed: bool = True,
    limit_s: float = LIMIT_S,
    environment: dict[str, str] | None = None,
    frozen: int | None = None,
) -> list[str]:
    """Starts `script RANK RANKS PORT FOLDER *arguments` for every rank, and returns what each has printed.

    The store of the group lives here, so that any of the ranks may die. With `must_succeed` the others are ended some
    time after one that has failed. A rank that is to be `frozen` is not waited for. Multicast over NVLink is off.
    """
    here, package = pathlib.Path(__file__).parent, pathlib.Path(dash_attn.__file__).parents[1]
    environment = os.environ | (environment or {})
    environment |= {"PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])}
    environment |= {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Files, not pipes: a rank that prints much must not wait for the one that is read first.
    logs = [folder / f"log_of_rank_{rank}.txt" for rank in range(ranks)]
    workers = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, here / script, str(rank), str(ranks), str(store.port), folder, *arguments]
            with log.open("w") as file:
                workers.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment))
        _wait([worker for rank, worker in enumerate(workers) if rank != frozen], must_succeed, limit_s)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    texts = [log.read_text(errors="replace") for log in logs]
    assert not must_succeed or all(worker.returncode == 0 for worker in workers), "\n".join(texts)
    return texts


def _wait(workers: list[subprocess.Popen], must_succeed: bool, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
        if must_succeed and any(worker.poll() for worker in workers):
            deadline = min(deadline, time.monotonic() + GRACE_S)
            must_succeed = False
        time.sleep(0.02)


def join(rank: int, ranks: int, port: int, timeout_s: float, backend: str = "gloo") -> None:
    """Makes a process that `run_ranks` has started a rank of the group."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # Processes may start at very different times on a busy machine; that is no part of the timeout.
    store.set(f"here/{rank}", "1")
    store.wait([f"here/{other}" for other in range(ranks)], datetime.timedelta(seconds=200))
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def refused(function: Callable[[], object], kind: type[Exception], message: str) -> bool:
    """Whether `function` raises an error of this kind whose text contains `message`."""
    try:
        function()
    except kind as error:
        return message in str(error)
    return False

"""Processes that are the ranks of one gloo group, for the tests of dash_attn.distributed."""

import os
import pathlib
import subprocess
import sys

import torch.distributed as dist

import dash_attn

LIMIT_S = 400


def run_ranks(script: str, ranks: int, folder: pathlib.Path, *arguments: str, must_succeed: bool = True) -> list[str]:
    """Starts `script RANK RANKS PORT FOLDER *arguments` for every rank, and returns what each has printed.

    The store of the group lives here, so that any of the ranks may die.
    """
    here, package = pathlib.Path(__file__).parent, pathlib.Path(dash_attn.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])}
    environment["OMP_NUM_THREADS"] = "1"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = [
        subprocess.Popen(
            [sys.executable, here / script, str(rank), str(ranks), str(store.port), folder, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        logs = [worker.communicate(timeout=LIMIT_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert not must_succeed or all(worker.returncode == 0 for worker in workers), "\n".join(logs)
    return logs

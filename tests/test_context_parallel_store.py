"""A store that freezes or dies ends no call that does not need it, and hangs no rank, in a call or at its exit."""

import json
import pathlib
import subprocess
import sys
import time

import pytest
from context_parallel_store import TIMEOUT_S
from rank_processes import run_ranks

RANKS = 3
EXIT_S = 100.0  # also to start three processes, on a busy machine
STORE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def store_process():
    """The arguments of a worker: the port and the process of a store that is in no rank."""
    process = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True)
    yield [process.stdout.readline().strip(), str(process.pid)]
    process.kill()
    process.communicate()


def outcomes(folder: pathlib.Path, *arguments: str, frozen: int | None = None) -> list[tuple[str, str, float]]:
    """Of the ranks that are not frozen, which have to end by themselves."""
    began, limit_s = time.monotonic(), 3 * TIMEOUT_S + EXIT_S
    logs = run_ranks(
        "context_parallel_store.py", RANKS, folder, *arguments, must_succeed=False, limit_s=limit_s, frozen=frozen
    )
    assert time.monotonic() - began < limit_s, logs
    return [json.loads(log.splitlines()[-1]) for rank, log in enumerate(logs) if rank != frozen]


def test_a_frozen_rank_that_has_the_store(tmp_path):
    for error, text, seconds in outcomes(tmp_path, "freezes", frozen=0):
        assert error == "RankError" and "the job's store does not answer" in text, text
        assert seconds < TIMEOUT_S + 3


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["a slow rank", "a slow rank and a killed store"])
def test_calls_that_need_no_store_go_on_without_it(tmp_path, store_process, fault):
    found = outcomes(tmp_path, fault, *store_process)
    assert [error for error, *_ in found] == ["none"] * RANKS, found


@pytest.mark.slow
def test_a_rank_that_stalls_while_the_store_is_frozen(tmp_path, store_process):
    for rank, (error, text, seconds) in enumerate(outcomes(tmp_path, "a rank that stalls", *store_process)):
        assert error == "RankError" and (rank == 1 or "the job's store does not answer" in text), text
        assert rank == 1 or seconds < TIMEOUT_S + 3


@pytest.mark.slow
def test_a_group_that_needs_the_store(tmp_path, store_process):
    for error, text, seconds in outcomes(tmp_path, "a new group", *store_process):
        assert error == "RankError" and "a gloo group of the ranks [0, 1, 2] of the job cannot be created" in text
        assert seconds < TIMEOUT_S + 3

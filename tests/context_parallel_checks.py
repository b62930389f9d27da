"""What context parallelism has computed, against one process, byte by byte: for the tests on CPUs and on GPUs."""

import json
import pathlib

import torch
from context_parallel_worker import Case, of_rank
from rank_processes import LIMIT_S, run_ranks


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(as_bytes(x), as_bytes(y))


def check_bytes(of_ranks: list[dict[str, torch.Tensor]], case: Case, expected: dict[str, torch.Tensor]) -> None:
    """Every rank has its part of what one process has."""
    for rank, results in enumerate(of_ranks):
        assert results.keys() == expected.keys()
        for key, whole in expected.items():
            assert same_bytes(results[key], of_rank(case, key, whole, rank, len(of_ranks))), (rank, key)


def outcomes(folder: pathlib.Path, ranks: int, *arguments: str, limit_s: float = LIMIT_S) -> list[dict[str, list]]:
    """For every rank, {fault: (name of the error, its message, its ranks, seconds)}."""
    logs = run_ranks(
        "context_parallel_faults.py", ranks, folder, *arguments, must_succeed=False, limit_s=limit_s
    )  # fmt: skip
    lines = [[json.loads(line) for line in log.splitlines() if line.startswith('["')] for log in logs]
    assert lines[0], logs
    return [{fault: outcome for fault, *outcome in of_rank} for of_rank in lines]

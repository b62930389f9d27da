"""dash_attn.distributed over NCCL: every byte as in one call on one GPU, and no wait for the GPU."""

import functools

import pytest
import torch
from context_parallel_checks import check_bytes
from context_parallel_worker import cases_of, on_one_process
from rank_processes import run_ranks

if not (torch.distributed.is_nccl_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch has no NCCL or no gloo", allow_module_level=True)

DEVICE = "cuda"
RUNS_RANKS = True


ALL_CASES = cases_of(DEVICE, 1) | cases_of(DEVICE, 2) | cases_of(DEVICE, 4)


@functools.cache
def expected(name):
    return on_one_process(ALL_CASES[name], DEVICE)


@pytest.fixture(scope="module")
def of_all_ranks(tmp_path_factory):
    @functools.cache
    def run(ranks):
        folder = tmp_path_factory.mktemp(f"ranks_{ranks}")
        run_ranks("context_parallel_worker.py", ranks, folder, DEVICE)
        return [torch.load(folder / f"rank_{rank}.pt") for rank in range(ranks)]

    return run


def check(of_ranks, name):
    check_bytes([results[name] for results in of_ranks], ALL_CASES[name], expected(name))


@pytest.mark.parametrize("name", cases_of(DEVICE, 1))
def test_one_rank(of_all_ranks, name):
    check(of_all_ranks(1), name)


@pytest.mark.parametrize("ranks, calls", [(1, 1), (2, 2), (4, 3)])
def test_the_host_does_not_wait_for_the_gpu(of_all_ranks, ranks, calls):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for results in of_all_ranks(ranks):
        assert len(results["waits"]) == calls and not any(results["waits"].values()), results["waits"]


@pytest.mark.parametrize("name", ALL_CASES)
def test_several_ranks(of_all_ranks, name):
    ranks = min(torch.cuda.device_count(), 4)
    if ranks < 2:
        pytest.skip(f"needs 2 GPUs, got {ranks}")
    if name not in cases_of(DEVICE, ranks):
        pytest.skip(f"is not for {ranks} ranks")
    check(of_all_ranks(ranks), name)

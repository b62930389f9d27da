"""PyTorch's context parallelism over NCCL with dash_attn in each process, on one GPU each."""

import pytest
import torch

pytest.importorskip(
    "torch.distributed.tensor.experimental._context_parallel", reason="this torch has no context parallelism",
    exc_type=ImportError,
)  # fmt: skip
if not torch.distributed.is_nccl_available():
    pytest.skip("this torch has no NCCL", allow_module_level=True)

import torch_context_parallel_support as support  # noqa: E402

SEQLEN = 1024  # a multiple of what any number of processes halves
RUNS_RANKS = True


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return support.runs(tmp_path_factory, "cuda", SEQLEN)


cases = pytest.mark.parametrize("case", range(len(support.CASES)), ids=map(str, support.CASES))


@cases
def test_one_process(results, case):
    """The bits of one call without context parallelism."""
    support.check(results(1), case, SEQLEN)


@cases
def test_several_processes(results, case):
    """The bits repeat. They are not those of one process: the parts are merged from their log-sum-exps."""
    processes = min(torch.cuda.device_count(), 4)
    if processes < 2:
        pytest.skip(f"needs 2 GPUs, got {processes}")
    support.check(results(processes), case, SEQLEN)

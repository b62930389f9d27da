"""Context parallelism and tensor parallelism by heads over NCCL: the bits of one GPU while all have other work.

And what is wrong on one rank is an error on all.
"""

import json

import pytest
import torch
from context_parallel_checks import outcomes
from context_parallel_faults import WRONG_RANK
from context_parallel_load import NAMES
from rank_processes import run_ranks

if not (torch.distributed.is_nccl_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch has no NCCL or no gloo", allow_module_level=True)

SEQLEN, REPEATS = 8192, 100
LIMIT_S = 300  # `join` waits for slow starts
RUNS_RANKS = True

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bits_under_load(tmp_path, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    logs = run_ranks(
        "context_parallel_load.py", ranks, tmp_path, str(SEQLEN), str(REPEATS), "cuda", limit_s=LIMIT_S
    )  # fmt: skip
    for log in logs:
        counts = json.loads(log.splitlines()[-1])
        assert len(counts) == (4 if ranks == 1 else 5)
        assert all(of_call == dict.fromkeys(NAMES, 0) for of_call in counts.values()), counts


@needs_two_gpus
def test_faults(tmp_path):
    """None of the first ones is an end; the last one is."""
    faults = {
        "shape": ("RankError", "q must be the same on every rank: rank 1 got "),
        "type": ("RankError", "rank 1 cannot do its call: TypeError: v must be a torch.Tensor"),
        "value": ("RankError", "k of rank 1 must be finite"),
        "value of a gradient": ("RankError", "dout of rank 1 must be finite"),
        "nothing": ("none", ""),
        "dies before the backward": ("RankError", "rank 1 died or stalls"),
    }
    of_ranks = outcomes(tmp_path, 2, "--cuda", *faults, limit_s=LIMIT_S)
    for fault, (kind, message) in faults.items():
        error, text, ranks, _ = of_ranks[0][fault]
        assert error == kind and message in text, (fault, error, text)
        assert ranks == ([WRONG_RANK] if kind == "RankError" else [])
        if fault == "type":
            assert of_ranks[WRONG_RANK][fault][0] == "TypeError"
        elif not fault.startswith("dies"):
            assert of_ranks[WRONG_RANK][fault][0] == kind


@needs_two_gpus
def test_a_rank_that_dies(tmp_path):
    of_ranks = outcomes(tmp_path, 2, "--cuda", "nothing", "dies", limit_s=LIMIT_S)
    error, text, ranks, _ = of_ranks[0]["dies"]
    assert error == "RankError" and ranks == [WRONG_RANK] and "rank 1 died or stalls" in text
    assert "dies" not in of_ranks[WRONG_RANK]

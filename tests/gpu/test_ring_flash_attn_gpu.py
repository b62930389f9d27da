"""ring-flash-attn on top of dash_attn, on GPUs: right, and the same bits again."""

import importlib.util

import pytest
import torch
from ring_checks import WORLD_SIZE, check_against_full_attention, run_ring
from ring_worker import CASES

RUNS_RANKS = True


@pytest.mark.skipif(importlib.util.find_spec("ring_flash_attn") is None, reason="ring-flash-attn is not installed")
@pytest.mark.skipif(torch.cuda.device_count() < WORLD_SIZE, reason=f"needs {WORLD_SIZE} GPUs")
def test_ring_flash_attn(tmp_path):
    folders = [tmp_path / kernels for kernels in ("dash_attn", "eager")]
    for folder in folders:
        folder.mkdir()
    ranks, eager_ranks = run_ring(folders[0], "cuda"), run_ring(folders[1], "cpu", "eager")
    for name in CASES:
        check_against_full_attention(ranks, eager_ranks, name)
    differs = {name: [results[name]["differs"] for results in ranks] for name in CASES}
    assert not any(map(any, differs.values())), differs

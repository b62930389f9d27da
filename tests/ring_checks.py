"""ring-flash-attn on several processes, and its results against full attention: for the tests on CPUs and on GPUs."""

import pathlib

import torch
from float64_reference import attention_float64, attention_in_dtype, sequences_of
from rank_processes import run_ranks
from ring_worker import CASES, LENGTHS, inputs, rows_of

WORLD_SIZE = 2


def run_ring(folder: pathlib.Path, device: str) -> list[dict]:
    """What each of the processes has left."""
    # It merges parts in TorchScript, which compiles what has run once: a second run would have other roundings.
    run_ranks("ring_worker.py", WORLD_SIZE, folder, device, environment={"PYTORCH_JIT": "0"})
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(WORLD_SIZE)]


def check_against_full_attention(ranks: list[dict], name: str) -> None:
    """As near to float64 as PyTorch's own operators at bf16 are on one process."""
    case = CASES[name]
    *tensors, dout = inputs(case)
    dimension = 0 if case.is_pack else 1
    actual = dict(zip(("out", "dq", "dk", "dv"), (torch.full_like(x, torch.nan) for x in (dout, *tensors))))
    for rank, results in enumerate(ranks):
        for key, whole in actual.items():
            whole.index_copy_(dimension, rows_of(case, rank, WORLD_SIZE), results[name][key])
    sequences = [slice(None)]
    if case.is_pack:
        sequences = sequences_of([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    for rows in sequences:
        sequence = [x[None, rows] if case.is_pack else x for x in (*tensors, dout)]
        exact = attention_float64(*sequence, causal=case.causal)
        eager = attention_in_dtype(*sequence, causal=case.causal)
        for key, whole in actual.items():
            truth = getattr(exact, key)
            error = (whole[rows].view(truth.shape).double() - truth).norm()
            assert error <= (getattr(eager, key).double() - truth).norm(), key

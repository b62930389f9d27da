"""ring-flash-attn on several processes, and how near its results are to full attention: on CPUs and on GPUs."""

import pathlib

import torch
from float64_reference import attention_float64, sequences_of
from rank_processes import run_ranks
from ring_worker import CASES, LENGTHS, inputs, rows_of

WORLD_SIZE = 2


def run_ring(folder: pathlib.Path, device: str, kernels: str = "dash_attn") -> list[dict]:
    """What each of the processes has left, of a ring on ours or on PyTorch's own operators ("eager")."""
    # It merges parts in TorchScript, which compiles what has run once: a second run would have other roundings.
    run_ranks("ring_worker.py", WORLD_SIZE, folder, device, kernels, environment={"PYTORCH_JIT": "0"})
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(WORLD_SIZE)]


def whole_results(ranks: list[dict], name: str) -> dict[str, torch.Tensor]:
    """Of all rows, from those of the ranks."""
    case = CASES[name]
    *tensors, dout = inputs(case)
    found = dict(zip(("out", "dq", "dk", "dv"), (torch.full_like(x, torch.nan) for x in (dout, *tensors))))
    for rank, results in enumerate(ranks):
        for key, whole in found.items():
            whole.index_copy_(0 if case.is_pack else 1, rows_of(case, rank, WORLD_SIZE), results[name][key])
    return found


def check_against_full_attention(ranks: list[dict], eager_ranks: list[dict], name: str) -> None:
    """Each sequence as near to float64 as a ring of PyTorch's own operators at bf16, whose parts are rounded too."""
    case = CASES[name]
    *tensors, dout = inputs(case)
    actual, eager = whole_results(ranks, name), whole_results(eager_ranks, name)
    sequences = [slice(None)]
    if case.is_pack:
        sequences = sequences_of([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    for rows in sequences:
        exact = attention_float64(*(x[None, rows] if case.is_pack else x for x in (*tensors, dout)), causal=case.causal)
        for key in actual:
            truth = getattr(exact, key)
            error, allowed = ((x[key][rows].view(truth.shape).double() - truth).norm() for x in (actual, eager))
            assert error <= allowed, f"{key} of rows {rows}: {error / allowed:.3f} of the eager ring's error"

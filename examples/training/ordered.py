"""Sums over ranks in the order of the ranks, and torch's own switches for determinism.

The order of NCCL's sums depends on its version, its algorithm and the placement of the GPUs. Here collectives only
copy, and each rank adds the parts that it receives in the order of the ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# The new name since torch 2.13, in which the old name warns.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def prepare(deterministic: bool) -> None:
    """Sets what must be set before CUDA is initialized."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def deterministic_torch(deterministic: bool) -> Iterator[None]:
    """Sets torch's switches for everything except attention: scatters, embeddings, matrix products, cuDNN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switches = [
        # No step reads uninitialized memory, and filling fresh memory takes time.
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
        (torch.backends.cudnn, "deterministic", deterministic),
        (torch.backends.cudnn, "benchmark", False),
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", not deterministic),
    ]
    values = [getattr(owner, name) for owner, name, _ in switches]
    try:
        torch.use_deterministic_algorithms(deterministic)
        for owner, name, value in switches:
            setattr(owner, name, value)
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        for (owner, name, _), value in zip(switches, values, strict=True):
            setattr(owner, name, value)


class ReduceScatter:
    """For FSDP2's `set_custom_reduce_scatter`: sends as many bytes as NCCL's, and adds in our order if `ordered`."""

    def __init__(self, ordered: bool) -> None:
        self.ordered = ordered

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if not self.ordered:
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        if op != dist.ReduceOp.SUM or async_op:
            raise ValueError(f"op must be SUM with async_op=False, got {op}, async_op={async_op}")
        of_ranks = torch.empty_like(input_tensor)
        dist.all_to_all_single(of_ranks, input_tensor, group=group)
        add_up(list(of_ranks.view(dist.get_world_size(group), -1)), out=output_tensor)
        return None


def add_up(parts: list[torch.Tensor], *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Adds the first part and the second, then the third, and so on."""
    out = parts[0].clone() if out is None else out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)
    return out


def all_ranks_sum(x: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a tensor over all ranks, on each rank, without waiting for the GPU."""
    flat = x.detach().reshape(-1)
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat)
    return add_up(parts).view(x.shape)


@torch.no_grad()
def clip_gradients(parameters: list[torch.nn.Parameter], norm: float) -> None:
    """Does what `torch.nn.utils.clip_grad_norm_` does to DTensors, with a sum over ranks in the order of the ranks."""
    gradients = [p.grad.to_local() for p in parameters if p.grad is not None]  # type: ignore[attr-defined]
    own = add_up([gradient.float().square().sum() for gradient in gradients])
    factor = (norm / (all_ranks_sum(own).sqrt() + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor)

"""One of two processes that run ring-flash-attn's functions: see test_compat_ring.py.

    python ring_worker.py RANK WORLD_SIZE PORT FOLDER cpu|cuda dash_attn|eager

On top of dash_attn, or of PyTorch's own operators; with "cuda" on one GPU each. It leaves FOLDER/rank_RANK.pt:
{case: {"out", "dq", "dk", "dv": of this rank's rows, "differs": those of which a second run had other bits}}.
"""

import importlib
import importlib.util
import pathlib
import sys
import types
from typing import NamedTuple

import eager_kernels
import torch
import torch.distributed as dist
from rank_processes import join

from dash_attn.compat import flash_attn_2

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
BATCH, SEQLEN = 2, 96
LENGTHS = (32, 8, 56)
TOTAL = sum(LENGTHS)


class Case(NamedTuple):
    module: str
    function: str
    causal: bool
    rows: str
    """Which rows a rank has: a name of `rows_of`."""

    @property
    def is_pack(self) -> bool:
        return "varlen" in self.module


KERNELS = {"dash_attn": flash_attn_2, "eager": eager_kernels}
CASES = {
    "ring_full": Case("ring_flash_attn", "ring_flash_attn_func", False, "chunk"),
    "ring_causal": Case("ring_flash_attn", "ring_flash_attn_func", True, "chunk"),
    "zigzag": Case("zigzag_ring_flash_attn", "zigzag_ring_flash_attn_func", True, "zigzag"),
    "stripe": Case("stripe_flash_attn", "stripe_flash_attn_func", True, "stripe"),
    "ring_varlen": Case("ring_flash_attn_varlen", "ring_flash_attn_varlen_func", True, "chunk"),
    "zigzag_varlen": Case("zigzag_ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen_func", True, "zigzag"),
    "llama3": Case("llama3_flash_attn_varlen", "llama3_flash_attn_varlen_func", True, "whole pack"),
}  # fmt: skip


def inputs(case: Case) -> list[torch.Tensor]:
    """q, k, v and dout of all ranks."""
    generator = torch.Generator().manual_seed(1)
    rows = (TOTAL,) if case.is_pack else (BATCH, SEQLEN)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(*rows, n, HEAD_DIM, generator=generator).bfloat16() for n in heads]


def rows_of(case: Case, rank: int, world_size: int) -> torch.Tensor:
    """The rows of a rank, along the dimension of rows."""
    if case.rows == "whole pack":
        return torch.arange(TOTAL).chunk(world_size)[rank]
    rows, start = [], 0
    for length in LENGTHS if case.is_pack else (SEQLEN,):
        sequence = torch.arange(start, start + length)
        if case.rows == "stripe":
            rows.append(sequence[rank::world_size])
        elif case.rows == "chunk":
            rows.append(sequence.chunk(world_size)[rank])
        else:
            chunks = sequence.chunk(2 * world_size)
            rows += [chunks[rank], chunks[2 * world_size - 1 - rank]]
        start += length
    return torch.cat(rows)


def import_ring(name: str, kernels: types.ModuleType = flash_attn_2):
    """A module of ring_flash_attn on these kernels; not its __init__, which wants parts of transformers."""
    if "ring_flash_attn" not in sys.modules:
        stub = types.ModuleType("ring_flash_attn")
        stub.__path__ = list(importlib.util.find_spec("ring_flash_attn").submodule_search_locations)
        package = types.ModuleType("flash_attn")
        package.flash_attn_interface = kernels
        names = {"flash_attn": package, "flash_attn.flash_attn_interface": kernels, "ring_flash_attn": stub}
        sys.modules.update(names)
    return importlib.import_module(f"ring_flash_attn.{name}")


def run(case: Case, rank: int, world_size: int, device: str, kernels: str) -> list[torch.Tensor]:
    """Output and gradients of this rank's rows."""
    module, rows = import_ring(case.module, KERNELS[kernels]), rows_of(case, rank, world_size)
    q, k, v, dout = (x.index_select(0 if case.is_pack else 1, rows).to(device) for x in inputs(case))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    offsets = []
    if case.rows == "whole pack":
        whole = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
        *offsets, local_k_slice = module.llama3_flash_attn_prepare_cu_seqlens(whole, case.causal, rank, world_size)
        offsets += [1, local_k_slice]  # key heads that are gathered at a time
    elif case.is_pack:
        own = [length // world_size for length in LENGTHS]
        offsets = [torch.tensor([0, *own], device=device).cumsum(0).int(), max(own)]
    out = getattr(module, case.function)(*tensors, *offsets, causal=case.causal)
    return [x.cpu() for x in (out.detach(), *torch.autograd.grad(out, tensors, dout))]


def main(rank: int, world_size: int, port: int, folder: pathlib.Path, device: str, kernels: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    join(rank, world_size, port, 120, "nccl" if device == "cuda" else "gloo")
    results = {}
    for name, case in CASES.items():
        first, second = (run(case, rank, world_size, device, kernels) for _ in range(2))
        results[name] = dict(zip(("out", "dq", "dk", "dv"), first))
        differ = (key for key, x, y in zip(tuple(results[name]), first, second) if not torch.equal(x, y))
        results[name]["differs"] = list(differ)
    torch.save(results, folder / f"rank_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), pathlib.Path(sys.argv[4]), *sys.argv[5:])

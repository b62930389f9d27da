"""Attention of one long sequence over several processes, with the bits of one process.

    torchrun --nproc-per-node 2 examples/context_parallel_ulysses.py

Each process uses one GPU over NCCL, or the CPU with dash_attn's reference over gloo if there is no GPU. Every process
holds a part of the sequence's rows, in both layouts in turn. Each process also computes the whole sequence alone, and
compares the bytes of its part of the output, the log-sum-exp and the gradients.
"""

import argparse
import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dash_attn import flash_attn_func
from dash_attn.distributed import LAYOUTS, context_parallel_attention, shard

NAMES = ("out", "softmax_lse", "dq", "dk", "dv")


def results(attention, q, k, v, dout):
    """Returns the output, the log-sum-exp and the gradients of `attention(q, k, v)`."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, softmax_lse, _ = attention(*leaves, causal=True, return_attn_probs=True)
    return [out.detach(), softmax_lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def as_bytes(x):
    return x.contiguous().flatten().view(torch.uint8)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=65_536 if device == "cuda" else 600, help="tokens")
    parser.add_argument("--heads", type=int, default=32 if device == "cuda" else 8, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8 if device == "cuda" else 4, help="at least one per process")
    parser.add_argument("--head-dim", type=int, default=128 if device == "cuda" else 32, help="columns of q, k and v")
    arguments = parser.parse_args()
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        command = "torchrun --nproc-per-node 2 examples/context_parallel_ulysses.py"
        parser.exit(2, f"start this example with torchrun: {command}\n")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # gloo in addition to NCCL: the hosts exchange records before a call without waiting for a GPU.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=5))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,))

    generator = torch.Generator().manual_seed(0)
    counts = (arguments.heads, arguments.kv_heads, arguments.kv_heads, arguments.heads)
    shape = (1, arguments.seqlen, arguments.head_dim)
    whole = [torch.randn(shape[0], shape[1], n, shape[2], generator=generator).bfloat16().to(device) for n in counts]
    alone = results(flash_attn_func, *whole)
    if rank == 0:
        print(f"{ranks} processes on {device}, {arguments.seqlen} tokens, {counts[0]}/{counts[1]} heads")
    for layout in LAYOUTS:
        parts = [shard(x, rank, ranks, dim=1, layout=layout) for x in whole]
        found = results(lambda *x, **options: context_parallel_attention(*x, mesh, layout=layout, **options), *parts)
        expected = [
            shard(x, rank, ranks, dim=-1 if name == "softmax_lse" else 1, layout=layout)
            for name, x in zip(NAMES, alone)
        ]
        same = torch.tensor([int(torch.equal(as_bytes(x), as_bytes(y))) for x, y in zip(found, expected)])
        same = same.to(device)
        dist.all_reduce(same, dist.ReduceOp.MIN)
        if rank == 0:
            answers = ", ".join(f"{name} {'yes' if x else 'NO'}" for name, x in zip(NAMES, same.tolist()))
            print(f"same bytes as one process, {layout} layout: {answers}", flush=True)
        assert same.all()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Attention of one long sequence over several processes, with PyTorch's context parallelism and dash_attn.

    torchrun --nproc-per-node 2 examples/context_parallel.py

Each process uses one GPU, or the CPU with dash_attn's reference if there is no GPU. PyTorch shards the sequence,
exchanges keys and values, and adds up the parts of the gradients in the order of its steps. Deterministic parts
therefore give a deterministic whole. The first process prints whether two runs have the same bits, and how far they are
from attention on one device.
"""

import argparse
import hashlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

import dash_attn.integrations.torch as dash_torch

SEQUENCE = 2  # the dimension of the sequence in (batch, heads, seqlen, head_dim)


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Calls the op that PyTorch uses on a GPU. PyTorch uses another op on a CPU, without context parallelism."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention
    return forward(query, key, value, dropout_p, is_causal, scale=scale)[0]


def attention(q, k, v, dout):
    """Returns out, dq, dk and dv of the whole sequence, or of this process's part of it."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


def attention_of_all(mesh, tensors):
    """Returns the same tensors, where each process computes a part and gathers the whole."""
    shards = [x.clone() for x in tensors]
    with context_parallel(mesh, buffers=shards, buffer_seq_dims=[SEQUENCE] * len(shards)):
        parts = attention(*shards)
        return context_parallel_unshard(mesh, list(parts), [SEQUENCE] * len(parts))


def digest(tensors):
    bits = b"".join(x.cpu().contiguous().view(torch.int16).numpy().tobytes() for x in tensors)
    return hashlib.sha256(bits).hexdigest()[:16]


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=65536 if device == "cuda" else 256)
    seqlen = parser.parse_args().seqlen
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        command = "torchrun --nproc-per-node 2 examples/context_parallel.py"
        parser.exit(2, f"start this example with torchrun: {command}\n")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        F.scaled_dot_product_attention = scaled_dot_product_attention
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    dash_torch.activate(device_types=[device], fallback="error")

    torch.manual_seed(0)
    tensors = [torch.randn(1, 8, seqlen, 64, device=device, dtype=torch.bfloat16) for _ in range(4)]
    first, second = (attention_of_all(mesh, tensors) for _ in range(2))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes on {device}, {seqlen} tokens")
        print("same bits in both runs:", digest(first) == digest(second), digest(first))
        for name, found, alone in zip(("out", "dq", "dk", "dv"), first, attention(*tensors)):
            error = (found.double() - alone.double()).norm() / alone.double().norm()
            print(f"{name}: relative difference of {error:.1e} from one device")
    dist.barrier()
    dist.destroy_process_group()
    # Torch keeps the mesh, and so gloo's threads, until the process ends. These threads can abort the teardown.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

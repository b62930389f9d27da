"""One rank of a group in which something is wrong: see test_context_parallel_faults.py and
gpu/test_context_parallel_load.py.

    python context_parallel_faults.py RANK WORLD_SIZE PORT FOLDER [--cuda] FAULT ...

Prints one line of JSON for every fault: what was raised, and after how many seconds.
"""

import functools
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from rank_processes import join
from torch.distributed.device_mesh import init_device_mesh

from dash_attn.distributed import (
    RankError,
    carry,
    context_parallel_attention,
    context_parallel_varlen_attention,
    movement,
    ulysses,
)

WRONG_RANK = 1
LATE_RANK, LATE_S = 2, 1.0  # It starts its messages after the wrong rank has died.
TIMEOUT_S = 12.0
ROWS, HEADS = 64, 6


def tensors(rank: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    made = [torch.randn(2, ROWS, HEADS, 16, generator=generator).bfloat16() for _ in range(3)]
    return [x.to(device).requires_grad_() for x in made]


mesh_of = functools.cache(init_device_mesh)


def run(fault: str, rank: int, device: str) -> None:
    """A call and its backward, with this fault on one rank; "FAULT, mesh" is over a mesh of 2 by 2 ranks."""
    over_mesh, fault = fault.endswith(", mesh"), fault.removesuffix(", mesh")
    wrong = rank == WRONG_RANK
    q, k, v = tensors(rank, device)
    options = {"causal": True, "check_values": "value" in fault}
    if over_mesh:
        options |= {"mesh": mesh_of(device, (2, 2)), "layout": "zigzag"}
    if wrong and fault == "shape of the mesh":
        del options["mesh"]
    if wrong and fault == "shape":
        q, k, v = (torch.cat([x, x], dim=-1) for x in (q, k, v))
    if wrong and fault == "dtype":
        q, k, v = q.half(), k.half(), v.half()
    if wrong and fault == "rows":
        q = q[:, :50]
    if wrong and fault == "argument":
        options["causal"] = False
    if wrong and fault == "type":
        v = [[0.0]]
    if wrong and fault == "value":
        k = k.detach().index_fill(1, torch.tensor(5, device=device), torch.nan).requires_grad_()
    if fault == "value of sinks":
        options["learnable_sink"] = torch.full((HEADS,), float(rank == WRONG_RANK), device=device)
    if fault == "everywhere":
        options["softmax_scale"] = float("inf")
    if "few heads" in fault:
        k, v = k[:, :, :2], v[:, :, :2]
    if "few heads" in fault or over_mesh:  # as many tiles as there are ranks
        q, k, v = (torch.cat([x, x], dim=1) for x in (q, k, v))
    if fault == "slopes, few heads":
        options["alibi_slopes"] = torch.ones(HEADS, device=device)
    if fault == "chunks, few heads":
        options |= {"attention_chunk": 9, "causal": False}
    if fault == "order, few heads":
        options["schedule"] = "order_free"
    if fault == "value of slopes":  # whose bytes have the same sum, and the same sum of products with their places
        digits = [0, 65537] if wrong else [0, 512]
        slopes = torch.tensor(digits * (HEADS // 2), dtype=torch.int32).view(torch.float32)
        options["alibi_slopes"] = slopes.to(device)
    if wrong and fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if wrong and fault == "stalls":
        time.sleep(2.5 * TIMEOUT_S)
    if wrong and fault == "dies between":
        # After the ranks have agreed on the call, before it sends its part.
        ulysses.exchange = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if wrong and fault in ("dies in the backward, few heads", "dies before a message of the backward, few heads"):
        carry.Carrier._send = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if rank == LATE_RANK and fault == "dies before a message of the backward, few heads":
        begin = movement._begin
        movement._begin = lambda *args: (time.sleep(LATE_S), begin(*args))[1]
    if fault.startswith("offsets"):
        offsets = torch.tensor(
            [0, 9 if wrong and "longest" not in fault else 8, 384 if "past" not in fault else 385], dtype=torch.int32
        )
        pack = (offsets.to(device),) * 2 + (-5 if wrong and "longest" in fault else ROWS * 2,) * 2
        out = context_parallel_varlen_attention(*(x[0] for x in (q, k, v)), *pack, **options)
    else:
        out = context_parallel_attention(q, k, v, **options)
    if wrong and fault == "dies before the backward":
        os.kill(os.getpid(), signal.SIGKILL)
    if wrong and fault == "other call":
        context_parallel_attention(q, k, v, **options)
    if not (wrong and fault == "other call"):
        dout = torch.full_like(out, torch.nan if wrong and fault == "value of a gradient" else 1.0)
        torch.autograd.grad(out, (q, k, v), dout)


def main() -> None:
    rank, ranks, port = map(int, sys.argv[1:4])
    faults = sys.argv[5:]
    device = "cpu"
    if faults[0] == "--cuda":
        faults, device = faults[1:], "cuda"
        torch.cuda.set_device(rank)
    join(rank, ranks, port, TIMEOUT_S, "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    hosts = dist.new_group(backend="gloo")
    for fault in faults:
        dist.barrier(hosts)
        began = time.monotonic()
        try:
            run(fault, rank, device)
            outcome = ["none", "", []]
        except Exception as error:
            outcome = [type(error).__name__, str(error), list(error.ranks) if isinstance(error, RankError) else []]
        print(json.dumps([fault, *outcome, time.monotonic() - began]), flush=True)
    if device == "cuda":
        os._exit(0)  # NCCL would wait for ranks that are no more


if __name__ == "__main__":
    main()

"""One rank of a gloo group in which something is wrong: see test_context_parallel_faults.py.

    python context_parallel_faults.py RANK WORLD_SIZE PORT FOLDER FAULT ...

Prints one line of JSON for every fault: what was raised, and after how many seconds.
"""

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from context_parallel_worker import join

from dash_attn.distributed import RankError, context_parallel_attention, ulysses

WRONG_RANK = 1
TIMEOUT_S = 12.0
ROWS, HEADS = 64, 6


def tensors(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, ROWS, HEADS, 16, generator=generator).bfloat16().requires_grad_() for _ in range(3)]


def run(fault: str, rank: int) -> None:
    """A call and its backward, with this fault on one rank."""
    wrong = rank == WRONG_RANK
    q, k, v = tensors(rank)
    options = {"causal": True, "check_values": "value" in fault}
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
        k = k.detach().index_fill(1, torch.tensor(5), torch.nan).requires_grad_()
    if fault == "value of sinks":
        options["learnable_sink"] = torch.full((HEADS,), float(rank == WRONG_RANK))
    if fault == "everywhere":
        options["softmax_scale"] = float("inf")
    if fault == "heads":
        k, v = k[:, :, :2], v[:, :, :2]
    if wrong and fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if wrong and fault == "stalls":
        time.sleep(2.5 * TIMEOUT_S)
    if wrong and fault == "dies between":
        # After the ranks have agreed on the call, before it sends its part.
        ulysses.exchange = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
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
    join(rank, ranks, port, TIMEOUT_S)
    for fault in sys.argv[5:]:
        dist.barrier()
        began = time.monotonic()
        try:
            run(fault, rank)
            outcome = ["none", "", []]
        except Exception as error:
            outcome = [type(error).__name__, str(error), list(error.ranks) if isinstance(error, RankError) else []]
        print(json.dumps([fault, *outcome, time.monotonic() - began]), flush=True)


if __name__ == "__main__":
    main()

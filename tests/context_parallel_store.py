"""One rank of a group whose store freezes or dies after the forward: see test_context_parallel_store.py.

    python context_parallel_store.py RANK WORLD_SIZE PORT FOLDER FAULT [STORE_PORT STORE_PROCESS]

The store lives in rank 0, which freezes with it, unless it has a process of its own, as it has under torchrun. Prints
one line of JSON: the name of the error, its message, and the seconds that the backward took.
"""

import datetime
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from dash_attn.distributed import channel, context_parallel_attention

TIMEOUT_S = 6.0


def job_store(rank: int, port: int, store_port: str | None = None) -> dist.TCPStore:
    if store_port is not None:
        return dist.TCPStore("127.0.0.1", int(store_port), is_master=False)
    meeting = dist.TCPStore("127.0.0.1", port, is_master=False)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("store", str(store.port))
        return store
    return dist.TCPStore("127.0.0.1", int(meeting.get("store")), is_master=False)


def forward(fault: str, rank: int, process: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Its output and inputs, once the fault is there."""
    q, k, v = (torch.randn(2, 64, 6, 16).bfloat16().requires_grad_() for _ in range(3))
    out = context_parallel_attention(q, k, v, causal=True)
    dist.barrier()
    if rank == 0:
        os.kill(process, signal.SIGKILL if "killed" in fault else signal.SIGSTOP)
    time.sleep(0.5)
    if rank == 1 and fault.startswith("a slow rank"):
        time.sleep(1.5)
    if rank == 1 and fault == "a rank that stalls":
        time.sleep(2 * TIMEOUT_S)
    return out, (q, k, v)


def main(rank: int, ranks: int, port: int, fault: str, *of_store: str) -> None:
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    store = job_store(rank, port, *of_store[:1])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    out, inputs = forward(fault, rank, int(of_store[1]) if of_store else os.getpid())
    began = time.monotonic()
    try:
        if fault == "a new group":
            channel._gloo_group(list(range(ranks)), TIMEOUT_S)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        outcome = ["none", ""]
    except Exception as error:
        outcome = [type(error).__name__, str(error)]
    print(json.dumps([*outcome, time.monotonic() - began]), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[5:])

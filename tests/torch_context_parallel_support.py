"""PyTorch's context parallelism with dash_attn in each of some processes, for the tests on CPUs and on GPUs."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from float64_reference import attention_float64, attention_in_dtype
from interface_support import qkv_tensors
from kernel_counts import kernels_in

import dash_attn.integrations.torch as door

# (causal, how keys and values get round): load is balanced where the mask is causal.
CASES = [(True, "allgather"), (True, "alltoall"), (False, "allgather")]
NAMES = ("out", "dq", "dk", "dv")
RUNS = 2


def scaled_dot_product_attention(query, key, value, is_causal=False):
    """As on a GPU: context parallelism does not know the op of a CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]


def problem(seqlen):
    """q, k, v and a gradient of the output, (batch, seqlen, heads, head_dim)."""
    return [x.detach() for x in qkv_tensors(seqlen, seqlen, heads=4, kv_heads=4, head_dim=32, batch=2)]


def out_and_gradients(buffers, causal):
    inputs = [x.detach().requires_grad_() for x in buffers[:3]]
    out = F.scaled_dot_product_attention(*inputs, is_causal=causal)
    return [out.detach(), *torch.autograd.grad(out, inputs, buffers[3])]


def compute(mesh, seqlen, causal, rotate_method):
    """out, dq, dk and dv of the whole sequence, and how often our kernels were called."""
    from torch.distributed.tensor.experimental import _attention as parallel
    from torch.distributed.tensor.experimental import context_parallel

    parallel.set_rotate_method(rotate_method)
    parallel._cp_options.enable_load_balance = causal
    buffers = [x.transpose(1, 2).contiguous().to(mesh.device_type) for x in problem(seqlen)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        parts, counts = kernels_in(lambda: out_and_gradients(buffers, causal))
        whole = parallel.context_parallel_unshard(mesh, parts, [2] * 4)
    return [x.transpose(1, 2).cpu() for x in whole], counts


def process(rank, processes, folder, device, seqlen):
    """One of them. It leaves {"parallel": of each case some runs of `compute`, "alone": of each case one process's}."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        F.scaled_dot_product_attention = scaled_dot_product_attention
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    mesh = dist.device_mesh.init_device_mesh(device, (processes,))
    door.activate(device_types=[device], fallback="error")
    parallel = [[compute(mesh, seqlen, *case) for _ in range(RUNS)] for case in CASES]
    whole = [x.transpose(1, 2).contiguous().to(device) for x in problem(seqlen)]
    alone = [[x.transpose(1, 2).cpu() for x in out_and_gradients(whole, causal)] for causal, _ in CASES]
    torch.save({"parallel": parallel, "alone": alone}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def runs(tmp_path_factory: pytest.TempPathFactory, device: str, seqlen: int) -> Callable[[int], list[dict]]:
    """A function that runs some processes, once for each number of them, and returns what each of them has left."""

    @functools.cache
    def run(processes: int) -> list[dict]:
        folder = tmp_path_factory.mktemp("context_parallel")
        torch.multiprocessing.spawn(process, (processes, str(folder), device, seqlen), nprocs=processes)
        return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]

    return run


def check(results: list[dict], case: int, seqlen: int) -> None:
    """No further from the truth than eager attention on one device; the same bits in all runs and processes, and with
    one process those of the call without context parallelism."""
    tensors, causal = problem(seqlen), CASES[case][0]
    exact, eager = (function(*tensors, causal=causal) for function in (attention_float64, attention_in_dtype))
    actual, counts = results[0]["parallel"][case][0]
    assert counts == [len(results)] * 2
    for of_process in results:
        for again, _ in of_process["parallel"][case]:
            assert all(torch.equal(x, y) for x, y in zip(again, actual, strict=True))
    for name, found in zip(NAMES, actual, strict=True):
        truth = getattr(exact, name)
        assert (found.double() - truth).norm() <= (getattr(eager, name).double() - truth).norm(), name
    if len(results) == 1:
        assert all(torch.equal(x, y) for x, y in zip(actual, results[0]["alone"][case], strict=True))

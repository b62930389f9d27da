"""One of five ranks, of which four are a mesh of two by two: see test_context_parallel_mesh.py.

    python context_parallel_mesh.py RANK WORLD_SIZE PORT FOLDER

Prints one line of JSON: what held, by name.
"""

import json
import sys
import weakref

import torch
import torch.distributed as dist
from context_parallel_checks import same_bytes
from rank_processes import join
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from dash_attn import flash_attn_func
from dash_attn.distributed import (
    context_parallel_attention,
    context_parallel_varlen_attention,
    rows_of_rank,
    shard,
)

GROUPS = [[1, 2], [3, 4]]
RANKS = 4
ROWS, HEADS, KV_HEADS = 512, 4, 2


def whole_inputs(rows=ROWS):
    generator = torch.Generator().manual_seed(5)
    shapes = [(1, rows, heads, 16) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def of_rank(x, rank, dim=1):
    return shard(x, rank, RANKS, dim=dim)


def a_gradient_of_the_log_sum_exp_on_one_rank(mesh, rank):
    """On the others it is 0, as it is in one process for their rows."""
    *inputs, dout = whole_inputs()
    (rows,) = rows_of_rank(ROWS, 2, RANKS)
    dlse = torch.zeros(1, HEADS, ROWS)
    dlse[:, :, slice(*rows)] = 0.5
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(
        flash_attn_func(*leaves, causal=True, return_attn_probs=True)[:2], leaves, [dout, dlse]
    )
    parts = [of_rank(x, rank).requires_grad_() for x in inputs]
    out, lse, _ = context_parallel_attention(*parts, mesh, causal=True, return_attn_probs=True)
    outputs, gradients = [out], [of_rank(dout, rank)]
    if rank == 2:
        outputs, gradients = [out, lse], [*gradients, of_rank(dlse, rank, dim=2)]
    found = torch.autograd.grad(outputs, parts, gradients)
    return all(same_bytes(x, of_rank(whole, rank)) for x, whole in zip(found, expected, strict=True))


def only_some_gradients(mesh, rank):
    """Ranks ask for one each; all take part in all."""
    *inputs, dout = whole_inputs()
    leaves = [x.clone().requires_grad_() for x in inputs]
    wanted = rank % 3
    expected = torch.autograd.grad(flash_attn_func(*leaves), leaves, dout)[wanted]
    parts = [of_rank(x, rank).requires_grad_() for x in inputs]
    (found,) = torch.autograd.grad(context_parallel_attention(*parts, mesh), [parts[wanted]], of_rank(dout, rank))
    return same_bytes(found, of_rank(expected, rank))


def refused(kind, message, attention, *arguments, **options):
    try:
        attention(*arguments, **options)
    except kind as error:
        if message in str(error):
            return True
        print(error)
    return False


def what_holds(rank):
    mesh, across = (DeviceMesh("cpu", groups) for groups in (GROUPS, [[1, 3], [2, 4]]))
    turned = DeviceMesh("cpu", [2, 1, 3, 4])
    if rank < 0:  # is in neither
        return {}
    q, k, v, _ = whole_inputs()
    parts = [of_rank(x, rank) for x in (q, k, v)]
    few_of_all = whole_inputs(12)[:3]
    few = [of_rank(x, rank) for x in few_of_all]
    even, uneven = ([of_rank(x, rank) for x in whole_inputs(rows)[:3]] for rows in (514, 129))
    call = context_parallel_attention
    offsets = torch.tensor([0, ROWS], dtype=torch.int32)
    pack = [*(x[0] for x in parts), offsets, offsets, ROWS, ROWS]
    here = "with a mesh of two dimensions"
    return {
        "a gradient of the log-sum-exp on one rank": a_gradient_of_the_log_sum_exp_on_one_rank(mesh, rank),
        "only some gradients": only_some_gradients(mesh, rank),
        "no gradients": same_bytes(call(*parts, mesh), of_rank(flash_attn_func(q, k, v), rank)),
        "more ranks than KV heads": refused(ValueError, "mesh must have at most as many ranks in its last dimension as "
                                            "k has heads, 1, got (2, 2)", call, *(x[:, :, :1] for x in parts), mesh),
        "chunks that do not join": refused(ValueError, "q must have a number of rows whose 4 chunks join into 2 with "
                                           "a mesh of (2, 2) in the contiguous layout, such as a multiple of 256, ",
                                           call, *even, mesh),
        "unequal chunks that do not join": refused(ValueError, "a multiple of 256, got 129", call, *uneven, mesh),
        "chunks of k that do not join": refused(ValueError, "k must have a number of rows", call, parts[0],
                                                *even[1:], mesh),
        "chunks within tiles": same_bytes(call(*few, mesh), of_rank(flash_attn_func(*few_of_all), rank)),
        "softcap": refused(NotImplementedError, f"softcap must be left out {here}", call, *parts, mesh, softcap=0.5),
        "sinks": refused(NotImplementedError, f"learnable_sink must be left out {here}", call, *parts, mesh,
                         learnable_sink=torch.zeros(HEADS)),
        "a pack": refused(NotImplementedError, "mesh must have one dimension for a variable-length batch, got 2",
                          context_parallel_varlen_attention, *pack, mesh),
        "ranks that do not ascend": refused(ValueError, "mesh must have ascending ranks, got [1, 3, 2, 4]",
                                            call, *parts, across),
        "ranks of one dimension that do not ascend": refused(ValueError, "ascending ranks, got [2, 1, 3, 4]",
                                                             call, *parts, turned),
        "after errors": same_bytes(call(*parts, mesh), of_rank(flash_attn_func(q, k, v), rank)),
    }  # fmt: skip


def main():
    rank, ranks, port = map(int, sys.argv[1:4])
    join(rank, ranks, port, 60)
    held = what_holds(rank - 1)
    groups = [weakref.ref(group) for group in distributed_c10d._world.pg_map]
    dist.destroy_process_group()
    held["groups end when they are destroyed"] = bool(groups) and all(group() is None for group in groups)
    print(json.dumps(held))


if __name__ == "__main__":
    main()

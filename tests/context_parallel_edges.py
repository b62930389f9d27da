"""One of three ranks that use context parallelism in unusual ways: see test_context_parallel_edges.py.

    python context_parallel_edges.py RANK WORLD_SIZE PORT FOLDER

Prints one line of JSON: what held, by name.
"""

import functools
import json
import sys
import weakref

import numpy as np
import torch
import torch.distributed as dist
from rank_processes import join, refused
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from dash_attn import flash_attn_func, flash_attn_varlen_func
from dash_attn.distributed import context_parallel_attention, context_parallel_varlen_attention, shard

# What one rank and the others say of the same call.
WORDS = (
    {"causal": True, "window_size": (5, -1), "softmax_scale": 0.25, "softcap": 2.0, "sm_margin": 0},
    {
        "causal": 1, "window_size": [np.int64(5), None], "softmax_scale": np.float64(0.25), "softcap": 2,
        "sm_margin": np.int64(0), "return_attn_probs": np.bool_(False), "schedule": np.str_("auto"),
        "attention_chunk": None, "check_values": 0, "layout": np.str_("contiguous"),
    },
)  # fmt: skip


def whole_inputs():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1, 130, 4, 16, generator=generator).bfloat16() for _ in range(4)]


def same(found, expected):
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def in_a_part_of_the_job(rank):
    """Ranks 2 and 0 are not all there are, and the third makes no call."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return True
    of_group = dist.get_rank(group)
    q, k, v, _ = whole_inputs()
    expected = shard(flash_attn_func(q, k, v), of_group, 2, dim=1)
    return same([context_parallel_attention(*(shard(x, of_group, 2, dim=1) for x in (q, k, v)), group)], [expected])


def a_gradient_of_the_log_sum_exp_on_one_rank(rank, ranks):
    """On the others it is 0, as it is in one process for their rows."""
    return all(_gradient_of_the_log_sum_exp(*whole_inputs(), kv_heads, rank, ranks) for kv_heads in (4, 1))


def _gradient_of_the_log_sum_exp(q, k, v, dout, kv_heads, rank, ranks):
    k, v = k[:, :, :kv_heads], v[:, :, :kv_heads]
    dlse = torch.zeros(1, 4, 130)
    rows = shard(torch.arange(130), 1, ranks, dim=0)
    dlse[:, :, rows] = 0.5

    def gradients(tensors, dout, dlse, attention):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out, lse, _ = attention(*leaves, causal=True, return_attn_probs=True)
        outputs, of_outputs = ([out, lse], [dout, dlse]) if dlse is not None else ([out], [dout])
        return torch.autograd.grad(outputs, leaves, of_outputs)

    expected = [shard(x, rank, ranks, dim=1) for x in gradients((q, k, v), dout, dlse, flash_attn_func)]
    parts = [shard(x, rank, ranks, dim=1) for x in (q, k, v, dout)]
    own = shard(dlse, rank, ranks, dim=-1) if rank == 1 else None
    return same(gradients(parts[:3], parts[3], own, context_parallel_attention), expected)


def only_some_gradients(rank, ranks):
    """Each rank asks for another one; all take part in all."""
    return all(_some_gradients(*whole_inputs(), kv_heads, rank, ranks) for kv_heads in (4, 1))


def _some_gradients(q, k, v, dout, kv_heads, rank, ranks):
    k, v = k[:, :, :kv_heads], v[:, :, :kv_heads]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(flash_attn_func(*leaves), leaves, dout)[rank]
    parts = [shard(x, rank, ranks, dim=1).requires_grad_() for x in (q, k, v)]
    out = context_parallel_attention(*parts)
    (found,) = torch.autograd.grad(out, [parts[rank]], shard(dout, rank, ranks, dim=1))
    return same([found], [shard(expected, rank, ranks, dim=1)])


def a_rank_that_is_given_nothing(rank, ranks):
    """Of a pack of two sequences; and of k, or of v, alone a gradient is wanted."""
    return all(_gradient_of_a_pack(wanted, rank, ranks) for wanted in (1, 2))


def _gradient_of_a_pack(wanted, rank, ranks):
    tensors = [x[0] for x in whole_inputs()]
    tensors[1:3] = [x[:, :1].contiguous() for x in tensors[1:3]]
    offsets = torch.tensor([0, 60, 130], dtype=torch.int32)
    pack = (offsets, offsets, 70, 70)

    def gradient(tensors, attention):
        *inputs, dout = tensors
        leaf = inputs[wanted] = inputs[wanted].clone().requires_grad_()
        return torch.autograd.grad(attention(*inputs, *pack, causal=True), [leaf], dout)

    expected = gradient(tensors, flash_attn_varlen_func)
    found = gradient([shard(x, rank, ranks, dim=0) for x in tensors], context_parallel_varlen_attention)
    return same(found, [shard(x, rank, ranks, dim=0) for x in expected])


def what_holds(rank, ranks):
    """By name; and a weak reference to each of the groups, none of which the caller has."""
    parts = [shard(x, rank, ranks, dim=1).requires_grad_() for x in whole_inputs()[:3]]
    call = context_parallel_attention

    def twice(kv_heads, power):
        q, k, v = parts[0], *(x[:, :, :kv_heads] for x in parts[1:])
        loss = call(q, k, v).float().pow(power).sum()
        (dq,) = torch.autograd.grad(loss, q, create_graph=True)
        torch.autograd.grad(dq.float().square().sum() + loss, q)

    def with_graph(attention, kv_heads):
        out = attention(parts[0], *(x[:, :, :kv_heads] for x in parts[1:]))
        return torch.autograd.grad(out.float().square().sum(), parts[0], create_graph=True)

    def with_saved_on_cpu(*tensors):
        """Every tensor that is saved for the backward is copied to another place meanwhile."""
        with torch.autograd.graph.save_on_cpu():
            return call(*tensors)

    def of_lazy_negatives(kv_heads):
        """Inputs and gradients whose sign is a bit beside their bytes, as an imaginary part of a conjugate is."""
        found = []
        for negative in (torch._neg_view, torch.neg):
            out = call(*(negative(x) for x in (parts[0], *(x[:, :, :kv_heads] for x in parts[1:]))))
            found.append([out, *torch.autograd.grad(out, parts, negative(out.detach()))])
        return same(*found)

    def forward_mode():
        with forward_ad.dual_level():
            call(forward_ad.make_dual(parts[0].detach(), parts[0].detach()), *parts[1:])

    transformed = [
        lambda: torch.func.grad(lambda x: call(x, *parts[1:]).float().sum())(parts[0]),
        lambda: torch.vmap(lambda x: call(x, *parts[1:]))(parts[0][None]),
        forward_mode,
    ]
    checkpointed = functools.partial(checkpoint, call, use_reentrant=False)

    # A loss of power 1 has a gradient of the output that does not depend on the parameters.
    seconds = [functools.partial(twice, kv_heads, power) for kv_heads in (4, 1) for power in (1, 2)]
    two = DeviceMesh("cpu", [[0, 1, 2]], mesh_dim_names=("gather", "ulysses"))
    three = DeviceMesh("cpu", [[[0, 1, 2]]])
    held = {
        "in a part of the job": in_a_part_of_the_job(rank),
        "a gradient of the log-sum-exp on one rank": a_gradient_of_the_log_sum_exp_on_one_rank(rank, ranks),
        "only some gradients": only_some_gradients(rank, ranks),
        "a rank that is given nothing": a_rank_that_is_given_nothing(rank, ranks),
        "no second differentiation": all([refused(x, RuntimeError, "differentiated at most once") for x in seconds]),
        "a checkpoint": all(same(with_graph(checkpointed, n), with_graph(call, n)) for n in (4, 1)),
        "saved tensors elsewhere": all(same(with_graph(with_saved_on_cpu, n), with_graph(call, n)) for n in (4, 1)),
        "lazy negatives": all([of_lazy_negatives(n) for n in (4, 1)]),
        "transforms": all([refused(x, NotImplementedError, "must not be called under") for x in transformed]),
        "slopes with a gradient": refused(
            lambda: call(*parts, alibi_slopes=torch.ones(4, requires_grad=True)), NotImplementedError, "alibi_slopes"
        ),
        "a mesh of one row": same([call(*parts, two)], [call(*parts)]),
        "three dimensions": refused(lambda: call(*parts, three), NotImplementedError, "one dimension, or two for rows"),
        "a part of a mesh": same([call(*parts, two["ulysses"])], [call(*parts)]),
        "a mesh": refused(lambda: call(*parts, "cpu"), TypeError, "mesh must be a DeviceMesh, a ProcessGroup or None"),
        "a layout": refused(lambda: call(*parts, layout="x"), ValueError, "layout must be one of"),
        "a flag": refused(lambda: call(*parts, check_values=2), TypeError, "check_values must be a bool"),
        "checks of one process": refused(lambda: call(*parts, schedule="x"), ValueError, "schedule must be one of"),
        "one value in other words": same([call(*parts, **WORDS[rank > 0])], [call(*parts, **WORDS[0])]),
        "no gradients": not call(*(x.detach() for x in parts)).requires_grad,
    }
    return held, [weakref.ref(group) for group in (dist.group.WORLD, two.get_group("ulysses"))]


def main():
    rank, ranks, port = map(int, sys.argv[1:4])
    join(rank, ranks, port, 60)
    held, groups = what_holds(rank, ranks)
    dist.destroy_process_group()
    held["groups end when they are destroyed"] = all(group() is None for group in groups)
    print(json.dumps(held))


if __name__ == "__main__":
    main()

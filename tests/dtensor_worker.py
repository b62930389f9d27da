"""One of four ranks that call the public functions with DTensors: see test_dtensors.py.

    python dtensor_worker.py RANK WORLD_SIZE PORT FOLDER

Prints one line of JSON: what held, by name.
"""

import functools
import json
import sys

import torch
import torch.distributed as dist
from rank_processes import join, refused
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import dash_attn
from dash_attn.compat import flash_attn_3
from dash_attn.distributed import context_parallel_attention

WHOLE, BATCH = Replicate(), Shard(0)
OFFSETS = torch.tensor([0, 5, 170, 300], dtype=torch.int32)
PACK = {f"cu_seqlens_{side}": OFFSETS for side in "qk"} | {f"max_seqlen_{side}": 165 for side in "qk"}
PACK_OF_ONE = {"cu_seqlens": OFFSETS, "max_seqlen": 165}


def made(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def results(function, tensors, options, dout):
    """Output, log-sum-exp and gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse, _ = function(*leaves, return_attn_probs=True, **options)
    return [out, lse, *torch.autograd.grad(out, leaves, dout)]


def same(mesh, function, tensors, placements, of_dout, options=None, of_heads=None):
    """Whether the bits are those of one process and the placements those of the arguments.

    Args:
        placements: of each tensor.
        of_dout: placements of the output and its gradient.
        of_heads: alibi_slopes or learnable_sink, and their placements.
    """
    options, of_heads = options or {}, of_heads or {}
    expected_out, *_ = function(*tensors, return_attn_probs=True, **options)
    dout = made(*expected_out.shape)
    plain = {name: x for name, (x, _) in of_heads.items()}
    spread = {name: distribute_tensor(x, mesh, p) for name, (x, p) in of_heads.items()}
    expected = results(function, tensors, options | plain, dout)
    sharded = [distribute_tensor(x, mesh, p) for x, p in zip(tensors, placements, strict=True)]
    found = results(function, sharded, options | spread, distribute_tensor(dout, mesh, of_dout))
    kept = [x.placements for x in (found[0], *found[2:])] == [tuple(p) for p in (of_dout, *placements)]
    shapes = all(x.shape == y.shape for x, y in zip(found, expected, strict=True))
    whole = [x.full_tensor() for x in found]  # by all ranks
    return kept and shapes and all(map(torch.equal, whole, expected))


def what_holds(mesh):
    heads = Shard(2)
    q, k, v = made(3, 192, 8, 16), made(3, 192, 4, 16), made(3, 192, 4, 24)  # 3 sequences on 2 ranks
    call = functools.partial(same, mesh, dash_attn.flash_attn_func, (q, k, v), options={"causal": True})
    held = {
        str(placements): call([placements] * 3, placements)
        for placements in (
            [BATCH, heads], [WHOLE, heads], [BATCH, WHOLE], [heads, heads], [heads, BATCH], [WHOLE, WHOLE]
        )
    }  # fmt: skip
    slopes, sinks = made(8).float().abs(), made(8).float()
    of_heads = {"alibi_slopes": (slopes, [WHOLE, BATCH]), "learnable_sink": (sinks, [WHOLE, BATCH])}
    held["slopes and sinks"] = call([[BATCH, heads]] * 3, [BATCH, heads], of_heads=of_heads)
    held["sinks with a gradient"] = same(
        mesh,
        lambda q, k, v, sinks, **options: dash_attn.flash_attn_func(q, k, v, learnable_sink=sinks, **options),
        (q, k, v, sinks), [[WHOLE, heads]] * 3 + [[WHOLE, BATCH]], [WHOLE, heads],
    )  # fmt: skip
    kv, qkv = made(2, 192, 2, 4, 16), made(2, 192, 3, 4, 16)
    held["kvpacked"] = same(
        mesh, dash_attn.flash_attn_kvpacked_func, (q[:2], kv), [[BATCH, heads], [BATCH, Shard(3)]], [BATCH, heads]
    )
    held["qkvpacked"] = same(
        mesh, dash_attn.flash_attn_qkvpacked_func, (qkv,), [[BATCH, Shard(3)]], [BATCH, heads], {"causal": True}
    )
    pack = [WHOLE, Shard(1)]
    rows = made(300, 8, 16), made(300, 4, 16), made(300, 4, 16)
    held["varlen"] = same(mesh, dash_attn.flash_attn_varlen_func, rows, [pack] * 3, pack, PACK)
    held["varlen qkvpacked"] = same(
        mesh, dash_attn.flash_attn_varlen_qkvpacked_func, (made(300, 3, 4, 16),), [[WHOLE, Shard(2)]], pack, PACK_OF_ONE
    )

    compiled = torch.compile(dash_attn.flash_attn_func, backend="eager", fullgraph=True)
    held["compiled"] = same(mesh, compiled, (q, k, v), [[BATCH, heads]] * 3, [BATCH, heads])

    def given(*placements, tensors=(q, k, v), function=dash_attn.flash_attn_func, **options):
        spread = [DTensor.from_local(x, mesh, p, run_check=False) if p else x for x, p in zip(tensors, placements)]
        return lambda: function(*spread, **options)

    by_rows, good = [WHOLE, BATCH], [WHOLE, heads]
    held |= {
        "rows": refused(given(*[[WHOLE, Shard(1)]] * 3), ValueError, "q must have placements of Replicate() or"),
        "partial": refused(given(*[[Partial(), WHOLE]] * 3), ValueError, "q must have placements of Replicate() or"),
        "rows of a pack": refused(
            given(*[by_rows] * 3, tensors=rows, function=dash_attn.flash_attn_varlen_func, **PACK),
            ValueError, "q must have placements of Replicate() or Shard(1), by heads, got",
        ),
        "others": refused(given(good, good, by_rows), ValueError, "v must have the placements (Replicate(), Shard("),
        "a plain tensor": refused(given(good, good, None), TypeError, "v must be a DTensor"),
        "a plain first tensor": refused(given(None, good, good), TypeError, "q must be a DTensor"),
        "plain sinks": refused(given(*[good] * 3, learnable_sink=sinks), TypeError, "learnable_sink must be a DTensor"),
        "dropout": refused(given(*[good] * 3, dropout_p=0.5), NotImplementedError, "dropout_p must be 0 with DTensors"),
        "a mask by key columns": refused(
            given(*[good] * 3, startend_row_indices=torch.zeros(3, 1, 192, 2, dtype=torch.int32)),
            NotImplementedError, "startend_row_indices must be None (DTensors are not supported with it)",
        ),
        "largest logits": refused(
            given(*[good] * 3, return_max_logits=True),
            NotImplementedError, "return_max_logits must be False (DTensors are not supported with it), got True",
        ),
        "few heads": refused(
            lambda: dash_attn.flash_attn_func(*[distribute_tensor(x[:, :, :1], mesh, good) for x in (q, k, v)]),
            ValueError, "q must have a multiple of 2 heads",
        ),
        "a gradient of sinks": refused(
            given(
                *[[BATCH, WHOLE]] * 3,
                learnable_sink=DTensor.from_local(sinks, mesh, [WHOLE, WHOLE], run_check=False).requires_grad_(),
            ),
            NotImplementedError, "learnable_sink must not require a gradient",
        ),
        "context parallelism": refused(
            given(good, good, good, function=context_parallel_attention), TypeError, "q must be a plain tensor"
        ),
    }  # fmt: skip
    return held | elsewhere(mesh, q, k, rows)


def elsewhere(mesh, q, k, rows):
    """DTensors where only plain tensors are allowed: the errors that name the argument."""

    def spread(x):
        return DTensor.from_local(x, mesh, [WHOLE, WHOLE], run_check=False)

    def plain(name):
        return TypeError, f"{name} must be a plain tensor, got a DTensor"

    slopes, offsets, lengths = torch.ones(8), spread(OFFSETS), torch.full((3,), 5, dtype=torch.int32)
    pages = rows[1].view(3, 100, 4, 16)
    paged = PACK | {"block_table": torch.arange(3, dtype=torch.int32)[:, None]}
    varlen, cache = dash_attn.flash_attn_varlen_func, dash_attn.flash_attn_with_kvcache
    forward, backward = flash_attn_3._flash_attn_forward, flash_attn_3._flash_attn_backward
    lse = torch.zeros(3, 8, 192)
    loss = torch.func.grad(lambda q, k: dash_attn.flash_attn_func(q, k, k).sum())
    return {
        "plain tensors beside slopes": refused(
            lambda: dash_attn.flash_attn_func(q, k, k, alibi_slopes=spread(slopes)), TypeError, "q must be a DTensor"
        ),
        "plain tensors beside offsets": refused(
            lambda: varlen(*rows, **PACK | {"cu_seqlens_k": offsets}), TypeError, "q must be a DTensor"
        ),
        "torch.func": refused(
            lambda: loss(spread(q), spread(k)), NotImplementedError, "DTensors are not supported under torch.func"
        ),
        "a cache": refused(lambda: cache(q, spread(k), k), *plain("k_cache")),
        "lengths of a cache": refused(lambda: cache(q, k, k, cache_seqlens=spread(lengths)), *plain("cache_seqlens")),
        "pages": refused(lambda: varlen(rows[0], spread(pages), pages, **paged), *plain("k")),
        "offsets of pages": refused(
            lambda: varlen(rows[0], pages, pages, **paged | {"cu_seqlens_k": offsets}), *plain("cu_seqlens_k")
        ),
        "private functions": refused(lambda: forward(q, k, spread(k)), *plain("v"))
        and refused(lambda: forward(q, k, k, seqused_k=spread(lengths)), *plain("seqused_k")),
        "a private backward": refused(lambda: backward(q, q, k, k, spread(q), lse), *plain("out"))
        and refused(lambda: backward(spread(q), q, k, k, q, lse, sequed_k=lengths), *plain("dout")),
        "a private output": refused(lambda: forward(q, k, k, out_=spread(q)), *plain("out_")),
    }


def main():
    rank, ranks, port = map(int, sys.argv[1:4])
    join(rank, ranks, port, 60)
    held = what_holds(init_device_mesh("cpu", (2, 2)))
    print(json.dumps(held), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

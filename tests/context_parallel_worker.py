"""One rank of a group that runs context parallelism: see test_context_parallel.py and gpu/test_context_parallel_gpu.py.

    python context_parallel_worker.py RANK WORLD_SIZE PORT FOLDER [cuda]

On CPUs it computes by the reference and talks by gloo; with "cuda" it has the GPU of its rank, over NCCL. It leaves
FOLDER/rank_RANK.pt: {case: {name: tensor}}, of this rank's rows, and on a GPU "waits": {case: `waits_for_the_gpu`}.
"""

import functools
import math
import pathlib
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rank_processes import join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dash_attn import flash_attn_func, flash_attn_varlen_func
from dash_attn.distributed import context_parallel_attention, context_parallel_varlen_attention, shard


class Case(NamedTuple):
    heads: int = 8
    kv_heads: int = 4
    rows: tuple[int, int] = (192, 192)
    """Of queries and of keys; of a pack, in all."""
    batch: int = 2
    head_dim: int = 16
    value_head_dim: int = 16
    layout: str = "contiguous"
    offsets: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    used: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Of a pack, how many rows of each sequence there are."""
    slopes: bool = False
    sinks: bool = False
    lse_gradient: bool = False
    spoilt: bool = False
    """One element of k of the last row is not a number."""
    options: tuple[tuple[str, Any], ...] = (("causal", True),)
    dtype: torch.dtype = torch.bfloat16
    mesh: tuple[int, int] | None = None
    """Ranks that gather keys, by ranks that divide heads; None: one dimension, of any number of ranks."""


def _window(left: int, right: int) -> tuple[tuple[str, Any], ...]:
    return (("window_size", (left, right)),)


_PACK = ((0, 5, 170, 170, 300), (0, 60, 60, 200, 301))
CASES = {
    "full": Case(options=()),
    "causal": Case(),
    "zigzag": Case(layout="zigzag"),
    "odd length": Case(rows=(261, 261)),
    "odd length, zigzag": Case(rows=(1283, 1283), layout="zigzag", batch=1, heads=4),
    "short": Case(rows=(5, 5), layout="zigzag"),
    "one row of one head": Case(heads=4, rows=(129, 129), batch=1),  # on 4 ranks
    "more keys": Case(rows=(100, 333)),
    "more queries, zigzag": Case(rows=(333, 100), layout="zigzag"),
    "multi-head": Case(heads=5, kv_heads=5, dtype=torch.float16),
    "value head dim": Case(head_dim=24, value_head_dim=13),
    "strided": Case(head_dim=15, value_head_dim=15, layout="zigzag"),
    "window": Case(options=(("window_size", (70, 3)),), rows=(300, 300)),
    "chunks, zigzag": Case(options=(("attention_chunk", 90), ("causal", True)), rows=(300, 300), layout="zigzag"),
    "softcap": Case(options=(("softcap", 0.5), ("softmax_scale", 0.3))),
    "slopes": Case(slopes=True, layout="zigzag"),
    "sinks": Case(sinks=True),
    "gradient of the log-sum-exp": Case(sinks=True, lse_gradient=True, layout="zigzag"),
    "order-free": Case(options=(("causal", True), ("schedule", "order_free"))),
    "spt": Case(options=(("schedule", "spt"), ("causal", True)), layout="zigzag"),
    "pack": Case(rows=(300, 301), offsets=_PACK),
    "pack, some rows unused": Case(
        rows=(300, 301), offsets=_PACK, used=((5, 100, 0, 130), (50, 0, 140, 101)), layout="zigzag"
    ),
    "pack, zigzag": Case(rows=(300, 301), offsets=_PACK, layout="zigzag", sinks=True, slopes=True),
    "not a number": Case(spoilt=True),
}


_LONG_PACK = ((0, 40, 1340, 1340, 1501, 1700), (0, 130, 1330, 1400, 1400, 1905))
# For more ranks than KV heads.
BEYOND_KV_HEADS = {
    "keys gathered, full": Case(heads=3, kv_heads=1, rows=(1001, 701), options=()),
    "keys gathered, full, zigzag": Case(heads=2, kv_heads=1, rows=(1025, 1501), options=(), layout="zigzag"),
    "keys gathered, causal": Case(heads=4, kv_heads=1, rows=(1103, 1103)),
    "keys gathered, causal, zigzag": Case(heads=2, kv_heads=1, rows=(1103, 1103), layout="zigzag"),
    "keys gathered, split heads": Case(heads=8, kv_heads=1, rows=(1024, 1024), batch=1),
    "keys gathered, two KV heads": Case(heads=4, kv_heads=2, rows=(1103, 1103), layout="zigzag"),
    "keys gathered, three KV heads": Case(heads=3, kv_heads=3, rows=(641, 641), batch=1, options=()),
    "keys gathered, 96 columns": Case(heads=1, kv_heads=1, rows=(7680, 1536), batch=1, head_dim=96, options=()),
    "keys gathered, no sequence": Case(heads=2, kv_heads=1, rows=(641, 641), batch=0),
    "keys gathered, multi-head": Case(heads=1, kv_heads=1, rows=(1024, 1024), dtype=torch.float16, layout="zigzag"),
    "keys gathered, spt": Case(
        heads=3, kv_heads=1, rows=(641, 641), options=(("schedule", "spt"), ("causal", True)), layout="zigzag"
    ),
    "keys gathered, negative scale": Case(
        heads=2, kv_heads=1, rows=(521, 521), options=(("schedule", "spt"), ("softmax_scale", -0.1))
    ),
    "keys gathered, odd head dims": Case(heads=2, kv_heads=1, rows=(641, 641), head_dim=15, value_head_dim=13),
    "keys gathered, gradient of the log-sum-exp": Case(heads=2, kv_heads=1, rows=(641, 641), lse_gradient=True),
    "keys gathered, short": Case(heads=2, kv_heads=1, rows=(5, 5), layout="zigzag"),
    "keys gathered, no keys": Case(heads=2, kv_heads=1, rows=(5, 0), options=()),
    "keys gathered, window": Case(heads=3, kv_heads=1, rows=(1103, 1103), options=_window(300, 0)),
    "keys gathered, window, zigzag": Case(
        heads=2, kv_heads=1, rows=(1503, 1503), batch=1, options=_window(700, 50), layout="zigzag"
    ),
    "keys gathered, window of few keys": Case(heads=2, kv_heads=1, rows=(1103, 1103), options=_window(3, 2)),
    "keys gathered, window, other lengths": Case(heads=2, kv_heads=1, rows=(901, 1303), options=_window(200, 130)),
    "keys gathered, window, more queries": Case(
        heads=2, kv_heads=1, rows=(1303, 601), options=_window(200, 130), layout="zigzag"
    ),
    "keys gathered, window, left unbounded": Case(heads=2, kv_heads=1, rows=(1103, 1103), options=_window(-1, 140)),
    "keys gathered, window, right unbounded": Case(heads=2, kv_heads=1, rows=(1103, 1103), options=_window(140, -1)),
    "keys gathered, window (-1, 0)": Case(heads=2, kv_heads=1, rows=(801, 801), options=_window(-1, 0)),
    "keys gathered, window, split heads": Case(
        heads=8, kv_heads=1, rows=(1024, 1024), batch=1, options=(*_window(500, 0), ("schedule", "descending"))
    ),
    "keys gathered, window, spt": Case(
        heads=2, kv_heads=1, rows=(1103, 1103), options=(*_window(400, 100), ("schedule", "spt")), layout="zigzag"
    ),
    "keys gathered, window, gradient of the log-sum-exp": Case(
        heads=2, kv_heads=1, rows=(641, 641), options=_window(200, 20), lse_gradient=True
    ),
    "keys gathered, causal, more keys": Case(heads=4, kv_heads=1, rows=(701, 1301), layout="zigzag"),
    "keys gathered, causal, more queries": Case(heads=4, kv_heads=1, rows=(1301, 501)),
    "keys gathered, causal, spt, more queries": Case(
        heads=2, kv_heads=1, rows=(1301, 701), options=(("causal", True), ("schedule", "spt")), layout="zigzag"
    ),
    "keys gathered, chunks of attention": Case(
        heads=2, kv_heads=1, rows=(1103, 1103), options=(("causal", True), ("attention_chunk", 300)), layout="zigzag"
    ),
    "keys gathered, chunks of attention, other lengths": Case(
        heads=2, kv_heads=1, rows=(801, 1203), options=(("causal", True), ("attention_chunk", 450))
    ),
    "keys gathered, rows within tiles": Case(heads=2, kv_heads=1, rows=(1104, 1104), layout="zigzag"),
    "keys gathered, rows within tiles, full": Case(
        heads=2, kv_heads=1, rows=(600, 1104), options=(), lse_gradient=True, head_dim=15
    ),
    "keys gathered, 96 columns, within tiles": Case(heads=2, kv_heads=1, rows=(1100, 1100), head_dim=96),
    "keys gathered, 256 columns, window": Case(
        heads=2, kv_heads=1, rows=(1300, 1300), batch=1, head_dim=256, value_head_dim=256, options=_window(500, 0)
    ),
    "keys gathered, pack": Case(heads=2, kv_heads=1, rows=(300, 301), offsets=_PACK),
    "keys gathered, pack, full, zigzag": Case(
        heads=2, kv_heads=1, rows=(310, 330), offsets=_PACK, options=(), layout="zigzag", lse_gradient=True
    ),
    "keys gathered, long pack": Case(heads=2, kv_heads=1, rows=(1800, 1907), offsets=_LONG_PACK),
    "keys gathered, long pack, window": Case(
        heads=2, kv_heads=1, rows=(1700, 1905), offsets=_LONG_PACK, options=_window(300, 60), layout="zigzag",
    ),
    "keys gathered, long pack, gradient of the log-sum-exp": Case(
        heads=4, kv_heads=1, rows=(1700, 1905), offsets=_LONG_PACK, lse_gradient=True, dtype=torch.float16
    ),
    "keys gathered, pack, some rows unused": Case(
        heads=2, kv_heads=1, rows=(1700, 1905), offsets=_LONG_PACK, layout="zigzag",
        used=((40, 1250, 0, 100, 199), (100, 1200, 70, 0, 500)),
    ),
    "keys gathered, pack that begins later": Case(
        heads=2, kv_heads=1, rows=(900, 920), offsets=((7, 300, 890), (11, 311, 900)), options=_window(200, 10)
    ),
    "keys gathered, chunks of attention and a window": Case(
        heads=2, kv_heads=1, rows=(1103, 1103), options=(*_window(250, 0), ("causal", True), ("attention_chunk", 300))
    ),
    "keys gathered, pack of nothing": Case(heads=2, kv_heads=1, rows=(7, 9), offsets=((0, 0), (0, 0))),
    "keys gathered, not a number": Case(heads=4, kv_heads=1, rows=(1103, 1103), spoilt=True),
}  # fmt: skip

_FULL: tuple[tuple[str, Any], ...] = ()
MESH_CASES = {
    f"mesh of {case.mesh}, {name}": case
    for name, case in {
        "full": Case(heads=8, kv_heads=2, rows=(512, 256), options=_FULL, mesh=(2, 2)),
        "full, zigzag": Case(heads=8, kv_heads=4, rows=(512, 1024), options=_FULL, layout="zigzag", mesh=(2, 2)),
        "causal": Case(heads=8, kv_heads=4, rows=(512, 512), mesh=(2, 2)),
        "causal, zigzag": Case(heads=8, kv_heads=2, rows=(1024, 1024), batch=1, layout="zigzag", mesh=(2, 2)),
        "fp16, three KV heads": Case(
            heads=6, kv_heads=3, rows=(512, 512), layout="zigzag", dtype=torch.float16, mesh=(2, 2)
        ),
        "window": Case(heads=8, kv_heads=2, rows=(512, 1024), options=_window(300, 20), mesh=(2, 2)),
        "causal, more queries, zigzag": Case(heads=4, kv_heads=2, rows=(1024, 512), layout="zigzag", mesh=(2, 2)),
        "rows within tiles": Case(heads=4, kv_heads=2, rows=(520, 520), mesh=(2, 2), lse_gradient=True),
        "unequal chunks": Case(heads=4, kv_heads=2, rows=(1103, 1103), mesh=(2, 2)),
        "unequal chunks, zigzag": Case(heads=4, kv_heads=2, rows=(1103, 1103), batch=1, layout="zigzag", mesh=(2, 2)),
        "gradient of the log-sum-exp": Case(
            heads=8, kv_heads=4, rows=(512, 512), layout="zigzag", lse_gradient=True, mesh=(2, 2)
        ),
        "spt": Case(rows=(512, 512), options=(("schedule", "spt"), ("causal", True)), mesh=(2, 2)),
        "odd head dims": Case(rows=(512, 512), head_dim=15, value_head_dim=13, batch=1, mesh=(2, 2)),
        "short": Case(rows=(5, 5), layout="zigzag", mesh=(2, 2)),
        "no keys": Case(rows=(5, 0), options=_FULL, mesh=(2, 2)),
        "no sequence": Case(rows=(512, 512), batch=0, mesh=(2, 2)),
        "not a number": Case(rows=(512, 512), spoilt=True, mesh=(2, 2)),
        "sinks": Case(sinks=True, mesh=(1, 2)),
        "zigzag": Case(kv_heads=2, layout="zigzag", options=_FULL, mesh=(1, 2)),
        "keys gathered, causal": Case(heads=4, kv_heads=1, rows=(512, 512), layout="zigzag", mesh=(2, 1)),
        "keys gathered, full": Case(heads=2, kv_heads=1, rows=(641, 301), options=_FULL, mesh=(2, 1)),
        "within the KV heads": Case(slopes=True, mesh=(2, 1)),
    }.items()
}  # fmt: skip

# Where many thread blocks work on a head at once.
LARGE_CASES = {
    "large": Case(heads=16, kv_heads=8, rows=(4096, 4096), head_dim=128, value_head_dim=128),
    "large, zigzag, window": Case(
        heads=16, kv_heads=8, rows=(4000, 4000), head_dim=64, value_head_dim=64, layout="zigzag",
        options=(("causal", True), ("window_size", (700, 0))),
    ),
}  # fmt: skip
LARGE_BEYOND_KV_HEADS = {
    f"keys gathered, large, {head_dim} and {value_head_dim} columns": Case(
        heads=8, kv_heads=1, rows=(rows, rows), batch=1, head_dim=head_dim, value_head_dim=value_head_dim,
        layout="zigzag", lse_gradient=head_dim == 192,
    )
    for head_dim, value_head_dim, rows in [
        (64, 64, 4001), (96, 96, 5120), (128, 128, 8192), (192, 128, 6144), (192, 192, 6144), (256, 256, 5120)
    ]
}  # fmt: skip


def cases_of(device: str, ranks: int) -> dict[str, Case]:
    """Of more ranks than KV heads those that gather keys, and else the others; and those of meshes of all the ranks."""
    gathered = BEYOND_KV_HEADS | (LARGE_BEYOND_KV_HEADS if device == "cuda" else {})
    cases = gathered | CASES | (LARGE_CASES if device == "cuda" else {})
    found = {name: case for name, case in cases.items() if (name in gathered) == (case.kv_heads < ranks)}
    return found | {name: case for name, case in MESH_CASES.items() if case.mesh and math.prod(case.mesh) == ranks}


def inputs(case: Case, device: str = "cpu") -> dict[str, torch.Tensor]:
    """What one process would have."""
    generator = torch.Generator().manual_seed(7)
    rows_q, rows_k = ((case.rows[0],), (case.rows[1],)) if case.offsets else [(case.batch, n) for n in case.rows]
    shapes = {
        "q": (*rows_q, case.heads, case.head_dim), "k": (*rows_k, case.kv_heads, case.head_dim),
        "v": (*rows_k, case.kv_heads, case.value_head_dim), "dout": (*rows_q, case.heads, case.value_head_dim),
    }  # fmt: skip
    tensors = {name: torch.randn(shape, generator=generator).to(case.dtype) for name, shape in shapes.items()}
    tensors["dlse"] = torch.randn(*rows_q[:-1], case.heads, rows_q[-1], generator=generator)
    tensors["slopes"] = torch.rand(case.heads, generator=generator)
    tensors["sinks"] = torch.randn(case.heads, generator=generator)
    if case.spoilt:
        tensors["k"][-1, -1, min(1, case.kv_heads - 1), 3] = torch.nan
    return {name: x.to(device) for name, x in tensors.items()}


def results(case: Case, tensors: dict[str, torch.Tensor], attention) -> dict[str, torch.Tensor]:
    """Output, log-sum-exp and gradients of `attention(q, k, v, **options)`."""
    leaves = {name: tensors[name].clone().requires_grad_() for name in ("q", "k", "v")}
    options: dict[str, Any] = dict(case.options)
    if case.slopes:
        options["alibi_slopes"] = tensors["slopes"]
    if case.sinks:
        leaves["sinks"] = tensors["sinks"].clone().requires_grad_()
        options["learnable_sink"] = leaves["sinks"]
    out, lse, _ = attention(leaves["q"], leaves["k"], leaves["v"], return_attn_probs=True, **options)
    outputs, gradients = [out], [tensors["dout"]]
    if case.lse_gradient:
        outputs, gradients = [out, lse], [*gradients, tensors["dlse"]]
    of_leaves = torch.autograd.grad(outputs, list(leaves.values()), gradients)
    return {"out": out.detach(), "lse": lse.detach()} | {f"d{name}": x for name, x in zip(leaves, of_leaves)}


def pack_arguments(case: Case, device: str) -> dict[str, Any]:
    if not case.offsets:
        return {}
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in case.offsets)
    used_q, used_k = (
        (None, None) if case.used is None else (torch.tensor(x, dtype=torch.int32, device=device) for x in case.used)
    )
    longest = [max(end - start for start, end in zip(x, x[1:])) for x in case.offsets]
    return {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": used_q, "seqused_k": used_k,
        "max_seqlen_q": max(1, longest[0]), "max_seqlen_k": max(1, longest[1]),
    }  # fmt: skip


def on_one_process(case: Case, device: str = "cpu") -> dict[str, torch.Tensor]:
    attention = functools.partial(
        flash_attn_varlen_func if case.offsets else flash_attn_func, **pack_arguments(case, device)
    )
    return {name: x.cpu() for name, x in results(case, inputs(case, device), attention).items()}


def of_rank(case: Case, name: str, x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The rank's part of a tensor of one process."""
    if name in ("slopes", "sinks", "dsinks"):
        return x
    dim = -1 if name in ("lse", "dlse") else 0 if case.offsets else 1
    return shard(x, rank, ranks, dim=dim, layout=case.layout)


mesh_of = functools.cache(init_device_mesh)


def on_this_rank(case: Case, mesh, sync_debug_mode: str = "default") -> dict[str, torch.Tensor]:
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), mesh.device_type
    if case.mesh:
        mesh = mesh_of(device, case.mesh)
    tensors = {name: of_rank(case, name, x, rank, ranks) for name, x in inputs(case, device).items()}
    attention = functools.partial(
        context_parallel_varlen_attention if case.offsets else context_parallel_attention,
        mesh=mesh, layout=case.layout, **pack_arguments(case, device),
    )  # fmt: skip
    if device == "cuda":
        torch.cuda.set_sync_debug_mode(sync_debug_mode)
    try:
        found = results(case, tensors, attention)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return {name: x.cpu() for name, x in found.items()}


def waits_for_the_gpu(case: Case, mesh) -> str:
    """What torch says where the host waits in a call; "" where it does not."""
    try:
        on_this_rank(case, mesh, sync_debug_mode="error")
    except RuntimeError as error:
        return str(error)
    return ""


def main(rank: int, ranks: int, port: int, folder: pathlib.Path, device: str = "cpu") -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    join(rank, ranks, port, 120, "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    mesh = DeviceMesh(device, list(range(ranks)))
    found: dict[str, Any] = {name: on_this_rank(case, mesh) for name, case in cases_of(device, ranks).items()}
    if device == "cuda":
        # After calls in which torch sets libraries up.
        found["waits"] = {
            name: waits_for_the_gpu(case, mesh)
            for name, case in cases_of(device, ranks).items()
            if name in ("pack, zigzag", "keys gathered, causal, zigzag", "mesh of (2, 2), causal, zigzag")
        }
    torch.save(found, folder / f"rank_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), pathlib.Path(sys.argv[4]), *sys.argv[5:])

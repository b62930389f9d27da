"""One rank of a group that makes the same calls many times while its GPU has other work.

See test_context_parallel_edges.py and gpu/test_context_parallel_load.py.

    python context_parallel_load.py RANK WORLD_SIZE PORT FOLDER SEQLEN REPEATS [cuda]

Prints one line of JSON: for each kind of call how many elements had other bits than those of one call of the whole, and
of what. Tensor parallelism is a call of a part of the heads; where there is one rank, it has both halves in turn.
"""

import functools
import json
import pathlib
import sys

import torch
import torch.distributed as dist
from rank_processes import join
from torch.distributed.device_mesh import DeviceMesh

from dash_attn import flash_attn_func
from dash_attn.distributed import LAYOUTS, context_parallel_attention, shard

HEADS, KV_HEADS, HEAD_DIM = 16, 4, 128
NAMES = ("out", "softmax_lse", "dq", "dk", "dv")


class NoLoad:
    """In the place of gpu_load.Perturbation on a CPU."""

    def enqueue(self, kernels: int) -> None:
        pass

    def move_allocations(self) -> None:
        pass

    def stop(self) -> None:
        pass


def load_of(device: str, seed: int):
    if device == "cpu":
        return NoLoad()
    sys.path.insert(0, str(pathlib.Path(__file__).parent / "gpu"))
    from gpu_load import Perturbation

    return Perturbation(seed)


def whole_inputs(seqlen: int, device: str) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output."""
    generator = torch.Generator().manual_seed(seqlen)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(1, seqlen, n, HEAD_DIM, generator=generator).bfloat16().to(device) for n in heads]


def results(attention, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """All of (1, rows, heads, ...)."""
    *leaves, dout = tensors
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, lse, _ = attention(*leaves, causal=True, return_attn_probs=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    return dict(zip(NAMES, (out.detach(), lse.detach().transpose(1, 2), *gradients), strict=True))


def part_of_heads(x: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    each = x.shape[2] // parts
    return x[:, :, part * each : (part + 1) * each].contiguous()


def other_bits(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How many elements, a tensor that nobody waits for."""
    if actual.shape != expected.shape:
        return torch.tensor(actual.numel(), device=actual.device)
    words = torch.int32 if actual.dtype == torch.float32 else torch.int16
    return (actual.contiguous().view(words) != expected.contiguous().view(words)).sum()


def main(rank: int, ranks: int, port: int, folder: str, seqlen: int, repeats: int, device: str = "cpu") -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    join(rank, ranks, port, 120, "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    mesh = DeviceMesh(device, list(range(ranks)))
    q, k, v, dout = whole_inputs(seqlen, device)
    calls = {}
    # Of one KV head several ranks gather the keys.
    for kv_heads in (1, KV_HEADS) if ranks > 1 else (KV_HEADS,):
        whole = [q, k[:, :, :kv_heads].contiguous(), v[:, :, :kv_heads].contiguous(), dout]
        of_one = results(flash_attn_func, whole)
        assert all(bool(x.isfinite().all()) for x in of_one.values())
        for layout in LAYOUTS:
            cut = functools.partial(shard, rank=rank, ranks=ranks, dim=1, layout=layout)
            attention = functools.partial(context_parallel_attention, mesh=mesh, layout=layout)
            name = f"{layout}, {kv_heads} KV heads"
            calls[name] = attention, [cut(x) for x in whole], {name: cut(x) for name, x in of_one.items()}
    parts = max(ranks, 2)
    for part in [rank] if ranks > 1 else range(parts):
        cut = functools.partial(part_of_heads, part=part, parts=parts)
        calls[f"heads, part {part}"] = flash_attn_func, [cut(x) for x in whole], {k: cut(x) for k, x in of_one.items()}

    load = load_of(device, rank)
    counts = {name: torch.zeros(len(NAMES), dtype=torch.int64, device=device) for name in calls}
    for _ in range(repeats):
        for name, (attention, tensors, expected) in calls.items():
            load.enqueue(4)
            load.move_allocations()
            found = results(attention, tensors)
            counts[name] += torch.stack([other_bits(found[key], x) for key, x in expected.items()])
    load.stop()
    print(json.dumps({name: dict(zip(NAMES, count.tolist())) for name, count in counts.items()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6]), *sys.argv[7:])

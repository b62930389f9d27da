"""Demonstrates dash_attn on this machine: `python -m dash_attn.demo`, which `make demo` runs.

The demo differentiates a transformer layer twice and compares the bits of its gradients. It then compares the schedules
in the model and draws them. On a Hopper GPU it runs the kernels and PyTorch's own attention, elsewhere the reference.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import pathlib
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import dash_attn
from dash_attn import schedule
from dash_attn.info import why_no_kernels_run


@dataclasses.dataclass(frozen=True)
class Size:
    batch: int
    seqlen: int
    heads: int
    head_dim: int
    repeats: int  # number of backward passes to compare

    def __str__(self) -> str:
        return f"batch {self.batch}, seqlen {self.seqlen}, {self.heads} heads of {self.head_dim}, bf16, causal"


CPU = Size(batch=1, seqlen=1024, heads=4, head_dim=64, repeats=3)
GPU = Size(batch=2, seqlen=4096, heads=16, head_dim=128, repeats=50)


class TransformerLayer(nn.Module):
    """A pre-norm transformer layer whose attention is dash_attn's; x is (batch, seqlen, heads * head_dim)."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        width = heads * head_dim
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.proj(dash_attn.flash_attn_func(q, k, v, causal=True).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


def digest(tensors) -> str:
    """Returns the first 16 hexadecimal digits of the SHA-256 of the tensors' bytes."""
    sha = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        sha.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    return sha.hexdigest()[:16]


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def train_step(layer: TransformerLayer, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(layer(x).square().mean(), [x, *layer.parameters()]))


def show_layer(size: Size, device: str) -> bool:
    heading(f"A transformer layer, forward and backward, twice ({size})")
    torch.manual_seed(0)
    layer = TransformerLayer(size.heads, size.head_dim).to(device, torch.bfloat16)
    x = torch.randn(size.batch, size.seqlen, size.heads * size.head_dim, device=device, dtype=torch.bfloat16)
    digests = []
    for run in (1, 2):
        start = time.perf_counter()
        gradients = train_step(layer, x)
        digests.append(digest(gradients))
        took = time.perf_counter() - start
        print(f"run {run}: {len(gradients)} gradients, SHA-256 {digests[-1]}  ({took:.2f} s)", flush=True)
    equal = digests[0] == digests[1]
    print("all gradients have the same bits" if equal else "THE BITS DIFFER")
    return equal


def attention_inputs(size: Size, device: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    shape = (size.batch, size.seqlen, size.heads, size.head_dim)
    return tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))


def differing_runs(attention, inputs, repeats: int) -> int:
    """Counts the backward passes, out of `repeats`, in which the bits of a gradient differ from the first pass."""
    *qkv, dout = inputs
    leaves = [t.detach().requires_grad_() for t in qkv]
    out = attention(*leaves)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    differing = 0
    for _ in range(repeats):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        differing += not all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(first, again))
    return differing


def show_repeats(size: Size, device: str) -> bool:
    heading(f"The backward of attention alone, {size.repeats} more times ({size})")
    inputs = attention_inputs(size, device)
    names = schedule.fitting(causal=True)
    equal = True
    for name in names:
        attention = functools.partial(dash_attn.flash_attn_func, causal=True, schedule=name)
        count = differing_runs(attention, inputs, size.repeats)
        print(f"dash_attn, schedule {name}: {count} of {size.repeats} runs differ from the first", flush=True)
        equal &= count == 0
    if device != "cuda":
        print("PyTorch's own attention adds dQ with atomics only on a GPU, so there is no comparison here")
        return equal

    def torch_attention(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    count = differing_runs(torch_attention, inputs, size.repeats)
    print(f"PyTorch's flash attention: {count} of {size.repeats} runs differ from the first")
    return equal


def show_orders(size: Size, device: str) -> None:
    heading("Why the order matters: the same backward with other orders of its sums")
    *qkv, dout = attention_inputs(size, device)
    gradients: dict[str, tuple[torch.Tensor, ...]] = {}
    names = schedule.fitting(causal=True)
    for name in names:
        q, k, v = (t.detach().requires_grad_() for t in qkv)
        out = dash_attn.flash_attn_func(q, k, v, causal=True, schedule=name)
        gradients[name] = torch.autograd.grad(out, (q, k, v), dout)
        first = gradients[names[0]]
        differing = [int(torch.ne(a, b).sum()) for a, b in zip(gradients[name], first)]
        counts = ", ".join(f"{gradient} {count}" for gradient, count in zip(("dQ", "dK", "dV"), differing))
        print(f"{name:16} elements that differ from {names[0]}: {counts}  (of {first[0].numel()} each)", flush=True)
    print("sums in another order round differently, so each schedule fixes the order, and with it the bits")


def run_module(module: str, *arguments: str) -> None:
    print(f"$ python -m {module} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


def show_schedules(output: pathlib.Path) -> None:
    heading("The schedules in the model, for the shape of a training step")
    run_module("dash_attn.schedule", "--seqlen-q", "8192")
    heading("Their Gantt charts, at a shape small enough to see")
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed, so there are no charts: pip install matplotlib")
        return
    output.mkdir(parents=True, exist_ok=True)
    small = ["--seqlen-q", "1024", "--batch", "1", "--heads", "2", "--sms", "8"]
    for mask in ("full", "causal"):
        run_module("dash_attn.schedule", *small, "--mask", mask, "--png", str(output / f"schedules_{mask}.png"))


def show_benchmark() -> None:
    heading("A short benchmark")
    if importlib.util.find_spec("benchmarks") is None:
        print("benchmarks/ is not installed: run the demo from a checkout to measure")
        return
    run_module("benchmarks.run", "--grid", "bar", "--peers", "fa2", "cudnn")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dash_attn.demo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("demo_output"), help="folder for the charts"
    )
    arguments = parser.parse_args()
    reason = why_no_kernels_run()
    if reason is None:
        size, device = GPU, "cuda"
        print(f"On {torch.cuda.get_device_name()}, with dash_attn's kernels.")
    else:
        size, device = CPU, "cpu"
        print(f"On the CPU, with dash_attn's reference ({reason}).")
    print(f"torch {torch.__version__}")
    equal = show_layer(size, device)
    equal &= show_repeats(size, device)
    show_orders(size, device)
    show_schedules(arguments.output)
    if reason is None:
        show_benchmark()
    print(f"\nAll bits agree: {'yes' if equal else 'NO'}.")
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Measures the host's cost of a call: microseconds until the call returns, while the GPU works asynchronously.

The shape is so small that nothing ever waits for the GPU. Calls follow each other without synchronization, in blocks
that are too short to fill the launch queue. Implementations alternate block by block, so that drift affects all of them
alike, and the figure is the median of the blocks. Both passes go through autograd.
"""

import contextlib
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.shapes import SHAPE_FIELDS, Shape

SHAPE = Shape("bf16", head_dim=64, heads=4, kv_heads=4, mask="full", seqlen=128, batch=1)
PASSES = ("forward", "both")
CALLS, BLOCKS, WARM_UP_BLOCKS = 50, 60, 3
OURS, TORCH = "dash_attn", "torch_sdpa"
# The largest allowed ratio of our time to torch's.
BARS = {"forward": 1.5, "both": 1.3}

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _ours() -> Attention:
    return importlib.import_module("dash_attn").flash_attn_func


def _torch_sdpa() -> Attention:
    return torch.nn.functional.scaled_dot_product_attention


def _flash_attn_3() -> Attention:
    function = importlib.import_module("flash_attn_interface").flash_attn_func

    def output(q, k, v):
        result = function(q, k, v, deterministic=True)
        return result[0] if isinstance(result, tuple) else result

    return output


IMPLEMENTATIONS = {OURS: _ours, TORCH: _torch_sdpa, "fa3": _flash_attn_3}


def _calls(name: str, attention: Attention, device: torch.device) -> dict[str, Callable[[], object]]:
    # torch's function takes heads before positions; the memory layout is the same.
    sizes = (SHAPE.batch, SHAPE.seqlen, SHAPE.heads, SHAPE.head_dim)
    tensors = [torch.randn(sizes, device=device, dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, dout = (t.transpose(1, 2) for t in tensors) if name == TORCH else tensors
    leaves = tuple(t.detach().requires_grad_() for t in (q, k, v))

    def forward() -> None:
        attention(q, k, v)

    def both() -> None:
        torch.autograd.grad(attention(*leaves), leaves, dout)

    return {"forward": forward, "both": both}


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Turns off Python's garbage collector, and uses flash attention as torch's only backend."""
    gc.collect()
    gc.disable()
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        gc.enable()


def _block_us(call: Callable[[], object], count: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    return 1e6 * (time.perf_counter() - start) / count


def measure(device: torch.device, calls: int = CALLS, blocks: int = BLOCKS) -> list[dict]:
    """Returns a row per pass and implementation that can be imported and run here, with its `host_us`."""
    found = {}
    with _undisturbed():
        for name, load in IMPLEMENTATIONS.items():
            try:
                prepared = _calls(name, load(), device)
                for call in prepared.values():
                    call()
            except Exception as error:  # a missing package, a broken binary, or a baseline that needs a GPU
                if name == OURS:
                    raise
                print(f"left out {name}: {type(error).__name__}: {error}", flush=True)
                continue
            found.update({(name, pass_): call for pass_, call in prepared.items()})
        times = {key: [] for key in found}
        for block in range(WARM_UP_BLOCKS + blocks):
            for key, call in found.items():
                us = _block_us(call, calls, device)
                if block >= WARM_UP_BLOCKS:
                    times[key].append(us)
    shape = {field: getattr(SHAPE, field) for field in SHAPE_FIELDS}
    return [
        {"impl": name, "pass": pass_, **shape, "host_us": round(statistics.median(us), 2)}
        for (name, pass_), us in times.items()
    ]


def table(rows: list[dict]) -> str:
    """Formats microseconds per call, a line per implementation, and our ratio to torch with its limit."""
    figures = {(row["impl"], row["pass"]): row["host_us"] for row in rows}
    names = list(dict.fromkeys(row["impl"] for row in rows))
    lines = [f"host time of a call, us ({SHAPE})", f"{'':<12}{'forward':>10}{'forward + backward':>20}"]
    for name in names:
        lines.append(f"{name:<12}{figures[name, 'forward']:>10.1f}{figures[name, 'both']:>20.1f}")
    if TORCH in names:
        ratios = {pass_: figures[OURS, pass_] / figures[TORCH, pass_] for pass_ in PASSES}
        lines.append(f"{'ratio':<12}{ratios['forward']:>10.2f}{ratios['both']:>20.2f}")
        lines.append(f"{'at most':<12}{BARS['forward']:>10.2f}{BARS['both']:>20.2f}")
    return "\n".join(lines)

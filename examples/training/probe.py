"""Attention to inputs that are the same for every layout, recorded: receipts that runs on any ranks have in common.

The activations of a model are not: a linear layer sees other numbers of rows on other numbers of ranks.
"""

from __future__ import annotations

import pathlib

import torch

from dash_attn.receipts import Recorder, tap

from .attention import Attend
from .layout import Layout
from .model import Shape

PREFIX = "probe"
BATCHES = 2


def attend_and_record(
    folder: pathlib.Path, attend: Attend, shape: Shape, layout: Layout, device: torch.device, seed: int
) -> None:
    """Writes receipts of output and gradients; q, k, v and the output's gradient are normal, and follow from `seed`."""
    counts = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads, "gradient": shape.heads}
    with Recorder(folder, facts={"seed": seed}) as recorder:
        for batch in range(BATCHES):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + batch)
            with recorder.step(batch):
                parts = {}
                for name, heads in counts.items():
                    size = (layout.sequences, layout.seqlen, heads, shape.head_dim)
                    parts[name] = layout.cut(torch.randn(size, generator=generator).bfloat16()).to(device)
                gradient = parts.pop("gradient")
                tensors = [x.requires_grad_() for x in parts.values()]
                for name, x in parts.items():
                    tap(x, f"{PREFIX}.{name}", shard=layout.shard(*x.shape[2:]))
                out = attend(*tensors)
                tap(out, f"{PREFIX}.out", shard=layout.shard(*out.shape[2:]))
                out.backward(gradient)

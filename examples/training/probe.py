"""The additional records of --probe: attention to inputs that are equal in every layout, in receipts that runs on any
ranks have in common, and each stage of the model's layers, so that receipts show where two runs differ first.

A model's activations differ between layouts, because a linear layer sees other numbers of rows on other numbers of
ranks.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import torch
from torch import Tensor, nn

from dash_attn.receipts import Recorder, Shard, tap

from .attention import Attend
from .layout import Layout
from .model import Attention, RMSNorm, Shape

PREFIX = "probe"
BATCHES = 2


def attend_and_record(
    folder: pathlib.Path,
    attend: Attend,
    shape: Shape,
    layout: Layout,
    device: torch.device,
    seed: int,
    *,
    resume: bool,
) -> None:
    """Writes receipts of output and gradients. q, k, v and the output's gradient are normal, and depend on `seed`."""
    counts = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads, "gradient": shape.heads}
    with Recorder(folder, facts={"seed": seed}, resume=resume) as recorder:
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


def tap_stages(model: nn.Module, layout: Layout) -> None:
    """Taps the stages between the taps that the model always has, for the recorder of the current step.

    For each norm, linear layer and embedding NAME: `NAME.weight` as gathered for this forward, and `NAME.out`, its
    output with its gradient. For each attention: `NAME.cos` and `NAME.sin`. The taps are hooks, so a run without
    --probe
    does not pay for them.
    """
    for name, module in model.named_modules():
        if isinstance(module, (RMSNorm, nn.Linear, nn.Embedding)):
            module.register_forward_pre_hook(functools.partial(_tap_weight, name))
            module.register_forward_hook(functools.partial(_tap_out, name, layout))
        if isinstance(module, Attention):
            module.register_forward_pre_hook(functools.partial(_tap_angles, name, layout))


def _tap_weight(name: str, module: nn.Module, _: Any) -> None:
    # Detached, because a hook for the gradient would stay on the parameter.
    weight = module.weight.detach()
    tap(weight, f"{name}.weight", shard=Shard.whole(weight.shape))


def _tap_out(name: str, layout: Layout, _: nn.Module, __: Any, out: Tensor) -> None:
    tap(out, f"{name}.out", shard=layout.shard(*out.shape[2:]))


def _tap_angles(name: str, layout: Layout, _: nn.Module, inputs: tuple[Tensor, tuple[Tensor, Tensor]]) -> None:
    for of_angles, part in zip(("cos", "sin"), inputs[1]):
        whole = (layout.seqlen, *part.shape[1:])
        tap(part, f"{name}.{of_angles}", shard=Shard.along(whole, 0, *layout.own_rows))

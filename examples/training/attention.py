"""The attention functions that a run can choose: dash_attn's, and the functions that it is compared with.

Each function is causal, and takes q (sequences, rows, heads, head_dim), and k and v with fewer heads.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dash_attn import flash_attn_func
from dash_attn.distributed import context_parallel_attention

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _dash_attn() -> Attend:
    return functools.partial(flash_attn_func, causal=True)


class _WithoutDeterminism(torch.autograd.Function):
    """Turns torch's deterministic mode off (or on again) when the gradient of a tensor passes."""

    @staticmethod
    def forward(ctx: Any, mode: bool, *tensors: torch.Tensor) -> Any:
        ctx.mode = mode
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        torch.use_deterministic_algorithms(ctx.mode)
        return None, *gradients


def _sdpa(backend: SDPBackend | None) -> Attend:
    """Returns torch's attention, non-deterministic even if the rest of the step is not: torch has one global switch."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mode = torch.are_deterministic_algorithms_enabled()
        q, k, v = (x.transpose(1, 2) for x in _WithoutDeterminism.apply(mode, q, k, v))
        torch.use_deterministic_algorithms(False)
        try:
            grouped = q.shape[1] != k.shape[1]
            if backend is None:
                out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            else:
                with sdpa_kernel(backend):
                    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        finally:
            torch.use_deterministic_algorithms(mode)
        (out,) = _WithoutDeterminism.apply(False, out)
        return out.transpose(1, 2)

    return attend


def _flash_attn_2() -> Attend:
    from flash_attn import flash_attn_func as peer

    return functools.partial(peer, causal=True, deterministic=False)


def _flash_attn_3() -> Attend:
    from flash_attn_interface import flash_attn_func as peer

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = peer(q, k, v, causal=True, deterministic=False)
        return out[0] if isinstance(out, tuple) else out

    return attend


class _LastBits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor) -> torch.Tensor:
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
        noise = torch.randint(2, dq.shape, generator=generator, dtype=torch.int16).to(dq.device)
        return (dq.contiguous().view(torch.int16) ^ noise).view(dq.dtype)


def _noisy() -> Attend:
    return lambda q, k, v: flash_attn_func(_LastBits.apply(q), k, v, causal=True)


ATTENTION: dict[str, Callable[[], Attend]] = {
    "dash_attn": _dash_attn,
    "sdpa": functools.partial(_sdpa, None),
    "sdpa_flash": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "flash_attn_2": _flash_attn_2,
    "flash_attn_3": _flash_attn_3,
    "noisy": _noisy,
}
"""The attention functions by name. `noisy` is dash_attn's with random last bits in dq, for machines without another
non-deterministic attention. All but `dash_attn` run in a non-deterministic mode."""


def make_attention(name: str, mesh: Any = None, order: str = "zigzag") -> Attend:
    """Returns an attention function. `mesh` holds the ranks that share a sequence, in the layout `order`.

    Raises:
        ValueError: the name is not in ATTENTION, or that attention has no context parallelism.
        ImportError: its package is not installed.
    """
    if name not in ATTENTION:
        raise ValueError(f"--attention must be one of {', '.join(ATTENTION)}, got {name!r}")
    if mesh is None:
        return ATTENTION[name]()
    if name != "dash_attn":
        raise ValueError(f"--attention must be dash_attn with --context-parallel above 1, got {name!r}")
    return functools.partial(context_parallel_attention, mesh=mesh, layout=order, causal=True)

"""Gradients that raise where they are differentiated again, as those of `flash_attn_func` do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_order(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A backward whose results raise RuntimeError where they are differentiated.

    Args:
        backward: gets the context, its saved tensors and the gradients. It must not unpack `ctx.saved_tensors` again,
            which torch's non-reentrant checkpoint forbids.

    torch's `once_differentiable` does not do: its results do not lead back to the tensors that they depend on, so that
    `torch.autograd.grad` with respect to these takes the results as constant.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            results = backward(ctx, saved, *gradients)
        return _Final.apply(results, *gradients, *saved) if torch.is_grad_enabled() else results

    return wrapper


class _Final(torch.autograd.Function):
    """Results, and the tensors that they depend on."""

    @staticmethod
    def forward(ctx: Any, results: tuple[Any, ...], *_: torch.Tensor | None) -> tuple[Any, ...]:
        return results

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> None:
        raise RuntimeError("attention must be differentiated at most once, got a second differentiation of dash_attn")

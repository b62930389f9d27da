"""Gradients that raise an error when they are differentiated again, like those of `flash_attn_func`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_order(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Wraps a backward so that differentiating its results raises a RuntimeError.

    torch's `once_differentiable` is not sufficient: its results do not lead back to the tensors that they depend on, so
    `torch.autograd.grad` with respect to these tensors treats the results as constants.

    Args:
        backward: a function of the context, its saved tensors and the gradients. The function must not unpack
            `ctx.saved_tensors` again, which torch's non-reentrant checkpoint forbids.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            results = backward(ctx, saved, *gradients)
        return _Final.apply(results, *gradients, *saved) if torch.is_grad_enabled() else results

    return wrapper


class _Final(torch.autograd.Function):
    """Passes results through, and links them to the tensors that they depend on."""

    @staticmethod
    def forward(ctx: Any, results: tuple[Any, ...], *_: torch.Tensor | None) -> tuple[Any, ...]:
        return results

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> None:
        raise RuntimeError("attention must be differentiated at most once, got a second differentiation of dash_attn")

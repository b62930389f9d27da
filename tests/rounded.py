"""Tensors rounded to bf16 whose gradients are not, for an attention in bf16 inside a model of more bits.

The roundings of such an attention are the only ones. In a model that is in bf16 those of the other layers are larger,
and which of two attentions has results nearer to the truth is chance.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = x.dtype
        return x.bfloat16().to(dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(ctx.dtype), None


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of x in bf16, as `dtype`; its gradient is the one that arrives."""
    return _Rounded.apply(x, dtype)


def distances(found: Sequence[Sequence[Tensor]], exact: Sequence[Sequence[Tensor]]) -> list[float]:
    """Of each result the 2-norm of what it is off, all draws as one vector: one of few elements is off by chance."""
    squares = [
        [(x.double() - y.double()).square().sum().item() for x, y in zip(of_draw, exact_of_draw, strict=True)]
        for of_draw, exact_of_draw in zip(found, exact, strict=True)
    ]
    return [math.sqrt(sum(of_result)) for of_result in zip(*squares, strict=True)]

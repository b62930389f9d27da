"""Linear layers, norms and the like whose bits of a row depend on this row alone, and not on the other rows of a batch.

dash_attn computes attention in this way. torch chooses a matrix product's algorithm by the number of rows, so a row of
a decoding batch and the same row of a training batch can have different bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class _Replaced(TorchFunctionMode):
    """Calls other functions in place of some of torch's."""

    def __init__(self, others: Mapping[Callable, Callable]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._others.get(func, func)(*args, **(kwargs or {}))


def _each_row(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a function that calls `func` for each row of its first argument, always with the shape (1, width)."""

    @functools.wraps(func)
    def of_rows(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # A copy begins at an aligned address, whatever the place of the row.
        out = torch.cat([func(row.clone(), *args, **kwargs) for row in x.reshape(-1, x.shape[-1]).split(1)])
        return out.view(*x.shape[:-1], out.shape[-1])

    return of_rows


def _one_row() -> TorchFunctionMode:
    functions = (functional.linear, functional.rms_norm, functional.silu, functional.log_softmax)
    return _Replaced({func: _each_row(func) for func in functions})


class _Linear(torch.autograd.Function):
    """A linear layer without bias, with a given product of two matrices in the forward and the backward."""

    @staticmethod
    def forward(ctx: Any, product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(x, weight)
        return product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return None, ctx.product(gradient, weight), ctx.product(gradient.t(), x)


def _megatron() -> TorchFunctionMode:
    try:
        from megatron.core.transformer.custom_layers.batch_invariant_kernels import matmul_persistent
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the products megatron need megatron-core and triton (pip install megatron-core triton): {error}"
        ) from error

    def linear(x: Tensor, weight: Tensor, bias: None = None) -> Tensor:
        out = _Linear.apply(matmul_persistent, x.reshape(-1, x.shape[-1]), weight)
        return out.view(*x.shape[:-1], out.shape[-1])

    return _Replaced({functional.linear: linear})


PRODUCTS: dict[str, Callable[[], TorchFunctionMode]] = {"one_row": _one_row, "megatron": _megatron}
"""The ways to compute rows, by name, each a context manager for what calls torch's functions.

`one_row` evaluates linear layers, norms, SiLU and log-softmax one row at a time, so that every call has the same shape.
`megatron` computes linear layers with the batch-invariant Triton product of Megatron-core (`matmul_persistent`), which
needs a GPU. On a GPU torch computes each row of the other functions in the same way in every batch.
"""

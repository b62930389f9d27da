"""Calls under the transforms of torch.func, including torch.vmap.

torch's transforms support neither the C++ derivative of an op nor its batching. If a transform is active, the public
functions call `transformed(op)`: autograd functions in Python that run the op on plain tensors, so that outputs and
gradients have the op's bits. For a dimension of vmap they call the op in a loop, and their backward runs the forward
again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from . import dtensors

Op = Callable[..., tuple[Tensor, Tensor]]

is_active = torch._C._are_functorch_transforms_active


def transformed(op: Op) -> Op:
    """Wraps `op`, which is `dash_attn::attention` or similar, for torch.vmap and the transforms of reverse mode.

    The wrapper raises NotImplementedError for DTensors, functionalize and transforms of forward mode, and RuntimeError
    for a second differentiation.
    """
    return functools.partial(_call, op)


def reject(what: str, tensors: Iterable[Tensor | None], *, but_vmap: bool = False) -> None:
    """Raises NotImplementedError under a transform, for functions that only torch.autograd can differentiate.

    Args:
        what: the name of the called function.
        tensors: the tensors of the call.
        but_vmap: accept calls under torch.vmap.
    """
    levels = get_interpreter_stack() if is_active() else ()
    is_transformed = any(not (but_vmap and level.key() == TransformType.Vmap) for level in levels or ())
    if is_transformed or (forward_ad._current_level >= 0 and any(map(_has_tangent, tensors))):
        raise NotImplementedError(
            f"{what} must not be called under transforms of torch.func or on dual tensors: use torch.autograd.grad"
        )


def _has_tangent(x: Tensor | None) -> bool:
    return x is not None and forward_ad.unpack_dual(x).tangent is not None


# torch.compile does not trace it. Unlike torch.compiler.disable, this imports torch._dynamo, which takes a second, only
# when the function is called.
@_disable_dynamo
def _call(op: Op, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    if any(level.key() == TransformType.Functionalize for level in get_interpreter_stack() or ()):
        raise NotImplementedError(
            "attention must not be called under torch.func.functionalize, for which torch has no rule: use "
            "torch.compile, which removes mutations itself"
        )
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def of_tensors(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        if dtensors.are_among(tensors):
            raise NotImplementedError("DTensors are not supported under torch.func transforms")
        filled = list(constants)
        for place, tensor in zip(places, tensors):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return op(*args, **kwargs)

    return _Forward.apply(of_tensors, *(leaves[place] for place in places))


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(call: Op, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return call(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, *_: Tensor | None) -> tuple[Tensor, ...]:
        raise NotImplementedError(
            "attention has no derivative in forward mode (jvp, jacfwd, hessian, dual tensors): use torch.func.grad, "
            "vjp or jacrev"
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _, *wanted = ctx.needs_input_grad
        return None, *_Backward.apply(functools.partial(_gradients, ctx.call, wanted), *gradients, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple, tuple]:
        return _in_a_loop(_Forward.apply, info, in_dims, *args)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(call: Callable[..., tuple[Tensor | None, ...]], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return call(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor | None, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
        raise RuntimeError("attention must be differentiated at most once, got a second differentiation of dash_attn")

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple, tuple]:
        return _in_a_loop(_Backward.apply, info, in_dims, *args)


def _gradients(
    call: Op, wanted: list[bool], dout: Tensor | None, dlse: Tensor | None, *tensors: Tensor
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the `tensors` that `call` takes, None where a gradient is not `wanted`."""
    inputs = [x.detach().requires_grad_(is_wanted) for x, is_wanted in zip(tensors, wanted)]
    with torch.enable_grad():
        outputs = call(*inputs)
    given = [(x, dx) for x, dx in zip(outputs, (dout, dlse)) if dx is not None]
    leaves = [x for x in inputs if x.requires_grad]
    gradients = iter(torch.autograd.grad([x for x, _ in given], leaves, [dx for _, dx in given]))
    return tuple(next(gradients) if x.requires_grad else None for x in inputs)


def _in_a_loop(call: Callable[..., tuple], info: Any, in_dims: tuple, *args: Any) -> tuple[tuple, tuple]:
    """Implements a rule of vmap: calls once per index and stacks the results. Returns them and the stacked
    dimension."""
    if info.batch_size == 0:
        raise ValueError("torch.vmap must add a dimension of at least 1 to the arguments of dash_attn, got 0")
    results = [
        call(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims)))
        for i in range(info.batch_size)
    ]
    stacked = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*results))
    return stacked, tuple(None if x is None else 0 for x in stacked)

"""Calls on DTensors whose heads or batch are sharded over the ranks of a mesh.

Every rank calls the op on its own part, and no data moves, because the bits of a head and of a sequence do not depend
on the others in a call.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks


class _Axes(NamedTuple):
    """The dimensions of a tensor that may be sharded; _ABSENT if the tensor does not have one of them."""

    batch: int
    heads: int


_BATCH, _HEADS = range(2)
_ABSENT = -1
_OF_A_BATCH = {
    "q": _Axes(0, 2), "k": _Axes(0, 2), "v": _Axes(0, 2), "kv": _Axes(0, 3), "qkv": _Axes(0, 3),
    "out": _Axes(0, 2), "softmax_lse": _Axes(0, 1),
}  # fmt: skip
_OF_A_PACK = {name: _Axes(_ABSENT, axes.heads - 1) for name, axes in _OF_A_BATCH.items()}
_OF_A_PACK["softmax_lse"] = _Axes(_ABSENT, 0)


def are_among(*groups: Iterable[object]) -> bool:
    """Whether one of the objects is a DTensor. Every call runs this check."""
    for group in groups:
        for x in group:
            if type(x) is not Tensor and x is not None and is_dtensor(x):
                return True
    return False


def is_dtensor(x: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor can exist before this module is imported
    return module is not None and isinstance(x, module.DTensor)


def reject(named: Mapping[str, object]) -> None:
    for name, x in named.items():
        if is_dtensor(x):
            raise TypeError(f"{name} must be a plain tensor, got a DTensor: pass this rank's part, its to_local()")


def on_local_parts(
    op: Callable[..., tuple[Tensor, Tensor]],
    named: Mapping[str, Any],
    pack: Mapping[str, Any] | None,
    num_heads_q: object,
    scores: Mapping[str, Any],
    dropout_p: float,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wraps `op` for DTensors: runs it on this rank's part, and gives its results the placements of the first tensor.

    Args:
        named: q, k and v, or the packed tensors that contain them.
        pack: the offsets and lengths of a variable-length batch; None for a dense batch.
        num_heads_q: the number of query heads in a qkv with all heads in one dimension, which cannot be sharded.
        scores: sinks and alibi_slopes, if given.

    Raises:
        NotImplementedError: the call has dropout.
        TypeError: some tensors of the call are DTensors and some are not.
        ValueError: a placement would need data of other ranks, or change bits.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if dropout_p:
        raise NotImplementedError(
            f"dropout_p must be 0 with DTensors (each rank would drop other elements than one process), got {dropout_p}"
        )
    all_axes = _OF_A_BATCH if pack is None else _OF_A_PACK
    if num_heads_q is not None:
        all_axes = all_axes | {"qkv": all_axes["qkv"]._replace(heads=_ABSENT)}
    first = next(iter(named))
    lead = named[first]
    _require_dtensor(first, lead)
    mesh = lead.device_mesh
    sharded = [_sharded_axis(first, lead, all_axes[first], number) for number in range(mesh.ndim)]
    ranks = math.prod([mesh.size(number) for number, axis in enumerate(sharded) if axis == _HEADS])

    def placements(axes: _Axes) -> tuple[Any, ...]:
        dims = [_ABSENT if axis is None else axes[axis] for axis in sharded]
        return tuple(Replicate() if dim == _ABSENT else Shard(dim) for dim in dims)

    def check(name: str, x: Any, axes: _Axes) -> None:
        _require_dtensor(name, x)
        if x.device_mesh != mesh or x.placements != placements(axes):
            raise ValueError(
                f"{name} must have the placements {placements(axes)} on {mesh}, because {first} has "
                f"{lead.placements} there, got {x.placements} on {x.device_mesh}"
            )

    for name, x in named.items():
        axes = all_axes[name]
        check(name, x, axes)
        if ranks > 1 and x.shape[axes.heads] % ranks:
            raise ValueError(
                f"{name} must have a multiple of {ranks} heads, the number of ranks that they are sharded over, got "
                f"{x.shape[axes.heads]}"
            )
    if (slopes := scores.get("alibi_slopes")) is not None:
        check("alibi_slopes", slopes, _Axes(_ABSENT, 0) if slopes.dim() == 1 else _Axes(0, 1))
    if (sinks := scores.get("sinks")) is not None:
        check("learnable_sink", sinks, _Axes(_ABSENT, 0))
        if _BATCH in sharded and sinks.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"learnable_sink must not require a gradient if {first} is sharded by its batch: the gradient is a sum "
                "over the batch, which would depend on the ranks"
            )
    for name, offsets in (pack or {}).items():
        if is_dtensor(offsets):
            check(name, offsets, _Axes(_ABSENT, _ABSENT))

    def call(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        results = op(*map(_local, arguments), **{name: _local(x) for name, x in keywords.items()})
        whole = []
        for name, x in zip(("out", "softmax_lse"), results, strict=True):
            axes, shape = all_axes[name], list(x.shape)
            for axis in (axis for axis in sharded if axis is not None):
                shape[axes[axis]] = lead.shape[all_axes[first][axis]]
            stride = torch.empty(shape, device="meta").stride()
            whole.append(
                DTensor.from_local(
                    x.contiguous(), mesh, placements(axes), run_check=False, shape=torch.Size(shape), stride=stride
                )
            )
        return whole[0], whole[1]

    return call


def _sharded_axis(name: str, x: Any, axes: _Axes, mesh_dim: int) -> int | None:
    """Returns the axis that is sharded over a dimension of the mesh; None if x is replicated."""
    from torch.distributed.tensor import Shard

    placement = x.placements[mesh_dim]
    if placement.is_replicate():
        return None
    if type(placement) is Shard and placement.dim in axes:
        return axes.index(placement.dim)
    words = [f"Shard({dim}), by {axis}" for axis, dim in zip(_Axes._fields, axes) if dim != _ABSENT]
    raise ValueError(f"{name} must have placements of {' or '.join(['Replicate()', *words])}, got {x.placements}")


def _require_dtensor(name: str, x: Tensor) -> None:
    if not is_dtensor(x):
        raise TypeError(f"{name} must be a DTensor like the other tensors of the call, got {checks.describe(x)}")


def _local(x: Any) -> Any:
    return x.to_local() if is_dtensor(x) else x

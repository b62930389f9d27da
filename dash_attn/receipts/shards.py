"""Which part of a whole tensor a process holds: given by the caller, or derived from a DTensor."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a tensor: for each dimension, the index ranges that the part holds.

    Args:
        shape: the shape of the whole tensor.
        ranges: for each dimension, the ranges (start, stop) of the whole's indices that the part holds, in the order of
            the part's memory. The part's length in that dimension is the sum of their lengths.

    Raises:
        ValueError: `ranges` does not have one entry per dimension, or a range exceeds its dimension or overlaps
            another.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(length) for length in self.shape))
        ranges = tuple(tuple((int(start), int(stop)) for start, stop in of_dim) for of_dim in self.ranges)
        object.__setattr__(self, "ranges", ranges)
        if len(ranges) != len(self.shape):
            raise ValueError(
                f"ranges must have an entry for each dimension of the shape {self.shape}, got {len(ranges)} entries"
            )
        for dim, (length, of_dim) in enumerate(zip(self.shape, ranges)):
            for start, stop in of_dim:
                if not 0 <= start <= stop <= length:
                    raise ValueError(f"ranges of dimension {dim} must lie within 0 to {length}, got ({start}, {stop})")
            ordered = sorted(r for r in of_dim if r[0] < r[1])
            for before, after in zip(ordered, ordered[1:]):
                if after[0] < before[1]:
                    raise ValueError(f"ranges of dimension {dim} must not overlap, got {before} and {after}")

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Cached, because a recorder looks up the same few hundred shards in every step.
        return hash((self.shape, self.ranges))

    @classmethod
    def box(cls, shape: Sequence[int], offset: Sequence[int], lengths: Sequence[int]) -> Shard:
        """Returns the part that begins at the index `offset` of a whole of shape `shape` and has the shape `lengths`.

        Args:
            shape: the shape of the whole tensor.
            offset: the index of the part's first element in the whole.
            lengths: the shape of the part.

        Raises:
            ValueError: the arguments have different numbers of dimensions, or the part exceeds the whole.
        """
        if not len(shape) == len(offset) == len(lengths):
            raise ValueError(
                f"shape, offset and lengths must have the same length, got {tuple(shape)}, {tuple(offset)} and "
                f"{tuple(lengths)}"
            )
        # A part without elements may begin anywhere; a DTensor lets such a part begin past the end.
        if 0 in lengths:
            return cls(tuple(shape), tuple(((0, length),) for length in lengths))
        return cls(tuple(shape), tuple(((start, start + length),) for start, length in zip(offset, lengths)))

    @classmethod
    def along(cls, shape: Sequence[int], dim: int, *ranges: Range) -> Shard:
        """Returns the part that has `ranges` of dimension `dim` and all of the other dimensions.

        Args:
            shape: the shape of the whole tensor.
            dim: the dimension that is cut.
            *ranges: the ranges (start, stop) that the part holds, such as the two chunks of a zigzag layout.

        Raises:
            ValueError: `dim` is not a dimension of `shape`, or the ranges exceed it or overlap.
        """
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"dim must be a dimension of the shape {tuple(shape)}, got {dim}")
        every: list[tuple[Range, ...]] = [((0, length),) for length in shape]
        every[dim] = tuple(ranges)
        return cls(tuple(shape), tuple(every))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Shard:
        """Returns the part that is all of a tensor of shape `shape`."""
        return cls(tuple(shape), tuple(((0, length),) for length in shape))

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(sum(stop - start for start, stop in of_dim) for of_dim in self.ranges)

    @functools.cached_property
    def numel(self) -> int:
        """The number of elements of the part."""
        return math.prod(self.local_shape)

    def first_and_last(self) -> tuple[int, int]:
        """Returns the smallest and largest row-major index in the whole of a part that is not empty."""
        first = last = 0
        for length, of_dim in zip(self.shape, self.ranges):
            filled = [r for r in of_dim if r[0] < r[1]]
            first = first * length + min(start for start, _ in filled)
            last = last * length + max(stop for _, stop in filled) - 1
        return first, last

    def meets(self, other: Shard) -> bool:
        """Whether two parts of tensors of one shape have an element in common."""
        return all(
            any(max(a[0], b[0]) < min(a[1], b[1]) for a in mine for b in theirs)
            for mine, theirs in zip(self.ranges, other.ranges)
        )


def why_not_whole(parts: Sequence[Shard]) -> str | None:
    """Explains why the parts of one tensor do not add up to the whole; None if they do."""
    shape = parts[0].shape
    for index, part in enumerate(parts):
        for other in parts[:index]:
            if part.numel and other.numel and part.meets(other):
                return f"its parts overlap: {part.ranges} and {other.ranges}"
    held = sum(part.numel for part in parts)
    if held != math.prod(shape):
        return f"its parts hold {held} of {math.prod(shape)} elements"
    return None


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a torch.distributed.tensor.DTensor. Imports the class only for subclasses of Tensor."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) and _is_dtensor_type(type(tensor))


@functools.lru_cache(maxsize=64)
def _is_dtensor_type(kind: type) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return issubclass(kind, DTensor)


def is_partial(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor of partial sums, whose whole has no bits before the sum is taken."""
    placements = tensor.placements if is_dtensor(tensor) else ()  # type: ignore[attr-defined]
    return any(placement.is_partial() for placement in placements)


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Shard | None]:
    """Returns this process's part of a tensor, and which part it is; None instead of a Shard for a plain tensor.

    Raises:
        ValueError: `tensor` is a DTensor of partial sums.
    """
    if not is_dtensor(tensor):
        return tensor, None
    placements, mesh = tensor.placements, tensor.device_mesh  # type: ignore[attr-defined]
    if is_partial(tensor):
        raise ValueError(f"tensor must not be a DTensor of partial sums, got the placements {placements}")
    with torch.no_grad():  # autograd would record to_local
        local = tensor.to_local()  # type: ignore[attr-defined]
    shard = _box_of(tensor.shape, mesh, placements)
    if shard.local_shape != tuple(local.shape):
        raise ValueError(
            f"tensor must be a DTensor whose local part is one box, {shard.local_shape}, got {placements} with a local "
            f"shape of {tuple(local.shape)}; pass the local tensor and a Shard instead"
        )
    return local, shard


# The key excludes the mesh, which would keep process groups alive and does not give this process's coordinate.
_boxes: dict[tuple, Shard] = {}
_MOST_BOXES = 1 << 12


def _box_of(shape: torch.Size, mesh: Any, placements: tuple) -> Shard:
    """Returns this process's part of a DTensor."""
    key = shape, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()), placements
    if key not in _boxes:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if len(_boxes) >= _MOST_BOXES:
            _boxes.clear()
        lengths, offset = compute_local_shape_and_global_offset(tuple(shape), mesh, placements)
        _boxes[key] = Shard.box(tuple(shape), tuple(offset), tuple(lengths))
    return _boxes[key]

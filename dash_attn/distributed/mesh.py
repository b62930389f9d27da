"""The ranks of a call, and how a mesh of two dimensions divides a call over heads and over rows.

Rank (b, a) of B by A ranks is rank b A + a of all, and holds the rows of that rank. The A ranks with the same b form a
head group. Together they hold the rows of rank b of B, and an all-to-all gives each of them all of these rows for some
heads (`ulysses`). The B ranks with the same a then hold all rows of the same heads (`gathered`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .channel import Channel, PartOfChannel, channel_of, channel_of_ranks
from .layout import ROWS_OF_A_UNIT, Rows, chunks, num_chunks, rows_of_rank
from .ulysses import Split

Mesh = DeviceMesh | dist.ProcessGroup


class Ranks(NamedTuple):
    """The ranks of a call, and this rank's groups in a mesh of two dimensions."""

    channel: Channel
    """The channel of all ranks."""
    shape: tuple[int, ...]
    parts: tuple[PartOfChannel, PartOfChannel] | None = None
    """The ranks with the same heads, along the first dimension, and the ranks of one head group, along the last; None
    if one of the dimensions is 1."""


def ranks_of(mesh: Mesh | None) -> Ranks:
    """Returns the ranks of a call.

    Raises:
        NotImplementedError: `mesh` has more than two dimensions.
        RuntimeError: torch.distributed is not initialized.
        TypeError: `mesh` is neither a mesh nor a process group.
        ValueError: this rank is not in `mesh`, or its ranks do not ascend.
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed must be initialized: call torch.distributed.init_process_group first")
    if not isinstance(mesh, DeviceMesh):
        group = dist.group.WORLD if mesh is None else mesh
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"mesh must be a DeviceMesh, a ProcessGroup or None, got {mesh!r}")
        channel = channel_of(group)
        return Ranks(channel, (channel.size,))
    if mesh.ndim > 2:
        raise NotImplementedError(
            f"mesh must have one dimension, or two for rows and heads, got {mesh.ndim} of {tuple(mesh.shape)}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh must contain the calling rank, {dist.get_rank()}, got {mesh!r}")
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):  # torch sorts the ranks of a group
        raise ValueError(f"mesh must have ascending ranks, got {ranks}")
    shape, groups = tuple(mesh.shape), mesh.get_all_groups()
    if 1 in shape[:-1] or len(shape) == 1:
        return Ranks(channel_of(groups[-1]), shape)
    if shape[-1] == 1:
        return Ranks(channel_of(groups[0]), shape)
    channel = channel_of_ranks(ranks, groups[0])
    return Ranks(channel, shape, (PartOfChannel(channel, groups[0]), PartOfChannel(channel, groups[1])))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadGroup(Split):
    """How the ranks of a head group divide a call on the rows that they hold together."""

    of_all: Split
    """How all ranks of the mesh divide the call."""
    number: int
    """The number of the head group, b."""

    def runs(self, rank: int, *, of_keys: bool) -> list[Rows]:
        rows = self.of_all.rows_k if of_keys else self.of_all.rows_q
        size, groups = self.channel.size, self.of_all.channel.size // self.channel.size
        # The chunks of the group follow each other, and each consists of the ranks' chunks.
        runs, start = [], 0
        of_rank = self.of_all.runs(self.number * size + rank, of_keys=of_keys)
        for whole, run in zip(rows_of_rank(rows, self.number, groups, self.layout), of_rank):
            runs.append(Rows(start + run.start - whole.start, start + run.stop - whole.start))
            start += len(whole)
        return runs


def splits_of_mesh(split: Split, ranks: Ranks) -> tuple[HeadGroup, Split]:
    """Returns how this rank's two groups divide a call that all ranks divide as `split` says.

    The first result divides the call over heads, and the second over rows, for which gradients are agreed on before.

    Raises:
        ValueError: chunks do not join; on all ranks.
    """
    assert ranks.parts is not None
    over_rows, over_heads = ranks.parts
    for name, rows in (("q", split.rows_q), ("k", split.rows_k)):
        _check_chunks_join(name, rows, split, ranks)
    number = over_rows.rank
    rows_q, rows_k = (
        sum(map(len, rows_of_rank(rows, number, over_rows.size, split.layout))) for rows in (split.rows_q, split.rows_k)
    )
    of_group = HeadGroup(
        over_heads, split.name, split.layout, rows_q, rows_k, split.heads, split.kv_heads, split.check_values,
        of_all=split, number=number,
    )  # fmt: skip
    heads, kv_heads = (len(of_group.heads_of_rank(over_heads.rank, of_keys=side)) for side in (False, True))
    of_rows = dataclasses.replace(split, channel=over_rows, heads=heads, kv_heads=kv_heads, gradients_agreed=True)
    return of_group, of_rows


def _check_chunks_join(name: str, rows: int, split: Split, ranks: Ranks) -> None:
    """Checks that the rows of a head group are whole chunks of the ranks that gather."""
    groups, size = ranks.shape
    fine, coarse = (chunks(rows, num_chunks(n, split.layout)) for n in (groups * size, groups))
    joined = tuple(Rows(fine[n].start, fine[n + size - 1].stop) for n in range(0, len(fine), size))
    if joined != coarse:
        allowed = math.lcm(len(fine), ROWS_OF_A_UNIT * len(coarse))
        raise ValueError(
            f"{name} must have a number of rows whose {len(fine)} chunks join into {len(coarse)} with a mesh of "
            f"{ranks.shape} in the {split.layout} layout, such as a multiple of {allowed}, got {rows}"
        )

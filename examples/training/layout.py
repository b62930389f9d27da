"""The sequences of a batch, and their rows, that a rank has."""

from __future__ import annotations

import dataclasses
import functools

import torch

from dash_attn.distributed import rows_of_rank, shard
from dash_attn.receipts import Shard


@dataclasses.dataclass(frozen=True)
class Layout:
    """`ranks` in groups of `context`: the groups divide the sequences of a batch, the ranks of a group their rows.

    Args:
        rank: the rank within the job.
        ranks: the number of ranks of the job.
        context: the number of ranks that share a sequence; it divides `ranks`.
        sequences: the number of sequences of the whole batch, which the groups divide evenly.
        seqlen: the number of tokens per sequence.
        order: the layout of the rows, one of `dash_attn.distributed.LAYOUTS`.

    Raises:
        ValueError: a number does not divide another.
    """

    rank: int
    ranks: int
    context: int
    sequences: int
    seqlen: int
    order: str = "zigzag"

    def __post_init__(self) -> None:
        if self.context < 1 or self.ranks % self.context:
            raise ValueError(
                f"--context-parallel must divide the number of processes, {self.ranks}, got {self.context}"
            )
        if self.sequences < 1 or self.sequences % self.groups:
            raise ValueError(
                f"--batch must be a multiple of the {self.groups} groups of processes that share its sequences, got "
                f"{self.sequences}"
            )

    @property
    def groups(self) -> int:
        return self.ranks // self.context

    @property
    def own_sequences(self) -> range:
        each = self.sequences // self.groups
        group = self.rank // self.context
        return range(each * group, each * (group + 1))

    @functools.cached_property
    def own_rows(self) -> list[tuple[int, int]]:
        runs = rows_of_rank(self.seqlen, self.rank % self.context, self.context, self.order)
        return [(run.start, run.stop) for run in runs]

    @property
    def tokens(self) -> int:
        """The tokens of the whole batch."""
        return self.sequences * self.seqlen

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Copies this rank's part of a tensor (sequences, seqlen, ...)."""
        own = whole[self.own_sequences.start : self.own_sequences.stop]
        return shard(own, self.rank % self.context, self.context, dim=1, layout=self.order)

    def cut_to(self, device: torch.device, whole: torch.Tensor) -> torch.Tensor:
        """Copies this rank's part of a host tensor to a device, without waiting for the device."""
        part = self.cut(whole)
        return part if device.type == "cpu" else part.pin_memory().to(device, non_blocking=True)

    def shard(self, *rest: int) -> Shard:
        """Returns which part of a whole (sequences, seqlen, *rest) this rank has."""
        return _shard(self, rest)

    def positions(self) -> torch.Tensor:
        """Returns the positions in the sequence of this rank's rows, (rows of this rank,)."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.own_rows])


@functools.cache
def _shard(layout: Layout, rest: tuple[int, ...]) -> Shard:
    ranges = (((layout.own_sequences.start, layout.own_sequences.stop),), tuple(layout.own_rows))
    return Shard((layout.sequences, layout.seqlen, *rest), (*ranges, *(((0, size),) for size in rest)))

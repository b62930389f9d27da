"""Attention over several processes with the bits of one process: context parallelism on torch.distributed.

docs/distributed.md states the guarantees. `ulysses` spreads heads over the ranks, and `gathered` gathers keys if there
are more ranks than KV heads, following `plan`. `mesh` combines both.
"""

from .attention import context_parallel_attention, context_parallel_varlen_attention
from .channel import RankError
from .layout import LAYOUTS, Rows, rows_of_rank, shard

__all__ = [
    "LAYOUTS",
    "RankError",
    "Rows",
    "context_parallel_attention",
    "context_parallel_varlen_attention",
    "rows_of_rank",
    "shard",
]

"""Attention over several processes with the bits of one: context parallelism on torch.distributed.

docs/distributed.md says what is promised. `plan` is what ranks do where there are more of them than KV heads, `mesh`
how heads and rows are divided at once, and `simulate` predicts how long it takes.
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

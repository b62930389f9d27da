"""Attention over several processes with the bits of one: context parallelism on torch.distributed.

docs/distributed.md says what is promised. `plan` and `simulate` are about the form for more ranks
than KV heads, which is to come.
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

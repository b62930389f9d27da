"""Matrix products whose sums have a fixed order, on any device. The reference's bits rely on them.

A matrix library chooses the order of a sum by the shape of the whole product, the row's position and the number of
threads. Here an element of a product depends only on its own row and its own column.
"""

import functools

import torch

# Terms per group. The terms of a group are added one by one, and then the sums of the groups.
GROUP = 64
# The number of columns per pass, which stay in the cache.
COLUMNS = 256
# Index tensors larger than this are built for every product instead of being cached.
MAX_CACHED_INDICES = 2**16


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Computes a @ b. The terms of every element are added in ascending order, group by group.

    Trailing terms of 0 change no bits, except that they turn -0 into 0. PyTorch's embedding bag computes the sums: the
    rows of `a` weight the rows of `b`. It takes 1 to 2 times as long as the matrix library. The matrix library computes
    products in float64, which only tests use.

    Args:
        a: (batch, rows, inner), fp32 or float64.
        b: (batch, inner, columns), like a.

    Returns:
        (batch, rows, columns), like a.
    """
    batch, rows, inner = a.shape
    if a.dtype == torch.float64:
        return a @ b
    if a.numel() == 0 or b.shape[2] == 0:
        return a.new_zeros(batch, rows, b.shape[2])
    indices, starts = (_bags if a.numel() <= MAX_CACHED_INDICES else _bags.__wrapped__)(batch, rows, inner, a.device)
    weights, parts = a.reshape(-1), []
    for columns in b.split(COLUMNS, dim=2):
        # PyTorch takes ten times as long for any other layout.
        table = columns.reshape(batch * inner, -1).contiguous()
        groups = torch.embedding_bag(table, indices, starts, mode=0, per_sample_weights=weights)[0]  # 0: sum
        groups = groups.view(batch, rows, -1, table.shape[1])
        parts.append(functools.reduce(torch.add, groups.unbind(2)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


@functools.lru_cache(maxsize=64)
def _bags(batch: int, rows: int, inner: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows of the table that each bag sums, and where each bag starts in this list."""
    in_table = torch.arange(batch * inner, dtype=torch.int32, device=device).view(batch, 1, inner)
    of_row = torch.arange(0, inner, GROUP, dtype=torch.int32, device=device)
    starts = torch.arange(0, batch * rows * inner, inner, dtype=torch.int32, device=device)[:, None] + of_row
    return in_table.expand(batch, rows, inner).reshape(-1), starts.view(-1)

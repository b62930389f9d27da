"""Sums of products in one fixed order on any device: what the bits of the reference rest on.

A matrix library chooses the order of a sum by the shapes of the whole product, by where a row lies in it and by the
number of threads. Here an element of a product is a function of its own row and its own column alone.
"""

import functools

import torch

# Larger index tensors are built for each product and not kept.
MAX_CACHED_INDICES = 2**16


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, in fp32 with the terms of every element added one by one in ascending order.

    PyTorch's weighted sum of the rows of a table does so: its bags are the rows of `a`, and it is 1 to 2 times as slow
    as the matrix library. float64, which only tests use, is the matrix library's.

    Args:
        a: (batch, rows, inner), fp32 or float64.
        b: (batch, inner, columns), like a.
    """
    batch, rows, inner = a.shape
    if a.dtype == torch.float64:
        return a @ b
    if a.numel() == 0 or b.shape[2] == 0:
        return a.new_zeros(batch, rows, b.shape[2])
    indices, offsets = (_bags if a.numel() <= MAX_CACHED_INDICES else _bags.__wrapped__)(batch, rows, inner, a.device)
    table, weights = b.reshape(batch * inner, -1), a.reshape(-1)
    sums = torch.embedding_bag(table, indices, offsets, mode=0, per_sample_weights=weights)[0]  # 0: sum
    return sums.view(batch, rows, -1)


@functools.lru_cache(maxsize=64)
def _bags(batch: int, rows: int, inner: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows of the table each bag sums, and where the bags begin."""
    in_table = torch.arange(batch * inner, dtype=torch.int32, device=device).view(batch, 1, inner)
    starts = torch.arange(0, batch * rows * inner, inner, dtype=torch.int32, device=device)
    return in_table.expand(batch, rows, inner).reshape(-1), starts


def tree_sum(terms: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension by a tree, which adds neighbours, then neighbouring sums; it may be empty."""
    while terms.shape[-1] > 1:
        if terms.shape[-1] % 2:
            terms = torch.nn.functional.pad(terms, (0, 1))
        terms = terms[..., 0::2] + terms[..., 1::2]
    return terms.sum(dim=-1)

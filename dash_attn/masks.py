"""Masks by key columns: for each key, one or two intervals of query rows that do not see the key.

The tensors are FlashMask's (arXiv 2410.01359), the argument `startend_row_indices` of the attention functions: int32
(batch, 1 or kv_heads, seqlen_k, n), and (1 or kv_heads, total_k, n) for variable-length batches, in which rows count
from the first query of the key's own sequence. With the bounds s0, s1, ... of a key, the rows that do not see the key
are, in addition to those from which causal, window_size and attention_chunk hide it,

    causal=True,  n=1: rows >= s0                       causal=True,  n=2: s0 <= row < s1
    causal=False, n=2: rows >= s0, and rows < s1        causal=False, n=4: s0 <= row < s1, and s2 <= row < s3

`causal` is the argument of the call. An interval whose end is not above its start hides nothing, and bounds may lie
outside of the rows. docs/masks.md is the guide.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hidden_rows(startend_row_indices: Tensor, first_row: int, end_row: int, *, causal: bool) -> Tensor:
    """Returns which of the query rows first_row, ..., end_row - 1 the tensor hides each key from.

    Args:
        startend_row_indices: int32 (..., keys, n), n as `causal` allows.
        first_row, end_row: the rows.
        causal: the argument of the call, which gives the bounds their meaning. What `causal` itself hides is not
            included.

    Returns:
        bool (..., end_row - first_row, keys).
    """
    rows = torch.arange(first_row, end_row, device=startend_row_indices.device)[:, None]
    bounds = [bound.unsqueeze(-2) for bound in startend_row_indices.unbind(-1)]
    if len(bounds) == 1:
        return rows >= bounds[0]
    if len(bounds) == 2:
        from_first, before_second = rows >= bounds[0], rows < bounds[1]
        return from_first & before_second if causal else from_first | before_second
    return ((rows >= bounds[0]) & (rows < bounds[1])) | ((rows >= bounds[2]) & (rows < bounds[3]))

"""The sequences of a variable-length batch one by one, for CPU tensors and for checks, where lengths may be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks


class Sequence(NamedTuple):
    """Views of one sequence's tensors."""

    of_queries: list[Tensor]
    of_keys: list[Tensor]
    of_lse: list[Tensor | None]
    alibi_slopes: Tensor | None
    number: int | None = None
    """The number of the sequence in the variable-length batch; None for a dense batch."""

    @property
    def has_keys(self) -> bool:
        return self.of_keys[0].shape[1] > 0


def sequences(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    of_queries: list[Tensor],
    of_keys: list[Tensor],
    of_lse: list[Tensor | None],
    alibi_slopes: Tensor | None,
) -> list[Sequence]:
    """Returns each sequence that has queries, as views of a dense batch of one; without cu_seqlens, the whole batch.

    Args:
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: as in `dash_attn.ops`.
        of_queries: tensors (total_q, heads, head_dim).
        of_keys: tensors (total_k, kv_heads, head_dim).
        of_lse: tensors (heads, total_q), or None.
        alibi_slopes: None, (heads,) or (batch, heads).

    Raises:
        ValueError: a sequence begins before the previous one ends, or lies outside of the rows.
    """
    if cu_seqlens_q is None:
        return [Sequence(of_queries, of_keys, of_lse, alibi_slopes)]
    assert cu_seqlens_k is not None
    rows_q = rows_of_sequences("q", cu_seqlens_q, seqused_q, of_queries[0].shape[0])
    rows_k = rows_of_sequences("k", cu_seqlens_k, seqused_k, of_keys[0].shape[0])
    return [
        Sequence(
            [x[None, queries] for x in of_queries],
            [x[None, keys] for x in of_keys],
            [None if x is None else x[None, :, queries] for x in of_lse],
            alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[number],
            number,
        )
        for number, (queries, keys) in enumerate(zip(rows_q, rows_k))
        if queries.start < queries.stop
    ]


def sequence_of_rows(cu_seqlens: Tensor, total: int) -> Tensor:
    """Returns the number of the sequence that contains each of `total` rows, int64, without reading the offsets.

    Rows past the last offset get the batch size.
    """
    rows = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)


def check_lengths(
    named: Mapping[str, Tensor], pack: Mapping[str, Tensor | None], max_seqlens: Mapping[str, int] | None = None
) -> None:
    """Raises a ValueError for invalid offsets or lengths. Reads their values; the op checks shapes and dtypes.

    Args:
        named: q, k and others; q and kv; or qkv.
        pack: cu_seqlens and seqused of q and of k, or of both, by the names of the arguments.
        max_seqlens: with dropout, the lengths for which random bits are generated, by the names of the arguments.
    """
    rows = list(named.values())
    for side, x in (("q", rows[0]), ("k", rows[min(1, len(rows) - 1)])):
        cu_seqlens, used = (pack.get(f"{name}_{side}", pack.get(name)) for name in ("cu_seqlens", "seqused"))
        if cu_seqlens is None or not all(checks.reads_values(y) for y in (cu_seqlens, used) if y is not None):
            continue
        is_list = cu_seqlens.dim() == 1 and cu_seqlens.shape[0] > 0 and cu_seqlens.dtype == torch.int32
        if used is not None:
            is_list = is_list and used.shape == (cu_seqlens.shape[0] - 1,) and used.dtype == torch.int32
        if not is_list or x.dim() == 0:
            continue
        parts = rows_of_sequences(side, cu_seqlens, used, x.shape[0])
        longest = max((part.stop - part.start for part in parts), default=0)
        for name in (f"max_seqlen_{side}", "max_seqlen"):
            if max_seqlens and name in max_seqlens and max_seqlens[name] < longest:
                raise ValueError(
                    f"{name} must be at least the length of the longest sequence with dropout, {longest}, "
                    f"got {max_seqlens[name]}"
                )


def multiples(step: int, count: int, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Returns 0, step, 2 * step, ... (count,), in one operation."""
    if step == 0:
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.arange(0, count * step, step, dtype=dtype, device=device)


def rows_of_sequences(side: str, cu_seqlens: Tensor, seqused: Tensor | None, total: int) -> list[slice]:
    """Returns the rows of each sequence of `side`, "q" or "k". Raises a ValueError if they exceed the `total` rows."""
    offsets = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(offsets, offsets[1:])]
    if offsets[0] < 0 or offsets[-1] > total or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens_{side} must hold non-decreasing offsets from 0 to {total}, the number of rows, got "
            f"{_few(offsets)}"
        )
    used = lengths if seqused is None else seqused.tolist()
    if any(not 0 <= count <= length for count, length in zip(used, lengths)):
        raise ValueError(
            f"seqused_{side} must hold numbers from 0 to the lengths in cu_seqlens_{side}, {_few(lengths)}, "
            f"got {_few(used)}"
        )
    return [slice(start, start + count) for start, count in zip(offsets, used)]


def _few(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 16 else f"[{', '.join(map(str, numbers[:16]))}, ...]"

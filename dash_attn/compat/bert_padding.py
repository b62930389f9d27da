"""flash_attn.bert_padding in plain torch: padded batches to packs and back.

Gradients are torch's, and deterministic: rows that are taken twice have theirs added in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]

try:
    # Taken from here by code that takes it from flash_attn.bert_padding.
    from einops import rearrange  # noqa: F401
except ImportError:
    pass


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of a tensor.

    Args:
        input: (rows, ...).
        indices: (n,), integers from 0 to rows - 1.

    Returns:
        (n, ...).
    """
    # The derivative of each adds up rows that are taken twice: in a fixed order on the one device, by atomics on the
    # other.
    return input.index_select(0, indices) if input.device.type == "cpu" else input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros, but for some rows.

    Args:
        values: (n, ...).
        indices: (n,), distinct integers from 0 to first_axis_dim - 1.
        first_axis_dim: rows of the result.

    Returns:
        (first_axis_dim, ...), values[i] in row indices[i].
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch that are not padding, as a pack. It waits for the GPU: how many there are.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integers 1 for tokens, 0 for padding.
        unused_mask: like attention_mask, 1 for tokens that have a place in the pack without being used.

    Returns:
        tokens: (total, ...), those of either mask.
        indices: int64 (total,), where they were in the flattened batch.
        cu_seqlens: int32 (batch + 1,), where the sequences of the pack begin and end.
        max_seqlen: the longest of them.
        seqused: int32 (batch,), tokens of each in attention_mask.
    """
    placed = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices = placed.flatten().nonzero().flatten()
    cu_seqlens, max_seqlen = _lengths(placed.sum(dim=-1, dtype=torch.int32))
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` of rows that each hold several sequences, one behind the other from the row's start.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: integers (batch, seqlen): the lengths of a row's sequences in their order; zeros,
            wherever they stand, are none.

    Returns:
        tokens, indices, cu_seqlens and max_seqlen as from `unpad_input`, with an entry of cu_seqlens for every
        sequence.
    """
    in_row = attention_mask_in_length.sum(dim=-1, keepdim=True)
    places = torch.arange(attention_mask_in_length.shape[-1], device=in_row.device)
    indices = (places < in_row).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    cu_seqlens, max_seqlen = _lengths(lengths)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: (total, ...) to (batch, seqlen, ...), zeros where `indices` leave places free."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _lengths(seqlens: Tensor) -> tuple[Tensor, int]:
    """Offsets of a pack, and its longest sequence."""
    cu_seqlens = torch.nn.functional.pad(seqlens.cumsum(dim=0, dtype=torch.int32), (1, 0))
    return cu_seqlens, int(seqlens.max())

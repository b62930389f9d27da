"""flash_attn.bert_padding in plain torch: padded batches to packs and back.

Gradients are torch's, and deterministic: rows that are taken twice have theirs added in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks

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

    Raises:
        TypeError, ValueError: an argument has a wrong type, shape or value; indices out of range are an error on the
            device on a GPU.
    """
    checks.check_tensors({"values": values, "indices": indices})
    if values.dim() < 1 or indices.shape != values.shape[:1]:
        raise ValueError(
            f"indices must have an entry for each row of the values, of shape {tuple(values.shape)}, got "
            f"{tuple(indices.shape)}"
        )
    if indices.dtype != torch.int64:
        raise TypeError(f"indices must be torch.int64, got {indices.dtype}")
    inside = ((indices >= 0) & (indices < first_axis_dim)).all()
    checks.check_values(inside, f"indices must be from 0 to below the {first_axis_dim} rows of the result, got others")
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch that are not padding, as a pack. It waits for the GPU: how many there are.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integers 1 for tokens, 0 for padding.
        unused_mask: like attention_mask, 1 for other tokens, which have a place in the pack without being used.

    Returns:
        tokens: (total, ...), those of either mask.
        indices: int64 (total,), where they were in the flattened batch.
        cu_seqlens: int32 (batch + 1,), where the sequences of the pack begin and end.
        max_seqlen: the longest of them.
        seqused: int32 (batch,), tokens of each in attention_mask.

    Raises:
        TypeError, ValueError: an argument has a wrong type, shape or value; values are an error on the device on a GPU.
    """
    placed, name = attention_mask, "attention_mask"
    _check_mask(hidden_states, attention_mask, name)
    if unused_mask is not None:
        _check_mask(hidden_states, unused_mask, "unused_mask")
        placed, name = attention_mask.int() + unused_mask.int(), "attention_mask + unused_mask"
    checks.check_values(((placed == 0) | (placed == 1)).all(), f"{name} must hold 0 and 1 alone, got other values")
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

    Raises:
        TypeError, ValueError: an argument has a wrong type, shape or value; values are an error on the device on a GPU.
    """
    _check_mask(hidden_states, attention_mask_in_length, "attention_mask_in_length", takes_bool=False)
    in_row = attention_mask_in_length.sum(dim=-1, keepdim=True)
    seqlen = attention_mask_in_length.shape[1]
    fits = (attention_mask_in_length >= 0).all() & (in_row <= seqlen).all()
    checks.check_values(
        fits, f"attention_mask_in_length must hold lengths whose sum in a row is at most seqlen, {seqlen}, got others"
    )
    places = torch.arange(seqlen, device=in_row.device)
    indices = (places < in_row).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    cu_seqlens, max_seqlen = _lengths(lengths)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: (total, ...) to (batch, seqlen, ...), zeros where `indices` leave places free.

    Raises:
        TypeError, ValueError: as `index_put_first_axis` of batch * seqlen rows.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _lengths(seqlens: Tensor) -> tuple[Tensor, int]:
    """Offsets of a pack, and its longest sequence; of no sequences it is 0."""
    cu_seqlens = torch.nn.functional.pad(seqlens.cumsum(dim=0, dtype=torch.int32), (1, 0))
    return cu_seqlens, int(seqlens.max()) if seqlens.numel() else 0


def _check_mask(hidden_states: Tensor, mask: Tensor, name: str, *, takes_bool: bool = True) -> None:
    checks.check_tensors({"hidden_states": hidden_states, name: mask})
    if mask.is_floating_point() or mask.is_complex() or (mask.dtype == torch.bool and not takes_bool):
        raise TypeError(f"{name} must be of {'bool or ' if takes_bool else ''}an integer dtype, got {mask.dtype}")
    if hidden_states.dim() < 2 or mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name} must be (batch, seqlen) as hidden_states is, of shape {tuple(hidden_states.shape)}, got "
            f"{tuple(mask.shape)}"
        )

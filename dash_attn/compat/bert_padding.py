"""flash_attn.bert_padding in plain torch: converts padded batches to variable-length batches and back.

torch computes the gradients, which are deterministic: the gradients of a row that is used twice are added in a fixed
order.
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
    # Re-exported for code that imports it from flash_attn.bert_padding.
    from einops import rearrange  # noqa: F401
except ImportError:
    pass


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Selects rows of a tensor.

    Args:
        input: (rows, ...).
        indices: int (n,), from 0 to rows - 1.

    Returns:
        (n, ...), row indices[i] in row i.
    """
    # On its own device, each operation's gradient adds up repeated rows in a fixed order; on the other, with atomics.
    return input.index_select(0, indices) if input.device.type == "cpu" else input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Scatters rows into a tensor of zeros.

    Args:
        values: (n, ...).
        indices: int64 (n,), distinct, from 0 to first_axis_dim - 1.
        first_axis_dim: the number of rows of the result.

    Returns:
        (first_axis_dim, ...), values[i] in row indices[i].

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape is wrong, or indices are out of range. On a GPU, indices out of range cause a
            device-side error.
    """
    checks.check_tensors({"values": values, "indices": indices})
    if values.dim() < 1 or indices.shape != values.shape[:1]:
        raise ValueError(
            f"indices must have one entry per row of the values, of shape {tuple(values.shape)}, got "
            f"{tuple(indices.shape)}"
        )
    if indices.dtype != torch.int64:
        raise TypeError(f"indices must be torch.int64, got {indices.dtype}")
    inside = ((indices >= 0) & (indices < first_axis_dim)).all()
    checks.check_values(
        inside, f"indices must be from 0 to {first_axis_dim - 1}, the last row of the result, got others"
    )
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Removes the padding of a padded batch. Waits for the GPU, to read the number of tokens.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: bool or int (batch, seqlen): 1 for tokens, 0 for padding.
        unused_mask: like attention_mask: 1 for further tokens, which are stored in the result but not used.

    Returns:
        tokens: (total, ...), the tokens of either mask.
        indices: int64 (total,), their positions in the flattened batch.
        cu_seqlens: int32 (batch + 1,), the offsets of the sequences.
        max_seqlen: the length of the longest sequence, an int.
        seqused: int32 (batch,), the number of tokens of each sequence in attention_mask.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape is wrong, or a mask holds other values. On a GPU, such values cause a device-side error.
    """
    placed, name = attention_mask, "attention_mask"
    _check_mask(hidden_states, attention_mask, name)
    if unused_mask is not None:
        _check_mask(hidden_states, unused_mask, "unused_mask")
        placed, name = attention_mask.int() + unused_mask.int(), "attention_mask + unused_mask"
    checks.check_values(((placed == 0) | (placed == 1)).all(), f"{name} must hold only 0 and 1, got other values")
    indices = placed.flatten().nonzero().flatten()
    cu_seqlens, max_seqlen = _lengths(placed.sum(dim=-1, dtype=torch.int32))
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Applies `unpad_input` to rows that each hold several sequences, one after the other from the row's start.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: int (batch, seqlen): the lengths of a row's sequences in their order. Zeros are
            ignored, wherever they stand.

    Returns:
        tokens, indices, cu_seqlens and max_seqlen as in `unpad_input`, with one sequence in cu_seqlens per length.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a shape is wrong, or lengths do not fit their row. On a GPU, such lengths cause a device-side
            error.
    """
    _check_mask(hidden_states, attention_mask_in_length, "attention_mask_in_length", takes_bool=False)
    in_row = attention_mask_in_length.sum(dim=-1, keepdim=True)
    seqlen = attention_mask_in_length.shape[1]
    fits = (attention_mask_in_length >= 0).all() & (in_row <= seqlen).all()
    checks.check_values(
        fits, f"attention_mask_in_length must hold lengths with a sum of at most seqlen={seqlen} per row, got others"
    )
    places = torch.arange(seqlen, device=in_row.device)
    indices = (places < in_row).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    cu_seqlens, max_seqlen = _lengths(lengths)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Reverses `unpad_input`.

    Args:
        hidden_states: (total, ...).
        indices: int64 (total,), the positions of the tokens in the flattened batch.
        batch: the number of sequences.
        seqlen: the length of the padded sequences.

    Returns:
        (batch, seqlen, ...), with zeros at padding.

    Raises:
        TypeError, ValueError: as in `index_put_first_axis` with batch * seqlen rows.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _lengths(seqlens: Tensor) -> tuple[Tensor, int]:
    """Returns the offsets of a variable-length batch, and the length of its longest sequence, which may be 0."""
    cu_seqlens = torch.nn.functional.pad(seqlens.cumsum(dim=0, dtype=torch.int32), (1, 0))
    return cu_seqlens, int(seqlens.max()) if seqlens.numel() else 0


def _check_mask(hidden_states: Tensor, mask: Tensor, name: str, *, takes_bool: bool = True) -> None:
    checks.check_tensors({"hidden_states": hidden_states, name: mask})
    if mask.is_floating_point() or mask.is_complex() or (mask.dtype == torch.bool and not takes_bool):
        raise TypeError(f"{name} must be of {'bool or ' if takes_bool else ''}an integer dtype, got {mask.dtype}")
    if hidden_states.dim() < 2 or mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name} must be (batch, seqlen) like hidden_states, of shape {tuple(hidden_states.shape)}, got "
            f"{tuple(mask.shape)}"
        )

"""The words of a tensor: its bits as unsigned integers of up to 32 bits, in row-major order."""

from __future__ import annotations

import torch


def words_per_element(dtype: torch.dtype) -> int:
    """Returns 1 for elements of up to 4 bytes, 2 for 8 bytes, and 4 for 16 bytes."""
    return max(1, dtype.itemsize // 4)


def plain_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements in row-major order, detached from autograd; copies them if they are not contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the words of a plain tensor as signed or unsigned integers of 1, 2 or 4 bytes, in one dimension."""
    flat = plain_contiguous(tensor).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.dtype.itemsize
    return flat.view({1: torch.uint8, 2: torch.int16}.get(size, torch.int32))


def unsigned(bits: torch.Tensor) -> torch.Tensor:
    """Converts the result of `bits_of` to non-negative int64 numbers."""
    return bits.long() & ((1 << (8 * bits.dtype.itemsize)) - 1)


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the words of a plain tensor as int64, in one dimension."""
    return unsigned(bits_of(tensor))

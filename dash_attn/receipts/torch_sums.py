"""The op `dash_attn_C::fingerprint_blocks` in torch's integer operations, for devices without an implementation.

CUDA and the CPU have implementations in C++: csrc/bindings/fingerprint_ops.cpp, and fingerprint.cpp, which defines the
op.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from . import words
from .pieces import Piece, places

OP = "dash_attn_C::fingerprint_blocks"
LANES = 8
LANE_KEYS = (
    0x12D687A1, 0xA82C4757, 0x94A1B38F, 0x5EE05AEB, 0x64E2D6A5, 0x7A1FB19D, 0xC64D8B1B, 0xD8E2BC73,
)  # fmt: skip
"""Odd 32-bit numbers without special meaning."""

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NUMBERS = 8  # per piece: the index of its tensor, the fields of Piece, and the index of its sums
# Words per pass. Each word needs about ten times its size in temporary memory.
_CHUNK = 1 << 20


def _signed(number: int) -> int:
    """Returns the int64 with the same 64 bits."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts the 64 bits as an unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _keys(group: torch.Tensor, lane: torch.Tensor) -> torch.Tensor:
    z = (group + 1) * _signed(_GAMMA)
    z = (z ^ _shift_right(z, 30)) * _signed(_FIRST)
    z = (z ^ _shift_right(z, 27)) * _signed(_SECOND)
    m = z ^ _shift_right(z, 31)
    return (m & -2) + (((m << 32) | _shift_right(m, 32)) | 1) * lane


@functools.cache
def _lane_keys(device: torch.device) -> torch.Tensor:
    # Filled on the device, because a copy from the host would synchronize.
    keys = torch.empty(LANES, dtype=torch.int64, device=device)
    for lane, key in enumerate(LANE_KEYS):
        keys[lane].fill_(key)
    return keys


def fingerprint_blocks(tensors: Sequence[torch.Tensor], pieces: Sequence[int], block: int, sums: int) -> torch.Tensor:
    """Computes the block sums. csrc/bindings/fingerprint.cpp documents the arguments."""
    device = tensors[0].device
    total, lanes = torch.zeros(sums, dtype=torch.int64, device=device), _lane_keys(device)
    for begin in range(0, len(pieces), _NUMBERS):
        tensor, *of_piece, place = pieces[begin : begin + _NUMBERS]
        piece, bits = Piece(*of_piece), words.bits_of(tensors[tensor])
        count = piece.rows * piece.columns
        for low in range(0, count, _CHUNK):
            at, number = places(piece, low, min(low + _CHUNK, count), device)
            keys = _keys(number // LANES, lanes[number % LANES])
            total.index_add_(0, number // block + place, words.unsigned(bits[at]) * keys)
    return total


def register() -> None:
    """Registers this implementation for every device that has no implementation of its own."""
    torch.library.impl(OP, "CompositeExplicitAutograd", fingerprint_blocks)

"""Defines the fingerprint of a tensor: a keyed sum of its bits modulo 2^64, which does not depend on the sharding.

An element of up to 4 bytes is one word, its bits as an unsigned integer. An element of 8 or 16 bytes is 2 or 4 words of
32 bits in memory order (lowest bits first). The words of the whole tensor are numbered i = 0, 1, ... in row-major
order. With g = floor(i / 8), l = i mod 8 and all arithmetic modulo 2^64,

    m  = mix(g)                                  the output number g of the generator splitmix64 seeded with 0
    k  = (m with bit 0 cleared) + (m rotated by 32 bits, with bit 0 set) * LANE_KEYS[l]
    block sum number b = sum of word_i * k_i over i of the block b, floor(i / block) = b
    fingerprint = sum of the block sums

    mix(g): z = (g + 1) * 0x9E3779B97F4A7C15
            z = (z xor z >> 30) * 0xBF58476D1CE4E5B9
            z = (z xor z >> 27) * 0x94D049BB133111EB
            result z xor z >> 31                 (Steele, Lea and Flood, OOPSLA 2014)
    LANE_KEYS: eight odd 32-bit numbers, in torch_sums.py

- Zero words add nothing and the order of a sum does not matter, so the sums of a tensor's parts add up to the sum of
  the whole.
- k is odd, so a change of one word, and therefore of one bit, always changes the fingerprint.
- Swapping two words within a group of 8 always changes the fingerprint too, because no two LANE_KEYS differ by a
  multiple of 2^32.
- A group enters the fingerprint through two sums only: of its words, and of its words times LANE_KEYS. A change that
  keeps both sums is never seen, in any group. Such a change needs at least 3 words of 4 bytes, 4 of 2 bytes or 5 of
  1 byte; one example adds 19, -8, -18, -10, -20, 11, 19, 7 to 8 words. A group whose bits all become random keeps both
  sums with a probability of 2^-97, 2^-65 and 2^-49 for words of 4, 2 and 1 bytes.
- Other changes are missed where the keys happen to cancel: with a probability of about 2^-62 for random bits, and of
  2^-28 if only the highest bits of a few words change, as far as mix is random. The probability grows with the number
  of factors of two that the changes of both sums have in common.
- The fingerprint therefore detects faults, not forgery: an attacker can construct a change that is not seen.
- The fingerprint does not cover the shape and the dtype. A receipt records them separately.

The kernel (csrc/receipts) computes mix once per 8 words, and then one multiplication by a constant and two additions
per word: sum word * k = M * sum(word) + R * sum(word * LANE_KEYS), where M and R are the two terms of k.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import torch_sums
from .pieces import Piece, pieces_of
from .shards import Shard, local_part
from .torch_sums import LANES
from .words import plain_contiguous, words_per_element

FINGERPRINT = "dash-attn-1"
"""The name of this definition. Receipts carry it, because only fingerprints of one definition can be compared."""
DEFAULT_BLOCK = 1 << 18
"""Words per block: 1 MiB of fp32."""
_MAX_BLOCK = 1 << 24

torch_sums.register()


def check_block(block: int) -> None:
    """Raises a ValueError unless `block` is a power of two from 8 to 2^24."""
    if not isinstance(block, int) or not LANES <= block <= _MAX_BLOCK or block & (block - 1):
        raise ValueError(f"block must be a power of two from {LANES} to {_MAX_BLOCK} words, got {block!r}")


def _check_tensor(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        what = "a nested tensor" if tensor.is_nested else "a meta tensor" if tensor.is_meta else tensor.layout
        what = "a quantized tensor" if tensor.is_quantized else what
        raise TypeError(f"tensor must be dense and hold its values, got {what}")
    if torch._C._functorch.is_batchedtensor(tensor):
        raise TypeError("tensor must not be batched by torch.vmap, got a batched tensor: call it outside of vmap")


# A recorder asks for the same few hundred shards again and again, and launching must stay cheap on the host.
_whole = functools.lru_cache(maxsize=1 << 12)(Shard.whole)


def part_of(tensor: torch.Tensor, shard: Shard | None) -> tuple[torch.Tensor, Shard]:
    """Returns the local tensor, and the part of the whole that it is.

    Raises:
        TypeError: `tensor` is not a dense tensor that holds its values.
        ValueError: `shard` is given for a DTensor, `shard` does not match the tensor's shape, or `tensor` is a DTensor
            of partial sums.
    """
    _check_tensor(tensor)
    local, known = local_part(tensor)
    if known is not None and shard is not None:
        raise ValueError("shard must be None for a DTensor: its placement already defines the shard")
    if known is None and shard is None:
        return local, _whole(local.shape)
    shard = known or shard
    assert shard is not None
    if shard.local_shape != tuple(local.shape):
        raise ValueError(
            f"shard must have the tensor's shape {tuple(local.shape)} as its local shape, got {shard.local_shape}"
        )
    return local, shard


@functools.lru_cache(maxsize=1 << 14)
def block_span(shard: Shard, dtype: torch.dtype, block: int) -> tuple[int, int]:
    """Returns the first block that a part has words of, and the number of blocks from there to its last."""
    if shard.numel == 0:
        return 0, 0
    first, last = shard.first_and_last()
    per = words_per_element(dtype)
    first_block = first * per // block
    return first_block, ((last + 1) * per - 1) // block - first_block + 1


class _Plan(NamedTuple):
    numbers: tuple[Piece, ...]
    first: int
    blocks: int


@functools.lru_cache(maxsize=1 << 14)
def _plan(shard: Shard, dtype: torch.dtype, block: int) -> _Plan:
    return _Plan(pieces_of(shard, words_per_element(dtype)), *block_span(shard, dtype, block))


def _launch(parts: Sequence[tuple[torch.Tensor, Shard]], block: int) -> tuple[torch.Tensor, ...]:
    """Computes the block sums of contiguous tensors on one device."""
    numbers: list[int] = []
    counts, total = [], 0
    for place, (tensor, shard) in enumerate(parts):
        plan = _plan(shard, tensor.dtype, block)
        for piece in plan.numbers:
            numbers += (place, *piece, total - plan.first)
        counts.append(plan.blocks)
        total += plan.blocks
    sums = torch.ops.dash_attn_C.fingerprint_blocks([tensor for tensor, _ in parts], numbers, block, total)
    return sums.split(counts)


def sums_of_parts(parts: Sequence[tuple[torch.Tensor, Shard]], block: int) -> list[torch.Tensor]:
    """Computes `block_sums` of many local tensors, each with the part of the whole that it is, as from `part_of`.

    On a GPU, one launch covers up to 56 pieces, however small the tensors are. A tensor that is not contiguous is
    copied and launched separately, so that at most one copy exists at a time.
    """
    found: dict[int, torch.Tensor] = {}
    together: dict[torch.device, list[int]] = {}
    with torch.no_grad():
        for place, (tensor, shard) in enumerate(parts):
            if shard.numel == 0:
                found[place] = torch.zeros(0, dtype=torch.int64, device=tensor.device)
            elif tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
                together.setdefault(tensor.device, []).append(place)
            else:
                found[place] = _launch([(plain_contiguous(tensor), shard)], block)[0]
        for places in together.values():
            found.update(zip(places, _launch([parts[place] for place in places], block)))
    return [found[place] for place in range(len(parts))]


def block_sums(tensor: torch.Tensor, *, shard: Shard | None = None, block: int = DEFAULT_BLOCK) -> torch.Tensor:
    """Computes the sums of the blocks of a tensor, from the first block to the last that this part has words of.

    The call does not wait for the GPU. The sums that the parts of one tensor have for a block add up to the sum of the
    whole tensor's block (modulo 2^64).

    Args:
        tensor: a dense tensor of any shape and dtype, or a DTensor.
        shard: the part of the whole that a plain tensor is. None: the tensor is the whole.
        block: words per block, a power of two from 8 to 2^24.

    Returns:
        int64 (blocks,) on the tensor's device; empty for a part without elements. `block_span` gives the block numbers.

    Raises:
        TypeError: `tensor` is not a dense tensor that holds its values.
        ValueError: `block` is not such a power of two, or `shard` does not fit the tensor.
    """
    check_block(block)
    local, shard = part_of(tensor, shard)
    return sums_of_parts([(local, shard)], block)[0]


def fingerprint(tensor: torch.Tensor, *, shard: Shard | None = None) -> torch.Tensor:
    """Computes the fingerprint of a tensor, or of a part of one. The head of this module defines it.

    Args:
        tensor: a dense tensor of any shape and dtype, or a DTensor.
        shard: the part of the whole that a plain tensor is. None: the tensor is the whole.

    Returns:
        A 0-dimensional int64 tensor on the tensor's device.

    Raises:
        TypeError: `tensor` is not a dense tensor that holds its values.
        ValueError: `shard` does not fit the tensor.
    """
    return block_sums(tensor, shard=shard).sum()

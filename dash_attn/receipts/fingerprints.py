"""The fingerprint of a tensor: a keyed sum of its bits modulo 2^64, the same for any sharding. It is defined here.

An element of up to 4 bytes is a word, its bits as an unsigned integer; one of 8 or 16 bytes is 2 or 4 words of 32 bits,
in the order in which they stand in memory (the lowest bits first). The words of the whole tensor, in row-major order,
are numbered i = 0, 1, ... With g = floor(i / 8), l = i mod 8 and all arithmetic modulo 2^64,

    m  = mix(g)                                  the output number g of the generator splitmix64 seeded with 0
    k  = (m with bit 0 cleared) + (m rotated by 32 bits, with bit 0 set) * LANE_KEYS[l]
    block sum number b = sum of word_i * k_i over i of the block b, floor(i / block) = b
    fingerprint = sum of the block sums

    mix(g): z = (g + 1) * 0x9E3779B97F4A7C15
            z = (z xor z >> 30) * 0xBF58476D1CE4E5B9
            z = (z xor z >> 27) * 0x94D049BB133111EB
            result z xor z >> 31                 (Steele, Lea and Flood, OOPSLA 2014)

- Words of 0 add nothing and sums have no order, so the sums of parts of a tensor add up to that of the whole.
- k is odd: a change of one word, in particular of one bit, always changes the fingerprint.
- Within a group of 8, two words that trade places always change it too: LANE_KEYS differ by no multiple of 2^32.
- Two tensors that differ in more than one word have the same fingerprint with a probability of about 2^-28 in the
  worst case (where only the highest bits of words differ) and 2^-62 in the usual one, as far as mix is random. It finds
  faults, not forgers.
- Shape and dtype are no part of it: a receipt records them beside it.

A kernel needs mix once for 8 words, and then one product by a constant and two additions a word:
sum word * k = M * sum(word) + R * sum(word * LANE_KEYS) with the two halves M and R of k.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .shards import Shard, local_part

FINGERPRINT = "dash-attn-1"
"""The name of this definition, which receipts carry: only equal names can be compared."""
DEFAULT_BLOCK = 1 << 18
"""Words in a block: 1 MiB of fp32."""
LANES = 8
LANE_KEYS = (
    0x12D687A1, 0xA82C4757, 0x94A1B38F, 0x5EE05AEB, 0x64E2D6A5, 0x7A1FB19D, 0xC64D8B1B, 0xD8E2BC73,
)  # fmt: skip
"""Odd numbers of 32 bits, of no meaning."""

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MAX_BLOCK = 1 << 24
# Words that are worked on at a time: what is needed beside the tensor is some ten times as many bytes.
_CHUNK = 1 << 20


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Of the 64 bits as an unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _keys(group: torch.Tensor, lane: torch.Tensor) -> torch.Tensor:
    z = (group + 1) * _signed(_GAMMA)
    z = (z ^ _shift_right(z, 30)) * _signed(_FIRST)
    z = (z ^ _shift_right(z, 27)) * _signed(_SECOND)
    m = z ^ _shift_right(z, 31)
    return (m & -2) + (((m << 32) | _shift_right(m, 32)) | 1) * lane


@functools.cache
def _lane_keys(device: torch.device) -> torch.Tensor:
    # Filled on the device: a copy from the host would wait for it.
    keys = torch.empty(LANES, dtype=torch.int64, device=device)
    for lane, key in enumerate(LANE_KEYS):
        keys[lane].fill_(key)
    return keys


def check_block(block: int) -> None:
    """Raises ValueError unless `block` is a power of two from 8 to 2^24."""
    if not isinstance(block, int) or not LANES <= block <= _MAX_BLOCK or block & (block - 1):
        raise ValueError(f"block must be a power of two from {LANES} to {_MAX_BLOCK} words, got {block!r}")


def words_per_element(dtype: torch.dtype) -> int:
    """1 for elements of up to 4 bytes, 2 for 8, 4 for 16."""
    return max(1, dtype.itemsize // 4)


def _check_tensor(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        what = "a nested tensor" if tensor.is_nested else "a meta tensor" if tensor.is_meta else tensor.layout
        what = "a quantized tensor" if tensor.is_quantized else what
        raise TypeError(f"tensor must be dense and hold its values, got {what}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The words of a tensor in row-major order, as integers of 1, 2 or 4 bytes of either sign."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.dtype.itemsize
    return flat.view({1: torch.uint8, 2: torch.int16}.get(size, torch.int32))


def _words(bits: torch.Tensor) -> torch.Tensor:
    """The same as unsigned numbers, int64."""
    return bits.long() & ((1 << (8 * bits.dtype.itemsize)) - 1)


def part_of(tensor: torch.Tensor, shard: Shard | None) -> tuple[torch.Tensor, Shard]:
    """The local tensor and which part of the whole it is.

    Raises:
        TypeError: `tensor` is no dense tensor that holds its values.
        ValueError: `shard` is given for a DTensor, or has another shape than the tensor; a DTensor of partial sums.
    """
    _check_tensor(tensor)
    local, known = local_part(tensor)
    if known is not None and shard is not None:
        raise ValueError("shard must be None for a DTensor, which says itself what part it is")
    shard = known or shard or Shard.whole(tuple(local.shape))
    if shard.local_shape != tuple(local.shape):
        raise ValueError(
            f"shard must be a part of the tensor's shape {tuple(local.shape)}, got one of {shard.local_shape}"
        )
    return local, shard


def block_span(shard: Shard, dtype: torch.dtype, block: int) -> tuple[int, int]:
    """The first block that a part has words of, and the number of blocks from there to the last."""
    if shard.numel == 0:
        return 0, 0
    first, last = shard.first_and_last()
    per = words_per_element(dtype)
    first_block = first * per // block
    return first_block, ((last + 1) * per - 1) // block - first_block + 1


def _contiguous_sums(bits: torch.Tensor, start: int, block: int, lanes: torch.Tensor) -> list[torch.Tensor]:
    """Of words that stand one behind the other in the whole, from the word `start` on."""
    sums = []
    stop, chunk = start + bits.numel(), max(block, _CHUNK)
    low = start
    while low < stop:
        high = min(stop, (low // chunk + 1) * chunk)
        first_group = low // LANES
        groups = torch.arange(first_group, (high - 1) // LANES + 1, device=bits.device)
        keys = _keys(groups[:, None], lanes).reshape(-1)[low - first_group * LANES :][: high - low]
        products = _words(bits[low - start : high - start]) * keys
        first_block, last_block = low // block, (high - 1) // block
        if first_block == last_block:
            sums.append(products.sum().reshape(1))
        else:
            padding = low - first_block * block, (last_block + 1) * block - high
            sums.append(torch.nn.functional.pad(products, padding).view(-1, block).sum(1))
        low = high
    return sums


def word_indices(shard: Shard, per: int, low: int, high: int, device: torch.device) -> torch.Tensor:
    """The numbers in the whole, of `per` words an element, of the words `low` to `high` of a part; int64."""
    rest = torch.arange(low, high, device=device)
    index = rest % per
    rest = rest // per
    stride = per
    for length, local, of_dim in zip(reversed(shard.shape), reversed(shard.local_shape), reversed(shard.ranges)):
        place = rest % local
        rest = rest // local
        at, shift = 0, 0
        coordinate = place
        for start, stop in of_dim:
            # What begins here stands `start - at` further back in the whole than in the part.
            coordinate = coordinate + (place >= at) * (start - at - shift)
            shift = start - at
            at += stop - start
        index = index + coordinate * stride
        stride *= length
    return index


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The words of a plain tensor in row-major order, as int64, one dimension."""
    return _words(_bits(tensor))


def block_sums(tensor: torch.Tensor, *, shard: Shard | None = None, block: int = DEFAULT_BLOCK) -> torch.Tensor:
    """The sums of the blocks of a tensor that this part has words of, from the first to the last.

    Nothing waits for the GPU. For parts of one tensor, the sums of a block add up to that of the whole (modulo 2^64).

    Args:
        tensor: any dense tensor of any dtype, or a DTensor.
        shard: which part of a whole a plain tensor is; None: it is the whole.
        block: words in a block, a power of two from 8 to 2^24.

    Returns:
        int64 (blocks,), on the tensor's device; empty for a part without elements. `block_span` says which blocks.

    Raises:
        TypeError: `tensor` is no dense tensor that holds its values.
        ValueError: `block` is no such number, or `shard` does not fit the tensor.
    """
    check_block(block)
    local, shard = part_of(tensor, shard)
    with torch.no_grad():
        if shard.numel == 0:
            return torch.zeros(0, dtype=torch.int64, device=local.device)
        bits, lanes = _bits(local), _lane_keys(local.device)
        per = words_per_element(local.dtype)
        start = shard.start_if_contiguous()
        if start is not None:
            sums = _contiguous_sums(bits, start * per, block, lanes)
            return sums[0] if len(sums) == 1 else torch.cat(sums)
        first_block, blocks = block_span(shard, local.dtype, block)
        total = torch.zeros(blocks, dtype=torch.int64, device=local.device)
        for low in range(0, bits.numel(), _CHUNK):
            high = min(bits.numel(), low + _CHUNK)
            index = word_indices(shard, per, low, high, local.device)
            keys = _keys(index // LANES, lanes[index % LANES])
            total.index_add_(0, index // block - first_block, _words(bits[low:high]) * keys)
        return total


def fingerprint(tensor: torch.Tensor, *, shard: Shard | None = None) -> torch.Tensor:
    """The fingerprint of a tensor or of a part of one: int64 without dimensions, on its device; see this module's head.

    The arguments and errors are those of `block_sums`.
    """
    return block_sums(tensor, shard=shard).sum()


def to_unsigned(sums: Sequence[int]) -> list[int]:
    """Sums as int64 holds them, as numbers from 0 to 2^64 - 1."""
    return [number % (1 << 64) for number in sums]

"""The elements in which a block differs between two replays of a step, with their bits."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import torch

_SHOWN = 10


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[tuple[int | None, int], int]]:
    """What was asked for, and the words by rank (None where ranks share the tensor) and number."""
    files = sorted(pathlib.Path(path).glob("block_*.pt"))
    if not files:
        raise ValueError(f"a folder that a replay has written (block_00000.pt, ...) is needed, got {path}")
    words: dict[tuple[int | None, int], int] = {}
    contents = [torch.load(file, weights_only=True) for file in files]
    for content in contents:
        rank = content["rank"] if content["local"] else None
        for index, word in zip(content["indices"].tolist(), content["words"].tolist()):
            if words.setdefault((rank, index), word) != word:
                raise ValueError(f"copies of word {index} differ between the ranks of {path}")
    return contents[0], words


def _value(word: int, dtype: torch.dtype) -> str:
    size = dtype.itemsize
    if size > 4:
        return ""
    signed = word - (1 << (8 * size)) if word >> (8 * size - 1) else word
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    return f" ({torch.tensor([signed], dtype=integer).view(dtype).item()!r})"


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> tuple[int, str]:
    """How many words of the block differ, and which, in words.

    Args:
        a, b: folders that replays have written, of the same block.

    Raises:
        ValueError: a folder holds no block, or they hold different ones.
    """
    (one, words_a), (other, words_b) = _read(a), _read(b)
    for field in ("step", "kind", "name", "time", "block", "shape", "dtype"):
        if one[field] != other[field]:
            raise ValueError(f"both replays must have the same {field}, got {one[field]} and {other[field]}")
    if words_a.keys() != words_b.keys():
        raise ValueError(f"both replays must hold the same words of the block, got {len(words_a)} and {len(words_b)}")
    dtype, per = getattr(torch, one["dtype"]), one["words_per_element"]
    differing = sorted((key for key in words_a if words_a[key] != words_b[key]), key=lambda key: (key[0] or 0, key[1]))
    lines = [f"step {one['step']}, {one['kind']} {one['name']}, block {one['block']}: "
             f"{len(differing)} of {len(words_a)} words differ"]  # fmt: skip
    digits = 2 * min(4, dtype.itemsize)
    for key in differing[:_SHOWN]:
        rank, index = key
        element, place = index // per, []
        for length in reversed(one["shape"]):
            element, coordinate = divmod(element, length)
            place.append(coordinate)
        first, second = words_a[key], words_b[key]
        bits = [bit for bit in range(32) if (first ^ second) >> bit & 1]
        where = f"element {place[::-1]}" + (f", word {index % per}" if per > 1 else "")
        where += "" if rank is None else f", rank {rank}"
        lines.append(f"  {where}: {first:0{digits}x}{_value(first, dtype)} and {second:0{digits}x}"
                     f"{_value(second, dtype)}, bits {bits}")  # fmt: skip
    if len(differing) > _SHOWN:
        lines.append(f"  and {len(differing) - _SHOWN} more")
    return len(differing), "\n".join(lines)

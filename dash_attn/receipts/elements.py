"""Lists the elements in which a block differs between two replays of a step, with their bits."""

from __future__ import annotations

import os
import pathlib
import zipfile
from typing import Any

import torch

_SHOWN = 10
_FIELDS = {
    "step", "kind", "name", "time", "block", "rank", "local", "shape", "dtype", "words_per_element", "indices", "words",
}  # fmt: skip

Place = tuple[int, int]
"""The rank that owns the tensor (-1 if several ranks hold parts or copies of it), and the number of the word."""


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[Place, int], dict[Place, int]]:
    """Returns the description of the block, its words, and the words of other ranks' copies that differ from them."""
    files = sorted(pathlib.Path(path).glob("block_*.pt"))
    if not files:
        raise ValueError(f"the folder must hold the block of a replay (block_00000.pt, ...), got {path}")
    words: dict[Place, int] = {}
    copies: dict[Place, int] = {}
    contents = [_content(file) for file in files]
    for content in contents:
        rank = content["rank"] if content["local"] else -1
        for index, word in zip(content["indices"].tolist(), content["words"].tolist()):
            if words.setdefault((rank, index), word) != word:
                copies[rank, index] = word
    return contents[0], words, copies


def _content(file: pathlib.Path) -> dict[str, Any]:
    try:
        # torch.load does not verify the checksums.
        with zipfile.ZipFile(file) as archive:
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"{damaged} does not match its checksum")
        content = torch.load(file, weights_only=True)
        if missing := _FIELDS - content.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        return content
    except Exception as error:  # zipfile, pickle and torch raise many kinds
        raise ValueError(f"{file} cannot be read as the block of a replay: {error}") from None


def _value(word: int, dtype: torch.dtype) -> str:
    size = dtype.itemsize
    if size > 4:
        return ""
    signed = word - (1 << (8 * size)) if word >> (8 * size - 1) else word
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    return f" ({torch.tensor([signed], dtype=integer).view(dtype).item()!r})"


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> tuple[int, list[str]]:
    """Compares the words of a block in two replays.

    Args:
        a: the folder that the replay of run a wrote.
        b: the folder that the replay of run b wrote, of the same block.

    Returns:
        The number of words that differ, and lines of text that list them.

    Raises:
        ValueError: a folder holds no block, the folders hold different blocks, or a file cannot be read.
    """
    (one, words_a, copies_a), (other, words_b, copies_b) = _read(a), _read(b)
    for field in ("step", "kind", "name", "time", "block", "shape", "dtype"):
        if one[field] != other[field]:
            raise ValueError(f"both replays must have the same {field}, got {one[field]} and {other[field]}")
    if words_a.keys() != words_b.keys():
        raise ValueError(f"both replays must hold the same words of the block, got {len(words_a)} and {len(words_b)}")
    between_runs = {place: (words_a[place], words_b[place]) for place in words_a if words_a[place] != words_b[place]}
    head = f"step {one['step']}, {one['kind']} {one['name']}, block {one['block']}: "
    lines = [f"{head}{len(between_runs)} of {len(words_a)} words differ", *_listed(between_runs, one)]
    total = len(between_runs)
    for name, words, copies in (("a", words_a, copies_a), ("b", words_b, copies_b)):
        if copies:
            between_copies = {place: (words[place], word) for place, word in copies.items()}
            lines.append(f"{len(copies)} words differ between the copies of ranks of {name}")
            lines += _listed(between_copies, one)
            total += len(copies)
    return total, lines


def _listed(differing: dict[Place, tuple[int, int]], content: dict[str, Any]) -> list[str]:
    dtype, per = getattr(torch, content["dtype"]), content["words_per_element"]
    digits = 2 * min(4, dtype.itemsize)
    lines = []
    for (rank, index), (first, second) in sorted(differing.items())[:_SHOWN]:
        element, coordinates = index // per, []
        for length in reversed(content["shape"]):
            element, coordinate = divmod(element, length)
            coordinates.append(coordinate)
        bits = [bit for bit in range(32) if (first ^ second) >> bit & 1]
        where = f"element {coordinates[::-1]}" + (f", word {index % per}" if per > 1 else "")
        where += "" if rank < 0 else f", rank {rank}"
        lines.append(
            f"  {where}: {first:0{digits}x}{_value(first, dtype)} and {second:0{digits}x}{_value(second, dtype)}, "
            f"bits {bits}"
        )
    if len(differing) > _SHOWN:
        lines.append(f"  and {len(differing) - _SHOWN} more")
    return lines

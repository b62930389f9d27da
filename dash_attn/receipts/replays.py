"""Replays of a step: the command that repeats it, and the environment variables that tell the replay what to write."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shlex
import sys
from collections.abc import Mapping

import torch

from .fingerprints import part_of
from .pieces import pieces_of, places
from .shards import Shard
from .words import words_of, words_per_element

PATH, DUMP = "DASH_ATTN_RECEIPTS_PATH", "DASH_ATTN_RECEIPTS_DUMP"
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A block of one of a step's tensors, whose words a replay writes to files."""

    step: int
    kind: str
    name: str
    time: int
    block: int


def path_of(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the folder that a recorder writes into: `path`, or the folder that the replay's command names."""
    return pathlib.Path(os.environ.get(PATH) or path)


def wanted() -> Wanted | None:
    """Returns the block that the environment asks for; None outside of a replay.

    Raises:
        ValueError: the environment variable does not describe a block.
    """
    text = os.environ.get(DUMP)
    if not text:
        return None
    try:
        return Wanted(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{DUMP} must have the value that `compare` printed, got {text!r} ({error})") from None


def launch_command() -> str:
    """Returns the command line that started this process, including torchrun if torchrun started it."""
    arguments = list(sys.orig_argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        nodes = int(os.environ.get("WORLD_SIZE", "1")) // local
        program = arguments[2:] if arguments[1:2] == ["-u"] else arguments[1:]
        arguments = ["torchrun", *(["--nnodes", str(nodes)] if nodes > 1 else []), "--nproc-per-node", str(local)]
        arguments += program
    return shlex.join(arguments)


def command(meta: Mapping[str, str], want: Wanted, path: str) -> str:
    """Returns the shell command that repeats a run up to a step and writes a block's words into the folder `path`."""
    text = json.dumps(dataclasses.asdict(want))
    run = meta["command"]
    if template := meta.get("replay"):
        run = template.replace("{step}", str(want.step))
    # The variables are exported for all of `a && b`, and in a subshell, so that later commands are no replays.
    exports = f"export {PATH}={shlex.quote(path)} {DUMP}={shlex.quote(text)}"
    return f"(cd {shlex.quote(meta['folder'])} || exit; {exports}; {run})"


def dump(
    path: pathlib.Path, want: Wanted, tensor: torch.Tensor, shard: Shard | None, *, rank: int, local: bool, block: int
) -> None:
    """Writes this rank's words of the block into the folder of the replay's receipts."""
    part, shard = part_of(tensor, shard)
    words, per = words_of(part).cpu(), words_per_element(part.dtype)
    indices, values = [], []
    for piece in pieces_of(shard, per):
        count = piece.rows * piece.columns
        for low in range(0, count, _CHUNK):
            at, number = places(piece, low, min(low + _CHUNK, count), torch.device("cpu"))
            inside = number // block == want.block
            indices.append(number[inside])
            values.append(words[at[inside]])
    empty = [torch.zeros(0, dtype=torch.int64)]
    content = {
        **dataclasses.asdict(want), "rank": rank, "local": local, "shape": list(shard.shape),
        "dtype": str(part.dtype).removeprefix("torch."), "words_per_element": per,
        "indices": torch.cat(indices or empty), "words": torch.cat(values or empty),
    }  # fmt: skip
    torch.save(content, path / f"block_{rank:05d}.pt")

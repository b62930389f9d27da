"""Checkpoints with torch.distributed.checkpoint: each rank writes its part, and any number of ranks can read them.

A checkpoint is a folder `step_00000008`. It is written as `partial_step_00000008` and renamed when all of its files are
on the disk, so a folder with the final name is complete. Its `fingerprints.json` has the size and the fingerprint of
every file, which `load_last` verifies before it reads anything else.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dash_attn.receipts import FINGERPRINT, Shard, fingerprint

from .safe_files import replace_text, sync_folder

FINGERPRINTS = "fingerprints.json"
_WHOLE, _PARTIAL, _DROPPED = "step_", "partial_step_", "dropped_step_"
_CHUNK = 1 << 24  # bytes of a file in memory at a time


def _folder(root: pathlib.Path, step: int, prefix: str = _WHOLE) -> pathlib.Path:
    return root / f"{prefix}{step:08d}"


def _steps(root: pathlib.Path, prefix: str = _WHOLE) -> list[int]:
    """Returns the steps of the folders with a prefix, in descending order."""
    numbers = (path.name.removeprefix(prefix) for path in root.glob(f"{prefix}*"))
    return sorted(map(int, filter(str.isdigit, numbers)), reverse=True)


def _file_fingerprint(path: pathlib.Path) -> dict[str, int]:
    """Returns the size of a file, and the fingerprint of its bytes as 4-byte words, padded with zeros."""
    size, at, total = path.stat().st_size, 0, 0
    with path.open("rb") as file:
        while data := bytearray(file.read(_CHUNK)):
            data += bytes(-len(data) % 4)
            words = torch.frombuffer(data, dtype=torch.int32)
            total += int(fingerprint(words, shard=Shard.box((-(-size // 4),), (at,), (words.numel(),))))
            at += words.numel()
    return {"bytes": size, "fingerprint": total % (1 << 64)}


def _of_all_ranks(value: object) -> list:
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _own_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that this rank fingerprints. Together, the ranks fingerprint all files that rank 0 finds.

    Every rank must call this function. On a shared disk the other ranks may see a file a little later.
    """
    names = _of_all_ranks(sorted(path.name for path in folder.glob("*") if path.name != FINGERPRINTS))[0]
    return [folder / name for name in names[dist.get_rank() :: dist.get_world_size()]]


def save(root: pathlib.Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes the state at the beginning of step `step`."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    partial = _folder(root, step, _PARTIAL)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=partial)
    found = _of_all_ranks({path.name: _file_fingerprint(path) for path in _own_files(partial)})
    if dist.get_rank() == 0:
        files = {name: known for of_rank in found for name, known in of_rank.items()}
        replace_text(partial / FINGERPRINTS, json.dumps({"definition": FINGERPRINT, "files": files}, indent=2) + "\n")
        partial.rename(_folder(root, step))
        sync_folder(root)
    dist.barrier()


def _damage(folder: pathlib.Path, own_files: list[pathlib.Path]) -> str | None:
    """Returns what is wrong with this rank's share of a checkpoint's files; None if nothing is."""
    try:
        known = json.loads((folder / FINGERPRINTS).read_text())
        if known["definition"] != FINGERPRINT:
            return f"its fingerprints are {known['definition']}, but this version of dash_attn has {FINGERPRINT}"
        for name in known["files"]:
            if not (folder / name).is_file():
                return f"{name} is missing"
        for path in own_files:
            wanted, found = known["files"].get(path.name), _file_fingerprint(path)
            if wanted is None:
                return f"{path.name} is not one of its files"
            if found["bytes"] != wanted["bytes"]:
                return f"{path.name} has {found['bytes']} of its {wanted['bytes']} bytes"
            if found != wanted:
                return f"{path.name} does not match its fingerprint"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def load_last(root: pathlib.Path, at_most: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Sets model and optimizer to the last undamaged checkpoint of a step up to `at_most`.

    Damaged checkpoints are reported on stderr and skipped.

    Returns:
        The step at which the checkpoint begins, the same on all ranks; 0 without a checkpoint.

    Raises:
        ValueError: there are checkpoints, and all of them are damaged.
    """
    # Only one rank looks, because on a shared disk the others may see the folder a little later.
    steps = _of_all_ranks(_steps(root))[0]
    candidates = [step for step in steps if step <= at_most]
    for step in candidates:
        folder = _folder(root, step)
        damage = next(
            (found for found in _of_all_ranks(_damage(folder, _own_files(folder))) if found is not None), None
        )
        if damage is None:
            of_model, of_optimizer = get_state_dict(model, optimizer)
            dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
            return step
        if dist.get_rank() == 0:
            print(f"warning: skipped the damaged checkpoint {folder}: {damage}", file=sys.stderr, flush=True)
    if candidates:
        raise ValueError(
            f"--resume found no undamaged checkpoint in {str(root)!r}: steps {candidates} are all damaged; "
            "use --resume 0 to start over"
        )
    return 0


def drop_after(root: pathlib.Path, start: int) -> None:
    """Removes the checkpoints of steps after `start` from the history that a run continues, and all partial ones.

    Removed checkpoints are renamed to `dropped_step_...` and kept until another one of that step is dropped.
    """
    if dist.get_rank() == 0:
        # In descending order, so that an interruption leaves one consistent history.
        for step in _steps(root):
            if step > start:
                shutil.rmtree(_folder(root, step, _DROPPED), ignore_errors=True)
                _folder(root, step).rename(_folder(root, step, _DROPPED))
        for step in _steps(root, _PARTIAL):
            shutil.rmtree(_folder(root, step, _PARTIAL))
        if root.exists():
            sync_folder(root)
    dist.barrier()

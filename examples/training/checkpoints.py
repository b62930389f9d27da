"""Checkpoints by torch.distributed.checkpoint: each rank writes what it holds, and any number of ranks reads it."""

from __future__ import annotations

import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def _folder(root: pathlib.Path, step: int) -> pathlib.Path:
    return root / f"step_{step:08d}"


def save(root: pathlib.Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What the step `step` begins with."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=_folder(root, step))


def load(root: pathlib.Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Sets model and optimizer to what `save` has written."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=_folder(root, step))
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


def latest(root: pathlib.Path, at_most: int | None = None) -> int:
    """The step of the last checkpoint that is whole, the same on all ranks; 0 where there is none."""
    # Its metadata is written when all ranks have written their parts.
    steps = [int(path.parent.name.removeprefix("step_")) for path in root.glob("step_*/.metadata")]
    found = [max((step for step in steps if at_most is None or step <= at_most), default=0)]
    dist.broadcast_object_list(found, src=0)
    return found[0]

"""One of two processes that train under a Recorder: see test_receipts_sharding.py.

    python receipts_worker.py RANK WORLD_SIZE PORT FOLDER

It leaves FOLDER/CASE/rank_RANK.sqlite for each case, and FOLDER/rank_RANK.json with what it has found itself.
"""

import json
import pathlib
import sys

import torch
import torch.distributed as dist
from rank_processes import join
from receipts_support import BLOCK, Model, flip
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dash_attn.receipts import Recorder, block_sums, fingerprint, tap
from dash_attn.receipts import Shard as Part

STEPS, BATCH = 2, 4


def whole_tensor(dtype=torch.float32):
    return torch.randn(7, 10, generator=torch.Generator().manual_seed(5)).to(dtype)


def placements_add_up(rank, mesh):
    """Whether a DTensor's parts add up to the whole, for each way to cut it; rows and columns do not divide."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        whole = whole_tensor(dtype) if dtype.is_floating_point else (whole_tensor() * 1000).to(dtype)
        for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("copies", Replicate())):
            total = fingerprint(distribute_tensor(whole, mesh, [placement]))
            if name != "copies":
                dist.all_reduce(total)
            found[f"{name} {dtype}"] = bool(total == fingerprint(whole))
    row = torch.ones(1, 3)
    parts = block_sums(distribute_tensor(row, mesh, [Shard(0)]))
    found["a rank without elements"] = parts.numel() == (1 if rank == 0 else 0)
    try:
        fingerprint(DTensor.from_local(row, mesh, [Partial()]))
    except ValueError as error:
        found["partial sums"] = "must not be a DTensor of partial sums" in str(error)
    return found


def batch_of(step):
    return torch.randint(16, (BATCH, 5), generator=torch.Generator().manual_seed(step))


class Plant:
    """Flips a bit of layer 1's on rank 1 in the last step: `thing` says of what."""

    def __init__(self, thing, rank, step):
        self.thing, self.here = thing, rank == 1 and step == STEPS - 1

    def __call__(self, thing, tensor):
        if self.here and thing == self.thing:
            # A token stays one of the vocabulary.
            flip(tensor, 21 % tensor.numel(), 20 if tensor.is_floating_point() else 0)


def own_rows(tensor, rank, world_size):
    rows = len(tensor) // world_size
    part = tensor[rank * rows : (rank + 1) * rows]
    return part, Part.along(tensor.shape, 0, (rank * rows, (rank + 1) * rows))


def data_parallel(folder, rank, world_size, plant_in=None):
    """Each rank has a part of the batch; gradients are gathered and added up in the order of ranks."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weight = model.layers[1].weight
    plant = Plant(None, rank, 0)
    # Before the recorder's own hook, which sees what this has done.
    optimizer.register_step_post_hook(lambda *_: plant("state", optimizer.state[weight]["exp_avg"]))
    with Recorder(folder, model=model, optimizer=optimizer, block=BLOCK, taps=["layers.*"]) as recorder:
        for step in range(STEPS):
            plant = Plant(plant_in, rank, step)
            plant("weights", weight)
            tokens, part = own_rows(batch_of(step), rank, world_size)
            plant("data", tokens)
            with recorder.step(step, data=tokens, shard=part):
                tap(model(tokens), "loss").backward()
                for parameter in model.parameters():
                    every = [torch.empty_like(parameter) for _ in range(world_size)]
                    dist.all_gather(every, parameter.grad)
                    parameter.grad = torch.stack(every).sum(0)
                plant("collective", weight.grad)
                optimizer.step()
            optimizer.zero_grad()


def fsdp(folder, rank, world_size, plant_in=None):
    """FSDP2: parameters, gradients and state are DTensors."""
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weight = model.layers[1].weight
    with Recorder(folder, model=model, optimizer=optimizer, block=BLOCK, taps=["layers.*"]) as recorder:
        for step in range(STEPS):
            plant = Plant(plant_in, rank, step)
            plant("weights", weight.to_local())
            tokens, part = own_rows(batch_of(step), rank, world_size)
            with recorder.step(step, data=tokens, shard=part):
                tap(model(tokens), "loss").backward()
                plant("collective", weight.grad.to_local())
                optimizer.step()
            optimizer.zero_grad()


def layouts(folder, rank, mesh, world_size):
    """One tensor recorded as what each layout makes of it, with a bit flipped in some."""
    whole = whole_tensor()
    other = whole.clone()
    flip(other, 43, 9)
    zigzag = Part.along(whole.shape, 1, *([(0, 2), (8, 10)] if rank == 0 else [(2, 8)]))
    for name, tensor in (("whole", whole), ("flipped", other)):
        columns = torch.cat([tensor[:, start:stop] for start, stop in zigzag.ranges[1]], dim=1)
        for layout, (part, shard) in {
            "copies": (tensor, None),
            "rows": (distribute_tensor(tensor, mesh, [Shard(0)]), None),
            "columns": (distribute_tensor(tensor, mesh, [Shard(1)]), None),
            "zigzag": (columns, zigzag),
        }.items():
            with Recorder(folder / f"{layout}_{name}", block=BLOCK) as recorder, recorder.step(0):
                recorder.record(part, "x", "activation", shard=shard, local=False)


def main(rank, world_size, port, folder):
    join(rank, world_size, port, 300)
    mesh = init_device_mesh("cpu", (world_size,))
    found = placements_add_up(rank, mesh)
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    for thing in (None, "data", "weights", "collective", "state"):
        data_parallel(folder / f"data_parallel_{thing}", rank, world_size, thing)
    for thing in (None, "weights", "collective"):
        fsdp(folder / f"fsdp_{thing}", rank, world_size, thing)
    layouts(folder, rank, mesh, world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), pathlib.Path(sys.argv[4]))

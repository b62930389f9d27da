"""Receipts of two processes with gloo: DTensors, data parallelism, FSDP2, and runs that are cut in other ways."""

import gc
import json
import shutil
import sqlite3
import weakref

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from receipts_worker import whole_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Rows
from torch.testing._internal.distributed.fake_pg import FakeStore

from dash_attn.receipts import Recorder, compare
from dash_attn.receipts.shards import local_part

WORLD_SIZE = 2
LAYOUTS = ("copies", "rows", "columns", "zigzag")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the processes have left."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("receipts_worker.py", WORLD_SIZE, folder)
    return folder


def test_parts_of_dtensors(folder):
    for rank in range(WORLD_SIZE):
        found = json.loads((folder / f"rank_{rank}.json").read_text())
        assert len(found) == 11 and all(found.values()), found


def test_a_process_that_is_another_rank_later():
    """It has another part of an equal mesh then, and nothing that is remembered of parts keeps its groups alive."""
    for rank in (0, 2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            tensor = DTensor.from_local(torch.zeros(2, 3), init_device_mesh("cpu", (4,)), [Rows(0)])
            _, shard = local_part(tensor)
            assert shard.shape == (8, 3) and shard.ranges[0] == ((2 * rank, 2 * rank + 2),)
            group = weakref.ref(tensor.device_mesh.get_group())
        finally:
            del tensor
            dist.destroy_process_group()
        gc.collect()
        assert group() is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts(folder, tmp_path, layout):
    """The same tensor is the same however it is cut, on two ranks and on one; a flipped bit is found in any pair."""
    with Recorder(tmp_path / "one", block=8) as recorder, recorder.step(0):
        recorder.record(whole_tensor(), "x", "activation")
    for other in (tmp_path / "one", *(folder / f"{name}_whole" for name in LAYOUTS)):
        assert compare(other, folder / f"{layout}_whole").first is None
        first = compare(other, folder / f"{layout}_flipped").first
        assert (first.key.name, first.blocks, first.block_count) == ("x", [43 // 8], 9)
        assert first.elements == (40, 48) and first.shape == (7, 10)
    # Element 43 is in row 4 and column 3; who has it is known where both are cut alike.
    owner = {"copies": [0, 1], "rows": [1], "columns": [0], "zigzag": [1]}[layout]
    assert compare(folder / f"{layout}_whole", folder / f"{layout}_flipped").first.ranks == owner


PLANTED = {
    "data_parallel_data": ("data", "data", "data"),
    "data_parallel_weights": ("weights", "layers.1.weight", "weights"),
    "data_parallel_collective": ("gradient", "layers.1.weight", "collective"),
    "data_parallel_state": ("state", "layers.1.weight.exp_avg", "optimizer"),
    "fsdp_weights": ("weights", "layers.1.weight", "weights"),
    "fsdp_collective": ("gradient", "layers.1.weight", "collective"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bit_on_one_rank(folder, name):
    clean = folder / f"{name.rpartition('_')[0]}_None"
    found = compare(clean, folder / name)
    kind, tensor, cause = PLANTED[name]
    first = found.first
    assert (first.step, first.key.kind, first.key.name, first.cause) == (1, kind, tensor, cause)
    assert first.ranks == [1] and len(first.blocks) == 1
    if name.startswith("data_parallel") and kind != "data":
        # Copies of one tensor that are not the same are found within the run, too.
        assert "its copies in run b: ranks [0] and ranks [1]" in first.what
        assert compare(folder / name, folder / name).first.key == first.key


def test_layouts_of_a_whole_run(folder):
    """Data parallelism against FSDP2: weights and data are the same; what belongs to a rank alone is left out."""
    found = compare(folder / "data_parallel_None", folder / "fsdp_None")
    assert found.first.step == 0 and found.first.key.kind == "gradient"  # a sum there, a mean here
    assert found.first.cause == "backward or collective"
    assert found.first.differing["weights"] == (0, 7) and found.first.differing["data"] == (0, 1)
    assert "local_gradient" not in found.first.differing
    assert any("belongs to one rank, and the layouts of the runs differ" in why for why in found.not_compared)


def test_a_rank_that_died_before_the_others(folder, tmp_path):
    whole, died = folder / "data_parallel_None", tmp_path / "died"
    shutil.copytree(whole, died)
    steps = compare(whole, whole).steps
    database = sqlite3.connect(died / "rank_00001.sqlite")
    database.execute("DELETE FROM step WHERE step = ?", (steps[-1],))
    database.commit()
    database.close()
    of_a, of_b = (f"not recorded to the end in run {name}" for name in "ab")
    last = f"steps {steps[-1]}"
    assert compare(died, died).not_compared == {of_a: last, of_b: last}
    found = compare(whole, died)
    assert found.first is None and found.steps == steps[:-1]
    assert found.not_compared == {"recorded only in run a": last, of_b: last}


def test_a_missing_rank(folder, tmp_path):
    (tmp_path / "rank_00001.sqlite").write_bytes((folder / "rows_whole" / "rank_00001.sqlite").read_bytes())
    with pytest.raises(ValueError, match=r"has no receipts of ranks \[0\] of 2"):
        compare(tmp_path, folder / "rows_whole")

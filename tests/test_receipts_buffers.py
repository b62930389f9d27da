"""Buffers in receipts: persistent ones and others, before a step and after it, and those of a rank."""

import random

import pytest
import torch
import torch.distributed as dist
from receipts_support import flip
from torch.testing._internal.distributed.fake_pg import FakeStore

from dash_attn.receipts import Recorder, Shard, compare
from dash_attn.receipts.runs import Run

STEPS = 4


class Model(torch.nn.Module):
    """A model in training: nothing that it computes depends on the statistics that it keeps."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 12)
        self.norm = torch.nn.BatchNorm1d(12)
        self.register_buffer("table", torch.arange(12.0), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        return (self.norm(self.linear(x)) * self.table).square().mean()


def train(folder, *, name=None, when=None, element=0, bit=0, optimize=True, **options):
    """A bit of the buffer `name` flips in step 2: before it, in it, or in its last moment."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    buffers = dict(model.named_buffers())
    options = {"optimizer": optimizer} | options if optimize else options
    with Recorder(folder, model=model, block=8, **options) as recorder:
        for step in range(STEPS):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            if when == "before" and step == 2:
                flip(buffers[name], element, bit)
            with recorder.step(step, data=x):
                model(x).backward()
                if when == "within" and step == 2:
                    flip(buffers[name], element, bit)
                optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    path = tmp_path_factory.mktemp("clean")
    train(path)
    return path


@pytest.mark.parametrize("name", ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "table"])
@pytest.mark.parametrize("when, kind", [("before", "buffers"), ("within", "updated_buffers")])
def test_flipped_bits(clean, tmp_path, name, when, kind):
    """Whichever bit it is, and though no output, gradient or weight depends on it."""
    rng = random.Random(name + when)
    for turn in range(3):
        element = 0 if name == "norm.num_batches_tracked" else rng.randrange(12)
        train(tmp_path / str(turn), name=name, when=when, element=element, bit=rng.randrange(32))
        found = compare(clean, tmp_path / str(turn))
        first = found.first
        assert (first.step, first.key.kind, first.key.name) == (2, kind, name)
        assert first.cause == ("buffers" if when == "before" else "forward")
        assert ("step 1 agrees to its end" if when == "before" else "all earlier records of the step") in first.reason
        assert found.facts == {}


def test_what_is_recorded(clean, tmp_path):
    run = Run(clean)
    keys = [(key.kind, key.name) for key in run.tensors(run.rows(0))]
    run.close()
    names = ["table", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    for kind in ("buffers", "updated_buffers"):
        assert [name for of, name in keys if of == kind] == names
    kinds = list(dict.fromkeys(kind for kind, _ in keys))
    assert kinds == ["data", "weights", "buffers", "gradient", "updated_weights", "updated_buffers"]
    train(tmp_path / "fewer", kinds=["weights", "gradient"])
    found = compare(clean, tmp_path / "fewer")
    assert found.first is None and len(found.not_compared) == 1
    # Without an optimizer, too.
    train(tmp_path / "alone", optimize=False)
    assert compare(tmp_path / "alone", clean).first is None
    train(tmp_path / "flipped", optimize=False, name="table", when="within")
    assert compare(tmp_path / "alone", tmp_path / "flipped").first.key.kind == "updated_buffers"


def test_a_buffer_that_cannot_be_recorded(tmp_path):
    model = torch.nn.Linear(2, 2)
    model.register_buffer("sparse", torch.ones(3).to_sparse())
    with Recorder(tmp_path / "run", model=model) as recorder:
        with pytest.raises(TypeError, match="buffers 'sparse' cannot be recorded: tensor must be dense"):
            with recorder.step(0):
                pass
    with Recorder(tmp_path / "weights", model=model, kinds=["weights"]) as recorder, recorder.step(0):
        pass


def record_ranks(folder, flipped=None, **options):
    """Two ranks, one after the other, whose statistics differ; a bit of the table flips on the rank `flipped`."""
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            torch.manual_seed(0)
            model = Model()
            if rank == flipped:
                flip(model.table, 3, 20)
            with Recorder(folder, model=model, block=8, kinds=["weights", "buffers"], **options) as recorder:
                for step in range(2):
                    with recorder.step(step):
                        model(torch.full((8, 6), 1.0 + rank))
        finally:
            dist.destroy_process_group()
    return folder


def test_buffers_belong_to_their_rank_unless_somebody_says_more(tmp_path):
    """What BatchNorm keeps is another thing on each rank; what is the same on all, `shard_of` can say."""

    def shard_of(name, tensor):
        return Shard.whole(tensor.shape) if name == "table" else None

    plain = record_ranks(tmp_path / "plain")
    assert compare(plain, plain).first is None and not compare(plain, plain).not_compared
    first = compare(plain, record_ranks(tmp_path / "flipped", flipped=1)).first
    assert (str(first.key), first.ranks) == ("buffers table, rank 1", [1])
    told = record_ranks(tmp_path / "told", shard_of=shard_of)
    assert compare(told, told).first is None
    told_flipped = record_ranks(tmp_path / "told_flipped", flipped=1, shard_of=shard_of)
    first = compare(told_flipped, told_flipped).first
    assert str(first.key) == "buffers table" and "its copies in run a: ranks [0] and ranks [1]" in first.what

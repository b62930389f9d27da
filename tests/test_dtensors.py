"""DTensors with heads or the batch sharded: the bits of one process, the placements of the arguments, or an error."""

import functools
import json

import pytest
from rank_processes import run_ranks

RANKS = 4
NAMES = (
    "[Shard(dim=0), Shard(dim=2)]",
    "[Replicate(), Shard(dim=2)]",
    "[Shard(dim=0), Replicate()]",
    "[Shard(dim=2), Shard(dim=2)]",
    "[Shard(dim=2), Shard(dim=0)]",
    "[Replicate(), Replicate()]",
    "slopes and sinks",
    "sinks with a gradient",
    "kvpacked",
    "qkvpacked",
    "varlen",
    "varlen qkvpacked",
    "compiled",
    "rows",
    "partial",
    "rows of a pack",
    "others",
    "a plain tensor",
    "a plain first tensor",
    "plain sinks",
    "dropout",
    "a mask by key columns",
    "largest logits",
    "few heads",
    "a gradient of sinks",
    "context parallelism",
    "plain tensors beside slopes",
    "plain tensors beside offsets",
    "torch.func",
    "a cache",
    "lengths of a cache",
    "pages",
    "offsets of pages",
    "private functions",
    "a private backward",
    "a private output",
)


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    @functools.cache
    def run():
        logs = run_ranks("dtensor_worker.py", RANKS, tmp_path_factory.mktemp("dtensors"))
        return [json.loads(log.splitlines()[-1]) for log in logs]

    return run


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_on_every_rank(held, name):
    assert held()[0].keys() == set(NAMES)
    assert [of_rank[name] for of_rank in held()] == [True] * RANKS

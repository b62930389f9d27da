"""A mesh of two dimensions: one that is a part of the job, what it refuses, and what is wrong on one rank.

That its bytes are those of one process is tested in test_context_parallel.py.
"""

import functools
import json

import pytest
from context_parallel_checks import outcomes
from context_parallel_faults import TIMEOUT_S, WRONG_RANK
from rank_processes import run_ranks

RANKS = 4
NAMES = (
    "a gradient of the log-sum-exp on one rank",
    "only some gradients",
    "no gradients",
    "more ranks than KV heads",
    "chunks that do not join",
    "unequal chunks that do not join",
    "chunks of k that do not join",
    "chunks within tiles",
    "softcap",
    "sinks",
    "a pack",
    "ranks that do not ascend",
    "ranks of one dimension that do not ascend",
    "after errors",
    "groups end when they are destroyed",
)
AGREED = {
    "dtype, mesh": "torch.float16",
    "argument, mesh": "causal must be the same on every rank: rank 1 got False, rank 0 got True",
    "shape of the mesh, mesh": "mesh must be the same on every rank: rank 1 got [4], rank 0 got [2, 2]",
    "value, mesh": "k of rank 1 must be finite",
    "value of a gradient, mesh": "dout of rank 1 must be finite",
}


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    @functools.cache
    def run():
        logs = run_ranks("context_parallel_mesh.py", RANKS + 1, tmp_path_factory.mktemp("mesh"))
        return [json.loads(log.splitlines()[-1]) for log in logs]

    return run


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_on_every_rank_of_a_part_of_the_job(held, name):
    outside, *of_mesh = held()
    assert of_mesh[0].keys() == set(NAMES)
    assert [of_rank[name] for of_rank in of_mesh] == [True] * RANKS
    assert outside == {NAMES[-1]: True}


@pytest.fixture(scope="module")
def of_agreement(tmp_path_factory):
    return outcomes(tmp_path_factory.mktemp("agreement"), RANKS, *AGREED, "nothing, mesh")


@pytest.mark.slow
@pytest.mark.parametrize("fault", AGREED)
def test_ranks_that_disagree(of_agreement, fault):
    for of_rank in of_agreement:
        error, text, ranks, _ = of_rank[fault]
        assert error == "RankError" and AGREED[fault] in text and ranks == [WRONG_RANK], text


@pytest.mark.slow
def test_a_disagreement_is_no_end(of_agreement):
    assert [of_rank["nothing, mesh"][0] for of_rank in of_agreement] == ["none"] * RANKS


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["dies between, mesh", "dies in the backward, few heads, mesh"])
def test_a_rank_that_dies_while_data_moves_in_its_groups(tmp_path, fault):
    """Those of no group of its own learn of it too, and all have its number in the mesh."""
    of_ranks = outcomes(tmp_path, RANKS, fault)
    assert not of_ranks[WRONG_RANK]
    for rank in {0, 2, 3}:
        error, text, ranks, seconds = of_ranks[rank][fault]
        assert error == "RankError" and ranks == [WRONG_RANK] and "rank 1 died or stalls" in text, (rank, text)
        assert ("backward" in text) == ("backward" in fault)
        assert seconds < TIMEOUT_S

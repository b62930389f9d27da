"""What is wrong on one rank is an error on every rank that names it, within the timeout of the group; no call hangs."""

import pytest
import torch
from context_parallel_checks import outcomes
from context_parallel_faults import TIMEOUT_S, WRONG_RANK

from dash_attn.distributed import context_parallel_attention

RANKS = 3
# On the other ranks, and on the wrong one where it says something else.
AGREED = {
    "shape": ("RankError", "q must be the same on every rank: rank 1 got "),
    "dtype": ("RankError", "torch.float16"),
    "rows": (
        "RankError",
        "gives for every rank, which are [128, 50, 0] of 178 in the contiguous layout, got [64, 50, 64]: see rank 1",
    ),
    "argument": ("RankError", "causal must be the same on every rank: rank 1 got False, rank 0 got True"),
    "type": ("RankError", "rank 1 cannot do its call: TypeError: v must be a torch.Tensor"),
    "value": ("RankError", "k of rank 1 must be finite"),
    "value of sinks": ("RankError", "the bytes of learnable_sink must be the same on every rank: rank 1 got"),
    "value of a gradient": ("RankError", "dout of rank 1 must be finite"),
    "other call": ("RankError", "rank 1 got context_parallel_attention, rank 0 got the backward of context_parallel"),
    "everywhere": ("ValueError", "softmax_scale must be a finite number"),
    "slopes, few heads": ("NotImplementedError", "alibi_slopes must be left out with more ranks than KV heads, got"),
    "chunks, few heads": (
        "NotImplementedError",
        "attention_chunk must be left out with more ranks than KV heads, unless causal is True, got 9",
    ),
    "offsets, few heads": ("RankError", "cu_seqlens and seqused must be the same on every rank: rank 1 got "),
    "offsets with a longest of -5, few heads": (
        "RankError",
        "rank 1 cannot do its call: ValueError: max_seqlen_q must be an int of at least 0",
    ),
    "offsets past the rows, few heads": (
        "ValueError",
        "cu_seqlens_q must hold non-decreasing offsets from 0 to 384, the number of rows, got [0, ",
    ),
    "order, few heads": (
        "NotImplementedError",
        "schedule must be a policy that adds in a fixed order with more ranks than",
    ),
    "value of slopes": ("RankError", "the bytes of alibi_slopes must be the same on every rank: rank 1 got"),
}


@pytest.fixture(scope="module")
def of_agreement(tmp_path_factory):
    return outcomes(tmp_path_factory.mktemp("agreement"), RANKS, *AGREED, "nothing")


@pytest.mark.parametrize("fault", AGREED)
def test_ranks_that_disagree(of_agreement, fault):
    kind, message = AGREED[fault]
    for rank, of_rank in enumerate(of_agreement):
        error, text, ranks, _ = of_rank[fault]
        if rank == WRONG_RANK and "cannot do its call" in message:  # which says what the others are told
            own_error, own_text = message.split(": ", 2)[1:]
            assert error == own_error and text.startswith(own_text)
            continue
        assert error == kind and message in text, (rank, text)
        assert kind != "RankError" or ranks == [WRONG_RANK]


def test_a_disagreement_is_no_end(of_agreement):
    assert [of_rank["nothing"][0] for of_rank in of_agreement] == ["none"] * RANKS


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "dies",
        "dies between",
        "dies before the backward",
        "dies in the backward, few heads",
        "dies before a message of the backward, few heads",
    ],
)
def test_a_rank_that_dies(tmp_path, fault):
    of_ranks = outcomes(tmp_path, RANKS, fault)
    assert not of_ranks[WRONG_RANK]
    for rank in {0, 2}:
        error, text, ranks, seconds = of_ranks[rank][fault]
        assert error == "RankError" and ranks == [WRONG_RANK], text
        assert "rank 1 died or stalls" in text and ("backward" in text) == ("backward" in fault)
        assert seconds < TIMEOUT_S


@pytest.mark.slow
def test_a_rank_that_stalls(tmp_path):
    of_ranks = outcomes(tmp_path, RANKS, "stalls")
    for rank in {0, 2}:
        error, text, ranks, seconds = of_ranks[rank]["stalls"]
        assert error == "RankError" and ranks == [WRONG_RANK] and "rank 1 died or stalls" in text
        assert seconds < 1.25 * TIMEOUT_S
    # It comes in the end, and learns that nobody waits for it.
    error, text, ranks, _ = of_ranks[WRONG_RANK]["stalls"]
    assert error == "RankError" and ranks == [WRONG_RANK] and "came too late" in text


def test_without_a_group():
    with pytest.raises(RuntimeError, match="torch.distributed must be initialized"):
        context_parallel_attention(*(torch.randn(1, 8, 2, 16).bfloat16() for _ in range(3)))

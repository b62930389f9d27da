"""Context parallelism on gloo processes: every byte as on one process, for every number of ranks and both layouts."""

import functools
import math

import pytest
import torch
from context_parallel_checks import check_bytes, same_bytes
from context_parallel_worker import BEYOND_KV_HEADS, CASES, MESH_CASES, on_one_process
from rank_processes import run_ranks

from dash_attn import flash_attn_func
from dash_attn.distributed import attention, gathered, rows_of_rank, shard

RANKS = (2, 3, 4)


@functools.cache
def expected(name):
    return on_one_process((CASES | BEYOND_KV_HEADS | MESH_CASES)[name])


@pytest.fixture(scope="module")
def of_all_ranks(tmp_path_factory):
    @functools.cache
    def run(ranks):
        folder = tmp_path_factory.mktemp(f"ranks_{ranks}")
        run_ranks("context_parallel_worker.py", ranks, folder)
        return [torch.load(folder / f"rank_{rank}.pt") for rank in range(ranks)]

    return run


def cases(names):
    """Processes work on all cases at once, whichever is looked at; so every number of them but one takes long."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * (case[1] != RANKS[0])) for case in names]


@pytest.mark.parametrize("name, ranks", cases((name, ranks) for ranks in RANKS for name in CASES))
def test_every_byte_is_that_of_one_process(of_all_ranks, name, ranks):
    check_bytes([results[name] for results in of_all_ranks(ranks)], CASES[name], expected(name))


@pytest.mark.parametrize(
    "name, ranks", cases((name, n) for name, case in BEYOND_KV_HEADS.items() for n in RANKS if n > case.kv_heads)
)
def test_more_ranks_than_kv_heads(of_all_ranks, name, ranks):
    check_bytes([results[name] for results in of_all_ranks(ranks)], BEYOND_KV_HEADS[name], expected(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MESH_CASES)
def test_meshes_of_two_dimensions(of_all_ranks, name):
    case = MESH_CASES[name]
    check_bytes([results[name] for results in of_all_ranks(math.prod(case.mesh))], case, expected(name))


def test_a_nan_stays_in_its_head_and_sequence(of_all_ranks):
    """KV head 1 of the last sequence has it; that its own bytes are those of one process is tested above."""
    whole, clean = expected("not a number"), expected("causal")
    assert whole["out"].isnan().any()
    for key in ("out", "dq", "dk", "dv"):
        spoilt = whole[key].isnan().flatten(3).any(3).any(1)  # (batch, heads)
        group = spoilt.shape[1] // 4
        assert not spoilt[0].any() and not spoilt[1, :group].any() and not spoilt[1, 2 * group :].any()
        assert same_bytes(whole[key][0], clean[key][0])
        assert same_bytes(whole[key][1, :, 2 * group :], clean[key][1, :, 2 * group :])


@pytest.mark.parametrize("heads, kv_heads", [(6, 6), (8, 4), (8, 2)])
@pytest.mark.parametrize("schedule", ["auto", "spt", "order_free"])
def test_a_head_does_not_see_the_other_heads(heads, kv_heads, schedule):
    """So tensor parallelism by heads, in parts of any sizes, changes no bits."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(2, 200, n, 32, generator=generator).half() for n in (heads, kv_heads, kv_heads, heads))
    group = heads // kv_heads

    def results(first, end):
        of_queries = slice(first * group, end * group)
        tensors = [q[:, :, of_queries], k[:, :, first:end], v[:, :, first:end]]
        tensors = [x.clone().requires_grad_() for x in tensors]
        out, lse, _ = flash_attn_func(*tensors, causal=True, schedule=schedule, return_attn_probs=True)
        gradients = torch.autograd.grad(out, tensors, dout[:, :, of_queries])
        return [out.detach(), lse.transpose(1, 2).detach(), *gradients]

    whole = results(0, kv_heads)
    for first in range(kv_heads):
        for end in range(first + 1, kv_heads + 1):
            for x, of_all in zip(results(first, end), whole):
                scale = of_all.shape[2] // kv_heads
                assert same_bytes(x, of_all[:, :, first * scale : end * scale])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_rows_are_spread_once_and_evenly(layout):
    for ranks in (1, 2, 3, 4, 7, 64):
        for seqlen in (0, 1, 5, 128, 129, 896, 1000, 12800, 65536, 100_001):
            runs = [rows_of_rank(seqlen, rank, ranks, layout) for rank in range(ranks)]
            rows = sorted(row for of_rank in runs for run in of_rank for row in range(*run))
            assert rows == list(range(seqlen))
            counts = [sum(map(len, of_rank)) for of_rank in runs]
            assert max(counts) - min(counts) <= 3 * 128
            chunks = ranks if layout == "contiguous" else 2 * ranks
            assert seqlen % chunks or len({len(run) for of_rank in runs for run in of_rank}) == 1


def test_zigzag_pairs_the_first_chunk_with_the_last():
    assert rows_of_rank(800, 1, 4, "zigzag") == [(100, 200), (600, 700)]
    assert shard(torch.arange(8), 0, 2, dim=0, layout="zigzag").tolist() == [0, 1, 6, 7]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((8, 0, 2, "striped"), "layout must be one of 'contiguous', 'zigzag', got 'striped'"),
        ((8, 2, 2), "rank must be from 0 to ranks - 1, got rank=2, ranks=2"),
        ((-1, 0, 2), "seqlen must be at least 0, got -1"),
    ],
)
def test_what_rows_of_rank_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        rows_of_rank(*arguments)


def test_a_softcap_of_at_most_zero_is_none_where_keys_are_gathered():
    x = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)

    def options(softcap):
        given = attention._canonical("contiguous", None, True, (-1, -1), softcap, False, 0, 0, "auto", False)
        return gathered.checked_options(None, {"q": x, "k": x, "v": x}, given, {"learnable_sink": None}, "here")

    assert options(None) == options(0.0) == options(-1.0)
    with pytest.raises(NotImplementedError, match="^softcap must be left out here, got 0.5$"):
        options(0.5)

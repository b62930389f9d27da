"""Calls that carry sums: a backward in parts has the bits of one call, in any order of them
that keeps the order of each sum."""

import itertools

import pytest
import torch
from part_checks import check_parts
from products import spread

from dash_attn import schedule

# Rows of a chunk, whole tiles of queries and of keys, for each row of the tile table.
SIZES = {(64, 64): 256, (96, 96): 640, (128, 128): 256, (192, 128): 384, (192, 192): 384, (256, 256): 640}
HEAD_DIMS = pytest.mark.parametrize("head_dims", SIZES, ids=str)
WINDOWS = [
    dict(causal=True, window=(300, 0)),
    dict(causal=False, window=(70, 400)),
    dict(causal=False, window=(3, 2)),
    dict(causal=True, attention_chunk=450),
]
POLICIES = ("descending", "spt")
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def check(head_dims, chunks, **options):
    size = SIZES[head_dims]
    # The last chunk is cut short.
    rows = (chunks - 1) * size + size // 2 + 5
    shape = dict(batch=2, heads=4, kv_heads=2, rows_q=rows, rows_k=rows, head_dim=head_dims[0])
    check_parts(**{**shape, **options}, value_head_dim=head_dims[1], device="cuda", size=size)


@pytest.mark.parametrize(
    "head_dims, causal, policy", spread(itertools.product(SIZES, (False, True)), POLICIES), ids=str
)
def test_parts_have_the_bits_of_the_whole(head_dims, causal, policy):
    check(head_dims, 4, causal=causal, policy=policy)


@CAUSAL
@HEAD_DIMS
def test_float16_and_a_gradient_of_the_log_sum_exp(head_dims, causal):
    check(head_dims, 3, causal=causal, dtype=torch.float16, lse_gradient=True)


@CAUSAL
@HEAD_DIMS
def test_split_heads(head_dims, causal):
    """Few KV heads, many query heads: dK and dV are sums over several splits, which are added behind the parts."""
    rows = 3 * SIZES[head_dims]
    splits = schedule.problem(
        "descending",
        rows,
        rows,
        head_dim=head_dims[0],
        value_head_dim=head_dims[1],
        causal=causal,
        heads=16,
        kv_heads=1,
    ).splits
    assert splits > 1
    check(head_dims, 3, causal=causal, batch=1, heads=16, kv_heads=1, rows_q=rows, rows_k=rows, splits=splits)


# The policies have one kernel, which is given their ranks.
@pytest.mark.parametrize("head_dims, mask, policy", spread(itertools.product(SIZES, WINDOWS), POLICIES), ids=str)
def test_windows(head_dims, mask, policy):
    """Of chunks of a window some query tiles have no key, and some keys no query; their sums go on past others'."""
    check(head_dims, 4, **mask, policy=policy, orders=1)


@pytest.mark.parametrize("mask", [{"causal": True}, *WINDOWS[:2]], ids=str)
@HEAD_DIMS
def test_masks_of_lengths_that_differ(head_dims, mask):
    size = SIZES[head_dims]
    check(head_dims, 3, **mask, rows_q=2 * size + 9, orders=1)
    check(head_dims, 3, **mask, rows_k=2 * size + 70, orders=1, policy="spt", dtype=torch.float16)


@HEAD_DIMS
def test_sm_margin(head_dims):
    """Few thread blocks, of which each takes many work tiles; no kernel starts before the one before has ended."""
    check(head_dims, 4, causal=True, sm_margin=120)


@HEAD_DIMS
def test_lengths_that_differ(head_dims):
    size = SIZES[head_dims]
    check(head_dims, 2, causal=False, rows_q=3 * size + 1)
    check(head_dims, 2, causal=False, rows_k=3 * size + 70)


@HEAD_DIMS
def test_many_work_tiles(head_dims, perturbation):
    """More than there are SMs, beside other work."""
    perturbation.enqueue(16)
    check(head_dims, 8, causal=True, heads=16, kv_heads=8, orders=3)

"""The backward in parts on the CPU: any order of them that keeps the order of each sum leaves the bits of one call."""

import pytest
import torch
from part_checks import check_parts

SHAPES = {
    "one head": dict(batch=1, heads=1, kv_heads=1, rows_q=300, rows_k=300),
    "grouped": dict(batch=2, heads=6, kv_heads=2, rows_q=520, rows_k=520),
    "split heads": dict(batch=1, heads=8, kv_heads=1, rows_q=1024, rows_k=1024),  # how many follows from the mask
}


@pytest.mark.parametrize("policy", ["descending", "spt"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_have_the_bits_of_the_whole(shape, causal, policy):
    check_parts(**SHAPES[shape], head_dim=16, causal=causal, policy=policy, size=256)


def test_more_than_one_split():
    check_parts(**SHAPES["split heads"], head_dim=16, causal=False, size=256, orders=1, splits=4)


@pytest.mark.parametrize("policy", ["descending", "spt"])
@pytest.mark.parametrize(
    "mask",
    [
        dict(causal=True, window=(300, 0)),
        dict(causal=False, window=(70, 400)),
        dict(causal=False, window=(3, 2)),
        dict(causal=True, attention_chunk=200),
    ],
    ids=str,
)
def test_windows(mask, policy):
    check_parts(**SHAPES["grouped"], head_dim=16, **mask, policy=policy, size=128)


@pytest.mark.parametrize("mask", [dict(causal=True), dict(causal=True, window=(150, 0))], ids=str)
@pytest.mark.parametrize("rows", [(260, 700), (700, 260)])
def test_masks_of_lengths_that_differ(rows, mask):
    check_parts(batch=1, heads=2, kv_heads=1, rows_q=rows[0], rows_k=rows[1], head_dim=16, **mask, size=128)


@pytest.mark.parametrize("rows", [(260, 700), (700, 260)])
def test_lengths_that_differ(rows):
    check_parts(batch=2, heads=2, kv_heads=1, rows_q=rows[0], rows_k=rows[1], head_dim=24, causal=False, size=128)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)])
def test_head_dims(dims):
    size = {128: 256, 192: 384, 256: 640}[dims[0]]
    check_parts(
        batch=1, heads=2, kv_heads=1, rows_q=2 * size, rows_k=2 * size, head_dim=dims[0], value_head_dim=dims[1],
        causal=True, size=size, dtype=torch.float16, lse_gradient=True, orders=1,
    )  # fmt: skip


def test_another_order_of_visits_has_other_bits():
    """So that equal bits say something about the order: the parts of another policy."""
    with pytest.raises(AssertionError, match="d[kv]: .* elements differ"):
        check_parts(
            batch=1, heads=1, kv_heads=1, rows_q=1024, rows_k=512, head_dim=32, causal=False, policy="descending",
            size=256, orders=1, order_of="spt",
        )  # fmt: skip

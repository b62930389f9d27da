"""Query heads of a KV head split over work tiles: the rule, the work tiles, the waits, the sums of the reference."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mask_support import masks

from dash_attn import _schedule, reference, schedule
from dash_attn.schedule import Problem, groups, num_groups, visit_order, walk, work_tile
from dash_attn.tile_order import TileOrder, tile_order

# (group size, seqlen_q, seqlen_k, head_dim): splits under the full mask, the causal mask.
TABLE = {
    (1, 512, 512, 128): (1, 1),  # one query head a KV head: nothing to split
    (8, 512, 512, 128): (2, 1),  # 8 KV tiles of 8 heads' 512 queries; the causal mask halves them
    (8, 1024, 1024, 128): (4, 2),
    (8, 2048, 2048, 128): (8, 4),
    (8, 4096, 4096, 128): (4, 4),
    (8, 8192, 8192, 128): (2, 4),
    (8, 16384, 16384, 128): (1, 4),
    (8, 32768, 32768, 128): (1, 4),
    (8, 4096, 4096, 64): (4, 4),
    (8, 8192, 8192, 64): (2, 4),
    (4, 2048, 2048, 128): (4, 2),
    (4, 4096, 4096, 128): (4, 4),
    (4, 8192, 8192, 128): (2, 2),
    (4, 16384, 16384, 128): (1, 2),  # four splits would have one query head each
    (8, 131072, 131072, 128): (1, 4),  # 1,024 KV tiles are many, but of unequal length
    (2, 8192, 8192, 128): (2, 2),
    (7, 4096, 4096, 128): (7, 7),
    (7, 16384, 16384, 128): (1, 1),
    (7, 16000, 1000, 128): (7, 1),  # 7 parts or none
    (6, 100, 100, 128): (1, 1),
    (64, 1, 4096, 128): (2, 2),  # decoding: a work tile has a step a head
    (8, 8192, 100, 128): (8, 1),  # one KV tile: as many as there are
}


@pytest.mark.parametrize("shape", TABLE, ids=str)
def test_table(shape):
    group_size, seqlen_q, seqlen_k, head_dim = shape
    for causal, splits in zip((False, True), TABLE[shape]):
        sequence = dict(causal=causal, head_dim=head_dim)
        found = {
            schedule.problem(
                policy, seqlen_q, seqlen_k, **sequence, batch=batch, heads=kv_heads * group_size, kv_heads=kv_heads
            ).splits
            for policy in schedule.POLICIES
            if _schedule.fits(policy, causal)
            for batch in (1, 8)
            for kv_heads in (1, 2, 8, 100)
        }
        assert found == {splits}, "of every policy, batch and number of KV heads"
        assert tile_order("auto", seqlen_q, seqlen_k, **sequence, group_size=group_size).splits == splits


@settings(max_examples=500, deadline=None)
@given(
    group_size=st.integers(1, 200),
    seqlen_q=st.integers(1, 500),
    seqlen_k=st.integers(1, 500),
    tile_q=st.integers(1, 64),
    tile_k=st.integers(1, 3),
    mask=masks(longest=500),
)
def test_rule(group_size, seqlen_q, seqlen_k, tile_q, tile_k, mask):
    """Divisors are taken one after the other: each makes up for too few work tiles, or costs little."""
    lengths = dict(tile_q=tile_q, tile_k=tile_k, group_size=group_size, **mask)
    problem = Problem(seqlen_q, seqlen_k, **lengths)
    # Those at the ends of a window are cut short.
    tiles = problem.num_kv_tiles
    steps = [problem.query_tiles_of(kv)[1] for kv in ([tiles // 2] if problem.mask == "window" else (0, tiles - 1))]
    mean, longest = sum(steps) / len(steps), max(steps)

    def pays(before, after):
        heads = group_size // after
        queries, work_tiles = mean * heads * tile_q, tiles * before
        are_too_few = queries >= 2048 and work_tiles * mean < (96 if mean == longest else 64) * longest
        are_many = mean == longest and work_tiles >= 128
        cost_little = after <= 4 and heads > 1 and queries >= 4096 and not are_many
        return are_too_few or cost_little

    divisors = [d for d in range(1, group_size + 1) if group_size % d == 0]
    taken = itertools.takewhile(lambda pair: pays(*pair), itertools.pairwise(divisors))
    assert _schedule.num_splits(problem) == max([1, *(after for _, after in taken)])


def test_splits_can_be_given():
    shape = dict(causal=True, heads=8, kv_heads=1)
    given = schedule.problem("spt", 2048, 2048, **shape, splits=2)
    assert (given.splits, given.heads_per_split, given.group_size) == (2, 4, 8)
    assert "splits=2" in repr(given)
    assert num_groups("spt", given) == 2 * num_groups("spt", schedule.problem("spt", 2048, 2048, **shape, splits=1))


def test_bad_splits_name_the_argument():
    shape = dict(tile_q=1, tile_k=1, causal=False)
    with pytest.raises(ValueError, match=r"splits must be in \[1, .*\), got 0"):
        Problem(8, 8, **shape, group_size=4, splits=0)
    with pytest.raises(ValueError, match="splits must divide group_size=4, got 3"):
        Problem(8, 8, **shape, group_size=4, splits=3)
    with pytest.raises(ValueError, match=r"batch \* kv_heads \* splits \* KV tiles must be below 2\^31"):
        Problem(8, 8, **shape, batch=2**10, kv_heads=2**10, group_size=2**9, splits=2**8)
    Problem(8, 8, **shape, batch=2**10, kv_heads=2**10, group_size=2**9, splits=2**7)


@st.composite
def split_problems(draw):
    policy, mask = draw(st.sampled_from((*schedule.POLICIES, *schedule.YARDSTICKS))), draw(masks(longest=9))
    assume(_schedule.fits(policy, **mask))
    splits, queries = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return policy, Problem(
        draw(st.integers(1, 9)),
        draw(st.integers(1, 9)),
        tile_q=draw(st.integers(1, 2)),
        tile_k=draw(st.integers(1, 2)),
        **mask,
        batch=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 3)),
        group_size=splits * queries,
        cta_group=draw(st.integers(1, 3)),
        head_swizzle=draw(st.integers(1, 20)),
        last_heads=draw(st.integers(0, 20)),
        splits=splits,
    )


def work_tiles(policy, problem):
    """(number, cta_rank, batch, KV head, KV tile, split) of every CTA that has work, in the order of the numbers."""
    for number, cta_rank in itertools.product(range(num_groups(policy, problem)), range(problem.cta_group)):
        work = work_tile(policy, problem, number, cta_rank)
        if work is not None:
            yield number, cta_rank, *work


@settings(max_examples=300, deadline=None)
@given(split_problems())
def test_every_tile_of_every_query_head_is_visited_once(policy_problem):
    policy, problem = policy_problem
    visits = visit_order(policy, problem)
    heads = problem.kv_heads * problem.group_size
    expected = {
        (batch, head, kv_tile, q)
        for batch, head, kv_tile in itertools.product(range(problem.batch), range(heads), range(problem.num_kv_tiles))
        for q in visits[kv_tile]
    }
    seen = [
        (
            batch,
            kv_head * problem.group_size + split * problem.heads_per_split + head,
            kv_tile,
            visits[kv_tile][step],
        )
        # A divided KV tile has two numbers, and its walk is of both.
        for batch, kv_head, kv_tile, split in sorted({tile[2:] for tile in work_tiles(policy, problem)})
        for step, head in walk(policy, problem, kv_tile)
    ]
    assert len(seen) == len(expected) and set(seen) == expected


@settings(max_examples=300, deadline=None)
@given(split_problems())
def test_waits_point_at_earlier_numbers(policy_problem):
    """The groups of a split come in the policy's order, the splits of a KV tile in theirs, at the same CTA's place."""
    policy, problem = policy_problem
    number_of, of_split = {}, {}
    for number, cta_rank, batch, kv_head, kv_tile, split in work_tiles(policy, problem):
        number_of.setdefault((batch, kv_head, kv_tile, split), []).append((number, cta_rank))
        of_split.setdefault((batch, kv_head, split), {}).setdefault(number, []).append(kv_tile)
    assert len(number_of) == problem.batch * problem.kv_heads * problem.num_kv_tiles * problem.splits
    for (batch, kv_head, kv_tile, split), taken in number_of.items():
        assert len(taken) == (2 if _schedule.divides(policy) else 1)
        if split > 0:
            before, rank_before = max(number_of[batch, kv_head, kv_tile, split - 1])
            number, cta_rank = min(taken)
            assert before < number and rank_before == cta_rank
    for grouped in of_split.values():
        assert list(grouped.values()) == groups(policy, problem)


@settings(max_examples=200, deadline=None)
@given(split_problems())
def test_a_divided_heads_parts_follow_each_other(policy_problem):
    """One decides for all of them, and a CTA leaves the first parts that lie ahead to others, and may pass over the
    second ones."""
    policy, problem = policy_problem
    if not _schedule.divides(policy):
        with pytest.raises(ValueError, match=f"schedule must divide KV tiles, got '{policy}'"):
            _schedule.first_number_of_head(policy, problem, 0)
        return
    of_head, of_split = {}, {}
    for number, _, batch, kv_head, kv_tile, split in work_tiles(policy, problem):
        of_head.setdefault((batch, kv_head), []).append(number)
        of_split.setdefault((batch, kv_head, split), []).append((number, kv_tile))
    for numbers in of_head.values():
        assert {_schedule.first_number_of_head(policy, problem, number) for number in numbers} == {min(numbers)}
    downwards = list(reversed(range(problem.num_kv_tiles)))
    for taken in of_split.values():
        first, second = sorted(taken)[: len(downwards)], sorted(taken)[len(downwards) :]
        for part in (first, second):
            assert part == list(enumerate(downwards, part[0][0]))


def test_all_heads_first_splits_come_first():
    problem = Problem(2, 2, tile_q=1, tile_k=1, causal=False, kv_heads=2, group_size=2, splits=2, head_swizzle=2)
    order = [work_tile("ascending", problem, number)[1:] for number in range(num_groups("ascending", problem))]
    # (KV head, KV tile, split)
    assert order == [(h, kv, split) for split in range(2) for kv in range(2) for h in range(2)]


def test_reference_adds_the_sums_of_splits():
    """dV of one key over four query heads, whose terms make the order visible: fp32 loses ones beside big numbers."""
    big = 2.0**26
    dout = torch.tensor([big, 1.0, -big, 1.0]).reshape(1, 1, 4, 1)
    zeros, k, lse = torch.zeros(1, 1, 4, 1), torch.zeros(1, 1, 1, 1), torch.zeros(1, 4, 1)
    for splits, expected in ((1, 1.0), (2, 0.0), (4, 1.0)):
        order = TileOrder(1, 1, visits=[[0]], adds=[[0]], splits=splits)
        _, _, dv = reference.backward(dout, zeros, k, k, zeros, lse, softmax_scale=1.0, causal=False, order=order)
        assert dv.item() == expected, splits

"""The orders of csrc/contract: every live tile once, ranks a permutation, waits that point at earlier groups."""

import itertools

import pytest
from float64_reference import visible_keys
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mask_support import CAUSAL, FULL, masks, name_of, window

from dash_attn import _schedule, schedule
from dash_attn.schedule import (
    POLICIES,
    Problem,
    add_order,
    groups,
    heads_together,
    num_groups,
    ranks,
    visit_order,
    walk,
    work_tile,
)

MAX_TILES = 9
TILE_SIZES = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 3)]
# Of windows, those that hide tiles on either side of a small problem, alone and with chunks.
SOME_MASKS = [FULL, CAUSAL, window(2, 1), window(4, -1), window(0, 0), window(-1, -1, 3), window(6, 2, 5)]
POLICY_MASKS = [(policy, mask) for policy in POLICIES for mask in SOME_MASKS if _schedule.fits(policy, **mask)]
IDS = [f"{policy}-{name_of(mask)}" for policy, mask in POLICY_MASKS]


def mask_of(problem):
    return {"causal": problem.causal, "window": problem.window, "attention_chunk": problem.attention_chunk}


def is_live(problem, kv, q):
    """Whether some query of tile q sees some key of KV tile kv: what queries see are runs of keys that move on, so the
    tile's are one run from what its first query sees to what its last one does."""
    lengths = (problem.seqlen_q, problem.seqlen_k)
    last_query = min((q + 1) * problem.tile_q, problem.seqlen_q) - 1
    first, _ = _schedule.keys_of(*lengths, q * problem.tile_q, **mask_of(problem))
    end = sum(_schedule.keys_of(*lengths, last_query, **mask_of(problem)))
    return first < end and first < (kv + 1) * problem.tile_k and kv * problem.tile_k < end


@st.composite
def small_grids(draw):
    """Lengths of the same size and of very different ones, in tiles of which the last may be shorter."""
    longest = draw(st.sampled_from([3, 12, 70]))
    lengths = [draw(st.integers(1, longest)), draw(st.integers(1, 70))]
    seqlen_q, seqlen_k = draw(st.permutations(lengths))
    tile_q, tile_k = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    return Problem(seqlen_q, seqlen_k, tile_q=tile_q, tile_k=tile_k, **draw(masks(longest=80)))


@settings(max_examples=400, deadline=None)
@given(small_grids())
def test_the_mask_says_what_each_pair_of_query_and_key_says(problem):
    """Against the mask pair by pair, as tests/float64_reference.py defines it."""
    seqlen_q, seqlen_k, mask = problem.seqlen_q, problem.seqlen_k, mask_of(problem)
    visible = visible_keys(seqlen_q, seqlen_k, **mask).tolist()

    seen = _schedule.visible_keys(seqlen_q=seqlen_q, seqlen_k=seqlen_k, first_query=0, end_query=seqlen_q, **mask)
    assert [list(range(first, end)) for first, end in seen] == [
        [key for key, pair in enumerate(row) if pair] for row in visible
    ]
    for bounds in zip(*seen):
        assert list(bounds) == sorted(bounds), "what a query sees must not move back from one query to the next"

    def pairs(q, kv):
        """Of the rows and keys of a tile that exist."""
        rows = visible[q * problem.tile_q : (q + 1) * problem.tile_q]
        return [pair for row in rows for pair in row[kv * problem.tile_k : (kv + 1) * problem.tile_k]]

    query_tiles, kv_tiles = range(-(-seqlen_q // problem.tile_q)), range(-(-seqlen_k // problem.tile_k))
    for kv in kv_tiles:
        first, count = problem.query_tiles_of(kv)
        assert list(range(first, first + count)) == [q for q in query_tiles if any(pairs(q, kv))], f"KV tile {kv}"
    for q in query_tiles:
        first, count = problem.kv_tiles_of(q)
        assert list(range(first, first + count)) == [kv for kv in kv_tiles if any(pairs(q, kv))], f"query tile {q}"
    for q, kv in itertools.product(query_tiles, kv_tiles):
        past_the_end = (kv + 1) * problem.tile_k > seqlen_k
        needs = past_the_end or not all(pairs(q, kv))
        # A row past the end of the queries may count too: all that follows is a mask that hides nothing.
        full_rows = (q + 1) * problem.tile_q <= seqlen_q
        if full_rows or problem.mask != "window" or needs:
            assert problem.needs_masking(q, kv) == needs, f"query tile {q}, KV tile {kv}"


def check_orders(policy, problem):
    """Everything a schedule promises, checked against the mask and against itself."""
    kv_tiles = range(-(-problem.seqlen_k // problem.tile_k))
    query_tiles = range(-(-problem.seqlen_q // problem.tile_q))
    assert (problem.num_kv_tiles, problem.num_query_tiles) == (len(kv_tiles), len(query_tiles))
    visits, rank = visit_order(policy, problem), ranks(policy, problem)

    live = [[is_live(problem, kv, q) for q in query_tiles] for kv in kv_tiles]
    for kv in kv_tiles:
        assert sorted(visits[kv]) == [q for q in query_tiles if live[kv][q]], f"visits of KV tile {kv}"
        assert [r >= 0 for r in rank[kv]] == live[kv], f"live tiles of KV tile {kv}"
    for q in query_tiles:
        found = sorted(rank[kv][q] for kv in kv_tiles if live[kv][q])
        assert found == list(range(len(found))), f"ranks at query tile {q}"
        assert problem.kv_tiles_of(q)[1] == len(found)

    grouped = [
        [(kv, *_schedule.steps(policy, problem, group, kv)) for kv in members]
        for group, members in enumerate(groups(policy, problem))
    ]
    made = {kv: [] for kv in kv_tiles}
    for kv, first, count in itertools.chain(*grouped):
        made[kv] += range(first, first + count)
    assert made == {kv: list(range(len(visits[kv]))) for kv in kv_tiles}, "the visits of each KV tile once, in order"
    check_progress(visits, rank, grouped, problem)


def check_progress(visits, rank, grouped, problem):
    """Runs the groups one after the other, the members of a group together: the least residency that can happen.

    That it ends proves that no wait points at a later group and that no group waits for itself in a cycle; with more
    residency each group only finds more of the earlier ones still running, and they end by the same argument.
    """
    assert all(0 < len(members) <= problem.cta_group for members in grouped)
    added = [0] * problem.num_query_tiles
    for members in grouped:
        left = {kv: visits[kv][first : first + count] for kv, first, count in members}
        moved = True
        while moved:
            moved = False
            for kv, queries in left.items():
                while queries and rank[kv][queries[0]] == added[queries[0]]:
                    added[queries.pop(0)] += 1
                    moved = True
        stuck = {kv: queries[0] for kv, queries in left.items() if queries}
        assert not stuck, f"KV tile: query tile it waits at for ever: {stuck}"


@pytest.mark.parametrize("tile_q, tile_k", TILE_SIZES)
@pytest.mark.parametrize("policy, mask", POLICY_MASKS, ids=IDS)
def test_every_small_problem(policy, mask, tile_q, tile_k):
    for seqlen_q in range(1, MAX_TILES * tile_q + 1):
        for seqlen_k in range(1, MAX_TILES * tile_k + 1):
            for cta_group in {1, 2, 3, -(-seqlen_k // tile_k)}:
                problem = Problem(seqlen_q, seqlen_k, tile_q=tile_q, tile_k=tile_k, cta_group=cta_group, **mask)
                try:
                    check_orders(policy, problem)
                except AssertionError as error:
                    raise AssertionError(f"{policy}, {problem}: {error}") from error


@settings(max_examples=200, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    mask=masks(longest=30_000),
    seqlen_q=st.integers(1, 40_000),
    seqlen_k=st.integers(1, 40_000),
    tile_q=st.integers(1, 512),
    tile_k=st.integers(1, 512),
    cta_group=st.integers(1, 300),
)
def test_large_problems(policy, mask, seqlen_q, seqlen_k, tile_q, tile_k, cta_group):
    assume((seqlen_q // tile_q + 1) * (seqlen_k // tile_k + 1) < 30_000 and _schedule.fits(policy, **mask))
    check_orders(policy, Problem(seqlen_q, seqlen_k, tile_q=tile_q, tile_k=tile_k, cta_group=cta_group, **mask))


@settings(max_examples=400, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    mask=masks(longest=2**30),
    seqlen_q=st.integers(2**20, 2**30 - 1),
    seqlen_k=st.integers(2**20, 2**30 - 1),
    tile_q=st.integers(16, 256),
    tile_k=st.integers(16, 256),
    cta_group=st.integers(1, 4),
    data=st.data(),
)
def test_lengths_up_to_the_limit(policy, mask, seqlen_q, seqlen_k, tile_q, tile_k, cta_group, data):
    """No intermediate overflows: visits and ranks stay in range and agree tile by tile."""
    assume(_schedule.fits(policy, **mask))
    problem = Problem(seqlen_q, seqlen_k, tile_q=tile_q, tile_k=tile_k, cta_group=cta_group, **mask)
    if _schedule.divides(policy) and max(problem.num_query_tiles, problem.num_kv_tiles) > 65535:
        with pytest.raises(ValueError, match="schedule='shift' is for at most 65535 query tiles and KV tiles, got"):
            _schedule.rank(policy, problem, 0, 0)
        return
    kv = data.draw(st.integers(0, problem.num_kv_tiles - 1))
    first, count = problem.query_tiles_of(kv)
    assume(count > 0)
    assert is_live(problem, kv, first) and (first == 0 or not is_live(problem, kv, first - 1))
    step = data.draw(st.integers(0, count - 1))
    q = _schedule.visit(policy, problem, kv, step)
    assert first <= q < first + count <= problem.num_query_tiles
    start, live = problem.kv_tiles_of(q)
    end = start + live
    assert is_live(problem, start, q) and (start == 0 or not is_live(problem, start - 1, q))
    assert is_live(problem, end - 1, q) and (end == problem.num_kv_tiles or not is_live(problem, end, q))
    neighbours = range(max(start, kv - 8), min(end, kv + 9))
    seen = {_schedule.rank(policy, problem, other, q) for other in neighbours}
    assert len(seen) == len(neighbours) and min(seen) >= 0 and max(seen) < live
    problem.needs_masking(problem.num_query_tiles - 1, kv)


@pytest.mark.parametrize("n", range(1, 17))
def test_shift_is_the_published_one(n):
    problem = Problem(n, n, tile_q=1, tile_k=1, causal=False)
    assert visit_order("shift", problem) == [[(i + t) % n for t in range(n)] for i in range(n)]
    assert ranks("shift", problem) == [[(q - i) % n for q in range(n)] for i in range(n)]
    first, second = groups("shift", problem)[:n], groups("shift", problem)[n:]
    assert first == second == [[kv] for kv in reversed(range(n))]


@pytest.mark.parametrize("n", range(4, 33, 2))
def test_symmetric_shift_with_half_the_tiles_in_one_group_is_the_published_one(n):
    h = n // 2
    problem = Problem(n, n, tile_q=1, tile_k=1, causal=True, cta_group=h)
    visits, rank = visit_order("symmetric_shift", problem), ranks("symmetric_shift", problem)
    cluster = groups("symmetric_shift", problem)
    for s in range(h):
        assert [members[s] for members in cluster] == [s, n - 1 - s]
        walked = [(s, q) for q in visits[s]] + [(n - 1 - s, q) for q in visits[n - 1 - s]]
        for t, (kv, q) in enumerate(walked):
            if t <= h:
                expected = (s, h - 1 + (s + t) % (h + 1), (min(q - (h - 1), h - 1) - s) % h)
            elif t <= n - 1 - s:
                expected = (s, s + t - h - 1, q - s)
            else:
                expected = (n - 1 - s, 2 * n - 1 - s - t, n - 1 - s)
            assert (kv, q, rank[kv][q]) == expected, f"SM {s}, step {t}"
        assert len(walked) == n + 1


@pytest.mark.parametrize("policy, mask", POLICY_MASKS, ids=IDS)
@pytest.mark.parametrize("shape", [(5, 7), (8, 8), (3, 1), (1, 6)])
def test_work_tiles_cover_every_head_in_the_order_of_its_groups(policy, mask, shape):
    for batch, kv_heads, cta_group in itertools.product((1, 2, 3), (1, 2, 5), (1, 2, 3)):
        for head_swizzle, last_heads in itertools.product((1, 2, 4, batch * kv_heads, 100), (0, 1, 3, 100)):
            problem = Problem(
                *shape,
                tile_q=1,
                tile_k=1,
                **mask,
                batch=batch,
                kv_heads=kv_heads,
                cta_group=cta_group,
                head_swizzle=head_swizzle,
                last_heads=last_heads,
            )
            of_head = {head: [] for head in itertools.product(range(batch), range(kv_heads))}
            for number in range(num_groups(policy, problem)):
                work = [work_tile(policy, problem, number, r) for r in range(cta_group)]
                taken = [each for each in work if each is not None]
                (head,) = {each[:2] for each in taken}
                assert work == taken + [None] * (cta_group - len(taken)), "the CTAs without a tile are the last"
                of_head[head].append([each[2] for each in taken])
            for found in of_head.values():
                assert found == groups(policy, problem)


@pytest.mark.parametrize("policy, mask", POLICY_MASKS, ids=IDS)
@pytest.mark.parametrize("shape", [(5, 7), (8, 8), (3, 1), (1, 6)])
def test_a_work_tile_walks_every_step_of_every_head_once(policy, mask, shape):
    problem = Problem(*shape, tile_q=1, tile_k=1, **mask, kv_heads=2, group_size=3, cta_group=2)
    parts = {}
    for group, members in enumerate(groups(policy, problem)):
        for kv in members:
            parts.setdefault(kv, []).append(_schedule.steps(policy, problem, group, kv))
    for kv_tile in range(problem.num_kv_tiles):
        expected = []
        for first, count in parts[kv_tile]:
            steps = range(first, first + count)
            if heads_together(policy, problem):
                expected += itertools.product(steps, range(3))
            else:
                expected += ((step, head) for head, step in itertools.product(range(3), steps))
        assert walk(policy, problem, kv_tile) == expected


def test_which_policies_walk_heads_together():
    problems = [(policy, Problem(8, 8, tile_q=1, tile_k=1, **mask)) for policy, mask in POLICY_MASKS]
    together = {(policy, problem.mask) for policy, problem in problems if heads_together(policy, problem)}
    both = {(policy, mask) for policy in ("descending", "order_free") for mask in ("full", "causal")}
    assert together == both | {("symmetric_shift", "causal")}


def test_the_head_swizzle_interleaves_heads():
    problem = Problem(2, 2, tile_q=1, tile_k=1, causal=False, batch=1, kv_heads=3, head_swizzle=2)
    order = [work_tile("ascending", problem, number)[1:3] for number in range(num_groups("ascending", problem))]
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("head_swizzle, order", [
    (1, [(split, head, part) for split in (0, 1) for head in (0, 1, 2) for part in ("first", "second")]),
    (2, [(split, head, part) for split in (0, 1) for head in (0, 1, 2) for part in ("first", "second")]),
    (3, [(split, head, part) for split in (0, 1) for part in ("first", "second") for head in (0, 1, 2)]),
    (9, [(split, head, part) for split in (0, 1) for part in ("first", "second") for head in (0, 1, 2)]),
])  # fmt: skip
def test_first_parts_of_all_heads_of_a_split_may_come_first(head_swizzle, order):
    shape = dict(tile_q=1, tile_k=1, causal=False, kv_heads=3, group_size=2, splits=2, head_swizzle=head_swizzle)
    problem, tiles = Problem(4, 4, **shape), 4
    numbers = range(num_groups("shift", problem))
    seen, found = set(), []
    for _, head, kv_tile, split in (work_tile("shift", problem, number) for number in numbers):
        part = "second" if (split, head, kv_tile) in seen else "first"
        seen.add((split, head, kv_tile))
        found.append((split, head, part))
    assert found == [each for each in order for _ in range(tiles)]


@pytest.mark.parametrize("policy, mask", POLICY_MASKS, ids=IDS)
def test_ordered_policies_have_no_last_heads(policy, mask):
    def work(last_heads):
        problem = Problem(4, 4, tile_q=1, tile_k=1, **mask, kv_heads=5, head_swizzle=2, last_heads=last_heads)
        return [work_tile(policy, problem, number) for number in range(num_groups(policy, problem))]

    assert (work(0) == work(5)) == (policy not in ("order_free", "atomic"))


@pytest.mark.parametrize("last_heads, order", [
    (0, [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1), (4, 0), (4, 1)]),
    (2, [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]),
    (5, [(head, group) for group in (0, 1) for head in range(5)]),
    (9, [(head, group) for group in (0, 1) for head in range(5)]),
])  # fmt: skip
def test_the_last_heads_come_together(last_heads, order):
    shape = dict(tile_q=1, tile_k=1, causal=True, batch=1, kv_heads=5, head_swizzle=2, last_heads=last_heads)
    problem = Problem(2, 2, **shape)
    work = [work_tile("order_free", problem, number) for number in range(num_groups("order_free", problem))]
    assert [(kv_head, kv_tile) for _, kv_head, kv_tile, _ in work] == order


@pytest.mark.parametrize("policy, mask", POLICY_MASKS, ids=IDS)
def test_order_ignores_batch_heads_and_swizzle(policy, mask):
    def orders(**counts):
        problem = Problem(700, 900, tile_q=64, tile_k=128, cta_group=2, **mask, **counts)
        return visit_order(policy, problem), add_order(policy, problem), groups(policy, problem)

    alone = orders()
    assert alone == orders(batch=5, kv_heads=3, group_size=4, head_swizzle=7, last_heads=6)


# Padded head_dim: the policy of schedule="auto". It fixes bits, so a change belongs in CHANGELOG.md.
AUTOMATIC = {8: "descending", 64: "descending", 72: "descending", 128: "descending"}


@pytest.mark.parametrize("mask", SOME_MASKS, ids=name_of)
@pytest.mark.parametrize("head_dim", AUTOMATIC)
def test_the_automatic_policy(head_dim, mask):
    assert _schedule.resolve("auto", head_dim=head_dim, **mask) == AUTOMATIC[head_dim]


BAD_CALLS = {
    "seqlen_q": dict(seqlen_q=0),
    "seqlen_k": dict(seqlen_k=-3),
    "tile_q": dict(tile_q=0),
    "tile_k": dict(tile_k=2**30),
    "batch": dict(batch=0),
    "kv_heads": dict(kv_heads=2**40),
    "group_size": dict(group_size=0),
    "cta_group": dict(cta_group=0),
    "head_swizzle": dict(head_swizzle=0),
    "last_heads": dict(last_heads=-1),
    "batch * kv_heads": dict(batch=2**20, kv_heads=2**20),
}


@pytest.mark.parametrize("named", BAD_CALLS)
def test_bad_problems_name_the_argument(named):
    good = dict(seqlen_q=8, seqlen_k=8, tile_q=1, tile_k=1, causal=False)
    with pytest.raises(ValueError) as error:
        Problem(**{**good, **BAD_CALLS[named]})
    assert str(error.value).startswith(named)
    assert str(list(BAD_CALLS[named].values())[-1]) in str(error.value)


def test_bad_lookups_name_the_argument():
    problem = Problem(8, 8, tile_q=1, tile_k=1, causal=True)
    with pytest.raises(ValueError, match="schedule must be one of .*'spt'.*, got 'fastest'"):
        visit_order("fastest", problem)
    with pytest.raises(ValueError, match="schedule='shift' is defined for the full mask only, got the causal mask"):
        visit_order("shift", problem)
    windowed = Problem(8, 8, tile_q=1, tile_k=1, causal=True, window=(3, -1))
    with pytest.raises(ValueError, match="'symmetric_shift' is defined for the causal mask only, got the window mask"):
        visit_order("symmetric_shift", windowed)
    assert repr(windowed).startswith(
        "Problem(seqlen_q=8, seqlen_k=8, tile_q=1, tile_k=1, causal=False, window=(3, 0), attention_chunk=0, batch=1"
    )
    with pytest.raises(ValueError, match=r"kv_tile must be in \[0, 8\), got 8"):
        _schedule.visit("spt", problem, 8, 0)
    with pytest.raises(ValueError, match=r"step must be in \[0, 3\), got 3"):
        _schedule.visit("spt", problem, 5, 3)
    with pytest.raises(ValueError, match=r"query_tile must be in \[5, 8\), got 4"):
        _schedule.rank("spt", problem, 5, 4)
    with pytest.raises(ValueError, match=r"number must be in \[0, 8\), got 8"):
        work_tile("spt", problem, 8)


@pytest.mark.parametrize(
    "policy, causal, seqlen, head_dim, head_swizzle, last_heads",
    [
        ("descending", True, 512, 128, 64, 0),
        ("descending", True, 4096, 64, 16, 0),
        ("descending", True, 8192, 128, 8, 0),
        ("descending", True, 32768, 128, 4, 0),
        ("order_free", True, 512, 64, 4, 64),
        ("order_free", True, 8192, 128, 2, 2),
        ("order_free", False, 1024, 128, 4, 16),
        ("order_free", False, 32768, 128, 1, 1),
        ("atomic", True, 4096, 256, 4, 0),
        ("symmetric_shift", True, 1024, 64, 64, 0),
        ("spt", True, 512, 64, 1, 0),
        ("ascending", True, 512, 64, 1, 0),
        ("spt", False, 512, 64, 64, 0),
        ("shift", False, 16384, 128, 1, 0),
    ],
)
def test_head_swizzle_of_the_launch(policy, causal, seqlen, head_dim, head_swizzle, last_heads):
    tiles = schedule.problem(policy, seqlen, seqlen, causal=causal, head_dim=head_dim, head_swizzle=None)
    assert (tiles.head_swizzle, tiles.last_heads) == (head_swizzle, last_heads)


@pytest.mark.parametrize("batch, heads, kv_heads, seqlen, ctas, head_swizzle", [
    (1, 8, 8, 2048, 132, 8), (1, 8, 8, 2048, 128, 8), (1, 8, 8, 2048, 127, 1), (1, 8, 8, 2048, 255, 8),
    (1, 8, 8, 2048, 256, 1), (2, 4, 4, 2048, 128, 8), (2, 16, 4, 2048, 128, 8), (1, 9, 9, 2048, 132, 1),
    (2, 1, 1, 8192, 132, 2),
])  # fmt: skip
def test_where_all_heads_of_shift_come_together(batch, heads, kv_heads, seqlen, ctas, head_swizzle):
    """Where each KV tile has a CTA, but not each part of one."""
    counts = dict(batch=batch, heads=heads, kv_heads=kv_heads)
    tiles = schedule.problem("shift", seqlen, seqlen, causal=False, head_dim=64, **counts)
    assert _schedule.head_swizzle("shift", tiles, 64, ctas=ctas) == head_swizzle

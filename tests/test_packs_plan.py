"""The plan of a pack (csrc/placement/pack_needs.h), decoded as the kernels decode it, for lengths that the host knows:
every piece of work once, in each sequence in the order that it has alone, in places of its own that there is room for.

packing/plan.h sorts sequences and adds up what they need on the device: tests/gpu has the kernels' results. Here the
host does both (csrc/bindings/host_pack_plan.h)."""

import collections
import itertools

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from mask_support import CAUSAL, FULL, masks, window

from dash_attn import _schedule
from dash_attn._schedule import BackwardPack, ForwardPack, Problem, num_groups, work_tile

POLICIES = (*_schedule.POLICIES, *_schedule.YARDSTICKS)
COUNTS = ("units", "query_tiles", "split_tiles", "key_chunks")
# Query and key tiles of all sizes that the table has.
HEAD_DIMS = st.sampled_from([(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
NEAR_TILES = [1, 63, 64, 65, 79, 80, 81, 127, 128, 129, 191, 192, 193]
CHUNK_ROWS = 256  # the fewest that order-free accumulation measures together

length = st.one_of(st.just(0), st.sampled_from(NEAR_TILES), st.integers(1, 700), st.integers(1, 6000))
heads_and_groups = st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6, 7, 8, 12, 16]))


@st.composite
def lengths_of_packs(draw):
    lengths = draw(st.lists(st.tuples(length, length), min_size=1, max_size=9))
    assume(all(map(sum, zip(*lengths))))  # a pack without queries or without keys takes no kernel
    return lengths


def heads_of(kv_heads, group):
    return dict(heads=kv_heads * group, kv_heads=kv_heads)


@st.composite
def backward_packs(draw):
    """Arguments of BackwardPack."""
    mask = draw(masks())
    kv_heads, group = draw(heads_and_groups)
    arguments = dict(
        schedule=draw(st.sampled_from([policy for policy in POLICIES if _schedule.fits(policy, **mask)])),
        lengths=draw(lengths_of_packs()),
        **dict(zip(("head_dim", "value_head_dim"), draw(HEAD_DIMS))),
        **heads_of(kv_heads, group),
        **mask,
    )
    return arguments


@st.composite
def forward_packs(draw):
    """Arguments of ForwardPack."""
    kv_heads, group = draw(heads_and_groups)
    return dict(
        lengths=draw(lengths_of_packs()),
        **dict(zip(("head_dim", "value_head_dim"), draw(HEAD_DIMS))),
        sms=draw(st.integers(1, 140)),
        **heads_of(kv_heads, group),
        **draw(masks()),
        drops=draw(st.booleans()),
    )


def work_of(pack):
    """Work tiles in the order of their numbers, those of a cluster one after the other."""
    return [tile for number in range(pack.num_numbers) for tile in pack.work_tiles(number)]


def work_of_sequences(pack):
    sequences = collections.defaultdict(list)
    for tile in work_of(pack):
        sequences[tile.sequence].append(tile)
    return sequences


def mask_of(arguments):
    return {name: arguments[name] for name in ("causal", "window", "attention_chunk") if name in arguments}


def dims_of(arguments):
    return {name: arguments[name] for name in ("head_dim", "value_head_dim") if name in arguments}


def problem_of(arguments, seqlen_q, seqlen_k, **scheduling):
    """Of a dense batch of one sequence."""
    tile_q, tile_k = _schedule.backward_tile_shape(**dims_of(arguments))
    kv_heads = arguments["kv_heads"]
    return Problem(
        seqlen_q, seqlen_k, tile_q=tile_q, tile_k=tile_k, kv_heads=kv_heads, group_size=arguments["heads"] // kv_heads,
        cta_group=_schedule.cta_group(arguments["schedule"]), **scheduling, **mask_of(arguments),
    )  # fmt: skip


def launched_alone(arguments, seqlen_q, seqlen_k):
    """With the splits and the interleaving of heads with which a pack's sequence is worked on."""
    schedule = arguments["schedule"]
    splits = _schedule.num_splits(problem_of(arguments, seqlen_q, seqlen_k))
    problem = problem_of(arguments, seqlen_q, seqlen_k, splits=splits)
    rules = {"head_swizzle": _schedule.head_swizzle, "last_heads": _schedule.last_heads}
    together = {name: rule(schedule, problem, **dims_of(arguments)) for name, rule in rules.items()}
    return problem_of(arguments, seqlen_q, seqlen_k, splits=splits, **together)


def parts_of(arguments):
    """Of a KV tile, which have work tiles of their own."""
    return ("first", "second") if _schedule.divides(arguments["schedule"]) else ("all",)


def tiles_in(rows, size):
    return -(-rows // size)


# Of every kind of sequence, with and without splits.
MIXED = [(1024, 1024), (0, 300), (300, 0), (0, 0), (1, 5000), (700, 64), (129, 129), (4096, 2500)]
A_PACK = dict(schedule="descending", lengths=MIXED, head_dim=64, **heads_of(2, 8), causal=True)


def given_packs(test):
    """Of every policy at least one, with splits, and what hypothesis thinks of."""
    for policy in POLICIES:
        mask = next(mask for mask in (CAUSAL, FULL) if _schedule.fits(policy, **mask))
        test = example({**A_PACK, "schedule": policy, **mask})(test)
    return settings(max_examples=150, deadline=None)(given(backward_packs())(test))


@given_packs
def test_every_work_tile_is_handed_out_once(arguments):
    pack = BackwardPack(**arguments)
    _, tile_k = _schedule.backward_tile_shape(**dims_of(arguments))
    group, kv_heads = arguments["heads"] // arguments["kv_heads"], arguments["kv_heads"]
    sequences = work_of_sequences(pack)
    for number, (seqlen_q, seqlen_k) in enumerate(arguments["lengths"]):
        tiles = sequences.pop(number, [])
        splits = tiles[0].splits if tiles else 1
        assert group % splits == 0
        found = sorted((tile.kv_head, tile.split, tile.kv_tile, tile.visits) for tile in tiles)
        kv_tiles = range(tiles_in(seqlen_k, tile_k))
        assert found == list(itertools.product(range(kv_heads), range(splits), kv_tiles, parts_of(arguments)))
        for tile in tiles:
            assert (tile.lengths, tile.splits) == ((seqlen_q, seqlen_k), splits)
            heads = group // splits
            assert (tile.first_query_head, tile.query_heads) == (tile.kv_head * group + tile.split * heads, heads)
    assert not sequences, "work of sequences that do not exist"


@given_packs
def test_rows_of_a_sequence_end_where_the_next_one_begins(arguments):
    pack = BackwardPack(**arguments)
    ends = [list(itertools.accumulate(side)) for side in zip(*arguments["lengths"])]
    for tile in work_of(pack):
        assert (tile.end_q, tile.end_k) == (ends[0][tile.sequence], ends[1][tile.sequence])


@given_packs
def test_a_sequence_has_the_order_that_it_has_alone(arguments):
    """So what holds of a dense call holds here: waits point back, and sums have the order of their policy."""
    pack = BackwardPack(**arguments)
    schedule, sequences = arguments["schedule"], work_of_sequences(pack)
    for number, (seqlen_q, seqlen_k) in enumerate(arguments["lengths"]):
        if seqlen_k == 0:
            assert number not in sequences
            continue
        if seqlen_q == 0:  # only zeros to write, in any order; a dense call on it has no kernel
            assert {(tile.splits, tile.steps) for tile in sequences[number]} == {(1, 0)}
            continue
        problem = launched_alone(arguments, seqlen_q, seqlen_k)
        alone = [
            work_tile(schedule, problem, taken, cta)
            for taken in range(num_groups(schedule, problem))
            for cta in range(problem.cta_group)
        ]
        packed = [(0, tile.kv_head, tile.kv_tile, tile.split) for tile in sequences[number]]
        assert packed == [tile for tile in alone if tile]
        assert {tile.splits for tile in sequences[number]} == {problem.splits}
        steps = collections.Counter()
        for tile in sequences[number]:
            steps[tile.kv_head, tile.split, tile.kv_tile] += tile.steps
        for (_, _, kv_tile), found in steps.items():
            assert found == problem.query_tiles_of(kv_tile)[1] * problem.heads_per_split


@given_packs
def test_order_free_work_with_turns_comes_as_under_descending(arguments):
    def places(schedule, *turns):
        pack = BackwardPack(**arguments | {"schedule": schedule})
        tiles = [tile for number in range(pack.num_numbers) for tile in pack.work_tiles(number, *turns)]
        return [(tile.sequence, tile.kv_head, tile.split, tile.kv_tile, tile.steps) for tile in tiles]

    assert places("order_free", True) == places("descending")


@given_packs
def test_the_work_of_a_sequence_is_in_one_piece(arguments):
    pack = BackwardPack(**arguments)
    order = [number for number, _ in itertools.groupby(work_of(pack), key=lambda tile: tile.sequence)]
    assert len(order) == len(set(order))
    planned = [number for number, _ in pack.sequences]
    assert sorted(planned) == list(range(len(arguments["lengths"])))
    assert order == [number for number in planned if number in set(order)]


@given_packs
def test_longest_sequences_come_first(arguments):
    pack = BackwardPack(**arguments)
    longest = [steps for _, steps in pack.sequences]
    assert longest == sorted(longest, reverse=True)


@settings(max_examples=150, deadline=None)
@given(backward_packs())
@example(A_PACK)
@example({**A_PACK, **FULL})
def test_the_longest_work_tile_is_known(arguments):
    """One step is added so that no sequence with work is among those without."""
    pack = BackwardPack(**arguments)
    sequences = work_of_sequences(pack)
    for number, longest in pack.sequences:
        tiles = sequences[number]
        if not tiles:
            assert longest == 0
        elif _schedule.mask_name(**mask_of(arguments)) != "window":
            assert longest == 1 + max(tile.steps for tile in tiles)
        else:
            assert 1 <= longest <= 1 + max(tile.steps for tile in tiles)


@given_packs
def test_places_of_dq_are_disjoint_and_there_is_room(arguments):
    pack = BackwardPack(**arguments)
    tile_q, _ = _schedule.backward_tile_shape(**dims_of(arguments))
    owners = {}
    for tile in work_of(pack):
        query_tiles = tiles_in(tile.lengths[0], tile_q)
        for head in range(tile.query_heads):
            for query_tile in range(query_tiles):
                place = tile.first_dq_tile + head * query_tiles + query_tile
                owner = tile.sequence, tile.first_query_head + head, query_tile
                assert owners.setdefault(place, owner) == owner, "two dQ tiles in one place"
    assert len(set(owners.values())) == len(owners), "a dQ tile in two places"
    places = pack.totals["query_tiles"] * arguments["heads"]
    assert all(0 <= place < places for place in owners)
    with_keys = [(q, k) for q, k in arguments["lengths"] if k > 0]
    assert len(owners) == sum(tiles_in(q, tile_q) for q, _ in with_keys) * arguments["heads"]


@given_packs
def test_places_of_split_sums_are_disjoint_and_there_is_room(arguments):
    pack = BackwardPack(**arguments)
    _, tile_k = _schedule.backward_tile_shape(**dims_of(arguments))
    owners = {}
    for tile in work_of(pack):
        is_in_parts = tile.visits != "all" and tiles_in(tile.lengths[1], tile_k) > 1
        if tile.splits > 1 or is_in_parts:
            owner = tile.sequence, tile.kv_head, tile.kv_tile
            assert owners.setdefault(tile.split_tile, owner) == owner, "two sums in one place"
    assert len(set(owners.values())) == len(owners), "a sum in two places"
    assert sorted(owners) == list(range(pack.totals["split_tiles"] * arguments["kv_heads"]))


def check_room(pack, arguments):
    """Enough, and no more than a part for every whole tile and one for every sequence."""
    rows = [sum(side) + outside for side, outside in zip(zip(*arguments["lengths"]), arguments["rows_outside"])]
    batch, group = len(arguments["lengths"]), arguments["heads"] // arguments["kv_heads"]
    tile_q, tile_k = _schedule.backward_tile_shape(**dims_of(arguments))
    sizes = dict(
        units=(rows[1], tile_k, group * len(parts_of(arguments))),
        query_tiles=(rows[0], tile_q, 1), split_tiles=(rows[1], tile_k, 1),
        key_chunks=(rows[1], CHUNK_ROWS, 1),
    )  # fmt: skip
    assert set(pack.totals) == set(pack.most) == set(COUNTS)
    call = {name: value for name, value in arguments.items() if name != "lengths"}
    for name, (total, size, each) in sizes.items():
        assert 0 <= pack.totals[name] <= pack.most[name] <= (total // size + batch) * each, f"{name}, {call}"


@settings(max_examples=400, deadline=None)
@given(backward_packs(), st.tuples(st.integers(0, 300), st.integers(0, 300)))
def test_there_is_room_for_any_lengths(arguments, rows_outside):
    arguments = {**arguments, "rows_outside": rows_outside}
    check_room(BackwardPack(**arguments), arguments)


ADVERSARIAL = {
    "one row each": [(1, 1)] * 300,
    **{f"{n} rows each": [(n, n)] * 50 for n in (2, 63, 64, 65, 127, 128, 129, 191, 193)},
    "just over a tile of keys": [(1, 129)] * 200,
    "just over a tile of queries": [(129, 1)] * 200,
    "one long, many empty": [(0, 0)] * 200 + [(20000, 20000)] + [(0, 0)] * 200,
    "queries here, keys there": [(5000, 0), (0, 5000)] * 20,
    "few queries, many keys": [(1, 30000)] * 10,
    "as few queries as splits take": [(1, 129), (65, 129), (129, 129), (193, 129), (257, 129)] * 20,
    "as many as splits take": [(n, 129) for n in range(1, 2100, 32)],
    "splits of short keys": [(2048, 1)] * 20 + [(0, 10000)],
    "chunks grow": [(n, n) for n in (127, 255, 256, 257, 2048, 4096, 4097, 8191, 8192, 8193, 9000)],
}


ADVERSARIAL_DIMS, ADVERSARIAL_GROUPS = (64, 96, 128, 192, 256), range(1, 17)


@pytest.mark.parametrize("lengths", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_there_is_room_for_adversarial_lengths(lengths):
    masks = [FULL, CAUSAL, window(100, 50), window(-1, -1, 70)]
    kinds = [(schedule, mask) for schedule in POLICIES for mask in masks if _schedule.fits(schedule, **mask)]
    for (schedule, mask), group, head_dim in itertools.product(kinds, ADVERSARIAL_GROUPS, ADVERSARIAL_DIMS):
        arguments = dict(schedule=schedule, lengths=lengths, head_dim=head_dim, **heads_of(1, group), **mask)
        check_room(BackwardPack(**arguments), {**arguments, "rows_outside": (0, 0)})


def test_room_is_a_function_of_the_number_of_rows_alone():
    """The host cannot know more."""
    packs = [
        [(1000, 2000)] * 3, [(3000, 0), (0, 6000), (0, 0)], [(1, 2), (0, 0), (2999, 5998)],
        [(0, 1), (1, 0), (0, 0)],
    ]  # fmt: skip
    for schedule, mask in (("descending", CAUSAL), ("shift", FULL), ("order_free", window(5, 5))):
        found = set()
        for lengths in packs:
            outside = tuple(total - sum(side) for total, side in zip((3000, 6000), zip(*lengths)))
            pack = BackwardPack(schedule, lengths, head_dim=128, **heads_of(2, 8), **mask, rows_outside=outside)
            found.add(tuple(pack.most.values()))
        assert len(found) == 1


def test_some_packs_have_splits_and_some_room_for_none():
    """What is shown of splits is of some."""
    assert BackwardPack(**A_PACK).totals["split_tiles"] > 0
    alone = BackwardPack(**{**A_PACK, "heads": 2})
    assert alone.totals["split_tiles"] == alone.most["split_tiles"] == 0


@settings(max_examples=300, deadline=None)
@given(forward_packs())
def test_every_query_is_in_one_tile_of_the_forward(arguments):
    pack = ForwardPack(**arguments)
    covered = collections.defaultdict(list)
    order = []
    for place in range(pack.num_tiles):
        sequence, head_group, first, end = pack.tile(place)
        assert first < end
        covered[sequence, head_group].append((first, end))
        order.append(sequence)
    for number, (seqlen_q, _) in enumerate(arguments["lengths"]):
        for head_group in range(pack.head_groups):
            positions = [p for first, end in sorted(covered.pop((number, head_group), [])) for p in range(first, end)]
            assert positions == list(range(seqlen_q))
    assert not covered, "tiles of sequences or head groups that do not exist"
    pieces = [number for number, _ in itertools.groupby(order)]
    assert pieces == [number for number, _ in pack.sequences if arguments["lengths"][number][0] > 0]
    longest = [steps for _, steps in pack.sequences]
    assert longest == sorted(longest, reverse=True)


def check_forward_room(arguments):
    pack = ForwardPack(**arguments)
    total = sum(q for q, _ in arguments["lengths"]) + arguments["rows_outside"][0]
    rows = pack.tile_positions * (arguments["heads"] // pack.head_groups)
    call = {name: value for name, value in arguments.items() if name != "lengths"}
    assert rows % 64 == 0 and rows <= _schedule.forward_tile_shape(**dims_of(arguments))[0], call
    assert pack.totals["units"] <= pack.most["units"] <= total // pack.tile_positions + len(arguments["lengths"]), call


@settings(max_examples=300, deadline=None)
@given(forward_packs(), st.tuples(st.integers(0, 300), st.integers(0, 300)))
def test_there_is_room_for_the_forward(arguments, rows_outside):
    check_forward_room({**arguments, "rows_outside": rows_outside})


@pytest.mark.parametrize("lengths", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_there_is_room_for_the_forward_of_adversarial_lengths(lengths):
    masks = (FULL, CAUSAL, window(100, 50))
    for mask, group, head_dim in itertools.product(masks, ADVERSARIAL_GROUPS, ADVERSARIAL_DIMS):
        arguments = dict(lengths=lengths, head_dim=head_dim, **heads_of(1, group), **mask, rows_outside=(0, 0))
        check_forward_room({**arguments, "sms": 132})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lengths": []}, "the number of lengths"),
        ({"lengths": [(-1, 1)]}, "seqlen_q must be in .*, got -1"),
        ({"lengths": [(0, 1)]}, "the queries in all must be in .*, got 0"),
        ({"lengths": [(2**29, 1)] * 2}, "the queries in all must be in .*, got 1073741824"),
        ({"heads": 3}, "heads must be a multiple of kv_heads=2, got 3"),
        ({"head_dim": 257}, "^head_dim must be in"),
        ({"value_head_dim": 257}, "value_head_dim must be in"),
        ({"schedule": "shift"}, "schedule='shift' is defined for the full mask only, got the causal mask"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        BackwardPack(**{**A_PACK, **change})

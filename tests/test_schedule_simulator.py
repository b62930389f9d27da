"""The simulator against the paper's formulas, and progress under every residency."""

import random

import pytest
from mask_support import CAUSAL, FULL, name_of, window

from dash_attn import _schedule
from dash_attn.schedule import POLICIES, Problem, add_order, num_groups, problem, simulate

MASKS = [FULL, CAUSAL, window(2, 1), window(3, -1, causal=True), window(-1, -1, 3)]
POLICY_MASKS = [(policy, mask) for policy in POLICIES for mask in MASKS if _schedule.fits(policy, **mask)]
# Those whose partials wait for each other.
ORDERED = [(policy, mask) for policy, mask in POLICY_MASKS if policy != "order_free"]


def ids(policy_masks):
    return [f"{policy}-{name_of(mask)}" for policy, mask in policy_masks]


COSTS = [(1.0, 0.25), (3.0, 2.0), (1.0, 0.0), (0.5, 4.0)]  # exact in binary, so lengths compare with ==


def square(n, heads, causal, cta_group=1):
    return Problem(n, n, tile_q=1, tile_k=1, causal=causal, kv_heads=heads, cta_group=cta_group)


def length(policy, tiles, c, r, **options):
    result = simulate(policy, tiles, product_time=c, add_time=r, signal_time=0, **options)
    assert result.num_tasks == sum(map(len, add_order(policy, tiles))) * tiles.kv_heads * tiles.batch
    return result.makespan


@pytest.mark.parametrize("c, r", COSTS)
@pytest.mark.parametrize("m", [2, 4, 6])
@pytest.mark.parametrize("n", [2, 4, 6, 8, 16, 24])
def test_lengths_of_the_paper(n, m, c, r):
    """DASH's formulas, on n SMs with the paper's own mapping of KV tiles to SMs."""
    assert length("ascending", square(n, m, False), c, r, sms=n, mapping="published") == m * n * (c + r) + (n - 1) * r
    assert length("ascending", square(n, m, True), c, r, sms=n, mapping="published") == m * (n * (c + r) + (n - 1) * r)
    if r <= c:  # slower adds are a bottleneck of their own, which the formula leaves out
        descending = length("descending", square(n, m, True), c, r, sms=n, mapping="published")
        assert descending == m * (n + 1) * (c + r) / 2 + (n - 1) * r
    assert length("shift", square(n, m, False), c, r, sms=n, mapping="published") == m * n * (c + r)
    symmetric = length("symmetric_shift", square(n, m, True, n // 2), c, r, sms=n, mapping="published")
    assert symmetric == m * (n + 1) * (c + r) / 2


@pytest.mark.parametrize("c, r", COSTS)
@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_the_counter_reaches_the_lengths_of_the_paper(n, m, c, r):
    """Taking work from a counter loses nothing where all members of a group do the same work, or have none."""
    assert length("ascending", square(n, m, False), c, r, sms=n) == m * n * (c + r) + (n - 1) * r
    assert length("shift", square(n, m, False), c, r, sms=n) == m * n * (c + r)
    if r <= c:
        assert length("descending", square(n, m, True), c, r, sms=n) == m * (n + 1) * (c + r) / 2 + (n - 1) * r
    # The counter does better than mirroring: whoever is free first takes the next head's longest tile.
    assert length("ascending", square(n, m, True), c, r, sms=n) <= m * (n * (c + r) + (n - 1) * r)


def test_spt_is_7_to_8_percent_above_ideal_at_16k():
    tiles = problem("spt", 16384, 16384, causal=True, head_dim=128, heads=16)
    assert 1.07 <= simulate("spt", tiles, sms=132).ratio <= 1.08


def test_interleaved_heads_bring_descending_within_2_percent_of_ideal():
    for seqlen, heads in [(4096, 64), (8192, 32), (16384, 16)]:
        tiles = [
            problem("descending", seqlen, seqlen, causal=True, heads=heads, head_swizzle=swizzle) for swizzle in (1, 16)
        ]
        apart, interleaved = (simulate("descending", each, sms=132).ratio for each in tiles)
        assert 1 <= interleaved < 1.02 < apart


def added(result):
    """(batch, head, query tile): KV tiles in the order in which their adds began, checked not to overlap."""
    order, end = {}, {}
    for task in sorted(result.tasks, key=lambda task: (task.add_start, task.end)):
        key = (task.batch, task.head, task.query_tile)
        assert task.add_start >= max(end.get(key, 0), task.products_end)
        end[key] = task.end
        order.setdefault(key, []).append(task.kv_tile)
    return order


def launches(clusters, generator):
    """Adversarial times at which clusters become resident."""
    late = 1e6
    yield [0.0] * clusters
    yield [late * i for i in range(clusters)]
    yield [late * i for i in reversed(range(clusters))]
    yield [generator.choice([0.0, generator.uniform(0, 60), late]) for _ in range(clusters)]


def features(generator):
    """What the kernel has and the DAG model has not, at random."""
    staging = generator.choice([0, 1, 2, 3])
    return dict(
        staging=staging,
        adders=generator.randint(1, max(1, staging)),
        loads_ahead=generator.choice([0, 1, 2, 5]),
        work_time=generator.choice([0, 3]),
        load_time=generator.choice([0, 1]),
        poll_time=generator.choice([0, 1]),
        spread=generator.choice([0, 0.3]),
        mask_time=generator.choice([0, 1]),
        memory_work_time=generator.choice([0, 2]),
        memory_tile_time=generator.choice([0, 2]),
        cache_time=generator.choice([4, 1e12]),
        patience=generator.choice([0, 100]),
    )


@pytest.mark.parametrize("cta_group", [1, 2, 3, 8])
@pytest.mark.parametrize("policy, mask", ORDERED, ids=ids(ORDERED))
def test_progress_and_order_under_every_residency(policy, mask, cta_group):
    """From one resident cluster to all of them, launched at any time: all work is done, in the one order."""
    generator = random.Random(f"{policy} {name_of(mask)} {cta_group}")
    for lengths in [(6, 6), (4, 7), (9, 5), (1, 4)]:
        shape = dict(tile_q=1, tile_k=1, **mask, kv_heads=2, group_size=2, cta_group=cta_group)
        tiles = Problem(*lengths, **shape, head_swizzle=generator.choice([1, 2]))
        expected = {
            (0, head, q): order for head in range(4) for q, order in enumerate(add_order(policy, tiles)) if order
        }
        for clusters in range(1, num_groups(policy, tiles) + 1):
            for launch_times in launches(clusters, generator):
                result = simulate(
                    policy,
                    tiles,
                    sms=clusters * cta_group,
                    product_time=generator.choice([1, 5]),
                    add_time=generator.choice([0.5, 3]),
                    signal_time=generator.choice([0, 2]),
                    **features(generator),
                    launch_times=launch_times,
                    record_tasks=True,
                )
                assert added(result) == expected


@pytest.mark.parametrize("causal", [False, True])
def test_order_free_never_waits(causal):
    tiles = square(8, 2, causal)
    for sms in range(1, 20):
        result = simulate("order_free", tiles, sms=sms, product_time=1, add_time=3, signal_time=2, record_tasks=True)
        assert all(task.add_start == task.products_end == task.start + 1 for task in result.tasks)
        assert sorted((task.head, task.query_tile, task.kv_tile) for task in result.tasks) == [
            (head, q, kv) for head in range(2) for q, order in enumerate(add_order("order_free", tiles)) for kv in order
        ]


def test_published_shift_stops_without_co_residency():
    """Where KV tiles are worked on whole whoever runs, all of a head wait for the last one to start. As the kernel does
    it they do not: fewer CTAs than KV tiles work on them in parts."""
    tiles = square(8, 2, False)
    late = [0.0] * 7 + [1e6]
    assert simulate("shift", tiles, sms=8, mapping="published", launch_times=late).makespan > 1e6
    assert simulate("shift", tiles, sms=8, launch_times=late).makespan < 1e6
    assert simulate("shift", tiles, sms=8).makespan < simulate("shift", tiles, sms=7).makespan


def test_published_symmetric_shift_stops_without_co_residency():
    """Why it is not run as published: one CTA short of a whole head, no CTA ever gets on. In clusters, they do."""
    tiles = square(8, 2, True, 4)
    simulate("symmetric_shift", tiles, sms=4, mapping="independent")
    for sms in range(1, 4):
        with pytest.raises(RuntimeError, match="no progress: .* wait for adds that no resident CTA will make"):
            simulate("symmetric_shift", tiles, sms=sms, mapping="independent")
    simulate("symmetric_shift", square(8, 2, True, 2), sms=2)


def test_single_cta_policies_need_no_co_residency():
    single = [("ascending", True), ("descending", True), ("spt", True), ("ascending", False), ("shift", False)]
    for policy, causal in single:
        for sms in range(1, 9):
            simulate(policy, square(8, 2, causal), sms=sms, mapping="independent")


def test_accounting():
    result = simulate("descending", square(8, 3, True), sms=4, product_time=2, add_time=1, signal_time=0)
    assert result.num_tasks == 3 * 36
    assert result.ideal == 3 * 36 * 3 / 4
    assert result.idle_share == pytest.approx(1 - result.ideal / result.makespan)
    assert result.ratio == result.makespan / result.ideal > 1
    assert result.critical_path == 8 * 3  # the longest KV tile, which waits for none
    one = simulate("descending", square(8, 3, True), sms=1, product_time=2, add_time=1, signal_time=0)
    assert (one.makespan, one.idle_share) == (3 * 36 * 3, 0)


@pytest.mark.parametrize("policy, mask", POLICY_MASKS, ids=ids(POLICY_MASKS))
def test_critical_path_bounds_every_machine(policy, mask):
    tiles = Problem(7, 7, tile_q=1, tile_k=1, kv_heads=2, cta_group=_schedule.cta_group(policy), **mask)
    results = [simulate(policy, tiles, sms=sms) for sms in range(2, 40)]
    assert all(result.makespan >= max(result.critical_path, result.ideal) - 1e-9 for result in results)
    assert results[-1].makespan == pytest.approx(results[-1].critical_path)


@pytest.mark.parametrize("n", range(1, 33))
def test_the_longest_path_of_the_shifts_is_their_longest_kv_tile(n):
    c, r = 1, 0.25
    for policy, causal, cta_group in (("shift", False, 1), ("symmetric_shift", True, 2)):
        tiles = problem(policy, 128 * n, 128 * n, causal=causal, head_dim=128)
        assert (tiles.num_query_tiles, tiles.cta_group) == (2 * n, cta_group)
        played = simulate(policy, tiles, sms=2, product_time=c, add_time=r, signal_time=0)
        assert played.critical_path == 2 * n * (c + r)


BAD_OPTIONS = [
    (dict(sms=0), "sms must be in"),
    (dict(sms=1), "sms must be at least cta_group=2, got 1"),
    (dict(sms=4, product_time=-1), "product_time must be in"),
    (dict(sms=4, add_time=float("nan")), "add_time must be in"),
    (dict(sms=4, signal_time=float("inf")), "signal_time must be in"),
    (dict(sms=4, staging=2, adders=3), r"adders must be in \[1, 3\), got 3"),
    (dict(sms=4, staging=-1), "staging must be in"),
    (dict(sms=4, spread=1.0), "spread must be in"),
    (dict(sms=4, memory_tile_time=-1), "memory_tile_time must be in"),
    (dict(sms=4, patience=float("nan")), "patience must be in"),
    (dict(sms=4, mapping="static"), "mapping must be one of 'counter', 'independent', 'published', got 'static'"),
    (dict(sms=4, launch_times=[0.0]), "launch_times must have one entry a cluster, 2, got 1"),
    (dict(sms=4, mapping="published"), "sms must be the number of KV tiles, 8, in the published mapping, got 4"),
]


@pytest.mark.parametrize("options, message", BAD_OPTIONS)
def test_bad_options_name_the_argument(options, message):
    with pytest.raises(ValueError, match=message):
        simulate("ascending", square(8, 1, False, 2), **options)


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'stagings'"):
        simulate("shift", square(8, 1, False), sms=2, stagings=2)


def machine(policy, tiles, **options):
    """A makespan with two staging buffers, in units in which products take 4."""
    costs = dict(product_time=4, add_time=1, signal_time=0.5, staging=2, adders=2) | options
    return simulate(policy, tiles, **costs).makespan


def test_staged_adds_hide_behind_products():
    tiles = Problem(10, 1, tile_q=1, tile_k=1, causal=False)
    assert machine("ascending", tiles, sms=1) == 10 * 4 + 1
    assert machine("ascending", tiles, sms=1, staging=0, adders=1) == 10 * (4 + 1)
    # An add slower than products holds them back unless two go on at a time.
    assert machine("ascending", tiles, sms=1, add_time=6, adders=1) == 4 + 10 * 6
    assert machine("ascending", tiles, sms=1, add_time=6, adders=2) == 10 * 4 + 6


def test_an_ordered_chain_takes_a_hop_a_tile():
    tiles = Problem(1, 20, tile_q=1, tile_k=1, causal=False)
    assert machine("ascending", tiles, sms=20) == 4 + 20 * 1 + 19 * 0.5
    assert machine("ascending", tiles, sms=20, ordered=False) == 4 + 1
    # A semaphore that stands at the rank already is polled for; rank 0 does not look.
    assert machine("ascending", tiles, sms=1, poll_time=0.25) == 20 * 4 + 0.25 + 1


def test_work_tiles_have_a_price():
    tiles = Problem(3, 5, tile_q=1, tile_k=1, causal=False)
    assert machine("ascending", tiles, sms=1, work_time=2) == 5 * (2 + 3 * 4) + 1


def test_tiles_on_the_diagonal_take_longer():
    # Queries 0 to 3 see nothing, 4 and 5 see keys up to the first and second, 6 and 7 up to the third and fourth.
    tiles = Problem(8, 4, tile_q=1, tile_k=2, causal=True)
    plain, masked = (machine("ascending", tiles, sms=1, mask_time=time) for time in (0, 1))
    assert masked == plain + 2  # query 4 with the first two keys, query 6 with the last two


def test_work_tiles_taken_ahead_tie_heads_to_each_other():
    """Why ascending is slow under the causal mask: an SM whose short tile waits holds the next head's first tile."""
    tiles = square(8, 64, True)

    def both(policy):
        return [machine(policy, tiles, sms=33, work_time=2, loads_ahead=steps) for steps in (0, 2)]

    late, ahead = both("ascending")
    assert ahead > 1.5 * late
    for policy in ("descending", "spt"):
        late, ahead = both(policy)
        assert ahead == pytest.approx(late, rel=0.02)


def test_memory_serves_one_after_the_other():
    tiles = Problem(4, 64, tile_q=1, tile_k=1, causal=False)
    free = machine("ascending", tiles, sms=64)
    assert machine("ascending", tiles, sms=64, memory_work_time=0.01) == pytest.approx(free, rel=0.1)
    assert machine("ascending", tiles, sms=64, memory_work_time=4, cache_time=0) >= 64 * 4
    # A tile is read again when it has left the cache.
    revisits = dict(sms=1, memory_tile_time=8)
    assert machine("ascending", tiles, **revisits, cache_time=16) == pytest.approx(64 * 4 * 8, rel=0.1)
    assert machine("ascending", tiles, **revisits, cache_time=40) < 64 * 4 * 4 * 1.1


def test_spread_is_the_same_each_time_and_even():
    tiles = square(40, 4, False)
    first, second = (machine("spt", tiles, sms=1, spread=0.2) for _ in range(2))
    assert first == second != machine("spt", tiles, sms=1)
    assert first == pytest.approx(machine("spt", tiles, sms=1), rel=0.01)

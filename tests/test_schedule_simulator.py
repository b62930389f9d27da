"""Progress of every policy with any number of CTAs, and the lengths of schedules in the DAG model."""

import itertools
import random

import pytest
from mask_support import CAUSAL, FULL, name_of, window
from simulator import Simulator, Stuck

from dash_attn import _schedule
from dash_attn.schedule import POLICIES, Problem, num_groups, problem

MASKS = [FULL, CAUSAL, window(2, 1), window(3, -1, causal=True), window(-1, -1, 3)]
POLICY_MASKS = [(policy, mask) for policy in POLICIES for mask in MASKS if _schedule.fits(policy, **mask)]
IDS = [f"{policy}-{name_of(mask)}" for policy, mask in POLICY_MASKS]
COSTS = [(1.0, 0.25), (3.0, 2.0), (1.0, 0.0), (0.5, 4.0)]  # exact in binary, so lengths compare with ==


def square(n, heads, causal, cta_group=1):
    return Problem(n, n, tile_q=1, tile_k=1, causal=causal, kv_heads=heads, cta_group=cta_group)


@pytest.mark.parametrize("cta_group", [1, 2, 3, 8])
@pytest.mark.parametrize("policy, mask", POLICY_MASKS, ids=IDS)
def test_progress_with_every_number_of_clusters(policy, mask, cta_group):
    """From one cluster to one for each number, some of which start late: all work ends, whoever takes which number."""
    generator = random.Random(f"{policy} {name_of(mask)} {cta_group}")
    for lengths, splits in itertools.product([(6, 6), (4, 7), (9, 5), (1, 4)], [1, 3]):
        tiles = Problem(
            *lengths, tile_q=1, tile_k=1, **mask, kv_heads=2, group_size=2 * splits, cta_group=cta_group, splits=splits,
            head_swizzle=generator.choice([1, 2, 3, 4, 6]), last_heads=generator.choice([0, 1, 4, 5]),
        )  # fmt: skip
        simulator = Simulator(policy, tiles)
        most = num_groups(policy, tiles)
        for clusters in range(1, most + 1) if splits == 1 else {1, 2, 3, most // 2, most - 1, most} - {0}:
            for ahead in (False, True):
                late = generator.choice([0, generator.randrange(clusters), clusters - 1])
                simulator.play(clusters, generator=generator, late=late, ahead=ahead)


def test_the_rotation_needs_its_ctas_at_the_same_time():
    """Why the rotation of symmetric shift stays within a cluster: one CTA too few, and no CTA gets on."""
    tiles = square(8, 2, True, 4)
    Simulator("symmetric_shift", tiles).play(1)
    alone = Simulator("symmetric_shift", tiles, in_clusters=False)
    alone.play(4)
    for ctas in range(1, 4):
        with pytest.raises(Stuck, match="no progress"):
            alone.play(ctas)


@pytest.mark.parametrize("c, r", COSTS)
@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_lengths_of_the_paper(n, m, c, r):
    """DASH's formulas for n KV tiles on n SMs and m heads, of which the counter loses nothing."""

    def length(policy, causal):
        return Simulator(policy, square(n, m, causal)).play(n, product=c, add=r)

    assert length("ascending", False) == m * n * (c + r) + (n - 1) * r
    assert length("shift", False) == m * n * (c + r)
    if r <= c:  # slower adds are a bottleneck of their own, which the formula leaves out
        assert length("descending", True) == m * (n + 1) * (c + r) / 2 + (n - 1) * r


@pytest.mark.parametrize("n", [1, 2, 3, 8, 15, 32])
def test_the_longest_path_of_the_shifts_is_their_longest_kv_tile(n):
    """With an SM for every KV tile, no CTA waits."""
    c, r = 1, 0.25
    for policy, causal, cta_group in (("shift", False, 1), ("symmetric_shift", True, 2)):
        tiles = problem(policy, 128 * n, 128 * n, causal=causal, head_dim=128)
        assert (tiles.num_query_tiles, tiles.cta_group) == (2 * n, cta_group)
        assert Simulator(policy, tiles).play(-(-n // cta_group) + 1, product=c, add=r) == 2 * n * (c + r)

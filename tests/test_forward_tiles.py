"""The list in which the forward works on its query tiles (csrc/schedule/forward_tiles.h): every tile once, whoever
takes it; every query in a tile; work even where shares are fixed."""

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_attn._schedule import ForwardTiles

SMS = 132


@st.composite
def forwards(draw):
    kv_heads, group = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 4, 8]))
    return ForwardTiles(
        batch=draw(st.integers(1, 4)),
        seqlen_q=draw(st.integers(1, 9000)),
        seqlen_k=draw(st.integers(1, 9000)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 128])),
        causal=draw(st.booleans()),
        sms=draw(st.integers(1, 140)),
    )


@settings(max_examples=200, deadline=None)
@given(forwards())
def test_the_list_has_every_tile_once(tiles):
    found = collections.Counter(tiles.tile(position) for position in range(tiles.num_tiles))
    assert len(found) == tiles.num_tiles and set(found.values()) <= {1}
    assert {index for _, _, index in found} == set(range(tiles.query_tiles))
    assert max(group for _, group, _ in found) == tiles.head_groups - 1


@settings(max_examples=200, deadline=None)
@given(forwards(), st.integers(1, 140))
def test_fixed_shares_have_every_place_once(tiles, ctas):
    ctas = min(ctas, tiles.num_tiles)
    rounds = -(-tiles.num_tiles // ctas)
    positions = [tiles.position(r, cta, ctas) for r in range(rounds) for cta in range(ctas)]
    assert sorted(p for p in positions if p < tiles.num_tiles) == list(range(tiles.num_tiles))
    for cta in range(ctas):  # a CTA stops at the first place that is beyond the end
        assert all(tiles.position(r, cta, ctas) < tiles.num_tiles for r in range(rounds - 1))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9000), st.sampled_from([64, 128]), st.sampled_from([1, 2, 8]), st.booleans())
def test_every_query_is_in_one_tile(seqlen_q, head_dim, group, causal):
    shape = dict(batch=1, seqlen_k=500, heads=group, kv_heads=1, head_dim=head_dim, causal=causal, sms=SMS)
    tiles = ForwardTiles(seqlen_q=seqlen_q, **shape)
    covered = []
    for index in range(tiles.query_tiles):
        first, end = tiles.positions(index)
        covered += range(first, end)
    assert covered == list(range(seqlen_q))


@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 16384])
@pytest.mark.parametrize("head_dim, heads", [(64, 32), (128, 16)])
def test_causal_work_is_even(head_dim, heads, seqlen):
    """Of 16,384 tokens on 132 SMs: the longest share is at most 4% over the mean, where CTAs take tiles as where shares
    are fixed, a KV tile being the unit and a query tile's own cost a third of it."""
    batch = 16384 // seqlen
    shape = dict(batch=batch, heads=heads, kv_heads=heads, head_dim=head_dim, causal=True, sms=SMS)
    tiles = ForwardTiles(seqlen_q=seqlen, seqlen_k=seqlen, **shape)
    costs = []
    for position in range(tiles.num_tiles):
        _, end = tiles.positions(tiles.tile(position)[2])
        costs.append(-(-end // 128) + 1 / 3)
    shares = [0.0] * SMS
    for position, cost in enumerate(costs):
        if tiles.takes_tiles:
            shares[shares.index(min(shares))] += cost
        else:
            round_, place = divmod(position, SMS)
            cta = next(c for c in (place, SMS - 1 - place) if tiles.position(round_, c, SMS) == position)
            shares[cta] += cost
    assert max(shares) <= 1.04 * sum(costs) / SMS


def test_longest_first_within_a_lot():
    heads = dict(heads=16, kv_heads=16, head_dim=128)
    tiles = ForwardTiles(batch=2, seqlen_q=8192, seqlen_k=8192, **heads, causal=True, sms=SMS)
    assert tiles.takes_tiles and tiles.head_swizzle == 8  # 4 MiB of K and V a head
    lot = [tiles.tile(position) for position in range(tiles.head_swizzle * tiles.query_tiles)]
    assert [index for _, _, index in lot] == sorted((index for _, _, index in lot), reverse=True)
    assert {(batch, group) for batch, group, _ in lot} == {(0, group) for group in range(8)}

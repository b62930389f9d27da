"""The list in which the forward works on its query tiles (csrc/placement/forward_tiles.h): every tile once, whoever
takes it; every query in a tile; causal work even."""

import collections
import heapq
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_attn._schedule import ForwardPack, ForwardTiles

SMS = 132
HEAD_DIMS = st.sampled_from([(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]).map(
    lambda dims: dict(zip(("head_dim", "value_head_dim"), dims))
)


@st.composite
def forwards(draw):
    kv_heads, group = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 4, 8]))
    batch = draw(st.integers(1, 4))
    tiles = ForwardTiles(
        batch=batch,
        seqlen_q=draw(st.integers(1, 9000)),
        seqlen_k=draw(st.integers(1, 9000)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        **draw(HEAD_DIMS),
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([(-1, -1), (-1, -1), (100, 0), (-1, 300), (64, 64)])),
        drops=draw(st.booleans()),
        sms=draw(st.integers(1, 140)),
    )
    assert tiles.head_groups in (kv_heads, kv_heads * group)
    return tiles, batch


@settings(max_examples=200, deadline=None)
@given(forwards())
def test_the_list_has_every_tile_once(forward):
    tiles, batch = forward
    found = collections.Counter(tiles.tile(place) for place in range(tiles.num_tiles))
    assert set(found.values()) == {1}
    every = itertools.product(range(batch), range(tiles.head_groups), range(tiles.query_tiles))
    assert set(found) == set(every)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9000), HEAD_DIMS, st.sampled_from([1, 2, 8]), st.booleans())
def test_every_query_is_in_one_tile(seqlen_q, head_dims, group, causal):
    shape = dict(batch=1, seqlen_k=500, heads=group, kv_heads=1, **head_dims, causal=causal, sms=SMS)
    tiles = ForwardTiles(seqlen_q=seqlen_q, **shape)
    covered = []
    for index in range(tiles.query_tiles):
        first, end = tiles.positions(index)
        covered += range(first, end)
    assert covered == list(range(seqlen_q))


def longest_share(tiles) -> float:
    """Over the mean, a KV tile being the unit and a query tile's own cost a third of it. A CTA takes the next tile when
    it has a KV tile of the last left."""
    costs = [-(-tiles.positions(tiles.tile(place)[2])[1] // 128) + 1 / 3 for place in range(tiles.num_tiles)]
    assert tiles.takes_tiles
    asks = [(max(0.0, costs[cta] - 1), cta) for cta in range(SMS)]
    shares = costs[:SMS]
    heapq.heapify(asks)
    for cost in costs[SMS:]:
        _, cta = heapq.heappop(asks)
        shares[cta] += cost
        heapq.heappush(asks, (shares[cta] - 1, cta))
    return max(shares) / (sum(costs) / SMS)


@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 16384])
@pytest.mark.parametrize("head_dim, heads", [(64, 32), (128, 16)])
def test_causal_work_is_even(head_dim, heads, seqlen):
    shape = dict(batch=16384 // seqlen, heads=heads, kv_heads=heads, head_dim=head_dim, causal=True, sms=SMS)
    assert longest_share(ForwardTiles(seqlen_q=seqlen, seqlen_k=seqlen, **shape)) <= 1.04


def test_few_tiles_are_even_too():
    """256 tiles of 1 to 32 KV tiles: no share is longer than the longest tile and one more."""
    shape = dict(batch=1, heads=8, kv_heads=2, head_dim=128, causal=True, sms=SMS)
    tiles = ForwardTiles(seqlen_q=4096, seqlen_k=4096, **shape)
    assert tiles.takes_tiles and longest_share(tiles) <= 34 / (256 * 16.83 / SMS)


@pytest.mark.parametrize("heads, seqlen, causal, rows", [
    (8, 2048, False, 128), (8, 2048, True, 64), (8, 4096, True, 128), (8, 8192, True, 192), (16, 16384, False, 192),
    (1, 1000000, True, 192),
])  # fmt: skip
def test_where_tiles_are_few_they_have_fewer_rows(heads, seqlen, causal, rows):
    """The first three are what was fastest of 64, 128 and 192 rows on an H200 (docs/design_decisions.md)."""
    shape = dict(batch=1, heads=heads, kv_heads=heads, head_dim=128, causal=causal, sms=SMS)
    assert ForwardTiles(seqlen_q=seqlen, seqlen_k=seqlen, **shape).tile_positions == rows


@pytest.mark.parametrize("seqlen_q, seqlen_k, group, last_groups", [
    (512, 512, 1, 88), (2048, 2048, 1, 24), (8192, 8192, 1, 7), (32768, 32768, 1, 2), (131072, 131072, 1, 1),
    (512, 8192, 1, 8), (512, 32768, 1, 2), (1024, 32768, 2, 4), (100, 1000000, 1, 1),
])  # fmt: skip
def test_heads_come_one_by_one_but_the_last_ones(seqlen_q, seqlen_k, group, last_groups):
    """As many of these as have two tiles for every CTA, or as have 32 MiB of K and V where these are fewer."""
    heads = dict(batch=2, heads=64, kv_heads=64 // group, head_dim=128)
    tiles = ForwardTiles(seqlen_q=seqlen_q, seqlen_k=seqlen_k, **heads, causal=True, drops=group > 1, sms=SMS)
    assert tiles.takes_tiles == (tiles.num_tiles > SMS) and tiles.last_groups == last_groups
    listed = [tiles.tile(place) for place in range(tiles.num_tiles)]
    single = (128 - last_groups) * tiles.query_tiles
    indices = range(tiles.query_tiles - 1, -1, -1)
    assert listed[:single] == [(head // 64, head % 64, index) for head in range(128 - last_groups) for index in indices]
    last = [index for _, _, index in listed[single:]]
    assert last == sorted(last, reverse=True)


def test_shares_are_fixed_where_tiles_are_as_long_as_each_other():
    heads = dict(batch=2, heads=64, kv_heads=64, head_dim=128)
    assert not ForwardTiles(seqlen_q=768, seqlen_k=768, **heads, causal=False, sms=SMS).takes_tiles
    assert ForwardTiles(seqlen_q=1024, seqlen_k=1024, **heads, causal=False, sms=SMS).takes_tiles  # one is short
    assert not ForwardTiles(seqlen_q=8192, seqlen_k=8192, **heads, causal=False, sms=SMS).takes_tiles


def test_any_number_of_sms():
    tiles = ForwardTiles(
        batch=32768, seqlen_q=1, seqlen_k=1, heads=32768, kv_heads=32768, head_dim=64, causal=True, sms=2**31 - 1
    )
    assert 1 <= tiles.last_groups <= 32768**2 and not tiles.takes_tiles


@pytest.mark.parametrize(
    "change, message",
    [
        ({"batch": 0}, "batch must be in"),
        ({"kv_heads": 0}, "kv_heads must be in"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads=3, got 8"),
        ({"head_dim": 300}, r"^head_dim must be in \[1, 257\), got 300"),
        ({"value_head_dim": 0}, r"value_head_dim must be in \[1, 257\), got 0"),
        ({"seqlen_q": 0}, "seqlen_q must be in"),
        ({"sms": 0}, "sms must be in"),
    ],
    ids=str,
)
def test_bad_input_names_the_argument(change, message):
    good = dict(batch=1, seqlen_q=5, seqlen_k=5, heads=8, kv_heads=2, head_dim=64, causal=False, sms=4)
    with pytest.raises(ValueError, match=message):
        ForwardTiles(**{**good, **change})


@pytest.mark.parametrize("seqlen_q, rows", [(1, 64), (16, 64), (17, 192)])
def test_sequences_with_few_rows_have_short_tiles(seqlen_q, rows):
    """However many there are: their tiles have a kernel of their own."""
    tiles = ForwardTiles(
        batch=600, seqlen_q=seqlen_q, seqlen_k=8192, heads=32, kv_heads=8, head_dim=128, causal=True, sms=SMS
    )
    assert tiles.tile_positions * (32 // tiles.head_groups) == rows


@pytest.mark.parametrize("last, rows", [(1, 64), (2, 192), (600, 192)])
def test_packs_have_short_tiles_where_all_sequences_may_have_as_few_rows(last, rows):
    """A pack whose mean length is whole counts as a step of decoding; the host knows nothing else of the lengths."""
    lengths = [(1, 8192)] * 499 + [(last, 8192)]
    pack = ForwardPack(lengths=lengths, heads=32, kv_heads=8, head_dim=128, causal=True, sms=SMS)
    assert pack.tile_positions * (32 // pack.head_groups) == rows

"""dash_attn.schedule as users and the reference see it: the policies, resolve, problem."""

import pytest

from dash_attn import _schedule, schedule


def test_policies_are_the_integers_of_the_compiled_ops():
    names = ("descending", "spt", "shift", "symmetric_shift", "order_free", "ascending", "atomic")
    assert (*schedule.POLICIES, *schedule.YARDSTICKS) == names
    assert [schedule.policy_number(name) for name in names] == list(range(len(names)))


def test_yardsticks_cannot_be_chosen():
    assert schedule.YARDSTICKS == ("ascending", "atomic")
    for causal in (False, True):
        for name in schedule.YARDSTICKS:
            with pytest.raises(ValueError, match=f"schedule must be one of 'auto', .*, got '{name}'"):
                schedule.resolve(name, causal=causal)
        assert schedule.resolve("auto", causal=causal) in schedule.POLICIES


@pytest.mark.parametrize("causal", [False, True])
def test_resolve(causal):
    shape, mask = dict(causal=causal), "causal" if causal else "full"
    assert schedule.resolve("auto", **shape) in schedule.POLICIES
    for policy in schedule.POLICIES:
        if policy not in schedule.fitting(causal=causal):
            with pytest.raises(ValueError, match=f"schedule must be one of 'auto', .* {mask} mask, got '{policy}'"):
                schedule.resolve(policy, **shape)
        else:
            assert schedule.resolve(policy, **shape) == policy
    with pytest.raises(ValueError, match="schedule must be one of 'auto', .*, got 'fast'"):
        schedule.resolve("fast", **shape)


def test_fitting():
    both = ("descending", "spt", "order_free")
    assert set(schedule.fitting(causal=False)) == {*both, "shift"}
    assert set(schedule.fitting(causal=True)) == {*both, "symmetric_shift"}


@pytest.mark.parametrize("mask", [dict(causal=False), dict(causal=True), dict(causal=False, window=(9, 0))], ids=str)
@pytest.mark.parametrize(
    "call, where",
    [
        (dict(head_dim=136), "at head dims above 128"),
        (dict(head_dim=64, value_head_dim=256), "at head dims above 128"),
        (dict(head_dim=64, changed_scores=True), "with softcap, alibi_slopes or dropout"),
        (dict(head_dim=64, dropout=True), "with softcap, alibi_slopes or dropout"),
        (dict(head_dim=192, value_head_dim=128, dropout=True), "with softcap, alibi_slopes or dropout"),
    ],
    ids=str,
)
def test_wide_heads_changed_scores_and_dropout_have_two_policies(call, where, mask):
    fitting = ("descending", "spt")
    assert schedule.fitting(**call, **mask) == fitting
    assert schedule.resolve("auto", **call, **mask) in fitting
    for policy in ("shift", "symmetric_shift", "ascending", "atomic"):
        message = f"schedule must be one of 'auto', 'descending', 'spt' {where}, got '{policy}'"
        with pytest.raises(ValueError) as raised:
            schedule.resolve(policy, **call, **mask)
        assert str(raised.value) == message
    assert [schedule.resolve(policy, **call, **mask) for policy in fitting] == list(fitting)


@pytest.mark.parametrize("call, got", [
    (dict(head_dim=136), "a head dim above 128"),
    (dict(head_dim=64, value_head_dim=256), "a head dim above 128"),
    (dict(head_dim=64, dropout=True), "dropout"),
    (dict(head_dim=256, dropout=True), "dropout"),
    (dict(head_dim=64, changed_scores=True), "softcap or alibi_slopes"),
    (dict(head_dim=256, changed_scores=True), "softcap or alibi_slopes"),
], ids=str)  # fmt: skip
def test_order_free_is_for_plain_scores_up_to_128(call, got):
    message = f"schedule='order_free' supports plain scores without dropout up to head dim 128; got {got}"
    for mask in (dict(causal=True), dict(causal=False, window=(9, 0))):
        with pytest.raises(ValueError) as raised:
            schedule.resolve("order_free", **call, **mask)
        assert str(raised.value) == message
    assert schedule.resolve("order_free", head_dim=128, causal=True, attention_chunk=7) == "order_free"


def test_a_problem_of_wide_heads_has_the_policies_of_windows():
    with pytest.raises(ValueError, match="at head dims above 128, got 'shift'"):
        schedule.problem("shift", 300, 300, causal=False, head_dim=256)


def test_narrow_and_plain_heads_have_every_policy_of_their_mask():
    for head_dim, value_head_dim in ((128, 128), (8, 128), (96, 40)):
        for mask in (dict(causal=False), dict(causal=True), dict(causal=True, attention_chunk=4)):
            found = schedule.fitting(head_dim=head_dim, value_head_dim=value_head_dim, **mask)
            assert found == tuple(policy for policy in schedule.POLICIES if _schedule.fits(policy, **mask))


def test_add_order():
    square = schedule.problem("spt", 300, 300, head_dim=64, causal=True, tile_q=128, tile_k=128)
    assert schedule.add_order("spt", square) == [[0], [1, 0], [2, 1, 0]]
    more_queries = schedule.problem("descending", 600, 100, causal=True, tile_q=128, tile_k=128)
    assert schedule.add_order("descending", more_queries) == [[], [], [], [0], [0]], "rows that see no key"
    with pytest.raises(ValueError, match=r"head_dim must be in \[1, 257\), got 264"):
        schedule.problem("spt", 300, 300, head_dim=264, causal=True)


def test_problem_takes_the_kernels_tiles_and_clusters():
    for policy, cta_group in [("descending", 1), ("spt", 1), ("shift", 1)]:
        assert schedule.problem(policy, 100, 100, causal=False).cta_group == cta_group
    assert schedule.problem("symmetric_shift", 100, 100, causal=True).cta_group == 2
    tiles = schedule.problem("auto", 1000, 2000, causal=True, head_dim=40, heads=12, kv_heads=4, tile_k=32)
    assert (tiles.tile_q, tiles.tile_k) == (schedule.tile_shape(64)[0], 32)
    assert (tiles.kv_heads, tiles.group_size) == (4, 3)
    with pytest.raises(ValueError, match="heads must be a positive multiple of kv_heads=4, got 6"):
        schedule.problem("spt", 100, 100, causal=True, heads=6, kv_heads=4)

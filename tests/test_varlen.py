"""flash_attn_varlen_func and its packed forms on CPU tensors: each sequence as alone, and nothing outside of it."""

import random

import pytest
import torch
from float64_reference import attention_float64, error_limits
from interface_support import GRADIENTS, MASK, PACK, VARLEN_FUNCTIONS, assert_same_bits, kernel_calls
from mask_support import CAUSAL, FULL, name_of, public, window
from pack_support import Pack, int32, part_of, run, run_alone

from dash_attn import (
    _schedule,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from dash_attn.schedule import POLICIES, policy_number

MASKS = [FULL, CAUSAL, window(20, 7), window(33, -1, causal=True), window(-1, -1, 48, causal=True), window(0, 0)]
LENGTHS = [0, 1, 5, 63, 64, 65, 127, 129, 200]


def random_pack(seed, longest=200, **shape):
    """Lengths of all sizes, often 0; every other one with unused rows inside and around the sequences."""
    generator = random.Random(seed)

    def length():
        return min(longest, generator.choice(LENGTHS) if generator.random() < 0.7 else generator.randrange(longest))

    lengths = [(length(), length()) for _ in range(generator.randrange(1, 7))]
    shape = {"seed": seed, **shape}
    if seed % 2:
        shape["used"] = [tuple(generator.choice([n, generator.randint(0, n)]) for n in pair) for pair in lengths]
        shape |= {"first": generator.randrange(3), "tail": generator.randrange(40)}
    return Pack.of(lengths, **shape)


def assert_nothing_outside(pack, results):
    out, lse, dq, dk, dv = results
    rows_q, rows_k = pack.outside()
    assert not out[rows_q].any() and (lse[:, rows_q] == torch.inf).all() and not dq[rows_q].any()
    assert not dk[rows_k].any() and not dv[rows_k].any()


def assert_as_alone(pack, results, **arguments):
    for queries, keys in pack.sequences():
        found = part_of(results, queries, keys)
        assert_same_bits(found, run_alone(pack, queries, keys, **arguments))
    assert_nothing_outside(pack, results)


@pytest.mark.parametrize("mask", MASKS, ids=name_of)
@pytest.mark.parametrize("schedule", ["auto", *POLICIES])
def test_every_sequence_has_the_bits_that_it_has_alone(schedule, mask):
    if schedule != "auto" and not _schedule.fits(schedule, **mask):
        pytest.skip("the policy is not defined for this mask")
    for seed in range(4):
        heads = random.Random(seed).choice([(2, 2), (4, 2), (8, 1)])
        pack = random_pack(seed, heads=heads[0], kv_heads=heads[1], head_dim=random.Random(seed).choice([8, 64, 72]))
        arguments = {"schedule": schedule, **public(mask)}
        assert_as_alone(pack, run(pack, **arguments), **arguments)


def test_long_sequences_of_several_tiles():
    """Where splits, ranks and visits differ from one sequence to the next."""
    pack = Pack.of([(700, 700), (40, 900), (1, 1), (513, 300)], heads=8, kv_heads=2, head_dim=64, dtype=torch.float16)
    for schedule in ("descending", "spt", "order_free"):
        assert_as_alone(pack, run(pack, causal=True, schedule=schedule), causal=True, schedule=schedule)


@pytest.mark.parametrize("mask", MASKS, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_accuracy(dtype, mask):
    lengths = [(130, 130), (65, 200), (0, 30), (200, 65), (40, 0), (129, 129)]
    pack = Pack.of(lengths, tail=9, head_dim=64, dtype=dtype)
    results = run(pack, **public(mask))
    for queries, keys in pack.sequences():
        if queries.start == queries.stop or keys.start == keys.stop:
            continue
        tensors = [x[None, rows] for x, rows in ((pack.q, queries), (pack.k, keys), (pack.v, keys))]
        dout = pack.dout[None, queries]
        out, lse, *gradients = (x[None] for x in part_of(results, queries, keys))
        truth = attention_float64(*tensors, dout, **mask)
        limits = error_limits(truth, *tensors, dout, out, rounded_factors=False, **mask)
        for (name, limit), x in zip(limits.items(), (out, *gradients), strict=True):
            assert (x.double() - getattr(truth, name)).norm() <= limit, f"{name} of {queries}"
        torch.testing.assert_close(lse, truth.softmax_lse.float(), rtol=1e-5, atol=1e-5)
    assert_nothing_outside(pack, results)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 3e4])
@pytest.mark.parametrize("schedule", ["auto", "order_free"])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(20, 7)], ids=name_of)
def test_nothing_outside_of_a_sequence_reaches_it(mask, schedule, poison):
    """Neighbours, rows between sequences, before the first and behind the last."""
    pack = Pack.of(
        [(70, 90), (64, 40), (0, 50), (30, 130)], used=[(66, 70), (64, 40), (0, 20), (5, 128)], first=3, tail=20
    )
    arguments = {"schedule": schedule, **public(mask)}
    clean = run(pack, **arguments)
    for queries, keys in pack.sequences():
        tensors = {name: getattr(pack, name).clone() for name in ("q", "k", "v", "dout")}
        for name, x in tensors.items():
            own = queries if name in ("q", "dout") else keys
            x[: own.start] = x[own.stop :] = poison
        results = run(pack._replace(**tensors), **arguments)
        assert_same_bits(part_of(results, queries, keys), part_of(clean, queries, keys))
        assert_nothing_outside(pack, results)


def test_padding_as_people_make_it():
    """Batches padded at random places, unpadded into a pack, and padded again."""
    generator = torch.Generator().manual_seed(0)
    batch, seqlen, heads, head_dim = 5, 90, 4, 32
    padded = [torch.randn(batch, seqlen, heads, head_dim, generator=generator).bfloat16() for _ in range(4)]
    for kind in ("random", "full", "some empty", "prefix"):
        mask = torch.rand(batch, seqlen, generator=generator) < 0.6
        if kind == "full":
            mask.fill_(True)
        if kind == "some empty":
            mask[1] = mask[4] = False
        if kind == "prefix":
            mask = mask.sort(dim=1, descending=True).values
        indices = mask.flatten().nonzero().flatten()
        offsets = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
        *unpadded, dout = (x.flatten(0, 1)[indices] for x in padded)
        unpadded = [x.requires_grad_() for x in unpadded]
        longest = mask.sum(1).max()
        out = flash_attn_varlen_func(*unpadded, offsets, offsets, longest, int(longest), causal=True)
        found = (out, *torch.autograd.grad(out, unpadded, dout))
        again = [x.new_zeros(batch * seqlen, heads, head_dim).index_copy(0, indices, x) for x in found]
        again = [x.unflatten(0, (batch, seqlen)) for x in again]
        for b in range(batch):
            rows = [x[b][mask[b]] for x in padded]
            alone = run_alone(Pack(*rows, None, None, None, None), slice(None), slice(None), causal=True)
            assert_same_bits([x[b][mask[b]] for x in again], [alone[0], *alone[2:]])
            assert not any(x[b][~mask[b]].any() for x in again)


def test_offsets_filled_up_by_repeating_the_last():
    """As for a captured graph of fixed capacity: sequences of no length, and rows behind the last offset."""
    pack = Pack.of([(30, 30), (50, 50)], tail=60)
    filled = pack._replace(offsets_q=pack.offsets_q + [80] * 5, offsets_k=pack.offsets_k + [80] * 5)
    assert_same_bits(run(filled, causal=True), run(pack, causal=True))


def test_lengths_used_are_those_of_a_shorter_sequence():
    """The mask is aligned with the last row that is used, not with the last row that there is."""
    pack = Pack.of([(40, 60), (70, 70)], used=[(13, 37), (70, 1)])
    assert_as_alone(pack, run(pack, causal=True), causal=True)
    for side in ("used_q", "used_k"):
        assert_as_alone(one := pack._replace(**{side: None}), run(one, causal=True), causal=True)


@pytest.mark.parametrize("hint", [0, 1, 10**9, torch.tensor(70), torch.tensor(3, dtype=torch.int32)], ids=str)
def test_max_seqlen_changes_nothing(hint):
    pack = Pack.of([(70, 70), (3, 3)])
    q, k, v = pack[:3]
    expected = run(pack)[0]
    offsets = pack.offsets()[:2]
    assert torch.equal(flash_attn_varlen_func(q, k, v, *offsets, hint, hint), expected)


def packed_kv(pack):
    return torch.stack((pack.k, pack.v), dim=1).requires_grad_()


@pytest.mark.parametrize("head_dim", [32, 20])
def test_keys_and_values_in_one_tensor(head_dim):
    pack = random_pack(3, head_dim=head_dim)
    expected = run(pack, causal=True, window_size=(30, 0))
    q, kv = pack.q.detach().requires_grad_(), packed_kv(pack)
    out, lse, _ = flash_attn_varlen_kvpacked_func(
        q, kv, *pack.offsets(), causal=True, window_size=(30, 0), return_attn_probs=True, **pack.used()
    )
    dq, dkv = torch.autograd.grad(out, (q, kv), pack.dout)
    assert_same_bits((out, lse, dq, *dkv.unbind(1)), expected)


@pytest.mark.parametrize("head_dim", [32, 20])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("used", [None, [(20, 20), (0, 0), (64, 64)]])
def test_queries_keys_and_values_in_one_tensor(used, heads, kv_heads, head_dim):
    lengths = [(33, 33), (0, 0), (70, 70)]
    pack = Pack.of(lengths, used=used, tail=5, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    out, lse, dq, dk, dv = run(pack, causal=True)
    by_heads = heads != kv_heads
    qkv = (torch.cat if by_heads else torch.stack)((pack.q, pack.k, pack.v), dim=1).requires_grad_()
    arguments = {"num_heads_q": heads} if by_heads else {}
    offsets, seqused = int32(pack.offsets_q), None if used is None else int32(pack.used_q)
    actual, actual_lse, _ = flash_attn_varlen_qkvpacked_func(
        qkv, offsets, 70, causal=True, return_attn_probs=True, seqused=seqused, **arguments
    )
    (gradient,) = torch.autograd.grad(actual, qkv, pack.dout)
    expected = (torch.cat if by_heads else torch.stack)((dq, dk, dv), dim=1)
    assert_same_bits((actual, actual_lse, gradient), (out, lse, expected))


def test_return_attn_probs():
    pack = random_pack(1)
    out, lse, dropped = flash_attn_varlen_func(*pack[:3], *pack.offsets(), return_attn_probs=True, **pack.used())
    assert torch.equal(out, flash_attn_varlen_func(*pack[:3], *pack.offsets(), **pack.used()))
    assert lse.shape == (4, pack.q.shape[0]) and lse.dtype == torch.float32 and not lse.requires_grad
    assert dropped.shape == (0,) and dropped.dtype == out.dtype


@pytest.mark.parametrize("softmax_scale", [0.3, -0.3, 0.0])
def test_softmax_scale(softmax_scale):
    pack = random_pack(1)
    arguments = {"softmax_scale": softmax_scale, "causal": True}
    assert_as_alone(pack, run(pack, **arguments), **arguments)


def test_strided_inputs():
    pack = random_pack(5)
    expected = run(pack)
    for relay in (
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
        lambda x: torch.nn.functional.pad(x, (3, 2))[..., 3:-2],
        lambda x: torch.stack((x, x), dim=1)[:, 1],
    ):
        relaid = pack._replace(**{name: relay(getattr(pack, name)) for name in ("q", "k", "v", "dout")})
        assert_same_bits(run(relaid), expected)


@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(0, 5), (0, 7)], [(5, 0), (7, 0)], [(0, 5), (5, 0)]], ids=str)
@pytest.mark.parametrize("tail", [0, 3])
def test_empty_sums(lengths, tail):
    pack = Pack.of(lengths, tail=tail)
    out, lse, dq, dk, dv = run(pack, causal=True)
    assert out.shape == pack.q.shape and lse.shape == (4, pack.q.shape[0]) and (lse == torch.inf).all()
    for x, like in ((out, pack.q), (dq, pack.q), (dk, pack.k), (dv, pack.v)):
        assert x.shape == like.shape and not x.any()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("function", VARLEN_FUNCTIONS, ids=lambda f: f.__name__)
def test_what_reaches_the_kernels(function):
    """The tensors themselves: nobody reads them before, nor copies them."""
    pack = Pack.of([(30, 30), (40, 40)], heads=2, kv_heads=2)
    offsets_q, offsets_k, used_q, used_k = int32(pack.offsets_q), int32(pack.offsets_k), int32([3, 4]), int32([5, 6])
    qkv = torch.stack((pack.q, pack.k, pack.v), dim=1).requires_grad_()
    given = {
        flash_attn_varlen_func: (qkv[:, 0], qkv[:, 1], qkv[:, 2], offsets_q, offsets_k, 40, 40),
        flash_attn_varlen_kvpacked_func: (qkv[:, 0], qkv[:, 1:], offsets_q, offsets_k, 40, 40),
        flash_attn_varlen_qkvpacked_func: (qkv, offsets_q, 40),
    }[function]
    if function is flash_attn_varlen_qkvpacked_func:
        expected, used = [offsets_q, offsets_q, used_q, used_q], {"seqused": used_q}
    else:
        expected, used = [offsets_q, offsets_k, used_q, used_k], {"seqused_q": used_q, "seqused_k": used_k}
    arguments = {"softmax_scale": 0.3, "window_size": (7, 2), "attention_chunk": 16, "sm_margin": 3}
    with kernel_calls() as calls:
        out = function(*given, **arguments, **used)
        torch.autograd.grad(out.float().sum(), qkv)
    (_, forward), (_, backward) = calls
    for given in (forward, backward):
        assert [given[name].data_ptr() for name in PACK] == [x.data_ptr() for x in expected]
        assert [given[name] for name in ("softmax_scale", *MASK, "sm_margin")] == [0.3, False, 7, 2, 16, 3]
    assert backward["schedule"] == policy_number("descending")


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_packed_gradients_are_written_into_one_tensor():
    qkv = torch.randn(40, 3, 4, 16).bfloat16().requires_grad_()
    with kernel_calls() as calls:
        out = flash_attn_varlen_qkvpacked_func(qkv, int32([0, 15, 40]), 25)
        (gradient,) = torch.autograd.grad(out.float().square().sum(), qkv)
    _, arguments = calls[-1]
    assert [arguments[name].data_ptr() for name in GRADIENTS] == [g.data_ptr() for g in gradient.unbind(1)]


def test_second_differentiation_raises():
    x = torch.randn(20, 2, 16).bfloat16().requires_grad_()
    offsets = int32([0, 8, 20])
    out = flash_attn_varlen_func(x, x, x, offsets, offsets, 12, 12)
    (gradient,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="^attention must be differentiated at most once"):
        torch.autograd.grad(gradient.float().sum(), x)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "seqused_k"])
def test_changing_lengths_before_the_backward_is_noticed(name):
    x = torch.randn(20, 2, 16).bfloat16().requires_grad_()
    lengths = {"cu_seqlens_q": int32([0, 8, 20]), "cu_seqlens_k": int32([0, 8, 20]), "seqused_k": int32([8, 9])}
    out = flash_attn_varlen_func(x, x, x, max_seqlen_q=12, max_seqlen_k=12, **lengths)
    lengths[name][1] = 7
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()

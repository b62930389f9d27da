"""Packs: each sequence has the bits that it has alone, whatever lies around it."""

import dataclasses
import itertools
import math
import random

import gpu_support as support
import pack_checks
import pytest
import torch
from gpu_support import GRADIENTS, Problem
from gradient_check import Bar
from pack_checks import (
    MASKS,
    Pack,
    Pool,
    Rows,
    accuracy_failures,
    assert_as_alone,
    make_pack,
    pack_of_lengths,
    random_pack,
    varlen_attention,
)
from products import pairwise, spread

PACKS = 200  # of each kind of mask, so of each policy at least
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# heads, kv_heads, head_dim, dtype. The group of 16 is split over work tiles, in long sequences.
HEADS = (
    (4, 4, 64, "bf16"),
    (4, 4, 128, "bf16"),
    (8, 2, 64, "fp16"),
    (8, 2, 128, "bf16"),
    (6, 1, 128, "fp16"),
    (16, 1, 64, "bf16"),
    (2, 2, 100, "bf16"),
    (4, 1, 40, "fp16"),
)
KINDS = pytest.mark.parametrize("kind", MASKS)
HEAD_DIMS = pytest.mark.parametrize("head_dim", (64, 96, 128))


def problem_of(heads: int, kv_heads: int, head_dim: int, dtype: str = "bf16", **mask) -> Problem:
    """What the sequences of a pack have in common."""
    plain = Problem(1, 0, 0, heads, kv_heads, head_dim, causal=False, dtype=DTYPES[dtype])
    return dataclasses.replace(plain, **mask)


def everything(problem: Problem) -> list[str]:
    return ["auto", *support.policies(problem)]


def some_masks(kind: str, number: int) -> list[dict]:
    """At most three, others for other numbers."""
    masks = MASKS[kind]
    return [masks[(3 * number + i) % len(masks)] for i in range(min(3, len(masks)))]


@pytest.mark.parametrize("number", range(len(HEADS)), ids=lambda number: "-".join(map(str, HEADS[number])))
@KINDS
def test_random_packs(kind, number, device):
    """Lengths, places, gaps, `seqused`, `max_seqlen`, the neighbours and what is poisoned are all up to chance."""
    chance = random.Random(f"{kind} {number}")
    pools = [Pool(problem_of(*HEADS[number], **mask), device) for mask in some_masks(kind, number)]
    for i in range(PACKS // len(HEADS)):
        pool = pools[i % len(pools)]
        pack = random_pack(pool, chance)
        found = {policy: varlen_attention(pack, policy) for policy in everything(pool.problem)}
        assert_as_alone(pack, found, f"(number {i})")


ACCURACY_LENGTHS = (
    (63, 64), (0, 0), (1, 1), (1000, 65), (127, 129), (0, 64), (129, 0), (64, 1000), (1, 127), (65, 63), (1000, 1000),
)  # fmt: skip


@pytest.mark.parametrize(
    "kind, head_dim, dtype, heads", spread(itertools.product(MASKS, (64, 96, 128), DTYPES), ((4, 4), (6, 2))), ids=str
)
def test_accuracy(kind, head_dim, dtype, heads, device):
    for mask in some_masks(kind, head_dim // 64):
        pool = Pool(problem_of(*heads, head_dim, dtype, **mask), device)
        pack = pack_of_lengths(pool, ACCURACY_LENGTHS)
        lines = accuracy_failures(pack, {name: varlen_attention(pack, name) for name in everything(pool.problem)})
        assert not lines, f"{pack}:\n" + "\n".join(lines)


# Every kernel; windows have one, and each of them one head dim.
@pytest.mark.parametrize(
    "mask, head_dim",
    [
        *itertools.product((MASKS["full"][0], MASKS["causal"][0]), (64, 96, 128)),
        *spread(((mask,) for mask in MASKS["window"]), (64, 96, 128)),
    ],
    ids=str,
)
def test_accuracy_of_a_long_sequence_among_short_ones(mask, head_dim, device):
    pool = Pool(problem_of(2, 1, head_dim, **mask), device)
    pack = pack_of_lengths(pool, ((64, 64), (4096, 4096), (129, 1), (1000, 4096)))
    lines = accuracy_failures(pack, {name: varlen_attention(pack, name) for name in ("auto", "order_free", "spt")})
    assert not lines, f"{pack}:\n" + "\n".join(lines)


# Sequences of queries alone, of keys alone, of neither; rows that no sequence has.
EMPTY = {
    "no tokens": ((0, 0), (0, 0), (0, 0)),
    "queries alone": ((70, 0), (0, 0), (130, 0)),
    "keys alone": ((0, 65), (0, 1), (0, 300)),
    "one of neither": ((0, 0),),
    "never both": ((70, 0), (0, 129), (1, 0)),
}


@pytest.mark.parametrize("kind, empty, rows", pairwise(MASKS, EMPTY, ("no rows outside", "rows outside")))
def test_rows_that_see_nothing(kind, empty, rows, device):
    outside = 0 if rows == "no rows outside" else 150
    for head_dim, mask in itertools.product((64, 96, 128), some_masks(kind, 0)):
        pool = Pool(problem_of(4, 2, head_dim, **mask), device)
        layouts = []
        for lengths in zip(*EMPTY[empty]):
            starts = tuple(itertools.accumulate(lengths, initial=0))
            layouts.append(Rows(starts[-1] + outside, starts, lengths))
        pack = make_pack([pool.get(*lengths) for lengths in EMPTY[empty]], *layouts)
        for policy in everything(pool.problem):
            found = varlen_attention(pack, policy)
            assert found["softmax_lse"].isposinf().all(), f"{pack} {policy}: softmax_lse"
            wrong = [name for name in ("out", *GRADIENTS) if found[name].any()]
            assert not wrong, f"{pack} {policy}: {wrong} must be 0"


@HEAD_DIMS
@KINDS
def test_rows_outside_every_sequence(kind, head_dim, device):
    """Before, between and behind them: zeros, whatever is there and whatever the results were before."""
    pool = Pool(problem_of(4, 2, head_dim, **MASKS[kind][0]), device)
    sequences = [pool.get(*lengths) for lengths in ((70, 129), (0, 64), (300, 1), (129, 0), (200, 333))]
    rows_q = Rows(2000, (100, 190, 500, 1111, 1300, 1777), (70, 0, 300, 129, 200))
    rows_k = Rows(1500, (3, 132, 300, 301, 700, 1499), (129, 64, 1, 0, 333))
    pack = make_pack(sequences, rows_q, rows_k)
    outside_q, outside_k = (torch.ones(rows.total, dtype=torch.bool, device=device) for rows in (rows_q, rows_k))
    for rows, outside in ((rows_q, outside_q), (rows_k, outside_k)):
        for place in rows.places():
            outside[place] = False
    for policy in everything(pool.problem):
        found = varlen_attention(pack, policy)
        assert found["softmax_lse"][:, outside_q].isposinf().all(), f"{pack} {policy}: softmax_lse"
        for name, rows in (("out", outside_q), ("dq", outside_q), ("dk", outside_k), ("dv", outside_k)):
            assert not found[name][rows].any(), f"{pack} {policy}: {name} must be 0"
        assert_as_alone(pack, {policy: found})


@HEAD_DIMS
@KINDS
def test_the_backward_reads_no_output_outside_the_sequences(kind, head_dim, device):
    """The op is given `out` and `softmax_lse`, and their rows outside the sequences may be anything too."""
    pool = Pool(problem_of(4, 2, head_dim, **MASKS[kind][0]), device)
    problem = pool.problem
    sequences = [pool.get(*lengths) for lengths in ((70, 129), (300, 65), (200, 333))]
    rows_q, rows_k = Rows(900, (50, 150, 500, 777), (70, 300, 200)), Rows(700, (3, 132, 300, 650), (129, 65, 333))
    pack = make_pack(sequences, rows_q, rows_k)
    lengths = {name: getattr(pack, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")}
    arguments = {**problem.op_arguments, **lengths}
    for policy, value in itertools.product(everything(problem), (math.nan, -math.inf, 3e38)):
        out, softmax_lse = torch.ops.dash_attn.forward(pack.q, pack.k, pack.v, **arguments)
        inside = torch.zeros(rows_q.total, dtype=torch.bool, device=device)
        for place in rows_q.places():
            inside[place] = True
        garbled = out.masked_fill(~inside[:, None, None], value), softmax_lse.masked_fill(~inside, value)
        gradients = [torch.full_like(x, math.nan) for x in (pack.q, pack.k, pack.v)]
        torch.ops.dash_attn.backward(
            pack.dout, pack.q, pack.k, pack.v, *garbled, *gradients, **arguments, schedule=policy, sm_margin=0
        )
        found = dict(out=out, softmax_lse=softmax_lse, **dict(zip(GRADIENTS, gradients)))
        assert_as_alone(pack, {policy: found}, f"with {value} in out and softmax_lse outside")


@HEAD_DIMS
@KINDS
def test_same_bits_under_load(kind, head_dim, perturbation, device):
    pool = Pool(problem_of(8, 2, head_dim, **MASKS[kind][-1]), device)
    pack = pack_of_lengths(pool, ((1000, 1000), (64, 129), (1, 65), (0, 0), (129, 1000), (1000, 127)))
    for policy in everything(pool.problem):
        for first in range(0, 48, 8):
            perturbation.enqueue(16)
            results = []
            for _ in range(8):
                perturbation.move_allocations()
                results.append(varlen_attention(pack, policy))
            for call, found in enumerate(results, first):
                assert_as_alone(pack, {policy: found}, f"call {call}")


@pytest.mark.alone
@HEAD_DIMS
@pytest.mark.parametrize("mask", (MASKS["full"][0], MASKS["causal"][0], dict(causal=False, window=(9, 9))), ids=str)
def test_8192_sequences_of_34_tokens(mask, head_dim, device):
    problem = Problem(8192, 34, 34, 4, 2, head_dim, causal=False)
    problem = dataclasses.replace(problem, **mask)
    tensors = support.random_qkv_dout(problem, device)
    pool = Pool(dataclasses.replace(problem, batch=1), device)
    starts = tuple(range(0, 34 * 8192 + 1, 34))
    rows = Rows(starts[-1], starts, (34,) * 8192)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    packed = [x.flatten(0, 1) for x in tensors]
    pack = Pack([pool.get(34, 34)] * 8192, rows, rows, *packed, cu_seqlens, cu_seqlens, None, None, 34, 34)
    sampled = random.Random(0).sample(range(8192), 8)
    for policy in everything(problem):
        found = varlen_attention(pack, policy)
        batch = pack_checks.dense_attention(problem, policy, *tensors)
        batch = {name: x.transpose(0, 1) if name == "softmax_lse" else x for name, x in batch.items()}
        expected = {name: x.reshape(found[name].shape) for name, x in batch.items()}
        support.assert_same_bits(found, expected, f"{problem} {policy}, packed and as a batch")
        for place in sampled:
            alone = pack_checks.dense_attention(pool.get(34, 34).problem, policy, *(x[place, None] for x in tensors))
            own = {name: x[None] for name, x in pack_checks.own_rows(pack, found, place).items()}
            support.assert_same_bits(own, alone, f"{problem} {policy}, sequence {place} alone")
    few = dataclasses.replace(problem, batch=8)
    q, k, v, dout = (x[:8] for x in tensors)
    own = {name: x[: 8 * 34].view(8, 34, *x.shape[1:]) for name, x in found.items() if name != "softmax_lse"}
    softmax_lse = found["softmax_lse"][:, : 8 * 34].unflatten(1, (8, 34)).transpose(0, 1)
    bar = Bar(few, support.Inputs(dout, q, k, v, own["out"], softmax_lse))
    lines = bar.failures(own) + bar.lse_failures(softmax_lse)
    assert not lines, f"{problem}:\n" + "\n".join(lines)


@HEAD_DIMS
@pytest.mark.parametrize("mask", (MASKS["full"][0], MASKS["causal"][0], dict(causal=True, window=(4095, 0))), ids=str)
def test_a_long_sequence_among_2000_short_ones(mask, head_dim, device):
    pool = Pool(problem_of(2, 1, head_dim, **mask), device)
    chance = random.Random(0)
    short = [(chance.randint(0, 120), chance.randint(0, 120)) for _ in range(60)]
    for place in (0, 1000, 2000):
        lengths = [chance.choice(short) for _ in range(2000)]
        lengths.insert(place, (32768, 32768))
        pack = pack_of_lengths(pool, lengths)
        for policy in everything(pool.problem):
            assert_as_alone(pack, {policy: varlen_attention(pack, policy)}, f"the long one at place {place}")


@HEAD_DIMS
@KINDS
def test_sm_margin_changes_no_bits(kind, head_dim, device, num_sms):
    pool = Pool(problem_of(8, 2, head_dim, **MASKS[kind][-1]), device)
    chance = random.Random(head_dim)
    pack = random_pack(pool, chance, most=20)
    while sum(pack.rows_q.lengths) < 1500:
        pack = random_pack(pool, chance, most=20)
    for policy in everything(pool.problem):
        fewest = 2 if support.needs_clusters(policy) else 1
        for sm_margin in (1, 7, num_sms // 2, num_sms - 3, num_sms - fewest):
            assert_as_alone(pack, {policy: varlen_attention(pack, policy, sm_margin)}, f"{sm_margin=}")

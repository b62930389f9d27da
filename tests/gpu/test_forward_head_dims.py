"""The forward at head dims above 128 and of unequal pairs, where it has other tiles and fewer places for them."""

import dataclasses
import itertools
import math

import gpu_support as support
import gradient_check
import pytest
import torch
from gpu_load import Perturbation
from gpu_support import GuardedTensor, Problem
from products import pairwise, spread

from dash_attn._schedule import forward_tile_shape

ROWS = [(192, 128), (192, 192), (256, 256)]
# Pairs that are padded to one of those.
PADDED = [(136, 64), (24, 136), (200, 8), (256, 128), (64, 256), (128, 192), (8, 248)]
DIMS = pytest.mark.parametrize("head_dims", ROWS, ids=str)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Around tiles of 80 and 128, queries and keys.
LENGTHS = [(1, 1), (1, 700), (64, 80), (63, 81), (65, 127), (128, 128), (129, 129), (300, 160), (160, 300), (515, 1023)]
MASKS = {
    "full": dict(causal=False),
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(100, 0)),
    "narrow window": dict(causal=False, window=(3, 2)),
    "wide window": dict(causal=False, window=(300, 400)),
    "chunk": dict(causal=True, attention_chunk=100),
}
MASK = pytest.mark.parametrize("mask", MASKS)
# Every kernel, of which windows have one; the other windows with either dtype in turn.
KERNELS = ("full", "causal", "window")
EVERY_KERNEL = pytest.mark.parametrize(
    "head_dims, mask, dtype",
    [
        *itertools.product(ROWS, KERNELS, DTYPES),
        *spread(itertools.product(ROWS, [mask for mask in MASKS if mask not in KERNELS]), DTYPES),
    ],
    ids=str,
)
REPEATS = 50


def problem_of(head_dims, shape, dtype=torch.bfloat16, **options) -> Problem:
    return Problem(*shape, head_dims[0], dtype=dtype, value_head_dim=head_dims[1], **options)


def outputs_of(problem: Problem, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    inputs = support.random_inputs(problem, device, seed)
    return {"out": inputs.out, "softmax_lse": inputs.softmax_lse}


def assert_accurate(problem: Problem, device: str) -> None:
    inputs = support.random_inputs(problem, device)
    bar = gradient_check.Bar(problem, inputs)
    lines = bar.failures({"out": inputs.out}) + bar.lse_failures(inputs.softmax_lse)
    assert not lines, f"{problem}:\n" + "\n".join(lines)


@EVERY_KERNEL
def test_accuracy(head_dims, dtype, mask, device):
    for (seqlen_q, seqlen_k), heads in itertools.product(LENGTHS, ((4, 4), (6, 2), (8, 1))):
        shape = (2, seqlen_q, seqlen_k, *heads)
        assert_accurate(problem_of(head_dims, shape, DTYPES[dtype], **MASKS[mask]), device)


# Half of the masks for each pair, the other half for the next one.
OF_PADDED = pytest.mark.parametrize(
    "head_dims, mask",
    [(dims, mask) for i, dims in enumerate(PADDED) for j, mask in enumerate(MASKS) if (i + j) % 2 == 0],
    ids=str,
)


@OF_PADDED
def test_accuracy_of_padded_head_dims(head_dims, mask, device):
    for lengths in ((1, 5), (130, 200), (300, 130)):
        assert_accurate(problem_of(head_dims, (2, *lengths, 4, 2), **MASKS[mask]), device)


def with_scores(*scores: dict) -> list[tuple]:
    """Head dims, mask, scores. The mask that has a kernel of its own beside a softcap, at 256, is among them."""
    cases, own = pairwise(ROWS, MASKS, scores), ((256, 256), "causal", dict(softcap=2.0))
    return cases if own in cases else [own, *cases]


@pytest.mark.parametrize(
    "head_dims, mask, scores", with_scores(dict(softcap=2.0), dict(alibi="heads"), dict(alibi="sequences"), {}), ids=str
)
def test_accuracy_of_scores_and_sinks(head_dims, mask, scores, device):
    for lengths, sinks in itertools.product(((130, 200), (300, 130), (515, 515)), (False, True)):
        assert_accurate(problem_of(head_dims, (2, *lengths, 8, 2), **MASKS[mask], **scores, sinks=sinks), device)


@MASK
@DIMS
def test_writes_its_outputs_and_nothing_else(head_dims, mask, device):
    for lengths, strided in itertools.product(((1, 5), (130, 200), (257, 257), (300, 100)), (False, True)):
        problem = problem_of(head_dims, (2, *lengths, 8, 2), **MASKS[mask])
        q, k, v, dout = support.random_qkv_dout(problem, device)
        expected = outputs_of(problem, device)
        make = GuardedTensor.strided if strided else GuardedTensor.contiguous
        out = make(tuple(dout.shape), q.dtype, device)
        lse = GuardedTensor.contiguous(tuple(expected["softmax_lse"].shape), torch.float32, device)
        torch.ops.dash_attn_C.forward(q, k, v, out.tensor, lse.tensor, **problem.op_arguments, sm_margin=0)
        support.assert_same_bits({"out": out.tensor, "softmax_lse": lse.tensor}, expected, f"{problem}, {strided=}")
        for name, guarded in (("out", out), ("softmax_lse", lse)):
            assert guarded.writes_outside().item() == 0, f"{problem}, {strided=}: wrote outside {name}"


# Of many tiles a CTA, so that those of one follow those of another: short ones, of one KV tile or none, and longer.
@pytest.mark.parametrize(
    "head_dims, mask, lengths", pairwise(ROWS, MASKS, [(300, 70), (300, 150), (700, 700), (2049, 2049)]), ids=str
)
def test_calls_under_load(head_dims, mask, lengths, device):
    problem = problem_of(head_dims, (4, *lengths, 32, 8), **MASKS[mask])
    inputs = support.random_inputs(problem, device)
    expected = {"out": inputs.out, "softmax_lse": inputs.softmax_lse}
    support.assert_finite({"out": inputs.out}, str(problem))
    load = Perturbation()
    load.enqueue(REPEATS)
    for call in range(REPEATS):
        load.move_allocations()
        out, lse = support.forward(problem, inputs.q, inputs.k, inputs.v, sm_margin=call % 5)
        support.assert_same_bits({"out": out, "softmax_lse": lse}, expected, f"{problem}, call {call}")
    load.stop()


@MASK
@DIMS
def test_a_sequence_has_the_bits_that_it_has_alone(head_dims, mask, device):
    """In a batch, and in a pack with rows of no sequence."""
    lengths = [(70, 90), (0, 40), (300, 160), (5, 0), (129, 515), (1, 1)]
    totals = [sum(side) + 20 for side in zip(*lengths)]
    problem = problem_of(head_dims, (1, *totals, 8, 2), **MASKS[mask])
    q, k, v, _ = support.random_qkv_dout(problem, device)
    offsets = [list(itertools.accumulate(side, initial=7)) for side in zip(*lengths)]
    cu_seqlens = [torch.tensor(side, dtype=torch.int32, device=device) for side in offsets]
    arguments = dict(problem.op_arguments, cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1])
    out, lse = torch.ops.dash_attn.forward(q[0], k[0], v[0], **arguments)
    for number, (seqlen_q, seqlen_k) in enumerate(lengths):
        queries = slice(offsets[0][number], offsets[0][number] + seqlen_q)
        keys = slice(offsets[1][number], offsets[1][number] + seqlen_k)
        alone = dataclasses.replace(problem, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        of_one = support.forward(alone, q[:, queries], k[:, keys], v[:, keys])
        expected = {"out": of_one[0][0], "softmax_lse": of_one[1][0]}
        found = {"out": out[queries], "softmax_lse": lse[:, queries]}
        support.assert_same_bits(found, expected, f"{problem}, sequence {number}")
        several = [x[:, rows].repeat(3, 1, 1, 1) for x, rows in ((q, queries), (k, keys), (v, keys))]
        batch = dataclasses.replace(alone, batch=3)
        of_three = support.forward(batch, *several)
        for place in range(3):
            found = {"out": of_three[0][place], "softmax_lse": of_three[1][place]}
            support.assert_same_bits(found, expected, f"{batch}, place {place}")
    assert not out[:7].any() and lse[:, :7].isposinf().all()


@DIMS
def test_rows_are_not_spoilt_by_values_in_kv_tiles_they_do_not_see(head_dims, device):
    _, kv_tile = forward_tile_shape(*head_dims)
    for shape in ((2, 1000, 1000, 2, 2), (2, 129, 193, 2, 2), (2, 20, 600, 8, 1)):
        problem = problem_of(head_dims, shape, causal=True)
        q, k, v, _ = support.random_qkv_dout(problem, device)
        clean = dict(zip(("out", "softmax_lse"), support.forward(problem, q, k, v)))
        diagonal = problem.seqlen_k - problem.seqlen_q
        keys = kv_tile, problem.seqlen_k // 2, problem.seqlen_k - 1
        for key, value in itertools.product(keys, (math.nan, math.inf)):
            spoilt = v.clone()
            spoilt[:, key, :, 5] = value
            out, lse = support.forward(problem, q, k, spoilt)
            what = f"{problem}, {value} in v at key {key}"
            assert not out[:, max(0, key - diagonal) :, :, 5].isfinite().any(), what
            blind = max(0, key // kv_tile * kv_tile - diagonal)  # rows that see no key of the tile
            support.assert_same_bits({"out": out[:, :blind]}, {"out": clean["out"][:, :blind]}, what)
            support.assert_same_bits({"softmax_lse": lse}, {"softmax_lse": clean["softmax_lse"]}, what)

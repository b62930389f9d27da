"""Softcap, ALiBi, sinks and the gradient of the log-sum-exp, beside windows, packs and grouped heads: accuracy and the
bit contract."""

import dataclasses
import itertools
import random

import gpu_support as support
import gradient_check
import pack_checks
import pytest
import score_checks
import torch
from bit_checks import check_sm_margins, check_under_load
from gpu_support import Problem
from pack_checks import Pool, assert_as_alone, pack_of_lengths, random_pack, varlen_attention
from score_checks import SCORES

import dash_attn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KIND = pytest.mark.parametrize("kind", SCORES)
HEAD_DIMS = pytest.mark.parametrize("head_dims", ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)), ids=str)
MASKS = {
    "full": dict(causal=False),
    "causal": dict(causal=True),
    "window": dict(causal=False, window=(127, 0)),
    "chunk": dict(causal=True, attention_chunk=100),
}
# Each kind of scores under each mask, at 64 and at 128 in turn. Several kinds share each kernel (softcap, ALiBi, none),
# so that it is run at both. Elsewhere each kind under one mask, another one for other head dims.
PRODUCTS = [
    (kind, mask, ((64, 64), (128, 128))[(i + j) % 2]) for i, kind in enumerate(SCORES) for j, mask in enumerate(MASKS)
] + [
    (kind, list(MASKS)[(i + j) % len(MASKS)], head_dims)
    for i, head_dims in enumerate(((96, 96), (192, 128), (192, 192), (256, 256), (80, 256)))
    for j, kind in enumerate(SCORES)
]
PRODUCT = pytest.mark.parametrize("kind, mask, head_dims", PRODUCTS, ids=str)
# The kinds that are all of a score's features at once, and every one at 64 and 128.
OF_HEADS = [
    (kind, head_dims)
    for kind in SCORES
    for head_dims in ((64, 64), (128, 128), (96, 96), (192, 128), (256, 256))
    if head_dims in ((64, 64), (128, 128)) or "sinks, log-sum-exp" in kind
]
PROBLEMS = 24  # of each kind of scores and each dtype
CALLS, CALLS_IN_FLIGHT = 40, 8


def problem_of(head_dims: tuple[int, int], *shape: int, **options) -> Problem:
    """`shape`: as Problem's fields before the head_dim."""
    return Problem(*shape, head_dims[0], value_head_dim=head_dims[1], **dict(dict(causal=False), **options))


def everything(problem: Problem) -> list[str]:
    return ["auto", *support.policies(problem)]


@pytest.mark.parametrize("dtype", DTYPES)
@KIND
def test_accuracy_of_products_of_features(kind, dtype, device):
    chance = random.Random(f"{kind} {dtype}")
    problems = (score_checks.random_problem(kind, chance, DTYPES[dtype]) for _ in range(PROBLEMS))
    lines = gradient_check.check_together(problems, device, everything)
    assert not lines, "\n".join(lines)


@PRODUCT
def test_accuracy_over_many_tiles(kind, mask, head_dims, device):
    problem = problem_of(head_dims, 1, 2049, 2500, 4, 2, **MASKS[mask], **SCORES[kind])
    lines = score_checks.accuracy_failures(problem, device, everything(problem))
    assert not lines, "\n".join(lines)


@PRODUCT
def test_same_bits_under_load(kind, mask, head_dims, perturbation, device, num_sms):
    problem = problem_of(head_dims, 2, 1100, 1100, 16, 4, **MASKS[mask], **SCORES[kind])
    inputs = support.random_inputs(problem, device)
    check_under_load(inputs, problem, perturbation, CALLS, CALLS_IN_FLIGHT)
    check_sm_margins(inputs, problem, num_sms, (1, 7, num_sms // 2))


@PRODUCT
def test_packed_as_alone(kind, mask, head_dims, device):
    """Whatever lies around a sequence; the gradient of sinks is the sum over the sequences, in their order."""
    problem = problem_of(head_dims, 1, 0, 0, 8, 2, **MASKS[mask], **SCORES[kind])
    pool, chance = Pool(problem, device), random.Random(f"{kind} {mask} {head_dims}")
    for i in range(6):
        pack = random_pack(pool, chance, spoilt=0.0)
        found = {policy: varlen_attention(pack, policy) for policy in everything(problem)}
        assert_as_alone(pack, found, f"(number {i})")


@PRODUCT
def test_accuracy_of_packs(kind, mask, head_dims, device):
    problem = problem_of(head_dims, 1, 0, 0, 6, 2, **MASKS[mask], **SCORES[kind])
    lengths = ((63, 64), (0, 0), (1000, 65), (127, 129), (0, 64), (129, 0), (64, 1000), (1, 127), (1000, 1000))
    pack = pack_of_lengths(Pool(problem, device), lengths)
    lines = pack_checks.accuracy_failures(pack, {name: varlen_attention(pack, name) for name in everything(problem)})
    assert not lines, f"{pack}:\n" + "\n".join(lines)


@pytest.mark.parametrize("kind, head_dims", OF_HEADS, ids=str)
def test_bits_are_the_sequences_and_the_heads_own(kind, head_dims, device):
    for mask, lengths in itertools.product(MASKS.values(), ((515, 515), (300, 700), (700, 300))):
        problem = problem_of(head_dims, 3, *lengths, 8, 2, **mask, **SCORES[kind])
        score_checks.check_batch_and_alone(problem, device, everything(problem))
        score_checks.check_heads(problem, device, everything(problem))


@HEAD_DIMS
def test_queries_without_keys(head_dims, device):
    for lengths in ((300, 100), (130, 1), (70, 0)):
        problem = problem_of(head_dims, 2, *lengths, 4, 2, causal=True, sinks=True, lse_gradient=True)
        for softcap, alibi in ((0.0, ""), (20.0, ""), (0.0, "sequences")):
            problem = dataclasses.replace(problem, softcap=softcap, alibi=alibi)
            score_checks.check_queries_without_keys(problem, device)


@HEAD_DIMS
def test_merging_two_partial_attentions(head_dims, device):
    for lengths, dtype in itertools.product(((300, 700), (129, 65)), DTYPES.values()):
        lines = score_checks.merging_failures(problem_of(head_dims, 2, *lengths, 4, 2, dtype=dtype), device)
        assert not lines, "\n".join(lines)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64), ids=str)
def test_the_sinks_gradient_has_their_dtype(dtype, device):
    problem = Problem(2, 300, 420, 8, 2, 64, causal=True, sinks=True)
    tensors, scores = support.random_qkv_dout(problem, device), support.random_scores(problem, device)
    sinks = scores.sinks.bfloat16().to(dtype)
    found = pack_checks.dense_attention(problem, "auto", *tensors, scores._replace(sinks=sinks))
    exact = pack_checks.dense_attention(problem, "auto", *tensors, scores._replace(sinks=sinks.float()))
    assert found["dsinks"].dtype == dtype and torch.equal(found["dsinks"], exact["dsinks"].to(dtype))
    names = [name for name in exact if name != "dsinks"]
    support.assert_same_bits({name: found[name] for name in names}, {name: exact[name] for name in names}, str(problem))


@HEAD_DIMS
def test_sinks_far_from_the_scores(head_dims, device):
    """Far below they are none, far above they take everything; nothing overflows."""
    problem = problem_of(head_dims, 2, 300, 420, 4, 2, causal=True, sinks=True)
    tensors, scores = support.random_qkv_dout(problem, device), support.random_scores(problem, device)
    plain = pack_checks.dense_attention(dataclasses.replace(problem, sinks=False), "auto", *tensors)
    for sink in (-1e4, -200.0, 200.0, 1e4, 3e38, torch.inf):
        sinks = torch.full_like(scores.sinks, sink)
        found = pack_checks.dense_attention(problem, "auto", *tensors, scores._replace(sinks=sinks))
        finite = {name: x for name, x in found.items() if sink < torch.inf or name != "softmax_lse"}
        support.assert_finite(finite, f"{problem}, sinks of {sink}")
        if sink < 0:
            for name, x in plain.items():
                assert torch.allclose(found[name], x, rtol=1e-2, atol=1e-4), f"{problem}, sinks of {sink}: {name}"
        else:
            assert (found["softmax_lse"] == sink).all() and not any(found[x].any() for x in ("out", "dq", "dk", "dv"))


def test_a_softcap_beside_slopes_raises(device):
    q, k, v, _ = support.random_qkv_dout(Problem(1, 130, 130, 2, 2, 64, causal=True), device)
    with pytest.raises(NotImplementedError, match="^softcap and alibi_slopes must not be given together"):
        dash_attn.flash_attn_func(q, k, v, softcap=30.0, alibi_slopes=torch.zeros(2, device=device))

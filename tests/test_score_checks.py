"""The checks of scores that the GPU tests rest on, tried on the CPU: they pass what is right and fail what is wrong."""

import dataclasses
import itertools
import pathlib
import random
import sys

import pytest
import torch
from float64_reference import attention_rounded

sys.path.insert(0, str(pathlib.Path(__file__).parent / "gpu"))

import gpu_support as support
import gradient_check
import pack_checks
import score_checks
from gpu_support import Problem
from pack_checks import Pool
from score_checks import SCORES

KIND = pytest.mark.parametrize("kind", SCORES)
WINDOW = dict(causal=False, window=(40, 5))


def problem_of(kind, *shape, **mask):
    return dataclasses.replace(Problem(*shape, causal=True), **mask, **SCORES[kind])


def is_small(problem):
    """By the size of the scores and of K: a batch of 64 sequences with long keys takes as long as all others."""
    of_keys = problem.batch * problem.seqlen_k * problem.heads * problem.head_dim
    return problem.seqlen_q * problem.seqlen_k < 2**16 and of_keys < 2**21


@pytest.mark.slow
@KIND
def test_sampled_products_meet_the_bar(kind):
    for dtype in (torch.bfloat16, torch.float16):
        chance = random.Random(f"{kind} {dtype}")
        drawn = (score_checks.random_problem(kind, chance, dtype) for _ in itertools.count())
        problems = itertools.islice(filter(is_small, drawn), 3)
        assert gradient_check.check_together(problems, "cpu", lambda _: ["auto", "spt"]) == []


@KIND
def test_bit_checks_pass(kind):
    for mask in (dict(causal=True), WINDOW):
        problem = problem_of(kind, 2, 70, 90, 4, 2, 16, **mask)
        score_checks.check_batch_and_alone(problem, "cpu", ["auto"])
        score_checks.check_heads(problem, "cpu", ["auto"])


@pytest.mark.parametrize("name", ["out", "dq", "dsinks"])
def test_bit_checks_see_one_bit(name, monkeypatch):
    problem = problem_of("softcap, sinks, log-sum-exp", 2, 70, 90, 4, 2, 16)
    calls = []

    def dense_attention(*arguments, original=pack_checks.dense_attention):
        found = original(*arguments)
        calls.append(found)
        if len(calls) == 1:
            support.int_view(found[name]).view(-1)[-1] ^= 1
        return found

    monkeypatch.setattr(pack_checks, "dense_attention", dense_attention)
    with pytest.raises(AssertionError, match=f"{name}.*1 of .* elements differ"):
        score_checks.check_batch_and_alone(problem, "cpu", ["auto"])
    calls.clear()
    with pytest.raises(AssertionError, match=f"{name}.*1 of .* elements differ"):
        score_checks.check_heads(problem, "cpu", ["auto"])


@KIND
def test_packs(kind):
    pool, chance = Pool(problem_of(kind, 1, 0, 0, 4, 2, 16), "cpu"), random.Random(kind)
    for _ in range(3):
        pack = pack_checks.random_pack(pool, chance, most=4, spoilt=0.0)
        if max(pack.rows_q.lengths) <= 1000:
            pack_checks.assert_as_alone(pack, {"auto": pack_checks.varlen_attention(pack, "auto")})
    pack = pack_checks.pack_of_lengths(pool, ((63, 64), (0, 64), (129, 0), (127, 129)))
    found = pack_checks.varlen_attention(pack, "auto")
    assert pack_checks.accuracy_failures(pack, {"auto": found}) == []
    if "dsinks" in found:
        support.int_view(found["dsinks"])[1] ^= 1
        with pytest.raises(AssertionError, match="auto: dsinks.*1 of .* elements differ; the sum over the sequences"):
            pack_checks.assert_as_alone(pack, {"auto": found})


@pytest.mark.parametrize("lengths", [(30, 10), (13, 1), (7, 0)])
def test_queries_without_keys(lengths):
    for more in ({}, {"softcap": 20.0}, {"alibi": "sequences"}):
        problem = Problem(2, *lengths, 4, 2, 16, causal=True, sinks=True, lse_gradient=True)
        score_checks.check_queries_without_keys(dataclasses.replace(problem, **more), "cpu")


def test_merging():
    assert score_checks.merging_failures(Problem(2, 60, 100, 4, 2, 32, causal=False), "cpu") == []


def row_excesses(problem):
    """By whether the bounds are the kernel's: how far beyond them rows are that have the kernel's roundings."""
    inputs = support.random_inputs(problem, "cpu")
    tensors, formula = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.out), dict(problem.mask, scores=inputs.scores)
    outputs = attention_rounded(*tensors, rounded_factors=True, softmax_scale=problem.scale, **formula)
    bars = {kernel: gradient_check.Bar(problem, inputs, kernel) for kernel in (False, True)}
    return {kernel: max(bar.row_excess(name, x).max() for name, x in outputs.items()) for kernel, bar in bars.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_row_bounds_count_what_the_kernels_tanh_errs_by(dtype):
    """Of scores so large that it errs by more than rounding P to fp16 does."""
    excess = row_excesses(Problem(1, 40, 60, 2, 1, 32, True, dtype, softmax_scale=1.0, softcap=50.0))
    assert excess[True] <= 0
    assert dtype == torch.bfloat16 or excess[False] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [96, 192])
def test_row_bounds_count_what_the_kernel_rounds_of_ds(head_dim, dtype):
    """Of rows far from the keys, where the sink has most of the weight and one key most of the rest: D is next to
    nothing there, and all that dS is rounded by may add up."""
    features = dict(softmax_scale=0.3, **SCORES["slopes, sinks, log-sum-exp"])
    excess = row_excesses(Problem(2, 1100, 64, 4, 4, head_dim, False, dtype, **features))
    assert excess[True] <= 0
    assert (dtype, head_dim) != (torch.bfloat16, 96) or excess[False] > 0


@pytest.mark.parametrize("wrong", [
    dict(softcap=4.8), dict(alibi="heads"), dict(sinks=False), dict(lse_gradient=False), dict(softcap=0.0),
], ids=str)  # fmt: skip
def test_the_bar_refuses_other_scores(wrong):
    """Of scores that reach the softcap and of sinks that are among them."""
    right = Problem(2, 130, 150, 4, 2, 64, True, softmax_scale=0.3, softcap=5.0, sinks=True, lse_gradient=True)
    bar = gradient_check.Bar(right, support.random_inputs(right, "cpu"))
    problem = dataclasses.replace(right, **wrong)
    if problem.alibi:
        problem = dataclasses.replace(problem, softcap=0.0)
    inputs = support.random_inputs(problem, "cpu")
    found = {"out": inputs.out, **support.backward(inputs, problem, "auto")}
    assert bar.failures(found) or bar.lse_failures(inputs.softmax_lse)
    assert [name for name in ("dq", "dk") if any(line.startswith(name) for line in bar.failures(found))]

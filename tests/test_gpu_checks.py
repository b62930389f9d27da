"""The checks that the GPU tests rest on, tried on the CPU: they pass what is right and fail what is wrong."""

import ctypes
import dataclasses
import importlib.util
import itertools
import math
import pathlib
import sys

import pytest
import torch
from float64_reference import attention_rounded, visible_keys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "gpu"))

import bit_checks
import gpu_support as support
import gradient_check
from gpu_support import GuardedTensor, Problem

PROBLEM = Problem(2, 150, 200, 4, 2, 64, True)
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def inputs():
    return support.random_inputs(PROBLEM, "cpu")


@pytest.fixture(scope="module")
def bar(inputs):
    return gradient_check.Bar(PROBLEM, inputs)


def test_a_machine_that_must_have_a_gpu_skips_nothing(monkeypatch):
    """Without Hopper, or without the compiler of the kernel that holds SMs."""
    spec = importlib.util.spec_from_file_location("gpu_conftest", pathlib.Path(__file__).parent / "gpu/conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    monkeypatch.setattr(conftest, "why_not_here", lambda: "no GPU")
    monkeypatch.setattr(conftest.sm_holder, "find_nvcc", lambda: None)
    for variable, outcome in (("1", pytest.fail.Exception), ("", pytest.skip.Exception)):
        monkeypatch.setenv("DASH_ATTN_REQUIRE_GPU", variable)
        for fixture, arguments in ((conftest.hopper, ()), (conftest.holder, (None, None))):
            with pytest.raises(outcome, match="no GPU|nvcc"):
                fixture.__wrapped__(*arguments)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 65), (64, 1), (63, 129), (129, 63), (130, 130)])
def test_the_reference_implementation_meets_the_bar(lengths, causal):
    for head_dim, heads in ((64, (4, 4)), (40, (8, 2)), (128, (5, 1))):
        problem = Problem(3, *lengths, *heads, head_dim, causal, torch.float16)
        assert gradient_check.check(problem, "cpu", support.schedules(causal)) == []


def test_problems_of_few_rows_are_judged_together(monkeypatch):
    problems = [Problem(2, *lengths, 2, 1, 32, True) for lengths in ((1, 65), (20, 70), (70, 90))]
    errors = gradient_check.Bar.errors

    def policies(problem):
        return ["descending"]

    assert gradient_check.check_together(problems, "cpu", policies) == []

    def wrong(bar, outputs, policy, of=(1,)):
        found = errors(bar, outputs, policy)
        if policy == "descending" and bar.exact.out.shape[1] in of:
            error, limit, norm, excess = found["dk"]
            found["dk"] = (1.2 * limit, limit, norm, excess)
        return found

    monkeypatch.setattr(gradient_check.Bar, "errors", wrong)
    assert gradient_check.check_together(problems, "cpu", policies) == [], "one that is by chance"
    monkeypatch.setattr(gradient_check.Bar, "errors", lambda *x: wrong(*x, of=(1, 20)))
    (line,) = gradient_check.check_together(problems, "cpu", policies)
    assert line.startswith("descending: dk is off by ")
    monkeypatch.setattr(gradient_check.Bar, "errors", lambda *x: wrong(*x, of=(70,)))
    (line,) = gradient_check.check_together(problems, "cpu", policies)
    assert line.startswith("Problem(") and "seqlen_q=70" in line and "descending: dk is off by " in line


@pytest.mark.parametrize("softmax_scale", [0.3, 1.0, 0.0, -0.2])
def test_the_reference_implementation_meets_the_bar_at_other_scales(softmax_scale):
    problem = Problem(2, 100, 140, 4, 2, 64, True, softmax_scale=softmax_scale)
    assert gradient_check.check(problem, "cpu", ["descending"]) == []


def problems_of(lengths, causal):
    for dtype, (head_dim, heads) in itertools.product(DTYPES, ((64, (4, 4)), (40, (8, 2)), (128, (5, 1)))):
        yield Problem(3, *lengths, *heads, head_dim, causal, dtype)


@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 65), (63, 129), (129, 63), (130, 130), (150, 200)])
def test_the_bar_refuses_a_uniform_error_of_three_thousandths(lengths, causal, kernel):
    """An output that is 1.003 times what it should be before it is rounded, all else being as it should."""
    for problem in problems_of(lengths, causal):
        inputs = support.random_inputs(problem, "cpu")
        bar = gradient_check.Bar(problem, inputs, kernel)
        formula = dict(rounded_factors=kernel, softmax_scale=problem.scale, causal=causal)

        def rounded(v=inputs.v, dout=inputs.dout):
            return attention_rounded(inputs.q, inputs.k, v, dout, inputs.out, **formula)

        outputs = rounded()
        assert bar.failures(outputs) == [], problem
        # Of v, out is a linear function; of dout, the gradients are.
        too_large = dict(rounded(dout=1.003 * inputs.dout.double()), out=rounded(v=1.003 * inputs.v.double())["out"])
        for name, x in too_large.items():
            lines = bar.failures(dict(outputs, **{name: x}))
            assert any(line.startswith(f"{name}: relative error") for line in lines), f"{problem}: {name}"


def kernel_in_fp32(problem, q, k, v, dout, forward_tile=128, tile_q=64, tile_k=128):
    """What the kernels compute, in fp32: the softmax tile by tile with a reference that is up to 2^8 behind, dS of
    rounded factors, sums tile by tile."""
    group = problem.heads // problem.kv_heads
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    q, k, v, dout = (x.float().transpose(1, 2) for x in (q, k, v, dout))
    hidden = ~visible_keys(problem.seqlen_q, problem.seqlen_k, problem.causal)

    def rounded(x):
        return x.to(problem.dtype).float()

    s = (q @ k.mT * (problem.scale * math.log2(math.e))).masked_fill(hidden, -torch.inf)
    reference, total, out = torch.full_like(q[..., :1], -torch.inf), torch.zeros_like(q[..., :1]), torch.zeros_like(q)
    for keys in reversed(range(0, problem.seqlen_k, forward_tile)):
        tile = s[..., keys : keys + forward_tile]
        largest = tile.amax(-1, keepdim=True)
        moved = torch.where(largest - reference <= 8, reference, largest)
        p = torch.exp2(tile - moved).nan_to_num(nan=0.0)
        correction = torch.exp2(reference - moved).nan_to_num(nan=0.0)
        total = total * correction + p.sum(-1, keepdim=True)
        out = out * correction + rounded(p) @ v[..., keys : keys + forward_tile, :]
        reference = moved
    no_key = total == 0
    out = rounded((out / total).masked_fill(no_key, 0.0))
    p = rounded(torch.exp2(s - (reference + total.log2()).masked_fill(no_key, torch.inf)))
    ds = dout @ v.mT - (dout * out).sum(-1, keepdim=True)
    ds = rounded(p * (rounded(ds) if problem.dtype == torch.bfloat16 else ds))

    def summed(x, y, size):
        return sum(a @ b for a, b in zip(x.split(size, dim=-1), y.split(size, dim=-2)))

    def of_kv_heads(x):
        return x.unflatten(1, (problem.kv_heads, group)).sum(2)

    dq, dk = summed(ds, k, tile_k) * problem.scale, of_kv_heads(summed(ds.mT, q, tile_q)) * problem.scale
    outputs = {"out": out, "dq": dq, "dk": dk, "dv": of_kv_heads(summed(p.mT, dout, tile_q))}
    return {name: x.transpose(1, 2).to(problem.dtype) for name, x in outputs.items()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 65), (64, 1), (63, 129), (129, 63), (150, 300), (1, 2049)])
def test_the_bar_leaves_room_for_sums_in_fp32(lengths, causal):
    for problem in problems_of(lengths, causal):
        arguments = q, k, v, dout = support.random_qkv_dout(problem, "cpu")
        outputs = kernel_in_fp32(problem, *arguments)
        inputs = dataclasses.replace(support.with_forward(problem, *arguments), out=outputs["out"])
        bar = gradient_check.Bar(problem, inputs, kernel=True)
        assert bar.failures(outputs) == [], problem
        formula = dict(rounded_factors=True, softmax_scale=problem.scale, causal=causal)
        expected = attention_rounded(q, k, v, dout, outputs["out"], **formula)
        for name in ("out", "dv") if problem.seqlen_k == 1 else outputs:
            exact = getattr(bar.exact, name)
            error, expected_error = ((x[name].double() - exact).norm() for x in (outputs, expected))
            assert error <= 1.07 * expected_error, f"{problem}: {name}"


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_the_bar_refuses_a_small_error(inputs, bar, name):
    outputs = {"out": inputs.out, **support.backward(inputs, PROBLEM, "descending")}
    assert bar.failures(outputs) == []
    exact = getattr(bar.exact, name)
    worse = dict(outputs, **{name: (exact * 1.003).to(PROBLEM.dtype)})
    line = bar.failures(worse)[-1]
    assert line.startswith(f"{name}: relative error 3.")


def test_the_bar_refuses_one_wrong_row_and_an_unwritten_element(inputs, bar):
    gradients = support.backward(inputs, PROBLEM, "descending")
    gradients["dk"][1, 199, 1] = 0  # seen by one query: hardly anything in the norm of dk
    gradients["dv"][0, 7, 0, 0] = float("nan")
    row, element, norm = bar.failures(gradients)
    assert row.startswith("dk[1, 199, 1]: the row is off by") and row.endswith("; 1 rows of 800 are off")
    assert element.startswith("dv[0, 7, 0]: ") and norm.startswith("dv: relative error nan")


def test_a_zero_gradient_has_a_small_absolute_bound():
    problem = Problem(2, 64, 1, 4, 4, 64, False)
    inputs = support.random_inputs(problem, "cpu")
    bar = gradient_check.Bar(problem, inputs)
    gradients = support.backward(inputs, problem, "descending")
    assert bar.failures(gradients) == []
    errors = bar.errors(gradients)
    assert errors["dq"][2] == 0 and 0 < errors["dq"][1] < 1e-3 * inputs.dout.double().norm()
    gradients["dq"] = gradients["dv"].expand_as(gradients["dq"]) * 1e-3
    assert bar.failures(gradients)[0].startswith("dq: norm (the exact gradient is 0)")


def test_lse_check(inputs, bar):
    assert bar.lse_failures(inputs.softmax_lse) == []
    assert bar.lse_failures(inputs.softmax_lse + 1e-3)
    infinite = inputs.softmax_lse.clone()
    infinite[0, 0, 0] = float("inf")
    assert "infinite" in bar.lse_failures(infinite)[0]


@pytest.mark.parametrize("make", [GuardedTensor.contiguous, GuardedTensor.strided])
def test_guards_see_writes_around_the_output(make):
    guarded = make((2, 5, 3, 8), torch.bfloat16, "cpu")
    guarded.tensor.fill_(1.0)
    assert guarded.writes_outside() == 0
    storage = guarded.buffer.view(-1)
    storage[guarded.tensor.storage_offset() - 1] = 0.0
    storage[-1] = float("-inf")
    assert guarded.writes_outside() == 2


def test_first_mismatch_names_the_element_and_both_values():
    a = torch.arange(24, dtype=torch.bfloat16).view(2, 3, 4)
    b = a.clone()
    assert support.first_mismatch("dq", a, b) is None
    b[1, 0, 2] = -1.0
    b[1, 2, 3] = 0.0
    message = support.first_mismatch("dq", a, b)
    assert message.startswith("dq[1, 0, 2]: 14.0 (bits 0x4160) against -1.0 (bits 0xbf80)")
    assert message.endswith("2 of 24 elements differ")
    assert support.first_mismatch("dq", torch.zeros(1), -torch.zeros(1)) is not None
    nan = torch.full((1,), float("nan"))
    assert support.first_mismatch("dq", nan, nan.clone()) is None


def test_the_layouts_keep_values_and_move_storage():
    import test_gradients

    x = torch.randn(2, 5, 3, 8)
    for layout in test_gradients.LAYOUTS:
        moved = test_gradients.in_storage(x, layout)
        assert torch.equal(moved, x) and moved.stride() != x.stride(), layout


def test_every_policy_is_tried_with_its_mask():
    from dash_attn import schedule

    assert set(support.schedules(True)) | set(support.schedules(False)) == set(schedule.POLICIES)
    for causal in (False, True):
        for policy in support.schedules(causal):
            assert schedule.resolve(policy, causal=causal) == policy


def test_the_sanitizers_see_every_kernel():
    """Every kind of problem at every row of the tile table, in about the time of three rows."""
    import sanitizer_case

    chosen = sanitizer_case.selected(sanitizer_case.HEAD_DIMS, sanitizer_case.KINDS, 132, 4, everything=False)
    found = {(one.kind, *one.problem.head_dims.values()) for one in chosen}
    assert found == {(kind, *dims) for kind in sanitizer_case.KINDS for dims in sanitizer_case.HEAD_DIMS}
    of_64 = sanitizer_case.planned((64, 64), 132)
    assert len(chosen) <= 3.5 * len(of_64)
    # Of the wide rows all problems are tried at one or another.
    wide = [one for one in chosen if one.problem.head_dim not in (64, 128)]
    plain = {dataclasses.replace(one.problem, head_dim=64, value_head_dim=64) for one in wide}
    assert plain == {one.problem for one in of_64}
    assert [sanitizer_case.head_dims_of(text) for text in ("96", "192x128")] == [(96, 96), (192, 128)]


class NoLoad:
    def enqueue(self, kernels):
        assert kernels == 4

    def move_allocations(self):
        pass


BIT_CHECKS = {
    "under load": lambda problem: bit_checks.check_under_load(inputs_of(problem), problem, NoLoad(), 6, 2),
    "sm_margin": lambda problem: bit_checks.check_sm_margins(inputs_of(problem), problem, 132, (1, 7)),
    "neighbours": lambda problem: bit_checks.check_neighbours(problem, 3, (0, 2), "cpu"),
    "heads": lambda problem: bit_checks.check_heads(problem, "cpu", ("descending", support.schedules(True)[-1])),
}


def inputs_of(problem):
    return support.random_inputs(problem, "cpu")


@pytest.mark.parametrize("name", BIT_CHECKS)
def test_bit_checks_see_the_last_bit_of_the_last_policy(name, monkeypatch):
    problem = Problem(1, 70, 90, 4, 2, 32, True)
    BIT_CHECKS[name](problem)
    calls = {}

    def backward(inputs, problem, policy, *rest, original=support.backward):
        gradients = original(inputs, problem, policy, *rest)
        calls[policy] = calls.get(policy, 0) + 1
        if policy == support.schedules(True)[-1] and calls[policy] == 2:
            support.int_view(gradients["dk"])[0, -1, -1, -1] ^= 1
        return gradients

    monkeypatch.setattr(support, "backward", backward)
    with pytest.raises(AssertionError, match=f"{support.schedules(True)[-1]}.*: dk.*1 of .* elements differ"):
        BIT_CHECKS[name](problem)


def test_the_kernel_that_holds_sms_compiles(tmp_path):
    import sm_holder

    nvcc = sm_holder.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not found")
    assert hasattr(ctypes.CDLL(str(sm_holder.build(tmp_path, nvcc))), "hold_sms")

"""Sliding windows and chunks of dense batches: accuracy, the bit contract, and which kernel a window chooses."""

import dataclasses
import itertools

import gpu_support as support
import pack_checks
import pytest
import torch
from bit_checks import check_heads, check_neighbours, check_sm_margins
from float64_reference import visible_keys
from gpu_support import GRADIENTS, Inputs, Problem
from gradient_check import Bar
from products import pairwise, spread

import dash_attn
from dash_attn._schedule import forward_tile_shape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEADS = {"mha": (4, 4), "gqa": (8, 2)}
# Fewer and more queries than keys, among them by more than a window is wide.
LENGTHS = ((1, 300), (300, 1), (129, 129), (515, 515), (300, 700), (700, 300), (65, 2049), (1300, 1100))
WINDOWS = {
    "0,0": dict(window=(0, 0)),
    "127,0": dict(window=(127, 0)),
    "127 causal": dict(causal=True, window=(127, -1)),
    "500,0": dict(window=(500, 0)),
    "64,64": dict(window=(64, 64)),
    "-1,10": dict(window=(-1, 10)),
    "10,-1": dict(window=(10, -1)),
    "4000,4000": dict(window=(4000, 4000)),
    "chunk 100": dict(attention_chunk=100),
    "chunk 100 causal": dict(causal=True, attention_chunk=100),
    "chunk 100 of a window": dict(window=(70, 5), attention_chunk=100),
    "chunk 4096": dict(causal=True, attention_chunk=4096),
}
# Both ends cut, one of them, and chunks.
FEW_WINDOWS = ("127,0", "64,64", "10,-1", "chunk 100 causal")
CALLS, CALLS_IN_FLIGHT = 40, 8


def seen_pairs(problem: Problem, device: str) -> torch.Tensor:
    return visible_keys(problem.seqlen_q, problem.seqlen_k, device=device, **problem.mask)


def problem_of(window: str, *shape, dtype: torch.dtype = torch.bfloat16) -> Problem:
    return dataclasses.replace(Problem(*shape, causal=False, dtype=dtype), **WINDOWS[window])


def outputs(problem: Problem, tensors: tuple[torch.Tensor, ...], policy: str) -> dict[str, torch.Tensor]:
    """Of the public function, as a model calls it."""
    return pack_checks.dense_attention(problem, policy, *tensors)


def bar_of(problem: Problem, tensors: tuple[torch.Tensor, ...], found: dict[str, torch.Tensor]) -> Bar:
    q, k, v, dout = tensors
    return Bar(problem, Inputs(dout, q, k, v, found["out"], found["softmax_lse"]))


def unseen_failures(problem: Problem, found: dict[str, torch.Tensor], device: str) -> list[str]:
    """Queries that see no key and keys that no query sees have exact results."""
    seen = seen_pairs(problem, device)
    queries, keys = ~seen.any(dim=1), ~seen.any(dim=0)
    of_them = {
        "out": found["out"][:, queries],
        "dq": found["dq"][:, queries],
        "dk": found["dk"][:, keys],
        "dv": found["dv"][:, keys],
    }
    lines = [f"{name} of what sees nothing, or is not seen, must be 0" for name, x in of_them.items() if x.any()]
    if not found["softmax_lse"][:, :, queries].isposinf().all():
        lines.append("softmax_lse of a query that sees no key must be +inf")
    return lines


def check_accuracy(problem: Problem, device: str) -> None:
    tensors = support.random_qkv_dout(problem, device)
    bar = None
    for policy in ["auto", *support.policies(problem)]:
        found = outputs(problem, tensors, policy)
        bar = bar or bar_of(problem, tensors, found)
        lines = bar.failures({name: found[name] for name in ("out", *GRADIENTS)})
        lines += bar.lse_failures(found["softmax_lse"]) + unseen_failures(problem, found, device)
        assert not lines, f"{problem} {policy}:\n" + "\n".join(lines)


# Windows are a matter of tiles, which either dtype has.
@pytest.mark.parametrize("window, head_dim, dtype", spread(itertools.product(WINDOWS, (64, 96, 128)), DTYPES))
def test_accuracy(window, dtype, head_dim, device):
    for lengths, heads in itertools.product(LENGTHS, HEADS.values()):
        batch = 64 if lengths[0] == 1 else 2  # the norm of few rows' error is up to chance, ours and PyTorch's
        check_accuracy(problem_of(window, batch, *lengths, *heads, head_dim, dtype=DTYPES[dtype]), device)


@pytest.mark.parametrize("window", WINDOWS)
def test_padded_head_dim_and_other_scales(window, device):
    for head_dim, softmax_scale in itertools.product((40, 72, 100), (None, 0.3, -0.2)):
        problem = problem_of(window, 2, 300, 420, 4, 2, head_dim)
        check_accuracy(dataclasses.replace(problem, softmax_scale=softmax_scale), device)


@pytest.mark.parametrize("head_dim", (64, 96, 128))
@pytest.mark.parametrize("window", ("500,0", "4000,4000", "chunk 4096"))
def test_accuracy_over_many_tiles(window, head_dim, device):
    """Wider than some tiles, and shorter than the sequence."""
    check_accuracy(problem_of(window, 1, 4500, 5000, 2, 1, head_dim), device)


@pytest.mark.parametrize(
    "lengths, head_dim, causal",
    pairwise([(1000, 1000), (600, 1300), (1300, 600)], (64, 96, 128), (False, True)),
    ids=str,
)
def test_a_window_that_hides_nothing_is_as_accurate_as_no_window(causal, head_dim, lengths, device):
    """It runs another kernel, whose sums are of the same terms."""
    plain = Problem(2, *lengths, 4, 2, head_dim, causal)
    wide = dataclasses.replace(plain, window=(4000, 4000))
    assert plain.mask_kind != "window" and wide.mask_kind == "window"
    tensors = support.random_qkv_dout(plain, device)
    for policy in support.policies(wide):
        expected, found = outputs(plain, tensors, policy), outputs(wide, tensors, policy)
        bar = bar_of(plain, tensors, expected)
        names = ("out", *GRADIENTS)
        errors, bars = (bar.errors({name: x[name] for name in names}) for x in (found, expected))
        for name in names:
            error, limit = errors[name][0], bars[name][0]
            assert error <= 1.02 * limit, f"{wide} {policy}: {name} is off by {error:.3e}, without a window {limit:.3e}"
        assert not bar.lse_failures(found["softmax_lse"])


def test_what_is_the_causal_mask_has_its_bits(device):
    """FlashAttention's other ways to say it; and no window and no chunk is none."""
    same = {
        True: [dict(window=(-1, 0)), dict(causal=True, window=(-1, 5)), dict(causal=True, window=(-7, -3))],
        False: [dict(window=(-5, -2))],
    }
    for (causal, arguments), head_dim in itertools.product(same.items(), (64, 96, 128)):
        plain = Problem(2, 300, 420, 4, 2, head_dim, causal)
        tensors = support.random_qkv_dout(plain, device)
        for policy in ["auto", *support.policies(plain)]:
            expected = outputs(plain, tensors, policy)
            for argument in arguments:
                problem = dataclasses.replace(plain, **{"causal": False, **argument})
                support.assert_same_bits(outputs(problem, tensors, policy), expected, f"{problem} {policy}")


@pytest.mark.parametrize("head_dim", (64, 96, 128))
@pytest.mark.parametrize("window", ("127,0", "64,64", "10,-1"))
def test_keys_that_the_window_hides_change_no_bits(window, head_dim, device):
    """A sequence of which no query sees less than its window, with and without whole KV tiles of keys in front."""
    left, _ = WINDOWS[window]["window"]
    # A multiple of every KV tile in front, of 80, 96 and 128 keys, so that the tiles of what is seen stay the same.
    front, lengths = 1920, (300, 300 + left)
    problem = problem_of(window, 1, *lengths, 2, 2, head_dim)
    q, k, v, dout = support.random_qkv_dout(problem, device)
    longer = dataclasses.replace(problem, seqlen_k=lengths[1] + front)
    k_front, v_front = (torch.randn(1, front, 2, head_dim, device=device).to(k.dtype) for _ in range(2))
    in_front = (torch.cat([k_front, k], dim=1), torch.cat([v_front, v], dim=1))
    for policy in support.policies(problem):
        expected = outputs(problem, (q, k, v, dout), policy)
        found = outputs(longer, (q, *in_front, dout), policy)
        hidden = {name: found[name][:, :front] for name in ("dk", "dv")}
        assert not any(x.any() for x in hidden.values()), f"{longer} {policy}: gradients of keys that nobody sees"
        found.update({name: found[name][:, front:].contiguous() for name in ("dk", "dv")})
        if policy == "order_free":
            expected.pop("dq")  # its unit is of all keys of the sequence
        support.assert_same_bits(found, expected, f"{longer} {policy}")


@pytest.mark.parametrize("head_dim", (64, 96, 128))
@pytest.mark.parametrize("window", FEW_WINDOWS)
def test_same_bits_under_load(window, head_dim, perturbation, device):
    problem = problem_of(window, 2, 1100, 1100, 16, 4, head_dim)
    tensors = support.random_qkv_dout(problem, device)
    for policy in ["auto", *support.policies(problem)]:
        expected = outputs(problem, tensors, policy)
        support.assert_finite({name: expected[name] for name in ("out", *GRADIENTS)}, f"{problem} {policy}")
        for first in range(0, CALLS, CALLS_IN_FLIGHT):
            perturbation.enqueue(2 * CALLS_IN_FLIGHT)
            results = []
            for _ in range(CALLS_IN_FLIGHT):
                perturbation.move_allocations()
                results.append(outputs(problem, tensors, policy))
            for call, found in enumerate(results, first):
                support.assert_same_bits(found, expected, f"{problem} {policy}, call {call} of {CALLS}")


@pytest.mark.parametrize("head_dim", (64, 96, 128))
@pytest.mark.parametrize("window", FEW_WINDOWS)
def test_bits_are_the_sequences_own(window, head_dim, device, num_sms):
    """Neither the SMs, nor the batch, nor the other heads."""
    problem = problem_of(window, 2, 1100, 900, 16, 4, head_dim)
    inputs = support.random_inputs(problem, device)
    check_sm_margins(inputs, problem, num_sms, (1, 7, num_sms // 2, num_sms - 2))
    for lengths in ((515, 515), (300, 700), (700, 300)):
        alone = problem_of(window, 1, *lengths, 8, 2, head_dim)
        check_neighbours(alone, 4, (0, 3), device)
        check_heads(alone, device, support.policies(alone))


@pytest.mark.parametrize("window", FEW_WINDOWS)
def test_large_groups(window, device):
    """Whose query heads are split over work tiles, at this length, where the window is wide."""
    for head_dim, group in itertools.product((64, 96, 128), (8, 32)):
        check_accuracy(problem_of(window, 1, 1300, 1300, group, 1, head_dim), device)


@pytest.mark.parametrize("window", FEW_WINDOWS)
def test_auto_is_descending(window, device):
    for head_dim, lengths in itertools.product((64, 96, 128), ((60, 60), (515, 515))):
        problem = problem_of(window, 2, *lengths, 8, 2, head_dim)
        tensors = support.random_qkv_dout(problem, device)
        auto, descending = (outputs(problem, tensors, policy) for policy in ("auto", "descending"))
        support.assert_same_bits(auto, descending, str(problem))


# Two of the four head dims for each.
@pytest.mark.parametrize(
    "window, head_dim",
    [(window, head_dim) for i, window in enumerate(WINDOWS) for head_dim in ((64, 96), (128, 256))[i % 2]],
)
def test_one_sm_has_the_same_bits(window, head_dim, device, num_sms):
    """There query tiles have as many rows as they can, elsewhere fewer where they are few."""
    problem = problem_of(window, 1, 700, 900, 8, 2, head_dim)
    q, k, v, _ = support.random_qkv_dout(problem, device)
    out, lse = support.forward(problem, q, k, v, 0)
    support.assert_finite({"out": out}, str(problem))
    for sm_margin in (num_sms - 1, num_sms - 2):
        found = dict(zip(("out", "lse"), support.forward(problem, q, k, v, sm_margin)))
        support.assert_same_bits(found, {"out": out, "lse": lse}, f"{problem}, {sm_margin=}")


@pytest.mark.parametrize("schedule", ("shift", "symmetric_shift"))
@pytest.mark.parametrize("window", FEW_WINDOWS)
def test_a_policy_that_is_not_defined_for_windows_raises(window, schedule, device):
    problem = problem_of(window, 1, 130, 130, 2, 2, 64)
    q, k, v, _ = support.random_qkv_dout(problem, device)
    with pytest.raises(ValueError, match=f"^schedule must be .*{schedule}"):
        dash_attn.flash_attn_func(q, k, v, **pack_checks.mask_arguments(problem), schedule=schedule)


@pytest.mark.parametrize("head_dim", (64, 96, 128))
@pytest.mark.parametrize("window", FEW_WINDOWS)
def test_nan_in_tiles_that_the_window_hides_stays_there(window, head_dim, device):
    """Dead tiles are not visited: keys that nobody sees, whole KV tiles of them, may be anything."""
    problem = problem_of(window, 2, 256, 1536, 4, 2, head_dim)
    seen_keys = seen_pairs(problem, device).any(dim=0)
    dead = ~seen_keys
    for tile in (128, forward_tile_shape(head_dim)[1]):  # all keys of the backward's tile, and of the forward's
        whole = torch.nn.functional.pad(seen_keys, (0, -len(seen_keys) % tile)).view(-1, tile).any(dim=1)
        dead &= ~whole.repeat_interleave(tile)[: len(seen_keys)]
    assert dead.any()
    tensors = q, k, v, dout = support.random_qkv_dout(problem, device)
    for policy in support.policies(problem):
        if policy == "order_free":
            continue  # its unit is of all keys of the sequence
        expected = outputs(problem, tensors, policy)
        dirty_k, dirty_v = k.clone(), v.clone()
        dirty_k[:, dead], dirty_v[:, dead] = float("nan"), float("nan")
        found = outputs(problem, (q, dirty_k, dirty_v, dout), policy)
        support.assert_same_bits(found, expected, f"{problem} {policy}, NaN in keys that nobody sees")

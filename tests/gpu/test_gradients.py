"""Outputs against float64 on every kind of shape. A failing test names the first case that fails, in full."""

import itertools

import gpu_support as support
import gradient_check
import pytest
import torch
from gpu_support import GuardedTensor, Inputs, Problem
from products import pairwise, spread

import dash_attn

EQUAL_LENGTHS = (1, 63, 64, 65, 127, 128, 129, 255, 1023, 1024, 2049)
UNEQUAL_LENGTHS = (
    (1, 64),
    (1, 2049),
    (63, 129),
    (64, 128),
    (65, 2049),
    (127, 1024),
    (255, 1023),
    (1024, 1025),
)
LENGTHS = [(n, n) for n in EQUAL_LENGTHS] + [p for a, b in UNEQUAL_LENGTHS for p in ((a, b), (b, a))]
HEADS = {"mha": (4, 4), "gqa": (8, 2), "mqa": (5, 1)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MASKS = {"full": False, "causal": True}
HEAD_DIMS = (64, 96, 128)
# Padded to one of those: the ends of tiles matter less than the ends of rows.
PADDED_HEAD_DIMS = (8, 40, 72, 120)
PADDED_LENGTHS = [(1, 1), (65, 65), (129, 129), (2049, 2049), (64, 1), (63, 129), (255, 1023), (1023, 255)]


def batch_for(seqlen_q: int, seqlen_k: int) -> int:
    """More batch elements where each is small: the norms then average over enough elements to mean something."""
    return 2 if max(seqlen_q, seqlen_k) >= 1023 else 4


# Every kernel, with one ratio of heads each; padded rows run the same kernels.
CASES = spread(itertools.product(MASKS, DTYPES, HEAD_DIMS), HEADS) + pairwise(MASKS, DTYPES, PADDED_HEAD_DIMS, HEADS)


@pytest.mark.parametrize("mask, dtype, head_dim, heads", CASES)
def test_all_lengths_and_policies(mask, dtype, heads, head_dim, device):
    for seqlen_q, seqlen_k in LENGTHS if head_dim in HEAD_DIMS else PADDED_LENGTHS:
        batch = batch_for(seqlen_q, seqlen_k)
        problem = Problem(batch, seqlen_q, seqlen_k, *HEADS[heads], head_dim, MASKS[mask], DTYPES[dtype])
        lines = gradient_check.check(problem, device, support.schedules(problem.causal))
        assert not lines, f"{problem}:\n" + "\n".join(lines)


@pytest.mark.parametrize("softmax_scale", (0.3, 0.017, 1.0, 0.0, -0.2))
@pytest.mark.parametrize("mask", MASKS)
def test_softmax_scale(mask, softmax_scale, device):
    for head_dim, dtype in itertools.product((64, 96, 128), DTYPES.values()):
        problem = Problem(3, 300, 420, 4, 2, head_dim, MASKS[mask], dtype, softmax_scale)
        lines = gradient_check.check(problem, device, support.schedules(problem.causal))
        assert not lines, f"{problem}:\n" + "\n".join(lines)


@pytest.mark.parametrize("mask", MASKS)
def test_many_heads_and_batches(mask, device):
    """More work than any GPU has SMs, so that CTAs take several KV tiles of different heads."""
    problem = Problem(7, 640, 640, 24, 6, 128, MASKS[mask])
    lines = gradient_check.check(problem, device, support.schedules(problem.causal))
    assert not lines, f"{problem}:\n" + "\n".join(lines)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("schedule", ["auto", "spt"])
def test_autograd(schedule, mask, device):
    """What a model calls gives the gradients of the op."""
    problem = Problem(2, 300, 420, 8, 2, 64, MASKS[mask])
    inputs = support.random_inputs(problem, device)
    q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = dash_attn.flash_attn_func(q, k, v, causal=problem.causal, schedule=schedule)
    out.backward(inputs.dout)
    assert support.first_mismatch("out", out.detach(), inputs.out) is None
    expected = support.backward(inputs, problem, schedule)
    support.assert_same_bits({"dq": q.grad, "dk": k.grad, "dv": v.grad}, expected, f"{problem} {schedule}, autograd")


def in_storage(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of `x` in another storage, everything around them NaN."""
    batch, seqlen, heads, head_dim = x.shape
    if layout == "heads first":
        storage = x.new_empty(batch, heads, seqlen, head_dim).transpose(1, 2)
    elif layout == "seqlen first":
        storage = x.new_empty(seqlen, batch, heads, head_dim).transpose(0, 1)
    elif layout == "padded":
        storage = x.new_full((batch, seqlen + 5, heads + 1, head_dim + 24), float("nan"))
        storage = storage[:, 2 : 2 + seqlen, :heads, 8 : 8 + head_dim]
    elif layout == "unaligned":
        storage = x.new_full((batch, seqlen, heads, head_dim + 3), float("nan"))[..., 1 : 1 + head_dim]
    elif layout == "head_dim outermost":
        storage = x.new_empty(head_dim, batch, seqlen, heads).permute(1, 2, 3, 0)
    else:
        raise ValueError(layout)
    return storage.copy_(x)


LAYOUTS = ("heads first", "seqlen first", "padded", "unaligned", "head_dim outermost")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", (40, 64, 96, 128))
def test_strides_do_not_change_bits(head_dim, layout, device):
    for causal, (seqlen_q, seqlen_k) in itertools.product((False, True), ((130, 200), (257, 257))):
        problem = Problem(2, seqlen_q, seqlen_k, 4, 2, head_dim, causal)
        inputs = support.random_inputs(problem, device)
        moved = Inputs(*(in_storage(x, layout) for x in inputs.tensors()[:5]), inputs.softmax_lse)
        for policy in support.schedules(causal):
            expected = support.backward(inputs, problem, policy)
            support.assert_finite(expected, f"{problem} {policy}")
            support.assert_same_bits(
                support.backward(moved, problem, policy), expected, f"{problem} {policy}, inputs {layout}"
            )


@pytest.mark.parametrize("head_dim", (40, 64, 96, 128))
def test_strided_outputs(head_dim, device):
    """Gradients inside a larger NaN buffer: right bits inside, nothing written outside."""
    for causal, (seqlen_q, seqlen_k) in itertools.product((False, True), ((130, 200), (257, 257))):
        problem = Problem(2, seqlen_q, seqlen_k, 4, 2, head_dim, causal)
        inputs = support.random_inputs(problem, device)
        for policy in support.schedules(causal):
            what = f"{problem} {policy}, strided outputs"
            expected = support.backward(inputs, problem, policy)
            guarded = support.empty_gradients(inputs, strided=True)
            gradients = {name: g.tensor for name, g in guarded.items()}
            support.backward_into(gradients, inputs, problem, policy)
            support.assert_same_bits(gradients, expected, what)
            for name, g in guarded.items():
                assert g.writes_outside().item() == 0, f"{what}: wrote outside {name}"


def test_packed_qkv_and_packed_gradients(device):
    """q, k, v and their gradients as slices of packed tensors, as training code keeps them."""
    for head_dim, causal in itertools.product((64, 96, 128), (False, True)):
        problem = Problem(2, 321, 321, 4, 4, head_dim, causal)
        inputs = support.random_inputs(problem, device)
        qkv = torch.stack([inputs.q, inputs.k, inputs.v], dim=2)
        packed = Inputs(inputs.dout, *qkv.unbind(2), inputs.out, inputs.softmax_lse)
        for policy in support.schedules(causal):
            storage = GuardedTensor.contiguous(tuple(qkv.shape), qkv.dtype, device)
            gradients = dict(zip(support.GRADIENTS, storage.tensor.unbind(2)))
            support.backward_into(gradients, packed, problem, policy)
            expected = support.backward(inputs, problem, policy)
            support.assert_same_bits(gradients, expected, f"{problem} {policy}, packed")
            assert storage.writes_outside().item() == 0


def test_nan_beyond_the_keys_of_one_sequence_stays_there(device):
    """NaN in one batch element must not reach another: tiles that end past a sequence read nothing of the next."""
    for head_dim, causal in itertools.product((64, 96, 128), (False, True)):
        problem = Problem(3, 100, 70, 2, 1, head_dim, causal)
        q, k, v, dout = support.random_qkv_dout(problem, device)
        clean = support.with_forward(problem, q, k, v, dout)
        for x in (q, k, v, dout):
            x[1] = float("nan")
        dirty = support.with_forward(problem, q, k, v, dout)
        for policy in support.schedules(causal):
            expected = support.backward(clean, problem, policy)
            actual = support.backward(dirty, problem, policy)
            for name in support.GRADIENTS:
                for b in (0, 2):
                    mismatch = support.first_mismatch(f"{name}[{b}]", actual[name][b], expected[name][b])
                    assert mismatch is None, f"{problem} {policy}, NaN in batch element 1: {mismatch}"

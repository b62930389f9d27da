"""Tensors of more than 2^31 elements, and strides of more: every offset must be computed in 64 bits."""

import dataclasses

import gpu_support as support
import pytest
import torch
from gpu_support import Inputs, Problem

GIB = 1 << 30
FAR = (1 << 31) + 64  # elements between two heads, 16-byte aligned

pytestmark = pytest.mark.alone
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def need_memory(gib: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free + cached < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory, {(free + cached) / GIB:.0f} are there")


@pytest.fixture(autouse=True)
def give_memory_back():
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def normal(shape: tuple[int, ...], device: str, seed: int) -> torch.Tensor:
    """Made in bf16, a few sequences at a time: fp32 of the whole would take twice its memory again."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    for part in x.split(1024):
        part.copy_(torch.randn(part.shape, generator=generator, device=device))
    return x


@MASKS
@pytest.mark.parametrize("head_dim, heads", [(128, 16), (64, 32)])
def test_more_than_2_31_elements(head_dim, heads, causal, device):
    """The sequences at both ends of the batch, on both sides of element 2^31, have the bits that they have alone."""
    need_memory(60)
    problem = Problem(16_400, 64, 64, heads, heads, head_dim, causal)
    shape = (problem.batch, problem.seqlen_q, heads, head_dim)
    q, k, v, dout = (normal(shape, device, seed) for seed in range(4))
    assert q.numel() > 1 << 31
    inputs = support.with_forward(problem, q, k, v, dout)
    for places in (slice(0, 2), slice(-20, None)):
        alone = dataclasses.replace(problem, batch=q[places].shape[0])
        own = support.with_forward(alone, *(x[places].clone() for x in (q, k, v, dout)))
        forward = {"out": own.out, "softmax_lse": own.softmax_lse}
        among = {"out": inputs.out[places], "softmax_lse": inputs.softmax_lse[places]}
        support.assert_same_bits(among, forward, f"{problem} forward, sequences {places}")
    for policy in support.schedules(causal):
        gradients = support.backward(inputs, problem, policy)
        for places in (slice(0, 2), slice(-20, None)):
            alone = dataclasses.replace(problem, batch=q[places].shape[0])
            own = Inputs(*(x[places].clone() for x in inputs.tensors()))
            expected = support.backward(own, alone, policy)
            support.assert_finite(expected, f"{alone} {policy}")
            among = {name: x[places] for name, x in gradients.items()}
            support.assert_same_bits(among, expected, f"{problem} {policy}, sequences {places}")
        del gradients


def with_far_heads(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The tensors (batch, seqlen, heads, head_dim), their values in one storage in which a head is FAR from the
    next."""
    needed = sum(x[:, :, 0].numel() for x in tensors)
    heads = max(x.shape[2] for x in tensors)
    storage = torch.empty((heads - 1) * FAR + needed, dtype=tensors[0].dtype, device=tensors[0].device)
    moved, offset = [], 0
    for x in tensors:
        batch, seqlen, _, head_dim = x.shape
        far = storage.as_strided(x.shape, (seqlen * head_dim, head_dim, FAR, 1), offset)
        moved.append(far.copy_(x))
        offset += x[:, :, 0].numel()
    return moved


@MASKS
@pytest.mark.parametrize("head_dim", [64, 128])
def test_head_strides_beyond_2_31(head_dim, causal, device):
    need_memory(32)
    problem = Problem(2, 300, 420, 2, 2, head_dim, causal)
    inputs = support.random_inputs(problem, device)
    q, k, v, dout, out = with_far_heads((inputs.q, inputs.k, inputs.v, inputs.dout, inputs.out))
    assert q.stride(2) > 1 << 31
    far = support.with_forward(problem, q, k, v, dout)
    for name in ("out", "softmax_lse"):
        mismatch = support.first_mismatch(name, getattr(far, name), getattr(inputs, name))
        assert mismatch is None, f"{problem} forward: {mismatch}"
    # Each in a storage of its own: what is written may share no memory, and these would be woven into each other.
    like = zip(support.GRADIENTS, (inputs.q, inputs.k, inputs.v))
    gradients = {name: with_far_heads((x,))[0] for name, x in like}
    far = Inputs(dout, q, k, v, out, inputs.softmax_lse)
    for policy in support.schedules(causal):
        expected = support.backward(inputs, problem, policy)
        for x in gradients.values():
            x.fill_(float("nan"))
        support.backward_into(gradients, far, problem, policy)
        support.assert_same_bits(gradients, expected, f"{problem} {policy}, heads far apart")

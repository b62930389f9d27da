"""What the GPU tests share: random problems, poisoned outputs, calls of the backward op, comparison of bits.

Works on any device, so that tests/test_gpu_checks.py can try the checks themselves without a GPU.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

import dash_attn  # noqa: F401  registers torch.ops.dash_attn
from dash_attn import schedule
from dash_attn._schedule import ForwardTiles

GRADIENTS = ("dq", "dk", "dv")
GUARD_ELEMENTS = 1024


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention problem; its repr names every parameter of a failing case."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype: torch.dtype = torch.bfloat16
    softmax_scale: float | None = None

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.softmax_scale is None else self.softmax_scale


@dataclasses.dataclass
class Inputs:
    """dout, q, k, v drawn from a normal distribution, and the forward's out and softmax_lse."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    softmax_lse: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.dout, self.q, self.k, self.v, self.out, self.softmax_lse


def schedules(causal: bool) -> list[str]:
    """Every policy that is defined for the mask."""
    return list(schedule.fitting(causal=causal))


def tiles_of(problem: Problem, policy: str) -> schedule.Problem:
    shape = dict(heads=problem.heads, kv_heads=problem.kv_heads, head_dim=problem.head_dim, causal=problem.causal)
    return schedule.problem(policy, problem.seqlen_q, problem.seqlen_k, **shape)


def needs_clusters(policy: str) -> bool:
    """Whether the policy's CTAs wait for each other within a cluster, which starts only where its SMs are free
    together."""
    return policy in ("shift", "symmetric_shift")


def splits(problem: Problem) -> int:
    """Work tiles among which the backward divides the query heads of a KV head, for each KV tile."""
    return tiles_of(problem, "auto").splits


def forward_counts_tiles(problem: Problem, num_sms: int) -> bool:
    """Whether CTAs of the forward take tiles from a counter in memory."""
    tiles = ForwardTiles(
        batch=problem.batch,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        causal=problem.causal,
        sms=num_sms,
    )
    return tiles.takes_tiles


def random_qkv_dout(problem: Problem, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(seqlen: int, heads: int) -> torch.Tensor:
        shape = (problem.batch, seqlen, heads, problem.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(problem.dtype)

    q = normal(problem.seqlen_q, problem.heads)
    k = normal(problem.seqlen_k, problem.kv_heads)
    v = normal(problem.seqlen_k, problem.kv_heads)
    return q, k, v, normal(problem.seqlen_q, problem.heads)


def settings(problem: Problem) -> tuple:
    """Of both ops, between the tensors and the schedule: a dense batch, the scale, the mask without a window."""
    return (None, None, None, None, problem.scale, problem.causal, -1, -1, 0)


def with_forward(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Inputs:
    out, softmax_lse = torch.ops.dash_attn.forward(q, k, v, *settings(problem))
    return Inputs(dout, q, k, v, out, softmax_lse)


def random_inputs(problem: Problem, device: str, seed: int = 0) -> Inputs:
    return with_forward(problem, *random_qkv_dout(problem, device, seed))


class GuardedTensor:
    """An output filled with NaN inside a larger buffer of NaN; check() says whether the op wrote outside it."""

    def __init__(self, buffer: torch.Tensor, tensor: torch.Tensor):
        self.buffer = buffer
        self.tensor = tensor
        self.untouched = int_view(buffer).clone()

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> "GuardedTensor":
        size = math.prod(shape)
        buffer = torch.full((size + 2 * GUARD_ELEMENTS,), math.nan, dtype=dtype, device=device)
        return cls(buffer, buffer[GUARD_ELEMENTS : GUARD_ELEMENTS + size].view(shape))

    @classmethod
    def strided(cls, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> "GuardedTensor":
        batch, seqlen, heads, head_dim = shape
        buffer = torch.full((batch, seqlen + 3, heads + 1, head_dim + 16), math.nan, dtype=dtype, device=device)
        return cls(buffer, buffer[:, 1 : 1 + seqlen, :heads, 8 : 8 + head_dim])

    def writes_outside(self) -> torch.Tensor:
        """Number of guard elements whose bits changed, as a tensor on the device. Leaves NaN inside `tensor`."""
        self.tensor.fill_(math.nan)
        return (int_view(self.buffer) != self.untouched).sum()


def empty_gradients(inputs: Inputs, strided: bool = False) -> dict[str, GuardedTensor]:
    make = GuardedTensor.strided if strided else GuardedTensor.contiguous
    like = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    return {name: make(tuple(x.shape), x.dtype, x.device) for name, x in like.items()}


def nan_gradients(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {
        name: torch.full_like(x, math.nan, memory_format=torch.contiguous_format)
        for name, x in (("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v))
    }


def backward_into(
    gradients: dict[str, torch.Tensor], inputs: Inputs, problem: Problem, policy: str, sm_margin: int = 0
) -> None:
    torch.ops.dash_attn.backward(
        *inputs.tensors(),
        gradients["dq"],
        gradients["dk"],
        gradients["dv"],
        *settings(problem),
        policy,
        sm_margin,
    )


def backward(inputs: Inputs, problem: Problem, policy: str, sm_margin: int = 0) -> dict[str, torch.Tensor]:
    """Gradients written over NaN, so that an element the op leaves alone shows."""
    gradients = nan_gradients(inputs)
    backward_into(gradients, inputs, problem, policy, sm_margin)
    return gradients


def workspace_bytes(problem: Problem, policy: str, device: str) -> int:
    """What a backward allocates beside its gradients."""
    inputs = random_inputs(problem, device)
    gradients = nan_gradients(inputs)
    return requested_bytes(lambda: backward_into(gradients, inputs, problem, policy))


def requested_bytes(call: Callable[[], object]) -> int:
    """What the call has allocated at most at a time, as it asked for it: the allocator may hand out a larger block."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def int_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def first_mismatch(name: str, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """None where the bits of both tensors agree; else the first element that differs, with both values."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{name}: {actual.dtype}{tuple(actual.shape)} against {expected.dtype}{tuple(expected.shape)}"
    a, b = int_view(actual.contiguous()), int_view(expected.contiguous())
    different = a != b
    if not different.any().item():
        return None
    index = tuple(torch.nonzero(different)[0].tolist())
    bits = (1 << (8 * actual.element_size())) - 1
    return (
        f"{name}{list(index)}: {actual[index].item()!r} (bits {a[index].item() & bits:#x}) against "
        f"{expected[index].item()!r} (bits {b[index].item() & bits:#x}); "
        f"{int(different.sum())} of {actual.numel()} elements differ"
    )


def assert_same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    for name in expected:
        mismatch = first_mismatch(name, actual[name], expected[name])
        assert mismatch is None, f"{what}: {mismatch}"


def assert_finite(gradients: dict[str, torch.Tensor], what: str) -> None:
    """Outputs start as NaN: one that is still NaN was not written, and equal bits would mean nothing."""
    for name, x in gradients.items():
        assert bool(torch.isfinite(x).all()), f"{what}: {name} holds values that are not finite"

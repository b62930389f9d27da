"""The implementations that are measured: one class each, ours among them.

A class gives the variants it has for a shape, and for each variant what to call: `prepare` returns one function for
each pass, on tensors (batch, seqlen, heads, head_dim) that exist already; "both" goes through autograd for ours, and
calls the two passes of a peer one after the other. A forward returns out, the others (dq, dk, dv), in the layout of the
inputs, so that what is timed can be checked. Importing this module imports no peer.
"""

import contextlib
import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator

import torch

from benchmarks.shapes import Shape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Variant:
    impl: str
    schedule: str | None
    deterministic: bool

    def __str__(self) -> str:
        return f"{self.impl} {self.schedule}" if self.schedule else self.impl + (" det" if self.deterministic else "")


@dataclasses.dataclass
class Tensors:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


Results = torch.Tensor | tuple[torch.Tensor, ...]
Calls = dict[str, Callable[[], Results]]


def random_tensors(shape: Shape, device: torch.device) -> Tensors:
    """Normal values: the rate of tensor cores depends on the data, and zeros flatter it."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> torch.Tensor:
        size = (shape.batch, shape.seqlen, heads, shape.head_dim)
        return torch.randn(size, generator=generator, device=device).to(DTYPES[shape.dtype])

    return Tensors(normal(shape.heads), normal(shape.kv_heads), normal(shape.kv_heads), normal(shape.heads))


def softmax_scale(shape: Shape) -> float:
    return 1.0 / math.sqrt(shape.head_dim)


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """torch's switch, without its filling of fresh memory, which would be timed too."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def _in_turn(forward: Callable[[], Results], backward: Callable[[], Results]) -> Calls:
    def both() -> Results:
        forward()
        return backward()

    return {"forward": forward, "backward": backward, "both": both}


class DashAttn:
    """This package: "auto" and every policy that users can choose, all deterministic; and, where they are asked for by
    name, the yardsticks, which are not."""

    name = "dash_attn"

    def __init__(self, schedules: list[str] | None = None):
        self._schedules = schedules

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def variants(self, shape: Shape) -> list[Variant]:
        from dash_attn import schedule

        usable = ("auto", *schedule.fitting(causal=shape.causal))
        known = (*usable, *schedule.YARDSTICKS)
        chosen = usable if self._schedules is None else [s for s in self._schedules if s in known]
        return [Variant(self.name, policy, policy not in schedule.YARDSTICKS) for policy in chosen]

    def prepare(self, variant: Variant, shape: Shape, x: Tensors) -> Calls:
        import dash_attn
        from dash_attn import schedule

        ops = torch.ops.dash_attn
        settings = (None, None, None, None, softmax_scale(shape), shape.causal, -1, -1, 0)  # dense, no window
        out, softmax_lse = ops.forward(x.q, x.k, x.v, *settings)
        saved = x.dout, x.q, x.k, x.v, out, softmax_lse
        gradients = tuple(torch.empty_like(t) for t in (x.q, x.k, x.v))
        leaves = tuple(t.detach().requires_grad_() for t in (x.q, x.k, x.v))

        def forward() -> Results:
            return ops.forward(x.q, x.k, x.v, *settings)[0]

        def backward() -> Results:
            if variant.deterministic:
                ops.backward(*saved, *gradients, *settings, variant.schedule, 0)
            else:  # the op takes deterministic policies only
                number = schedule.policy_number(variant.schedule)
                torch.ops.dash_attn_C.backward(*saved, *gradients, *settings, number, 0)
            return gradients

        def through_autograd() -> Results:
            out = dash_attn.flash_attn_func(*leaves, causal=shape.causal, schedule=variant.schedule)
            return torch.autograd.grad(out, leaves, x.dout)

        calls = _in_turn(forward, backward)
        return {**calls, "both": through_autograd} if variant.deterministic else calls


class TorchFlashAttention2:
    """FlashAttention-2 as torch's scaled_dot_product_attention runs it."""

    name = "fa2"

    def unavailable(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "needs a CUDA device"

    def variants(self, shape: Shape) -> list[Variant]:
        return [Variant(self.name, None, True), Variant(self.name, None, False)]

    def prepare(self, variant: Variant, shape: Shape, x: Tensors) -> Calls:
        aten, length, scale = torch.ops.aten, shape.seqlen, softmax_scale(shape)

        def forward():
            return aten._flash_attention_forward(
                x.q, x.k, x.v, None, None, length, length, 0.0, shape.causal, False, scale=scale
            )

        out, softmax_lse, rng_state, unused, _ = forward()

        def backward():
            with deterministic_algorithms(variant.deterministic):
                return aten._flash_attention_backward(
                    x.dout, x.q, x.k, x.v, out, softmax_lse, None, None, length, length, 0.0, shape.causal, rng_state,
                    unused, scale=scale,
                )  # fmt: skip

        return _in_turn(lambda: forward()[0], backward)


class TorchCudnn:
    """cuDNN's attention as torch runs it; torch has no way to ask for its deterministic algorithm."""

    name = "cudnn"

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs a CUDA device"
        return None if torch.backends.cudnn.is_available() else "torch has no cuDNN"

    def variants(self, shape: Shape) -> list[Variant]:
        return [Variant(self.name, None, False)]

    def prepare(self, variant: Variant, shape: Shape, x: Tensors) -> Calls:
        aten, scale = torch.ops.aten, softmax_scale(shape)
        q, k, v, dout = (t.transpose(1, 2) for t in (x.q, x.k, x.v, x.dout))

        def forward():
            return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, shape.causal, False, scale=scale)

        out, softmax_lse, starts_q, starts_k, max_q, max_k, seed, offset, _ = forward()

        def backward():
            gradients = aten._scaled_dot_product_cudnn_attention_backward(
                dout, q, k, v, out, softmax_lse, seed, offset, None, starts_q, starts_k, max_q, max_k, 0.0,
                shape.causal, scale=scale,
            )  # fmt: skip
            return tuple(gradient.transpose(1, 2) for gradient in gradients)

        return _in_turn(lambda: forward()[0].transpose(1, 2), backward)


class _FlashAttnPackage:
    """A FlashAttention package through its public function and autograd."""

    name: str
    module: str

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs a CUDA device"
        try:
            importlib.import_module(self.module).flash_attn_func
        except Exception as error:  # broken binaries raise OSError, missing dependencies anything
            return f"{self.module} cannot be imported ({type(error).__name__})"
        return None

    def variants(self, shape: Shape) -> list[Variant]:
        return [Variant(self.name, None, True), Variant(self.name, None, False)]

    def prepare(self, variant: Variant, shape: Shape, x: Tensors) -> Calls:
        function = importlib.import_module(self.module).flash_attn_func
        q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))

        def forward():
            result = function(q, k, v, causal=shape.causal, deterministic=variant.deterministic)
            return result[0] if isinstance(result, tuple) else result

        out = forward()
        return _in_turn(forward, lambda: torch.autograd.grad(out, (q, k, v), x.dout, retain_graph=True))


class FlashAttention3(_FlashAttnPackage):
    name = "fa3"
    module = "flash_attn_interface"


class FlashAttention4(_FlashAttnPackage):
    name = "fa4"
    module = "flash_attn.cute"


PEERS = {peer.name: peer for peer in (TorchFlashAttention2, TorchCudnn, FlashAttention3, FlashAttention4)}

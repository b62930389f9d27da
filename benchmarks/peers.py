"""The implementations that are measured, one class each, including ours.

A class returns the variants that it has for a shape (none if it does not support the shape), and for each variant the
functions to call: `prepare` returns one function per pass, on existing tensors. "both" goes through autograd for ours,
and calls the two passes of a baseline one after the other. A forward returns out, and the others return (dq, dk, dv),
as a dense batch or as the rows of all sequences, so that the results can be checked. Importing this module imports no
baseline.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from benchmarks import cudnn_graph
from benchmarks.compare import BITS, DENSE, NAMES, OURS
from benchmarks.shapes import SOFTCAPS, Shape

if TYPE_CHECKING:
    from dash_attn.dropout import DropoutBits

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
    """The inputs: of a dense batch (batch, seqlen, heads, head_dim), or of a variable-length batch (total, heads,
    head_dim) with `cu_seqlens`, int32 (sequences + 1,), and the length of the longest sequence.

    Slopes and sinks are fp32 (heads,). `dropout` holds the bits for ours; baselines draw their own masks.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    dropout: "DropoutBits | None" = None

    @property
    def lengths(self) -> dict:
        """Returns the arguments of a variable-length function after q, k and v; nothing for a dense batch."""
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        found = (self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen)
        return {} if self.cu_seqlens is None else dict(zip(names, found))


Results = torch.Tensor | tuple[torch.Tensor, ...]
Calls = dict[str, Callable[[], Results]]


@dataclasses.dataclass(frozen=True)
class OwnMask:
    """A call with dropout that draws its own mask, which nobody else knows."""

    call: Callable[[], Results]

    def __call__(self) -> Results:
        return self.call()


def with_own_masks(calls: Calls, shape: Shape) -> Calls:
    return {pass_: OwnMask(call) for pass_, call in calls.items()} if shape.dropout_p else calls


def random_tensors(shape: Shape, device: torch.device) -> Tensors:
    """Returns normal values, because the speed of tensor cores depends on the data, and zeros are too fast."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, head_dim: int) -> torch.Tensor:
        sequences = (sum(shape.lengths),) if shape.pack else (shape.batch, shape.seqlen)
        size = (*sequences, heads, head_dim)
        return torch.randn(size, generator=generator, device=device).to(DTYPES[shape.dtype])

    qk, v = shape.head_dims
    found = Tensors(
        normal(shape.heads, qk), normal(shape.kv_heads, qk), normal(shape.kv_heads, v), normal(shape.heads, v)
    )
    if shape.scores == "alibi":
        found.alibi_slopes = torch.exp2(-8.0 * torch.arange(1, shape.heads + 1, device=device) / shape.heads)
    if shape.scores == "sinks":
        found.sinks = torch.randn(shape.heads, generator=generator, device=device)
    if shape.dropout_p:  # never for an older library, whose process must not import the package
        from dash_attn.dropout import DropoutState, dropout_bits

        sizes = dict(batch=shape.batch, heads=shape.heads, seqlen_q=shape.seqlen, seqlen_k=shape.seqlen)
        found.dropout = dropout_bits(DropoutState.of(1, 2, device), p=shape.dropout_p, **sizes)
    return packed(found, shape.lengths) if shape.pack else found


def packed(x: Tensors, lengths: tuple[int, ...]) -> Tensors:
    """Returns the same rows as a variable-length batch with these lengths."""
    rows = (t if t.dim() == 3 else t.flatten(0, 1) for t in (x.q, x.k, x.v, x.dout))
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=x.q.device)
    return Tensors(*rows, offsets, max(lengths), x.alibi_slopes, x.sinks, x.dropout)


def without_chunks(shape: Shape, x: Tensors) -> Tensors:
    """Turns chunks into sequences of a variable-length batch, for a baseline whose backward has no chunks."""
    return packed(x, shape.pieces) if shape.chunk else x


def softmax_scale(shape: Shape) -> float:
    return 1.0 / math.sqrt(shape.head_dim)


def mask_arguments(shape: Shape) -> tuple[bool, int, int]:
    """Returns causal and the sides of the window, as every FlashAttention takes them, without chunks."""
    return (True, -1, -1) if shape.sides == (-1, 0) else (False, *shape.sides)


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Sets torch's switch without filling fresh memory, which would be timed too."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filling


def _in_turn(forward: Callable[[], Results], backward: Callable[[], Results]) -> Calls:
    def both() -> Results:
        forward()
        return backward()

    return {"forward": forward, "backward": backward, "both": both}


def op_arguments(shape: Shape, x: Tensors) -> dict[str, object]:
    """Returns the arguments of all our ops besides their tensors: lengths, scale, mask and changes of the scores."""
    causal, left, right = mask_arguments(shape)
    return dict(
        cu_seqlens_q=x.cu_seqlens,
        cu_seqlens_k=x.cu_seqlens,
        seqused_q=None,
        seqused_k=None,
        softmax_scale=softmax_scale(shape),
        causal=causal,
        window_left=left,
        window_right=right,
        attention_chunk=shape.chunk,
        sm_margin=0,
        sinks=x.sinks,
        alibi_slopes=x.alibi_slopes,
        softcap=shape.softcap,
        **({} if x.dropout is None else of_dropout(shape, x)),
    )


def of_dropout(shape: Shape, x: Tensors) -> dict[str, object]:
    state = x.dropout.state.rng_state
    return dict(rng_state=state, dropout_p=shape.dropout_p, max_seqlen_q=x.max_seqlen, max_seqlen_k=x.max_seqlen)


class DashAttn:
    """This package: "auto" and every policy that users can choose, all deterministic, and other policies if requested
    by name. With dropout each pass generates the bits of a state, and "both" draws the state."""

    name = OURS

    def __init__(self, schedules: list[str] | None = None):
        self._schedules = schedules

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def variants(self, shape: Shape) -> list[Variant]:
        from dash_attn import schedule

        causal, *window = mask_arguments(shape)
        mask = dict(causal=causal, window=tuple(window), attention_chunk=shape.chunk)
        head_dims = dict(zip(("head_dim", "value_head_dim"), shape.head_dims))
        changed, dropout = shape.scores not in (None, "sinks"), shape.dropout_p > 0
        fitting = schedule.fitting(**mask, **head_dims, changed_scores=changed, dropout=dropout)
        usable = ("auto", *fitting)
        known = (*usable, *schedule.YARDSTICKS)
        known = usable if shape.dropout_p else known
        chosen = usable if self._schedules is None else [s for s in self._schedules if s in known]
        return [Variant(self.name, policy, policy != "atomic") for policy in chosen]

    def prepare(self, variant: Variant, shape: Shape, x: Tensors) -> Calls:
        import dash_attn
        from dash_attn import schedule

        ops, arguments = torch.ops.dash_attn, self.op_arguments(shape, x)
        out, softmax_lse = ops.forward(x.q, x.k, x.v, **arguments)
        saved = x.dout, x.q, x.k, x.v, out, softmax_lse
        gradients = tuple(torch.empty_like(t) for t in (x.q, x.k, x.v))
        of_scores = dict(dsoftmax_lse=None, dsinks=None if x.sinks is None else torch.empty_like(x.sinks))
        leaves = tuple(t.detach().requires_grad_() for t in (x.q, x.k, x.v))
        causal, *window_size = mask_arguments(shape)
        options = dict(causal=causal, window_size=tuple(window_size), attention_chunk=shape.chunk)
        options |= dict(softcap=shape.softcap, alibi_slopes=x.alibi_slopes)
        if x.sinks is not None:
            options["learnable_sink"] = x.sinks.detach().requires_grad_()
        if shape.dropout_p:
            options |= dict(dropout_p=shape.dropout_p, dropout_bits=x.dropout if self.name == BITS else None)

        def forward() -> Results:
            return ops.forward(x.q, x.k, x.v, **arguments)[0]

        def backward() -> Results:
            if variant.schedule not in schedule.YARDSTICKS:
                ops.backward(*saved, *gradients, **arguments, **of_scores, schedule=variant.schedule)
            else:  # the op accepts only the users' policies
                number = schedule.policy_number(variant.schedule)
                torch.ops.dash_attn_C.backward(*saved, *gradients, **arguments, **of_scores, schedule=number)
            return gradients

        def through_autograd() -> Results:
            attention = dash_attn.flash_attn_varlen_func if shape.pack else dash_attn.flash_attn_func
            out = attention(*leaves, **x.lengths, **options, schedule=variant.schedule)
            wanted = (*leaves, *([] if x.sinks is None else [options["learnable_sink"]]))
            return torch.autograd.grad(out, wanted, x.dout)[:3]

        calls = _in_turn(forward, backward)
        if variant.schedule in schedule.YARDSTICKS:
            return calls
        draws = shape.dropout_p and self.name != BITS
        return {**calls, "both": OwnMask(through_autograd) if draws else through_autograd}

    def op_arguments(self, shape: Shape, x: Tensors) -> dict[str, object]:
        return op_arguments(shape, x)


class DashAttnDense(DashAttn):
    """This package's dense call on the equally long sequences of a batch, which shows the cost of variable lengths."""

    name = DENSE

    def variants(self, shape: Shape) -> list[Variant]:
        return super().variants(shape.dense) if shape.dense else []

    def prepare(self, variant: Variant, shape: Shape, x: Tensors) -> Calls:
        batch = (t.unflatten(0, (shape.batch, shape.seqlen)) for t in (x.q, x.k, x.v, x.dout))
        dense = Tensors(*batch, alibi_slopes=x.alibi_slopes, sinks=x.sinks)
        return super().prepare(variant, shape.dense, dense)


class DashAttnBits(DashAttn):
    """This package with dropout and existing bits, which shows what the kernels pay for them."""

    name = BITS

    def variants(self, shape: Shape) -> list[Variant]:
        return super().variants(shape) if shape.dropout_p else []

    def op_arguments(self, shape: Shape, x: Tensors) -> dict[str, object]:
        assert x.dropout is not None
        return super().op_arguments(shape, x) | dict(rng_state=None, dropout_bits=x.dropout.bits)


class OnGpu:
    """What peers that run on CUDA devices alone share."""

    def unavailable(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "needs a CUDA device"


class TorchFlashAttention2(OnGpu):
    """FlashAttention-2 in torch's scaled_dot_product_attention, with unchanged scores."""

    name = "fa2"

    def version(self) -> str:
        return f"FlashAttention-2 as torch {torch.__version__} runs it"

    def variants(self, shape: Shape) -> list[Variant]:
        return [] if shape.scores else [Variant(self.name, None, True), Variant(self.name, None, False)]

    def prepare(self, variant: Variant, shape: Shape, x: Tensors) -> Calls:
        aten, x = torch.ops.aten, without_chunks(shape, x)
        lengths = tuple(x.lengths.values()) or (None, None, shape.seqlen, shape.seqlen)
        causal, left, right = mask_arguments(shape)
        options = dict(scale=softmax_scale(shape), window_size_left=left, window_size_right=right)

        def forward():
            return aten._flash_attention_forward(x.q, x.k, x.v, *lengths, shape.dropout_p, causal, False, **options)

        out, softmax_lse, rng_state, unused, _ = forward()

        def backward():
            with deterministic_algorithms(variant.deterministic):
                return aten._flash_attention_backward(
                    x.dout, x.q, x.k, x.v, out, softmax_lse, *lengths, shape.dropout_p, causal, rng_state, unused,
                    **options,
                )  # fmt: skip

        return with_own_masks(_in_turn(lambda: forward()[0], backward), shape)


class TorchCudnn(OnGpu):
    """cuDNN's attention in torch, for dense batches without windows."""

    name = "cudnn"

    def version(self) -> str:
        return f"cuDNN {torch.backends.cudnn.version()} as torch {torch.__version__} runs it"

    def unavailable(self, device: torch.device) -> str | None:
        return super().unavailable(device) or (None if torch.backends.cudnn.is_available() else "torch has no cuDNN")

    def variants(self, shape: Shape) -> list[Variant]:
        plain = not (shape.pack or shape.mask == "window" or shape.scores)
        return [Variant(self.name, None, False)] if plain else []

    def prepare(self, variant: Variant, shape: Shape, x: Tensors) -> Calls:
        aten, scale, p = torch.ops.aten, softmax_scale(shape), shape.dropout_p
        q, k, v, dout = (t.transpose(1, 2) for t in (x.q, x.k, x.v, x.dout))

        def forward():
            return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, p, shape.causal, False, scale=scale)

        out, softmax_lse, starts_q, starts_k, max_q, max_k, seed, offset, _ = forward()

        def backward():
            gradients = aten._scaled_dot_product_cudnn_attention_backward(
                dout, q, k, v, out, softmax_lse, seed, offset, None, starts_q, starts_k, max_q, max_k, p,
                shape.causal, scale=scale,
            )  # fmt: skip
            return tuple(gradient.transpose(1, 2) for gradient in gradients)

        return with_own_masks(_in_turn(lambda: forward()[0].transpose(1, 2), backward), shape)


class CudnnDeterministic(TorchCudnn):
    """cuDNN's deterministic backward, which torch does not offer. The forward before it is torch's."""

    def version(self) -> str:
        frontend = installed("nvidia-cudnn-frontend")
        return f"{super().version()}; deterministic: through nvidia-cudnn-frontend {frontend}"

    def unavailable(self, device: torch.device) -> str | None:
        if reason := super().unavailable(device):
            return reason
        return None if importlib.util.find_spec("cudnn") else "the package nvidia-cudnn-frontend is not installed"

    def variants(self, shape: Shape) -> list[Variant]:
        return [] if shape.dropout_p else [Variant(self.name, None, True) for _ in super().variants(shape)]

    def prepare(self, variant: Variant, shape: Shape, x: Tensors) -> Calls:
        scale = softmax_scale(shape)
        q, k, v, dout = (t.transpose(1, 2) for t in (x.q, x.k, x.v, x.dout))
        out, softmax_lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, shape.causal, False, scale=scale
        )
        backward = cudnn_graph.deterministic_backward(q, k, v, out, dout, softmax_lse, scale, shape.causal)
        return {"backward": lambda: tuple(gradient.transpose(1, 2) for gradient in backward())}


class TorchMemoryEfficient(OnGpu):
    """The memory-efficient attention of torch, for dense batches with dropout and without grouped heads. Without
    dropout, others are known to be faster."""

    name = "memory-efficient"

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def variants(self, shape: Shape) -> list[Variant]:
        plain = not (shape.pack or shape.mask == "window" or shape.scores) and shape.heads == shape.kv_heads
        return [Variant(self.name, None, False)] if plain and shape.dropout_p else []

    def prepare(self, variant: Variant, shape: Shape, x: Tensors) -> Calls:
        aten, scale, p = torch.ops.aten, softmax_scale(shape), shape.dropout_p
        q, k, v, dout = (t.transpose(1, 2) for t in (x.q, x.k, x.v, x.dout))

        def forward():
            return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, p, shape.causal, scale=scale)

        out, softmax_lse, seed, offset = forward()

        def backward():
            gradients = aten._scaled_dot_product_efficient_attention_backward(
                dout, q, k, v, None, out, softmax_lse, seed, offset, p, [True, True, True, False], shape.causal,
                scale=scale,
            )  # fmt: skip
            return tuple(gradient.transpose(1, 2) for gradient in gradients[:3])

        return with_own_masks(_in_turn(lambda: forward()[0].transpose(1, 2), backward), shape)


def installed(distribution: str) -> str:
    """Returns the version of an installed distribution. A package that is only on the path has none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


class _FlashAttnPackage(OnGpu):
    """A FlashAttention package, through its public function and autograd."""

    name: str
    module: str
    distribution: str
    unbounded: int | None  # the value for an unbounded side of a window
    scores: tuple[str, ...]  # the names in benchmarks.shapes.SCORES that it has arguments for

    def version(self) -> str:
        return f"{NAMES[self.name]} {installed(self.distribution)}"

    def unavailable(self, device: torch.device) -> str | None:
        if reason := super().unavailable(device):
            return reason
        try:
            _ = importlib.import_module(self.module).flash_attn_func
        except Exception as error:  # broken binaries raise OSError, missing dependencies anything
            return f"{self.module} cannot be imported ({type(error).__name__})"
        return None

    def variants(self, shape: Shape) -> list[Variant]:
        takes = (shape.scores is None or shape.scores in self.scores) and not shape.dropout_p
        return [Variant(self.name, None, True), Variant(self.name, None, False)] if takes else []

    def prepare(self, variant: Variant, shape: Shape, x: Tensors) -> Calls:
        package, x = importlib.import_module(self.module), without_chunks(shape, x)
        function = package.flash_attn_func if x.cu_seqlens is None else package.flash_attn_varlen_func
        q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
        causal, *sides = mask_arguments(shape)
        window_size = tuple(self.unbounded if side == -1 else side for side in sides)
        options = dict(causal=causal, window_size=window_size, deterministic=variant.deterministic)
        wanted = [q, k, v]
        if shape.softcap:
            options["softcap"] = shape.softcap
        if x.sinks is not None:
            options["learnable_sink"] = x.sinks.detach().requires_grad_()
            wanted.append(options["learnable_sink"])

        def forward():
            result = function(q, k, v, **x.lengths, **options)
            return result[0] if isinstance(result, tuple) else result

        out = forward()
        return _in_turn(forward, lambda: torch.autograd.grad(out, wanted, x.dout, retain_graph=True)[:3])


class FlashAttention3(_FlashAttnPackage):
    name = "fa3"
    module = "flash_attn_interface"
    distribution = "flash_attn_3"
    unbounded = -1
    scores = tuple(SOFTCAPS)


class FlashAttention4(_FlashAttnPackage):
    name = "fa4"
    module = "flash_attn.cute"
    distribution = "flash-attn-4"
    unbounded = None
    scores = (*SOFTCAPS, "sinks")


PEERS = {
    "fa2": TorchFlashAttention2,
    "cudnn": TorchCudnn,
    "cudnn-deterministic": CudnnDeterministic,
    "memory-efficient": TorchMemoryEfficient,
    "fa3": FlashAttention3,
    "fa4": FlashAttention4,
}

"""The implementations in benchmarks.context_parallel: ours, torch's context parallelism, ring-flash-attn's zigzag.

An implementation is prepared with whole tensors, of which it keeps this rank's part, and returns a call of the forward
and the backward through autograd. Importing this module imports no baseline.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import dash_attn
from dash_attn.distributed import context_parallel_attention, shard

# Output and gradients of this rank; tensors are (batch, rows, heads, head_dim) unless an implementation differs.
Results = tuple[Tensor, ...]
Call = Callable[[], Results]
Whole = dict[str, Tensor]
RESULTS = ("out", "dq", "dk", "dv")
TORCH_KERNELS = ("FlashAttention-2", "cuDNN", "FlashAttention-3")


@dataclass(frozen=True)
class Ranks:
    """The processes, one per GPU."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    hosts: dist.ProcessGroup
    """A gloo group, which neither uses a GPU nor waits for one."""

    def gathered(self, value: Any) -> list[Any]:
        """Returns every rank's value."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.hosts)
        return found

    def barrier(self) -> None:
        dist.barrier(group=self.hosts)


def forward_and_backward(attention: Callable[..., Tensor], leaves: list[Tensor], dout: Tensor) -> Results:
    out = attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


class Implementation:
    """An implementation in which each rank computes `attention` of its part of every tensor."""

    name: str
    note: str = ""
    """The kernels, and how they are used."""
    alone = False
    """Whether rank 0 computes while the others wait."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def part(self, x: Tensor) -> Tensor:
        """Returns this rank's part of a whole tensor."""
        raise NotImplementedError

    @contextlib.contextmanager
    def block(self, whole: Whole) -> Iterator[Call]:
        """Yields the call while this implementation has its turn."""
        q, k, v, dout = (self.part(whole[name]) for name in ("q", "k", "v", "dout"))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        yield lambda: forward_and_backward(self.attention, leaves, dout)

    def pairs(self, results: Results, reference: Whole) -> list[tuple[Tensor, Tensor]]:
        """Pairs each result with that of one GPU; within the block."""
        return [(x, self.part(reference[name])) for name, x in zip(RESULTS, results)]


class OneGpu(Implementation):
    name = "one GPU"
    note = "flash_attn_func of the whole"
    alone = True

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dash_attn.flash_attn_func(q, k, v, causal=True)

    def part(self, x: Tensor) -> Tensor:
        return x.detach().clone()


class Ours(Implementation):
    def __init__(self, ranks: Ranks, layout: str):
        super().__init__(ranks)
        self.layout, self.name = layout, f"dash_attn {layout}"
        self.note = "context_parallel_attention"

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(q, k, v, self.ranks.mesh, layout=self.layout, causal=True)

    def part(self, x: Tensor) -> Tensor:
        return shard(x, self.ranks.rank, self.ranks.size, dim=1, layout=self.layout)


class TensorParallel(OneGpu):
    """Each rank has its heads of every tensor, and nothing is sent."""

    name = "dash_attn by heads"
    note = "flash_attn_func of this rank's heads (tensor parallelism)"
    alone = False

    def part(self, x: Tensor) -> Tensor:
        heads = x.shape[2] // self.ranks.size
        return x[:, :, self.ranks.rank * heads : (self.ranks.rank + 1) * heads].detach().clone()


class RingZigzag(Implementation):
    """ring-flash-attn's zigzag with the fastest available kernels, which may be non-deterministic."""

    name = "ring-flash-attn zigzag"

    def __init__(self, ranks: Ranks):
        super().__init__(ranks)
        kernels, self.note = ring_kernels(ranks.device)
        self._function = import_ring("zigzag_ring_flash_attn", kernels).zigzag_ring_flash_attn_func

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._function(q, k, v, causal=True, deterministic=False, group=self.ranks.mesh.get_group())

    def part(self, x: Tensor) -> Tensor:
        return shard(x, self.ranks.rank, self.ranks.size, dim=1, layout="zigzag")


class TorchContextParallel(Implementation):
    """torch's context parallelism with its load balancing; its tensors are (batch, heads, rows, head_dim).

    Args:
        ranks: the processes.
        kernels: one of TORCH_KERNELS. FlashAttention-3 replaces torch's FlashAttention-2 through torch's own
            registration while it has its turn.
        rotation: how keys and values are exchanged, "allgather" or "alltoall".
        grouped: whether torch receives grouped KV heads; otherwise each is repeated for its query heads, within the
            measured time.
    """

    def __init__(self, ranks: Ranks, kernels: str, rotation: str, grouped: bool):
        super().__init__(ranks)
        if kernels == "FlashAttention-3" and ranks.device.type == "cpu":
            raise RuntimeError("needs a GPU")
        self.kernels, self.rotation, self.grouped = kernels, rotation, grouped
        self.name = f"torch context parallel, {kernels}"
        self.note = f"{rotation}, {'grouped heads' if grouped else 'KV heads repeated'}"
        if ranks.device.type == "cpu":
            self.note += "; a trial on CPUs, with our reference as kernels"

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        if self.ranks.device.type == "cpu":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)

    @contextlib.contextmanager
    def block(self, whole: Whole) -> Iterator[Call]:
        from torch.distributed.tensor.experimental import _attention as parallel
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if self.ranks.device.type == "cpu":
            torch_attention_on_cpu()
        backend = SDPBackend.CUDNN_ATTENTION if self.kernels == "cuDNN" else SDPBackend.FLASH_ATTENTION
        parallel.set_rotate_method(self.rotation)
        parallel._cp_options.enable_load_balance = True
        # The buffers are cut in place, and are whole again after the block.
        buffers = [whole[name].transpose(1, 2).contiguous() for name in ("q", "k", "v", "dout")]
        with self._registered(), context_parallel(self.ranks.mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            leaves = [x.detach().requires_grad_() for x in buffers[:3]]

            def call() -> Results:
                with sdpa_kernel(backend):
                    return forward_and_backward(self.attention, leaves, buffers[3])

            yield call

    @contextlib.contextmanager
    def _registered(self) -> Iterator[None]:
        from torch.nn.attention import _registry

        if self.kernels != "FlashAttention-3":
            yield
            return
        _registry.activate_flash_attention_impl("FA3")
        try:
            yield
        finally:
            _registry.restore_flash_attention_impl()

    def pairs(self, results: Results, reference: Whole) -> list[tuple[Tensor, Tensor]]:
        from torch.distributed.tensor.experimental._attention import context_parallel_unshard

        whole = context_parallel_unshard(self.ranks.mesh, list(results), [2] * 4)
        return [(x.transpose(1, 2), reference[name]) for name, x in zip(RESULTS, whole)]


ROWS = (
    "dash_attn contiguous", "dash_attn zigzag", "dash_attn by heads",
    *(f"torch context parallel, {kernels}" for kernels in TORCH_KERNELS), "ring-flash-attn zigzag",
)  # fmt: skip


def candidates(ranks: Ranks, kv_heads: int) -> dict[str, list[Callable[[], Implementation]]]:
    """Returns for each row the ways to compute it, in the order of trial. The fastest that works is measured."""
    ours = [lambda: Ours(ranks, "contiguous"), lambda: Ours(ranks, "zigzag"), lambda: TensorParallel(ranks)]
    of_torch = [
        [
            functools.partial(TorchContextParallel, ranks, kernels, rotation, grouped)
            for grouped in (True, False)
            for rotation in ("allgather", "alltoall")
        ]
        for kernels in TORCH_KERNELS
    ]
    found = dict(zip(ROWS, ([[way] for way in ours] + of_torch + [[lambda: RingZigzag(ranks)]]), strict=True))
    if ranks.size > kv_heads:
        del found[TensorParallel.name]
    return found


def torch_attention_on_cpu() -> None:
    """Uses our reference instead of torch's GPU kernels, for tests on CPUs."""
    import dash_attn.integrations.torch as door

    # torch's context parallelism replaces a function by its name.
    def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]

    F.scaled_dot_product_attention = scaled_dot_product_attention
    door.activate(device_types=["cpu"], fallback="error")


def import_ring(name: str, kernels: types.ModuleType) -> Any:
    """Imports a module of ring_flash_attn on these kernels, without its __init__, which needs parts of transformers."""
    if "ring_flash_attn" not in sys.modules:
        specification = importlib.util.find_spec("ring_flash_attn")
        if specification is None:
            raise ImportError("ring_flash_attn is not installed")
        package = types.ModuleType("ring_flash_attn")
        package.__path__ = list(specification.submodule_search_locations or [])
        flash_attn: Any = types.ModuleType("flash_attn")
        flash_attn.flash_attn_interface = kernels
        names = {"flash_attn": flash_attn, "flash_attn.flash_attn_interface": kernels, "ring_flash_attn": package}
        sys.modules.update(names)
    return importlib.import_module(f"ring_flash_attn.{name}")


def ring_kernels(device: torch.device) -> tuple[types.ModuleType, str]:
    """Returns a replacement of flash_attn, from which ring-flash-attn imports two private functions, and its name."""
    if device.type == "cpu":
        from dash_attn.compat import flash_attn_2

        return flash_attn_2, "a trial on CPUs, with our reference as kernels"
    try:
        return flash_attention_3(), "FlashAttention-3 through a shim of flash_attn's private functions"
    except Exception as error:  # a broken library may raise anything
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return flash_attention_2(), f"torch's FlashAttention-2 through a shim (FlashAttention-3: {why})"


def flash_attention_3() -> types.ModuleType:
    peer = importlib.import_module("flash_attn_interface")

    # The names and the order that ring-flash-attn uses. Arguments that it never uses must have their neutral values.
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    ):  # fmt: skip
        _require_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
        out, lse, *_ = peer._flash_attn_forward(q, k, v, softmax_scale=softmax_scale, causal=causal)
        return out, lse, None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
    ):  # fmt: skip
        _require_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
        peer._flash_attn_backward(
            dout, q, k, v, out, softmax_lse.contiguous(), dq=dq, dk=dk, dv=dv,
            softmax_scale=softmax_scale, is_causal=causal, deterministic=deterministic,
        )  # fmt: skip

    return _module(_flash_attn_forward, _flash_attn_backward)


def flash_attention_2() -> types.ModuleType:
    aten = torch.ops.aten

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    ):  # fmt: skip
        _require_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
        lengths = None, None, q.shape[1], k.shape[1]
        out, lse, *_ = aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, scale=softmax_scale)
        return out, lse, None, None

    unused: list[Tensor] = []

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None,
    ):  # fmt: skip
        _require_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
        if not unused:  # the state of dropout, which is off
            unused.extend(aten._flash_attention_forward(
                *(x[:, :128] for x in (q, k, v)), None, None, 128, 128, 0.0, causal, False)[2:4])  # fmt: skip
        gradients = aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out, softmax_lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal,
            *unused, scale=softmax_scale,
        )  # fmt: skip
        for into, gradient in zip((dq, dk, dv), gradients):
            into.copy_(gradient)

    return _module(_flash_attn_forward, _flash_attn_backward)


def _module(*functions: Callable[..., Any]) -> types.ModuleType:
    module = types.ModuleType("flash_attn.flash_attn_interface")
    vars(module).update({function.__name__: function for function in functions})
    return module


def _require_plain(dropout_p, left, right, softcap, alibi_slopes) -> None:
    if dropout_p or (left, right) != (-1, -1) or softcap or alibi_slopes is not None:
        raise NotImplementedError("the shim supports only the causal and the full mask, without changed scores")

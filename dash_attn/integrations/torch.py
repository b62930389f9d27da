"""dash_attn as the implementation of PyTorch's own attention.

    import dash_attn.integrations.torch
    dash_attn.integrations.torch.activate()

PyTorch's `scaled_dot_product_attention`, `varlen_attn`, attention of jagged nested tensors, and context parallelism
call a few ops of the aten namespace. A registered implementation may replace the FlashAttention-2 kernels of these ops
(torch.nn.attention.register_flash_attention_impl, torch 2.11 or newer). This module registers dash_attn as one. Models
that call the functions above then have gradients with the same bits in every run, in eager mode and compiled, without
any changes. docs/integrations/torch.md lists what is covered.

The state belongs to the process: a child created by fork inherits it, and a spawned child must call `activate` itself.
Any number of threads may call attention, but none may do so while `activate` or `restore` runs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention import _registry

from dash_attn import ops as _ops
from dash_attn import schedule as _schedule
from dash_attn.checks import as_window

__all__ = ["activate", "is_active", "register", "restore"]

NAME = "dash_attn"
_DISPATCH_KEYS = {"cuda": "CUDA", "cpu": "CPU"}
_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8
_DENSE = (None, None, None, None)  # cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
_ANY_WINDOW = (-1, -1)

_lock = threading.RLock()
_installed: _Installed | None = None
# For each name that this module has taken: its earlier registration, or None.
_former_registrations: dict[str, Callable[..., Any] | None] = {}
_former_active: str | None = None


def activate(
    *,
    forward: str = NAME,
    device_types: Sequence[str] = ("cuda",),
    fallback: str = "former",
    schedule: _schedule.Schedule = "auto",
) -> None:
    """Makes dash_attn the kernel of PyTorch's FlashAttention ops, until `restore`.

    An active implementation, such as "FA3", is replaced and comes back with `restore`. A second call replaces the
    choices of the first; one `restore` ends both. With "cuda", cuDNN's attention, which PyTorch prefers on Hopper GPUs,
    is turned off (torch.backends.cuda.enable_cudnn_sdp) until `restore`.

    Args:
        forward: the implementation of the forward: "dash_attn"; "torch", PyTorch's own kernels; or the name of a
            registered implementation, such as "FA3". With the latter two, dash_attn computes only the backward: outputs
            keep the bits of that forward, and the gradients are deterministic.
        device_types: the devices whose tensors use dash_attn: "cuda" and "cpu". On a CPU, dash_attn's slow reference
            computes, for tests; PyTorch's functions call it there for bf16 and fp16.
        fallback: what happens to a call that this module does not support: dropout, ALiBi slopes, paged keys
            (block_table), a head_dim above 256 or not a multiple of 8, other dtypes, or GPUs other than Hopper.
            "former": the replaced kernel runs, with a warning for the first call of each kind; its gradients have the
            same bits in every run only with torch.use_deterministic_algorithms(True). "error": NotImplementedError.
        schedule: the order of the backward's sums, as in `dash_attn.flash_attn_func`.

    Raises:
        TypeError: an argument has the wrong type; the message names the argument.
        ValueError: an argument has an unsupported value; the message names the argument.
        RuntimeError: "cuda" is in `device_types` and torch has CUDA, but this installation has no kernels; the message
            gives the reason.
    """
    global _former_active
    with _lock:
        former = _former_active if is_active() else _registry.current_flash_attention_impl()
        register(NAME, forward=forward, device_types=device_types, fallback=fallback, schedule=schedule)
        _former_active = former
        try:
            _registry.activate_flash_attention_impl(NAME)
        except BaseException:
            restore()
            raise


def restore() -> None:
    """Undoes `activate` and `register`. Without an earlier call, nothing happens.

    The kernels, the preference for cuDNN, names such as "FA3", and the active implementation are restored.
    """
    global _former_active
    with _lock:
        if is_active():
            _registry.restore_flash_attention_impl()
        for name, registration in _former_registrations.items():
            if registration is None:
                _registry._FLASH_ATTENTION_IMPLS.pop(name, None)
            else:
                _registry.register_flash_attention_impl(name, register_fn=registration)
        _former_registrations.clear()
        former, _former_active = _former_active, None
        if former is not None and _registry.current_flash_attention_impl() is None:
            _registry.activate_flash_attention_impl(former)


def is_active() -> bool:
    """Whether PyTorch's FlashAttention ops use dash_attn, through `activate` or a name given to `register`."""
    return _installed is not None


def register(
    name: str = NAME,
    *,
    forward: str = NAME,
    device_types: Sequence[str] = ("cuda",),
    fallback: str = "former",
    schedule: _schedule.Schedule = "auto",
) -> None:
    """Registers dash_attn under a name for torch.nn.attention.activate_flash_attention_impl, without activating it.

    This serves code that activates an implementation by a fixed name: torchtitan activates "FA3" on a Hopper GPU, and
    gets dash_attn after register("FA3"). `restore` returns the name to its earlier registration.

    Args:
        name: the name. An existing registration is replaced.
        forward: as in `activate`; `name` itself selects the earlier registration of that name.
        device_types: as in `activate`.
        fallback: as in `activate`.
        schedule: as in `activate`.

    Raises:
        TypeError, ValueError, RuntimeError: as in `activate`.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a non-empty string, got {name!r}")
    with _lock:
        kernel_of_forward = _registered_forward(forward)
        install = functools.partial(
            _install, kernel_of_forward, forward == NAME, _as_device_types(device_types),
            _one_of("fallback", fallback, ("former", "error")),
            _one_of("schedule", schedule, ("auto", *_schedule.POLICIES)),
        )  # fmt: skip
        if "cuda" in device_types and torch.version.cuda and _ops.why_no_kernels is not None:
            raise RuntimeError(_ops.why_no_kernels)
        if name not in _former_registrations:
            _former_registrations[name] = _registry._FLASH_ATTENTION_IMPLS.get(name)
        _registry.register_flash_attention_impl(name, register_fn=install)


def _one_of(argument: str, value: object, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def _as_device_types(device_types: Sequence[str]) -> tuple[str, ...]:
    if isinstance(device_types, str) or not isinstance(device_types, Sequence):
        raise TypeError(f"device_types must be a sequence of 'cuda' and 'cpu', got {device_types!r}")
    found = tuple(dict.fromkeys(device_types))
    if not found or not set(found) <= set(_DISPATCH_KEYS):
        raise ValueError(f"device_types must be one or both of 'cuda' and 'cpu', got {device_types!r}")
    return found


def _registered_forward(forward: object) -> Callable[..., Any] | None:
    """Returns the function that activates the implementation of the forward; None for dash_attn's and PyTorch's own."""
    if forward in (NAME, "torch"):
        return None
    others = {**_registry._FLASH_ATTENTION_IMPLS, **_former_registrations}
    others = {name: registration for name, registration in others.items() if registration is not None}
    return others[_one_of("forward", forward, (NAME, "torch", *others))]


class _NotServed(Exception):
    """A call asks for something that this module does not support: its kind, and its description."""

    def __init__(self, kind: str, what: str):
        super().__init__(what)
        self.kind = kind


def _require_served(query: Tensor, value: Tensor, dropout_p: float, **unserved: object) -> None:
    """Raises _NotServed unless the kernels support these tensors. `unserved`: arguments that must be None or False."""
    if query.dtype not in _DTYPES:
        raise _NotServed("dtype", f"tensors of dtype {query.dtype}")
    if query.is_cuda and _capability(query.device.index) != _ops.HOPPER:
        raise _NotServed("device", f"GPUs of compute capability {_capability(query.device.index)}")
    for head_dim in (query.size(-1), value.size(-1)):
        if head_dim > _MAX_HEAD_DIM or head_dim % _HEAD_DIM_MULTIPLE:
            raise _NotServed("head_dim", f"a head_dim of {head_dim}")
    if dropout_p != 0.0:
        raise _NotServed("dropout_p", f"dropout_p={dropout_p}")
    for name, argument in unserved.items():
        if argument is not None and argument is not False:
            raise _NotServed(name, name)


def _require_square_if_causal(query: Tensor, key: Tensor, is_causal: bool) -> None:
    """On a CPU, PyTorch aligns the first query with the first key, but dash_attn aligns the last ones."""
    if is_causal and query.size(2) != key.size(2):
        raise _NotServed("is_causal", f"is_causal with {query.size(2)} queries and {key.size(2)} keys")


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, *, pack: tuple[Tensor | None, ...] = _DENSE,
    window: tuple[int, int] = _ANY_WINDOW,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    softmax_scale = q.size(-1) ** -0.5 if scale is None else scale
    return torch.ops.dash_attn.forward.default(q, k, v, *pack, softmax_scale, causal, *window, 0)


def _in_layout_of(like: Tensor, out: Tensor) -> Tensor:
    """Returns `out` with the strides of torch.empty_like(like), which the ops' meta functions promise."""
    # Strides in the order of `like`, also if values have another head_dim.
    if out.stride() == like.stride() or out.shape != like.shape:
        return out
    strides = torch.empty_like(like, device="meta").stride()
    if all(size == 1 or a == b for size, a, b in zip(out.shape, out.stride(), strides)):
        return out
    return torch.empty_like(like).copy_(out)


def _unused_results(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rng_state, unused and debug_attn_mask, which only dropout uses."""
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return rng_state, rng_state.new_empty(()), query.new_empty(0)


class _Ops:
    """The aten ops, computed with dash_attn's ops. Each method has the arguments of its op in all versions of torch."""

    def __init__(self, schedule: str):
        self._schedule = schedule

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, gradients: list[Tensor],
        scale: float | None, causal: bool, *, pack: tuple[Tensor | None, ...] = _DENSE,
        window: tuple[int, int] = _ANY_WINDOW,
    ) -> None:  # fmt: skip
        """Writes the gradients of q, k and v into `gradients`."""
        softmax_scale = q.size(-1) ** -0.5 if scale is None else scale
        torch.ops.dash_attn.backward.default(
            dout, q, k, v, out, softmax_lse, *gradients, *pack, softmax_scale, causal, *window, 0, self._schedule, 0
        )

    def _scaled_dot_product_flash_attention(
        self, query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
    ):  # fmt: skip
        _require_served(query, value, dropout_p, return_debug_mask=return_debug_mask)
        out, softmax_lse = self._sdpa_results(query, key, value, scale, is_causal)
        return out, softmax_lse, None, None, query.size(2), key.size(2), *_unused_results(query)

    def _scaled_dot_product_flash_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        philox_seed, philox_offset, *, scale=None,
    ):  # fmt: skip
        _require_served(query, value, dropout_p)
        return self._sdpa_gradients(
            grad_out, query, key, value, out, logsumexp, [torch.empty_like(x) for x in (query, key, value)], scale,
            is_causal,
        )  # fmt: skip

    def _sdpa_results(self, query, key, value, scale, is_causal):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, softmax_lse = _forward(q, k, v, scale, is_causal)
        return _in_layout_of(query, out.transpose(1, 2)), softmax_lse

    def _sdpa_gradients(self, grad_out, query, key, value, out, logsumexp, gradients, scale, is_causal):
        dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        self._backward(dout, q, k, v, o, logsumexp, [x.transpose(1, 2) for x in gradients], scale, is_causal)
        return tuple(gradients)

    def _scaled_dot_product_flash_attention_for_cpu(
        self, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None
    ):  # fmt: skip
        _require_served(query, value, dropout_p, attn_mask=attn_mask)
        _require_square_if_causal(query, key, is_causal)
        out, softmax_lse = self._sdpa_results(query, key, value, scale, is_causal)
        # The layouts of torch's CPU kernel.
        softmax_lse = softmax_lse.transpose(1, 2).contiguous().transpose(1, 2)
        return out, softmax_lse

    def _scaled_dot_product_flash_attention_for_cpu_backward(
        self, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
    ):  # fmt: skip
        _require_served(query, value, dropout_p, attn_mask=attn_mask)
        _require_square_if_causal(query, key, is_causal)
        gradients = [
            torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype, device=x.device) for x in (query, key, value)
        ]
        return self._sdpa_gradients(grad_out, query, key, value, out, logsumexp, gradients, scale, is_causal)

    def _flash_attention_forward(
        self, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
        scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
        num_splits=None,
    ):  # fmt: skip
        out, softmax_lse = self._flash_forward(
            query, key, value, cum_seq_q, cum_seq_k, dropout_p, is_causal, return_debug_mask, scale, window_size_left,
            window_size_right, seqused_k, alibi_slopes, block_table,
        )  # fmt: skip
        return _in_layout_of(query, out), softmax_lse, *_unused_results(query)

    def _flash_attention_forward_no_dropout_inplace(
        self, out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
        scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
        num_splits=None,
    ):  # fmt: skip
        result, softmax_lse = self._flash_forward(
            query, key, value, cum_seq_q, cum_seq_k, dropout_p, is_causal, return_debug_mask, scale, window_size_left,
            window_size_right, seqused_k, alibi_slopes, block_table,
        )  # fmt: skip
        out.copy_(result)
        return softmax_lse

    def _flash_forward(
        self, query, key, value, cum_seq_q, cum_seq_k, dropout_p, is_causal, return_debug_mask, scale, window_left,
        window_right, seqused_k, alibi_slopes, block_table,
    ):  # fmt: skip
        # num_splits, which no caller passes on, is a hint to divide the keys. dash_attn never divides them.
        _require_served(
            query, value, dropout_p, return_debug_mask=return_debug_mask, alibi_slopes=alibi_slopes,
            block_table=block_table,
        )  # fmt: skip
        pack = (cum_seq_q, cum_seq_k, None, seqused_k)
        window = as_window((window_left, window_right))
        return _forward(query, key, value, scale, is_causal, pack=pack, window=window)

    def _flash_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        _require_served(query, value, dropout_p)
        gradients = [torch.empty_like(x) for x in (query, key, value)]
        pack = (cum_seq_q, cum_seq_k, None, None)
        window = as_window((window_size_left, window_size_right))
        self._backward(
            grad_out, query, key, value, out, logsumexp, gradients, scale, is_causal, pack=pack, window=window
        )  # fmt: skip
        return tuple(gradients)


_BACKWARD_OPS = ("_scaled_dot_product_flash_attention_backward", "_flash_attention_backward")
_FORWARD_OPS = (
    "_scaled_dot_product_flash_attention", "_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace"
)  # fmt: skip
# F.scaled_dot_product_attention uses separate ops on a CPU.
_CPU_BACKWARD_OPS = ("_scaled_dot_product_flash_attention_for_cpu_backward",)
_CPU_FORWARD_OPS = ("_scaled_dot_product_flash_attention_for_cpu",)


def _install(
    kernel_of_forward: Callable[..., Any] | None, has_forward: bool, device_types: tuple[str, ...], fallback: str,
    schedule: str,
) -> _Installed:  # fmt: skip
    """Installs the ops. PyTorch calls this function, keeps the result, and calls its remove()."""
    undo = contextlib.ExitStack()
    with undo:
        if kernel_of_forward is not None:
            # Installed first, so that the backward ops override its own.
            beneath = kernel_of_forward()
            if beneath is not None:
                undo.callback(beneath.remove)
        library = torch.library.Library("aten", "IMPL")
        undo.callback(library._destroy)
        ops, former_calls = _Ops(schedule), _FormerCalls(fallback)
        for device_type in device_types:
            for name in _ops_of(device_type, has_forward):
                kernel = former_calls.behind(name, _DISPATCH_KEYS[device_type], getattr(ops, name))
                with warnings.catch_warnings():
                    # The warning that a kernel is overridden, which is intended here.
                    warnings.filterwarnings("ignore", message="(?s)Warning only once for all operators")
                    library.impl(name, kernel, _DISPATCH_KEYS[device_type], with_keyset=True, allow_override=True)
        if "cuda" in device_types:
            undo.callback(_move_cudnn_aside())
        return _Installed(undo.pop_all())


def _ops_of(device_type: str, has_forward: bool) -> list[str]:
    is_cpu = device_type == "cpu"
    names = _BACKWARD_OPS + (_CPU_BACKWARD_OPS if is_cpu else ())
    if has_forward:
        names += _FORWARD_OPS + (_CPU_FORWARD_OPS if is_cpu else ())
    return [name for name in names if hasattr(torch.ops.aten, name)]


class _Installed:
    """The handle that PyTorch holds while dash_attn is active."""

    def __init__(self, undo: contextlib.ExitStack):
        global _installed
        self._undo = undo
        _installed = self

    def remove(self) -> None:
        global _installed
        self._undo.close()
        if _installed is self:
            _installed = None


def _move_cudnn_aside() -> Callable[[], None]:
    """Turns cuDNN's attention off, and returns a function that undoes this."""
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    # In torch 2.14, varlen_attn prefers cuDNN regardless of that switch.
    should_use_cudnn = getattr(varlen, "_should_use_cudnn", None)
    if should_use_cudnn is not None:
        varlen._should_use_cudnn = _never

    def undo() -> None:
        if was_enabled:
            torch.backends.cuda.enable_cudnn_sdp(True)
        if should_use_cudnn is not None:
            varlen._should_use_cudnn = should_use_cudnn

    return undo


def _never(device_index: int) -> bool:
    return False


class _FormerCalls:
    """The replaced kernels, for calls that dash_attn does not support."""

    def __init__(self, fallback: str):
        self._fallback = fallback
        self._warned: dict[str, object] = {}

    def behind(self, op: str, dispatch_key: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `compute` as a kernel for the dispatcher. If `compute` raises _NotServed, the former kernel runs."""
        try:
            former = torch.library.get_kernel(f"aten::{op}", dispatch_key)
        except RuntimeError:  # no kernel is registered
            former = None

        def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            try:
                return compute(*args, **kwargs)
            except _NotServed as missing:
                kind, what = missing.kind, str(missing)
            if former is None or self._fallback == "error":
                self._refuse(op, what, former is None)
            mine = object()
            if self._warned.setdefault(kind, mine) is mine:
                warnings.warn(
                    f"{__name__} does not support {what}: {op} runs the kernel that dash_attn replaces, whose "
                    "gradients have the same bits in every run only with torch.use_deterministic_algorithms(True); "
                    "activate(fallback='error') raises an error instead",
                    stacklevel=2,
                )
            return former.call_boxed(keyset, *args, **kwargs)

        return kernel

    def _refuse(self, op: str, what: str, has_no_former: bool) -> NoReturn:
        why = "and PyTorch has no kernel here either" if has_no_former else "and fallback is 'error'"
        raise NotImplementedError(f"{op}: {__name__} does not support {what}, {why}")

"""The hooks through which a recorder observes a model's tensors and an optimizer's state."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from .shards import Shard, is_dtensor

# Parts of names that wrappers add. They are removed, so that wrapping does not change the names.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class Records(Protocol):
    """The interface of a recorder that the hooks use."""

    @property
    def is_recording(self) -> bool: ...
    @property
    def world_size(self) -> int: ...
    def record(
        self, tensor: torch.Tensor, name: str, kind: str, *, shard: Shard | None = None, local: bool | None = None
    ) -> None: ...
    def record_parameter(self, tensor: torch.Tensor, name: str, kind: str, parameter: str | None = None) -> None: ...
    def tap(self, tensor: torch.Tensor, name: str, *, shard: Shard | None = None) -> torch.Tensor: ...
    def together(self) -> AbstractContextManager[None]: ...


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in dicts, lists and tuples, with names such as `data.tokens` and `data[0]`."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_in(part, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from tensors_in(part, f"{name}[{index}]")


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        model = model.module
    return model


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _nothing(*_: Any) -> None:
    pass


class _Hook:
    """A hook of one module. In copies and pickles of the module, the hook does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


class Watch:
    """Hooks on a model and an optimizer, which pass tensors to a recorder.

    Raises:
        ValueError: an entry of `taps` matches no module, or the optimizer holds parameters that are not the model's.
    """

    def __init__(
        self,
        recorder: Records,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        taps: tuple[str, ...],
    ) -> None:
        if taps and model is None:
            raise ValueError(f"taps must be empty without a model, got {taps}")
        self._recorder = recorder
        self._model = None if model is None else _unwrapped(model)
        self._handles: list[Any] = []
        # Holding the parameters keeps their ids from being reused.
        self._hooked: dict[int, torch.nn.Parameter] = {}
        # The names of the parameters, in the order in which this step's gradients arrived.
        self._order: dict[str, None] = {}
        modules = [] if self._model is None else [(_clean(n), m) for n, m in self._model.named_modules()]
        tapped = [(name, module) for name, module in modules if any(_matches(name, pattern) for pattern in taps)]
        for pattern in taps:
            if not any(_matches(name, pattern) for name, _ in modules):
                some = ", ".join(name for name, _ in modules[1:6])
                raise ValueError(f"taps must name modules of the model ({some}, ...), got {pattern!r}")
        if optimizer is not None:
            known = {id(parameter) for _, parameter in self._parameters()}
            if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
                raise ValueError("optimizer must hold only parameters of the model, got others")
        try:
            for name, module in modules:
                # FSDP2 places the whole parameters in a module just before the module runs.
                self._handles.append(module.register_forward_pre_hook(_Hook(self._hook_parameters(name))))
            for name, module in tapped:
                self._handles.append(module.register_forward_hook(_Hook(self._tap_outputs(name or "model"))))
            if optimizer is not None:
                self._handles.append(optimizer.register_step_pre_hook(self._before_optimizer))
                self._handles.append(optimizer.register_step_post_hook(self._after_optimizer))
        except BaseException:
            self.remove()
            raise

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        if self._model is not None:
            for name, parameter in self._model.named_parameters():
                yield _clean(name), parameter

    def _hook_parameters(self, module_name: str):
        @torch.compiler.disable
        def before_forward(module: torch.nn.Module, _: Any) -> None:
            if not self._recorder.is_recording:
                return
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in self._hooked:
                    full_name = _clean(f"{module_name}.{name}" if module_name else name)
                    self._hooked[id(parameter)] = parameter
                    hook = self._after_gradient(full_name)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

        return before_forward

    def _after_gradient(self, name: str):
        def after(parameter: torch.Tensor) -> None:
            if not self._recorder.is_recording:
                return
            self._order[name] = None
            # FSDP2's sharded parameters receive their gradients after the reduction.
            if self._recorder.world_size > 1 and parameter.grad is not None and not is_dtensor(parameter):
                self._recorder.record(parameter.grad, name, "local_gradient", local=True)

        return after

    def _tap_outputs(self, name: str):
        @torch.compiler.disable
        def after_forward(_: torch.nn.Module, __: Any, output: Any) -> None:
            for own_name, tensor in tensors_in(output, name):
                self._recorder.tap(tensor, own_name)

        return after_forward

    def before_step(self) -> None:
        self._order = {}
        with self._recorder.together():
            for name, parameter in self._parameters():
                self._recorder.record_parameter(parameter, name, "weights")
            self._record_buffers("buffers")

    def after_step(self) -> None:
        with self._recorder.together():
            self._record_buffers("updated_buffers")

    def _record_buffers(self, kind: str) -> None:
        if self._model is not None:
            for name, buffer in self._model.named_buffers():
                self._recorder.record_parameter(buffer, _clean(name), kind)

    def _before_optimizer(self, *_: Any) -> None:
        if not self._recorder.is_recording:
            return
        parameters = dict(self._parameters())
        with self._recorder.together():
            for name in dict.fromkeys([*self._order, *parameters]):
                parameter = parameters.get(name)
                if parameter is not None and parameter.grad is not None:
                    self._recorder.record_parameter(parameter.grad, name, "gradient")

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._recorder.is_recording:
            return
        with self._recorder.together():
            for name, parameter in self._parameters():
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        self._recorder.record_parameter(value, f"{name}.{key}", "state", name)
            for name, parameter in self._parameters():
                self._recorder.record_parameter(parameter, name, "updated_weights")

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._hooked = [], {}

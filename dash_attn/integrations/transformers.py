"""dash_attn as an attention implementation of Hugging Face transformers.

    from dash_attn.integrations.transformers import install

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=install())

transformers loads attention through the `kernels` package. `install` tells this package that "dash-attn/flash" is a
folder of dash_attn, so nothing is downloaded. transformers then treats the name like every flash attention: with
padding masks, packed sequences, windows, soft caps and sinks. Unlike other flash attentions, dash_attn also takes 4D
attention masks. docs/integrations/transformers.md lists what is covered.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from . import _transformers_masks

__all__ = ["install", "uninstall", "why_unavailable"]

NAME = "dash-attn/flash"
_FOLDER = Path(__file__).parent / "transformers_kernel"
_ENVIRONMENT = "LOCAL_KERNELS"  # "name=folder:name=folder", which kernels reads at each load
_OLDEST_TRANSFORMERS = "5.16"
# Models with sinks list the implementations that support sinks. dash_attn supports all features of this one.
_PEER_WITH_SINKS = "flash_attention_4"
_CHECK = "_check_and_adjust_attn_implementation"
# Continuous batching calls it in this module to find out whether an implementation is FlashAttention 2 or 3, which read
# paged keys.
_BATCHING, _ASKED = "transformers.generation.continuous_batching.initialization", "is_flash_attention_requested"


def install() -> str:
    """Makes ``attn_implementation="dash-attn/flash"`` known to transformers, without using the network.

    The function adds an entry to the environment variable LOCAL_KERNELS of this process, which processes started later
    inherit. It also wraps the method with which a transformers model checks the name, so that models that list their
    implementations (gpt_oss) accept this one, and the function with which continuous batching asks whether an
    implementation reads paged keys. Calling the function again changes nothing.

    Returns:
        The name, for ``attn_implementation``.

    Raises:
        ImportError: transformers or kernels is not installed, or its version is not supported.
        ValueError: LOCAL_KERNELS maps "dash-attn/flash" to another folder, or the path of this package's folder
            contains a colon, which LOCAL_KERNELS cannot represent.
    """
    model_class = _checked_model_class()
    if ":" in str(_FOLDER):
        raise ValueError(f"{_ENVIRONMENT} cannot hold a folder with a colon in its path, got {_FOLDER}")
    entries = _entries()
    others = [entry for entry in entries if entry.partition("=")[0] == NAME and entry != _entry()]
    if others:
        raise ValueError(f"{_ENVIRONMENT} must map {NAME} to {_FOLDER} or leave it out, got {others[0]}")
    if _entry() not in entries:
        os.environ[_ENVIRONMENT] = ":".join([*entries, _entry()])
    check = getattr(model_class, _CHECK)
    if not hasattr(check, "__dash_attn__"):
        setattr(model_class, _CHECK, _with_models_that_list(check))
    batching = _batching_module()
    asked = getattr(batching, _ASKED, None)
    if asked is not None and not hasattr(asked, "__dash_attn__"):
        setattr(batching, _ASKED, _with_paged_keys(asked))
    return NAME


def uninstall() -> None:
    """Undoes `install`. Without an earlier `install`, nothing happens.

    A process that has loaded "dash-attn/flash" keeps it, and so do its models, because transformers never forgets an
    implementation.
    """
    entries = [entry for entry in _entries() if entry != _entry()]
    if entries:
        os.environ[_ENVIRONMENT] = ":".join(entries)
    else:
        os.environ.pop(_ENVIRONMENT, None)
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return
    for owner, name in ((PreTrainedModel, _CHECK), (_batching_module(), _ASKED)):
        original = getattr(getattr(owner, name, None), "__dash_attn__", None)
        if original is not None:
            setattr(owner, name, original)


def why_unavailable() -> str | None:
    """Returns why `install` would raise an ImportError (what is missing, or which version is unsupported), or None."""
    try:
        _checked_model_class()
    except ImportError as error:
        return str(error)
    return None


def _entry() -> str:
    return f"{NAME}={_FOLDER}"


def _entries() -> list[str]:
    return [entry for entry in os.environ.get(_ENVIRONMENT, "").split(":") if entry]


def _checked_model_class() -> type:
    """Returns the base class of transformers' models after checking that models can load this kind of
    implementation."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        wanted = f"transformers>={_OLDEST_TRANSFORMERS}"
        raise ImportError(f"{NAME} needs transformers: pip install '{wanted}' ({error})") from error
    from packaging.version import Version
    from transformers.utils import import_utils

    version = transformers.__version__
    if Version(version) < Version(_OLDEST_TRANSFORMERS):
        raise ImportError(f"{NAME} needs transformers {_OLDEST_TRANSFORMERS} or newer, got {version}")
    try:
        kernels = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        kernels = "none"
    oldest, limit = import_utils.KERNELS_MIN_VERSION, import_utils.KERNELS_MAX_VERSION
    if kernels == "none" or not Version(oldest) <= Version(kernels) < Version(limit):
        raise ImportError(
            f"transformers {version} loads {NAME} through kernels and needs version {oldest} or newer, below {limit}, "
            f"got {kernels}: pip install 'kernels>={oldest},<{limit}'"
        )
    if not hasattr(transformers.PreTrainedModel, _CHECK):
        raise ImportError(f"{NAME} does not support transformers {version}: its models have no {_CHECK}")
    return transformers.PreTrainedModel


def _with_models_that_list(check: Callable[..., str]) -> Callable[..., str]:
    """Wraps `check` for models that list their implementations, which replace others by the first of the list, and for
    4D attention masks."""

    @functools.wraps(check)
    def checked(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation == NAME and _entry() in _entries():
            kind = type(self).__name__
            if not self._supports_flash_attn:
                raise ValueError(f"attn_implementation must not be {NAME} for {kind}, which has no flash attention")
            listed = self._compatible_flash_implementations
            if listed is not None and NAME not in listed:
                if _PEER_WITH_SINKS not in listed:
                    raise ValueError(f"attn_implementation must be one of {listed} for {kind}, got {NAME}")
                self._compatible_flash_implementations = [*listed, NAME]
        chosen = check(self, attn_implementation, *args, **kwargs)
        if chosen == NAME and _entry() in _entries():
            _transformers_masks.register(NAME)
        return chosen

    checked.__dash_attn__ = check  # type: ignore[attr-defined]
    return checked


def _batching_module() -> ModuleType | None:
    """Returns the module of _ASKED; None in versions of transformers that decide elsewhere."""
    try:
        return importlib.import_module(_BATCHING)
    except ModuleNotFoundError:
        return None


def _with_paged_keys(asked: Callable[..., bool]) -> Callable[..., bool]:
    """Wraps `asked` to answer for every version of FlashAttention that dash_attn is one."""

    @functools.wraps(asked)
    def answered(
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return asked(config, requested_attention_implementation, None if name == NAME else version)

    answered.__dash_attn__ = asked  # type: ignore[attr-defined]
    return answered

"""dash_attn as an attention implementation of Hugging Face transformers.

    from dash_attn.integrations.transformers import install

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=install())

`install` tells the `kernels` package, through which transformers loads attention, that "dash-attn/flash" is a folder of
this package. So nothing is downloaded, and transformers does for this name what it does for every flash attention:
padding masks, packs, windows, soft caps and sinks. docs/integrations/transformers.md says what is covered.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "dash-attn/flash"
_FOLDER = Path(__file__).parent / "transformers_kernel"
_ENVIRONMENT = "LOCAL_KERNELS"  # "name=folder:name=folder", read by kernels at each load
_OLDEST_TRANSFORMERS = "5.16"
# Models with sinks list the implementations that have them; this is the one whose features are all here.
_PEER_WITH_SINKS = "flash_attention_4"
_CHECK = "_check_and_adjust_attn_implementation"


def install() -> str:
    """Make ``attn_implementation="dash-attn/flash"`` known to transformers, without any network.

    It adds an entry to the environment variable LOCAL_KERNELS of this process, which processes started from now on
    inherit, and wraps the method by which a transformers model checks the name, so that models that list their
    implementations (gpt_oss) take this one. Calling it again changes nothing.

    Returns:
        The name, for ``attn_implementation``.

    Raises:
        ImportError: transformers or kernels is missing, or of a version that does not fit.
        ValueError: LOCAL_KERNELS names another folder for "dash-attn/flash", or this package lies in a folder whose
            path has a colon, which LOCAL_KERNELS cannot name.
    """
    model_class = _checked_model_class()
    if ":" in str(_FOLDER):
        raise ValueError(f"{_ENVIRONMENT} cannot name a folder with a colon in its path, got {_FOLDER}")
    entries = _entries()
    others = [entry for entry in entries if entry.partition("=")[0] == NAME and entry != _entry()]
    if others:
        raise ValueError(f"{_ENVIRONMENT} must name {_FOLDER} for {NAME} or leave it out, got {others[0]}")
    if _entry() not in entries:
        os.environ[_ENVIRONMENT] = ":".join([*entries, _entry()])
    check = getattr(model_class, _CHECK)
    if not hasattr(check, "__dash_attn__"):
        setattr(model_class, _CHECK, _with_models_that_list(check))
    return NAME


def uninstall() -> None:
    """Undo what `install` did; without it, do nothing.

    A process that has loaded "dash-attn/flash" keeps it, and so do its models: transformers forgets no implementation.
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
    original = getattr(getattr(PreTrainedModel, _CHECK, None), "__dash_attn__", None)
    if original is not None:
        setattr(PreTrainedModel, _CHECK, original)


def why_unavailable() -> str | None:
    """None, or why `install` would raise ImportError: what is missing, or which version does not fit."""
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
    """The base class of transformers' models, once it is known that they can load an implementation of this kind."""
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
            f"transformers {version} loads {NAME} through kernels, {oldest} or newer and older than {limit}, "
            f"got {kernels}: pip install 'kernels>={oldest},<{limit}'"
        )
    if not hasattr(transformers.PreTrainedModel, _CHECK):
        raise ImportError(f"{NAME} does not know transformers {version}: its models have no {_CHECK}")
    return transformers.PreTrainedModel


def _with_models_that_list(check: Callable[..., str]) -> Callable[..., str]:
    """`check`, for models that list the implementations they take; it would replace others by the first of the list."""

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
        return check(self, attn_implementation, *args, **kwargs)

    checked.__dash_attn__ = check  # type: ignore[attr-defined]
    return checked

"""dash_attn as an attention backend of SGLang: `python -m sglang.launch_server ... --attention-backend dash_attn`.

SGLang finds this module through the entry point `sglang.srt.plugins` of the installed package and calls `register` in
each of its processes. The backend itself, which imports more of SGLang, is in `sglang_backend`.
docs/integrations/sglang.md lists what the backend supports and what was run.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["register", "why_unavailable"]

NAME = "dash_attn"
_BACKEND = "dash_attn.integrations.sglang_backend"


def register() -> str:
    """Makes the backend known to SGLang in this process. Calling the function again changes nothing.

    Returns:
        The name, for ``attention_backend``.

    Raises:
        ImportError: SGLang is not installed, or its version has no registry of attention backends.
    """
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    except ImportError as error:
        raise ImportError(
            f"{NAME} needs SGLang with a registry of attention backends (tried: 0.5.23): {error}"
        ) from error
    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(_create)
        choices.add_attention_backend_choices([NAME])
        choices.add_deterministic_attention_backend_choices([NAME])
        choices.add_radix_supported_deterministic_attention_backend_choices([NAME])
    return NAME


def why_unavailable() -> str | None:
    """Returns why SGLang cannot use the backend (what is missing, or what this version of SGLang lacks), or None."""
    try:
        importlib.import_module(_BACKEND)
    except ImportError as error:
        return str(error)
    return None


def _create(runner: Any) -> Any:
    return importlib.import_module(_BACKEND).DashAttentionBackend(runner)

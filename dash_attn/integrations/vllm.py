"""dash_attn as an attention backend of vLLM: `vllm serve ... --attention-backend DASH_ATTN`.

vLLM finds this module through the entry point `vllm.general_plugins` of the installed package and calls `register` in
each of its processes. The backend itself, which imports more of vLLM, is in `vllm_backend`.
docs/integrations/vllm.md lists what the backend supports and what was run.
"""

from __future__ import annotations

import importlib

__all__ = ["register", "why_unavailable"]

NAME = "DASH_ATTN"
_BACKEND = "dash_attn.integrations.vllm_backend"


def register() -> str:
    """Makes the backend known to vLLM in this process. Calling the function again changes nothing.

    Returns:
        The name, for ``attention_backend``.

    Raises:
        ImportError: vLLM is not installed, or its version has no registry of attention backends.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise ImportError(f"{NAME} needs vLLM with a registry of attention backends (tried: 0.32): {error}") from error
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, f"{_BACKEND}.DashAttentionBackend")
    return NAME


def why_unavailable() -> str | None:
    """Returns why vLLM cannot use the backend (what is missing, or what this version of vLLM lacks), or None."""
    try:
        importlib.import_module(_BACKEND)
    except ImportError as error:
        return str(error)
    return None

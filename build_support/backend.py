"""PEP 517 backend: setuptools', asking for the build requirements that the outer Python lacks and no others."""

from __future__ import annotations

from setuptools.build_meta import *  # noqa: F403

import outer

_REQUIREMENTS = {
    "torch": "torch>=2.11",
    "ninja": "ninja",
    "pybind11": "pybind11",
    "cutlass_library": "nvidia-cutlass==4.2.0",
}


def _missing() -> list[str]:
    return [requirement for module, requirement in _REQUIREMENTS.items() if not outer.make_importable(module)]


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return _missing()


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return _missing()


def get_requires_for_build_sdist(config_settings=None) -> list[str]:
    return []

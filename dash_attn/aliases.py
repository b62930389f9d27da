"""Makes flash_attn, flash_attn_2_cuda, flash_attn_interface and flash_attn_3 names of dash_attn in one process.

`activate` puts a finder on sys.meta_path that finds these modules and, for importlib.metadata, the distributions
flash-attn and flash-attn-3 with versions such as 2.8.0+dash.0.2.0. Nothing is written to disk. Every module has the
attribute `__dash_attn__`, dash_attn's version. A line on stderr announces once per process that dash_attn replaces the
library.

Python runs this file at startup if DASH_ATTN_AS_FLASH_ATTN is set, before any package is imported. The file therefore
uses only the standard library, and modules are imported when they are requested.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.metadata
import os
import pathlib
import re
import site
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import cast

__all__ = ["ENVIRONMENT", "activate", "active", "from_environment", "start_file", "why_no_start_file"]

ENVIRONMENT = "DASH_ATTN_AS_FLASH_ATTN"
START_FILE = "dash_attn_as_flash_attn.pth"
# For each distribution: the release whose interface it has, and its top-level modules, which are provided together.
# 2.8.0 has the interface of 2.8.3. TransformerEngine compares whole versions, and 2.8.1+dash is above its bound 2.8.1.
_DISTRIBUTIONS = {
    "flash-attn": ("2.8.0", ("flash_attn", "flash_attn_2_cuda")),
    "flash-attn-3": ("3.0.0", ("flash_attn_interface", "flash_attn_3")),
}
# Alias: the module whose public names it has, and whether it also has the private names that frameworks call.
_MODULES = {
    "flash_attn": ("flash_attn_2", False),
    "flash_attn.flash_attn_interface": ("flash_attn_2", True),
    "flash_attn.bert_padding": ("bert_padding", False),
    "flash_attn_2_cuda": ("flash_attn_2_cuda", False),
    "flash_attn_interface": ("flash_attn_3", True),
    "flash_attn_3": (None, False),
    "flash_attn_3.flash_attn_interface": ("flash_attn_3", True),
}
_PACKAGES = ("flash_attn", "flash_attn_3")
_PRIVATE = ("_flash_attn_", "_wrapped_flash_attn_")
_TAKEN_ALONG = ("rearrange",)  # of einops, which some code imports from flash_attn.bert_padding
# These frameworks look for flash_attn during their import, or remember the result.
_LOOK_AT_IMPORT = ("diffusers", "transformer_engine", "transformers", "xformers")


def activate(*, force: bool = False) -> None:
    """Makes flash_attn, flash_attn_2_cuda, flash_attn_interface and flash_attn_3 names of dash_attn in this process.

    Call this function before flash_attn and the frameworks that look for it are imported. Calling it again has no
    effect, except that `force` can be added.

    Args:
        force: replace these modules even if they are installed; the installed ones are then hidden.

    Raises:
        RuntimeError: one of the modules is installed and `force` is False, or has been imported already.
    """
    for name in _roots():
        module = sys.modules.get(name)
        if module is not None and not hasattr(module, "__dash_attn__"):
            raise RuntimeError(f"dash_attn cannot replace {name}, which is already imported: activate dash_attn first")
    for distribution in _DISTRIBUTIONS:
        found = _installed(distribution)
        if found and not force and not _is_forced():
            raise RuntimeError(f"dash_attn replaces {found}, only if forced ({_how_to_force()})")
    imported = [name for name in _LOOK_AT_IMPORT if name in sys.modules]
    if imported and not active():
        names = ", ".join(imported)
        warnings.warn(f"{names} may already have looked for flash_attn: activate dash_attn first", stacklevel=2)
    _put(force)


def active() -> bool:
    """Whether the names are dash_attn's (except those that are installed and not forced)."""
    return _finder() is not None


def start_file() -> pathlib.Path | None:
    """Returns the file that reads DASH_ATTN_AS_FLASH_ATTN when Python starts, which a wheel installs; None without
    it."""
    found = (pathlib.Path(folder, START_FILE) for folder in _start_folders())
    return next((path for path in found if path.is_file()), None)


def why_no_start_file() -> str | None:
    """Returns why child processes do not get the names from the environment, and what to do about it; None if they
    do."""
    if start_file() is not None:
        return None
    return f"{START_FILE} is not in {' or '.join(_start_folders())}: copy it there from dash_attn's build_support/"


def from_environment() -> None:
    """Calls `activate` when Python starts, if DASH_ATTN_AS_FLASH_ATTN is 1 or force. Never raises an error, and leaves
    an installed flash_attn in place unless forced."""
    value = os.environ.get(ENVIRONMENT, "")
    if value in ("1", "force"):
        _put(value == "force")
    elif value not in ("", "0"):
        _say(f"{ENVIRONMENT} must be 0, 1 or force, got {value!r}: the value is ignored")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules and distributions, and loads the modules."""

    finds_dash_attn_as_flash_attn = True  # marks the finder of any copy of this file

    def __init__(self, force: bool) -> None:
        self.force = force
        self._left: set[str] = set()
        self._said = False

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        root = fullname.partition(".")[0]
        if root not in _roots() or not self._serves(_distribution_of(root)):
            return None
        if fullname not in _MODULES:
            # Frameworks probe for other modules too, and must learn that these do not exist.
            if _is_import():
                raise ModuleNotFoundError(_not_covered(fullname), name=fullname)
            return None
        return ModuleSpec(fullname, self, origin="dash_attn", is_package=fullname in _PACKAGES)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name, version = module.__name__, _version_of(_distribution_of(module.__name__))
        source, private = _MODULES[name]
        doc = f"dash_attn {_version()} under the name {name}: see dash_attn.aliases."
        vars(module).update(__dash_attn__=_version(), __version__=version, __doc__=doc)
        if source is not None:
            vars(module).update(_names_of(importlib.import_module(f"dash_attn.compat.{source}"), private))
            # Policies of selective activation checkpointing recognize the forward by "flash_attn" in its op's name.
            importlib.import_module("torch").ops.dash_attn.name_forward(True)
        if name == "flash_attn.flash_attn_interface":
            vars(module).update(flash_attn_gpu=importlib.import_module("flash_attn_2_cuda"))
        if not self._said:
            self._said = True
            _say(f"{name} is dash_attn {_version()} in this process, under the version {version}")
        if name == "flash_attn":
            # An attribute of the real package too, which importing the submodule sets.
            importlib.import_module("flash_attn.flash_attn_interface")

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        asked = {} if context is None else vars(context)
        # A search in specific folders, such as pip's, looks for installed distributions.
        if "path" in asked:
            return
        name = asked.get("name")
        for distribution in _DISTRIBUTIONS:
            if name is None or re.sub(r"[-_.]+", "-", name).lower() == distribution:
                if self._serves(distribution):
                    yield _Distribution(distribution)

    def _serves(self, distribution: str) -> bool:
        found = None if self.force else _installed(distribution)
        if found and distribution not in self._left:
            self._left.add(distribution)
            _say(f"dash_attn replaces {found}, only if forced ({_how_to_force()})")
        return not found


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            lines = ("Metadata-Version: 2.1", f"Name: {self._name}", f"Version: {_version_of(self._name)}")
            return "\n".join((*lines, "Summary: dash_attn under another name: see dash_attn.aliases", ""))
        return "\n".join((*_DISTRIBUTIONS[self._name][1], "")) if filename == "top_level.txt" else None

    def locate_file(self, path: str | os.PathLike[str]) -> pathlib.Path:
        return pathlib.Path(__file__).parents[1] / path


def _names_of(source: ModuleType, private: bool) -> dict[str, object]:
    names = [*source.__all__, *_TAKEN_ALONG]
    if private:
        names += [name for name in vars(source) if name.startswith(_PRIVATE)]
    return {name: getattr(source, name) for name in names if hasattr(source, name)}


def _put(force: bool) -> None:
    finder = _finder()
    if finder is None:
        # First, so that a forced name hides an installed one. An unforced finder defers to installed modules.
        sys.meta_path.insert(0, _Finder(force))
    else:
        finder.force |= force


def _finder() -> _Finder | None:
    return cast("_Finder | None", next((finder for finder in sys.meta_path if _is_ours(finder)), None))


def _is_forced() -> bool:
    finder = _finder()
    return finder is not None and finder.force


def _is_ours(finder: object) -> bool:
    return getattr(finder, "finds_dash_attn_as_flash_attn", False)


def _start_folders() -> list[str]:
    """Returns the folders in which Python looks for files that it runs at startup."""
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]


def _roots() -> list[str]:
    return [root for _, roots in _DISTRIBUTIONS.values() for root in roots]


def _distribution_of(module: str) -> str:
    root = module.partition(".")[0]
    return next(name for name, (_, roots) in _DISTRIBUTIONS.items() if root in roots)


def _installed(distribution: str) -> str | None:
    """Describes an installed module of a distribution, which another finder finds; None if there is none."""
    for root in _DISTRIBUTIONS[distribution][1]:
        for finder in sys.meta_path:
            spec = None if _is_ours(finder) or not hasattr(finder, "find_spec") else finder.find_spec(root, None)
            if spec is not None:
                places = list(spec.submodule_search_locations or ())
                return f"{root}, which is installed in {spec.origin or ', '.join(places)}"
    return None


def _version() -> str:
    """Returns dash_attn's version from its file, because importing the package would import torch."""
    text = pathlib.Path(__file__).with_name("__init__.py").read_text()
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def _version_of(distribution: str) -> str:
    return f"{_DISTRIBUTIONS[distribution][0]}+dash.{_version()}"


def _is_import() -> bool:
    """Whether an import statement called the calling finder, rather than importlib.util.find_spec."""
    frame = sys._getframe(2)  # the importlib function that iterates over sys.meta_path
    return frame.f_back is not None and frame.f_back.f_code.co_name == "_find_and_load_unlocked"


def _not_covered(module: str) -> str:
    root = module.partition(".")[0]
    covered = ", ".join(name for name in _MODULES if name.partition(".")[0] == root)
    return f"No module named {module!r}: {root} is dash_attn {_version()} in this process, which covers only {covered}"


def _how_to_force() -> str:
    return f"{ENVIRONMENT}=force, python -m dash_attn.run --force, dash_attn.aliases.activate(force=True)"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

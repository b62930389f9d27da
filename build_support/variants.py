"""Selects kernels from csrc/launch/variants.def and writes their translation units.

A line of the list is DASH_<PASS>_VARIANT(dtype, head_dims, mask, score[, set of policies]); names are CamelCase there
and snake_case in the environment variables, one variable an axis. New values and passes need no change here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"^DASH_(\w+)_VARIANT\(([^()]*)\)$", re.MULTILINE)
# What selects the values of each axis, in the order of a line's arguments.
AXES = ("DASH_ATTN_DTYPES", "DASH_ATTN_HEAD_DIMS", "DASH_ATTN_MASKS", "DASH_ATTN_SCORES", "DASH_ATTN_POLICIES")
# Lines that agree in these arguments, dtype and head dims, share a translation unit: more than half of the time of a
# unit with one kernel goes into reading headers.
_UNIT_AXES = 2
# Policies for benchmarks, which the kernels of Ordered serve too where DASH_ATTN_POLICIES names one of them.
_YARDSTICKS = ("ascending", "atomic")
# Other names, and the values that they mean: short names of dtypes, and scores and policies that share kernels.
_ALIASES = {
    "bf16": ("bfloat16",),
    "fp16": ("float16",),
    **dict.fromkeys(("softcap", "alibi"), ("softcap", "changed")),
    **dict.fromkeys(("descending", "spt", *_YARDSTICKS), ("ordered",)),
}


def snake_case(name: str) -> str:
    """'SymmetricShift' as 'symmetric_shift', 'BFloat16' as 'bfloat16'."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


class Variant(NamedTuple):
    """A kernel: its pass ('FORWARD') and its values on the axes ('BFloat16', '128', 'Causal')."""

    pass_: str
    values: tuple[str, ...]

    def line(self, macro: str) -> str:
        return f"DASH_{macro}({', '.join(self.values)})\n"

    def unit(self) -> str:
        """Name of the translation unit that holds the kernel."""
        return "_".join(snake_case(value) for value in (self.pass_, *self.values[:_UNIT_AXES]))


def read_variants(path: Path) -> list[Variant]:
    """All lines of the list, in its order."""
    rows = _LINE.findall(path.read_text())
    return [Variant(pass_, tuple(value.strip() for value in values.split(","))) for pass_, values in rows]


def _named(axis: int) -> list[str]:
    """What an axis' variable lists."""
    return [item.lower() for item in re.split(r"[,;\s]+", os.environ.get(AXES[axis], "")) if item]


def _selected_values(axis: int, variants: list[Variant]) -> set[str]:
    """The values of an axis, in snake_case, that its variable asks for: all of them where it is not set."""
    listed = dict.fromkeys(snake_case(variant.values[axis]) for variant in variants if axis < len(variant.values))
    names = _named(axis)
    chosen = {value for name in names for value in _ALIASES.get(name, (name,))}
    if unknown := [name for name in names if not set(_ALIASES.get(name, (name,))) & set(listed)]:
        others = (name for name, values in _ALIASES.items() if set(values) & set(listed) and name not in listed)
        allowed = [*others, *listed]
        given = f"{AXES[axis]} is {os.environ[AXES[axis]]!r}"
        raise SystemExit(f"{given}: {', '.join(unknown)} unknown, allowed are {', '.join(allowed)}")
    return chosen or set(listed)


def select_variants(variants: list[Variant]) -> list[Variant]:
    """The variants that the variables of AXES ask for; an axis that a variant lacks does not limit it."""
    chosen = [_selected_values(axis, variants) for axis in range(len(AXES))]
    selected = [v for v in variants if all(snake_case(value) in names for value, names in zip(v.values, chosen))]
    if not selected:
        raise SystemExit("the DASH_ATTN_* variables select no kernel; set DASH_ATTN_SKIP_CUDA=1 to build none")
    if set(_YARDSTICKS) & set(_named(len(AXES) - 1)):
        with_yardsticks = {"Ordered": "OrderedAndYardsticks"}
        selected = [Variant(v.pass_, tuple(with_yardsticks.get(value, value) for value in v.values)) for v in selected]
    return selected


def _write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def generate(variants: list[Variant], directory: Path) -> list[Path]:
    """Writes built_variants.def and one .cu per unit into `directory`; returns the .cu files."""
    directory.mkdir(parents=True, exist_ok=True)
    text = "// Written by setup.py: the lines of variants.def in this build, for whichever macro is defined.\n"
    for pass_ in dict.fromkeys(variant.pass_ for variant in variants):
        lines = "".join(v.line(f"{pass_}_VARIANT") for v in variants if v.pass_ == pass_)
        text += f"#ifdef DASH_{pass_}_VARIANT\n{lines}#endif\n"
    _write_if_changed(directory / "built_variants.def", text)
    units: dict[str, list[Variant]] = {}
    for variant in variants:
        units.setdefault(variant.unit(), []).append(variant)
    paths = []
    for unit, members in units.items():
        pass_ = members[0].pass_
        text = f'#include "launch/compiled_{pass_.lower()}.h"\n\n'
        text += "".join(v.line(f"INSTANTIATE_{pass_}") for v in members)
        paths.append(directory / f"{unit}.cu")
        _write_if_changed(paths[-1], text)
    for stale in set(directory.glob("*.cu")) - set(paths):
        stale.unlink()
    return paths

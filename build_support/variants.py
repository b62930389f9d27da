"""Selects kernels from csrc/launch/variants.def and writes their translation units."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"^DASH_(FORWARD|BACKWARD)_VARIANT\((\w+), (\d+), (true|false)(?:, (\w+))?\)$", re.MULTILINE)
_DTYPES = {"bf16": "BFloat16", "fp16": "Float16"}


class Variant(NamedTuple):
    """A kernel; `policy` is None for a forward, which has no order of sums to choose."""

    dtype: str
    head_dim: int
    causal: bool
    policy: str | None

    def pass_name(self) -> str:
        return "backward" if self.policy else "forward"

    def arguments(self) -> str:
        mask = "true" if self.causal else "false"
        return ", ".join([self.dtype, str(self.head_dim), mask, *([self.policy] if self.policy else [])])

    def unit(self) -> str:
        """Name of the translation unit that holds the variant."""
        return f"{self.pass_name()}_{self.dtype.lower()}_{self.head_dim}_{'causal' if self.causal else 'full'}"

    def policy_name(self) -> str | None:
        return self.policy and re.sub(r"(?<!^)(?=[A-Z])", "_", self.policy).lower()


def read_variants(path: Path) -> list[Variant]:
    """All lines of the list, in its order."""
    rows = _LINE.findall(path.read_text())
    variants = []
    for pass_, dtype, head_dim, causal, policy in rows:
        if (pass_ == "BACKWARD") != bool(policy):
            raise ValueError(f"{path}: a backward has a policy and a forward has none: {dtype}, {head_dim}, {causal}, {policy}")
        variants.append(Variant(dtype, int(head_dim), causal == "true", policy or None))
    return variants


def _selection(variable: str, allowed: list[str]) -> set[str]:
    text = os.environ.get(variable, "").strip()
    if not text:
        return set(allowed)
    chosen = {item.strip().lower() for item in re.split(r"[,;\s]+", text) if item.strip()}
    unknown = sorted(chosen - set(allowed))
    if unknown:
        raise SystemExit(f"{variable} is {text!r}: {', '.join(unknown)} unknown, allowed are {', '.join(allowed)}")
    return chosen


def select_variants(variants: list[Variant]) -> list[Variant]:
    """The variants that DASH_ATTN_HEAD_DIMS, DASH_ATTN_DTYPES, DASH_ATTN_MASKS and, of the backward's, DASH_ATTN_POLICIES
    ask for."""
    head_dims = _selection("DASH_ATTN_HEAD_DIMS", sorted({str(v.head_dim) for v in variants}, key=int))
    dtypes = {_DTYPES[name] for name in _selection("DASH_ATTN_DTYPES", list(_DTYPES))}
    masks = _selection("DASH_ATTN_MASKS", ["full", "causal"])
    policies = _selection("DASH_ATTN_POLICIES", list(dict.fromkeys(v.policy_name() for v in variants if v.policy)))
    selected = [
        v
        for v in variants
        if str(v.head_dim) in head_dims
        and v.dtype in dtypes
        and ("causal" if v.causal else "full") in masks
        and (v.policy is None or v.policy_name() in policies)
    ]
    if not selected:
        raise SystemExit("the DASH_ATTN_* variables select no kernel; set DASH_ATTN_SKIP_CUDA=1 to build none")
    return selected


def _write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def generate(variants: list[Variant], directory: Path) -> list[Path]:
    """Writes built_variants.def and one .cu per unit into `directory`; returns the .cu files."""
    directory.mkdir(parents=True, exist_ok=True)
    text = "// Written by setup.py: the lines of variants.def in this build, for whichever macro is defined.\n"
    for macro in ("FORWARD", "BACKWARD"):
        chosen = [v for v in variants if v.pass_name() == macro.lower()]
        lines = "".join(f"DASH_{macro}_VARIANT({v.arguments()})\n" for v in chosen)
        text += f"#ifdef DASH_{macro}_VARIANT\n{lines}#endif\n"
    _write_if_changed(directory / "built_variants.def", text)
    units: dict[str, list[Variant]] = {}
    for variant in variants:
        units.setdefault(variant.unit(), []).append(variant)
    paths = []
    for unit, members in units.items():
        pass_ = members[0].pass_name()
        text = f'#include "launch/instantiate_{pass_}.h"\n\n'
        text += "".join(f"DASH_INSTANTIATE_{pass_.upper()}({v.arguments()})\n" for v in members)
        paths.append(directory / f"{unit}.cu")
        _write_if_changed(paths[-1], text)
    for stale in set(directory.glob("*.cu")) - set(paths):
        stale.unlink()
    return paths

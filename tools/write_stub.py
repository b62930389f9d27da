#!/usr/bin/env python3
"""Writes dash_attn/_schedule.pyi, the types of the compiled schedule module, from the module's own signatures.

python tools/write_stub.py    # after csrc/bindings/schedule_module.cpp has changed and has been built
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "dash_attn" / "_schedule.pyi"
_HEADER = '"""Written by tools/write_stub.py from the signatures of the compiled module."""\n\n'


def signature(docstring: str) -> str:
    """Returns '(schedule: str, problem: Problem) -> int' from a docstring of pybind11, with plain argument types."""
    line = docstring.splitlines()[0]
    line = line[line.index("(") :]
    for wide, plain in (("Int", "int"), ("Float", "float")):
        line = line.replace(f"typing.Supports{wide} | typing.SupportsIndex", plain)
    line = line.replace("dash_attn._schedule.", "").replace("collections.abc.", "")
    return re.sub(r"\((self|arg0): \w+", "(self", line)


def body(docstring: str, indent: str = "    ") -> str:
    """What a definition has after its colon: its text, which the reference of the site shows, or "..."."""
    text = docstring.partition("\n\n")[2].strip() if "(" in docstring.partition("\n")[0] else docstring
    return f'\n{indent}"""{text}"""\n' if text else " ...\n"


def of_class(name: str, cls: type) -> str:
    lines = []
    for member, value in sorted(vars(cls).items()):
        if isinstance(value, property):
            returns = signature(value.fget.__doc__ or "").partition(" -> ")[2]
            lines.append(f"    @property\n    def {member}(self) -> {returns}: ...\n")
            if value.fset is not None:
                lines.append(f"    @{member}.setter\n    def {member}(self, value: {returns}) -> None: ...\n")
        elif callable(value) and value.__doc__ and (member == "__init__" or not member.startswith("_")):
            if value.__doc__.startswith(f"{member}("):
                lines.append(f"    def {member}{signature(value.__doc__)}:{body(value.__doc__, ' ' * 8)}")
    text = f'    """{cls.__doc__}"""\n' if cls.__doc__ else ""
    return f"class {name}:\n" + (text + "".join(lines) or "    ...\n")


def stub(module: ModuleType) -> str:
    """Returns the text of the stub."""
    constants, classes, functions = [], [], []
    for name, value in sorted(vars(module).items()):
        if name.startswith("__"):
            continue
        if isinstance(value, type):
            classes.append(of_class(name, value))
        elif callable(value):
            functions.append(f"def {name}{signature(value.__doc__ or '')}:{body(value.__doc__ or '')}")
        else:
            constants.append(f"{name}: {'tuple[str, ...]' if isinstance(value, tuple) else type(value).__name__}\n")
    parts = ["from collections.abc import Sequence\n\n" + "".join(constants), *classes, "".join(functions)]
    return _HEADER + "\n".join(parts)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from dash_attn import _schedule

    STUB.write_text(stub(_schedule))

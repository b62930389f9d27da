"""Writes what a binary states about its origin: the version, the commit, a hash of the sources, and the torch.

The version stands in dash_attn/__init__.py alone, so that sources without their history, such as a copy or a shallow
clone without tags, build with the right one. The commit is recorded where there is a history.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
from pathlib import Path


def version(root: Path) -> str:
    """The version that dash_attn/__init__.py states."""
    return re.findall(r'^__version__ = "(.+)"$', (root / "dash_attn" / "__init__.py").read_text(), re.MULTILINE)[0]


def commit(root: Path) -> str:
    """HEAD of the checkout, with -dirty where a tracked file has changed.

    DASH_ATTN_COMMIT gives it for sources without their history; "unknown" without either.
    """
    if given := os.environ.get("DASH_ATTN_COMMIT"):
        return given

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # A copy of the sources within another project is not a checkout of this one.
        if Path(git("rev-parse", "--show-toplevel")) != root.resolve():
            return "unknown"
        return git("describe", "--always", "--abbrev=12", "--dirty", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(root: Path, folder: Path, torch: str) -> Path:
    """Writes identity.cpp into `folder`, for each extension to be linked with."""
    source_hash = runpy.run_path(str(root / "dash_attn" / "build_record.py"))["source_hash"]
    facts = {
        "version": version(root),
        "commit": commit(root),
        "sources": source_hash(root / "csrc"),
        "torch": torch,
    }
    lines = "".join(f'    "{name} {value}\\n"\n' for name, value in facts.items())
    text = (
        "// Written by setup.py: what dash_attn.build_record.identity reads from the binary.\n"
        '__attribute__((used)) static const char dash_attn_identity[] =\n    "dash_attn identity\\n"\n'
        f'{lines}    "end\\n";\n'
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "identity.cpp"
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
    return path

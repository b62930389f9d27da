#!/usr/bin/env python3
"""Lists the frameworks of the dependency group test-frameworks that this Python lacks, whose tests were skipped.

    .venv/bin/python tools/check_frameworks.py

`make test-all` continues without the packages that it cannot install, for machines without a package index. Exit
status: 1 if a package is missing or has another version than the group's although the index answers; 75 if the index
does not answer.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_support"))

import prepare  # noqa: E402

GROUP = "test-frameworks"


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def unmet(wanted: list[str], version_of: Callable[[str], str | None]) -> list[str]:
    """Returns the requirements (name or name==version) that are not met, with the installed version."""
    found = []
    for requirement in wanted:
        name, _, pinned = requirement.partition("==")
        version = version_of(name)
        if version is None or (pinned and version != pinned):
            found.append(f"{requirement} ({'not installed' if version is None else f'{version} is installed'})")
    return found


def index_answers() -> bool:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "index", "versions", "pip"]
    return subprocess.run(command, capture_output=True).returncode == 0


def main() -> int:
    of_build, _ = prepare.requirements([])
    of_group, alone = prepare.requirements([GROUP])
    missing = unmet(of_group[len(of_build) :] + alone, installed_version)
    if not missing:
        return 0
    answers = index_answers()
    print(f"{'FAILED' if answers else 'NOT TRIED, because the index does not answer'}: without {', '.join(missing)}")
    return 1 if answers else os.EX_TEMPFAIL


if __name__ == "__main__":
    sys.exit(main())

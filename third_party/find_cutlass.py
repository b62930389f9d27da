"""Finds the CUTLASS headers that the kernels include; nothing is vendored (see README.md beside this file)."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

REQUIRED_VERSION = "4.2.0"
HOW_TO_GET = (
    f"install them with 'pip install nvidia-cutlass=={REQUIRED_VERSION}', or set CUTLASS_HOME to a checkout of "
    f"CUTLASS {REQUIRED_VERSION}"
)


class CutlassNotFound(RuntimeError):
    """CUTLASS headers are missing, or are not of the required version."""


def cutlass_version(include: Path) -> str:
    """Version of the headers in `include`, from cutlass/version.h, such as '4.2.0'."""
    text = (include / "cutlass" / "version.h").read_text()
    parts = [re.search(rf"#define\s+CUTLASS_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    if None in parts:
        raise CutlassNotFound(f"{include}/cutlass/version.h states no version")
    return ".".join(match.group(1) for match in parts)


def find_cutlass() -> Path:
    """The directory to pass to the compiler with -I.

    CUTLASS_HOME is used when it is set, otherwise the installed `nvidia-cutlass` package.
    Raises CutlassNotFound when there are no headers or their version is not REQUIRED_VERSION.
    """
    home = os.environ.get("CUTLASS_HOME")
    if home:
        include = Path(home) / "include"
        origin = f"CUTLASS_HOME={home}"
    else:
        package = importlib.util.find_spec("cutlass_library")
        if package is None or package.origin is None:
            raise CutlassNotFound(f"the CUTLASS headers were not found: {HOW_TO_GET}")
        include = Path(package.origin).parent / "source" / "include"
        origin = "the installed nvidia-cutlass"
    if not (include / "cutlass" / "version.h").is_file() or not (include / "cute" / "tensor.hpp").is_file():
        raise CutlassNotFound(f"{origin} has no CUTLASS headers in {include}: {HOW_TO_GET}")
    version = cutlass_version(include)
    if version != REQUIRED_VERSION:
        raise CutlassNotFound(f"{origin} has CUTLASS {version}, expected {REQUIRED_VERSION}: {HOW_TO_GET}")
    return include.resolve()


if __name__ == "__main__":
    found = find_cutlass()
    print(f"CUTLASS {cutlass_version(found)} in {found}")

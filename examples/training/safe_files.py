"""Writes files so that a kill or a power failure leaves either the old or the new content."""

from __future__ import annotations

import os
import pathlib


def sync_folder(folder: pathlib.Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: pathlib.Path, text: str) -> None:
    """Replaces a file's content: writes it to another file, flushes that to the disk, and renames it."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(path.parent)

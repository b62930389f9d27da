"""Files that a kill or a loss of power leaves either as they were or as they are to be."""

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
    """Gives a file a new content: written beside the file, flushed to the disk, and renamed."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(path.parent)

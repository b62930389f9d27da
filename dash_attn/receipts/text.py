"""Text from receipts, for terminals."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text in one line that no terminal obeys: control characters and the like as escapes, such as `\\x1b`."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

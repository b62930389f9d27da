"""Text from receipts, for terminals."""

from __future__ import annotations


def printable(text: str) -> str:
    """Returns the text as one line, with control characters as escapes such as `\\x1b` that no terminal interprets."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

"""What the package's commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable


def exit_status(command: Callable[[], None], *expected: type[Exception]) -> int:
    """Runs `command`. Returns 0, or 2 after printing an `expected` error as one line."""
    try:
        command()
    except expected as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0

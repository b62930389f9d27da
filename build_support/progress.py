"""Shortens what ninja prints: torch runs it with -v, which shows 1,500 characters of flags for every file."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading

_STEP = re.compile(r"^(\[\d+/\d+\]) .* -c (\S+) -o \S+.*$")


def shorten(line: str) -> str:
    """'[3/9] source file' for ninja's line about a compilation that has ended; any other line as it is."""
    match = _STEP.match(line.rstrip("\n"))
    return f"{match.group(1)} {os.path.relpath(match.group(2))}\n" if match else line


@contextlib.contextmanager
def short_lines():
    """Within, lines written to file descriptor 1, by this process or its children, pass through `shorten`."""
    sys.stdout.flush()
    terminal = os.dup(1)
    read_end, write_end = os.pipe()
    os.dup2(write_end, 1)
    os.close(write_end)

    def copy():
        with os.fdopen(read_end, errors="replace") as lines:
            for line in lines:
                os.write(terminal, shorten(line).encode())

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(terminal, 1)
        thread.join()
        os.close(terminal)

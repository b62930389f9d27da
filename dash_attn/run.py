"""Runs a program in which flash_attn is dash_attn: `python -m dash_attn.run script.py ...`.

    python -m dash_attn.run [--force] script.py [arguments ...]
    python -m dash_attn.run [--force] -m module [arguments ...]
    torchrun --nproc-per-node 8 -m dash_attn.run script.py [arguments ...]

The script, its arguments and sys.path are what they are with `python script.py` or `python -m module`. Processes that
it starts inherit DASH_ATTN_AS_FLASH_ATTN, which an installed dash_attn looks at when Python starts; where it is not
installed so, a line on stderr says that they do not get the names. --force hides an installed flash_attn, as
DASH_ATTN_AS_FLASH_ATTN=force does.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import NoReturn

from . import aliases

_USAGE = "usage: python -m dash_attn.run [--force] {script.py | -m module} [arguments ...]"


def main(arguments: list[str]) -> None:
    """Runs the program that `arguments`, those of the command line, name.

    Raises:
        SystemExit: they name none that exists (status 2), or a flash_attn is installed and --force is not given (1).
    """
    force = arguments[:1] == ["--force"]
    arguments = arguments[1:] if force else arguments
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    force = force or os.environ.get(aliases.ENVIRONMENT) == "force"
    is_module = arguments[:1] == ["-m"]
    program = arguments[1:] if is_module else arguments
    if not program or program[0].startswith("-"):
        _refuse(f"a script or -m module is needed, got {' '.join(arguments) or 'no arguments'}")
    if not is_module and not os.path.exists(program[0]):
        _refuse(f"the script must be a file, got {program[0]}")
    try:
        aliases.activate(force=force)
    except RuntimeError as error:
        raise SystemExit(f"dash_attn.run: {error}") from None
    if why := aliases.why_no_start_file():
        print(f"dash_attn.run: processes that the program starts lack the names, for {why}", file=sys.stderr)
    os.environ[aliases.ENVIRONMENT] = "force" if force else "1"
    sys.argv = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    # Python put the current folder there, for it was asked for a module.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
    runpy.run_path(program[0], run_name="__main__")


def _refuse(why: str) -> NoReturn:
    print(f"{_USAGE}\ndash_attn.run: {why}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])

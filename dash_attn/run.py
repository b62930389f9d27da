"""Runs a program with dash_attn in place of flash_attn: `python -m dash_attn.run script.py ...`.

    python -m dash_attn.run [--force] script.py [arguments ...]
    python -m dash_attn.run [--force] -m module [arguments ...]
    torchrun --nproc-per-node 8 -m dash_attn.run script.py [arguments ...]

The script, its arguments and sys.path are the same as with `python script.py` or `python -m module`. Child processes
inherit DASH_ATTN_AS_FLASH_ATTN, which an installed dash_attn reads when Python starts. If the installation does not
support this, a line on stderr says that child processes do not get the names. --force hides an installed flash_attn,
like DASH_ATTN_AS_FLASH_ATTN=force.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import NoReturn

from . import aliases

_USAGE = "usage: python -m dash_attn.run [--force] {script.py | -m module} [arguments ...]"


def main(arguments: list[str]) -> None:
    """Runs the program that the command-line arguments name.

    Raises:
        SystemExit: no such program exists (status 2), or a flash_attn is installed and --force is not given (status 1).
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
        _refuse(f"expected a script or -m module, got {' '.join(arguments) or 'no arguments'}")
    if not is_module and not os.path.exists(program[0]):
        _refuse(f"the script must be a file, got {program[0]}")
    try:
        aliases.activate(force=force)
    except RuntimeError as error:
        raise SystemExit(f"dash_attn.run: {error}") from None
    if why := aliases.why_no_start_file():
        print(f"dash_attn.run: child processes of the program do not get the names: {why}", file=sys.stderr)
    os.environ[aliases.ENVIRONMENT] = "force" if force else "1"
    sys.argv = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    # Python put the current folder there because dash_attn.run was started as a module.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
    runpy.run_path(program[0], run_name="__main__")


def _refuse(why: str) -> NoReturn:
    print(f"{_USAGE}\ndash_attn.run: {why}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])

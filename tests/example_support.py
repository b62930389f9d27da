"""Runs a program of examples/ as a user does."""

import os
import pathlib
import subprocess
import sys

import dash_attn

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def last_line(name: str) -> str:
    """What examples/`name` prints last, with this dash_attn and one thread."""
    paths = os.pathsep.join((str(pathlib.Path(dash_attn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, EXAMPLES / name], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]

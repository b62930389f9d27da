"""Processes in which flash_attn is dash_attn."""

import json
import os
import pathlib
import subprocess
import sys
import venv

import dash_attn

PACKAGE = pathlib.Path(dash_attn.__file__).parent
START_FILE = "dash_attn_as_flash_attn.pth"
VARIABLE = "DASH_ATTN_AS_FLASH_ATTN"


def python(*arguments, executable=sys.executable, paths=(), **environment):
    """Runs Python beside this package; (stdout, the lines of stderr)."""
    inherited = {k: v for k, v in os.environ.items() if k not in (VARIABLE, "PYTHONPATH")}
    places = os.pathsep.join(map(str, (*paths, PACKAGE.parent)))
    environment = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": places, **environment}
    done = subprocess.run([executable, *map(str, arguments)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr.splitlines()


def environment_with_start_file(folder, paths=None):
    """The Python of an environment that has the file which dash_attn installs beside itself.

    It finds `paths`, by default this package and what this Python has installed.
    """
    if paths is None:
        paths = [PACKAGE.parent, *(path for path in sys.path if path.endswith("-packages"))]
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "a_paths.pth").write_text("".join(f"{path}\n" for path in paths))
    candidates = (PACKAGE.parent / "build_support" / START_FILE, PACKAGE.parent / START_FILE)
    source = next(path for path in candidates if path.is_file())
    (site / START_FILE).write_text(source.read_text())
    return folder / "bin" / "python"


# Every way to the names, for a program in a file: arguments of Python before it. With "variable" they are in the
# environment of a Python that has the start file.
_IMPORTED = (
    "import runpy, sys, dash_attn.as_flash_attn as _; del sys.argv[0]; runpy.run_path(*sys.argv[:1], {}, '__main__')"
)
WAYS = {
    "run": ["-m", "dash_attn.run"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "-m", "dash_attn.run"],
    "import": ["-c", _IMPORTED],
    "variable": [],
}


def check_program(way, device, started_python):
    """alias_program.py, which knows flash_attn alone, runs our kernels and gets our bits."""
    here = pathlib.Path(__file__).parent
    started = {"executable": started_python, VARIABLE: "1"} if way == "variable" else {}
    stdout, _ = python(*WAYS[way], here / "alias_program.py", device, paths=[here], **started)
    found = json.loads(stdout.splitlines()[-1])
    assert found["versions"] == [f"{release}+dash.{dash_attn.__version__}" for release in ("2.8.0", "3.0.0")]
    assert len(found["same"]) == 5 and all(found["same"].values()), found
    assert found["calls"] == [5, 5]

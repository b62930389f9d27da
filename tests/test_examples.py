"""The examples as users start them: from any folder, with the installed package and nothing in PYTHONPATH."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
# As `python examples/X.py` has it, up to the call of main.
IMPORT = """
import pathlib, runpy, sys
path = pathlib.Path(sys.argv[1])
sys.path[0] = str(path.parent)
assert callable(runpy.run_path(str(path), run_name="imported")["main"])
"""


def python(folder: pathlib.Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("elsewhere")
    if python(folder, "-c", "import dash_attn").returncode != 0:
        pytest.skip("dash_attn is not installed in this Python: `make build` installs it")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_starts(name, elsewhere):
    if name == "flash_attn_names.py":  # which imports flash_attn
        done = python(elsewhere, "-m", "dash_attn.run", EXAMPLES / name)
    else:
        done = python(elsewhere, "-c", IMPORT, EXAMPLES / name)
    missing = done.stderr.rpartition("ModuleNotFoundError: ")[2] if "ModuleNotFoundError" in done.stderr else ""
    if missing and "dash_attn" not in missing and "training" not in missing:
        pytest.skip(f"a framework is not installed: {missing.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_folder_of_the_trainer_lists_its_modules():
    *modules, listing = sorted((EXAMPLES / "training").glob("*.py"), key=lambda path: path.name == "__init__.py")
    words = set(re.findall(r"\w+", listing.read_text()))
    assert modules and not {path.stem for path in modules} - words

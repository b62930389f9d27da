"""Makes this checkout runnable: python3 build_support/prepare.py VENV TORCH [GROUP ...] [OPTIONS], as `make` does.

Makes the virtual environment VENV, with the packages of the current Python visible inside where it has torch; installs
what is missing of what pyproject.toml asks for, for the build and in the dependency groups named (TORCH for torch, such
as 'torch==2.13.0'); installs the package from this checkout, in editable mode, unless told not to. That builds the
extensions in place; a second build compiles only what has changed. A group has a companion GROUP-no-deps where
some of it is to be installed without its own requirements. No package replaces the torch that is there.
What cannot be had is said and left out: setup.py ends the build where it needs it.
"""

from __future__ import annotations

import argparse
import importlib.util
import site
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
FIND_TORCH = "import importlib.metadata as m; print(m.version('torch'))"


def make_venv(venv: Path) -> Path:
    """The environment's Python."""
    python = venv / "bin" / "python"
    if python.is_file():
        return python
    shows_outer = importlib.util.find_spec("torch") is not None
    # An environment's own pip and setuptools would hide the newer ones outside.
    options = ["--without-pip"] if shows_outer and importlib.util.find_spec("pip") is not None else []
    subprocess.run([sys.executable, "-m", "venv", *options, str(venv)], check=True)
    if shows_outer:
        # Unlike venv's --system-site-packages, this shows the packages of a virtual environment too.
        inside = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (inside / "outer_python.pth").write_text("".join(f"{folder}\n" for folder in site.getsitepackages()))
    return python


def requirements(groups: list[str]) -> tuple[list[str], list[str]]:
    """What building and the groups need beside torch, from pyproject.toml: with their own requirements, and without."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = pyproject["dependency-groups"]
    if unknown := [group for group in groups if group not in listed]:
        raise SystemExit(f"pyproject.toml has no dependency group {', '.join(unknown)}, it has {', '.join(listed)}")
    build = [name for name in pyproject["build-system"]["requires"] if not name.startswith("torch")]
    wanted = build + [name for group in groups for name in listed[group]]
    alone = [name for group in groups for name in listed.get(f"{group}-no-deps", [])]
    return wanted, alone


def install(python: Path, wanted: list[str], *options: str) -> None:
    """Installs all of it, or, where something cannot be had, the rest."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--retries", "1", *options]
    if not wanted or subprocess.run([*pip, *wanted]).returncode == 0:
        return
    for requirement in wanted:
        if subprocess.run([*pip, requirement]).returncode != 0:
            print(f"prepare: going on without {requirement}", flush=True)


def install_checkout(python: Path) -> None:
    """Installs the package in editable mode, so that programs in any folder find it."""
    # -v shows the compilation, which takes long.
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-v"]
    if status := subprocess.run([*pip, "--no-build-isolation", "--no-deps", "--editable", str(ROOT)]).returncode:
        raise SystemExit(status)
    with tempfile.TemporaryDirectory() as elsewhere:
        if status := subprocess.run([str(python), "-c", "import dash_attn"], cwd=elsewhere).returncode:
            raise SystemExit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("torch")
    parser.add_argument("groups", nargs="*", metavar="GROUP")
    parser.add_argument("--no-build", action="store_true")
    parser.add_argument("--no-torch", action="store_true", help="do not install torch where it is missing")
    arguments = parser.parse_args()
    wanted, alone = requirements(arguments.groups)
    python = make_venv(arguments.venv.resolve())
    found = subprocess.run([str(python), "-c", FIND_TORCH], capture_output=True, text=True)
    if found.returncode != 0 and not arguments.no_torch:
        install(python, [arguments.torch])
        found = subprocess.run([str(python), "-c", FIND_TORCH], capture_output=True, text=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraint:
        if version := found.stdout.strip():
            constraint.write(f"torch=={version}\n")
            constraint.flush()
        install(python, wanted, "--constraint", constraint.name)
        install(python, alone, "--no-deps")
    if not arguments.no_build:
        install_checkout(python)


if __name__ == "__main__":
    main()

"""Makes this checkout runnable: python3 build_support/prepare.py VENV TORCH, which `make` calls.

Makes the virtual environment VENV, with the packages of the current Python visible inside where it has torch; installs
what pyproject.toml asks for and is missing (TORCH for torch, such as 'torch==2.13.0'); builds the extensions in place.
What cannot be had is said and left out: setup.py ends the build where it needs it.
"""

from __future__ import annotations

import importlib.util
import site
import subprocess
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


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


def requirements() -> list[str]:
    """What building, the demo and the tests need beside torch, from pyproject.toml."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = pyproject["project"]["optional-dependencies"]
    wanted = [*pyproject["build-system"]["requires"], *extras["plot"], *extras["test"]]
    return [requirement for requirement in wanted if not requirement.startswith(("torch", "dash-attn"))]


def main() -> None:
    venv, torch = Path(sys.argv[1]).resolve(), sys.argv[2]
    python = make_venv(venv)
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--retries", "1"]
    find_torch = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    wanted = requirements()
    if subprocess.run([str(python), "-c", find_torch]).returncode != 0:
        wanted.insert(0, torch)
    if subprocess.run([*install, *wanted]).returncode != 0:
        # One that cannot be had must not take the others along.
        for requirement in wanted:
            if subprocess.run([*install, requirement]).returncode != 0:
                print(f"prepare: going on without {requirement}", flush=True)
    raise SystemExit(subprocess.run([str(python), "setup.py", "build_ext", "--inplace"], cwd=ROOT).returncode)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Builds a folder that the `kernels` package loads: python tools/hub_layout.py OUT

OUT/build/VARIANT receives the compiled parts of this checkout (built first if sources have changed), the Python modules
that the public functions need, the licenses and metadata.json. VARIANT names the versions of torch and CUDA and the
machine, as in torch211-cxx11-cu130-x86_64-linux. Several runs with different versions of torch may fill one OUT.

    kernels.get_local_kernel(Path("OUT"))                    the functions, as a module
    LOCAL_KERNELS=dash-attn/flash=OUT                        the same for transformers and kernels.get_kernel

docs/integrations/hub.md describes the requirements of such a folder.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dash_attn"
# Loads the copy of the package. kernels runs this file as a module under a name of its choice.
LOADER = '''"""dash_attn {version} for `kernels`, built for torch {torch} and {pythons}."""

import sys

import torch

_PYTHONS = {pythons_tuple}
if sys.implementation.cache_tag not in _PYTHONS:
    raise ImportError(
        f"this build of dash_attn has schedules compiled for {{', '.join(_PYTHONS)}}, but this Python is "
        f"{{sys.implementation.cache_tag}}: build the folder with this Python (tools/hub_layout.py)"
    )
if torch.__version__.split("+")[0].split(".")[:2] != {torch_parts}:
    raise ImportError(f"this build of dash_attn is for torch {torch}, but this is torch {{torch.__version__}}")
if hasattr(torch.ops.dash_attn, "attention"):
    raise ImportError(
        "a process can hold only one dash_attn, because its ops have fixed names: the installed package or another "
        "build for kernels is already loaded"
    )

from .dash_attn import *  # noqa: E402, F403
from .dash_attn import __all__  # noqa: E402, F401
'''


def relative_imports(module: Path) -> set[Path]:
    """Returns the modules of the package that a module imports, whatever else it imports from them."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            absolute = [alias.name for alias in node.names]
        else:
            absolute = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
        if any(name.split(".")[0] == PACKAGE.name for name in absolute):
            raise SystemExit(f"hub_layout: {module} must import its own package relatively, got line {node.lineno}")
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        folder = module.parents[node.level - 1]
        base = folder.joinpath(*node.module.split(".")) if node.module else folder
        for path in [base, *(base / alias.name for alias in node.names)]:
            found |= {file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()}
    return found


def needed_modules() -> list[Path]:
    """Returns the modules that importing the package loads."""
    needed, new = set(), {PACKAGE / "__init__.py"}
    while new:
        needed |= new
        new = set().union(*map(relative_imports, new)) - needed
    return sorted(needed)


def compiled(with_kernels: bool) -> list[Path]:
    """Returns the libraries of the checkout. There may be one `_schedule` per Python."""
    libraries = sorted(PACKAGE.glob("_schedule.*.so"))
    for stem in ["_autograd", *(["_C"] if with_kernels else [])]:
        found = sorted(PACKAGE.glob(f"{stem}.*so"))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise SystemExit(f"hub_layout: {PACKAGE} must have one {stem}*.so, got {names}")
        libraries += found
    if sys.implementation.cache_tag not in cache_tags(libraries):
        raise SystemExit(f"hub_layout: {PACKAGE} must have a _schedule*.so of {sys.implementation.cache_tag}, got none")
    return libraries


def cache_tags(libraries: list[Path]) -> list[str]:
    """Returns the Pythons for which `_schedule` is compiled, as in sys.implementation.cache_tag."""
    suffixes = [path.name.split(".")[1] for path in libraries if path.name.startswith("_schedule.")]
    return ["-".join(suffix.split("-")[:2]) for suffix in suffixes]


def variant_name() -> str:
    """Returns the name in the grammar of kernels. `_autograd` uses torch's C++ API, so the variant fits one version of
    torch, and is not one of the stable ABI."""
    major, minor = torch.__version__.split(".")[:2]
    abi = "cxx11" if torch.compiled_with_cxx11_abi() else "cxx98"
    backend = "cu" + torch.version.cuda.replace(".", "") if torch.version.cuda else "cpu"
    return f"torch{major}{minor}-{abi}-{backend}-{platform.machine()}-{platform.system().lower()}"


def write_metadata(variant: Path) -> None:
    digest = hashlib.sha256()
    for path in sorted(file for file in variant.rglob("*") if file.is_file()):
        digest.update(str(path.relative_to(variant)).encode() + path.read_bytes())
    backend = {"type": "cuda", "archs": ["9.0a"]} if torch.version.cuda else {"type": "cpu"}
    metadata = {
        "name": "dash-attn",
        # The name of the Python module, which differs for every content.
        "id": f"_dash_attn_{backend['type']}_{digest.hexdigest()[:12]}",
        "version": 1,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": backend,
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def lay_out(out: Path) -> Path:
    libraries = compiled(with_kernels=torch.version.cuda is not None)
    tags = cache_tags(libraries)
    variant = out / "build" / variant_name()
    shutil.rmtree(variant, ignore_errors=True)
    for path in [*needed_modules(), *libraries]:
        target = variant / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    licences = variant / "licenses"
    shutil.copytree(ROOT / "third_party" / "LICENSES", licences)
    shutil.copy(ROOT / "LICENSE", licences)
    parts = torch.__version__.split("+")[0].split(".")[:2]
    text = LOADER.format(
        version=re.search(r'__version__ = "(.*)"', (PACKAGE / "__init__.py").read_text())[1],
        torch=".".join(parts),
        torch_parts=parts,
        pythons=", ".join(tags),
        pythons_tuple=tuple(tags),
    )
    (variant / "__init__.py").write_text(text)
    write_metadata(variant)
    return variant


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/hub_layout.py", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder to fill")
    parser.add_argument("--built", action="store_true", help="use the libraries of the checkout without building")
    arguments = parser.parse_args()
    if not arguments.built:
        environment = dict(os.environ)
        if not torch.version.cuda:
            environment["DASH_ATTN_SKIP_CUDA"] = "1"
        subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT, env=environment, check=True)
    print(lay_out(arguments.out))


if __name__ == "__main__":
    main()

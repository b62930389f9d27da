"""Describes the compiled libraries of this installation, read from the library files.

Every library states its origin (build_support/identity.py), and the kernels state what they were compiled for
(csrc/launch/build_record.cu). This file needs the standard library alone, because the build runs it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import pathlib

FOLDER = pathlib.Path(__file__).parent
_RECORD, _IDENTITY, _END = b"dash_attn build record\n", b"dash_attn identity\n", b"end\n\0"
_DIGITS = 16  # hexadecimal, of the SHA-256


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A line of csrc/launch/variants.def, in its terms: BFloat16, 192x128, Causal, Plain."""

    pass_: str
    dtype: str
    head_dims: str
    mask: str
    score: str
    policies: str | None  # of the backward


@dataclasses.dataclass(frozen=True)
class BuildRecord:
    """What `_C` was compiled for and with, and all of its kernels."""

    architecture: str
    nvcc: str
    kernels: tuple[Kernel, ...]


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a library was built from: the version and the commit, the hash of csrc/, and the version of torch."""

    version: str
    commit: str
    sources: str
    torch: str


def source_hash(folder: pathlib.Path, pattern: str = "*") -> str:
    """Returns a hash of the names and contents of all files under a folder that match a pattern."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob(pattern) if path.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return total.hexdigest()[:_DIGITS]


def python_sources() -> str:
    """The hash of the package's Python files."""
    return source_hash(FOLDER, "*.py")


def libraries(folder: pathlib.Path = FOLDER) -> list[pathlib.Path]:
    """The package's compiled libraries."""
    return sorted(folder.glob("_*.so"))


def kernels_file(folder: pathlib.Path = FOLDER) -> pathlib.Path | None:
    """Returns the library of the kernels; None if the package was built without kernels."""
    return next(iter(sorted(folder.glob("_C*.so"))), None)


def _text_in(path: pathlib.Path, begin: bytes) -> list[str] | None:
    """The lines of a record that a library holds; None if it holds none."""
    if not path.stat().st_size:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        first = content.find(begin)
        end = content.find(_END, first)
        return None if first < 0 or end < 0 else content[first + len(begin) : end].decode().splitlines()


def identity(path: pathlib.Path) -> Identity | None:
    """Reads what a library states about its origin, without loading it. Returns None if the library states nothing."""
    lines = _text_in(path, _IDENTITY)
    return None if lines is None else Identity(**dict(line.split(" ", 1) for line in lines))


def library_sources(folder: pathlib.Path = FOLDER) -> str:
    """Returns the hash of csrc/ that the libraries state, or several hashes if the libraries do not belong together."""
    identities = [identity(path) for path in libraries(folder)]
    return ", ".join(sorted({found.sources if found else "unknown" for found in identities}))


def why_not_one_build(*paths: pathlib.Path) -> str | None:
    """Returns None, or the error that the libraries were not built from the same sources."""
    identities = [identity(path) for path in paths]
    hashes = [found.sources if found else "unknown" for found in identities]
    if len(paths) > 1 and not any(identities):
        return f"the libraries in {paths[0].parent} do not state their sources: install dash_attn again"
    if len(set(hashes)) <= 1:
        return None
    built = ", ".join(f"{path.name} from {sources}" for path, sources in zip(paths, hashes))
    return f"the libraries in {paths[0].parent} were built from different sources, {built}: install dash_attn again"


def read(path: pathlib.Path) -> BuildRecord:
    """Reads the record from a library of kernels without loading the library.

    Raises:
        ValueError: the file contains no record.
    """
    lines = _text_in(path, _RECORD)
    if lines is None:
        raise ValueError(f"{path} contains no record of its build: install dash_attn again")
    facts = dict(line.split(" ", 1) for line in lines[:2])
    kernels = []
    for line in lines[2:]:
        if not line.startswith(("forward ", "backward ")):
            raise ValueError(f"{path} was built from older sources: install dash_attn again")
        pass_, dtype, head_dims, mask, score, *policies = line.split()
        kernels.append(Kernel(pass_, dtype, head_dims, mask, score, policies[0] if policies else None))
    return BuildRecord(facts["architecture"], facts["nvcc"], tuple(kernels))

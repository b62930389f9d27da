"""Describes the compiled kernels of this installation, read from the library file (csrc/launch/build_record.cu)."""

from __future__ import annotations

import dataclasses
import mmap
import pathlib

FOLDER = pathlib.Path(__file__).parent
_BEGIN, _END = b"dash_attn build record\n", b"end\n\0"


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


def kernels_file(folder: pathlib.Path = FOLDER) -> pathlib.Path | None:
    """Returns the library of the kernels; None if the package was built without kernels."""
    return next(iter(sorted(folder.glob("_C*.so"))), None)


def read(path: pathlib.Path) -> BuildRecord:
    """Reads the record from a compiled library without loading the library.

    Raises:
        ValueError: the file contains no record.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        begin = content.find(_BEGIN)
        end = content.find(_END, begin)
        if begin < 0 or end < 0:
            raise ValueError(f"{path} contains no record of its build: install dash_attn again")
        lines = content[begin + len(_BEGIN) : end].decode().splitlines()
    facts = dict(line.split(" ", 1) for line in lines[:2])
    kernels = []
    for line in lines[2:]:
        if not line.startswith(("forward ", "backward ")):
            raise ValueError(f"{path} was built from older sources: install dash_attn again")
        pass_, dtype, head_dims, mask, score, *policies = line.split()
        kernels.append(Kernel(pass_, dtype, head_dims, mask, score, policies[0] if policies else None))
    return BuildRecord(facts["architecture"], facts["nvcc"], tuple(kernels))

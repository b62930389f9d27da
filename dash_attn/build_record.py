"""What the compiled kernels in this installation are, read from the file itself (csrc/launch/build_record.cu)."""

from __future__ import annotations

import dataclasses
import mmap
import pathlib

FOLDER = pathlib.Path(__file__).parent
_BEGIN, _END = b"dash_attn build record\n", b"end\n\0"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A line of csrc/launch/variants.def, in its words: BFloat16, 192x128, Causal, Plain."""

    pass_: str
    dtype: str
    head_dims: str
    mask: str
    score: str
    policies: str | None  # of the backward


@dataclasses.dataclass(frozen=True)
class BuildRecord:
    """What `_C` was compiled for and with, and every kernel that can be called."""

    architecture: str
    nvcc: str
    kernels: tuple[Kernel, ...]


def kernels_file(folder: pathlib.Path = FOLDER) -> pathlib.Path | None:
    """The library of the kernels; None where the package was built without."""
    return next(iter(sorted(folder.glob("_C*.so"))), None)


def read(path: pathlib.Path) -> BuildRecord:
    """The record in a compiled library, which is not loaded.

    Raises:
        ValueError: the file holds none.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        begin = content.find(_BEGIN)
        end = content.find(_END, begin)
        if begin < 0 or end < 0:
            raise ValueError(f"{path} holds no record of its build: install dash_attn again")
        lines = content[begin + len(_BEGIN) : end].decode().splitlines()
    facts = dict(line.split(" ", 1) for line in lines[:2])
    kernels = []
    for line in lines[2:]:
        if not line.startswith(("forward ", "backward ")):
            raise ValueError(f"{path} was built from older sources: install dash_attn again")
        pass_, dtype, head_dims, mask, score, *policies = line.split()
        kernels.append(Kernel(pass_, dtype, head_dims, mask, score, policies[0] if policies else None))
    return BuildRecord(facts["architecture"], facts["nvcc"], tuple(kernels))

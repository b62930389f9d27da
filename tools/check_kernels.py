#!/usr/bin/env python3
"""Checks the machine code of compiled kernels, and fails if the compiler made one slower than its source.

    python tools/check_kernels.py dash_attn/_C.abi3.so

The tool prints the number of kernels and the largest number of registers. A fault is a stack frame, a use of local
memory (where registers spill), or products (wgmma) that ptxas serialized. The tool needs cuobjdump and nvdisasm, from
PATH, the CUDA toolkit or PyPI's nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, but no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_CUDA_BIN = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin"


@dataclasses.dataclass
class Kernel:
    """A kernel in the binary: its resources, and its instructions with modifiers and operands, in order."""

    registers: int
    stack_bytes: int
    local_bytes: int
    instructions: list[str]

    def mnemonics(self) -> set[str]:
        """The instructions used, with modifiers: {"HGMMA.64x64x16.F32.BF16", ...}."""
        return {instruction.split()[0] for instruction in self.instructions}

    def opcodes(self) -> set[str]:
        """The instructions used: {"HGMMA", ...}."""
        return {mnemonic.split(".")[0] for mnemonic in self.mnemonics()}

    def faults(self) -> list[str]:
        found = []
        if self.stack_bytes:
            found.append(f"has a stack frame of {self.stack_bytes} bytes")
        if self.local_bytes:
            found.append(f"uses {self.local_bytes} bytes of local memory")
        if spills := sorted(self.opcodes() & {"LDL", "STL"}):
            found.append(f"loads from or stores to local memory ({', '.join(spills)})")
        products = [instruction for instruction in self.instructions if instruction.startswith("HGMMA")]
        # gsb0 ends a group of products. ptxas ends a group at every product of a function that it serializes (its
        # 'wgmma.mma_async instructions are serialized'); otherwise a group has the several instructions of a tile.
        if products and all("gsb0" in instruction for instruction in products):
            found.append("waits for every product (wgmma): ptxas has serialized them")
        return found


def find_tool(name: str) -> Path:
    """Returns the path of cuobjdump or nvdisasm. Raises a FileNotFoundError that says what to install."""
    candidates = [shutil.which(name), _CUDA_BIN / name]
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
        candidates += [file.locate() for file in files if file.name == name]
    except importlib.metadata.PackageNotFoundError:
        pass
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            return Path(candidate)
    raise FileNotFoundError(f"{name} was not found: pip install nvidia-cuda-{name}")


def _dump(binary: Path, option: str) -> list[str]:
    folders = [str(find_tool(name).parent) for name in ("cuobjdump", "nvdisasm")]
    environment = {**os.environ, "PATH": os.pathsep.join([*folders, os.environ["PATH"]])}
    command = [str(find_tool("cuobjdump")), option, str(binary)]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def read_kernels(binary: Path) -> dict[str, Kernel]:
    """Returns {symbol: kernel} for the device code in a shared library, object or cubin."""
    kernels: dict[str, Kernel] = {}
    name = None
    for line in _dump(binary, "-res-usage"):
        if match := re.search(r"Function (\S+):", line):
            name = match.group(1)
        elif name and "REG:" in line:
            usage = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
            kernels[name] = Kernel(usage["REG"], usage["STACK"], usage["LOCAL"], [])
            name = None
    for line in _dump(binary, "-sass"):
        if match := re.search(r"Function : (\S+)", line):
            name = match.group(1)
        elif name and (match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][^;]*);", line)):
            kernels[name].instructions.append(match.group(1))
    return kernels


def demangle(symbol: str) -> str:
    tool = shutil.which("c++filt")
    return subprocess.run([tool, symbol], stdout=subprocess.PIPE, text=True).stdout.strip() if tool else symbol


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path, help="the compiled ops, or any file with device code")
    binary = parser.parse_args().binary
    kernels = read_kernels(binary)
    if not kernels:
        print(f"{binary} contains no kernels")
        return 1
    faults = {name: found for name, kernel in kernels.items() if (found := kernel.faults())}
    for name, found in faults.items():
        print(f"{demangle(name)}: {'; '.join(found)}")
    most = max(kernel.registers for kernel in kernels.values())
    print(f"{len(kernels)} kernels, at most {most} registers, {len(faults)} with faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

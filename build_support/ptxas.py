"""Reads what `ptxas -v` says about kernels, and judges it."""

from __future__ import annotations

import re
import shutil
import subprocess

_COMPILING = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_PROPERTIES = re.compile(r"Function properties for '?([^\s']+)'?")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SERIALISED = re.compile(r"Potential Performance Loss: (.*)")


def demangle(names: list[str]) -> list[str]:
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    text = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return text.splitlines()


def parse(output: str) -> tuple[list[dict], list[str]]:
    """Kernels of one compilation, and the lines of `output` that are not ptxas bookkeeping.

    A kernel is {"symbol", "arch", "registers", "stack_bytes", "spill_store_bytes", "spill_load_bytes",
    "serialised"}; device functions that were not inlined appear as kernels with registers 0.
    """
    functions: dict[str, dict] = {}
    other: list[str] = []
    serialised: list[str] = []
    arch, current = "", None

    def function(symbol: str) -> dict:
        empty = {"symbol": symbol, "arch": arch, "registers": 0, "stack_bytes": 0, "spill_store_bytes": 0}
        return functions.setdefault(symbol, {**empty, "spill_load_bytes": 0, "serialised": False})

    for line in output.splitlines():
        if match := _COMPILING.search(line):
            arch, entry = match.group(2), match.group(1)
            current = function(entry)
            compiling = current
        elif match := _PROPERTIES.search(line):
            current = function(match.group(1))
        elif current is not None and (match := _STACK.search(line)):
            names = ("stack_bytes", "spill_store_bytes", "spill_load_bytes")
            current.update(zip(names, map(int, match.groups())))
        elif current is not None and (match := _REGISTERS.search(line)):
            compiling["registers"] = int(match.group(1))
        elif match := _SERIALISED.search(line):
            serialised.append(match.group(1))
            other.append(line)
        elif not line.startswith("ptxas info") and line.strip():
            other.append(line)
    for symbol, entry in functions.items():
        entry["serialised"] = any(symbol in text for text in serialised)
    return list(functions.values()), other


def faults(kernel: dict) -> list[str]:
    """Why the kernel may not ship: local memory, or products that run one after the other."""
    found = []
    if kernel["spill_store_bytes"] or kernel["spill_load_bytes"]:
        found.append(f"spills {kernel['spill_store_bytes']} bytes, reloads {kernel['spill_load_bytes']}")
    if kernel["stack_bytes"]:
        found.append(f"has a stack frame of {kernel['stack_bytes']} bytes")
    if kernel["serialised"]:
        found.append("has serialised wgmma instructions")
    return found

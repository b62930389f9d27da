"""Runs nvcc for ninja: prints what ptxas says in a line a kernel and fails on spills and local memory.

torch.utils.cpp_extension calls it in nvcc's place (PYTORCH_NVCC). Usage: nvcc.py NVCC ARGUMENTS...
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import ptxas  # noqa: E402


def short(name: str) -> str:
    """A demangled kernel without its argument list and the project's namespaces."""
    return re.sub(r"^void |\((?:dash_attn::)?Policy\)|dash_attn::|backward::|forward::|cutlass::", "", name.rpartition("(")[0] or name)


def main() -> int:
    command = sys.argv[1:]
    output = Path(command[command.index("-o") + 1])
    source = next(Path(argument) for argument in command if argument.endswith(".cu"))
    if "-MF" not in command:
        # torch asks for dependencies only when it was itself built with CUDA.
        command += ["-MD", "-MF", f"{output}.d"]
    start = time.monotonic()
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = time.monotonic() - start
    kernels, other = ptxas.parse(run.stdout)
    for line in other:
        print(line)
    if run.returncode != 0:
        return run.returncode

    failed = False
    print(f"{source.name}: {len(kernels)} kernels in {seconds:.0f} s")
    for kernel, name in zip(kernels, ptxas.demangle([kernel["symbol"] for kernel in kernels])):
        kernel.update(name=name, source=source.name)
        faults = ptxas.faults(kernel)
        failed |= bool(faults)
        print(f"  {kernel['registers']} registers, {'; '.join(faults) or 'no spills'}: {short(name)}")
    report = {"source": source.name, "seconds": round(seconds, 1), "kernels": kernels}
    Path(f"{output}.ptxas.json").write_text(json.dumps(report))
    if failed and os.environ.get("DASH_ATTN_ALLOW_SPILLS") != "1":
        print(f"error: {source.name} has kernels with spills, local memory or serialised products")
        output.unlink()
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

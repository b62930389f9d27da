"""Reports what is installed and what works on this machine: ``python -m dash_attn.info``, with ``--json`` for programs.

The report ends with a self-check of about a second: a small forward and backward is compared with plain PyTorch, with
the kernels if they run here and with the CPU reference otherwise. The exit status is 0 if the check passes, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import sys
import time
import warnings
from typing import Any

import torch

import dash_attn
from dash_attn import aliases, build_record, ops, schedule

# The largest relative error (Frobenius norm) of a correct 16-bit result. Rounding alone stays below 0.01.
_MAX_ERROR = 0.02
_TORCH_DTYPES = {"BFloat16": torch.bfloat16, "Float16": torch.float16}
# The policies of each set that shares a kernel, by the name of the set in csrc/launch/variants.def.
_POLICIES_OF = {
    "Ordered": ("descending", "spt"),
    "OrderedAndYardsticks": ("descending", "spt"),  # and policies for benchmarks
    "Shift": ("shift",),
    "SymmetricShift": ("symmetric_shift",),
    "OrderFree": ("order_free",),
}
# The scores that share kernels, likewise.
_SCORES_OF = {"Plain": ("plain",), "Softcap": ("softcap",), "Changed": ("softcap", "alibi"), "Dropout": ("dropout",)}


@dataclasses.dataclass(frozen=True)
class _Integration:
    """A module of dash_attn for a framework, and the distributions that it needs."""

    module: str
    distribution: str
    imported: str


INTEGRATIONS = (
    _Integration("dash_attn.integrations.torch", "torch", "torch"),
    _Integration("dash_attn.integrations.transformers", "transformers", "transformers"),
    _Integration("dash_attn.integrations.megatron", "megatron-core", "megatron.core"),
    _Integration("dash_attn.integrations.vllm", "vllm", "vllm"),
    _Integration("dash_attn.integrations.sglang", "sglang", "sglang"),
)
# The modules that dash_attn can replace, and their distributions.
ALIASES = {"flash_attn": "flash-attn", "flash_attn_interface": "flash-attn-3", "flash_attn_3": "flash-attn-3"}


def _find(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Returns the version of the NVIDIA driver, such as '580.95.05'."""
    path = pathlib.Path("/proc/driver/nvidia/version")
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text()) if path.is_file() else None
    return match.group(1) if match else None


def _build() -> dict[str, Any]:
    """Where the libraries come from, and what does not fit together."""
    libraries = build_record.libraries()
    identities = {path.name: build_record.identity(path) for path in libraries}
    problems = [problem] if (problem := build_record.why_not_one_build(*libraries)) else []
    # In a checkout, which a build in place serves.
    csrc = build_record.FOLDER.parent / "csrc"
    sources = build_record.source_hash(csrc) if csrc.is_dir() else None
    for name, found in identities.items():
        if found is None:
            problems.append(f"{name} does not state what it was built from: install dash_attn again")
            continue
        if found.version != dash_attn.__version__:
            problems.append(f"{name} is of dash_attn {found.version}: install dash_attn again")
        if sources is not None and found.sources != sources:
            problems.append(f"{name} was built from other sources than those in {csrc}: install dash_attn again")
    return {
        "python_sources": build_record.python_sources(),
        "libraries": {name: dataclasses.asdict(found) if found else None for name, found in identities.items()},
        "problems": problems,
    }


def _kernels() -> dict[str, Any]:
    path = build_record.kernels_file()
    if path is None:
        noted = ops.why_left_out()
        because = f"because {noted} when dash_attn was built" if noted else "and the build left no note of the reason"
        return {"built": False, "problem": f"none, {because} (docs/install.md)", "list": []}
    try:
        record = build_record.read(path)
    except ValueError as error:
        return {"built": True, "problem": str(error), "list": []}
    policies = {p for k in record.kernels if k.policies is not None for p in _POLICIES_OF[k.policies]}
    scores = dict.fromkeys(score for kernel in record.kernels for score in _SCORES_OF[kernel.score])
    return {
        "built": True,
        "problem": None,
        "file": str(path),
        "architecture": record.architecture,
        "nvcc": record.nvcc,
        "head_dims": list(dict.fromkeys(kernel.head_dims for kernel in record.kernels)),
        "dtypes": list(dict.fromkeys(kernel.dtype.lower() for kernel in record.kernels)),
        "masks": list(dict.fromkeys(kernel.mask.lower() for kernel in record.kernels)),
        "scores": list(scores),
        "schedules": [policy for policy in schedule.POLICIES if policy in policies],
        "list": [dataclasses.asdict(kernel) for kernel in record.kernels],
    }


def _gpus() -> list[dict[str, Any]]:
    found = []
    for device in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        found.append(
            {"name": name, "capability": ".".join(map(str, capability)), "runs_kernels": capability == ops.HOPPER}
        )
    return found


def why_no_kernels_run() -> str | None:
    """Returns why the kernels cannot run on torch's current CUDA device; None if they can."""
    if ops.why_no_kernels is not None:
        return ops.why_no_kernels
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != ops.HOPPER:
        here = f"{torch.cuda.get_device_name()} ({'.'.join(map(str, capability))})"
        return f"they need a GPU of compute capability 9.0 (Hopper), but this one is {here}"
    return None


def _is_active(integration: _Integration) -> bool:
    """Whether the framework uses dash_attn, as far as this process and its environment show."""
    if integration.distribution == "transformers":
        return "dash-attn/flash=" in os.environ.get("LOCAL_KERNELS", "")
    is_active = getattr(sys.modules.get(integration.module), "is_active", None)
    return bool(is_active and is_active())


def _why_unavailable(integration: _Integration) -> str | None:
    """Returns why the integration cannot be used with the installed packages; None if it can."""
    if not _find(integration.imported):
        return "not installed"
    try:
        # Frameworks warn about missing parts, and stdout must hold only the report.
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            module = importlib.import_module(integration.module)
            return module.why_unavailable() if hasattr(module, "why_unavailable") else None
    except Exception as error:  # frameworks fail to import with all kinds of errors
        return str(error).partition("\n")[0] or type(error).__name__


def _integrations() -> list[dict[str, Any]]:
    found = []
    for integration in INTEGRATIONS:
        installed = _find(integration.imported)
        version = _version(integration.distribution) if installed else None
        found.append(
            {
                "module": integration.module,
                "framework": integration.distribution,
                "version": version,
                "installed": installed,
                "why_unavailable": _why_unavailable(integration),
                "active": _is_active(integration),
            }
        )
    return found


def _aliases() -> list[dict[str, Any]]:
    """Lists which package provides each name of the other libraries."""
    found = []
    for module, distribution in ALIASES.items():
        loaded = sys.modules.get(module)
        version = _version(distribution)
        ours = hasattr(loaded, "__dash_attn__") or "+dash" in (version or "")
        owner = "dash_attn" if ours else "another package" if _find(module) else None
        found.append({"module": module, "version": version, "owner": owner})
    return found


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Computes attention in plain PyTorch, in the dtype of its arguments, which are (1, seqlen, heads, head_dim)."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def _error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double().cpu() - truth).norm() / truth.norm())


def _check_case(device: str, dtype: torch.dtype, head_dims: tuple[int, int], causal: bool) -> str | None:
    """Returns what is wrong with attention for head dims of q and k and of v; None if nothing is."""
    generator = torch.Generator().manual_seed(0)
    columns = (head_dims[0], head_dims[0], head_dims[1], head_dims[1])
    tensors = [torch.randn(1, 200, 2, d, generator=generator, dtype=torch.float32).to(dtype) for d in columns]
    exact = [tensor.double().requires_grad_() for tensor in tensors[:3]]
    truth = _attention(*exact, causal=causal)
    truths = [truth.detach(), *torch.autograd.grad(truth, exact, tensors[3].double())]
    runs = []
    for _ in range(2):
        q, k, v = (tensor.to(device).requires_grad_() for tensor in tensors[:3])
        out = dash_attn.flash_attn_func(q, k, v, causal=causal)
        runs.append([out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].to(device))])
    of = f"{str(dtype).removeprefix('torch.')}, head dims {head_dims}, {'causal' if causal else 'full'} mask"
    for name, first, second, expected in zip(("the output", "dq", "dk", "dv"), *runs, truths, strict=True):
        if not torch.equal(first.view(torch.int16), second.view(torch.int16)):
            return f"{name} has different bits in the second run ({of})"
        if not (error := _error(first, expected)) <= _MAX_ERROR:
            return f"{name} differs from plain PyTorch by {error:.2g} of its norm, limit {_MAX_ERROR} ({of})"
    return None


def _cases(kernels: dict[str, Any]) -> list[tuple[torch.dtype, tuple[int, int], bool]]:
    """Returns a call for each dtype and head dims with kernels of `schedule="auto"` for the full or causal mask."""
    masks: dict[tuple[str, str], bool] = {}
    for kernel in kernels["list"]:
        serves_auto = "descending" in _POLICIES_OF.get(kernel["policies"], ())
        if serves_auto and kernel["score"] == "Plain" and kernel["mask"] in ("Full", "Causal"):
            key = kernel["dtype"], kernel["head_dims"]
            masks[key] = kernel["mask"] == "Causal" or masks.get(key, False)
    cases = []
    for (dtype, head_dims), causal in masks.items():
        of_keys, _, of_values = head_dims.partition("x")
        cases.append((_TORCH_DTYPES[dtype], (int(of_keys), int(of_values or of_keys)), causal))
    return cases


def self_check(device: str, kernels: dict[str, Any]) -> dict[str, Any]:
    """Runs a small forward and backward twice: compares it with plain PyTorch in float64, and the bits of both runs."""
    start = time.perf_counter()
    cases = _cases(kernels) if device == "cuda" else []
    cases = cases or [(torch.bfloat16, (64, 64), True)]
    errors = []
    for case in cases:
        try:
            problem = _check_case(device, *case)
        except Exception as error:  # the check reports any error
            problem = f"{type(error).__name__}: {error}"
        errors += [problem] if problem else []
    return {"device": device, "cases": len(cases), "passed": not errors, "errors": errors,
            "seconds": round(time.perf_counter() - start, 2)}  # fmt: skip


def report() -> dict[str, Any]:
    """Returns everything that is printed, as values that JSON can represent."""
    gpus = _gpus()
    kernels = _kernels()
    why_not = why_no_kernels_run()
    return {
        "dash_attn": {
            "version": dash_attn.__version__,
            "bits_version": dash_attn.__bits_version__,
            "folder": str(pathlib.Path(dash_attn.__file__).parent),
        },
        "build": _build(),
        "python": platform.python_version(),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "driver": _driver(),
        "kernels": kernels,
        "gpus": gpus,
        "kernels_run_here": why_not is None,
        "why_not": why_not,
        "integrations": _integrations(),
        "aliases": _aliases(),
        "why_not_in_other_processes": aliases.why_no_start_file(),
        "self_check": self_check("cpu" if why_not else "cuda", kernels),
    }


def _text(facts: dict[str, Any]) -> str:
    kernels, check = facts["kernels"], facts["self_check"]
    cuda = f"CUDA {facts['torch']['cuda']}" if facts["torch"]["cuda"] else "no CUDA"
    driver = f"NVIDIA driver {facts['driver']}" if facts["driver"] else "no NVIDIA driver"
    lines = [
        f"dash_attn {facts['dash_attn']['version']} in {facts['dash_attn']['folder']}",
        f"bits version {facts['dash_attn']['bits_version']}, Python sources {facts['build']['python_sources']}",
        f"Python {facts['python']}, torch {facts['torch']['version']} with {cuda}, {driver}",
    ]
    for name, found in facts["build"]["libraries"].items():
        origin = "sources {sources}, commit {commit}, torch {torch}".format(**found) if found else "origin unknown"
        lines.append(f"{name}: {origin}")
    lines += [f"PROBLEM: {problem}" for problem in facts["build"]["problems"]]
    if kernels["problem"] is None:
        count, architecture = len(kernels["list"]), kernels["architecture"]
        lines.append(f"kernels: {count} for {architecture} (Hopper), by nvcc {kernels['nvcc']}")
        for axis in ("head_dims", "dtypes", "masks", "scores", "schedules"):
            lines.append(f"  {axis.replace('_', ' ') + ':':<11}{', '.join(kernels[axis])}")
    else:
        lines.append(f"kernels: {kernels['problem']}")
    for gpu in facts["gpus"]:
        lines.append(f"GPU: {gpu['name']}, compute capability {gpu['capability']}")
    lines.append(f"kernels run here: {'yes' if facts['kernels_run_here'] else 'no: ' + facts['why_not']}")
    lines.append("integrations:")
    for integration in facts["integrations"]:
        framework = f"{integration['framework']} {integration['version'] or ''}".strip()
        state = (
            "active"
            if integration["active"]
            else f"unavailable: {integration['why_unavailable']}"
            if integration["why_unavailable"]
            else "available"
        )
        lines.append(f"  {integration['module']:<36}{framework}: {state}")
    for alias in facts["aliases"]:
        version = f" {alias['version']}" if alias["version"] else ""
        lines.append(f"  {'the name ' + alias['module']:<36}{(alias['owner'] or 'not installed') + version}")
    why = facts["why_not_in_other_processes"]
    lines.append(f"  {'the names in other processes':<36}{f'no: {why}' if why else f'by {aliases.ENVIRONMENT}'}")
    by = "the kernels" if check["device"] == "cuda" else "the CPU reference"
    result = "passed" if check["passed"] else "FAILED"
    lines.append(f"self-check of {by}: {result} ({check['cases']} cases, {check['seconds']} s)")
    lines += [f"  {error}" for error in check["errors"]]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dash_attn.info", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print all facts as JSON, including every kernel")
    arguments = parser.parse_args(argv)
    facts = report()
    print(json.dumps(facts, indent=2) if arguments.json else _text(facts))
    return 0 if facts["self_check"]["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

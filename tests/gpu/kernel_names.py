"""Which kernels a GPU runs."""

import json
import pathlib
import tempfile
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def kernels(run: Callable[[], object]) -> list[str]:
    """Names of all kernels that `run` launches."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        recorded.export_chrome_trace(file.name)
        events = json.loads(pathlib.Path(file.name).read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "kernel"]


def ours(names: list[str], kernel: str) -> bool:
    return any("dash_attn::" in name and kernel in name for name in names)


def assert_ours(run: Callable[[], object]) -> None:
    """Attention is computed by our kernels of both passes and by no others."""
    names = kernels(run)
    assert ours(names, "forward_kernel") and ours(names, "backward_kernel"), names
    of_others = [name for name in names if any(word in name.lower() for word in ("flash", "cudnn", "fmha"))]
    assert not of_others

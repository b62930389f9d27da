"""How often our kernels, or the reference in their place, are called, on any device."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def kernels_in(run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """The result of `run`, and how often it called the forward and the backward."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = run()
    counts = {event.key: event.count for event in profiler.key_averages()}
    return result, [counts.get(f"dash_attn_C::{name}", 0) for name in ("forward", "backward")]

"""The settings of a process that one test could leave behind for the tests after it."""

import contextlib
import gc
import os

import torch

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def global_settings() -> dict[str, object]:
    return {
        "use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn_sdp": torch.backends.cuda.cudnn_sdp_enabled(),
        "bf16_reduced_precision": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "default_dtype": torch.get_default_dtype(),
        "num_threads": torch.get_num_threads(),
        "grad_enabled": torch.is_grad_enabled(),
        VARIABLE: os.environ.get(VARIABLE),
        "gc.isenabled": gc.isenabled(),
        "gc.get_freeze_count": gc.get_freeze_count(),
    }


@contextlib.contextmanager
def settings_put_back():
    """Fails where the block leaves a setting other than it was."""
    before = global_settings()
    yield
    after = global_settings()
    left = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not left, f"these settings, (before, after), were left behind: {left}"

"""torchtitan's VarlenAttention on a Hopper GPU, where it activates "FA3" by itself, which is dash_attn."""

import inspect
import pathlib
import runpy

import gpu_support
import pytest
import torch.nn.attention.varlen

pytest.importorskip("torchtitan.models.common.attention", reason="torchtitan is not installed", exc_type=ImportError)

if "enable_gqa" not in inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters:
    reason = f"torchtitan gives varlen_attn arguments that torch {torch.__version__} has not"
    pytest.skip(reason, allow_module_level=True)

import titan_support as support  # noqa: E402
from kernel_names import assert_ours  # noqa: E402
from torch.nn.attention import current_flash_attention_impl  # noqa: E402

import dash_attn.integrations.torch as door  # noqa: E402

SEQLEN, REPEATS = 2000, 20
SIZE = {"heads": 16, "kv_heads": 4, "head_dim": 128}
NAMES = ("out", "dq", "dk", "dv")
WINDOWS = pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (300, 0)], ids=str)


@pytest.fixture(autouse=True)
def registered(device):
    door.register("FA3", device_types=[device], fallback="error")
    yield
    door.restore()


def problem(device):
    return *support.tensors(SEQLEN, device, **SIZE), support.documents(SEQLEN, device)


def named(results):
    return {name: x.detach() for name, x in zip(NAMES, results, strict=True)}


@WINDOWS
def test_has_our_bits(window, device):
    assert current_flash_attention_impl() is None
    attention = support.attention_of(window)
    assert current_flash_attention_impl() == "FA3" and door.is_active()
    arguments = problem(device)
    actual = named(support.by_torchtitan(attention, *arguments))
    gpu_support.assert_finite(actual, "VarlenAttention")
    gpu_support.assert_same_bits(actual, named(support.by_dash_attn(window, *arguments)), "VarlenAttention")


@WINDOWS
def test_bits_under_load(window, device, perturbation):
    attention, arguments = support.attention_of(window), problem(device)
    expected = named(support.by_torchtitan(attention, *arguments))
    for _ in range(REPEATS):
        perturbation.move_allocations()
        perturbation.enqueue(8)
        gpu_support.assert_same_bits(named(support.by_torchtitan(attention, *arguments)), expected, f"{window}")


def test_our_kernels_run(device):
    attention, arguments = support.attention_of((-1, 0)), problem(device)
    assert_ours(lambda: support.by_torchtitan(attention, *arguments))


def test_the_log_sum_exp_of_its_epilogue(device):
    inputs, _, documents = problem(device)
    found, expected = (dict(zip(("out", "softmax_lse"), x)) for x in support.log_sum_exps(inputs, documents))
    gpu_support.assert_same_bits(found, expected, "its epilogue")


def test_example(capsys):
    runpy.run_path(str(pathlib.Path(__file__).parents[2] / "examples" / "torchtitan_attention.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == "the gradients of three runs have the same bits"

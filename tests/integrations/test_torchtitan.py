"""torchtitan's VarlenAttention, which activates the implementation named "FA3" on a Hopper GPU."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

pytest.importorskip("torchtitan.models.common.attention", reason="torchtitan is not installed", exc_type=ImportError)

from interface_support import assert_same_bits, kernel_calls, out_and_gradients, qkv_tensors  # noqa: E402
from torch.nn.attention import current_flash_attention_impl  # noqa: E402
from torchtitan.models.common import attention as titan  # noqa: E402

import dash_attn  # noqa: E402
import dash_attn.integrations.torch as door  # noqa: E402
from dash_attn import flash_attn_varlen_func  # noqa: E402

BATCH, SEQLEN = 2, 20


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    """As where torchtitan finds a Hopper GPU; the tensors are on the CPU."""
    monkeypatch.setattr("torchtitan.tools.utils.get_cuda_flash_attention_impl", lambda: "FA3")
    door.register("FA3", device_types=["cpu"])
    yield
    door.restore()


def documents():
    """Two documents in the first row of the batch, one in the second."""
    offsets = torch.tensor([0, 13, SEQLEN, 2 * SEQLEN], dtype=torch.int32)
    return titan.VarlenMetadata(offsets, offsets, SEQLEN, SEQLEN)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (7, 0)])
def test_varlen_attention(window):
    assert current_flash_attention_impl() is None
    attention = titan.VarlenAttention(titan.VarlenAttention.Config(window_size=window))
    assert current_flash_attention_impl() == "FA3" and door.is_active()
    *inputs, dout = qkv_tensors(SEQLEN, SEQLEN, heads=4, kv_heads=2, batch=BATCH)
    documents_of_batch = documents()

    def by_torchtitan(q, k, v):
        return attention(q, k, v, attention_masks=documents_of_batch, scale=0.2, enable_gqa=True)

    def by_dash_attn(q, k, v):
        rows = (x.flatten(0, 1) for x in (q, k, v))
        out = flash_attn_varlen_func(*rows, *documents_of_batch[:4], window_size=window, softmax_scale=0.2)
        return out.unflatten(0, (BATCH, SEQLEN))

    with kernel_calls() as calls:
        actual = out_and_gradients(by_torchtitan, inputs, dout)
    assert [name for name, _ in calls] == ["forward", "backward"]
    assert_same_bits(actual, out_and_gradients(by_dash_attn, inputs, dout))
    for _ in range(2):
        assert_same_bits(out_and_gradients(by_torchtitan, inputs, dout), actual)


def test_the_log_sum_exp_of_its_epilogue():
    attention = titan.VarlenAttention(titan.VarlenAttention.Config())
    *inputs, _ = qkv_tensors(SEQLEN, SEQLEN, heads=4, kv_heads=4, batch=BATCH)
    found = attention(*inputs, attention_masks=documents(), out_transform=lambda out, lse: (out, lse))
    rows = (x.flatten(0, 1) for x in inputs)
    out, lse, _ = flash_attn_varlen_func(*rows, *documents()[:4], causal=True, return_attn_probs=True)
    assert torch.equal(found[0].flatten(0, 1), out)
    assert torch.equal(found[1].flatten(0, 1).T, lse)


def test_example():
    example = pathlib.Path(__file__).parents[2] / "examples" / "torchtitan_attention.py"
    paths = os.pathsep.join((str(pathlib.Path(dash_attn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, example], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["the gradients of three runs have the same bits"], done.stderr

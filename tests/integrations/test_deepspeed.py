"""The calls of flash_attn's functions in DeepSpeed 0.19.8 fit ours, and compute what DeepSpeed makes of them.

FPDT, its attention over chunks of a long sequence (deepspeed/sequence/fpdt_layer.py), calls two private functions, as
here for flash-attn 2.7.0 or newer; its tests of inference call flash_attn_varlen_func. Its other ways to attention go
through transformers, or through a function that the user passes.
"""

import ast
import importlib.metadata
import importlib.util
import inspect
import pathlib

import pytest
import torch
from float64_reference import attention_float64, attention_in_dtype
from interface_support import assert_same_bits, qkv_tensors

from dash_attn.compat import flash_attn_2

VERSION = "0.19.8"
CHUNKS, ROWS = 3, 16
CALLS = {
    "_flash_attn_forward": (
        ["q", "k", "v", "dropout_p", "softmax_scale"],
        ["causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes", "return_softmax"],
    ),
    "_flash_attn_backward": (
        ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "dropout_p", "softmax_scale", "causal",
         "window_size_left", "window_size_right", "softcap", "alibi_slopes", "deterministic"],
        ["rng_state"],
    ),
    "flash_attn_varlen_func": (
        ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"], ["softmax_scale", "causal"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_call_fits(name):
    positional, keywords = CALLS[name]
    bound = inspect.signature(getattr(flash_attn_2, name)).bind(
        *positional, **{keyword: keyword for keyword in keywords}
    )
    assert all(parameter == value for parameter, value in bound.arguments.items()), bound.arguments


def chunked(q, k, v, dout):
    """Causal attention over chunks of queries and of keys: out and the gradients."""
    scale = q.shape[-1] ** -0.5
    (qs, ks, vs, douts), (out, dq, dk, dv) = (
        [[x.contiguous() for x in tensor.chunk(CHUNKS, 1)] for tensor in (q, k, v, dout)],
        [[torch.zeros_like(x, dtype=torch.float32) for x in tensor.chunk(CHUNKS, 1)] for tensor in (q, q, k, v)],
    )
    lse = [None] * CHUNKS
    for i in range(CHUNKS):
        for j in range(i + 1):
            part, of_part, _, _ = flash_attn_2._flash_attn_forward(
                qs[i], ks[j], vs[j], 0.0, scale, causal=i == j, window_size_left=-1, window_size_right=-1, softcap=0.0,
                alibi_slopes=None, return_softmax=False,
            )  # fmt: skip
            both = of_part if j == 0 else torch.logaddexp(lse[i], of_part)
            old, new = (0.0 if x is None else (x - both).exp().transpose(1, 2)[..., None] for x in (lse[i], of_part))
            out[i], lse[i] = old * out[i] + new * part.float(), both
    for j in range(CHUNKS):
        for i in range(j, CHUNKS):
            parts = [torch.zeros_like(x) for x in (qs[i], ks[j], vs[j])]
            flash_attn_2._flash_attn_backward(
                douts[i], qs[i], ks[j], vs[j], out[i].to(q.dtype), lse[i].contiguous(), *parts, 0.0, scale, i == j, -1,
                -1, 0.0, None, False, rng_state=None,
            )  # fmt: skip
            for total, part in zip((dq[i], dk[j], dv[j]), parts, strict=True):
                total += part.float()
    return [torch.cat(x, 1).to(q.dtype) for x in (out, dq, dk, dv)]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_over_chunks(kv_heads):
    """As near to float64 as eager attention on the whole sequence, with the same bits in every run."""
    tensors = [x.detach() for x in qkv_tensors(CHUNKS * ROWS, CHUNKS * ROWS, heads=4, kv_heads=kv_heads)]
    found = chunked(*tensors)
    exact, eager = (function(*tensors, causal=True) for function in (attention_float64, attention_in_dtype))
    for name, actual in zip(("out", "dq", "dk", "dv"), found, strict=True):
        truth = getattr(exact, name)
        assert (actual.double() - truth).norm() <= (getattr(eager, name).double() - truth).norm(), name
    assert_same_bits(chunked(*tensors), found)


def test_its_source_has_these_calls():
    spec = importlib.util.find_spec("deepspeed")  # which imports nothing
    if spec is None:
        pytest.skip("DeepSpeed is not installed, so the calls are not compared with its source")
    if (installed := importlib.metadata.version("deepspeed")) != VERSION:
        pytest.skip(f"the calls are those of DeepSpeed {VERSION}, and {installed} is installed")
    tree = ast.parse(pathlib.Path(spec.origin).with_name("sequence").joinpath("fpdt_layer.py").read_text())
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            call = len(node.args), tuple(keyword.arg for keyword in node.keywords)
            found.setdefault(node.func.id, set()).add(call)
    for name, calls in found.items():
        assert (len(CALLS[name][0]), tuple(CALLS[name][1])) in calls, calls
        assert len(calls) == 3, calls  # one for 2.6 and one for older releases
    assert found.keys() == {"_flash_attn_forward", "_flash_attn_backward"}

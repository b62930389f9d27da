"""The torch.library ops: `dash_attn::forward` and `dash_attn::backward`, and those with a derivative that models call.

    forward(q, k, v, softmax_scale, causal, sm_margin=0) -> (out, softmax_lse)
    backward(dout, q, k, v, out, softmax_lse, dq!, dk!, dv!, softmax_scale, causal, schedule, sm_margin) -> ()

q, dq, out and dout are (batch, seqlen_q, heads, head_dim), k, v, dk and dv (batch, seqlen_k, kv_heads, head_dim), all
bf16 or all fp16, of any strides, head_dim a multiple of 8 up to 128. softmax_lse is fp32 (batch, heads, seqlen_q),
natural logarithm, +inf (-inf is taken too) for a query that sees no key; such a query has output 0 and gradients 0, as
every sum over no key or no query is 0. out is contiguous. dq, dk and dv share no memory with each other nor with what
is read. `schedule` is a policy of `dash_attn.schedule` or "auto", `sm_margin` the number of SMs to leave to other
kernels.

A row's output depends on its query, the keys and values it sees and their number; gradients on the schedule besides;
and neither on `sm_margin`, the device's SMs or the rest of the batch, to the last bit. Where K or V is not finite, a
row may be NaN for a key of a KV tile that it sees other keys of (docs/forward.md).

    attention(q, k, v, softmax_scale, causal, schedule, sm_margin) -> (out, softmax_lse)
    attention_kvpacked(q, kv, softmax_scale, ...)    attention_qkvpacked(qkv, num_heads_q, softmax_scale, ...)

are the two as one differentiable function of what `dash_attn.interface` is given. All of them are C++
(csrc/bindings/autograd.cpp) and run `dash_attn_C::forward` and `dash_attn_C::backward`, the kernels, which take what
TMA can address and a positive scale. Their CUDA implementation is in `_C`; the CPU's is the reference, below.
"""

import pathlib

import torch

from . import reference
from . import schedule as _schedule

_FOLDER = pathlib.Path(__file__).parent
_NO_KERNELS = (
    "dash_attn was installed without its CUDA kernels: CUDA tensors need an install from source with nvcc on PATH or "
    "CUDA_HOME set; CPU tensors use the reference"
)


def why_not_loaded(stem: str, absent: str, folder: pathlib.Path = _FOLDER) -> str | None:
    """Loads the package's compiled library `stem`. None, or why it cannot be: `absent` if it is not there."""
    found = sorted(folder.glob(f"{stem}*.so"))
    if not found:
        return f"{absent} (no {stem}*.so in {folder})"
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        return f"dash_attn must have one {stem}*.so in {folder}, got {names}: remove the stale ones"
    try:
        torch.ops.load_library(found[0])
    except OSError as error:
        hint = "after a change of torch, install dash_attn again: pip install --no-build-isolation ."
        return f"{found[0]} cannot be loaded: {error.__cause__ or error} ({hint})"
    return None


def _forward_cpu(q, k, v, out, softmax_lse, softmax_scale, causal, sm_margin):
    results = reference.forward(q, k, v, softmax_scale=softmax_scale, causal=causal)
    for target, result in zip((out, softmax_lse), results):
        target.copy_(result)


def _backward_cpu(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, schedule, sm_margin):
    (_, seqlen_q, heads, head_dim), (_, seqlen_k, kv_heads, _) = q.shape, k.shape
    order = reference.tile_order(
        _schedule.POLICIES[schedule],
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        causal=causal,
        group_size=heads // kv_heads,
    )
    results = reference.backward(
        dout, q, k, v, out, softmax_lse, softmax_scale=softmax_scale, causal=causal, order=order
    )
    for gradient, result in zip((dq, dk, dv), results):
        gradient.copy_(result)


def _raiser(reason):
    def without_kernels(*_):
        raise RuntimeError(reason)

    return without_kernels


def _load():
    absent = "dash_attn was installed without its ops: `pip install --no-build-isolation .` from its root"
    reason = why_not_loaded("_autograd", absent)
    if reason is not None:
        raise ImportError(reason)
    torch.library.impl("dash_attn_C::forward", "CPU", _forward_cpu)
    torch.library.impl("dash_attn_C::backward", "CPU", _backward_cpu)
    if torch.version.cuda:
        reason = why_not_loaded("_C", _NO_KERNELS)
    else:
        reason = "this torch is built without CUDA"
    if reason is not None:
        for name in ("dash_attn_C::forward", "dash_attn_C::backward"):
            torch.library.impl(name, "CUDA", _raiser(reason))


_load()

"""What the tests of dash_attn.compat share."""

import inspect

import torch
from interface_support import qkv_tensors

from dash_attn import flash_attn_func, flash_attn_varlen_func

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (7, 3)},
    "causal_window": {"causal": True, "window_size": (9, -1)},
}


def parameters(function) -> list[tuple[str, object]]:
    """(name, default) of what may be given by position."""
    kinds = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD]


def dense(seqlen_q=40, seqlen_k=30, **arguments):
    """q, k, v, dout; under the causal mask the first queries see no key."""
    q, k, v, dout = qkv_tensors(seqlen_q, seqlen_k, **arguments)
    return q.detach(), k.detach(), v.detach(), dout


def packed():
    """q, k, v, dout, cu_seqlens_q, cu_seqlens_k: three sequences, one of them without queries and one without keys."""
    q, k, v, dout = (x[0] for x in dense(40, 30, batch=1))
    return q, k, v, dout, *(torch.tensor(x, dtype=torch.int32) for x in ([0, 25, 25, 33, 40], [0, 9, 21, 30, 30]))


def public(tensors, dout, offsets=(), **arguments):
    """out, softmax_lse with +inf, dq, dk, dv of the public functions."""
    inputs = [x.clone().requires_grad_() for x in tensors]
    function = flash_attn_varlen_func if offsets else flash_attn_func
    out, lse, _ = function(*inputs, *offsets, return_attn_probs=True, **arguments)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, dout)


def with_lse_of_no_key(softmax_lse, value):
    return softmax_lse.masked_fill(softmax_lse.isinf(), value)

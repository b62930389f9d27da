"""The torch.library ops `dash_attn::forward` and `dash_attn::backward`: CPU (reference), CUDA and fake implementations.

    forward(q, k, v, softmax_scale, causal, sm_margin=0) -> (out, softmax_lse)
    backward(dout, q, k, v, out, softmax_lse, dq!, dk!, dv!, softmax_scale, causal, schedule, sm_margin) -> ()

q, dq, out and dout are (batch, seqlen_q, heads, head_dim), k, v, dk and dv (batch, seqlen_k, kv_heads, head_dim), all
bf16 or all fp16, head_dim a multiple of 8 up to 128. softmax_lse is fp32 (batch, heads, seqlen_q), natural logarithm, +inf
(-inf is taken too) for a query that sees no key; such a query has output 0 and gradients 0, as every sum over no key or
no query is 0. `dash_attn.interface` is what models call: the ops have no autograd of their own.
"""

import functools
import math
import pathlib

import torch
from torch import Tensor

from . import checks, reference
from . import schedule as _schedule

_CAPABILITY = (9, 0)
_VECTOR_BYTES = 16
_TINY = torch.finfo(torch.float32).tiny


@torch.library.custom_op("dash_attn::forward", mutates_args=(), device_types="cpu")
def forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, sm_margin: int = 0
) -> tuple[Tensor, Tensor]:
    """Output (contiguous, like q) and log-sum-exp (fp32) of attention; see the module's docstring.

    `sm_margin` is the number of SMs to leave to other kernels. A row's bits depend on its query, the keys and values it
    sees and their number, and on nothing else: not on `sm_margin`, the device's SMs or the rest of the batch.
    """
    checks.check_forward(q, k, v, softmax_scale, sm_margin)
    if _is_empty(q, k):
        return _empty_forward(q)
    return reference.forward(q, k, v, softmax_scale=softmax_scale, causal=causal)


@forward.register_fake
def _forward_fake(q, k, v, softmax_scale, causal, sm_margin=0):
    checks.check_forward(q, k, v, softmax_scale, sm_margin)
    return _new_outputs(q)


@forward.register_kernel("cuda")
def _forward_cuda(q, k, v, softmax_scale, causal, sm_margin=0):
    checks.check_forward(q, k, v, softmax_scale, sm_margin)
    _require_kernels(q.device)
    if _is_empty(q, k):
        return _empty_forward(q)
    out, softmax_lse = _new_outputs(q)
    q, softmax_scale, _ = _with_positive_scale(q, softmax_scale)
    torch.ops.dash_attn_C.forward(
        *(_addressable(t) for t in (q, k, v)), out, softmax_lse, softmax_scale, causal, sm_margin
    )
    return out, softmax_lse


@torch.library.custom_op("dash_attn::backward", mutates_args=("dq", "dk", "dv"), device_types="cpu")
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    softmax_scale: float,
    causal: bool,
    schedule: str,
    sm_margin: int,
) -> None:
    """Writes the gradients of sum(dout * out) into dq, dk and dv, of any strides; see the module's docstring.

    `schedule` is a policy of `dash_attn.schedule` or "auto", `sm_margin` the number of SMs to leave to other kernels.
    The bits written depend on the schedule and not on `sm_margin`, the device's SMs or the rest of the batch.
    """
    checks.check_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, schedule, sm_margin)
    if _is_empty(q, k):
        _zero(dq, dk, dv)
        return
    orders = reference.tile_orders(schedule, **_shape(q, k, causal), kv_heads=k.shape[2])
    results = reference.backward_of_heads(
        dout, q, k, v, out, softmax_lse, softmax_scale=softmax_scale, causal=causal, orders=orders
    )
    for gradient, result in zip((dq, dk, dv), results):
        gradient.copy_(result)


@backward.register_fake
def _backward_fake(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, schedule, sm_margin):
    checks.check_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, schedule, sm_margin)


@backward.register_kernel("cuda")
def _backward_cuda(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, schedule, sm_margin):
    checks.check_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, schedule, sm_margin)
    _require_kernels(q.device)
    if _is_empty(q, k):
        _zero(dq, dk, dv)
        return
    policy = _schedule.resolve(schedule, **_shape(q, k, causal))
    q, softmax_scale, sign = _with_positive_scale(q, softmax_scale)
    gradients = (dq, dk, dv)
    targets = tuple(g if _is_addressable(g) else g.new_empty(g.shape) for g in gradients)
    torch.ops.dash_attn_C.backward(
        *(_addressable(t) for t in (dout, q, k, v, out)),
        softmax_lse.contiguous(),
        *targets,
        softmax_scale,
        causal,
        _schedule.policy_number(policy),
        sm_margin,
    )
    if sign != 1.0:
        targets[0].mul_(sign)
    for gradient, target in zip(gradients, targets):
        if target is not gradient:
            gradient.copy_(target)


def _is_empty(q, k):
    return q.numel() == 0 or k.numel() == 0


def _shape(q, k, causal):
    """What a schedule may depend on: the shape of one sequence."""
    _, seqlen_q, heads, head_dim = q.shape
    _, seqlen_k, kv_heads, _ = k.shape
    lengths = dict(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    return dict(lengths, causal=causal, head_dim=head_dim, queries_per_kv=heads // kv_heads)


def _new_outputs(q):
    batch, seqlen_q, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


def _empty_forward(q):
    batch, seqlen_q, heads, _ = q.shape
    return q.new_zeros(q.shape), q.new_full((batch, heads, seqlen_q), math.inf, dtype=torch.float32)


def _zero(*tensors):
    for tensor in tensors:
        tensor.zero_()


def _with_positive_scale(q, softmax_scale):
    """(q', c', sign) with c' > 0 and c' q' = c q, so that dq = sign * dq'.

    Kernels that scale after masking or after taking the largest score are right for a positive scale only.
    """
    if abs(softmax_scale) < _TINY:
        return torch.zeros_like(q), 1.0, 0.0
    return (q, softmax_scale, 1.0) if softmax_scale > 0 else (-q, -softmax_scale, -1.0)


def _is_addressable(tensor):
    """Whether TMA can address the tensor: contiguous rows, 16-byte aligned base and strides."""
    step = _VECTOR_BYTES // tensor.element_size()
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % _VECTOR_BYTES == 0
        and all(size == 1 or (s > 0 and s % step == 0) for size, s in zip(tensor.shape[:-1], tensor.stride()[:-1]))
    )


def _addressable(tensor):
    return tensor if _is_addressable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _require_kernels(device):
    _load_kernels()
    _require_hopper(device.index)


@functools.cache
def _load_kernels():
    folder = pathlib.Path(__file__).parent
    libraries = sorted(folder.glob("_C*.so"))
    if not libraries:
        raise RuntimeError(
            f"dash_attn was installed without its CUDA kernels (no _C*.so in {folder}): CUDA tensors need an install "
            "from source with nvcc on PATH or CUDA_HOME set; CPU tensors use the reference"
        )
    if len(libraries) > 1:
        names = ", ".join(library.name for library in libraries)
        raise RuntimeError(f"dash_attn must have one _C*.so in {folder}, got {names}: remove the stale ones")
    torch.ops.load_library(libraries[0])


@functools.cache
def _require_hopper(index):
    capability = torch.cuda.get_device_capability(index)
    if capability != _CAPABILITY:
        raise RuntimeError(
            "q must be on a GPU of compute capability 9.0 (Hopper: H100, H200, GH200), got "
            f"{torch.cuda.get_device_name(index)} with compute capability {capability[0]}.{capability[1]}"
        )

"""Argument checks: one error per bad input, raised before anything is launched or written.

Every message names the argument, what it must be and what it was. The wrong kind of thing raises TypeError, a wrong
value or shape ValueError, and a value that other libraries accept and this one does not yet NotImplementedError.
"""

import math
import numbers

import torch

from . import schedule as _schedule

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 128
# Tile counts and ends are 32-bit in the kernels.
MAX_SEQLEN = 2**30 - 1

# Looked up rather than asked for at each call, which torch.compile could not trace.
_SCHEDULES = {
    causal: ("auto", *_schedule.fitting(causal=causal)) for causal in (False, True)
}

# name: (the supported value, why or what instead)
_UNSUPPORTED = {
    "dropout_p": (0.0, "dropout is not supported"),
    "window_size": ((-1, -1), "sliding windows are not supported; causal=True gives the causal mask"),
    "softcap": (0.0, "soft-capped scores are not supported"),
    "alibi_slopes": (None, "ALiBi is not supported"),
    "qv": (None, "a second query-value product is not supported"),
    "q_descale": (None, "fp8 is not supported"),
    "k_descale": (None, "fp8 is not supported"),
    "v_descale": (None, "fp8 is not supported"),
    "attention_chunk": (0, "chunked attention is not supported"),
    "num_splits": (1, "splitting the keys is not supported"),
    "pack_gqa": (None, "the layout of grouped heads cannot be chosen"),
}


def reject_unsupported(**arguments):
    """Raise NotImplementedError for the first argument that is not at its only supported value."""
    for name, value in arguments.items():
        supported, reason = _UNSUPPORTED[name]
        if not _is_value(value, supported):
            raise NotImplementedError(f"{name} must be {supported!r} ({reason}), got {_describe(value)}")


def check_flags(**flags):
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {_describe(value)}")


def check_softmax_scale(softmax_scale):
    # A tensor would have to be read back from its device.
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (numbers.Real, torch.SymFloat)):
        raise TypeError(f"softmax_scale must be a finite number or None, got {_describe(softmax_scale)}")
    if not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale must be a finite number or None, got {softmax_scale!r}")


def check_schedule(schedule, causal):
    allowed = _SCHEDULES[causal]
    if not isinstance(schedule, str) or schedule not in allowed:
        names = ", ".join(map(repr, allowed))
        raise ValueError(f"schedule must be one of {names} when causal={causal}, got {_describe(schedule)}")


def check_sm_margin(sm_margin, device):
    if isinstance(sm_margin, bool) or not isinstance(sm_margin, int):
        raise TypeError(f"sm_margin must be an int, got {_describe(sm_margin)}")
    if sm_margin < 0:
        raise ValueError(f"sm_margin must be at least 0, got {sm_margin}")
    if sm_margin > 0 and device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        if sm_margin >= sms:
            raise ValueError(f"sm_margin must be less than the {sms} SMs of {device}, got {sm_margin}")


def check_qkv(q, k, v):
    """q (batch, seqlen_q, heads, head_dim); k and v (batch, seqlen_k, kv_heads, head_dim)."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor, "(batch, seqlen, heads, head_dim)", 4)
    _check_same("k", k, "q", q)
    _check_same("v", v, "q", q)
    _check_head_dim("q", q)
    _check_kv_shape("k", k.shape, q)
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {_shape(k)}, got {_shape(v)}")


def check_q_kvpacked(q, kv):
    """q (batch, seqlen_q, heads, head_dim); kv (batch, seqlen_k, 2, kv_heads, head_dim)."""
    _check_tensor("q", q, "(batch, seqlen, heads, head_dim)", 4)
    _check_tensor("kv", kv, "(batch, seqlen, 2, kv_heads, head_dim)", 5)
    if kv.shape[2] != 2:
        raise ValueError(f"kv must have shape (batch, seqlen, 2, kv_heads, head_dim), got {_shape(kv)}")
    _check_same("kv", kv, "q", q)
    _check_head_dim("q", q)
    _check_kv_shape("kv", kv.shape, q)


def check_qkvpacked(qkv, num_heads_q):
    """qkv (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2 * kv_heads, head_dim)."""
    if num_heads_q is None:
        expected, rank = "(batch, seqlen, 3, heads, head_dim)", 5
    else:
        expected, rank = "(batch, seqlen, num_heads_q + 2 * kv_heads, head_dim)", 4
        if isinstance(num_heads_q, bool) or not isinstance(num_heads_q, int):
            raise TypeError(f"num_heads_q must be an int or None, got {_describe(num_heads_q)}")
    _check_tensor("qkv", qkv, expected, rank)
    _check_head_dim("qkv", qkv)
    if num_heads_q is None:
        if qkv.shape[2] != 3 or qkv.shape[3] < 1:
            raise ValueError(f"qkv must have shape {expected} with at least one head, got {_shape(qkv)}")
        return
    kv_heads, odd = divmod(qkv.shape[2] - num_heads_q, 2)
    if num_heads_q < 1 or odd or kv_heads < 1 or num_heads_q % kv_heads:
        raise ValueError(
            "num_heads_q must be a positive multiple of kv_heads with num_heads_q + 2 * kv_heads equal to the "
            f"{qkv.shape[2]} heads of qkv, got {num_heads_q}"
        )


def check_forward(q, k, v, softmax_scale, sm_margin):
    """Arguments of the op dash_attn::forward."""
    _check_operands(q, k, v, softmax_scale)
    check_sm_margin(sm_margin, q.device)


def _check_operands(q, k, v, softmax_scale):
    check_qkv(q, k, v)
    if q.shape[3] % 8:
        raise ValueError(f"q must have a head_dim that is a multiple of 8, got {q.shape[3]}")
    check_softmax_scale(softmax_scale)


def check_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, schedule, sm_margin):
    """Arguments of the op dash_attn::backward."""
    _check_operands(q, k, v, softmax_scale)
    for name, tensor, like_name, like in (
        ("dout", dout, "q", q),
        ("out", out, "q", q),
        ("dq", dq, "q", q),
        ("dk", dk, "k", k),
        ("dv", dv, "v", v),
    ):
        if tensor.shape != like.shape:
            raise ValueError(f"{name} must have the shape of {like_name}, {_shape(like)}, got {_shape(tensor)}")
        _check_same(name, tensor, like_name, like)
    for name, tensor in (("dq", dq), ("dk", dk), ("dv", dv)):
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride())):
            raise ValueError(f"{name} must have one memory location per element, got strides {tensor.stride()}")
    expected = (q.shape[0], q.shape[2], q.shape[1])
    if tuple(softmax_lse.shape) != expected:
        raise ValueError(
            f"softmax_lse must have shape (batch, heads, seqlen_q) = {expected}, got {_shape(softmax_lse)}"
        )
    if softmax_lse.dtype != torch.float32:
        raise TypeError(f"softmax_lse must be torch.float32, got {softmax_lse.dtype}")
    if softmax_lse.device != q.device:
        raise ValueError(f"softmax_lse must be on the device of q, {q.device}, got {softmax_lse.device}")
    check_schedule(schedule, causal)
    check_sm_margin(sm_margin, q.device)


def _check_tensor(name, tensor, expected, rank):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {_describe(tensor)}")
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "a nested tensor" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name} must be a dense tensor (torch.strided), got {layout}")
    if tensor.dim() != rank:
        raise ValueError(f"{name} must have shape {expected}, got {tensor.dim()} dimensions: {_shape(tensor)}")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be torch.bfloat16 or torch.float16, got {tensor.dtype}")
    if tensor.device.type not in ("cuda", "cpu"):
        raise ValueError(f"{name} must be on a CUDA or CPU device, got {tensor.device}")
    if tensor.shape[1] > MAX_SEQLEN:
        raise ValueError(f"{name} must have a seqlen of at most {MAX_SEQLEN}, got {tensor.shape[1]}")


def _check_same(name, tensor, like_name, like):
    if tensor.dtype != like.dtype:
        raise TypeError(f"{name} must have the dtype of {like_name}, {like.dtype}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on the device of {like_name}, {like.device}, got {tensor.device}")


def _check_head_dim(name, tensor):
    if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"{name} must have a head_dim from 1 to {MAX_HEAD_DIM}, got {tensor.shape[-1]}")


def _check_kv_shape(name, shape, q):
    batch, kv_heads, head_dim = shape[0], shape[-2], shape[-1]
    if batch != q.shape[0]:
        raise ValueError(f"{name} must have the batch size of q, {q.shape[0]}, got {batch}")
    if head_dim != q.shape[3]:
        raise ValueError(f"{name} must have the head_dim of q, {q.shape[3]}, got {head_dim}")
    if q.shape[2] < 1 or kv_heads < 1 or q.shape[2] % kv_heads:
        raise ValueError(f"{name} must have a number of heads that divides the {q.shape[2]} heads of q, got {kv_heads}")


def _is_value(value, supported):
    if supported is None:
        return value is None
    if isinstance(supported, tuple):
        return isinstance(value, (tuple, list)) and tuple(value) == supported
    return isinstance(value, (int, float)) and value == supported


def _shape(tensor):
    return tuple(tensor.shape)


def _describe(value):
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {_shape(value)}"
    if isinstance(value, (int, float, str, tuple, list)):
        return repr(value)
    return f"{value!r} ({type(value).__name__})"

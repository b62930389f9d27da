"""A linear layer beside whose products the bits of dropout are made: `linear_with_dropout_bits`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import checks, transforms
from . import layout
from .bits import DropoutBits, DropoutState, checked_request

_DTYPES = (torch.bfloat16, torch.float16)
# Of columns, in elements: TMA steps by 16 bytes.
_MULTIPLE = 8
_VECTOR_BYTES = 16


def linear_with_dropout_bits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: DropoutState,
    p: float,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    mapping: str = layout.DEFAULT_MAPPING,
    rounds: int = layout.DEFAULT_ROUNDS,
    first_head: int = 0,
    total_heads: int | None = None,
    first_query: int = 0,
    first_key: int = 0,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int | None = 0,
    keep_bits: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, DropoutBits]:
    """y = x weight^T + bias, as `torch.nn.functional.linear`, and `dropout_bits` for an attention that comes later.

        qkv, bits = linear_with_dropout_bits(x, weight, state=DropoutState.draw(x.device), p=0.1, batch=2, heads=16,
                                             seqlen_q=4096, seqlen_k=4096, causal=True)
        ...
        out = flash_attn_func(q, k, v, dropout_p=0.1, dropout_bits=bits, causal=True)

    On a GPU one kernel of ours does both, the bits by warps that a GEMM leaves idle. Products are summed in fp32, bias
    included, in an order that the depth of the sum fixes, and rounded once: y does not depend on the bits, the SMs or
    the other rows. On the CPU y is torch's, and the bits are made after it. Differentiable by x, weight and bias, as
    often as asked for; the gradients are torch's own products. Under torch.autocast the three are cast as those of
    `torch.nn.functional.linear`.

    Args:
        x: (..., depth), bfloat16 or float16, of any strides; the depth is a multiple of 8 and not 0. At most 2^30 rows.
        weight: (columns, depth), dtype and device of x; the columns are a multiple of 8 and not 0.
        bias: (columns,), dtype and device of x, or None.
        state, p, batch, heads, seqlen_q, seqlen_k, mapping, rounds, first_head, total_heads, first_query, first_key:
            as in `dropout_bits`; the state is on the device of x. They need not have anything to do with x.
        causal, window_size, attention_chunk: likewise.
        keep_bits: as in `dropout_bits`, but by default False: attention's backward makes the bits again, and memory
            does not grow with the layers. So another mapping, rounds or shard takes True.
        sm_margin: on a GPU, the number of SMs to leave to other kernels. Changes neither y nor bits.

    Returns:
        y, (..., columns) like x, and the bits, which have no gradient.

    Raises:
        NotImplementedError: the state is neither on the CPU nor on a CUDA device, or a transform of torch.func other
            than vmap is active.
        TypeError, ValueError: an argument is of a wrong type, shape or device or out of its range.
    """
    request = checked_request(
        state, p=p, batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mapping=mapping, rounds=rounds,
        first_head=first_head, total_heads=total_heads, first_query=first_query, first_key=first_key, causal=causal,
        window_size=window_size, attention_chunk=attention_chunk, keep_bits=keep_bits, sm_margin=sm_margin,
    )  # fmt: skip
    named = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    checks.check_tensors(named)
    transforms.reject("linear_with_dropout_bits", named.values(), but_vmap=True)
    for name, tensor in {**named, "state": state.rng_state}.items():
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        of_autocast = (torch.float32, torch.bfloat16, torch.float16)
        named = {name: tensor.to(dtype) if tensor.dtype in of_autocast else tensor for name, tensor in named.items()}
        x, weight, bias = named["x"], named["weight"], named.get("bias")
    _check_operands(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    y, bits = _linear(rows, weight, bias, request.state.rng_state, **request.sizes)
    return y.view(*x.shape[:-1], weight.shape[0]), request.result(bits)


def _check_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dtype not in _DTYPES:
        raise TypeError(f"x must be torch.bfloat16 or torch.float16, got {x.dtype}")
    for name, tensor in {"weight": weight, "bias": bias}.items():
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(f"{name} must be {x.dtype} as x is, got {tensor.dtype}")
    if x.dim() < 1 or x.shape[-1] == 0 or x.shape[-1] % _MULTIPLE:
        raise ValueError(f"x must be (..., depth), the depth a multiple of {_MULTIPLE} above 0, got {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] == 0 or weight.shape[0] % _MULTIPLE:
        raise ValueError(
            f"weight must be (columns, {x.shape[-1]}), the columns a multiple of {_MULTIPLE} above 0, got "
            f"{tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be ({weight.shape[0]},), got {tuple(bias.shape)}")


_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor rng_state, float p, SymInt batch, SymInt heads, SymInt seqlen_q, "
    "SymInt seqlen_k, SymInt first_head, SymInt total_heads, SymInt first_query, SymInt first_key, str mapping, "
    "int rounds, bool causal, SymInt window_left, SymInt window_right, SymInt attention_chunk, SymInt sm_margin) "
    "-> (Tensor y, Tensor bits)"
)


@torch.library.custom_op("dash_attn::linear_with_dropout_bits", mutates_args=(), schema=_SCHEMA)
def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rng_state: Tensor,
    p: float,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    first_head: int,
    total_heads: int,
    first_query: int,
    first_key: int,
    mapping: str,
    rounds: int,
    causal: bool,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    sm_margin: int,
) -> tuple[Tensor, Tensor]:
    """y and the bits of checked arguments, x of two dimensions."""
    if not x.is_cuda or x.shape[0] == 0:
        bits = layout.generate(
            rng_state, p=p, batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, first_head=first_head,
            total_heads=total_heads, first_query=first_query, first_key=first_key, mapping=mapping, rounds=rounds,
            causal=causal, window_left=window_left, window_right=window_right, attention_chunk=attention_chunk,
            sm_margin=sm_margin,
        )  # fmt: skip
        return functional.linear(x, weight, bias), bits
    shape = layout.shape_of(batch, heads, seqlen_q, seqlen_k)
    y = x.new_empty(x.shape[0], weight.shape[0])
    bits = x.new_empty(shape, dtype=torch.uint8)
    if bias is not None and (not bias.is_contiguous() or bias.data_ptr() % _VECTOR_BYTES):
        bias = bias.clone(memory_format=torch.contiguous_format)
    torch.ops.dash_attn_C.linear_with_dropout_bits(
        y, bits, _addressable(x), _addressable(weight), bias, rng_state.contiguous(), p, seqlen_q, seqlen_k,
        first_head, total_heads, first_query, first_key, mapping == "flash_attention_2", rounds, causal, window_left,
        window_right, attention_chunk, sm_margin,
    )  # fmt: skip
    return y, bits


@_linear.register_fake
def _(
    x, weight, bias, rng_state, p, batch, heads, seqlen_q, seqlen_k, first_head, total_heads, first_query, first_key,
    mapping, rounds, causal, window_left, window_right, attention_chunk, sm_margin,
):  # fmt: skip
    shape = layout.shape_of(batch, heads, seqlen_q, seqlen_k)
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(shape, dtype=torch.uint8)


def _save_for_backward(ctx: Any, inputs: tuple, output: object) -> None:
    x, weight, *_ = inputs
    of_x, of_weight, *_ = ctx.needs_input_grad
    ctx.set_materialize_grads(False)  # the bits' would be zeros, as many bytes
    ctx.save_for_backward(x if of_weight else None, weight if of_x else None)


def _backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * len(ctx.needs_input_grad)
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias, *others = ctx.needs_input_grad
    dx = dy @ weight if of_x else None
    dweight = dy.mT @ x if of_weight else None
    dbias = dy.sum(0) if of_bias else None
    return dx, dweight, dbias, *(None for _ in others)


_linear.register_autograd(_backward, setup_context=_save_for_backward)


def _addressable(matrix: Tensor) -> Tensor:
    """The matrix, or a copy that TMA can address."""
    rows, columns = matrix.shape
    stride, of_columns = matrix.stride()
    adjacent = of_columns == 1 and (rows == 1 or (stride >= columns and stride % _MULTIPLE == 0))
    if adjacent and matrix.data_ptr() % _VECTOR_BYTES == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)

"""The backward of a chunk of keys by a chunk of queries, whose sums other chunks have begun or go on with.

On a GPU one launch of the kernels that carry sums (csrc/backward/carried_sums.h); on the CPU the reference. Chunks that
are taken in an order of one process leave the bits of one process.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _schedule, reference
from .. import schedule as _policies
from ..tile_order import tile_order


class Operands(NamedTuple):
    """Queries of some heads by keys of their KV head."""

    dout: Tensor
    """(batch, rows of queries, heads, value_head_dim)"""
    q: Tensor
    """(batch, rows of queries, heads, head_dim)"""
    k: Tensor
    """(batch, rows of keys, 1, head_dim)"""
    v: Tensor
    """(batch, rows of keys, 1, value_head_dim)"""
    out: Tensor
    """like dout"""
    softmax_lse: Tensor
    """fp32 (batch, heads, rows of queries), over all keys"""
    dsoftmax_lse: Tensor | None
    """like softmax_lse"""


@dataclasses.dataclass(frozen=True)
class Rule:
    """What all parts of a backward have in common."""

    policy: str
    softmax_scale: float
    """Positive."""
    sm_margin: int


class Sums(NamedTuple):
    """Sums in fp32 that go from part to part, each one contiguous tensor of one dimension.

    What is in which place is the affair of the kernels or of the reference; how large they are, that of `sums_sizes`.
    """

    dq: Tensor
    keys: Tensor
    """dK and dV."""


def sums_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Elements of the two tensors of `Sums`, of operands of these shapes."""
    batch, rows_q, heads, head_dim = q.shape
    rows_k, value_head_dim = k.shape[1], v.shape[-1]
    if not q.is_cuda:
        return q.numel(), batch * rows_k * (head_dim + value_head_dim)
    of_qk, of_v = _schedule.padded_head_dims(head_dim, value_head_dim)
    tile_q, tile_k = _policies.tile_shape(head_dim, value_head_dim)
    padded_q, padded_k = (-(-rows // tile) * tile for rows, tile in ((rows_q, tile_q), (rows_k, tile_k)))
    return batch * heads * padded_q * of_qk, batch * padded_k * (of_qk + of_v)


def add(
    rule: Rule,
    operands: Operands,
    sums: Sums,
    *,
    causal: bool,
    dq_continues: bool,
    keys_continue: bool,
    total: Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
) -> None:
    """Adds one part to `sums`.

    Args:
        causal: whether query i of the part sees the keys up to i of it; all keys otherwise.
        dq_continues, keys_continue: whether there is anything in the sums; if not, they may hold anything.
        total: keys' sums of the splits before, which are added at the end of a split.
        dq: like q, written where this part is the last for its queries.
        dk, dv: like k and v, written where this part is the last of the last split of its keys.
    """
    dout, q, k, v, out, softmax_lse, dsoftmax_lse = operands
    if q.is_cuda:
        torch.ops.dash_attn_C.backward_of_chunks(
            dout, q, k, v, out, softmax_lse.contiguous(), *sums, total, dq, dk, dv,
            None if dsoftmax_lse is None else dsoftmax_lse.contiguous(), dq_continues, keys_continue,
            rule.softmax_scale, causal, _policies.policy_number(rule.policy), rule.sm_margin,
        )  # fmt: skip
        return
    for tensor, continues in zip(sums, (dq_continues, keys_continue)):
        if not continues:
            tensor.zero_()
    (batch, rows_q, heads, head_dim), rows_k = q.shape, k.shape[1]
    of_dk, of_dv = sums.keys.split((batch * rows_k * head_dim, batch * rows_k * v.shape[-1]))
    views = reference.GradientSums(
        sums.dq.view(batch, heads, rows_q, head_dim),
        of_dk.view(batch, rows_k, head_dim),
        of_dv.view(batch, rows_k, v.shape[-1]),
    )
    order = tile_order(rule.policy, rows_q, rows_k, head_dim=head_dim, value_head_dim=v.shape[-1], causal=causal)
    reference.backward(
        *operands[:-1],
        dsoftmax_lse=dsoftmax_lse,
        softmax_scale=rule.softmax_scale,
        causal=causal,
        order=order,  # of a group of one, and so of one split
        sums=views,
    )
    if dq is not None:
        dq.copy_((views.dq * rule.softmax_scale).transpose(1, 2))
    if total is not None:
        sums.keys.add_(total)
    if dk is not None and dv is not None:
        # The reference's sums over splits start at 0, and so have no -0.
        dk.copy_(((views.dk + 0.0) * rule.softmax_scale)[:, :, None])
        dv.copy_((views.dv + 0.0)[:, :, None])

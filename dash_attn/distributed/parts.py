"""The backward of one chunk of keys by one chunk of queries, with sums that other chunks began or will continue.

A GPU runs one launch of a kernel that carries sums (csrc/backward/carried_sums.h), and a CPU runs the reference.
Chunks that run in the order of one process produce the bits of one process.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _schedule, reference
from .. import schedule as _policies
from ..reference import Chunk
from ..tile_order import TileOrder, order_of_chunk, tile_order


class Operands(NamedTuple):
    """Queries of some heads, and keys of their KV head."""

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


class MaskOfWhole(NamedTuple):
    """Which keys a query sees, in the terms of `flash_attn_func` for the whole sequence."""

    causal: bool
    window: tuple[int, int]
    """A negative side is unbounded."""
    attention_chunk: int


@dataclasses.dataclass(frozen=True)
class Rule:
    """What all parts of a backward have in common."""

    policy: str
    softmax_scale: float
    """Positive."""
    mask: MaskOfWhole
    sm_margin: int


class Sums(NamedTuple):
    """Sums in fp32 that go from part to part, each a contiguous tensor of one dimension.

    The kernels or the reference define the layout of the sums, and `sums_sizes` gives their sizes.
    """

    dq: Tensor
    keys: Tensor
    """dK and dV."""


def sums_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Returns the number of elements of the two tensors of `Sums`, for operands of these shapes."""
    batch, rows_q, heads, head_dim = q.shape
    rows_k, value_head_dim = k.shape[1], v.shape[-1]
    if not q.is_cuda:
        return q.numel(), batch * rows_k * (head_dim + value_head_dim)
    of_qk, of_v = _schedule.padded_head_dims(head_dim, value_head_dim)
    tile_q, tile_k = _tile_shape(q, v)
    padded_q, padded_k = (-(-rows // tile) * tile for rows, tile in ((rows_q, tile_q), (rows_k, tile_k)))
    return batch * heads * padded_q * of_qk, batch * padded_k * (of_qk + of_v)


def add(
    rule: Rule, operands: Operands, sums: Sums, chunk: Chunk,
    *, dq_continues: bool, keys_continue: bool,
    total: Tensor | None = None,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
) -> None:  # fmt: skip
    """Adds one part to `sums`.

    Args:
        chunk: the position of the queries and keys in the sequence. A chunk begins with a tile, and ends with a tile or
            with the sequence.
        dq_continues, keys_continue: whether the sums hold values; if not, their content is ignored.
        total: the keys' sums of earlier splits, which are added at the end of a split.
        dq: like q; written if this part is the last for its queries.
        dk, dv: like k and v; written if this part is the last of the last split of its keys.
    """
    dout, q, k, v, out, softmax_lse, dsoftmax_lse = operands
    if q.is_cuda:
        mask = (rule.mask.causal, *rule.mask.window, rule.mask.attention_chunk)
        own_key = chunk.first_query + chunk.seqlen_k - chunk.seqlen_q - chunk.first_key
        with_dq = range(0)
        if dq_continues:
            with_dq = _tiles_with_dq(rule, chunk, q.shape[1], k.shape[1], _tile_shape(q, v))
        try:
            torch.ops.dash_attn_C.backward_of_chunks(
                dout, q, k, v, out, softmax_lse.contiguous(), *sums, total, dq, dk, dv,
                None if dsoftmax_lse is None else dsoftmax_lse.contiguous(),
                with_dq.start, len(with_dq), keys_continue, rule.softmax_scale, *mask, own_key, chunk.first_key,
                _policies.policy_number(rule.policy), rule.sm_margin,
            )  # fmt: skip
        except MemoryError as error:
            raise torch.OutOfMemoryError(str(error)) from None
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
    reference.backward(
        *operands[:-1],
        dsoftmax_lse=dsoftmax_lse,
        softmax_scale=rule.softmax_scale,
        **rule.mask._asdict(),
        order=_order(rule, chunk, rows_q, rows_k, head_dim, v.shape[-1]),
        sums=views,
        chunk=chunk,
    )
    if dq is not None:
        dq.copy_((views.dq * rule.softmax_scale).transpose(1, 2))
    if total is not None:
        sums.keys.add_(total)
    if dk is not None and dv is not None:
        # The reference's sums over splits start at 0, so they contain no -0.
        dk.copy_(((views.dk + 0.0) * rule.softmax_scale)[:, :, None])
        dv.copy_((views.dv + 0.0)[:, :, None])


@functools.lru_cache(maxsize=4096)
def _tiles_with_dq(rule: Rule, chunk: Chunk, rows_q: int, rows_k: int, tile: tuple[int, int]) -> range:
    """Returns the chunk's query tiles whose dQ has earlier keys in its order. These tiles form one range."""
    whole = _policies.problem(
        rule.policy, chunk.seqlen_q, chunk.seqlen_k, **rule.mask._asdict(), tile_q=tile[0], tile_k=tile[1], cta_group=1
    )
    first, end = chunk.first_key // tile[1], -(-(chunk.first_key + rows_k) // tile[1])
    first_tile = chunk.first_query // tile[0]
    with_dq = []
    for number in range(-(-rows_q // tile[0])):
        start, count = whole.kv_tiles_of(first_tile + number)
        if count and (start + count > end if _adds_last_keys_first(rule.policy) else start < first):
            with_dq.append(number)
    return range(with_dq[0], with_dq[-1] + 1) if with_dq else range(0)


@functools.cache
def _adds_last_keys_first(policy: str) -> bool:
    two = _policies.problem(policy, 1, 2, causal=False, tile_q=1, tile_k=1, cta_group=1)
    return _policies.add_order(policy, two) == [[1, 0]]


@functools.lru_cache(maxsize=256)
def _order(rule: Rule, chunk: Chunk, rows_q: int, rows_k: int, head_dim: int, value_head_dim: int) -> TileOrder:
    """Returns the reference's order of a chunk, for heads that have one split at most."""
    whole = tile_order(
        rule.policy, chunk.seqlen_q, chunk.seqlen_k, head_dim=head_dim, value_head_dim=value_head_dim,
        **rule.mask._asdict(),
    )  # fmt: skip
    first_q, first_k = chunk.first_query // whole.tile_q, chunk.first_key // whole.tile_k
    return order_of_chunk(
        whole,
        range(first_q, first_q - (-rows_q // whole.tile_q)),
        range(first_k, first_k - (-rows_k // whole.tile_k)),
    )


def _tile_shape(q: Tensor, v: Tensor) -> tuple[int, int]:
    return _policies.tile_shape(q.shape[-1], v.shape[-1])

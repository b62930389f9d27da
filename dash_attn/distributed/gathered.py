"""Attention over ranks that have the same heads: keys and values are gathered, queries stay where they are.

So every row of the output, of the log-sum-exp and of dQ is made on one rank, as one process makes it. dK and dV are
sums over the queries of all ranks, and are carried from rank to rank in the order of one process: `plan` says when,
`carry` does it.

Ranks have chunks of whole tiles, with about as much work each. Where the caller's are others, and in a pack, whose
sequences end anywhere, rows go first to the rank that is to have them (`assignment`), and results go back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .. import checks, interface
from .. import schedule as _policies
from . import parts
from .agreement import agreed_gradients
from .assignment import ENOUGH, LAYOUT, Assignment, Pair, assign, cut_for_all, work_of, work_of_cut
from .carry import Carrier, Chunks
from .channel import Channel
from .derivative import first_order
from .layout import Rows, chunks, chunks_of_rank, num_chunks, places_of
from .movement import Move, exchange
from .plan import Plan, chunks_of_tiles, make_plan
from .redistribute import MoveResultsBack, MoveRows, Route
from .ulysses import Split

_COLUMNS = 8  # the op pads head dims to a multiple of them
_make_plan = functools.lru_cache(maxsize=64)(make_plan)


class Options(NamedTuple):
    softmax_scale: float
    mask: parts.MaskOfWhole
    schedule: _policies.Schedule
    sm_margin: int


@dataclass(frozen=True)
class Cut:
    """A sequence that is cut for all ranks."""

    channel: Channel
    name: str
    """Of the function, for messages."""
    layout: str
    rows_q: int
    rows_k: int
    tiles: tuple[int, int]
    """Queries and keys in a tile of the backward."""
    check_values: bool
    gradients_agreed: bool
    """Whether the ranks have agreed on the gradients of the results before they come here."""

    def chunks(self, *, of_keys: bool) -> tuple[Rows, ...]:
        rows = self.rows_k if of_keys else self.rows_q
        return chunks_of_tiles(rows, num_chunks(self.channel.size, self.layout), self.tiles[of_keys])

    def runs(self, rank: int, *, of_keys: bool) -> list[Rows]:
        """A rank's rows, in the sequence."""
        of_all = self.chunks(of_keys=of_keys)
        return [of_all[number] for number in chunks_of_rank(rank, self.channel.size, self.layout)]

    def runs_here(self, *, of_keys: bool) -> list[Rows]:
        """This rank's runs as it has them."""
        return places_of(self.runs(self.channel.rank, of_keys=of_keys))


def attention(
    split: Split, options: Options, sequences: tuple[Pair, ...] | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, (batch, heads, rows), of this rank's rows.

    Args:
        split: whose heads are not divided.
        options: of `checked_options`.
        sequences: those of a pack, which is a batch of 1; None of a dense batch.
        q, k, v: (batch, this rank's rows, heads, columns).
    """
    value_dim = v.shape[-1]
    # As one process pads them: a product over other columns may have other bits.
    q, k, v = (functional.pad(x, (0, -x.shape[-1] % _COLUMNS)) if x.shape[-1] % _COLUMNS else x for x in (q, k, v))
    tiles, ranks = _policies.tile_shape(q.shape[-1], v.shape[-1]), split.channel.size
    if sequences is None and _is_cut_at_tiles(split, tiles) and _is_even(split, options.mask, tiles):
        cut = _cut(
            split, split.rows_q, split.rows_k, tiles, layout=split.layout, gradients_agreed=split.gradients_agreed
        )
        out, lse = _Attention.apply(cut, options, q, k, v)
    elif sequences is None:
        whole = Pair(Rows(0, split.rows_q), Rows(0, split.rows_k))
        out, lse = _attention_elsewhere(split, options, cut_for_all(whole, ranks, tiles), tiles, q, k, v)
    else:
        assignment = assign(sequences, ranks, options.mask, tiles)
        out, lse = _attention_elsewhere(split, options, assignment, tiles, q, k, v)
    return out[..., :value_dim], lse


def checked_options(
    split: Split,
    of_rows: dict[str, Tensor],
    arguments: dict[str, Any],
    of_heads: dict[str, Tensor | None],
    where: str,
) -> Options:
    """The options of `attention`.

    Args:
        split: as in `attention`.
        of_rows: q, k and v, of which only the columns are looked at.
        arguments, of_heads: of `context_parallel_attention`, as `flash_attn_func` takes them.
        where: when a call comes here, for messages.

    Raises:
        NotImplementedError, ValueError: what this form does not have; the message names the argument.
    """
    q, k, v = of_rows.values()
    causal, schedule, scale = arguments["causal"], arguments["schedule"], arguments["softmax_scale"]
    left, right = arguments["window_size"]
    if left < 0 and (right == 0 or causal):
        causal, right = True, -1
    mask = parts.MaskOfWhole(causal, (left, right), arguments["attention_chunk"])
    left_out = {"softcap": not arguments["softcap"], **{name: x is None for name, x in of_heads.items()}}
    for name, is_left_out in left_out.items():
        if not is_left_out:
            value = arguments.get(name, of_heads.get(name))
            given = checks.describe(value) if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name} must be left out {where}, got {given}")
    if schedule == "order_free":
        raise NotImplementedError(f"schedule must be a policy that adds in an order {where}, got 'order_free'")
    if mask.attention_chunk and not causal and right != 0:
        raise NotImplementedError(
            f"attention_chunk must be left out {where}, unless causal is True, got {mask.attention_chunk}"
        )
    # As a plan would, but on no lengths.
    shape = {"head_dim": q.shape[-1], "value_head_dim": v.shape[-1], **mask._asdict()}
    _make_plan(1, 1, 1, schedule=schedule, **shape)
    return Options(q.shape[-1] ** -0.5 if scale is None else scale, mask, schedule, arguments["sm_margin"])


def _is_cut_at_tiles(split: Split, tiles: tuple[int, int]) -> bool:
    """Whether the ranks' rows are those that they have to have."""
    count = num_chunks(split.channel.size, split.layout)
    lengths = split.rows_q, split.rows_k
    return all(chunks(rows, count) == chunks_of_tiles(rows, count, tile) for rows, tile in zip(lengths, tiles))


def _is_even(split: Split, mask: parts.MaskOfWhole, tiles: tuple[int, int]) -> bool:
    """Whether no rank has much more to do with the rows that it has than the busiest would have with zigzag chunks."""
    lengths, ranks = (split.rows_q, split.rows_k), split.channel.size
    if 0 in lengths:
        return True
    own = [sum(work_of(mask, *lengths, run) for run in split.runs(rank, of_keys=False)) for rank in range(ranks)]
    return max(own) <= ENOUGH * max(work_of_cut(mask, Pair(*(Rows(0, rows) for rows in lengths)), ranks, tiles))


def _cut(split: Split, rows_q: int, rows_k: int, tiles: tuple[int, int], *, layout: str, gradients_agreed: bool) -> Cut:
    return Cut(split.channel, split.name, layout, rows_q, rows_k, tiles, split.check_values, gradients_agreed)


def _attention_elsewhere(
    split: Split,
    options: Options,
    assignment: Assignment,
    tiles: tuple[int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor]:
    """`attention` of the rows that an assignment gives each rank."""
    channel, name = split.channel, split.name
    of_ranks = range(channel.size)
    here_q, here_k = (tuple(tuple(split.runs(rank, of_keys=side)) for rank in of_ranks) for side in (False, True))
    to_q, to_k = Route(split.rows_q, here_q, assignment.queries), Route(split.rows_k, here_k, assignment.keys)
    q, k, v = MoveRows.apply(channel, name, (to_q, to_k, to_k), q, k, v)
    own = assignment.of_ranks[channel.rank]
    cuts = [
        _cut(split, len(pair.queries), len(pair.keys), tiles, layout=LAYOUT, gradients_agreed=True)
        for pair in assignment.cut
    ]
    lengths = [
        [sum(len(pair[side]) for pair in own), *(sum(map(len, cut.runs_here(of_keys=bool(side)))) for cut in cuts)]
        for side in (0, 1)
    ]
    # What is split here is put together again in the backward, and nothing is added.
    pieces = zip(q.split(lengths[0], 1), k.split(lengths[1], 1), v.split(lengths[1], 1))
    results = [_own_pack(own, options, *next(pieces))]
    for cut, tensors in zip(cuts, pieces):
        out, lse = _Attention.apply(cut, options, *tensors)
        results.append((out, lse.transpose(1, 2)))
    out, lse = (torch.cat(x, dim=1) for x in zip(*results))
    out, lse = MoveResultsBack.apply(
        channel, name, to_q.back(), split.check_values, split.gradients_agreed, out, lse.contiguous()
    )
    return out, lse.transpose(1, 2).contiguous()


def _own_pack(pairs: Sequence[Pair], options: Options, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, rows before heads, of sequences that this rank has alone."""
    if not pairs:
        return q[..., :1].expand(*q.shape[:-1], v.shape[-1]), q[..., 0].float()  # no rows
    lengths = [[len(pair[side]) for pair in pairs] for side in (0, 1)]
    offsets = [torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(q.device) for x in lengths]
    out, lse, _ = interface.flash_attn_varlen_func(
        q[0], k[0], v[0], offsets[0], offsets[1], max(lengths[0]), max(lengths[1]),
        softmax_scale=options.softmax_scale, causal=options.mask.causal, window_size=options.mask.window,
        attention_chunk=options.mask.attention_chunk, return_attn_probs=True, schedule=options.schedule,
        sm_margin=options.sm_margin,
    )  # fmt: skip
    return out[None], lse.transpose(0, 1)[None]


def _plan(cut: Cut, options: Options, q: Tensor, k: Tensor, v: Tensor) -> Plan:
    return _make_plan(
        cut.rows_q,
        cut.rows_k,
        cut.channel.size,
        layout=cut.layout,
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=k.shape[-1],
        value_head_dim=v.shape[-1],
        **options.mask._asdict(),
        schedule=options.schedule,
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cut, options, q, k, v):
        ctx.set_materialize_grads(False)
        ctx.cut, ctx.options = cut, options
        keys, values = _gather(cut, cut.name, [k, v])
        runs, places = cut.runs(cut.channel.rank, of_keys=False), cut.runs_here(of_keys=False)
        pieces = []
        for run, place in zip(runs, places):
            end, mask = _keys_of_run(options.mask, run, cut.rows_q, cut.rows_k)
            pieces.append(
                interface.flash_attn_func(
                    q[:, slice(*place)], keys[:, :end], values[:, :end], softmax_scale=options.softmax_scale,
                    causal=mask.causal, window_size=mask.window, attention_chunk=mask.attention_chunk,
                    return_attn_probs=True, sm_margin=options.sm_margin,
                )[:2]
            )  # fmt: skip
        out, lse = torch.cat([x for x, _ in pieces], dim=1), torch.cat([x for _, x in pieces], dim=2)
        # Not the keys of the other ranks: the backward gathers them again, and memory stays that of a rank's rows.
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, saved, dout, dlse):
        cut, options = ctx.cut, ctx.options
        q, k, v, out, lse = saved
        what = f"the backward of {cut.name}"
        like = [(x.shape, x.dtype, x.device) for x in (out, lse)]
        if not cut.gradients_agreed:
            dout, dlse = agreed_gradients(cut.channel, what, dout, dlse, like, cut.check_values)
        if dout is None and dlse is None:
            return (None,) * 5
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        if cut.rows_q and cut.rows_k and q.shape[0]:
            keys, values = _gather(cut, what, [k, v])
            plan = _plan(cut, options, q, k, v)
            numbers = chunks_of_rank(cut.channel.rank, cut.channel.size, cut.layout)
            of_q, of_k = (dict(zip(numbers, cut.runs_here(of_keys=side))) for side in (False, True))
            q, scale, sign = _with_positive_scale(q, options.softmax_scale)
            rule = parts.Rule(plan.policy, scale, options.mask, options.sm_margin)
            operands = parts.Operands(dout, q, keys, values, out, lse, dlse)
            chunks_here = Chunks(of_q, of_k, cut.chunks(of_keys=False), cut.chunks(of_keys=True))
            Carrier(cut.channel, what, plan, rule, operands, chunks_here).run(dq, dk, dv)
            if sign != 1:
                dq.mul_(sign)
        return None, None, dq, dk, dv


def _keys_of_run(mask: parts.MaskOfWhole, run: Rows, rows_q: int, rows_k: int) -> tuple[int, parts.MaskOfWhole]:
    """Where the keys end that some queries may see, and the mask of the queries on the keys up to there: their last
    query is aligned with the last key."""
    left, right = mask.window[0], 0 if mask.causal else mask.window[1]
    if left < 0 and right < 0:
        return rows_k, mask
    own_end = run.stop + rows_k - rows_q
    end = rows_k if right < 0 else min(max(0, own_end + right), rows_k)
    if mask.causal and left < 0:
        return end, mask
    # The window moves with the keys that come behind the last query's own. What is unbounded stays a window's: a call
    # takes its kernel for what it asks for.
    shift = end - own_end
    left = rows_k if left < 0 else left
    return end, mask._replace(window=(left + shift, right if right < 0 else max(0, right - shift)))


def _with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """q' and c' > 0 with c' q' = c q, and the sign of dq: PositiveScale of csrc/bindings/operators.h."""
    if abs(scale) < torch.finfo(torch.float32).tiny:
        return torch.zeros_like(q), 1.0, 0.0
    return (-q, -scale, -1.0) if scale < 0 else (q, scale, 1.0)


def _gather(cut: Cut, what: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """(batch, rows of this rank, ...) to (batch, all rows of k, ...)."""
    ranks = range(cut.channel.size)
    runs = [cut.runs(rank, of_keys=True) for rank in ranks]
    wholes, moves = [], []
    for x in tensors:
        wholes.append(x.new_empty(x.shape[0], cut.rows_k, *x.shape[2:]))
        for number, place in enumerate(cut.runs_here(of_keys=True)):
            received = [wholes[-1][:, slice(*runs[rank][number])] for rank in ranks]
            moves.append(Move([x[:, slice(*place)]] * len(ranks), received))
    exchange(cut.channel, what, moves)
    return wholes

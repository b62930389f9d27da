"""Attention over ranks with the same heads: keys and values are gathered, and queries stay where they are.

Each row of the output, of the log-sum-exp and of dQ is therefore computed on one rank, as one process computes it. dK
and dV are sums over the queries of all ranks. They are carried from rank to rank in the order of one process, which
`plan` determines and `carry` executes.

Every rank works on chunks of whole tiles with about the same work. If the caller's chunks differ from these, and for a
variable-length batch, whose sequences end anywhere, rows first move to the ranks that need them (`assignment`), and
results move back.
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

_COLUMNS = 8  # the op pads head dims to a multiple of this
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
    """The name of the function, for messages."""
    layout: str
    rows_q: int
    rows_k: int
    tiles: tuple[int, int]
    """Queries and keys per tile of the backward."""
    check_values: bool
    gradients_agreed: bool
    """Whether the ranks have already agreed on the gradients of the results."""

    def chunks(self, *, of_keys: bool) -> tuple[Rows, ...]:
        rows = self.rows_k if of_keys else self.rows_q
        return chunks_of_tiles(rows, num_chunks(self.channel.size, self.layout), self.tiles[of_keys])

    def runs(self, rank: int, *, of_keys: bool) -> list[Rows]:
        """Returns a rank's rows, in the sequence."""
        of_all = self.chunks(of_keys=of_keys)
        return [of_all[number] for number in chunks_of_rank(rank, self.channel.size, self.layout)]

    def runs_here(self, *, of_keys: bool) -> list[Rows]:
        """Returns this rank's runs, in the rank's own rows."""
        return places_of(self.runs(self.channel.rank, of_keys=of_keys))


def attention(
    split: Split, options: Options, sequences: tuple[Pair, ...] | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the output and the log-sum-exp of this rank's rows, (batch, heads, rows, ...).

    Args:
        split: the division of the call, with undivided heads.
        options: the result of `checked_options`.
        sequences: the sequences of a variable-length batch, which has batch 1; None for a dense batch.
        q, k, v: (batch, this rank's rows, heads, columns).
    """
    value_dim = v.shape[-1]
    # Padded as in one process, because a product over a different number of columns may have different bits.
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
    """Checks the arguments of a call with gathered keys, and returns the options of `attention`.

    Args:
        split: as in `attention`.
        of_rows: q, k and v, of which only the numbers of columns matter.
        arguments, of_heads: the arguments of `context_parallel_attention`, as `flash_attn_func` takes them.
        where: the condition under which keys are gathered, for messages.

    Raises:
        NotImplementedError: gathered keys do not support an argument; the message names the argument.
        ValueError: the schedule is not supported.
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
        raise NotImplementedError(f"schedule must be a policy that adds in a fixed order {where}, got 'order_free'")
    if mask.attention_chunk and not causal and right != 0:
        raise NotImplementedError(
            f"attention_chunk must be left out {where}, unless causal is True, got {mask.attention_chunk}"
        )
    # Raises the errors of a plan, without lengths.
    shape = {"head_dim": q.shape[-1], "value_head_dim": v.shape[-1], **mask._asdict()}
    _make_plan(1, 1, 1, schedule=schedule, **shape)
    return Options(q.shape[-1] ** -0.5 if scale is None else scale, mask, schedule, arguments["sm_margin"])


def _is_cut_at_tiles(split: Split, tiles: tuple[int, int]) -> bool:
    """Whether the ranks' rows already are those of the plan."""
    count = num_chunks(split.channel.size, split.layout)
    lengths = split.rows_q, split.rows_k
    return all(chunks(rows, count) == chunks_of_tiles(rows, count, tile) for rows, tile in zip(lengths, tiles))


def _is_even(split: Split, mask: parts.MaskOfWhole, tiles: tuple[int, int]) -> bool:
    """Whether no rank has much more work with its own rows than the busiest rank would have with zigzag chunks."""
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
    """Computes `attention` on the rows that an assignment gives each rank."""
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
    # The backward concatenates the gradients of these splits, and adds nothing.
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
    """Returns the output and the log-sum-exp, with rows before heads, of the sequences that this rank has alone."""
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
        # Other ranks' keys are not saved: the backward gathers them again, so that memory stays that of a rank's rows.
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
    """Returns the end of the keys that a run of queries may see, and the mask of these queries on the keys up to there.

    The last query of the run is aligned with the last of these keys.
    """
    left, right = mask.window[0], 0 if mask.causal else mask.window[1]
    if left < 0 and right < 0:
        return rows_k, mask
    own_end = run.stop + rows_k - rows_q
    end = rows_k if right < 0 else min(max(0, own_end + right), rows_k)
    if mask.causal and left < 0:
        return end, mask
    # The window shifts by the keys that come after the last query's own. An unbounded side stays the side of a window,
    # because the kind of mask selects the kernel.
    shift = end - own_end
    left = rows_k if left < 0 else left
    return end, mask._replace(window=(left + shift, right if right < 0 else max(0, right - shift)))


def _with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """Returns q' and c' > 0 with c' q' = c q, and the sign of dq, like PositiveScale in csrc/bindings/operators.h."""
    if abs(scale) < torch.finfo(torch.float32).tiny:
        return torch.zeros_like(q), 1.0, 0.0
    return (-q, -scale, -1.0) if scale < 0 else (q, scale, 1.0)


def _gather(cut: Cut, what: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gathers tensors of shape (batch, rows of this rank, ...) into (batch, all rows of k, ...)."""
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

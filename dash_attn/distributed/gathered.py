"""Attention over ranks that have the same heads: keys and values are gathered, queries stay where they are.

So every row of the output, of the log-sum-exp and of dQ is made on one rank, as one process makes it. dK and dV are
sums over the queries of all ranks, and are carried from rank to rank in the order of one process: `plan` says when,
`carry` does it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .. import checks, interface
from .. import schedule as _policies
from ..reference import FORWARD_ROWS
from . import parts
from .agreement import agreed_gradients
from .carry import Carrier, Chunks
from .layout import Rows, chunks, chunks_of_rank, num_chunks
from .movement import Move, exchange
from .plan import Plan, make_plan
from .ulysses import Split

_COLUMNS = 8  # the op pads head dims to a multiple of them
_make_plan = functools.lru_cache(maxsize=16)(make_plan)


class Options(NamedTuple):
    softmax_scale: float
    causal: bool
    schedule: str
    sm_margin: int


def attention(split: Split, options: Options, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of this rank's rows.

    Args:
        split: whose heads are not divided.
        options: of `checked_options`.
        q, k, v: (batch, this rank's rows, heads, columns).
    """
    value_dim = v.shape[-1]
    # As one process pads them: a product over other columns may have other bits.
    q, k, v = (functional.pad(x, (0, -x.shape[-1] % _COLUMNS)) if x.shape[-1] % _COLUMNS else x for x in (q, k, v))
    out, lse = _Attention.apply(split, options, q, k, v)
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
        arguments, of_heads: of `context_parallel_attention`, checked as those of one process.
        where: when a call comes here, for messages.

    Raises:
        NotImplementedError, ValueError: what this form does not have; the message names the argument.
    """
    q, k, v = of_rows.values()
    causal, schedule = bool(arguments["causal"]), arguments["schedule"]
    scale = arguments["softmax_scale"]
    left, right = checks.as_window(arguments["window_size"])
    left_out = {
        "window_size": left < 0 and (right < 0 or causal),
        "softcap": not arguments["softcap"],
        "attention_chunk": not arguments["attention_chunk"],
        **{name: x is None for name, x in of_heads.items()},
    }
    for name, is_left_out in left_out.items():
        if not is_left_out:
            value = arguments.get(name, of_heads.get(name))
            given = checks.describe(value) if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name} must be left out {where}, got {given}")
    if schedule == "order_free":
        raise NotImplementedError(f"schedule must be a policy that adds in an order {where}, got 'order_free'")
    if causal and split.rows_q != split.rows_k:
        raise NotImplementedError(
            f"causal must be False {where} where q and k have different lengths, got {split.rows_q} and {split.rows_k}"
        )
    tiles = _policies.tile_shape(q.shape[-1], v.shape[-1])
    for name, rows, tile in zip("qk", (split.rows_q, split.rows_k), tiles):
        # Neither a tile of the backward is cut nor what the reference's forward takes at a time.
        unit = math.lcm(tile, FORWARD_ROWS)
        cut = [chunk for chunk in _chunks(split, rows) if len(chunk)]
        if any(chunk.stop % unit for chunk in cut[:-1]):
            raise ValueError(
                f"{name} must have rows that are cut into chunks of multiples of {unit} {where}, got {rows} in "
                f"{len(cut)} chunks of {len(cut[0])} and fewer"
            )
    options = Options(q.shape[-1] ** -0.5 if scale is None else float(scale), causal, schedule, arguments["sm_margin"])
    if split.rows_q and split.rows_k:
        _plan(split, options, q, k, v)
    return options


def _chunks(split: Split, rows: int) -> list[Rows]:
    return chunks(rows, num_chunks(split.channel.size, split.layout))


def _plan(split: Split, options: Options, q: Tensor, k: Tensor, v: Tensor) -> Plan:
    return _make_plan(
        split.rows_q,
        split.rows_k,
        split.channel.size,
        layout=split.layout,
        heads=split.heads,
        kv_heads=split.kv_heads,
        head_dim=k.shape[-1],
        value_head_dim=v.shape[-1],
        causal=options.causal,
        schedule=options.schedule,
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, split, options, q, k, v):
        ctx.set_materialize_grads(False)
        ctx.split, ctx.options = split, options
        keys, values = _gather(split, split.name, [k, v])
        runs, places = split.runs(split.channel.rank, of_keys=False), split.runs_here(of_keys=False)
        pieces = []
        for run, place in zip(runs, places):
            end = run.stop if options.causal else split.rows_k
            pieces.append(
                interface.flash_attn_func(
                    q[:, slice(*place)], keys[:, :end], values[:, :end], softmax_scale=options.softmax_scale,
                    causal=options.causal, return_attn_probs=True, sm_margin=options.sm_margin,
                )[:2]
            )  # fmt: skip
        out, lse = torch.cat([x for x, _ in pieces], dim=1), torch.cat([x for _, x in pieces], dim=2)
        # Not the keys of the other ranks: the backward gathers them again, and memory stays that of a rank's rows.
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        split, options = ctx.split, ctx.options
        q, k, v, out, lse = ctx.saved_tensors
        what = f"the backward of {split.name}"
        like = [(x.shape, x.dtype, x.device) for x in (out, lse)]
        if not split.gradients_agreed:
            dout, dlse = agreed_gradients(split.channel, what, dout, dlse, like, split.check_values)
        if dout is None and dlse is None:
            return (None,) * 5
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        if split.rows_q and split.rows_k and q.shape[0]:
            keys, values = _gather(split, what, [k, v])
            plan = _plan(split, options, q, k, v)
            numbers = chunks_of_rank(split.channel.rank, split.channel.size, split.layout)
            of_q, of_k = (dict(zip(numbers, split.runs_here(of_keys=side))) for side in (False, True))
            q, scale, sign = _with_positive_scale(q, options.softmax_scale)
            rule = parts.Rule(plan.policy, scale, options.sm_margin)
            operands = parts.Operands(dout, q, keys, values, out, lse, dlse)
            chunks_here = Chunks(of_q, of_k, _chunks(split, split.rows_k))
            Carrier(split.channel, what, plan, rule, operands, options.causal, chunks_here).run(dq, dk, dv)
            if sign != 1:
                dq.mul_(sign)
        return None, None, dq, dk, dv


def _with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """q' and c' > 0 with c' q' = c q, and the sign of dq: PositiveScale of csrc/bindings/operators.h."""
    if abs(scale) < torch.finfo(torch.float32).tiny:
        return torch.zeros_like(q), 1.0, 0.0
    return (-q, -scale, -1.0) if scale < 0 else (q, scale, 1.0)


def _gather(split: Split, what: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """(batch, rows of this rank, ...) to (batch, all rows of k, ...)."""
    ranks = range(split.channel.size)
    runs = [split.runs(rank, of_keys=True) for rank in ranks]
    wholes, moves = [], []
    for x in tensors:
        wholes.append(x.new_empty(x.shape[0], split.rows_k, *x.shape[2:]))
        for number, place in enumerate(split.runs_here(of_keys=True)):
            received = [wholes[-1][:, slice(*runs[rank][number])] for rank in ranks]
            moves.append(Move([x[:, slice(*place)]] * len(ranks), received))
    exchange(split.channel, what, moves)
    return wholes

"""The order in which the backward kernel works and adds, and a model of what each order costs.

Everything here is host code over ``csrc/schedule``, the headers that the kernel itself is compiled from; nothing needs
a GPU or torch. ``python -m dash_attn.schedule`` compares the policies for a shape. docs/schedules.md defines them.

A *problem* is the shape seen as tiles; a *schedule* is the name of a policy; *KV tile* and *query tile* are indices
within one head. The order depends on the lengths, the head dim, the mask and the policy, and on nothing else.
"""

from __future__ import annotations

import bisect
import functools

try:
    from dash_attn import _schedule
except ImportError as error:
    raise ImportError(
        "dash_attn._schedule, the compiled schedule module, cannot be imported: install the package with "
        f"`pip install .` from its root ({error})"
    ) from error

from dash_attn._schedule import (
    Problem,
    Task,
    add_order,
    assign,
    groups,
    heads_together,
    num_claims,
    order_of_head,
    ranks,
    visit_order,
    walk,
)

from . import auto_table
from .simulation import Simulation, simulate

__all__ = [
    "POLICIES",
    "YARDSTICKS",
    "Problem",
    "Simulation",
    "Task",
    "add_order",
    "assign",
    "fitting",
    "groups",
    "heads_together",
    "num_claims",
    "order_of_head",
    "policy_number",
    "problem",
    "ranks",
    "resolve",
    "simulate",
    "tile_shape",
    "visit_order",
    "walk",
]

POLICIES: tuple[str, ...] = _schedule.POLICIES
"""Names of the policies that users can choose, all deterministic."""

YARDSTICKS: tuple[str, ...] = _schedule.YARDSTICKS
"""Names of policies for benchmarks only, which are not deterministic: plain fp32 atomic adds."""


def fitting(*, causal: bool) -> tuple[str, ...]:
    """Those of ``POLICIES`` that are defined for the mask."""
    return tuple(policy for policy in POLICIES if _schedule.fits(policy, causal))


def policy_number(name: str) -> int:
    """The integer that the compiled ops take for a policy or a yardstick."""
    return (*POLICIES, *YARDSTICKS).index(name)


def _at_least(values: tuple[int, ...], value: int) -> int:
    """Position of the first of ascending values that is not below `value`, or the last."""
    return min(bisect.bisect_left(values, value), len(values) - 1)


def _automatic(causal: bool, seqlen_k: int, head_dim: int, queries_per_kv: int) -> str:
    """The policy of ``schedule="auto"``: of a table that the model of the machine wrote (docs/model.md).

    Bits follow from it, so it may depend on the shape of one sequence, and on neither the batch nor the device.
    """
    group = auto_table.QUERIES_PER_KV[_at_least(auto_table.QUERIES_PER_KV, queries_per_kv)]
    policies = auto_table.FASTEST[_schedule.backward_tile_shape(head_dim, causal)[2], causal, group]
    return policies[_at_least(auto_table.LENGTHS, seqlen_k)]


def resolve(
    name: str, *, causal: bool, seqlen_q: int, seqlen_k: int, head_dim: int = 128, queries_per_kv: int = 1
) -> str:
    """The policy that ``schedule=name`` means for a shape.

    Args:
        name: one of ``POLICIES`` or ``"auto"``.
        causal: whether the mask is causal (bottom-right aligned).
        seqlen_q, seqlen_k: numbers of queries and keys.
        head_dim: from 1 to 128.
        queries_per_kv: query heads that share a KV head.

    Returns:
        One of ``POLICIES``.

    Raises:
        ValueError: ``name`` is unknown, or the policy is not defined for this mask.
    """
    if name == "auto":
        return _automatic(causal, seqlen_k, head_dim, queries_per_kv)
    allowed = fitting(causal=causal)
    if name not in allowed:
        choices = ", ".join(repr(choice) for choice in ["auto", *allowed])
        raise ValueError(f"schedule must be one of {choices} when causal={causal}, got {name!r}")
    return name


def tile_shape(head_dim: int, *, causal: bool) -> tuple[int, int]:
    """(queries, keys) of one tile of the backward kernel.

    Raises:
        ValueError: no kernel takes this head dim.
    """
    return _schedule.backward_tile_shape(head_dim, causal)[:2]


def problem(
    schedule: str,
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool,
    head_dim: int = 128,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    tile_q: int | None = None,
    tile_k: int | None = None,
    cta_group: int | None = None,
    head_section: int | None = 1,
    head_splits: int | None = None,
) -> Problem:
    """The problem as the kernel sees it when it runs the policy ``schedule``.

    Args:
        schedule: one of ``POLICIES`` or ``"auto"``.
        seqlen_q, seqlen_k: numbers of queries and keys, from 1.
        causal: whether the mask is causal (bottom-right aligned).
        head_dim: selects the tile sizes, where they are not given.
        batch, heads, kv_heads: counts; ``heads`` must be a multiple of ``kv_heads`` (default: ``heads``).
        tile_q, tile_k: queries and keys in a tile; default: the kernel's for this head dim.
        cta_group: CTAs that take a claim together; default: the kernel's for this policy.
        head_section: (batch, KV head, split)s whose claims are interleaved; None: as many as the launch takes. Changes
            who runs when, no order of adds.
        head_splits: parts that the query heads of a KV head are cut into, each with claims of its own; default: the
            launch's, which follows from the lengths, the mask and the numbers of heads.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"heads must be a positive multiple of kv_heads={kv_heads}, got {heads}")
    schedule = resolve(
        schedule,
        causal=causal,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        queries_per_kv=heads // kv_heads,
    )
    if tile_q is None or tile_k is None:
        default_q, default_k = tile_shape(head_dim, causal=causal)
        tile_q = default_q if tile_q is None else tile_q
        tile_k = default_k if tile_k is None else tile_k
    build = functools.partial(
        Problem,
        seqlen_q,
        seqlen_k,
        tile_q=tile_q,
        tile_k=tile_k,
        causal=causal,
        batch=batch,
        kv_heads=kv_heads,
        queries_per_kv=heads // kv_heads,
        cta_group=_schedule.cta_group(schedule) if cta_group is None else cta_group,
    )
    if head_splits is None:
        one = build()
        head_splits = _schedule.head_splits(
            kv_heads=kv_heads,
            queries_per_kv=one.queries_per_kv,
            query_tiles=one.num_query_tiles,
            kv_tiles=one.num_kv_tiles,
            causal=causal,
        )
    build = functools.partial(build, head_splits=head_splits)
    if head_section is None:
        head_section = _schedule.head_section(schedule, build(), head_dim)
    return build(head_section=head_section)

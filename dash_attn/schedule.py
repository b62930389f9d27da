"""The order in which the backward kernel works and adds.

Everything here is host code over ``csrc/contract`` and ``csrc/placement``, the headers from which the kernel itself is
compiled, and needs neither a GPU nor torch. docs/schedules.md defines the policies.

A *problem* is the shape as a grid of tiles. A *schedule* is the name of a policy. A *KV tile* and a *query tile* are
indices within one head. The order depends only on the lengths, the head dim, the group size, the mask and the policy.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeAlias

try:
    from . import _schedule
except ImportError as error:
    raise ImportError(
        "the compiled schedule module, dash_attn._schedule, cannot be imported: install the package with "
        f"`pip install .` from its root ({error})"
    ) from error

from ._schedule import (
    Problem,
    add_order,
    divides,
    groups,
    heads_together,
    num_groups,
    ranks,
    steps,
    visit_order,
    walk,
    work_tile,
)

__all__ = [
    "POLICIES",
    "YARDSTICKS",
    "Problem",
    "Schedule",
    "add_order",
    "divides",
    "fitting",
    "groups",
    "heads_together",
    "num_groups",
    "policy_number",
    "problem",
    "ranks",
    "resolve",
    "steps",
    "tile_shape",
    "visit_order",
    "walk",
    "work_tile",
]

Schedule: TypeAlias = Literal["auto", "descending", "spt", "shift", "symmetric_shift", "order_free"]
"""The values that the public functions accept as `schedule`."""

POLICIES: tuple[Schedule, ...] = _schedule.POLICIES  # type: ignore[assignment]
"""The names of the policies that users can choose. All of them are deterministic."""

YARDSTICKS: tuple[str, ...] = _schedule.YARDSTICKS
"""The names of policies for tests and benchmarks alone: ``ascending``, and ``atomic``, which adds in fp32 in
any order and is non-deterministic. Only builds whose DASH_ATTN_POLICIES lists them have kernels for them."""


def fitting(
    *, causal: bool,
    head_dim: int = 128, value_head_dim: int | None = None, window: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, changed_scores: bool = False, dropout: bool = False,
) -> tuple[Schedule, ...]:  # fmt: skip
    """Returns the ``POLICIES`` that have a kernel for such calls. The arguments are those of ``resolve``."""
    call: dict[str, Any] = {"causal": causal, "head_dim": head_dim, "value_head_dim": value_head_dim, "window": window}
    call |= {"attention_chunk": attention_chunk, "changed_scores": changed_scores, "dropout": dropout}
    return tuple(policy for policy in POLICIES if _schedule.has_kernel(policy, **call))


def policy_number(name: str) -> int:
    """Returns the integer that the compiled ops take for a policy or a yardstick.

    Args:
        name: one of ``POLICIES`` or ``YARDSTICKS``.

    Raises:
        ValueError: no policy has this name.
    """
    names = (*POLICIES, *YARDSTICKS)
    if name not in names:
        raise ValueError(f"name must be one of {', '.join(map(repr, names))}, got {name!r}")
    return names.index(name)


def resolve(
    name: str,
    *, causal: bool,
    head_dim: int = 128, value_head_dim: int | None = None, window: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, changed_scores: bool = False, dropout: bool = False,
) -> str:  # fmt: skip
    """Returns the policy that ``schedule=name`` selects, for sequences of any length.

    Args:
        name: one of ``POLICIES`` or ``"auto"``.
        causal: the mask, as in ``problem``.
        window: the mask, as in ``problem``.
        attention_chunk: the mask, as in ``problem``.
        head_dim: columns of q and k, from 1 to 256.
        value_head_dim: columns of v, from 1 to 256; default: head_dim.
        changed_scores: whether a softcap or ALiBi slopes change the scores.
        dropout: whether elements of the softmax are dropped.

    Returns:
        One of ``POLICIES``.

    Raises:
        ValueError: ``name`` is unknown, the policy has no kernel for such calls, or a number is out of range.
    """
    call: dict[str, Any] = {"causal": causal, "head_dim": head_dim, "value_head_dim": value_head_dim, "window": window}
    call |= {"attention_chunk": attention_chunk, "changed_scores": changed_scores, "dropout": dropout}
    return _schedule.resolve(name, **call)


def tile_shape(head_dim: int, value_head_dim: int | None = None) -> tuple[int, int]:
    """Returns the tile of the backward kernel, (queries, keys).

    Args:
        head_dim: columns of q and k.
        value_head_dim: columns of v; default: head_dim.

    Raises:
        ValueError: no kernel supports these head dims.
    """
    return _schedule.backward_tile_shape(head_dim, value_head_dim)


def problem(
    schedule: str,
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    head_dim: int = 128,
    value_head_dim: int | None = None,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    tile_q: int | None = None,
    tile_k: int | None = None,
    cta_group: int | None = None,
    head_swizzle: int | None = 1,
    splits: int | None = None,
) -> Problem:
    """Returns the problem that the kernel works on when it runs the policy ``schedule``.

    Args:
        schedule: one of ``POLICIES`` or ``YARDSTICKS``, or ``"auto"``.
        seqlen_q: the number of queries, at least 1.
        seqlen_k: the number of keys, at least 1.
        causal: whether the mask is causal (bottom-right aligned).
        window: ``window_size`` of ``flash_attn_func``.
        attention_chunk: as in ``flash_attn_func``.
        head_dim: columns of q and k; selects the tile size unless it is given.
        value_head_dim: columns of v; default: head_dim.
        batch: the number of sequences.
        heads: the number of query heads, a multiple of ``kv_heads``.
        kv_heads: the number of KV heads; default: ``heads``.
        tile_q: queries per tile; default: the kernel's for these head dims.
        tile_k: keys per tile; default: the kernel's for these head dims.
        cta_group: CTAs that process a group of KV tiles together; default: the kernel's for this policy.
        head_swizzle: the number of (sequence, KV head, split)s whose work tiles are interleaved; None: the launch's
            choice. For ``"shift"``: ``batch * kv_heads`` or more run the first parts of all heads first; fewer, or
            None, run one head after the other, as a launch with many heads does. Affects who runs when, but no order
            of adds.
        splits: the number of parts into which the query heads of a KV head are divided, each with its own work tiles;
            default: the launch's choice, which follows from the lengths, the mask and the group size.

    Raises:
        ValueError: an argument is out of range; the message names the argument.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"heads must be a positive multiple of kv_heads={kv_heads}, got {heads}")
    mask: dict[str, Any] = {"causal": causal, "window": window, "attention_chunk": attention_chunk}
    head_dims: dict[str, Any] = {"head_dim": head_dim, "value_head_dim": value_head_dim}
    if schedule not in YARDSTICKS:
        schedule = resolve(schedule, **head_dims, **mask)
    if tile_q is None or tile_k is None:
        default_q, default_k = tile_shape(**head_dims)
        tile_q = default_q if tile_q is None else tile_q
        tile_k = default_k if tile_k is None else tile_k
    build = functools.partial(
        Problem,
        seqlen_q,
        seqlen_k,
        tile_q=tile_q,
        tile_k=tile_k,
        **mask,
        batch=batch,
        kv_heads=kv_heads,
        group_size=heads // kv_heads,
        cta_group=_schedule.cta_group(schedule) if cta_group is None else cta_group,
    )
    build = functools.partial(build, splits=_schedule.num_splits(build()) if splits is None else splits)
    if head_swizzle is not None:
        return build(head_swizzle=head_swizzle)
    return build(
        head_swizzle=_schedule.head_swizzle(schedule, build(), **head_dims),
        last_heads=_schedule.last_heads(schedule, build(), **head_dims),
    )

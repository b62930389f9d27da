"""Attention over a cache of keys and values: a forward without gradients, which may first append to the cache.

The cache becomes a variable-length batch for the forward that training uses. A row of the output therefore has the same
bits in any batch, at any place in the cache and with any pages: its bits depend only on the query and on the keys and
values that the query sees. The host reads no lengths, tables or indices, so a CUDA graph can capture calls and replay
them with other values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _schedule, cache_checks, checks, ops, rotary  # noqa: F401  ops registers torch.ops.dash_attn
from .packs import multiples, sequence_of_rows


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of queries at the end of cached keys, with FlashAttention-2's arguments, without gradients.

    If k and v are given, they are first written into the cache, in place, after the existing keys. Masks and windows
    are those of `flash_attn_func`, where seqlen_k is the number of cached keys, including new ones: the last query is
    aligned with the last key.

    Keys are never split over SMs: one SM computes a row, however long the cache is. The kernels read the blocks of a
    `block_table`, and the sequences that a `cache_batch_idx` picks, in place. The call copies them instead with
    cache_leftpad, if a head_dim is not a multiple of 8, under torch.compile, and if block_size is not a multiple of 16
    in a call that does not decode (docs/usage.md).

    Args:
        q: (batch, seqlen_q, heads, head_dim), bf16 or fp16, as in `flash_attn_func`.
        k_cache: (cache_batch, capacity, kv_heads, head_dim), or with block_table
            (num_blocks, block_size, kv_heads, head_dim) with a block_size of at least 1. Any strides; the cache is
            copied if the distance between its sequences is not a multiple of its rows. With k, every element must have
            its own memory location: no stride may be 0, as in an expanded tensor, and v_cache must not overlap k_cache,
            except that both may be views of one buffer whose blocks hold either keys or values (checked on a CPU).
        v_cache: like k_cache, with value_head_dim instead of head_dim.
        k: (batch, seqlen_new, kv_heads, head_dim), new keys, only together with v. They are written to the places
            cache_seqlens, cache_seqlens + 1, ... of their sequences.
        v: (batch, seqlen_new, kv_heads, value_head_dim), new values, only together with k.
        rotary_cos: (positions, rotary_dim / 2), floating point, only with k and rotary_sin. New keys and queries are
            rotated in fp32 and rounded: the key at place p by row p, and query i by row cache_seqlens + i, or by row
            cache_seqlens if there is neither causal nor a window_size. rotary_dim is a multiple of 16 up to head_dim.
        rotary_sin: like rotary_cos.
        cache_seqlens: an int, or int32 (batch,) on q's device: the number of keys in the cache before this call.
            Required with k. Default: the whole capacity. With k and block_table or cache_batch_idx the value may be
            minus seqlen_new for a sequence that has no keys and receives none, such as padding of the batch; its
            block_table may hold -1, but its cache_batch_idx must be valid. Values out of range, here and in the tables
            below, raise a ValueError on a CPU and a device-side error on a GPU, like an index out of bounds.
        rotary_interleaved: whether dimensions 0 and 1, 2 and 3, ... are rotated together; otherwise d and
            d + rotary_dim / 2.
        cache_batch_idx: int32 (batch,) on q's device: the sequence of the cache, or the row of block_table, for each
            sequence of the batch. The values must be distinct with k. Default: 0, 1, 2, ...
        cache_leftpad: int32 (batch,) on q's device: the number of places at the start of each sequence of the cache
            that hold no keys. cache_seqlens includes them. Default: none.
        block_table: int32 (batch, max_blocks) on q's device, with cache_batch_idx (cache_batch, max_blocks): the blocks
            that hold the keys of each sequence, in order. Entries past the last key are ignored. The blocks to which
            new keys are written must be distinct. Otherwise a CPU raises a ValueError; a GPU does not check this, and
            leaves undefined contents in such a block.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: as in `flash_attn_func`.
        learnable_sink: as in `flash_attn_func`.
        s_aux: as in `flash_attn_func`.
        num_splits: accepted and ignored.
        return_softmax_lse: also return the log-sum-exp.

    Returns:
        out: (batch, seqlen_q, heads, value_head_dim), like q. With return_softmax_lse (out, softmax_lse), with
        softmax_lse fp32 (batch, heads, seqlen_q), natural logarithm, +inf for a query that sees no key.

    Raises:
        NotImplementedError: softcap and alibi_slopes are both given.
        TypeError: an argument has the wrong type or dtype; the message names the argument.
        ValueError: an argument has the wrong shape or value; the message names the argument.
        RuntimeError: the tensors are on a CUDA device, but the compiled kernels or a Hopper GPU are missing.
    """
    checks.check_hints(num_splits, None)
    return_softmax_lse = checks.as_flag("return_softmax_lse", return_softmax_lse)
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    new = NewKeys(k, v, rotary_cos, rotary_sin, rotary_interleaved)
    out, softmax_lse = attend(
        q, cache, new, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, s_aux=s_aux,
    )  # fmt: skip
    return (out, softmax_lse.contiguous()) if return_softmax_lse else out


class Cache(NamedTuple):
    """A KV cache: arguments as in `flash_attn_with_kvcache`."""

    k: Tensor
    v: Tensor
    seqlens: int | Tensor | None = None
    batch_idx: Tensor | None = None
    leftpad: Tensor | None = None
    table: Tensor | None = None
    table_name: str = "block_table"
    names: tuple[str, str, str] = ("k_cache", "v_cache", "cache_seqlens")
    """The caller's names of k, v and seqlens."""

    def capacity(self) -> int:
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])


class NewKeys(NamedTuple):
    """The keys and values to append: arguments as in `flash_attn_with_kvcache`."""

    k: Tensor | None = None
    v: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = True
    rotary_seqlens: Tensor | None = None
    """Positions of the first new keys for the rotary embedding; default: their places in the cache."""
    cu_seqlens: Tensor | None = None
    """int32 (batch + 1,): the offsets of each sequence's new keys in k and v, (total_k_new, kv_heads, head_dim)."""


@torch.no_grad()
def attend(
    q: Tensor,
    cache: Cache,
    new: NewKeys,
    *,
    cu_seqlens_q: Tensor | None = None,
    seqused_q: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor]:
    """Computes `flash_attn_with_kvcache`, with a log-sum-exp that may not be contiguous. With cu_seqlens_q the queries
    are a variable-length batch, and the log-sum-exp is (heads, total_q)."""
    causal = checks.as_flag("causal", causal)
    window = checks.as_window(window_size)
    scores = checks.as_scores(softcap, alibi_slopes, learnable_sink, s_aux)
    scale = None if softmax_scale is None else checks.as_number("softmax_scale", softmax_scale)
    arguments: dict[str, Any] = {
        "softmax_scale": scale, "causal": causal, "schedule": "auto", "sm_margin": checks.as_sm_margin(sm_margin),
        "window_left": window[0], "window_right": window[1],
        "attention_chunk": checks.as_attention_chunk(attention_chunk), **scores,
    }  # fmt: skip
    has_mask = causal or window != (-1, -1) or arguments["attention_chunk"] > 0
    batch, cache = cache_checks.checked(q, cache, new, cu_seqlens_q, seqused_q, scores, has_mask=has_mask)
    seqlens = _seqlens(cache, batch, q.device)
    if new.k is not None and new.v is not None:
        _check_op(q, cache, seqlens, cu_seqlens_q, seqused_q, arguments)
        new_k, new_v = (x if new.cu_seqlens is not None else x.flatten(0, 1) for x in (new.k, new.v))
        if new.rotary_cos is not None and new.rotary_sin is not None:
            start = (seqlens if new.rotary_seqlens is None else new.rotary_seqlens).long()
            turn = functools.partial(
                rotary.rotate, cos=new.rotary_cos, sin=new.rotary_sin,
                interleaved=checks.as_flag("rotary_interleaved", new.rotary_interleaved),
            )  # fmt: skip
            new_k = turn(new_k, _rows_of_batch(new.k, new.cu_seqlens, batch).places(start))
            of_queries = _rows_of_batch(q, cu_seqlens_q, batch)
            positions = of_queries.places(start, step=int(has_mask))
            q = turn(q, positions if cu_seqlens_q is not None else positions.view(q.shape[:2]))
        seqlens = torch.ops.dash_attn.append.default(
            cache.k, cache.v, new_k, new_v, seqlens, new.cu_seqlens, _table(cache), arguments["sm_margin"]
        )
    seqlen_q = q.shape[1]
    packed_q = q.flatten(0, 1) if cu_seqlens_q is None else q
    arguments |= {"cu_seqlens_q": cu_seqlens_q, "seqused_q": seqused_q}
    in_place = _in_place(packed_q, cache, batch, arguments)
    if in_place is not None:
        del arguments["schedule"]
        arguments["softmax_scale"] = q.shape[-1] ** -0.5 if scale is None else scale
        if arguments["sinks"] is not None:
            arguments["sinks"] = arguments["sinks"].float()
        out, softmax_lse = torch.ops.dash_attn.forward_of_cache.default(
            packed_q, **in_place._asdict(), seqused_k=seqlens, **arguments
        )
    else:
        if cu_seqlens_q is None:
            arguments["cu_seqlens_q"] = multiples(seqlen_q, batch + 1, q.device)
        k, v, cu_seqlens_k = _rows(*_contents(cache, seqlens), batch)
        if cache.leftpad is not None:
            cu_seqlens_k = torch.cat((cu_seqlens_k[:-1] + cache.leftpad, cu_seqlens_k[-1:]))
            seqlens = seqlens - cache.leftpad
        out, softmax_lse = torch.ops.dash_attn.attention.default(
            packed_q, k, v, cu_seqlens_k=cu_seqlens_k, seqused_k=seqlens, **arguments
        )
    if packed_q is q:
        return out, softmax_lse
    return out.unflatten(0, (batch, seqlen_q)), softmax_lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    pack: dict[str, Any],
    max_seqlens: dict[str, int | Tensor],
    *,
    dropout_p: float,
    dropout_bits: object,
    deterministic: bool,
    return_attn_probs: bool,
    schedule: str,
    **arguments: Any,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Computes `flash_attn_varlen_func` with a block_table. pack: cu_seqlens and seqused, by their names."""
    no_dropout = "no dropout with block_table"
    checks.reject_dropout(dropout_p, no_dropout)
    checks.reject_given(no_dropout, dropout_bits=dropout_bits)
    for name, value in max_seqlens.items():
        checks.check_max_seqlen(name, value)
    checks.as_flag("deterministic", False if deterministic is None else deterministic)
    checks.check_schedule(schedule)
    return_attn_probs = checks.as_flag("return_attn_probs", return_attn_probs)
    out, softmax_lse = attend_pages(q, k, v, block_table, **pack, **arguments)
    return (out, softmax_lse, out.new_empty(0)) if return_attn_probs else out


def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Computes `attend` for `flash_attn_varlen_func`. cu_seqlens_k gives the lengths of sequences unless seqused_k
    does.

    Raises:
        NotImplementedError: a gradient is required.
    """
    checks.check_tensors(
        {"q": q, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "block_table": block_table}
    )
    of_scores = {name: arguments.get(name) for name in ("learnable_sink", "s_aux", "alibi_slopes")}
    for name, x in {"q": q, "k": k, "v": v, **of_scores}.items():
        if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
            raise NotImplementedError(
                "block_table must be None if a gradient is required (paged keys and values have no backward; "
                f"torch.no_grad() turns gradients off), got {checks.describe(block_table)} and {name} that requires one"
            )
    cache_checks.check_offsets_of_pages(q, cu_seqlens_q, cu_seqlens_k)
    by_offsets = seqused_k is None
    names = "k", "v", "the differences of cu_seqlens_k" if by_offsets else "seqused_k"
    cache = Cache(
        k, v, cu_seqlens_k.diff() if by_offsets else seqused_k, table=block_table, table_name="block_table", names=names
    )  # fmt: skip
    return attend(q, cache, NewKeys(), cu_seqlens_q=cu_seqlens_q, seqused_q=seqused_q, **arguments)


def _check_op(
    q: Tensor,
    cache: Cache,
    seqlens: Tensor,
    cu_seqlens_q: Tensor | None,
    seqused_q: Tensor | None,
    arguments: dict[str, Any],
) -> None:
    """Runs the op's own checks on tensors without values, so that nothing is written if they fail."""
    # While tracing, an error of a later op stops the graph before anything is written.
    if torch.compiler.is_compiling():
        return
    rows = _without_values(q)
    cu_seqlens = torch.empty(seqlens.shape[0] + 1, dtype=torch.int32, device="meta")
    tensors = {
        "q": rows.flatten(0, 1) if cu_seqlens_q is None else rows,
        "k": cache.k[:0].flatten(0, 1), "v": cache.v[:0].flatten(0, 1), "cu_seqlens_k": cu_seqlens,
        "cu_seqlens_q": cu_seqlens if cu_seqlens_q is None else cu_seqlens_q, "seqused_q": seqused_q,
        "seqused_k": seqlens,
    }  # fmt: skip
    torch.ops.dash_attn.attention.default(**{name: _without_values(x) for name, x in (tensors | arguments).items()})


def _without_values(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _seqlens(cache: Cache, batch: int, device: torch.device) -> Tensor:
    if isinstance(cache.seqlens, Tensor):
        return cache.seqlens.contiguous()
    length = cache.capacity() if cache.seqlens is None else cache.seqlens
    return torch.full((batch,), length, dtype=torch.int32, device=device)


class _RowsOfBatch(NamedTuple):
    """The rows of queries or of new keys, of a dense or variable-length batch, and the sequences of the batch."""

    sequence: Tensor
    """int64 (rows,): the sequence of each row; a valid one even for rows outside of all sequences."""
    offset: Tensor
    """int64 (rows,): the position of each row within its sequence."""
    is_of_one: Tensor | None
    """bool (rows,): whether the row belongs to a sequence; None if all rows do."""

    def places(self, starts: Tensor, step: int = 1) -> Tensor:
        """Returns the sequence's start + step * offset for every row, 0 outside of sequences. starts: int64
        (batch,)."""
        places = starts[self.sequence] + step * self.offset
        return places if self.is_of_one is None else torch.where(self.is_of_one, places, 0)


def _rows_of_batch(x: Tensor, cu_seqlens: Tensor | None, batch: int) -> _RowsOfBatch:
    if cu_seqlens is None:
        seqlen = x.shape[1]
        sequence = torch.arange(batch, device=x.device)[:, None].expand(batch, seqlen).flatten()
        offset = torch.arange(seqlen, device=x.device).expand(batch, seqlen).flatten()
        return _RowsOfBatch(sequence, offset, None)
    total = x.shape[0]
    sequence = sequence_of_rows(cu_seqlens, total)
    offset = torch.arange(total, device=x.device) - cu_seqlens[sequence]
    is_of_one = (sequence < batch) & (offset >= 0)
    return _RowsOfBatch(sequence.clamp(max=max(batch - 1, 0)), offset, is_of_one)


_BOX_ROWS = 16
"""Rows of a page that TMA loads at a time (PageTable in csrc/placement/sequences.h)."""

_MOST_ROWS = 512
"""Rows of a sequence. With twice as many, a copy of the cache was faster than reading it row by row for each query tile
(8 sequences of 4,096 keys on an H200)."""


class _InPlace(NamedTuple):
    """Arguments of `dash_attn::forward_of_cache`."""

    k: Tensor
    v: Tensor
    block_table: Tensor | None
    page_rows: int
    page_distance: int


def _table(cache: Cache) -> Tensor | None:
    """The pages of each sequence; None where sequence i of the batch has page i.

    Sequences that `cache_batch_idx` picks from a plain cache are pages too, one of each sequence.
    """
    return cache.batch_idx[:, None] if cache.table is None and cache.batch_idx is not None else cache.table


def _in_place(q: Tensor, cache: Cache, batch: int, arguments: dict[str, Any]) -> _InPlace | None:
    """The cache as the kernels read it where it lies, or None where a copy or nothing at all has to be made of it.

    Args:
        q: (total_q, heads, head_dim).
        arguments: those of the op.
    """
    k, v, table = cache.k, cache.v, _table(cache)
    if torch.compiler.is_compiling() or cache.leftpad is not None:
        return None
    if k.numel() == 0 or v.numel() == 0 or batch == 0:
        return None
    if k.shape[-1] % 8 or v.shape[-1] % 8:
        return None  # the op pads head dims in a copy
    if table is not None and table.shape[1] == 0:
        return None
    cuts_boxes = table is not None and table.shape[1] > 1 and k.shape[1] % _BOX_ROWS != 0
    if cuts_boxes and not _reads_rows_of_pages(q, k, v, batch, arguments):
        return None
    distance = _pitch(k)
    if distance is None or distance != _pitch(v):
        return None
    rows = (k.shape[0] - 1) * distance + k.shape[1]
    flat_k, flat_v = (x.as_strided((rows, *x.shape[2:]), x.stride()[1:]) for x in (k, v))
    return _InPlace(flat_k, flat_v, table, k.shape[1], distance)


def _reads_rows_of_pages(q: Tensor, k: Tensor, v: Tensor, batch: int, arguments: dict[str, Any]) -> bool:
    """Whether a kernel for short query tiles serves the call, and is faster than a copy of the cache.

    Only these kernels load single rows of pages.
    """
    mask = _schedule.mask_name(
        causal=arguments["causal"], window=(arguments["window_left"], arguments["window_right"]),
        attention_chunk=arguments["attention_chunk"],
    )  # fmt: skip
    group = q.shape[1] // k.shape[2]
    rows = q.shape[0] * (group if group & (group - 1) == 0 else 1)
    return (
        mask != "window"
        and arguments["softcap"] == 0
        and arguments["alibi_slopes"] is None
        and k.shape[3] <= 192
        and v.shape[3] <= 128
        and rows <= _MOST_ROWS * batch
    )


def _contents(cache: Cache, seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of the batch, (batch or more, capacity, kv_heads, head_dim)."""
    if cache.table is not None:
        # Block 0 replaces the blocks that hold no keys; a cache without blocks has no replacement.
        table = cache.table if cache.k.shape[0] else cache.table[:, :0]
        starts = torch.arange(table.shape[1], device=seqlens.device) * cache.k.shape[1]
        blocks = torch.where(starts < seqlens[:, None], table, 0).long()
        cache_checks.check_not_negative(cache.table_name, blocks)
        return cache.k[blocks].flatten(1, 2), cache.v[blocks].flatten(1, 2)
    if cache.batch_idx is not None:
        cache_checks.check_not_negative("cache_batch_idx", cache.batch_idx)
        return cache.k.index_select(0, cache.batch_idx), cache.v.index_select(0, cache.batch_idx)
    return cache.k, cache.v


def _rows(k: Tensor, v: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the rows of both, (total, kv_heads, head_dim), as views if strides allow it, and the sequences'
    starts."""
    pitch = _pitch(k)
    # A compiler may trace with strides that differ from those at run time.
    if torch.compiler.is_compiling() or pitch is None or pitch != _pitch(v):
        pitch = k.shape[1]
        rows = [x.flatten(0, 1) for x in (k, v)]
        total = rows[0].shape[0]
    else:
        total = (k.shape[0] - 1) * pitch + k.shape[1] if k.shape[0] else 0
        rows = [x.as_strided((total, *x.shape[2:]), x.stride()[1:]) for x in (k, v)]
    starts = multiples(pitch, batch + 1, k.device)
    return rows[0], rows[1], starts if batch * pitch <= total else starts.clamp_(max=total)


def _pitch(cache: Tensor) -> int | None:
    """Returns the distance between sequences of the cache in rows; None if it is not a whole number of rows."""
    sequence, row = cache.stride()[:2]
    if cache.shape[0] <= 1 or cache.shape[1] == 0:
        return cache.shape[1]
    return sequence // row if row > 0 and sequence % row == 0 and sequence // row >= cache.shape[1] else None

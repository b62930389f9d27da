"""Checks the arguments of `dash_attn.kvcache`: the cache of keys and values, and what is written into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import checks, dtensors
from .packs import rows_of_sequences

if TYPE_CHECKING:
    from .kvcache import Cache, NewKeys

_ROTARY_MULTIPLE = 16


def checked(
    q: Tensor,
    cache: Cache,
    new: NewKeys,
    cu_seqlens_q: Tensor | None,
    seqused_q: Tensor | None,
    scores: dict[str, Any],
    *,
    has_mask: bool,
) -> tuple[int, Cache]:
    """Returns the batch size, and the cache with one row of the block table per sequence of the batch.

    Args:
        scores: keyword arguments of the op, whose devices are checked.
        has_mask: whether each query has its own position.
    """
    k_name, v_name, _ = cache.names
    tensors: dict[str, Tensor | None] = {"q": q, k_name: cache.k, v_name: cache.v}
    # A caller that names its cache k and v has no new keys.
    tensors |= {name: x for name, x in (("k", new.k), ("v", new.v)) if x is not None}
    tensors |= {
        "rotary_cos": new.rotary_cos, "rotary_sin": new.rotary_sin, "rotary_seqlens": new.rotary_seqlens,
        "cache_batch_idx": cache.batch_idx, "cache_leftpad": cache.leftpad, cache.table_name: cache.table,
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": new.cu_seqlens, "seqused_q": seqused_q,
        "alibi_slopes": scores["alibi_slopes"], "learnable_sink (s_aux)": scores["sinks"],
    }  # fmt: skip
    needed = ("q", k_name, v_name)
    checks.check_tensors({name: x for name, x in tensors.items() if x is not None or name in needed})
    dtensors.reject(tensors | {cache.names[2]: cache.seqlens})
    for name, x in tensors.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    batch = _check_queries(q, cu_seqlens_q)
    _check_cache(q, cache, batch)
    for name, x in (
        ("cache_batch_idx", cache.batch_idx), ("cache_leftpad", cache.leftpad), ("rotary_seqlens", new.rotary_seqlens),
        ("seqused_q", seqused_q),
    ):  # fmt: skip
        if x is not None:
            _check_index(name, x, "(batch,)", (batch,))
    _check_new(q, cache, new, batch)
    _check_seqlens(cache, new, batch)
    if all(checks.reads_values(x) for x in (*tensors.values(), cache.seqlens) if isinstance(x, Tensor)):
        _check_queries_of_sequences(q, cu_seqlens_q, seqused_q)
        _check_batch_idx(cache, new)
        cache = _with_own_table(cache)
        _check_values(q, cache, new, cu_seqlens_q, batch, has_mask=has_mask)
        return batch, cache
    # A negative index would wrap around. torch and the ops report all other values out of range.
    if new.rotary_seqlens is not None and new.rotary_cos is not None:
        check_not_negative("rotary_seqlens", new.rotary_seqlens)
    return batch, _with_own_table(cache)


def _with_own_table(cache: Cache) -> Cache:
    if cache.table is None or cache.batch_idx is None:
        return cache
    check_not_negative("cache_batch_idx", cache.batch_idx)
    return cache._replace(table=cache.table.index_select(0, cache.batch_idx), batch_idx=None)


def check_offsets_of_pages(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    dtensors.reject({"cu_seqlens_k": cu_seqlens_k})
    _check_index("cu_seqlens_k", cu_seqlens_k, "(batch + 1,)", tuple(cu_seqlens_q.shape))
    if cu_seqlens_k.device != q.device:
        raise ValueError(f"cu_seqlens_k must be on the device of q, {q.device}, got {cu_seqlens_k.device}")


def _check_queries(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    shape = "(batch, seqlen_q, heads, head_dim)" if cu_seqlens_q is None else "(total_q, heads, head_dim)"
    if q.dim() != (4 if cu_seqlens_q is None else 3):
        raise ValueError(f"q must have shape {shape}, got {tuple(q.shape)}")
    if cu_seqlens_q is None:
        return q.shape[0]
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q must have shape (batch + 1,), got {tuple(cu_seqlens_q.shape)}")
    _check_index("cu_seqlens_q", cu_seqlens_q, "(batch + 1,)", tuple(cu_seqlens_q.shape))
    return cu_seqlens_q.shape[0] - 1


def _check_cache(q: Tensor, cache: Cache, batch: int) -> None:
    k, v, table, name = cache.k, cache.v, cache.table, cache.table_name
    k_name, v_name, _ = cache.names
    shape = f"(num_blocks, block_size, kv_heads, head_dim) with {name}" if table is not None else (
        "(cache_batch, capacity, kv_heads, head_dim)"
    )  # fmt: skip
    if k.dim() != 4:
        raise ValueError(f"{k_name} must have shape {shape}, got {tuple(k.shape)}")
    if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{v_name} must have the shape of {k_name} except for the head_dim, {tuple(k.shape)}, got {tuple(v.shape)}"
        )
    for tensor_name, x in ((k_name, k), (v_name, v)):
        _check_dtype(tensor_name, x, q)
    if k.shape[3] != q.shape[-1]:
        raise ValueError(f"{k_name} must have the head_dim of q, {q.shape[-1]}, got {k.shape[3]}")
    if k.shape[2] < 1 or q.shape[-2] % k.shape[2] != 0:
        raise ValueError(
            f"{k_name} must have a number of heads that divides the {q.shape[-2]} heads of q, got {k.shape[2]}"
        )
    if table is None:
        if cache.batch_idx is None and k.shape[0] < batch:
            raise ValueError(f"{k_name} must have one sequence per sequence of the batch, {batch}, got {k.shape[0]}")
        return
    if table.dim() != 2:
        raise ValueError(f"{name} must have shape (batch, max_blocks), got {tuple(table.shape)}")
    if k.shape[1] < 1:
        raise ValueError(f"{k_name} must have shape {shape} and a block_size of at least 1, got {tuple(k.shape)}")
    if cache.batch_idx is not None:
        _check_index(name, table, "(cache_batch, max_blocks)", tuple(table.shape))
    else:
        _check_index(name, table, "(batch, max_blocks)", (batch, table.shape[1]))


def _check_new(q: Tensor, cache: Cache, new: NewKeys, batch: int) -> None:
    if (new.k is None) != (new.v is None):
        raise ValueError("k and v must both be given or both be None, got one of them")
    if (new.rotary_cos is None) != (new.rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin must both be given or both be None, got one of them")
    if new.k is None or new.v is None:
        if new.cu_seqlens is not None:
            raise ValueError("cu_seqlens_k_new must be None without k, got a tensor")
        if new.rotary_cos is not None:
            raise ValueError("rotary_cos must be None without k: keys in the cache are already rotated")
        return
    if cache.seqlens is None:
        raise ValueError("cache_seqlens must be given with k, to place the new keys, got None")
    if new.cu_seqlens is not None:
        _check_index("cu_seqlens_k_new", new.cu_seqlens, "(batch + 1,)", (batch + 1,))
    rows = ("batch", "seqlen_new") if new.cu_seqlens is None else ("total_k_new",)
    sizes = (batch, new.k.shape[1] if new.k.dim() > 1 else 0) if new.cu_seqlens is None else new.k.shape[:1]
    for name, x, like_name, like in (("k", new.k, "k_cache", cache.k), ("v", new.v, "v_cache", cache.v)):
        expected = (*sizes, *like.shape[2:])
        if x.shape != expected:
            what = f"({', '.join(rows)}, kv_heads, head_dim) with the heads of {like_name}"
            raise ValueError(f"{name} must have shape {what}, {expected}, got {tuple(x.shape)}")
        _check_dtype(name, x, q)
    written, read = {"k_cache": cache.k, "v_cache": cache.v}, {"q": q, "k": new.k, "v": new.v}
    for tensors in [written] if _blocks_apart(cache) is None else [{name: x} for name, x in written.items()]:
        checks.check_written(tensors, read)
    if new.rotary_cos is not None and new.rotary_sin is not None:
        _check_rotary(q, new.rotary_cos, new.rotary_sin)


def _blocks_apart(cache: Cache) -> int | None:
    """Returns how many blocks after k_cache v_cache begins, if both are blocks of one buffer; otherwise None."""
    k, v = cache.k, cache.v
    # Tensors of a compiler have no address, and their strides may be symbols.
    if cache.table is None or torch.compiler.is_compiling() or k.shape != v.shape or k.stride() != v.stride():
        return None
    reach = 1 + sum((size - 1) * stride for size, stride in zip(k.shape[1:], k.stride()[1:]))
    if k.untyped_storage()._cdata != v.untyped_storage()._cdata or k.stride(0) < reach:
        return None
    blocks, rest = divmod(int(v.storage_offset() - k.storage_offset()), k.stride(0))
    return None if rest or blocks == 0 else blocks


def _check_rotary(q: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x.dim() != 2 or x.shape != cos.shape:
            raise ValueError(
                f"{name} must have shape (positions, rotary_dim / 2), the same as rotary_cos, got {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(f"{name} must have a floating-point dtype, got {x.dtype}")
    rotary_dim = 2 * cos.shape[1]
    if rotary_dim % _ROTARY_MULTIPLE != 0 or not 0 < rotary_dim <= q.shape[-1]:
        raise ValueError(
            f"rotary_cos must have rotary_dim / 2 columns, where rotary_dim is a multiple of {_ROTARY_MULTIPLE} up to "
            f"the head_dim, {q.shape[-1]}, got {cos.shape[1]}"
        )


def _check_seqlens(cache: Cache, new: NewKeys, batch: int) -> None:
    name = cache.names[2]
    if isinstance(cache.seqlens, Tensor):
        checks.check_tensors({name: cache.seqlens})
        _check_index(name, cache.seqlens, "(batch,)", (batch,))
        if cache.seqlens.device != cache.k.device:
            raise ValueError(f"{name} must be on the device of q, {cache.k.device}, got {cache.seqlens.device}")
    elif cache.seqlens is not None:
        checks.as_int(name, cache.seqlens, "an int, an int32 tensor of shape (batch,) or None")
        if not torch.compiler.is_compiling():
            num_new = new.k.shape[1] if new.k is not None and new.cu_seqlens is None else 0
            _check_range(name, [cache.seqlens], cache.capacity() - num_new)


def _check_queries_of_sequences(q: Tensor, cu_seqlens_q: Tensor | None, seqused_q: Tensor | None) -> None:
    if cu_seqlens_q is not None:
        rows_of_sequences("q", cu_seqlens_q, seqused_q, q.shape[0])
    elif seqused_q is not None:
        batch, seqlen_q = q.shape[:2]
        rows_of_sequences("q", torch.arange(batch + 1) * seqlen_q, seqused_q, batch * seqlen_q)


def _check_values(
    q: Tensor, cache: Cache, new: NewKeys, cu_seqlens_q: Tensor | None, batch: int, *, has_mask: bool
) -> None:
    """Checks values on a CPU. On a GPU, wrong values are errors on the device."""
    name = cache.names[2]
    counts = _counts(new, batch)
    has_table = cache.table is not None or cache.batch_idx is not None
    takes_none = [-count if has_table and new.k is not None else None for count in counts]
    if not isinstance(cache.seqlens, Tensor):
        seqlens = [cache.capacity() if cache.seqlens is None else cache.seqlens] * batch
    else:
        seqlens = cache.seqlens.tolist()
    placed = [i for i, length in enumerate(seqlens) if length != takes_none[i]]
    for group in [placed] if new.cu_seqlens is None else [[i] for i in placed]:
        _check_range(name, [seqlens[i] for i in group], cache.capacity() - (counts[group[0]] if group else 0))
    ends = [length + count for length, count in zip(seqlens, counts)]
    if cache.leftpad is not None and any(not 0 <= pad <= end for pad, end in zip(cache.leftpad.tolist(), ends)):
        raise ValueError(f"cache_leftpad must be from 0 to the cached keys, {ends}, got {cache.leftpad.tolist()}")
    if cache.table is not None:
        written: list[int] = []
        used: set[int] = set()
        for blocks, count, end in zip(cache.table.tolist(), counts, ends):
            blocks = blocks[: -(-end // cache.k.shape[1])]
            _check_range(cache.table_name, blocks, cache.k.shape[0] - 1)
            used.update(blocks)
            written += blocks[(end - count) // cache.k.shape[1] :] if count and end else []
        if len(set(written)) < len(written):
            raise ValueError(f"{cache.table_name} must have distinct blocks where k is written, got {written}")
        apart = _blocks_apart(cache) if new.k is not None else None
        if apart is not None and (shared := sorted(used & {block + apart for block in used})):
            raise ValueError(
                f"{cache.table_name} must name no block of k_cache that is also a named block of v_cache, got {shared}"
            )
    if new.rotary_cos is not None:
        starts = [max(length, 0) for length in seqlens]
        if new.rotary_seqlens is not None:
            starts, name = new.rotary_seqlens.tolist(), "rotary_seqlens"
        queries = [q.shape[1]] * batch if cu_seqlens_q is None else cu_seqlens_q.diff().tolist()
        for start, new_keys, count in zip(starts, counts, queries):
            turned = max(new_keys, count if has_mask else 1)
            _check_range(name, [start], new.rotary_cos.shape[0] - turned)


def _counts(new: NewKeys, batch: int) -> list[int]:
    """Returns the number of new keys of each sequence, on a CPU."""
    if new.k is None:
        return [0] * batch
    if new.cu_seqlens is None:
        return [new.k.shape[1]] * batch
    return [rows.stop - rows.start for rows in rows_of_sequences("k_new", new.cu_seqlens, None, new.k.shape[0])]


def _check_batch_idx(cache: Cache, new: NewKeys) -> None:
    if cache.batch_idx is None:
        return
    indices = cache.batch_idx.tolist()
    _check_range("cache_batch_idx", indices, (cache.k if cache.table is None else cache.table).shape[0] - 1)
    if new.k is not None and len(set(indices)) < len(indices):
        raise ValueError(f"cache_batch_idx must have distinct values with k, got {indices}")


def check_not_negative(name: str, x: Tensor) -> None:
    checks.check_values((x >= 0).all(), f"{name} must be at least 0 wherever it is used, got a negative value")


def _check_range(name: str, values: list[int], largest: int) -> None:
    if any(not 0 <= value <= largest for value in values):
        got = values[0] if len(values) == 1 else values
        raise ValueError(f"{name} must be from 0 to {largest} (room in the cache, sizes of tables), got {got}")


def _check_index(name: str, x: Tensor, text: str, shape: tuple[int, ...]) -> None:
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be torch.int32, got {x.dtype}")
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {text} = {shape}, got {tuple(x.shape)}")


def _check_dtype(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != q.dtype:
        raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")

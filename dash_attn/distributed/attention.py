"""Attention over ranks that each hold a part of the rows, with the bits of one process."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from .. import __version__, checks, dtensors, interface, transforms
from ..packs import rows_of_sequences
from ..receipts import fingerprint
from ..schedule import Schedule
from . import gathered
from .agreement import not_finite, require_finite
from .assignment import Pair
from .channel import Channel, RankError
from .layout import Rows, check_layout, rows_of_rank
from .mesh import Mesh, Ranks, ranks_of, splits_of_mesh
from .ulysses import HeadsToRows, RowsToHeads, Split

# Arguments with rows spread over the ranks; arguments of all heads; offsets of a variable-length batch.
_TENSORS = (
    ("q", "k", "v"),
    ("alibi_slopes", "learnable_sink"),
    ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k"),
)

_WithLse: TypeAlias = tuple[Tensor, Tensor, Tensor]


class _Keywords(TypedDict, total=False):
    """The keyword arguments other than return_attn_probs, for the overloads."""

    layout: str
    softmax_scale: float | None
    causal: bool
    window_size: Sequence[int | None]
    softcap: float
    alibi_slopes: Tensor | None
    learnable_sink: Tensor | None
    attention_chunk: int
    sm_margin: int
    schedule: Schedule
    check_values: bool


class _OfPack(_Keywords, total=False):
    seqused_q: Tensor | None
    seqused_k: Tensor | None


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: Mesh | None = None, *,
    return_attn_probs: Literal[False] = False, **keywords: Unpack[_Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: Mesh | None = None, *,
    return_attn_probs: Literal[True], **keywords: Unpack[_Keywords],
) -> _WithLse: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: Mesh | None = None, *,
    return_attn_probs: bool, **keywords: Unpack[_Keywords],
) -> Tensor | _WithLse: ...  # fmt: skip
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor,
    mesh: Mesh | None = None,
    *, layout: str = "contiguous",
    softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    return_attn_probs: bool = False, learnable_sink: Tensor | None = None, attention_chunk: int = 0,
    sm_margin: int = 0, schedule: Schedule = "auto", check_values: bool = False,
) -> Tensor | _WithLse:  # fmt: skip
    """Computes `flash_attn_func` for sequences whose rows are spread over the ranks of a group.

    Output, log-sum-exp and gradients have the bits that one process computes for the whole sequence, for any number of
    ranks and either layout: no collective adds, and a head's bits do not depend on the other heads of its call. Each
    rank receives all rows of some KV heads and of their query heads, computes attention, and returns the rows
    (DeepSpeed-Ulysses, arXiv 2309.14509). Every rank of the group must make the same calls in the same order, in the
    backward too. Dropout and masks by key columns are not supported.

    With more ranks than KV heads, keys and values are gathered, queries stay, and dK and dV are carried from rank to
    rank in the order of one process. This form needs a schedule that adds in a fixed order and uses no clusters, and
    excludes softcap, slopes, sinks, and an attention_chunk without causal. If the ranks' chunks end within a tile of
    the kernels, or if the mask gives the ranks uneven work, rows first move to the rank that needs them, and results
    move back.

    A mesh of two dimensions combines both forms: heads are spread over the last dimension, and keys are gathered over
    the first, with the limits of gathered keys. Together, the ranks along the last dimension hold the rows of one rank
    of a sequence that is cut for the ranks along the first dimension: one chunk, or two chunks in zigzag.

    Args:
        q: (batch, this rank's rows of seqlen_q, heads, head_dim), bf16 or fp16. The rows are those of `rows_of_rank`,
            as `shard` cuts them. The device is the group's: CPU tensors for gloo, CUDA tensors for NCCL.
        k: (batch, this rank's rows of seqlen_k, kv_heads, head_dim), the dtype and device of q. The number of KV heads
            need not be a multiple of the number of ranks.
        v: (batch, this rank's rows of seqlen_k, kv_heads, value_head_dim), the dtype and device of q.
        mesh: a process group, or a DeviceMesh of one or two dimensions whose ranks ascend; None means all ranks. Rank
            (b, a) of a (B, A) mesh has the number b A + a for rows and in messages. A must not exceed the number of KV
            heads. A mesh with B or A of 1 acts like the group of its ranks.
        layout: the rows that each rank holds, one of `LAYOUTS`.
        softmax_scale: as in `flash_attn_func`, the same on every rank.
        causal: as in `flash_attn_func`, for the whole sequence, the same on every rank.
        window_size: as in `flash_attn_func`, for the whole sequence, the same on every rank.
        softcap: as in `flash_attn_func`, the same on every rank.
        alibi_slopes: as in `flash_attn_func`, of all heads, with the same values on every rank.
        learnable_sink: as in `flash_attn_func`, of all heads, with the same values on every rank. Every rank receives
            the whole gradient of the sinks; do not add the gradients up over the group.
        attention_chunk: as in `flash_attn_func`, for the whole sequence, the same on every rank.
        sm_margin: as in `flash_attn_func`, the same on every rank.
        schedule: as in `flash_attn_func`, for the whole sequence, the same on every rank.
        return_attn_probs: as in `flash_attn_func`.
        check_values: also check on the device that q, k, v and the gradients of the results are finite, and that
            slopes and sinks have the same bytes on every rank. The check waits for the GPU and changes no bits.

    Returns:
        out: (batch, this rank's rows of seqlen_q, heads, value_head_dim), like q. With return_attn_probs
        (out, softmax_lse, empty), with softmax_lse fp32 (batch, heads, this rank's rows of seqlen_q).

    Raises:
        NotImplementedError: `flash_attn_func` does not support an argument; the mesh has more than two dimensions; or,
            with more ranks than KV heads or a mesh of two dimensions, the call has a softcap, slopes, sinks,
            "order_free", or an attention_chunk without causal.
        TypeError: an argument has the wrong type; the message names the argument.
        ValueError: an argument is out of range; the message names the argument.
        RankError: another rank has different shapes, dtypes or arguments, has a wrong argument, died, or did not arrive
            within the timeout of the group. Every rank raises the error, in the backward too.
    """
    return _attention("context_parallel_attention", locals())


@overload
def context_parallel_varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, mesh: Mesh | None = None, *,
    return_attn_probs: Literal[False] = False, **keywords: Unpack[_OfPack],
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, mesh: Mesh | None = None, *,
    return_attn_probs: Literal[True], **keywords: Unpack[_OfPack],
) -> _WithLse: ...  # fmt: skip
@overload
def context_parallel_varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, mesh: Mesh | None = None, *,
    return_attn_probs: bool, **keywords: Unpack[_OfPack],
) -> Tensor | _WithLse: ...  # fmt: skip
def context_parallel_varlen_attention(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor,
    mesh: Mesh | None = None,
    *, layout: str = "contiguous",
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    return_attn_probs: bool = False, learnable_sink: Tensor | None = None, attention_chunk: int = 0,
    sm_margin: int = 0, schedule: Schedule = "auto", check_values: bool = False,
) -> Tensor | _WithLse:  # fmt: skip
    """Computes `flash_attn_varlen_func` for a batch whose rows are spread over the ranks of a group.

    The batch is cut as if it were one sequence, so one of its sequences may lie on one rank or on several. The mesh
    must have one dimension. With more ranks than KV heads, short sequences go to one rank each and long ones are cut
    for all ranks. For this the host reads the offsets, and so waits for the GPU.

    Args:
        q: (this rank's rows of total_q, heads, head_dim), bf16 or fp16.
        k: (this rank's rows of total_k, kv_heads, head_dim), the dtype and device of q.
        v: (this rank's rows of total_k, kv_heads, value_head_dim), the dtype and device of q.
        cu_seqlens_q: as in `flash_attn_varlen_func`, for the whole batch, with the same values on every rank.
            `check_values` compares the bytes of the offsets too.
        cu_seqlens_k: like cu_seqlens_q.
        max_seqlen_q: as in `flash_attn_varlen_func`, for the whole batch.
        max_seqlen_k: as in `flash_attn_varlen_func`, for the whole batch.
        seqused_q: as in `flash_attn_varlen_func`, for the whole batch, with the same values on every rank.
        seqused_k: like seqused_q.

    The other arguments and errors are those of `context_parallel_attention`. With more ranks than KV heads, invalid
    offsets or numbers of used rows raise a ValueError, and a RankError if they differ between ranks.

    Returns:
        out: (this rank's rows of total_q, heads, value_head_dim), like q. With return_attn_probs
        (out, softmax_lse, empty), with softmax_lse fp32 (heads, this rank's rows of total_q).
    """
    return _attention("context_parallel_varlen_attention", locals())


def _attention(name: str, given: dict[str, Any]) -> Any:
    """Runs a public function. `given` holds its arguments, with the names and in the order of its signature."""
    mesh = given.pop("mesh")
    of_rows, of_heads, pack = ({key: given.pop(key) for key in keys if key in given} for keys in _TENSORS)
    arguments = given
    ranks = ranks_of(mesh)
    channel = ranks.channel
    try:
        record = _record(name, ranks, of_rows, arguments, of_heads, pack)
    except Exception as error:
        channel.fail_together(name, error)
        raise
    records = channel.exchange(name, record)
    require_finite(channel, name, records)
    for key in record:
        if key not in ("rows", "values"):
            channel.require_same(key, [other[key] for other in records])
    of_rows = {key: x.resolve_neg() for key, x in of_rows.items()}  # because ranks send bytes
    split = _split(name, ranks, records, of_rows, arguments)
    call = _call(arguments, pack)
    _check_whole_call(split, of_rows, of_heads, call, bool(pack))
    attend: Callable[..., Any] = functools.partial(call, return_attn_probs=True)
    if ranks.parts is not None:
        split, of_rank = splits_of_mesh(split, ranks)
        options = gathered.checked_options(of_rank, of_rows, arguments, of_heads, "with a mesh of two dimensions")
        attend = functools.partial(gathered.attention, of_rank, options, None)
    elif channel.size > split.kv_heads:
        options = gathered.checked_options(split, of_rows, arguments, of_heads, "with more ranks than KV heads")
        found = _with_keys_gathered(name, split, options, of_rows, pack)
        return (*found, found[0].new_empty(0)) if arguments["return_attn_probs"] else found[0]

    tensors = [x[None] if pack else x for x in of_rows.values()]
    *tensors, sinks = RowsToHeads.apply(split, *tensors, of_heads["learnable_sink"])
    heads = split.heads_of_rank(split.channel.rank, of_keys=False)
    slopes = of_heads["alibi_slopes"]
    cut = {"alibi_slopes": None if slopes is None else slopes[..., slice(*heads)], "learnable_sink": sinks}
    if pack:
        tensors = [x[0] for x in tensors]
    out, lse, *_ = attend(*tensors, **{key: x for key, x in cut.items() if x is not None})
    # Heads after rows, as in out.
    results = [out, lse.transpose(-1, -2) if arguments["return_attn_probs"] else None]
    out, lse = HeadsToRows.apply(split, *(x[None] if pack and x is not None else x for x in results))
    if pack:
        out, lse = out[0], None if lse is None else lse[0]
    return out if lse is None else (out, lse.transpose(-1, -2).contiguous(), out.new_empty(0))


def _with_keys_gathered(
    name: str, split: Split, options: gathered.Options, of_rows: dict[str, Tensor], pack: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns the output and the log-sum-exp of this rank's rows."""
    if not pack:
        return gathered.attention(split, options, None, *of_rows.values())
    sequences = _sequences_of_pack(name, split, pack)
    out, lse = gathered.attention(split, options, sequences, *(x[None] for x in of_rows.values()))
    return out[0], lse[0]


def _sequences_of_pack(name: str, split: Split, pack: dict[str, Any]) -> tuple[Pair, ...]:
    """Returns the rows of each sequence after all ranks have agreed on them. Reads the offsets, so waits for the
    GPU."""
    channel = split.channel
    try:
        of_sides = [
            rows_of_sequences(side, pack[f"cu_seqlens_{side}"], pack[f"seqused_{side}"], rows)
            for side, rows in (("q", split.rows_q), ("k", split.rows_k))
        ]
    except ValueError as error:
        channel.fail_together(f"the offsets of {name}", error)
        raise
    pairs = tuple(Pair(Rows(q.start, q.stop), Rows(k.start, k.stop)) for q, k in zip(*of_sides, strict=True))
    records = channel.exchange(
        f"the offsets of {name}", {"sequences": hashlib.sha256(repr(pairs).encode()).hexdigest()}
    )
    channel.require_same("cu_seqlens and seqused", [record["sequences"] for record in records])
    return pairs


def _call(arguments: dict[str, Any], pack: dict[str, Any]) -> Any:
    """Returns the function of one process, bound to all arguments that are the same for every head."""
    ours = ("layout", "return_attn_probs", "check_values")
    keywords = {key: value for key, value in arguments.items() if key not in ours}
    return functools.partial(
        interface.flash_attn_varlen_func if pack else interface.flash_attn_func, **keywords, **pack
    )


def _record(
    name: str,
    ranks: Ranks,
    of_rows: dict[str, Tensor],
    arguments: dict[str, Any],
    of_heads: dict[str, Tensor | None],
    pack: dict[str, Any],
) -> dict[str, Any]:
    """Returns this rank's record of the call. Everything but `rows` and `values` must be the same on every rank."""
    given = {key: x for key, x in (of_heads | pack).items() if x is not None and not key.startswith("max_seqlen")}
    if pack and len(ranks.shape) > 1:
        raise NotImplementedError(
            f"mesh must have one dimension for a variable-length batch, got {len(ranks.shape)} of {ranks.shape}"
        )
    checks.check_tensors(of_rows | given)
    dtensors.reject(of_rows | given)
    transforms.reject(name, (of_rows | given).values())
    check_layout(arguments["layout"])
    for key in ("max_seqlen_q", "max_seqlen_k"):  # which may differ between ranks
        if key in pack:
            checks.check_max_seqlen(key, pack[key])
    rows_dim = 0 if pack else 1
    for key, x in of_rows.items():
        if x.dim() != rows_dim + 3:
            form = "(rows, heads, head_dim)" if pack else "(batch, rows, heads, head_dim)"
            raise ValueError(f"{key} must have shape {form}, got {tuple(x.shape)}")
    arguments |= _canonical(**arguments)
    record: dict[str, Any] = {"dash_attn": __version__, "mesh": list(ranks.shape)}
    for key, x in of_rows.items():
        shape = ["rows" if dim == rows_dim else size for dim, size in enumerate(x.shape)]
        record[key] = [*shape, str(x.dtype), x.device.type, _needs_gradient(x)]
    for key, x in (of_heads | pack).items():
        record[key] = None
        if isinstance(x, Tensor) and key in given:
            record[key] = [*x.shape, str(x.dtype), x.device.type, _needs_gradient(x)]
    record |= {key: repr(value)[:200] for key, value in arguments.items()}
    record["rows"] = [of_rows["q"].shape[rows_dim], of_rows["k"].shape[rows_dim]]
    if arguments["check_values"]:
        record["values"] = not_finite(of_rows)
        record |= {f"the bytes of {key}": int(fingerprint(x.detach())) for key, x in given.items()}
    return record


def _canonical(
    layout, softmax_scale, causal, window_size, softcap, return_attn_probs, attention_chunk, sm_margin, schedule,
    check_values,
) -> dict[str, Any]:  # fmt: skip
    """Returns the arguments as `flash_attn_func` takes them: True for 1, (5, 5) for [5, 5], a float for a numpy scalar.

    Raises:
        TypeError: an argument has a type that `flash_attn_func` refuses.
        ValueError: `flash_attn_func` refuses an argument for a reason that needs neither a GPU nor a shape.
    """
    checks.check_schedule(schedule)
    return {
        "layout": str(layout),
        "softmax_scale": None if softmax_scale is None else checks.as_number("softmax_scale", softmax_scale),
        "causal": checks.as_flag("causal", causal),
        "window_size": tuple(map(int, checks.as_window(window_size))),
        "softcap": checks.as_softcap(softcap),
        "return_attn_probs": checks.as_flag("return_attn_probs", return_attn_probs),
        "attention_chunk": int(checks.as_attention_chunk(attention_chunk)),
        "sm_margin": checks.as_sm_margin(sm_margin),
        "schedule": str(schedule),
        "check_values": checks.as_flag("check_values", check_values),
    }


def _needs_gradient(x: Tensor) -> str:
    return "requires a gradient" if x.requires_grad and torch.is_grad_enabled() else "requires no gradient"


def _split(
    name: str,
    ranks: Ranks,
    records: list[dict[str, Any]],
    of_rows: dict[str, Tensor],
    arguments: dict[str, Any],
) -> Split:
    """Returns how the ranks divide the call. Raises the same errors on all ranks."""
    channel, layout = ranks.channel, arguments["layout"]
    rows_q, rows_k = (_total_rows(channel, records, side, layout) for side in ("q", "k"))
    heads, kv_heads = of_rows["q"].shape[-2], of_rows["k"].shape[-2]
    if heads % kv_heads:
        raise ValueError(f"k must have a number of heads that divides the {heads} heads of q, got {kv_heads}")
    if len(ranks.shape) > 1 and ranks.shape[-1] > kv_heads:
        raise ValueError(
            f"mesh must have at most as many ranks in its last dimension as k has heads, {kv_heads}, got {ranks.shape}"
        )
    return Split(channel, name, layout, rows_q, rows_k, heads, kv_heads, arguments["check_values"])


def _total_rows(channel: Channel, records: list[dict[str, Any]], side: str, layout: str) -> int:
    counts = [record["rows"][side == "k"] for record in records]
    total = sum(counts)
    expected = [sum(map(len, rows_of_rank(total, rank, channel.size, layout))) for rank in range(channel.size)]
    if counts != expected:
        usual = max(counts, key=counts.count)
        unusual = [rank for rank, count in enumerate(counts) if count != usual]
        wrong = unusual or [rank for rank in range(channel.size) if counts[rank] != expected[rank]]
        raise RankError(
            f"{side} must have the rows that dash_attn.distributed.rows_of_rank gives for every rank, which are "
            f"{expected} of {total} in the {layout} layout, got {counts}: see {channel.name(wrong)}",
            tuple(wrong),
        )
    return total


def _check_whole_call(
    split: Split, of_rows: dict[str, Tensor], of_heads: dict[str, Tensor | None], call: Any, is_pack: bool
) -> None:
    """Runs the checks of one process on tensors without data. The ranks have agreed on these, so all raise or none."""
    rows_dim = 0 if is_pack else 1
    tensors = []
    for key, x in of_rows.items():
        shape = list(x.shape)
        shape[rows_dim] = split.rows_q if key == "q" else split.rows_k
        tensors.append(_without_data(x, shape))
    shared = {key: None if x is None else _without_data(x, x.shape) for key, x in of_heads.items()}
    if (slopes := of_heads["alibi_slopes"]) is not None and slopes.requires_grad:
        shared["alibi_slopes"] = _without_data(slopes, slopes.shape).requires_grad_()  # which raises an error
    pack = {k: _without_data(x, x.shape) for k, x in call.keywords.items() if is_pack and isinstance(x, Tensor)}
    call(*tensors, **shared, **pack)


def _without_data(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns a tensor without a gradient, so that nothing is saved for a backward and no caller's hook sees it."""
    return torch.empty(shape, dtype=x.dtype, device="meta")

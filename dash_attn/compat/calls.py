"""What the private functions of both FlashAttentions have in common: they call the ops with their arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks, dtensors, transforms
from ..packs import check_lengths, sequence_of_rows

ROWS_OF_A_TILE = 128


class Lengths(NamedTuple):
    """The offsets and lengths of a variable-length batch, as in `dash_attn.ops`. A dense batch has none of them."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None


class Pack(NamedTuple):
    """A call that FlashAttention-3 accepts, in a form that the ops accept: dense or variable-length on both sides."""

    lengths: Lengths
    queries: tuple[int, int] | None
    """(batch, seqlen_q) if the queries are dense and become rows of a variable-length batch."""
    keys: tuple[int, int] | None

    @property
    def is_as_given(self) -> bool:
        return self.queries is None and self.keys is None

    def of_queries(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1) if self.queries else x

    def of_keys(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1) if self.keys else x

    def of_lse(self, softmax_lse: Tensor) -> Tensor:
        return softmax_lse.transpose(0, 1).flatten(1) if self.queries else softmax_lse

    def as_queries(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, self.queries) if self.queries else rows

    def as_keys(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, self.keys) if self.keys else rows

    def as_lse(self, rows: Tensor) -> Tensor:
        return rows.unflatten(1, self.queries).transpose(0, 1).contiguous() if self.queries else rows


def as_pack(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> Pack:
    """Turns a dense side into rows of a variable-length batch if it is partly unused or the other side is such a batch.

    Shapes that the rows no longer show are checked here; the op checks all others.
    """
    check_plain_tensors({"q": q, "k": k, "v": v} | _given(lengths._asdict()))
    cu_seqlens_q, cu_seqlens_k, *used = lengths
    if all(x is None for x in lengths) or (cu_seqlens_q is not None and cu_seqlens_k is not None):
        return Pack(lengths, None, None)
    sides: list[tuple[tuple[int, int] | None, Tensor]] = []
    for name, x, cu_seqlens in (("q", q, cu_seqlens_q), ("k", k, cu_seqlens_k)):
        if cu_seqlens is not None:
            sides.append((None, cu_seqlens))
            continue
        for own_name, own in {"q": {"q": q}, "k": {"k": k, "v": v}}[name].items():
            if own.dim() != 4:
                shape = f"(batch, seqlen, heads, head_dim) without cu_seqlens_{name}"
                raise ValueError(f"{own_name} must have shape {shape}, got {tuple(own.shape)}")
        batch, seqlen = x.shape[:2]
        sides.append(((batch, seqlen), torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seqlen))
    (queries, starts_q), (keys, starts_k) = sides
    if keys and v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must have the shape of k except for the head_dim, {tuple(k.shape)}, got {tuple(v.shape)}")
    if keys and starts_q.shape != starts_k.shape:
        of_queries = "q" if queries else f"cu_seqlens_q of shape {tuple(starts_q.shape)}"
        raise ValueError(f"k must have the batch size of {of_queries}, got {tuple(k.shape)}")
    return Pack(Lengths(starts_q, starts_k, *used), queries, keys)


def check_around_pack(
    pack: Pack,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: dict[str, Tensor],
    softmax_lse: Tensor,
    gradients: dict[str, Tensor | None],
) -> None:
    """Checks the tensors of a backward whose dense tensors become rows, as the op checks tensors that it is given.

    Args:
        read: out and its gradient.
        gradients: dq, dk and dv.
    """
    written = _given(gradients)
    check_plain_tensors(read | {"softmax_lse": softmax_lse} | written)
    out_shape = torch.Size((*q.shape[:-1], *v.shape[-1:]))
    for name, x in read.items():
        _check_like(name, x, "the shape of q with the head_dim of v", out_shape, "q", q)
    for name, x in written.items():
        like_name = name.removeprefix("d")
        like = {"q": q, "k": k, "v": v}[like_name]
        _check_like(name, x, f"the shape of {like_name}", like.shape, like_name, like)
    if pack.queries:
        lse_shape = (q.shape[0], q.shape[2], q.shape[1])
        if softmax_lse.shape != lse_shape:
            what = f"shape (batch, heads, seqlen_q) = {lse_shape}"
            raise ValueError(f"softmax_lse must have {what}, got {tuple(softmax_lse.shape)}")
    checks.check_written(written, read | {"q": q, "k": k, "v": v, "softmax_lse": softmax_lse})


def _check_like(name: str, x: Tensor, what: str, shape: torch.Size, like_name: str, like: Tensor) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must have {what}, {tuple(shape)}, got {tuple(x.shape)}")
    if x.dtype != like.dtype:
        raise TypeError(f"{name} must have the dtype of {like_name}, {like.dtype}, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on the device of {like_name}, {like.device}, got {x.device}")


def minus_infinity_without_keys(softmax_lse: Tensor) -> Tensor:
    """Returns the log-sum-exp of FlashAttention-3: -inf, the logarithm of an empty sum, if a query sees no key.

    FlashAttention-2's functions and ours return +inf there, which a merge of results over parts of the keys would take
    for the largest sum.
    """
    return softmax_lse.nan_to_num(nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)


def check_plain_tensors(named: dict[str, Tensor]) -> None:
    checks.check_tensors(named)
    dtensors.reject(named)


def check_max_seqlens(**max_seqlens: int | Tensor | None) -> None:
    for name, value in max_seqlens.items():
        if value is not None:
            checks.check_max_seqlen(name, value)


def forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths,
    *, softmax_scale: float | None, causal: bool,
    window_size: tuple[int | None, int | None],
    attention_chunk: int = 0, softcap: float = 0.0, alibi_slopes: Tensor | None = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the output and the log-sum-exp, which is -inf if a query sees no key."""
    check_plain_tensors({"q": q, "k": k, "v": v} | _given({**lengths._asdict(), "alibi_slopes": alibi_slopes}))
    if checks.CHECKS_VALUES:
        check_lengths({"q": q, "k": k}, lengths._asdict())
    op = torch.ops.dash_attn.attention.default
    out, softmax_lse = (transforms.transformed(op) if transforms.is_active() else op)(
        q, k, v, _number("softmax_scale", softmax_scale), checks.as_flag("causal", causal), "auto",
        checks.as_sm_margin(sm_margin), *checks.as_window(window_size), checks.as_attention_chunk(attention_chunk),
        *lengths, **checks.as_scores(softcap, alibi_slopes, None, None),
    )  # fmt: skip
    return out, minus_infinity_without_keys(softmax_lse)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, lengths: Lengths,
    *, softmax_scale: float | None, causal: bool,
    window_size: tuple[int | None, int | None],
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Writes dq, dk and dv, allocating those that are None, and returns them together with `row_sums`."""
    tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": softmax_lse}
    optional = {"dq": dq, "dk": dk, "dv": dv, **lengths._asdict(), "alibi_slopes": alibi_slopes}
    check_plain_tensors(tensors | _given(optional))
    if checks.CHECKS_VALUES:
        check_lengths({"q": q, "k": k}, lengths._asdict())
    dq, dk, dv = (torch.empty_like(x) if dx is None else dx for x, dx in ((q, dq), (k, dk), (v, dv)))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else _number("softmax_scale", softmax_scale)
    scores = checks.as_scores(softcap, alibi_slopes, None, None)
    torch.ops.dash_attn.backward.default(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, *lengths, scale, checks.as_flag("causal", causal),
        *checks.as_window(window_size), 0, "auto", checks.as_sm_margin(sm_margin), **scores,
    )  # fmt: skip
    return dq, dk, dv, row_sums(dout, out, lengths.cu_seqlens_q)


@torch.no_grad()
def row_sums(dout: Tensor, out: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """Computes D = rowsum(dout * out) in fp32, in the layout of FlashAttention-2's `softmax_d`, with zeros elsewhere.

    For a dense batch: (batch, heads, seqlen_q rounded up to a multiple of 128). For a variable-length batch:
    (heads, total_q + 128 batch), with row i of sequence b at cu_seqlens_q[b] + 128 b + i. The kernels compute their own
    D; this one takes another pass over dout and out, only for the caller.
    """
    # Adding to a dimensioned fp32 zero computes the product in fp32 without fp32 copies of dout and out.
    zero = torch.zeros((1,) * dout.dim(), dtype=torch.float32, device=dout.device)
    d = torch.addcmul(zero, dout, out).sum(dim=-1).transpose(-1, -2)
    if cu_seqlens_q is None:
        return torch.nn.functional.pad(d, (0, -d.shape[-1] % ROWS_OF_A_TILE))
    total, batch = d.shape[-1], cu_seqlens_q.shape[0] - 1
    rows = torch.arange(total, device=d.device) + ROWS_OF_A_TILE * sequence_of_rows(cu_seqlens_q, total)
    return d.new_zeros(d.shape[0], total + ROWS_OF_A_TILE * batch).index_copy(1, rows, d)


def _given(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if x is not None}


def _number(name: str, number: float | None) -> float | None:
    return None if number is None else checks.as_number(name, number)

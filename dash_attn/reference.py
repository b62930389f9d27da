"""Attention and its gradients tile by tile in plain PyTorch, in the kernel's order, on any device.

CPU tensors are computed by this reference, and the tests compare orders with it. Per (batch, query head), with
c = softmax_scale (FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2):

    S = c Q K^T      P = exp(S - LSE)      O = P V      dP = dO V^T      D = rowsum(dO * O)      dS = P * (dP - D)
    dV = P^T dO      dK = c dS^T Q         dQ = c dS K

With a soft cap t, S = t tanh(c Q K^T / t), and dS has the factor 1 - (S / t)^2. With ALiBi's slope m,
S_ij = c q_i . k_j - m |i + seqlen_k - seqlen_q - j|. A sink s adds e^s to the sum whose logarithm is LSE; its gradient
is ds = -sum_i e^(s - LSE_i) D_i. With a gradient dLSE of the log-sum-exp, D = rowsum(dO * O) - dLSE.

Dropout of probability p with the mask Z (1 where an element is kept) is FlashAttention-2's: LSE is the one without
dropout, and with r = 1 / (1 - p)

    O = r (P * Z) V      dV = r (P * Z)^T dO      dS = P * (r Z * dP - D)

D is rowsum(dO * O) of this O. The tiles do not contain r: they hold dS / r = P * (Z * dP - D / r), and the finished
sums are multiplied by r.

The backward rounds where the kernel rounds (P and dS to the inputs' dtype before they enter a product, sums in fp32,
one rounding at the end). It adds tile by tile in the order it is given, or in the fixed point of
`dash_attn.order_free`, so a change of order affects the last bits as it does on the GPU. The reference is not bit-equal
to the kernel, because the order within a tile's product is that of `dash_attn.fixed_order`, but it keeps the same
contract (docs/contract.md).

float64 inputs are computed in float64 throughout. The matrix library computes their products, outside of the contract.
"""

import functools
from typing import NamedTuple

import torch

from . import _schedule as _compiled
from . import fixed_order, masks, order_free
from .tile_order import TileOrder, steps

# The number of query rows whose scores the forward holds at a time.
FORWARD_ROWS = 128
# Keys per block of the forward's sums. Blocks start at key 0, so that a row's order of sums depends on no other row.
FORWARD_KEYS = 128


class GradientSums(NamedTuple):
    """The unfinished sums of a backward, without the softmax scale; fp32, or float64 for float64 inputs."""

    dq: torch.Tensor
    """(batch * kv_heads, heads // kv_heads, seqlen_q, head_dim)"""
    dk: torch.Tensor
    """(batch * kv_heads, seqlen_k, head_dim)"""
    dv: torch.Tensor
    """(batch * kv_heads, seqlen_k, value_head_dim)"""


class Chunk(NamedTuple):
    """Some of the queries and keys of a sequence."""

    seqlen_q: int
    seqlen_k: int
    """The lengths of the whole sequence."""
    first_query: int
    first_key: int


def _without_autocast(function):
    """Disables autocast, which would turn the fp32 products into 16-bit ones."""

    @functools.wraps(function)
    def wrapped(tensor, *args, **kwargs):
        with torch.autocast(tensor.device.type, enabled=False):
            return function(tensor, *args, **kwargs)

    return wrapped


@_without_autocast
def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    *, softmax_scale: float, causal: bool,
    window: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None, keep: torch.Tensor | None = None,
    dropout_p: float = 0.0, startend_row_indices: torch.Tensor | None = None, max_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Computes the output and the log-sum-exp: LSE = log(e^sink + rowsum(exp(S))), O = exp(S - LSE) V.

    Args:
        q: (batch, seqlen_q, heads, head_dim), floating point.
        k: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads.
        v: (batch, seqlen_k, kv_heads, value_head_dim).
        softmax_scale: c, any finite number.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q (the last query sees the last key).
        window: (left, right): with p = i + seqlen_k - seqlen_q, query i sees the keys p - left ... p + right; a
            negative side is unbounded.
        attention_chunk: query i sees the keys j with j // attention_chunk = p // attention_chunk; 0: all.
        softcap: t; 0 for no soft cap.
        alibi_slopes: (heads,) or (batch, heads).
        sinks: (heads,); -inf is no sink.
        keep: bool (batch, heads, seqlen_q, seqlen_k): the elements of P that dropout keeps, after rounding. None: all.
        dropout_p: p, from 0 to below 1: kept elements are divided by 1 - p.
        startend_row_indices: int32 (batch, 1 or kv_heads, seqlen_k, n): the rows that do not see each key, in addition
            (`dash_attn.masks`). None: all rows see the key.
        max_logits: (batch, heads), filled with -inf, like softmax_lse. The call raises each element to the largest
            score of its head that a query sees, or sets the element to NaN if a score is NaN or +inf.

    Returns:
        out: (batch, seqlen_q, heads, value_head_dim), like q. Zero if a query sees no key.
        softmax_lse: (batch, heads, seqlen_q), fp32 (float64 for float64 inputs), natural logarithm. If a query sees no
            key, its sink, or +inf without a sink, as in FlashAttention-2.
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    q_heads, k_heads, v_heads = _by_kv_head(q, kv_heads), _by_kv_head(k, kv_heads), _by_kv_head(v, kv_heads)
    score_type = _ScoreType(softcap, _of_rows(alibi_slopes, q_heads, batch), seqlen_k - seqlen_q)
    sink = _of_rows(sinks, q_heads, batch)
    keep = _of_groups(keep, kv_heads)
    columns = _of_kv_heads(startend_row_indices, batch, kv_heads)
    out = q_heads.new_zeros(*q_heads.shape[:-1], v.shape[-1])
    lse = q_heads.new_full(q_heads.shape[:-1], torch.inf)
    if sink is not None:
        lse = sink.masked_fill(sink == -torch.inf, torch.inf).expand_as(out[..., :1]).squeeze(-1).clone()
    for start in range(0, seqlen_q if seqlen_k else 0, FORWARD_ROWS):
        end = min(start + FORWARD_ROWS, seqlen_q)
        seen = _visible_keys(seqlen_q, seqlen_k, causal, window, attention_chunk, start, end)
        keys = slice(seen[0][0], seen[-1][1])  # neither end decreases from one query to the next
        if keys.start == keys.stop:
            continue
        keys = slice(keys.start // FORWARD_KEYS * FORWARD_KEYS, keys.stop)
        rows = q_heads[:, :, start:end]
        products = fixed_order.matmul(rows.flatten(1, 2), k_heads[:, 0, keys].mT)
        products = products.unflatten(1, rows.shape[1:3]).mul_(softmax_scale)
        hidden = _hidden(seen, keys.start, keys.stop, q.device)
        if columns is not None:
            hidden = hidden | masks.hidden_rows(columns[:, keys], start, end, causal=causal)
        scores = score_type.scores(products, slice(None), start, keys.start)
        scores.masked_fill_(hidden.unsqueeze(-3), -torch.inf)
        largest = scores.amax(dim=-1, keepdim=True)
        if max_logits is not None:
            of_heads = largest.amax(dim=(-2, -1)).view_as(max_logits)
            torch.maximum(max_logits, of_heads.masked_fill(of_heads == torch.inf, torch.nan), out=max_logits)
        largest.masked_fill_(largest == -torch.inf, 0.0)
        p = scores.sub_(largest).exp_()
        total = _over_keys(p.flatten(1, 2), p.new_ones(p.shape[0], p.shape[3], 1)).view_as(largest)
        p = _rounded(p, q.dtype)
        if keep is not None:
            p.masked_fill_(~keep[:, :, start:end, keys], 0.0)
        weighted = _weighted_values(p.flatten(1, 2), v_heads[:, 0, keys], hidden)
        no_key = total == 0
        lse_rows = largest + total.log()
        if sink is not None:
            total = total + (sink - largest).exp()
            lse_rows = _log_add_exp(lse_rows, sink)
        total = total * (1 - dropout_p)
        out[:, :, start:end] = (weighted.unflatten(1, rows.shape[1:3]) / total).masked_fill_(no_key, 0.0)
        # log(0), for a query with neither a key nor a sink.
        lse[:, :, start:end] = lse_rows.masked_fill_(lse_rows == -torch.inf, torch.inf).squeeze(-1)
    return _by_head(out, batch).to(q.dtype), lse.reshape(batch, heads, seqlen_q)


@_without_autocast
def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    softmax_lse: torch.Tensor,
    *, softmax_scale: float, causal: bool,
    window: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, dsoftmax_lse: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    dropout_p: float = 0.0, startend_row_indices: torch.Tensor | None = None,
    order: TileOrder,
    sums: GradientSums | None = None, chunk: Chunk | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Computes the gradients of sum(dout * out) + sum(dsoftmax_lse * softmax_lse), except those of the sinks.

    Each KV tile sums its dK and dV over its visits and over the query heads of a split (together or one after the
    other, by `order.heads_together`), and then over the splits. A query tile sums dQ over its KV tiles in the order of
    `order.adds`. `sink_gradient` computes the gradients of the sinks.

    Args:
        dout, out: (batch, seqlen_q, heads, value_head_dim), like q.
        q: (batch, seqlen_q, heads, head_dim), floating point.
        k: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads.
        v: (batch, seqlen_k, kv_heads, value_head_dim).
        softmax_lse: (batch, heads, seqlen_q), natural logarithm, including sinks; +inf or -inf if a query sees no key
            and has no sink.
        softmax_scale: c, any finite number.
        causal, window, attention_chunk: the mask, as in `forward`.
        softcap, alibi_slopes: as in `forward`.
        dsoftmax_lse: like softmax_lse, ignored where softmax_lse is infinite; None is 0.
        keep, dropout_p, startend_row_indices: as in `forward`, the same as for out. An order-free order has
            neither keep nor startend_row_indices.
        order: the result of `tile_order.tile_order` for these lengths and this mask.
        sums: the sums to add to, with an order that has one split and is not order-free; neither scaled nor rounded.
        chunk: the position of the queries and keys in the sequence that has the mask, if they are only a part of it;
            with `sums`, and without slopes.

    Returns:
        dq, dk, dv: like q, k, v; or `sums`.

    Raises:
        ValueError: the two orders of `order` wait for each other in a cycle, or disagree on the tiles.
    """
    batch, seqlen_q = q.shape[:2]
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    q_heads, k_heads, v_heads, dout_heads, out_heads = (_by_kv_head(t, kv_heads) for t in (q, k, v, dout, out))
    k_heads, v_heads = k_heads[:, 0], v_heads[:, 0]
    d = _d(dout_heads, out_heads, softmax_lse, dsoftmax_lse) * (1 - dropout_p)
    keep = _of_groups(keep, kv_heads)
    columns = _of_kv_heads(startend_row_indices, batch, kv_heads)
    if order.order_free and (keep is not None or columns is not None):
        beside = "startend_row_indices" if keep is None else "keep"
        raise ValueError(f"order must not be order-free with {beside}, got an order-free one")
    score_type = _ScoreType(softcap, _of_rows(alibi_slopes, q_heads, batch), seqlen_k - seqlen_q)
    # exp(S - inf) is 0 for the rows that see no key. Either sign may mark such rows.
    lse = softmax_lse.masked_fill(softmax_lse == -torch.inf, torch.inf).to(d.dtype).reshape(d.shape)

    whole = chunk or Chunk(seqlen_q, seqlen_k, 0, 0)
    mask = (whole.seqlen_q, whole.seqlen_k, causal, window, attention_chunk)
    dq, dk, dv = torch.zeros_like(q_heads), torch.zeros_like(k_heads), torch.zeros_like(v_heads)
    units = None
    if order.order_free and d.dtype == torch.float32:
        seen = torch.tensor(_visible_keys(*mask, 0, seqlen_q), device=q.device)
        scales = order_free.row_scales(
            k_heads, v_heads, dout_heads, d, lse, seen=seen, tile_k=order.tile_k, dtype=q.dtype
        )
        units = order_free.Accumulator(scales, dq)
    dk_of_split, dv_of_split = torch.zeros_like(dk), torch.zeros_like(dv)
    if sums is not None:
        dq, dk_of_split, dv_of_split = sums
    for head, kv_tile, q_tile, ends_split in steps(order, q_heads.shape[1]):
        rows = slice(q_tile * order.tile_q, min((q_tile + 1) * order.tile_q, seqlen_q))
        keys = slice(kv_tile * order.tile_k, min((kv_tile + 1) * order.tile_k, seqlen_k))
        q_rows, dout_rows = (x[:, head, rows].contiguous() for x in (q_heads, dout_heads))
        products = fixed_order.matmul(q_rows, k_heads[:, keys].mT).mul_(softmax_scale)
        scores = score_type.scores(products, head, rows.start, keys.start)
        slope_of_cap = score_type.derivative(scores)
        ends = (whole.first_query + rows.start, whole.first_query + rows.stop)
        seen = _visible_keys(*mask, *ends)
        hidden = _hidden(seen, whole.first_key + keys.start, whole.first_key + keys.stop, q.device)
        if columns is not None:
            hidden = hidden | masks.hidden_rows(columns[:, keys], *ends, causal=causal)
        p = scores.masked_fill_(hidden, -torch.inf).sub_(lse[:, head, rows]).exp_()
        dp = fixed_order.matmul(dout_rows, v_heads[:, keys].mT)
        dropped = None if keep is None else ~keep[:, head, rows, keys]
        if dropped is not None:
            dp.masked_fill_(dropped, 0.0)
        ds = dp.sub_(d[:, head, rows]).mul_(p)
        if slope_of_cap is not None:
            ds.mul_(slope_of_cap)
        p, ds = _rounded(p, q.dtype), _rounded(ds, q.dtype)
        if dropped is not None:
            p.masked_fill_(dropped, 0.0)
        of_values, of_keys = fixed_order.matmul(p.mT, dout_rows), fixed_order.matmul(ds.mT, q_rows)
        partial = fixed_order.matmul(ds, k_heads[:, keys])
        if columns is not None:
            # Of a tile that one head sees and another does not, what is not finite reaches only the first.
            sees_nothing = hidden.flatten(1).all(dim=1)[:, None, None]
            for x in (of_values, of_keys, partial):
                x.masked_fill_(sees_nothing, 0.0)
        dv_of_split[:, keys] += of_values
        dk_of_split[:, keys] += of_keys
        if units is None:
            dq[:, head, rows] += partial
        else:
            units.add(head, rows, partial)
        if ends_split and sums is None:
            for total, of_split in ((dk, dk_of_split), (dv, dv_of_split)):
                total += of_split
                of_split.zero_()
    if sums is not None:
        return sums
    if units is not None:
        dq = units.result()
    if keep is not None:
        dv.div_(1 - dropout_p)
        softmax_scale /= 1 - dropout_p
    dq, dk = dq.mul_(softmax_scale), dk.mul_(softmax_scale)
    return tuple(_by_head(t, batch).to(q.dtype) for t in (dq, dk.unsqueeze(1), dv.unsqueeze(1)))


@_without_autocast
def signed_probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    softmax_lse: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    keep: torch.Tensor,
) -> torch.Tensor:
    """Computes P, (batch, heads, seqlen_q, seqlen_k) like q, with a negative sign for the elements that dropout drops.

    Visible elements have a nonzero magnitude, so that every sign is defined. Hidden elements are 0.

    Args:
        q, k, softmax_scale, causal, window, attention_chunk, softcap, alibi_slopes, keep: as in `forward`.
        softmax_lse: (batch, heads, seqlen_q), from `forward`.
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    if seqlen_q == 0 or seqlen_k == 0:
        return q.new_zeros(batch, heads, seqlen_q, seqlen_k)
    q_heads, k_heads = _by_kv_head(q, kv_heads), _by_kv_head(k, kv_heads)
    score_type = _ScoreType(softcap, _of_rows(alibi_slopes, q_heads, batch), seqlen_k - seqlen_q)
    products = fixed_order.matmul(q_heads.flatten(1, 2), k_heads[:, 0].mT).unflatten(1, q_heads.shape[1:3])
    scores = score_type.scores(products.mul_(softmax_scale), slice(None), 0, 0)
    p = scores.sub_(softmax_lse.reshape(*scores.shape[:3], 1)).exp_().clamp_(min=torch.finfo(q.dtype).tiny)
    p = torch.where(_of_groups(keep, kv_heads), p, -p)
    seen = _visible_keys(seqlen_q, seqlen_k, causal, window, attention_chunk, 0, seqlen_q)
    p.masked_fill_(_hidden(seen, 0, seqlen_k, q.device), 0.0)
    return p.to(q.dtype).reshape(batch, heads, seqlen_q, seqlen_k)


@_without_autocast
def sink_gradient(
    dout: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    sinks: torch.Tensor,
    dsoftmax_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the gradient of the sinks, (batch, heads): -sum_i e^(s - LSE_i) (D_i - dLSE_i) per sequence, by a tree.

    The tree adds neighbors, then neighboring sums, so that the bits of a sequence do not depend on its position. The
    caller adds the sequences in their order.

    Args:
        dout, out: (batch, seqlen_q, heads, value_head_dim).
        softmax_lse, dsoftmax_lse: (batch, heads, seqlen_q), as in `backward`.
        sinks: (heads,).
    """
    dout, out = (_by_kv_head(x, x.shape[2]) for x in (dout, out))
    d = _d(dout, out, softmax_lse, dsoftmax_lse).view_as(softmax_lse)
    weight = (sinks[:, None] - softmax_lse).exp()
    terms = torch.where(softmax_lse.isinf(), 0.0, -weight * d)
    while terms.shape[-1] > 1:
        terms = torch.nn.functional.pad(terms, (0, terms.shape[-1] % 2))
        terms = terms[..., 0::2] + terms[..., 1::2]
    return terms.sum(dim=-1)


class _ScoreType(NamedTuple):
    """How scores are computed from products c Q K^T."""

    softcap: float
    slopes: torch.Tensor | None
    """(batch * kv_heads, group, 1, 1)."""
    own_key_of_first_query: int

    def scores(self, products, head, first_query, first_key):
        """`products`: (batch * kv_heads, *heads, queries, keys) of query head `head` of the groups; overwritten."""
        if self.softcap:
            return products.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.slopes is None:
            return products
        own = torch.arange(products.shape[-2], device=products.device) + first_query + self.own_key_of_first_query
        keys = torch.arange(products.shape[-1], device=products.device) + first_key
        return products.sub_(self.slopes[:, head] * (own[:, None] - keys).abs())

    def derivative(self, scores):
        """Returns the derivative of scores with respect to products; None if it is 1."""
        return 1 - (scores / self.softcap).square() if self.softcap else None


def _of_rows(of_heads, like, batch):
    """(heads,) or (batch, heads) -> (batch * kv_heads, group, 1, 1) in the dtype of `like`."""
    if of_heads is None:
        return None
    heads = of_heads.shape[-1]
    return of_heads.to(like.dtype).expand(batch, heads).reshape(*like.shape[:2], 1, 1)


def _of_groups(of_heads, kv_heads):
    """(batch, heads, ...) -> (batch * kv_heads, group, ...)."""
    return None if of_heads is None else of_heads.unflatten(1, (kv_heads, -1)).flatten(0, 1)


def _of_kv_heads(startend_row_indices, batch, kv_heads):
    """(batch, 1 or kv_heads, seqlen_k, n) -> (batch * kv_heads, seqlen_k, n)."""
    if startend_row_indices is None:
        return None
    return startend_row_indices.expand(batch, kv_heads, -1, -1).flatten(0, 1)


def _d(dout_heads, out_heads, softmax_lse, dsoftmax_lse):
    """Returns rowsum(dO * O) - dLSE, with a last dimension of 1."""
    d = (dout_heads * out_heads).sum(dim=-1, keepdim=True)
    if dsoftmax_lse is None:
        return d
    return d - torch.where(softmax_lse.isinf(), 0.0, dsoftmax_lse).to(d.dtype).reshape(d.shape)


def _weighted_values(p, v, hidden):
    """Returns P V. A non-finite value affects only the rows that see its key, although 0 times the value is not 0."""
    finite = v.isfinite()
    if finite.all():
        return _over_keys(p, v)
    seen = torch.cat([(~hidden).to(p.dtype)] * (p.shape[1] // hidden.shape[-2]), dim=-2)
    spoilt = seen @ (~finite).to(p.dtype)
    return _over_keys(p, v.masked_fill(~finite, 0.0)).masked_fill_(spoilt > 0, torch.nan)


def _over_keys(p, values):
    """Returns P times `values`, (batch * kv_heads, keys, columns), summed over blocks of keys in ascending order."""
    blocks = (slice(first, first + FORWARD_KEYS) for first in range(0, p.shape[2], FORWARD_KEYS))
    # The sum starts at 0, which turns -0 into 0, as hidden keys after the visible ones would.
    return sum(fixed_order.matmul(p[:, :, keys], values[:, keys]) for keys in blocks)


def _log_add_exp(a, b):
    """Returns log(e^a + e^b). The bits of torch.logaddexp depend on the position of an element in its tensor."""
    larger, smaller = torch.maximum(a, b), torch.minimum(a, b)
    return larger + (smaller - larger.masked_fill(larger.isinf(), 0.0)).exp().log1p()


def _by_kv_head(tensor, kv_heads):
    """(batch, seqlen, heads, head_dim) -> (batch * kv_heads, group, seqlen, head_dim) in the sums' dtype."""
    tensor = tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    return tensor.transpose(1, 2).unflatten(1, (kv_heads, -1)).flatten(0, 1).contiguous()


def _by_head(tensor, batch):
    """Inverts `_by_kv_head`, except for the dtype."""
    tensor = tensor.unflatten(0, (batch, -1)).flatten(1, 2).transpose(1, 2)
    return tensor.clone(memory_format=torch.contiguous_format)


def _rounded(tensor, dtype):
    return tensor.to(dtype).to(tensor.dtype)


@functools.lru_cache(maxsize=1024)
def _visible_keys(seqlen_q, seqlen_k, causal, window, attention_chunk, first_query, end_query):
    """Returns the (first, end) of the keys that each query of a tile sees, from the mask that the kernels compile."""
    mask = {"causal": causal, "window": window, "attention_chunk": attention_chunk}
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    return tuple(_compiled.visible_keys(**mask, **lengths, first_query=first_query, end_query=end_query))


def _hidden(seen, first_key, end_key, device):
    """Returns the mask of the tile's keys that each of its queries does not see."""
    first, end = torch.tensor(seen, device=device).unsqueeze(-1).unbind(1)
    keys = torch.arange(first_key, end_key, device=device)
    return (keys < first) | (keys >= end)

"""Attention and its gradients in float64, the truth that every accuracy test compares with, and how far from it an
output may be.

Written from the formulas, one (batch, head) at a time, and sharing no code with `dash_attn`. A mask is three arguments:
causal, window = (left, right), where a negative side is unbounded, and attention_chunk, where 0 is none. What
scores are made of is one, `Scores`.
"""

from typing import NamedTuple

import torch

# fp32 sums of the same 16-bit products in another order: an element within this fraction of a rounding boundary may
# round to the other side of it. It changes the error of a correctly rounded result by far less than this.
ROUNDING_SLACK = 1.001
# How many times the error of the same roundings in float64 an error may be. In fp32, with a softmax whose reference
# moves from tile to tile, it is at most 1.07 times as large (tests/test_gpu_checks.py). Order-free accumulation may
# move dq by 1e-4 of its norm: an error of 3e-4, as in fp16, becomes 1.05 times as large.
NEAR = 1.15


class Attention(NamedTuple):
    out: torch.Tensor  # (batch, seqlen_q, heads, head_dim of v)
    softmax_lse: torch.Tensor  # (batch, heads, seqlen_q), natural log, +inf for a row that sees no key
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None  # (heads,)
    dsinks_of_rows: torch.Tensor | None = None  # (batch, heads, seqlen_q): what each query adds to dsinks


class Dropout(NamedTuple):
    """What is dropped of the softmax; what is kept is divided by 1 - p."""

    p: float
    keep: torch.Tensor  # bool (batch, heads, seqlen_q, seqlen_k)
    bits: torch.Tensor | None = None  # that say the same to the ops
    rng_state: torch.Tensor | None = None  # or what they are made of

    @property
    def scale(self):
        return 1 / (1 - self.p)

    def arguments(self):
        """As the ops take it: the bits, or the state where there are none."""
        state = self.rng_state if self.bits is None else None
        return dict(dropout_bits=self.bits, rng_state=state, dropout_p=self.p)


class Scores(NamedTuple):
    """What changes the scores, and what is beside them."""

    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None  # (heads,) or (batch, heads)
    sinks: torch.Tensor | None = None  # (heads,)
    dsoftmax_lse: torch.Tensor | None = None  # (batch, heads, seqlen_q)
    rounds_tanh: bool = False  # to 11 bits, as the instruction tanh.approx may
    dropout: Dropout | None = None

    def of(self, products):
        """(batch, heads, seqlen_q, seqlen_k), from what the scale has been applied to, in its dtype."""
        if self.softcap:
            tanh = torch.tanh(products / self.softcap)
            products = self.softcap * (tanh.half().to(tanh.dtype) if self.rounds_tanh else tanh)
        if self.alibi_slopes is not None:
            seqlen_q, seqlen_k = products.shape[2:]
            queries, keys = (torch.arange(n, device=products.device) for n in (seqlen_q, seqlen_k))
            distance = (queries[:, None] + seqlen_k - seqlen_q - keys).abs()
            slopes = self.alibi_slopes.expand(*products.shape[:2])[..., None, None]
            products = products - (slopes.to(products.dtype) * distance.to(products.dtype))
        return products

    def derivative(self, scores):
        """Of scores with respect to products."""
        return 1 - (scores / self.softcap) ** 2 if self.softcap else 1.0

    def head(self, b, h):
        """Of one head of one sequence, as a batch of its own."""
        slopes, sinks, dlse = self.alibi_slopes, self.sinks, self.dsoftmax_lse
        if slopes is not None:
            slopes = (slopes if slopes.dim() == 1 else slopes[b])[h : h + 1]
        sinks = None if sinks is None else sinks[h : h + 1]
        dlse = None if dlse is None else dlse[b : b + 1, h : h + 1]
        dropout = self.dropout
        if dropout is not None:
            dropout = Dropout(dropout.p, dropout.keep[b : b + 1, h : h + 1])
        return Scores(self.softcap, slopes, sinks, dlse, self.rounds_tanh, dropout)

    def of_queries(self, first):
        """Of the queries from `first` on."""
        found = self
        if self.dsoftmax_lse is not None:
            found = found._replace(dsoftmax_lse=self.dsoftmax_lse[:, :, first:])
        if self.dropout is not None:
            found = found._replace(dropout=Dropout(self.dropout.p, self.dropout.keep[:, :, first:]))
        return found

    def kept(self, dtype):
        """(batch, heads, seqlen_q, seqlen_k): 1 where dropout keeps an element and 0 elsewhere; without dropout 1."""
        return 1.0 if self.dropout is None else self.dropout.keep.to(dtype)

    @property
    def kept_scale(self):
        """1 / (1 - p)."""
        return 1.0 if self.dropout is None else self.dropout.scale


PLAIN = Scores()


def visible_keys(seqlen_q, seqlen_k, causal, device=None, *, window=(-1, -1), attention_chunk=0, hidden=None):
    """(seqlen_q, seqlen_k) mask, pair by pair. The last query's own key is the last one. `hidden`: pairs that are
    hidden too, which may have the dimensions (batch, 1 or kv_heads) before; the mask then has them."""
    own = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=device)[None, :]
    left, right = window
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if causal:
        right = 0
    if left >= 0:
        mask &= key >= own - left
    if right >= 0:
        mask &= key <= own + right
    if attention_chunk > 0:
        mask &= key.div(attention_chunk, rounding_mode="floor") == own.div(attention_chunk, rounding_mode="floor")
    return mask if hidden is None else mask & ~hidden


class Head(NamedTuple):
    """One head of one sequence in float64: P, and what a backward takes beside it."""

    p: torch.Tensor  # (seqlen_q, seqlen_k)
    softmax_lse: torch.Tensor  # (seqlen_q, 1)
    of_cap: torch.Tensor | float  # derivative of the scores with respect to what is capped
    sink_p: torch.Tensor | None  # (seqlen_q, 1): the sink's share, 0 where the log-sum-exp is infinite
    dlse: torch.Tensor | float  # (seqlen_q, 1), 0 there too
    kept: torch.Tensor | float  # (seqlen_q, seqlen_k): 1, or 0 where dropout drops an element

    @classmethod
    def of(cls, products, hidden, scores):
        """`scores`: of this head alone."""
        s = scores.of(products[None, None])[0, 0]
        of_cap = scores.derivative(s)
        s.masked_fill_(hidden, -torch.inf)
        lse = s.logsumexp(dim=1, keepdim=True)
        if scores.sinks is not None:
            lse = torch.logaddexp(lse, scores.sinks.double())
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        sink_p, dlse = None, 0.0
        if scores.sinks is not None:
            sink_p = (scores.sinks.double() - lse).exp().masked_fill(lse.isinf(), 0.0)
        if scores.dsoftmax_lse is not None:
            dlse = scores.dsoftmax_lse[0, 0, :, None].double().masked_fill(lse.isinf(), 0.0)
        kept = 1.0 if scores.dropout is None else scores.kept(torch.float64)[0, 0]
        return cls(s.sub_(lse).exp_(), lse, of_cap, sink_p, dlse, kept)


def attention_float64(q, k, v, dout=None, *, softmax_scale=None, causal=False, scores=PLAIN, **window):
    """Attention in float64; gradients too when `dout` is given. Any device; holds the scores of one head at a time.

    `window`: the keywords window, attention_chunk and hidden.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    hidden = ~visible_keys(seqlen_q, seqlen_k, causal, q.device, **window)
    hidden = hidden.expand(batch, kv_heads, seqlen_q, seqlen_k)

    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    lse = torch.zeros(batch, heads, seqlen_q, dtype=torch.float64, device=q.device)
    grads = [torch.zeros(t.shape, dtype=torch.float64, device=q.device) for t in (q, k, v)]
    dq, dk, dv = grads
    dsinks = None if scores.sinks is None else torch.zeros_like(lse)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // kv_heads)
            q_h, k_h, v_h = q[b, :, h].double(), k[b, :, g].double(), v[b, :, g].double()
            head = Head.of(q_h @ k_h.T * scale, hidden[b, g], scores.head(b, h))
            scale_of_kept = scores.kept_scale
            p_kept = head.p * head.kept * scale_of_kept
            out[b, :, h] = p_kept @ v_h
            lse[b, h] = head.softmax_lse.squeeze(1)
            if dout is None:
                continue
            dout_h = dout[b, :, h].double()
            dp = (dout_h @ v_h.T) * head.kept * scale_of_kept
            d = (head.p * dp).sum(dim=1, keepdim=True) - head.dlse
            ds = head.p * (dp - d) * head.of_cap
            dq[b, :, h] = ds @ k_h * scale
            dk[b, :, g] += ds.T @ q_h * scale
            dv[b, :, g] += p_kept.T @ dout_h
            if scores.sinks is not None:
                dsinks[b, h] = -(head.sink_p * d).squeeze(1)
    if dout is None:
        return Attention(out, lse)
    return Attention(out, lse, *grads, *(() if dsinks is None else (dsinks.sum(dim=(0, 2)), dsinks)))


def attention_in_dtype(q, k, v, dout=None, *, softmax_scale=None, causal=False, scores=PLAIN, **window):
    """The same formula in PyTorch's own operators and autograd at the inputs' dtype: the accuracy that is the bar.

    Needs every query to see a key. The sink is one more score, as in the models that have sinks.
    """
    sinks = scores.sinks
    inputs = [t.detach().requires_grad_(dout is not None) for t in (q, k, v, *([] if sinks is None else [sinks]))]
    q, k, v = inputs[:3]
    group = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    k_heads, v_heads = (t.repeat_interleave(group, dim=2) for t in (k, v))
    q_t, k_t, v_t = (t.transpose(1, 2) for t in (q, k_heads, v_heads))
    s = scores.of(q_t @ k_t.transpose(-1, -2) * scale)
    s = s.masked_fill(~visible_keys(q.shape[1], k.shape[1], causal, q.device, **window), -torch.inf)
    if sinks is not None:
        rows = inputs[3].to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        inputs.append(rows)
        s = torch.cat([s, rows], dim=-1)
    p = s.softmax(dim=-1)[..., : k.shape[1]]
    if scores.dropout is not None:
        p = p * (scores.kept(p.dtype) * scores.kept_scale)
    out = (p @ v_t).transpose(1, 2)
    lse = (s if s.dtype == torch.float64 else s.float()).logsumexp(dim=-1)
    if dout is None:
        return Attention(out.detach(), lse.detach())
    outputs, cotangents = [out], [dout]
    if scores.dsoftmax_lse is not None:
        outputs, cotangents = [out, lse], [dout, scores.dsoftmax_lse.to(lse.dtype)]
    gradients = list(torch.autograd.grad(outputs, inputs, cotangents))
    if sinks is not None:
        gradients[4] = gradients[4].squeeze(-1)
    return Attention(out.detach(), lse.detach(), *gradients)


def rounds_difference(q, v):
    """Whether the kernels round dP - D before they multiply it by P: `multiply_pair` of csrc/device/fragment.h."""
    return q.dtype == torch.bfloat16 and max(q.shape[3], v.shape[3]) <= 128


def attention_rounded(q, k, v, dout, out, *, rounded_factors, softmax_scale=None, causal=False, scores=PLAIN, **window):
    """out, dq, dk, dv and, of sinks, dsinks in float64, but rounded to the inputs' dtype where ours are: P and dS
    before they enter a product, and each output once, at its end. So their error is what these roundings cost: sums in
    fp32, in any order, add next to nothing to it.

    Args:
        out: the output of which D = rowsum(dO * O) is made.
        rounded_factors: as in the kernel: tanh of a softcap is rounded to 11 bits, its derivative is had from the
            rounded P (csrc/device/score.h), and dS is the product of the rounded P and of dP - D, which may be rounded
            first (`rounds_difference`); else, as in `dash_attn.reference`, of P and dP - D.
    """
    q, k, v, dout, out = (x.detach() for x in (q, k, v, dout, out))
    batch, seqlen_q, heads, head_dim = q.shape
    group = heads // k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    difference_is_rounded = rounds_difference(q, v)
    hidden = ~visible_keys(seqlen_q, k.shape[1], causal, q.device, **window)

    def rounded(x):
        return x.to(q.dtype).double()

    result = {name: torch.zeros(t.shape, dtype=torch.float64, device=q.device)
              for name, t in (("out", dout), ("dq", q), ("dk", k), ("dv", v))}  # fmt: skip
    dsinks = torch.zeros(heads, dtype=torch.float64, device=q.device)
    for b in range(batch):
        for h in range(heads):
            g = h // group
            q_h, k_h, v_h = q[b, :, h].double(), k[b, :, g].double(), v[b, :, g].double()
            dout_h, out_h = dout[b, :, h].double(), out[b, :, h].double()
            head = Head.of(q_h @ k_h.T * scale, hidden, scores.head(b, h)._replace(rounds_tanh=rounded_factors))
            p, p_rounded = head.p, rounded(head.p)
            d = (dout_h * out_h).sum(dim=1, keepdim=True) - head.dlse
            of_cap = head.of_cap
            if rounded_factors and scores.softcap:
                tanh = (p_rounded.log() + head.softmax_lse) / scores.softcap
                of_cap = (1 - tanh.square()).clamp(min=0.0).nan_to_num(nan=0.0)
            # What is kept is multiplied by 1 / (1 - p) in the sums alone.
            ds = (dout_h @ v_h.T * head.kept - d / scores.kept_scale) * of_cap
            if rounded_factors:
                ds, p = rounded(ds) if difference_is_rounded else ds, p_rounded
            ds = rounded(p * ds)
            p_kept = p_rounded * head.kept * scores.kept_scale
            result["out"][b, :, h] = p_kept @ v_h
            result["dq"][b, :, h] = ds @ k_h * (scale * scores.kept_scale)
            result["dk"][b, :, g] += ds.T @ q_h * (scale * scores.kept_scale)
            result["dv"][b, :, g] += p_kept.T @ dout_h
            if scores.sinks is not None:
                dsinks[h] -= (head.sink_p * d).sum()
    result = {name: rounded(x) for name, x in result.items()}
    if scores.sinks is not None:
        result["dsinks"] = dsinks.to(scores.sinks.dtype).double()
    return result


def cancellation_bounds(q, k, v, dout, softmax_scale, visible):
    """Norms that |dq| and |dk| cannot exceed where no query sees more than one key: P = 1 and O = V, so the exact
    gradients are 0. Each of dP and D is then the same dot product of head_dim terms, summed in fp32 in any order: they
    differ by at most twice head_dim * 2^-23 * |dO|.|V| (2^-23: tensor cores may truncate), and dS is that difference
    rounded to 16 bits (2^-8 at most)."""
    heads, head_dim, kv_heads = q.shape[2], v.shape[3], k.shape[2]
    group = heads // kv_heads
    q, dout = (x.double().abs() for x in (q, dout))
    k, v = (x.double().abs().repeat_interleave(group, dim=2) for x in (k, v))
    rounding = 2 * head_dim * 2.0**-23 * (1 + 2.0**-8)
    ds = rounding * torch.einsum("bihd,bjhd->bhij", dout, v) * visible
    dk = torch.einsum("bhij,bihd->bjhd", ds, q).unflatten(2, (kv_heads, group)).sum(3)
    dq = torch.einsum("bhij,bjhd->bihd", ds, k)
    scale = abs(softmax_scale)
    return {"dq": dq.norm() * scale, "dk": dk.norm() * scale}


def sink_noise(exact, dout, scores):
    """How far fp32 may take the sinks' gradient, as a norm: LSE and D are right to about 2^-22 of themselves and of
    1 + |LSE|, and the sum is over terms that cancel."""
    lse = exact.softmax_lse
    weight = (scores.sinks.double()[:, None] - lse).exp().masked_fill(lse.isinf(), 0.0)
    terms = (dout.double() * exact.out).abs().sum(dim=-1).transpose(1, 2)
    if scores.dsoftmax_lse is not None:
        terms = terms + scores.dsoftmax_lse.double().abs().masked_fill(lse.isinf(), 0.0)
    slack = 2.0**-22 * (1 + lse.abs().masked_fill(lse.isinf(), 0.0))
    return (slack * weight * terms).sum(dim=(0, 2)).norm()


def error_limits(
    exact, q, k, v, dout, out, *, rounded_factors, softmax_scale=None, causal=False, scores=PLAIN, **window
):
    """How far out, dq, dk, dv and, of sinks, dsinks may be from `exact`, as norms: no further than those of eager
    PyTorch (the contract), and no more than NEAR times as far as those of `attention_rounded`. `out` is what the
    gradients make D of."""
    softmax_scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    formula = dict(softmax_scale=softmax_scale, causal=causal, **window)
    visible = visible_keys(q.shape[1], k.shape[1], causal, q.device, **window)
    # Queries that see no key are the first ones; they are exact in any formula.
    unseen = int((~visible.any(dim=1)).sum())
    eager = attention_in_dtype(q[:, unseen:], k, v, dout[:, unseen:], scores=scores.of_queries(unseen), **formula)
    rounded = attention_rounded(q, k, v, dout, out, rounded_factors=rounded_factors, scores=scores, **formula)
    cancels = visible.sum(dim=1).max() <= 1 and scores.sinks is None and scores.dsoftmax_lse is None
    bounds = cancellation_bounds(q, k, v, dout, softmax_scale, visible) if cancels else {}
    limits = {}
    for name in rounded:
        truth = getattr(exact, name)
        seen = truth[:, unseen:] if name in ("out", "dq") else truth
        if name == "dsinks" and scores.dsoftmax_lse is not None:
            # Of queries that see no key, the sink is the log-sum-exp.
            seen = seen - scores.dsoftmax_lse[:, :, :unseen].double().sum(dim=(0, 2))
        best = (truth.to(getattr(eager, name).dtype).double() - truth).norm()
        contract = torch.maximum((getattr(eager, name).double() - seen).norm(), ROUNDING_SLACK * best)
        near = NEAR * (rounded[name] - truth).norm()
        if name in bounds and scores.dropout is not None:
            # Eager PyTorch has exactly 0 there. Ours has D of an output that was rounded after it was divided by 1 - p.
            bounds[name] = near + scores.kept_scale * bounds[name]
        if name == "dsinks":
            # A few sums of many errors, which may cancel by chance: what they amount to where they are independent, and
            # three deviations of a norm of so few.
            of_rows = eager.dsinks_of_rows.double() - exact.dsinks_of_rows[:, :, unseen:]
            noise = sink_noise(exact, dout, scores)
            few = 1 + 3 / (2 * len(seen)) ** 0.5
            contract, near = torch.maximum(contract, few * of_rows.norm()) + noise, near + noise
        limits[name] = bounds.get(name, torch.minimum(contract, near))
    return limits


def sequences_of(offsets, used=None):
    """The rows of each sequence of a pack, from lists of integers."""
    lengths = used or [end - start for start, end in zip(offsets, offsets[1:])]
    return [slice(start, start + length) for start, length in zip(offsets, lengths)]


def relative_error(actual, expected):
    """||actual - expected|| / ||expected|| in float64 (the norm of `actual` where `expected` is zero)."""
    expected = expected.double()
    difference = (actual.double() - expected).norm()
    norm = expected.norm()
    return (difference / norm if norm > 0 else difference).item()

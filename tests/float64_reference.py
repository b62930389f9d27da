"""Attention and its gradients in float64, the truth that every accuracy test compares with, and how far from it an
output may be.

Written from the formulas, one (batch, head) at a time, and sharing no code with `dash_attn`. A mask is three arguments:
causal, window = (left, right), where a negative side is unbounded, and attention_chunk, where 0 is none.
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


def visible_keys(seqlen_q, seqlen_k, causal, device=None, *, window=(-1, -1), attention_chunk=0):
    """(seqlen_q, seqlen_k) mask, pair by pair. The last query's own key is the last one."""
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
    return mask


def attention_float64(q, k, v, dout=None, *, softmax_scale=None, causal=False, **window):
    """Attention in float64; gradients too when `dout` is given. Any device; holds the scores of one head at a time.

    `window`: the keywords window and attention_chunk.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    hidden = ~visible_keys(seqlen_q, seqlen_k, causal, q.device, **window)
    no_key = hidden.all(dim=1, keepdim=True)

    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    lse = torch.zeros(batch, heads, seqlen_q, dtype=torch.float64, device=q.device)
    grads = [torch.zeros(t.shape, dtype=torch.float64, device=q.device) for t in (q, k, v)]
    dq, dk, dv = grads
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // kv_heads)
            q_h, k_h, v_h = q[b, :, h].double(), k[b, :, g].double(), v[b, :, g].double()
            s = (q_h @ k_h.T * scale).masked_fill_(hidden, -torch.inf)
            lse_h = s.logsumexp(dim=1, keepdim=True).masked_fill_(no_key, torch.inf)
            p = s.sub_(lse_h).exp_()
            out[b, :, h] = p @ v_h
            lse[b, h] = lse_h.squeeze(1)
            if dout is None:
                continue
            dout_h = dout[b, :, h].double()
            dp = dout_h @ v_h.T
            ds = p * (dp - (p * dp).sum(dim=1, keepdim=True))
            dq[b, :, h] = ds @ k_h * scale
            dk[b, :, g] += ds.T @ q_h * scale
            dv[b, :, g] += p.T @ dout_h
    return Attention(out, lse, *(grads if dout is not None else ()))


def attention_in_dtype(q, k, v, dout=None, *, softmax_scale=None, causal=False, **window):
    """The same formula in PyTorch's own operators and autograd at the inputs' dtype: the accuracy that is the bar.

    Needs every query to see a key.
    """
    q, k, v = (t.detach().requires_grad_(dout is not None) for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    k_heads, v_heads = (t.repeat_interleave(group, dim=2) for t in (k, v))
    q_t, k_t, v_t = (t.transpose(1, 2) for t in (q, k_heads, v_heads))
    s = q_t @ k_t.transpose(-1, -2) * scale
    s = s.masked_fill(~visible_keys(q.shape[1], k.shape[1], causal, q.device, **window), -torch.inf)
    out = (s.softmax(dim=-1) @ v_t).transpose(1, 2)
    lse = s.detach().float().logsumexp(dim=-1)
    if dout is None:
        return Attention(out.detach(), lse)
    return Attention(out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout))


def attention_rounded(q, k, v, dout, out, *, rounded_factors, softmax_scale=None, causal=False, **window):
    """out, dq, dk, dv in float64, but rounded to the inputs' dtype where ours are: P and dS before they enter a
    product, and each output once, at its end. So their error is what these roundings cost: sums in fp32, in any order,
    add next to nothing to it.

    Args:
        out: the output of which D = rowsum(dO * O) is made.
        rounded_factors: whether dS is the product of the rounded P and of dP - D, which in bf16 is rounded first, as in
            the kernel (`multiply_pair` of csrc/device/fragment.h); else of P and dP - D, as in `dash_attn.reference`.
    """
    q, k, v, dout, out = (x.detach() for x in (q, k, v, dout, out))
    batch, seqlen_q, heads, head_dim = q.shape
    group = heads // k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    hidden = ~visible_keys(seqlen_q, k.shape[1], causal, q.device, **window)

    def rounded(x):
        return x.to(q.dtype).double()

    result = {name: torch.zeros(t.shape, dtype=torch.float64, device=q.device)
              for name, t in (("out", dout), ("dq", q), ("dk", k), ("dv", v))}  # fmt: skip
    for b in range(batch):
        for h in range(heads):
            g = h // group
            q_h, k_h, v_h = q[b, :, h].double(), k[b, :, g].double(), v[b, :, g].double()
            dout_h, out_h = dout[b, :, h].double(), out[b, :, h].double()
            s = (q_h @ k_h.T * scale).masked_fill_(hidden, -torch.inf)
            p = s.softmax(dim=1).nan_to_num_(nan=0.0)  # NaN where a query sees no key
            p_rounded = rounded(p)
            ds = dout_h @ v_h.T - (dout_h * out_h).sum(dim=1, keepdim=True)
            if rounded_factors:
                ds, p = rounded(ds) if q.dtype == torch.bfloat16 else ds, p_rounded
            ds = rounded(p * ds)
            result["out"][b, :, h] = p_rounded @ v_h
            result["dq"][b, :, h] = ds @ k_h * scale
            result["dk"][b, :, g] += ds.T @ q_h * scale
            result["dv"][b, :, g] += p_rounded.T @ dout_h
    return {name: rounded(x) for name, x in result.items()}


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


def error_limits(exact, q, k, v, dout, out, *, rounded_factors, softmax_scale=None, causal=False, **window):
    """How far out, dq, dk and dv may be from `exact`, as norms: no further than those of eager PyTorch (the contract),
    and no more than NEAR times as far as those of `attention_rounded`. `out` is what the gradients make D of."""
    softmax_scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    formula = dict(softmax_scale=softmax_scale, causal=causal, **window)
    visible = visible_keys(q.shape[1], k.shape[1], causal, q.device, **window)
    # Queries that see no key are the first ones; they are exact in any formula.
    unseen = int((~visible.any(dim=1)).sum())
    eager = attention_in_dtype(q[:, unseen:], k, v, dout[:, unseen:], **formula)
    rounded = attention_rounded(q, k, v, dout, out, rounded_factors=rounded_factors, **formula)
    cancels = visible.sum(dim=1).max() <= 1
    bounds = cancellation_bounds(q, k, v, dout, softmax_scale, visible) if cancels else {}
    limits = {}
    for name in ("out", "dq", "dk", "dv"):
        truth = getattr(exact, name)
        seen = truth[:, unseen:] if name in ("out", "dq") else truth
        best = (truth.to(q.dtype).double() - truth).norm()
        contract = torch.maximum((getattr(eager, name).double() - seen).norm(), ROUNDING_SLACK * best)
        near = NEAR * (rounded[name] - truth).norm()
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

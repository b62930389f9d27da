"""Dense attention and its gradients in float64: the truth that every accuracy test compares with.

Written from the formulas, one (batch, head) at a time, and sharing no code with `dash_attn`.
"""

from typing import NamedTuple

import torch


class Attention(NamedTuple):
    out: torch.Tensor  # (batch, seqlen_q, heads, head_dim)
    softmax_lse: torch.Tensor  # (batch, heads, seqlen_q), natural log, +inf for a row that sees no key
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None


def visible_keys(seqlen_q, seqlen_k, causal, device=None):
    """(seqlen_q, seqlen_k) mask: under `causal` the last query sees the last key."""
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    return mask.tril(seqlen_k - seqlen_q) if causal else mask


def attention_float64(q, k, v, dout=None, *, softmax_scale=None, causal=False):
    """Attention in float64; gradients too when `dout` is given. Any device; holds the scores of one head at a time."""
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    hidden = ~visible_keys(seqlen_q, seqlen_k, causal, q.device)
    no_key = hidden.all(dim=1, keepdim=True)

    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
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


def attention_in_dtype(q, k, v, dout=None, *, softmax_scale=None, causal=False):
    """The same formula in PyTorch's own operators and autograd at the inputs' dtype: the accuracy that is the bar.

    Needs every query to see a key.
    """
    q, k, v = (t.detach().requires_grad_(dout is not None) for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    k_heads, v_heads = (t.repeat_interleave(group, dim=2) for t in (k, v))
    q_t, k_t, v_t = (t.transpose(1, 2) for t in (q, k_heads, v_heads))
    s = q_t @ k_t.transpose(-1, -2) * scale
    s = s.masked_fill(~visible_keys(q.shape[1], k.shape[1], causal, q.device), -torch.inf)
    out = (s.softmax(dim=-1) @ v_t).transpose(1, 2)
    lse = s.detach().float().logsumexp(dim=-1)
    if dout is None:
        return Attention(out.detach(), lse)
    return Attention(out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout))


def relative_error(actual, expected):
    """||actual - expected|| / ||expected|| in float64 (the norm of `actual` where `expected` is zero)."""
    expected = expected.double()
    difference = (actual.double() - expected).norm()
    norm = expected.norm()
    return (difference / norm if norm > 0 else difference).item()

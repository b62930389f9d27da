"""Attention with dropout in float64, from the formula and torch's own derivative: no code of `dash_attn`."""

import torch
from float64_reference import PLAIN, visible_keys


def dropped_attention(q, k, v, keep, p, *, softmax_scale, causal=False, scores=PLAIN, rounding=None, **window):
    """(out, softmax_lse) of tensors (batch, seqlen, heads, head_dim) that may have gradients, in their own dtype.

    `keep`: bool (batch, heads, seqlen_q, seqlen_k). Dropout is applied to the softmax, and what is kept divided by
    1 - p. Queries that see no key have output 0.
    """
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = scores.of(q @ k.mT * softmax_scale)
    s = s.masked_fill(~visible_keys(q.shape[2], k.shape[2], causal, q.device, **window), -torch.inf)
    if scores.sinks is not None:
        rows = scores.sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        s = torch.cat([s, rows], dim=-1)
    blind = (s == -torch.inf).all(dim=-1, keepdim=True)
    s = s.masked_fill(blind, 0.0)
    p_rows = s.softmax(dim=-1).masked_fill(blind, 0.0)[..., : k.shape[2]]
    out = (p_rows * keep).to(q.dtype) @ v / (1 - p)
    lse = s.logsumexp(dim=-1).masked_fill(blind.squeeze(-1), torch.inf)
    return out.transpose(1, 2), lse


def gradients(q, k, v, dout, keep, p, *, dlse=None, dtype=torch.float64, scores=PLAIN, **settings):
    """(out, softmax_lse, dq, dk, dv and, where there are sinks, dsinks), all in `dtype`."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    if scores.sinks is not None:
        inputs.append(scores.sinks.detach().to(dtype).requires_grad_())
        scores = scores._replace(sinks=inputs[3])
    out, lse = dropped_attention(*inputs[:3], keep, p, scores=scores, **settings)
    loss = (out * dout.to(dtype)).sum()
    if dlse is not None:
        loss = loss + (lse * dlse.to(dtype)).masked_fill(lse.isinf(), 0.0).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)

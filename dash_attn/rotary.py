"""Rotary position embeddings, as FlashAttention applies them to the keys that are appended to a cache."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates pairs of x's first rotary_dim columns by the angles of their positions, in fp32 and rounded once.

    Args:
        x: (*rows, heads, head_dim).
        positions: int64 (*rows): rows of cos and sin.
        cos, sin: (number of positions, rotary_dim / 2).
        interleaved: pairs are columns 0 and 1, 2 and 3, ...; otherwise d and d + rotary_dim / 2.
    """
    c, s = (table[positions].unsqueeze(-2).float() for table in (cos, sin))
    half = cos.shape[1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)

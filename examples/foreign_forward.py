"""Deterministic gradients for the output of another forward: `python examples/foreign_forward.py`.

The forward here is plain PyTorch and represents FlashAttention-3's. dash_attn computes the backward, with its kernels
on a Hopper GPU and with its reference elsewhere.
"""

import torch

from dash_attn.compat.flash_attn_3 import _flash_attn_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def foreign_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output, (batch, seqlen, heads, head_dim), and the log-sum-exp, fp32 (batch, heads, seqlen)."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float()).to(q.dtype), scores.logsumexp(-1)


def main() -> None:
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 256, 4, 64, device=DEVICE).bfloat16().unbind()
    out, lse = foreign_forward(q, k, v)
    runs = [[torch.empty_like(x) for x in (q, k, v)] for _ in range(3)]
    for dq, dk, dv in runs:
        _flash_attn_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, is_causal=True)
    equal = all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))
    print("the gradients of three runs have the same bits" if equal else "THE BITS DIFFER")


if __name__ == "__main__":
    main()

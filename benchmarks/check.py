"""Whether what is about to be timed is right: a figure of wrong results says nothing.

One KV head of one sequence, with its query heads, against float32 sums of the same 16-bit inputs, at any length.
"""

import torch

from benchmarks.peers import Results, Tensors, softmax_scale
from benchmarks.shapes import Shape

# Above the rounding of bf16 and of 16-bit P and dS, about 3e-3 of the norm, and far below a wrong tile.
LIMIT = 0.01
QUERIES_AT_ONCE = 2048  # rows of the score matrix that exist at a time


class Reference:
    """Results of the last KV head of the last sequence."""

    def __init__(self, shape: Shape, x: Tensors):
        self._group = shape.heads // shape.kv_heads
        q, dout = (t[-1, :, -self._group :].float() for t in (x.q, x.dout))
        k, v = (t[-1, :, -1].float() for t in (x.k, x.v))
        scale, length = softmax_scale(shape), shape.seqlen
        keys = torch.arange(length, device=q.device)
        out, dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for head in range(self._group):
            for first in range(0, length, QUERIES_AT_ONCE):
                rows = slice(first, min(first + QUERIES_AT_ONCE, length))
                scores = q[rows, head] @ k.mT * scale
                if shape.causal:
                    scores.masked_fill_(keys > keys[rows, None], float("-inf"))
                p = scores.softmax(-1)
                out[rows, head] = p @ v
                dp = dout[rows, head] @ v.mT
                ds = p * (dp - (dp * p).sum(-1, keepdim=True))
                dq[rows, head] = scale * (ds @ k)
                dk += scale * (ds.mT @ q[rows, head])
                dv += p.mT @ dout[rows, head]
        self._out, self._gradients = out, {"dq": dq, "dk": dk, "dv": dv}

    def wrong(self, results: Results) -> str | None:
        """What is wrong with the results of a forward (out) or of a backward (dq, dk, dv); None where nothing is."""
        if isinstance(results, torch.Tensor):
            named = {"out": (results[-1, :, -self._group :], self._out)}
        else:
            dq, dk, dv = results
            of_head = dq[-1, :, -self._group :], dk[-1, :, -1], dv[-1, :, -1]
            named = {name: (x, self._gradients[name]) for name, x in zip(("dq", "dk", "dv"), of_head)}
        for name, (x, exact) in named.items():
            error = ((x.float() - exact).norm() / exact.norm()).item()
            if not error <= LIMIT:
                return f"wrong {name}: relative error {error:.2e} at the last KV head, allowed {LIMIT}"
        return None

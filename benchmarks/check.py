"""Checks the results of a call before the call is timed.

One KV head of one sequence (of three sequences in a variable-length batch) with its query heads is compared with
float32 sums of the same 16-bit inputs, at any length.
"""

import itertools

import torch

from benchmarks.peers import Results, Tensors, softmax_scale
from benchmarks.shapes import Shape

# Above the rounding of bf16 and of 16-bit P and dS, about 3e-3 of the norm, and far below the error of a wrong tile.
LIMIT = 0.01
# For results with an unknown dropout mask: their distance from those without dropout, over sqrt(p / (1 - p)). It is
# near 1 for independent values and gradients; under the causal mask the first few rows dominate it.
OWN_MASK_LIMITS = 0.5, 2.0
QUERIES_AT_ONCE = 2048  # rows of the score matrix per pass


def _hidden(shape: Shape, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns the mask of the keys that each query does not see."""
    queries = queries[:, None]
    before, behind = shape.sides
    hidden = torch.zeros((len(queries), len(keys)), dtype=torch.bool, device=keys.device)
    if before >= 0:
        hidden |= keys < queries - before
    if behind >= 0:
        hidden |= keys > queries + behind
    if shape.chunk:
        hidden |= keys // shape.chunk != queries // shape.chunk
    return hidden


class _Sequence:
    """The expected results of the last KV head of one sequence.

    Args:
        number: the number of the sequence.
        rows: the rows of the sequence in a variable-length batch.
    """

    def __init__(self, shape: Shape, x: Tensors, number: int, rows: slice):
        self._number, self._rows, self._group = number, rows, shape.heads // shape.kv_heads
        q, dout = (self._of_queries(t).float() for t in (x.q, x.dout))
        k, v = (self._of_keys(t).float() for t in (x.k, x.v))
        scale, length = softmax_scale(shape), len(q)
        keys = torch.arange(length, device=q.device)
        slopes, sinks = (None if t is None else t[-self._group :] for t in (x.alibi_slopes, x.sinks))
        kept, kept_scale = self._kept(shape, x, length), 1 / (1 - shape.dropout_p)
        out, dq, dk, dv = torch.empty_like(dout), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for head in range(self._group):
            for first in range(0, length, QUERIES_AT_ONCE):
                rows = slice(first, min(first + QUERIES_AT_ONCE, length))
                scores = q[rows, head] @ k.mT * scale
                of_cap = 1.0
                if shape.softcap:
                    scores = (scores / shape.softcap).tanh()
                    of_cap = 1 - scores.square()
                    scores *= shape.softcap
                if slopes is not None:
                    scores -= slopes[head] * (keys[rows, None] - keys).abs()
                if shape.mask != "full":
                    scores.masked_fill_(_hidden(shape, keys[rows], keys), float("-inf"))
                if sinks is None:
                    p = scores.softmax(-1)
                else:
                    p = torch.cat([scores, sinks[head].expand(len(scores), 1)], dim=-1).softmax(-1)[:, :-1]
                factor = kept_scale if kept is None else kept[head, rows] * kept_scale
                dropped = p * factor
                out[rows, head] = dropped @ v
                dp = dout[rows, head] @ v.mT * factor
                ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * of_cap
                dq[rows, head] = scale * (ds @ k)
                dk += scale * (ds.mT @ q[rows, head])
                dv += dropped.mT @ dout[rows, head]
        self._exact = {"out": out, "dq": dq, "dk": dk, "dv": dv}

    def _kept(self, shape: Shape, x: Tensors, length: int) -> torch.Tensor | None:
        """Returns the elements that dropout keeps, bool (query heads, queries, keys); None without dropout."""
        if not shape.dropout_p:
            return None
        from dash_attn.dropout import layout

        assert x.dropout is not None
        bits = x.dropout.bits[self._number : self._number + 1, -self._group :]
        return layout.unpack(bits, length, length)[0]

    def _of(self, t: torch.Tensor) -> torch.Tensor:
        return t[self._rows] if t.dim() == 3 else t[self._number]

    def _of_queries(self, t: torch.Tensor) -> torch.Tensor:
        return self._of(t)[:, -self._group :]

    def _of_keys(self, t: torch.Tensor) -> torch.Tensor:
        return self._of(t)[:, -1]

    def wrong(self, named: dict[str, torch.Tensor], limits: tuple[float, float] = (0.0, LIMIT)) -> str | None:
        for name, result in named.items():
            exact = self._exact[name]
            x = self._of_queries(result) if name in ("out", "dq") else self._of_keys(result)
            error = ((x.float() - exact).norm() / exact.norm()).item()
            if not limits[0] <= error <= limits[1]:
                where = f"the last KV head of sequence {self._number}"
                allowed = f"{limits[0]:.2f} to {limits[1]:.2f}" if limits[0] else limits[1]
                return f"wrong {name}: relative error {error:.2e} at {where}, allowed {allowed}"
        return None


class Reference:
    """The expected results of the last KV head: for the last sequence of a dense batch, or for the first, the last and
    the longest sequence of a variable-length batch, without empty ones."""

    def __init__(self, shape: Shape, x: Tensors):
        lengths = shape.lengths
        ends = list(itertools.accumulate(lengths))
        there = [b for b, length in enumerate(lengths) if length]
        chosen = {there[0], max(there, key=lambda b: lengths[b]), there[-1]} if shape.pack else {there[-1]}
        rows = {b: slice(ends[b] - lengths[b], ends[b]) for b in sorted(chosen)}
        self._sequences = [_Sequence(shape, x, b, rows[b]) for b in rows]
        self._undropped = [_Sequence(shape.undropped, x, b, rows[b]) for b in rows] if shape.dropout_p else []
        noise = (shape.dropout_p / (1 - shape.dropout_p)) ** 0.5
        self._own_mask_limits = OWN_MASK_LIMITS[0] * noise, OWN_MASK_LIMITS[1] * noise

    def wrong(self, results: Results, own_mask: bool = False) -> str | None:
        """Returns what is wrong with the results of a forward (out) or a backward (dq, dk, dv); None if nothing is.

        `own_mask`: the call draws its own mask, so only the size of dropout's effect can be checked.
        """
        if isinstance(results, torch.Tensor):
            named = {"out": results}
        else:
            named = dict(zip(("dq", "dk", "dv"), results))
        if own_mask:
            found = (sequence.wrong(named, self._own_mask_limits) for sequence in self._undropped)
        else:
            found = (sequence.wrong(named) for sequence in self._sequences)
        return next(filter(None, found), None)

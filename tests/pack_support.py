"""Packs of sequences, with rows of no sequence behind them and, where lengths are given, between them."""

from typing import NamedTuple

import torch
from float64_reference import sequences_of

from dash_attn import flash_attn_func, flash_attn_varlen_func


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def offsets_of(lengths, start=0):
    offsets = [start]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets


class Pack(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    offsets_q: list
    offsets_k: list
    used_q: list | None
    used_k: list | None

    @classmethod
    def of(
        cls, lengths, *, used=None, first=0, tail=0, heads=4, kv_heads=2, head_dim=32, value_head_dim=None,
        dtype=torch.bfloat16, seed=0,
    ):  # fmt: skip
        """`lengths`, and `used` of them: (queries, keys) of each sequence; `first` and `tail` rows around them."""
        of_values = value_head_dim or head_dim
        offsets_q, offsets_k = (offsets_of([pair[side] for pair in lengths], first) for side in (0, 1))
        used_q, used_k = ([pair[side] for pair in used] if used else None for side in (0, 1))
        generator = torch.Generator().manual_seed(seed)

        def rows(count, heads, columns):
            return torch.randn(count, heads, columns, generator=generator).to(dtype)

        total_q, total_k = offsets_q[-1] + tail, offsets_k[-1] + tail
        q, dout = rows(total_q, heads, head_dim), rows(total_q, heads, of_values)
        k, v = rows(total_k, kv_heads, head_dim), rows(total_k, kv_heads, of_values)
        return cls(q, k, v, dout, offsets_q, offsets_k, used_q, used_k)

    def sequences(self):
        """(rows of q, rows of k) of each sequence."""
        return list(zip(sequences_of(self.offsets_q, self.used_q), sequences_of(self.offsets_k, self.used_k)))

    def offsets(self):
        """The arguments of the public functions after the tensors: with hints, which may be anything."""
        return int32(self.offsets_q), int32(self.offsets_k), 1, 10**6

    def used(self):
        named = {"seqused_q": self.used_q, "seqused_k": self.used_k}
        return {name: int32(lengths) for name, lengths in named.items() if lengths is not None}

    def outside(self):
        """Masks of the rows of q, and of k, that are in no sequence."""
        rows_q, rows_k = (torch.ones(x.shape[0], dtype=torch.bool) for x in (self.q, self.k))
        for queries, keys in self.sequences():
            rows_q[queries] = rows_k[keys] = False
        return rows_q, rows_k


def run(pack, **arguments):
    """out, softmax_lse, dq, dk, dv of the pack."""
    inputs = [x.detach().requires_grad_() for x in (pack.q, pack.k, pack.v)]
    arguments = {**pack.used(), **arguments}
    out, lse, _ = flash_attn_varlen_func(*inputs, *pack.offsets(), return_attn_probs=True, **arguments)
    return out.detach(), lse, *torch.autograd.grad(out, inputs, pack.dout)


def run_alone(pack, queries, keys, **arguments):
    """The same of one sequence, by the dense function."""
    inputs = [x[None, rows].requires_grad_() for x, rows in ((pack.q, queries), (pack.k, keys), (pack.v, keys))]
    out, lse, _ = flash_attn_func(*inputs, return_attn_probs=True, **arguments)
    return out.detach()[0], lse[0], *(x[0] for x in torch.autograd.grad(out, inputs, pack.dout[None, queries]))


def part_of(results, queries, keys):
    out, lse, dq, dk, dv = results
    return out[queries], lse[:, queries], dq[queries], dk[keys], dv[keys]

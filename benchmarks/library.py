"""A compiled library of this package by its path alone, of this version or of another."""

import pathlib

import torch

# The policies of commit 85058e2, by number; a library numbers its own, and is asked by name.
POLICIES = ("ascending", "descending", "spt", "shift", "symmetric_shift", "order_free", "spt_descending", "atomic")


class Library:
    """The raw ops of `_C*.so`: preconditions are the caller's, outputs exist already, every SM is used.

    One process can load one library: the ops have one name. An older one takes dense batches without windows only.
    Scores are products of queries and keys alone.

    Args:
        path: of `_C*.so`.
        policies: names by the library's numbers.
    """

    def __init__(self, path: pathlib.Path, policies: list[str] | tuple[str, ...] = POLICIES):
        # The ops may be declared in a library of their own beside it.
        for declarations in sorted(path.parent.glob("_autograd*.so")):
            torch.ops.load_library(declarations)
        torch.ops.load_library(path)
        self._policies = list(policies)

    def forward(self, q, k, v, out, softmax_lse, softmax_scale: float, causal: bool, **variable) -> None:
        """`variable`: window_size, attention_chunk and cu_seqlens, of queries and keys alike."""
        arguments = self._arguments("forward", softmax_scale, causal, **variable)
        torch.ops.dash_attn_C.forward(q, k, v, out, softmax_lse, *arguments, 0)

    def backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale: float, causal: bool, schedule: str, **variable
    ) -> None:
        number = self._policies.index(schedule)
        arguments = self._arguments("backward", softmax_scale, causal, **variable)
        torch.ops.dash_attn_C.backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *arguments, number, 0)

    def _arguments(self, op, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, cu_seqlens=None) -> tuple:
        taken = [argument.name for argument in getattr(torch.ops.dash_attn_C, op).default._schema.arguments]
        if "cu_seqlens_q" in taken:
            unused = [None for name in ("sinks", "alibi_slopes", "dsoftmax_lse", "dsinks") if name in taken]
            softcap = [0.0] if "softcap" in taken else []
            pack = (cu_seqlens, cu_seqlens, None, None)
            return (*pack, *unused, softmax_scale, *softcap, causal, *window_size, attention_chunk)
        if cu_seqlens is not None or tuple(window_size) != (-1, -1) or attention_chunk:
            raise ValueError("this library takes dense batches without windows only")
        return softmax_scale, causal

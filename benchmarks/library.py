"""Loads a compiled library of this package, of this or another version, by its path."""

import pathlib

import torch

# The policies of commit 85058e2 by number. Every library has its own numbering, and is asked by name.
POLICIES = ("ascending", "descending", "spt", "shift", "symmetric_shift", "order_free", "spt_descending", "atomic")


class Library:
    """The raw ops of `_C*.so`: the caller ensures the preconditions, outputs must exist, and every SM is used.

    A process can load only one library, because the ops have fixed names. An older library supports only dense batches
    without windows, and unchanged scores.

    Args:
        path: the path of `_C*.so`.
        policies: policy names in the library's numbering.
    """

    def __init__(self, path: pathlib.Path, policies: list[str] | tuple[str, ...] = POLICIES):
        # The ops may be declared in a separate library in the same folder.
        for declarations in sorted(path.parent.glob("_autograd*.so")):
            torch.ops.load_library(declarations)
        torch.ops.load_library(path)
        self._policies = list(policies)

    def forward(self, q, k, v, out, softmax_lse, softmax_scale: float, causal: bool, **variable) -> None:
        """`variable`: window_size, attention_chunk and cu_seqlens, for queries and keys alike."""
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
            raise ValueError("this library supports only dense batches without windows")
        return softmax_scale, causal

"""A compiled library of this package by its path alone, of this version or of another."""

import pathlib

import torch

# The policies of commit 85058e2, by number; a library numbers its own, and is asked by name.
POLICIES = ("ascending", "descending", "spt", "shift", "symmetric_shift", "order_free", "spt_descending", "atomic")


class Library:
    """The raw ops of `_C*.so`: preconditions are the caller's, outputs exist already, every SM is used.

    One process can load one library: the ops have one name.

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
        # A dense batch and no window, which older ops are not told of.
        named = {argument.name for argument in torch.ops.dash_attn_C.forward.default._schema.arguments}
        self._pack = (None,) * 4 if "cu_seqlens_q" in named else ()
        self._window = (-1, -1, 0) if "window_left" in named else ()

    def forward(self, q, k, v, out, softmax_lse, softmax_scale: float, causal: bool) -> None:
        torch.ops.dash_attn_C.forward(q, k, v, out, softmax_lse, *self._pack, softmax_scale, causal, *self._window, 0)

    def backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale: float, causal: bool, schedule: str
    ) -> None:
        number = self._policies.index(schedule)
        torch.ops.dash_attn_C.backward(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, *self._pack, softmax_scale, causal, *self._window, number, 0
        )

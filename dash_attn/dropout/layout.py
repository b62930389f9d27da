"""The layout of dropout bits (csrc/dropout/mask.h), and their generation on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _schedule as _compiled

BLOCK_ROWS: int = _compiled.DROPOUT_BLOCK_ROWS
"""Queries per block of bits, and keys per block."""
BLOCK_BYTES: int = _compiled.DROPOUT_BLOCK_BYTES

DEFAULT_MAPPING = "bit_sliced"
DEFAULT_ROUNDS = 7


def num_blocks(seqlen: int) -> int:
    return (seqlen + BLOCK_ROWS - 1) // BLOCK_ROWS


def shape_of(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int, int, int, int]:
    """Returns the shape of the tensor of bits: [sequence][head][block of queries][block of keys][byte]."""
    return batch, heads, num_blocks(seqlen_q), num_blocks(seqlen_k), BLOCK_BYTES


def unpack(bits: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Unpacks bits of at least these lengths to bool (batch, heads, seqlen_q, seqlen_k), True for kept elements."""
    bits = bits[:, :, : num_blocks(seqlen_q), : num_blocks(seqlen_k)]
    batch, heads, q_blocks, k_blocks, _ = bits.shape
    digits = bits.unsqueeze(-1).bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    # A byte has one (c, C, a, d, D), and its bits are numbered 4 A + 2 B + b.
    c, C, a, d, D, A, B, b = range(4, 12)
    digits = digits.reshape(batch, heads, q_blocks, k_blocks, 4, 4, 2, 2, 2, 2, 2, 2)
    rows = digits.permute(0, 1, 2, a, b, c, d, 3, A, B, C, D)
    rows = rows.reshape(batch, heads, q_blocks * BLOCK_ROWS, k_blocks * BLOCK_ROWS)
    return rows[:, :, :seqlen_q, :seqlen_k].bool()


def generate(
    rng_state: Tensor,
    *,
    p: float,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    first_head: int,
    total_heads: int,
    first_query: int,
    first_key: int,
    mapping: str,
    rounds: int,
    first_sequence: int = 0,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    sm_margin: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Generates the bits of `dash_attn.dropout.dropout_bits` on the device of the state, with the same arguments.

    `first_sequence`, on the CPU only, is the number of the first sequence if the sequences share one state. The CPU
    leaves no bits out. If `out` is given, the bits are written into it, and `out` is returned.
    """
    shares_one = rng_state.dim() == 1
    shape = shape_of(batch, heads, seqlen_q, seqlen_k)
    bits = torch.empty(shape, dtype=torch.uint8, device=rng_state.device) if out is None else out
    if bits.numel() == 0:
        return bits
    if rng_state.device.type == "cuda":
        assert first_sequence == 0
        torch.ops.dash_attn_C.dropout_bits(
            bits, rng_state.contiguous(), p, seqlen_q, seqlen_k, first_head, total_heads, first_query, first_key,
            mapping == "flash_attention_2", rounds, causal, window_left, window_right, attention_chunk, sm_margin,
        )  # fmt: skip
        return bits
    states = rng_state.tolist()
    for number in range(batch):
        seed, offset = states if shares_one else states[number]
        made = _compiled.dropout_bits(
            seed % 2**64,
            offset % 2**64,
            p=p,
            sequence=first_sequence + number if shares_one else 0,
            heads=heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            first_head=first_head,
            total_heads=total_heads,
            first_query=first_query,
            first_key=first_key,
            mapping=mapping,
            rounds=rounds,
        )
        bits[number] = torch.frombuffer(made, dtype=torch.uint8).view(shape[1:])
    return bits


def of_call(
    rng_state: Tensor, p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int, *, first_sequence: int = 0
) -> Tensor:
    """Returns the bits that the ops generate from a state."""
    return generate(
        rng_state, p=p, batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, first_head=0, total_heads=heads,
        first_query=0, first_key=0, mapping=DEFAULT_MAPPING, rounds=DEFAULT_ROUNDS, first_sequence=first_sequence,
    )  # fmt: skip


class Kept(NamedTuple):
    """What a call drops, as passed to the ops: bits, or the state from which they are generated; without both,
    nothing."""

    bits: Tensor | None
    rng_state: Tensor | None
    p: float

    def of(self, number: int | None, heads: int, batch: int, seqlen_q: int, seqlen_k: int) -> Tensor | None:
        """Returns which elements are kept, bool (batch, heads, seqlen_q, seqlen_k), for one sequence or a dense batch.

        Args:
            number: the number of the sequence in a variable-length batch; None for a dense batch.

        Raises:
            ValueError: the bits of a variable-length batch have fewer rows than the sequence.
        """
        if self.bits is not None:
            bits = self.bits if number is None else self.bits[number : number + 1]
            wanted = shape_of(batch, heads, seqlen_q, seqlen_k)
            if bits.shape[2] < wanted[2] or bits.shape[3] < wanted[3]:
                raise ValueError(
                    f"dropout_bits must have {wanted[2]} blocks of queries and {wanted[3]} of keys for sequence "
                    f"{number} of {seqlen_q} queries and {seqlen_k} keys, got {bits.shape[2]} and {bits.shape[3]}"
                )
            return unpack(bits, seqlen_q, seqlen_k)
        if self.rng_state is None:
            return None
        state, first = self.rng_state, 0
        if number is not None:
            state, first = (state[number : number + 1], 0) if state.dim() == 2 else (state, number)
        bits = of_call(state, self.p, batch, heads, seqlen_q, seqlen_k, first_sequence=first)
        return unpack(bits, seqlen_q, seqlen_k)

"""The random bits of attention's dropout: how they are drawn, generated and used.

    state = DropoutState.draw(device)  # uses torch's generator, and so torch.manual_seed
    bits = dropout_bits(state, p=0.1, batch=2, heads=16, seqlen_q=4096, seqlen_k=4096)
    bits.mask()  # bool (batch, heads, seqlen_q, seqlen_k), True for kept elements

A bit is a function of the state, the sequence, the query head, the query, the key, p, the mapping and the rounds, and
of nothing else (csrc/dropout/mask.h, docs/dropout.md). `flash_attn_func(..., dropout_p=p)` draws a state and generates
the bits itself, or takes them as `dropout_bits`. `dropout_bits_beside` generates bits on a second stream, concurrently
with other kernels.
"""

from .beside import BitsBeside, dropout_bits_beside
from .bits import MAPPINGS, ROUNDS, DropoutBits, DropoutState, dropout_bits, keep_probability

__all__ = [
    "MAPPINGS",
    "ROUNDS",
    "BitsBeside",
    "DropoutBits",
    "DropoutState",
    "dropout_bits",
    "dropout_bits_beside",
    "keep_probability",
]

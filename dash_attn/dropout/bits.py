"""States of the random generator, and the dropout bits generated from them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from .. import _schedule as _compiled
from .. import checks
from . import layout

MAPPINGS = ("bit_sliced", "flash_attention_2")
"""How random numbers become bits. "bit_sliced" is our own mapping, which computes 32 elements in a few instructions.
"flash_attention_2" gives the bits that FlashAttention-2's kernels generate from the same seed and offset, according to
its source code."""
ROUNDS = (7, 10)
"""Rounds of Philox4x32. FlashAttention-2 uses 7. The authors of Philox recommend 10 and call 7 sufficient."""

_MAX_SEQLEN = 2**30 - 1
_MAX_SEQUENCES = _MAX_HEADS = 2**16


@dataclasses.dataclass(frozen=True, eq=False)
class DropoutState:
    """The source of dropout masks: Philox's seed and offset, in a tensor on the device that needs them.

    Args:
        rng_state: int64 (2,): seed and offset, with all 64 bits in use. Sequence b of a call then has the number b. Or
            int64 (batch, 2): one state per sequence. Every sequence then has the number 0, and so the same mask in any
            batch.

    Raises:
        TypeError: `rng_state` is not an int64 tensor.
        ValueError: `rng_state` has another shape.
    """

    rng_state: Tensor

    def __post_init__(self) -> None:
        checks.check_tensors({"rng_state": self.rng_state})
        if self.rng_state.dtype != torch.int64:
            raise TypeError(f"rng_state must be torch.int64, got {self.rng_state.dtype}")
        shape = tuple(self.rng_state.shape)
        if len(shape) not in (1, 2) or shape[-1] != 2:
            raise ValueError(f"rng_state must have shape (2,) or (batch, 2), got {shape}")

    @classmethod
    def draw(
        cls,
        device: torch.device | str | None = None,
        *,
        batch: int | None = None,
        generator: torch.Generator | None = None,
    ) -> DropoutState:
        """Draws a state from torch's generator of the device. The draw is reproducible with torch.manual_seed.

        The state is a random tensor like any other. Activation checkpointing that preserves torch's generators
        therefore draws the same state again, and each replay of a captured CUDA graph draws a new one.

        Args:
            device: the device of the state; default: torch's default device.
            batch: draw one state per sequence, (batch, 2); default: one state for all, (2,).
            generator: the generator; default: the device's own.

        Returns:
            The state, on `device`.
        """
        shape = (2,) if batch is None else (_count("batch", batch, 0, _MAX_SEQLEN), 2)
        largest = torch.iinfo(torch.int64).max
        return cls(torch.randint(largest, shape, dtype=torch.int64, device=device, generator=generator))

    @classmethod
    def of(cls, seed: int, offset: int = 0, device: torch.device | str | None = None) -> DropoutState:
        """Makes a state from two 64-bit numbers, such as those that another library reports."""
        numbers = []
        for name, value in (("seed", seed), ("offset", offset)):
            number = _count(name, value, -(2**63), 2**64 - 1)
            numbers.append(number - 2**64 if number >= 2**63 else number)
        return cls(torch.tensor(numbers, dtype=torch.int64, device=device))


@dataclasses.dataclass(frozen=True, eq=False)
class DropoutBits:
    """The result of `dropout_bits`, with the arguments that produced it."""

    bits: Tensor
    """uint8 (batch, heads, ceil(seqlen_q / 32), ceil(seqlen_k / 32), 128), in the layout of csrc/dropout/mask.h."""
    state: DropoutState
    p: float
    seqlen_q: int
    seqlen_k: int
    mapping: str
    rounds: int
    first_head: int
    total_heads: int
    first_query: int
    first_key: int
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    attention_chunk: int = 0
    keep_bits: bool = True
    """Whether attention keeps the bits for its backward. If not, attention keeps the state, and its backward generates
    the bits again."""

    @property
    def batch(self) -> int:
        return self.bits.shape[0]

    @property
    def heads(self) -> int:
        return self.bits.shape[1]

    @property
    def is_of_every_pair(self) -> bool:
        """Whether the bits were generated for every pair of a query and a key, and therefore fit any mask."""
        return not self.causal and self.window_size == (-1, -1) and self.attention_chunk == 0

    def mask(self) -> Tensor:
        """Unpacks the bits to bool (batch, heads, seqlen_q, seqlen_k), True for kept elements.

        Where the mask for which the bits were generated hides a key from every query, the values are undefined.
        """
        return layout.unpack(self.bits, self.seqlen_q, self.seqlen_k)


def keep_probability(p: float) -> float:
    """Returns the probability with which an element is kept, a multiple of 1/256: (floor(255 (1 - p)) + 1) / 256.

    As in FlashAttention-2, kept elements are divided by 1 - p, which differs from this probability by up to 1/256.

    Args:
        p: the probability of dropping an element, from 0 to below 1 in fp32.

    Raises:
        TypeError: p is not a number.
        ValueError: p is not from 0 to below 1 in fp32.
    """
    return _compiled.dropout_threshold(as_probability("p", p)) / 256


_OF_BITS = tuple(field.name for field in dataclasses.fields(DropoutBits) if field.name != "bits")


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """The checked arguments of a call of `dropout_bits`, under their names."""

    state: DropoutState
    p: float
    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    mapping: str
    rounds: int
    first_head: int
    total_heads: int
    first_query: int
    first_key: int
    causal: bool
    window_size: tuple[int, int]
    attention_chunk: int
    keep_bits: bool
    sm_margin: int

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of `layout.generate` other than the state."""
        names = (
            "p", "batch", "heads", "seqlen_q", "seqlen_k", "first_head", "total_heads", "first_query", "first_key",
            "mapping", "rounds", "causal", "attention_chunk", "sm_margin",
        )  # fmt: skip
        left, right = self.window_size
        return {name: getattr(self, name) for name in names} | {"window_left": left, "window_right": right}

    def result(self, bits: Tensor) -> DropoutBits:
        return DropoutBits(bits, **{name: getattr(self, name) for name in _OF_BITS})


def checked_request(
    state: DropoutState,
    *,
    p: float,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    mapping: str,
    rounds: int,
    first_head: int,
    total_heads: int | None,
    first_query: int,
    first_key: int,
    causal: bool,
    window_size: tuple[int | None, int | None],
    attention_chunk: int | None,
    keep_bits: bool,
    sm_margin: int,
) -> Request:
    """Checks the arguments of `dropout_bits` and converts them to the types that the ops take.

    Raises:
        NotImplementedError, TypeError, ValueError: as in `dropout_bits`.
    """
    if not isinstance(state, DropoutState):
        raise TypeError(f"state must be a DropoutState, got {type(state).__name__}")
    p = as_probability("p", p)
    batch = _count("batch", batch, 0, _MAX_SEQUENCES)
    heads = _count("heads", heads, 1, _MAX_HEADS)
    seqlen_q = _count("seqlen_q", seqlen_q, 0, _MAX_SEQLEN)
    seqlen_k = _count("seqlen_k", seqlen_k, 0, _MAX_SEQLEN)
    first_head = _count("first_head", first_head, 0, _MAX_HEADS - heads)
    total_heads = first_head + heads if total_heads is None else total_heads
    total_heads = _count("total_heads", total_heads, first_head + heads, _MAX_HEADS)
    first_query = _block_start("first_query", first_query, seqlen_q)
    first_key = _block_start("first_key", first_key, seqlen_k)
    if mapping not in MAPPINGS:
        raise ValueError(f"mapping must be one of {', '.join(map(repr, MAPPINGS))}, got {mapping!r}")
    checks.as_int("rounds", rounds, "an int")
    if rounds not in ROUNDS:
        raise ValueError(f"rounds must be one of {', '.join(map(str, ROUNDS))}, got {rounds!r}")
    if mapping == "flash_attention_2" and rounds != 7:
        raise ValueError(f"rounds must be 7 with mapping='flash_attention_2', got {rounds}")
    causal = checks.as_flag("causal", causal)
    window_size = checks.as_window(window_size)
    attention_chunk = checks.as_attention_chunk(attention_chunk)
    keep_bits = checks.as_flag("keep_bits", keep_bits)
    for name, value, of_backward in (
        ("mapping", mapping, layout.DEFAULT_MAPPING), ("rounds", rounds, layout.DEFAULT_ROUNDS),
        ("first_head", first_head, 0), ("total_heads", total_heads, heads),
        ("first_query", first_query, 0), ("first_key", first_key, 0),
    ):  # fmt: skip
        if not keep_bits and value != of_backward:
            raise ValueError(
                f"keep_bits must be True with {name}={value!r}, because the backward generates bits only with "
                f"{name}={of_backward!r}, got False"
            )
    states = state.rng_state
    if states.dim() == 2 and states.shape[0] != batch:
        raise ValueError(f"state must have one row for each of the {batch} sequences, got {states.shape[0]}")
    if states.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"state must be on the CPU or a CUDA device, got {states.device}")
    sm_margin = checks.as_sm_margin(sm_margin)
    if not keep_bits:  # copied, because the caller may refill the tensor before the backward reads it
        state = DropoutState(states.clone())
    return Request(
        state, p, batch, heads, seqlen_q, seqlen_k, mapping, rounds, first_head, total_heads, first_query, first_key,
        causal, window_size, attention_chunk, keep_bits, sm_margin,
    )  # fmt: skip


def dropout_bits(
    state: DropoutState,
    *, p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int,
    mapping: str = layout.DEFAULT_MAPPING, rounds: int = layout.DEFAULT_ROUNDS, first_head: int = 0,
    total_heads: int | None = None, first_query: int = 0, first_key: int = 0, causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1), attention_chunk: int | None = 0, keep_bits: bool = True,
    sm_margin: int = 0,
) -> DropoutBits:  # fmt: skip
    """Generates dropout bits, one for each query and key of every query head: batch * heads * seqlen_q * seqlen_k / 8
    B.

    A bit depends on the state, p, the mapping, the rounds, the number of the sequence, and the positions of its head,
    query and key in the whole model, and on no other argument. For a variable-length batch the lengths are those of its
    longest sequence; shorter sequences leave the rest unused.

    Args:
        state: the source of the bits, which are generated on its device. A state of shape (batch, 2) must have `batch`
            rows.
        p: the probability of dropping an element, from 0 to below 1 in fp32; see `keep_probability`.
        batch: the number of sequences, from 1 to 65,536.
        heads: the number of query heads, from 1 to 65,536.
        seqlen_q: the number of queries per sequence, below 2^30.
        seqlen_k: the number of keys per sequence, below 2^30.
        mapping: one of `MAPPINGS`. "flash_attention_2" depends on total_heads, and supports only 7 rounds.
        rounds: one of `ROUNDS`.
        first_head: the number of the first head within the whole model, if these heads are one of several shards.
        total_heads: the number of query heads of the whole model. Default: first_head + heads.
        first_query: the position of the first query in the whole sequence, a multiple of 32.
        first_key: the position of the first key in the whole sequence, a multiple of 32.
        causal: the mask of the attention that will use the bits, as in `flash_attn_func`. Blocks of bits that the mask
            hides completely are left out and hold undefined values; a causal mask saves half of the work. Such bits fit
            only sequences of exactly these lengths, no variable-length batch, and a mask that hides at least as much:
            no side of its window may be larger (causal counts as a right side of 0), and its chunk must divide this
            one. Default: all pairs.
        window_size: see causal.
        attention_chunk: see causal.
        keep_bits: whether attention keeps the bits for its backward. If False, attention keeps the state, 16 bytes, and
            its backward generates the bits again. This needs the default mapping and rounds, all heads, and a
            first_query and first_key of 0.
        sm_margin: the number of SMs to leave to other kernels on a GPU. Changes no bits.

    Returns:
        The bits and the arguments that produced them.

    Raises:
        NotImplementedError: the state is neither on the CPU nor on a CUDA device.
        TypeError: an argument has the wrong type; the message names the argument.
        ValueError: an argument is out of range; the message names the argument.
    """
    request = checked_request(
        state, p=p, batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mapping=mapping, rounds=rounds,
        first_head=first_head, total_heads=total_heads, first_query=first_query, first_key=first_key, causal=causal,
        window_size=window_size, attention_chunk=attention_chunk, keep_bits=keep_bits, sm_margin=sm_margin,
    )  # fmt: skip
    return request.result(layout.generate(request.state.rng_state, **request.sizes))


def as_probability(name: str, p: object) -> float:
    """Returns p as a float from 0 to below 1 in fp32.

    Raises:
        TypeError: p is not a number.
        ValueError: p is out of range.
    """
    if not checks.is_number(p):
        raise TypeError(f"{name} must be a number from 0 to below 1, got {checks.describe(p)}")
    try:
        value = float(p)
    except OverflowError:
        value = math.inf
    # The kernels compute 1 - p in fp32, where the difference must not be 0.
    if not 0 <= value < 1 - 2.0**-25:
        raise ValueError(f"{name} must be from 0 to below 1 in fp32, got {checks.describe(p)}")
    return value


def _count(name: str, value: object, least: int, most: int) -> int:
    number = checks.as_int(name, value, "an int")
    if not least <= number <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {number}")
    return number


def _block_start(name: str, value: object, length: int) -> int:
    first = _count(name, value, 0, _MAX_SEQLEN - length)
    if first % layout.BLOCK_ROWS:
        raise ValueError(f"{name} must be a multiple of {layout.BLOCK_ROWS}, got {first}")
    return first

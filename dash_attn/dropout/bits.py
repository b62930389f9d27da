"""States, and the bits that are made of them."""

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
"""How random numbers become bits. "bit_sliced": ours, 32 elements in a few instructions. "flash_attention_2": the bits
that FlashAttention-2's kernels make of the same seed and offset, as its sources say."""
ROUNDS = (7, 10)
"""Rounds of Philox4x32. FlashAttention-2 has 7, the generator's authors propose 10 and call 7 sufficient."""

_MAX_SEQLEN = 2**30 - 1
_MAX_SEQUENCES = _MAX_HEADS = 2**16


@dataclasses.dataclass(frozen=True, eq=False)
class DropoutState:
    """Where masks come from: Philox's seed and offset, in a tensor on the device that needs them.

    Args:
        rng_state: int64 (2,), seed and offset, of which every 64 bits are used: sequence b of a call then has the
            number b. Or (batch, 2), one state for each sequence, each of which has the number 0: so a sequence has the
            mask in any batch or pack that it has alone.

    Raises:
        TypeError, ValueError: it is no such tensor.
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
        """A state that torch's generator of the device draws: reproducible under torch.manual_seed.

        The draw is a random tensor as any other. So activation checkpointing that preserves torch's generators draws
        the same one again, and each replay of a captured graph draws another.

        Args:
            device: where; default: torch's default device.
            batch: draw one state for each of so many sequences, (batch, 2); default: one for all, (2,).
            generator: default: the device's own.
        """
        shape = (2,) if batch is None else (_count("batch", batch, 0, _MAX_SEQLEN), 2)
        largest = torch.iinfo(torch.int64).max
        return cls(torch.randint(largest, shape, dtype=torch.int64, device=device, generator=generator))

    @classmethod
    def of(cls, seed: int, offset: int = 0, device: torch.device | str | None = None) -> DropoutState:
        """The state of two numbers of 64 bits, such as those that another library reports."""
        numbers = []
        for name, value in (("seed", seed), ("offset", offset)):
            number = _count(name, value, -(2**63), 2**64 - 1)
            numbers.append(number - 2**64 if number >= 2**63 else number)
        return cls(torch.tensor(numbers, dtype=torch.int64, device=device))


@dataclasses.dataclass(frozen=True, eq=False)
class DropoutBits:
    """Bits of `dropout_bits`, and what they were made of."""

    bits: Tensor
    """uint8 (batch, heads, ceil(seqlen_q / 32), ceil(seqlen_k / 32), 128), as csrc/dropout/mask.h has it."""
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
    """Whether a call of attention that is given these keeps them for its backward. If not, it keeps the state, and the
    backward makes them again."""

    @property
    def batch(self) -> int:
        return self.bits.shape[0]

    @property
    def heads(self) -> int:
        return self.bits.shape[1]

    @property
    def is_of_every_pair(self) -> bool:
        """Whether they were made for a mask under which every query sees every key, and so serve any."""
        return not self.causal and self.window_size == (-1, -1) and self.attention_chunk == 0

    def mask(self) -> Tensor:
        """bool (batch, heads, seqlen_q, seqlen_k): True is kept. Anything where the mask that the bits were made for
        lets no query see the key."""
        return layout.unpack(self.bits, self.seqlen_q, self.seqlen_k)


def keep_probability(p: float) -> float:
    """The probability with which an element is kept, a multiple of 1/256: (floor(255 (1 - p)) + 1) / 256.

    FlashAttention-2's: as there, what is kept is divided by 1 - p, from which this differs by up to 1/256.

    Raises:
        TypeError, ValueError: p is no number from 0 to below 1 in fp32.
    """
    return _compiled.dropout_threshold(as_probability("p", p)) / 256


_OF_BITS = tuple(field.name for field in dataclasses.fields(DropoutBits) if field.name != "bits")


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A call that makes bits, once its arguments are known to be right: those of `dropout_bits`, by their names."""

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
        """What `layout.generate` is told besides the state."""
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
    """The arguments of `dropout_bits`, of the types that the ops take.

    Raises:
        NotImplementedError, TypeError, ValueError: as `dropout_bits`.
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
        raise ValueError(f"rounds must be 7 with mapping='flash_attention_2', as FlashAttention-2 has, got {rounds}")
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
                f"keep_bits must be True with {name}={value!r} (the backward makes bits again of "
                f"{name}={of_backward!r} alone), got False"
            )
    states = state.rng_state
    if states.dim() == 2 and states.shape[0] != batch:
        raise ValueError(f"state must have one row for each of the {batch} sequences, got {states.shape[0]}")
    if states.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"state must be on the CPU or a CUDA device, got {states.device}")
    sm_margin = checks.as_sm_margin(sm_margin)
    if not keep_bits:  # a copy: the backward makes bits of it, and the caller's tensor may be refilled before
        state = DropoutState(states.clone())
    return Request(
        state, p, batch, heads, seqlen_q, seqlen_k, mapping, rounds, first_head, total_heads, first_query, first_key,
        causal, window_size, attention_chunk, keep_bits, sm_margin,
    )  # fmt: skip


def dropout_bits(
    state: DropoutState,
    *,
    p: float,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    mapping: str = layout.DEFAULT_MAPPING,
    rounds: int = layout.DEFAULT_ROUNDS,
    first_head: int = 0,
    total_heads: int | None = None,
    first_query: int = 0,
    first_key: int = 0,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int | None = 0,
    keep_bits: bool = True,
    sm_margin: int = 0,
) -> DropoutBits:
    """What dropout keeps, a bit for each query and key of every query head: batch * heads * seqlen_q * seqlen_k / 8 B.

    A bit depends on the state, p, the mapping, the rounds, the sequence's number and the places of its head, query and
    key in the whole, and on no other argument. Of a pack the lengths are those of the longest sequence, whose rows
    past their own lengths shorter ones leave unused.

    Args:
        state: where the bits come from; of shape (batch, 2) it has `batch` rows. The bits are on its device.
        p: the probability of dropping an element, from 0 to below 1 in fp32; see `keep_probability`.
        batch, heads, seqlen_q, seqlen_k: sequences and query heads, at most 65,536 each, and rows of a sequence, below
            2^30 each.
        mapping: one of `MAPPINGS`. "flash_attention_2" depends on total_heads, and takes 7 rounds and nothing else.
        rounds: one of `ROUNDS`.
        first_head, total_heads: which query heads of the whole model these are, for one of several shards of them.
            Default: all of them.
        first_query, first_key: likewise, of the rows of a sequence; multiples of 32.
        causal, window_size, attention_chunk: the mask of the attention to come, as `flash_attn_func` takes it. Blocks
            of bits that no query sees under it are left out, and hold anything: a causal mask saves half. Such bits go
            with sequences of just these lengths, no pack, and a mask each of whose limits hides as much at least: no
            side of its window is larger, causal being a right side of 0, and its chunk divides theirs. Default: all.
        keep_bits: whether attention that is given these keeps them for its backward. If False it keeps the state, 16
            bytes, and its backward makes the bits again; that takes the default mapping and rounds, all heads, and no
            first_query nor first_key.
        sm_margin: on a GPU, the number of SMs to leave to other kernels. Changes no bits.

    Raises:
        NotImplementedError: the state is neither on the CPU nor on a CUDA device.
        TypeError, ValueError: an argument is of a wrong type or out of its range.
    """
    request = checked_request(
        state, p=p, batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mapping=mapping, rounds=rounds,
        first_head=first_head, total_heads=total_heads, first_query=first_query, first_key=first_key, causal=causal,
        window_size=window_size, attention_chunk=attention_chunk, keep_bits=keep_bits, sm_margin=sm_margin,
    )  # fmt: skip
    return request.result(layout.generate(request.state.rng_state, **request.sizes))


def as_probability(name: str, p: object) -> float:
    """A float from 0 to below 1 in fp32.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not checks.is_number(p):
        raise TypeError(f"{name} must be a number from 0 to below 1, got {checks.describe(p)}")
    try:
        value = float(p)
    except OverflowError:
        value = math.inf
    # 1 - p is made in fp32, where it must not be 0: from here on p is 1 there.
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

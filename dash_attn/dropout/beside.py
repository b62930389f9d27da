"""Generates dropout bits concurrently with other work of the GPU: `dropout_bits_beside`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import layout
from .bits import DropoutBits, DropoutState, Request, checked_request


class BitsBeside:
    """The context manager of `dropout_bits_beside`. Its bits are available after its block."""

    def __init__(self, request: Request):
        self._request = request
        self._bits: Tensor | None = None
        self._is_done = False

    @property
    def bits(self) -> DropoutBits:
        """The bits, for `flash_attn_func(..., dropout_bits=...)`.

        Raises:
            RuntimeError: the block has not ended, or it ended with an exception.
        """
        if not self._is_done or self._bits is None:
            raise RuntimeError("bits are available only after the block of dropout_bits_beside has ended, got none yet")
        return self._request.result(self._bits)

    def __enter__(self) -> BitsBeside:
        if self._bits is not None:
            raise RuntimeError("a dropout_bits_beside can be entered only once, got a second time")
        request = self._request
        self._state = request.state.rng_state.contiguous()
        shape = layout.shape_of(request.batch, request.heads, request.seqlen_q, request.seqlen_k)
        # Both tensors belong to this stream, which waits for the side stream before it goes on. torch's allocator
        # therefore reuses their memory only after that, and need not know about the side stream.
        self._bits = torch.empty(shape, dtype=torch.uint8, device=self._state.device)
        if self._state.is_cuda:
            self._stream = torch.cuda.current_stream(self._state.device)
            self._fork = self._stream.record_event()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            return
        if self._state.is_cuda:
            side = _side_stream(self._state.device)
            # Ordered after the work that was queued before the block, and launched after the block's own work.
            side.wait_event(self._fork)
            try:
                with torch.cuda.stream(side):
                    self._generate()
            finally:  # otherwise a graph that is being captured would be lost too
                self._stream.wait_event(side.record_event())
        else:
            self._generate()
        self._is_done = True

    def _generate(self) -> None:
        layout.generate(self._state, **self._request.sizes, out=self._bits)


def dropout_bits_beside(
    state: DropoutState,
    *, p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int,
    mapping: str = layout.DEFAULT_MAPPING, rounds: int = layout.DEFAULT_ROUNDS, first_head: int = 0,
    total_heads: int | None = None, first_query: int = 0, first_key: int = 0, causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1), attention_chunk: int | None = 0, keep_bits: bool = False,
    sm_margin: int = 0,
) -> BitsBeside:  # fmt: skip
    """Generates `dropout_bits` on a second stream, concurrently with the work that a block queues on the current
    stream.

        with dropout_bits_beside(state, p=0.1, batch=2, heads=16, seqlen_q=4096, seqlen_k=4096, causal=True) as beside:
            qkv = torch.nn.functional.linear(x, weight)
        ...
        out = flash_attn_func(q, k, v, dropout_p=0.1, dropout_bits=beside.bits, causal=True)

    The generator waits for the work that was queued on the current stream before the block, and for nothing in the
    block. It is launched when the block ends, so that the block's kernels occupy the SMs first and the generator uses
    the rest; the GPU decides how much they overlap. Work that is queued on the current stream after the block waits for
    the bits, which then are an ordinary tensor. No CUDA call blocks the host, and a CUDA graph captures everything. A
    block that raises generates no bits. On the CPU the bits are generated when the block ends.

    Args:
        state: as in `dropout_bits`. Its tensor must be ready on the current stream before the block, and the block must
            not write to it.
        p: as in `dropout_bits`.
        batch: as in `dropout_bits`.
        heads: as in `dropout_bits`.
        seqlen_q: as in `dropout_bits`.
        seqlen_k: as in `dropout_bits`.
        mapping: as in `dropout_bits`.
        rounds: as in `dropout_bits`.
        first_head: as in `dropout_bits`.
        total_heads: as in `dropout_bits`.
        first_query: as in `dropout_bits`.
        first_key: as in `dropout_bits`.
        causal: as in `dropout_bits`.
        window_size: as in `dropout_bits`.
        attention_chunk: as in `dropout_bits`.
        keep_bits: as in `dropout_bits`, but False by default: attention's backward generates the bits again, so memory
            does not grow with the number of layers.
        sm_margin: the number of SMs on which the generator does not run.

    Returns:
        A context manager, whose `bits` are available after the block.

    Raises:
        NotImplementedError: the state is neither on the CPU nor on a CUDA device.
        TypeError: an argument has the wrong type; the message names the argument.
        ValueError: an argument is out of range; the message names the argument.
    """
    return BitsBeside(
        checked_request(
            state,
            p=p,
            batch=batch,
            heads=heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            mapping=mapping,
            rounds=rounds,
            first_head=first_head,
            total_heads=total_heads,
            first_query=first_query,
            first_key=first_key,
            causal=causal,
            window_size=window_size,
            attention_chunk=attention_chunk,
            keep_bits=keep_bits,
            sm_margin=sm_margin,
        )  # fmt: skip
    )


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns one stream per device: two generators at a time would delay each other."""
    return torch.cuda.Stream(device)

"""Bits of dropout that are made beside other work of the GPU: `dropout_bits_beside`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import layout
from .bits import DropoutBits, DropoutState, Request, checked_request


class BitsBeside:
    """Of `dropout_bits_beside`: a context manager, whose bits are there when its block has ended."""

    def __init__(self, request: Request):
        self._request = request
        self._bits: Tensor | None = None
        self._is_done = False

    @property
    def bits(self) -> DropoutBits:
        """For `flash_attn_func(..., dropout_bits=...)`.

        Raises:
            RuntimeError: the block has not ended, or an exception has ended it.
        """
        if not self._is_done or self._bits is None:
            raise RuntimeError("bits must be asked for when the block of dropout_bits_beside has ended, got none yet")
        return self._request.result(self._bits)

    def __enter__(self) -> BitsBeside:
        if self._bits is not None:
            raise RuntimeError("a dropout_bits_beside must be entered once, got a second time")
        request = self._request
        self._state = request.state.rng_state.contiguous()
        shape = layout.shape_of(request.batch, request.heads, request.seqlen_q, request.seqlen_k)
        # Both belong to this stream, which waits for the side stream before it goes on: so torch's allocator hands out
        # their memory again only behind that, and need not be told of the side stream.
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
            # Behind what was queued before the block, and launched behind what the block has queued.
            side.wait_event(self._fork)
            try:
                with torch.cuda.stream(side):
                    self._generate()
            finally:  # or a graph that is being captured would be lost with it
                self._stream.wait_event(side.record_event())
        else:
            self._generate()
        self._is_done = True

    def _generate(self) -> None:
        layout.generate(self._state, **self._request.sizes, out=self._bits)


def dropout_bits_beside(
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
    keep_bits: bool = False,
    sm_margin: int = 0,
) -> BitsBeside:
    """`dropout_bits`, made on a stream of their own beside what a block of code queues on the current one.

        with dropout_bits_beside(state, p=0.1, batch=2, heads=16, seqlen_q=4096, seqlen_k=4096, causal=True) as beside:
            qkv = torch.nn.functional.linear(x, weight)
        ...
        out = flash_attn_func(q, k, v, dropout_p=0.1, dropout_bits=beside.bits, causal=True)

    The generator waits for what the current stream had queued before the block, and for nothing of the block. It is
    launched when the block ends, so that the block's kernels come to the SMs first and the generator takes what they
    leave; how much they overlap is the GPU's affair. What is queued on the current stream after the block waits for
    the bits, which are then a tensor as any other. No CUDA call waits on the host, and a graph captures all of it. A
    block that raises makes no bits. On the CPU the bits are made when the block ends.

    Args:
        state: its tensor must be ready on the current stream before the block, and not be written in it.
        keep_bits: as in `dropout_bits`, but by default False: attention's backward makes the bits again, and memory
            does not grow with the layers.
        sm_margin: the number of SMs on which the generator does not run.
        others: as in `dropout_bits`.

    Raises:
        NotImplementedError: the state is neither on the CPU nor on a CUDA device.
        TypeError, ValueError: an argument is of a wrong type or out of its range.
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
    """One a device: of two that made bits at a time neither would be done sooner."""
    return torch.cuda.Stream(device)

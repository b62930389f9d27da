"""Computes the length of a run's blocks from the operations of its shapes, so that the run ends in time.

A run of hundreds of shapes measures in short blocks (`timing.short_block_ms`) of equal length. The length is computed
again before each shape, from the remaining time and the remaining shapes. A delay, such as a baseline that compiles its
kernels, therefore shortens later blocks instead of the list of shapes.
"""

import dataclasses

from benchmarks import timing
from benchmarks.shapes import Shape, flops

TURNS = 4
# The assumed throughput of a call. A slower call shortens later blocks.
TFLOPS = 400.0
FLUSH_S = 1e-4  # the L2 flush before each call, and the call's launch
PAUSE_S = 2e-3  # per sequence of calls: the host's head start and the wait for the end
SHAPE_S = 0.25  # per shape: its tensors, the preparation of the variants, and files
REFERENCE_TFLOPS = 20.0  # of the float32 reference, including its element-wise work
# Bounds in seconds: shorter blocks are meaningless, and longer blocks are not better.
LEAST_BLOCK_S, MOST_BLOCK_S = 1e-3, 0.5


@dataclasses.dataclass(frozen=True)
class Load:
    """A shape, and how many calls of each pass are measured at it."""

    shape: Shape
    calls: dict[str, int]

    def seconds(self, block_s: float, turns: int) -> float:
        """Returns the seconds that the shape should take with blocks of `block_s` seconds."""
        group = self.shape.heads // self.shape.kv_heads
        one_head = dataclasses.replace(self.shape, heads=group, kv_heads=1, batch=1)
        total = SHAPE_S + flops(one_head, "both") / (1e12 * REFERENCE_TFLOPS)
        for pass_, count in self.calls.items():
            call_s = flops(self.shape, pass_) / (1e12 * TFLOPS)
            first = call_s + FLUSH_S
            block = 2 * first + 2 * PAUSE_S  # a warm-up call, and a single call that counts
            if call_s < block_s:
                rounds = timing.rounds_in(block_s - call_s, call_s, 1) + timing.rounds_in(block_s, call_s, 1)
                block = first + rounds * first + 3 * PAUSE_S
            total += count * (first + turns * block)  # one more call for the check
        return total


def block_s(loads: list[Load], seconds: float, turns: int) -> float:
    """Returns the longest block with which all loads should take no more than `seconds`, from LEAST_BLOCK_S to
    MOST_BLOCK_S."""
    low, high = LEAST_BLOCK_S, MOST_BLOCK_S
    for _ in range(12):
        middle = (low * high) ** 0.5
        if sum(load.seconds(middle, turns) for load in loads) <= seconds:
            low = middle
        else:
            high = middle
    return low

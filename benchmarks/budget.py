"""The length of a run's blocks, worked out from the operations of its shapes so that the run ends in time.

A run of hundreds of shapes measures in short blocks (`timing.short_block_ms`), all equally long. Before each shape the
length is worked out anew, from the time that is left and the shapes that are, so that what took longer than expected,
such as a peer that compiles its kernels, shortens later blocks and not the list of shapes.
"""

import dataclasses

from benchmarks import timing
from benchmarks.shapes import Shape, flops

TURNS = 4
# What a call is expected to reach. A slower one makes later blocks shorter.
TFLOPS = 400.0
FLUSH_S = 1e-4  # of the L2 cache before each call, and the call's launch
PAUSE_S = 2e-3  # of each sequence of calls: the host's head start and the wait for its end
SHAPE_S = 0.25  # of each shape: its tensors, what the variants prepare, files
REFERENCE_TFLOPS = 20.0  # of the float32 reference, its element-wise work included
# Shorter ones say nothing, longer ones add nothing; in seconds.
LEAST_BLOCK_S, MOST_BLOCK_S = 1e-3, 0.5


@dataclasses.dataclass(frozen=True)
class Load:
    """A shape and how many calls of each pass are measured there."""

    shape: Shape
    calls: dict[str, int]

    def seconds(self, block_s: float, turns: int) -> float:
        """The seconds that the shape should take with blocks of `block_s` seconds."""
        group = self.shape.heads // self.shape.kv_heads
        one_head = dataclasses.replace(self.shape, heads=group, kv_heads=1, batch=1)
        total = SHAPE_S + flops(one_head, "both") / (1e12 * REFERENCE_TFLOPS)
        for pass_, count in self.calls.items():
            call_s = flops(self.shape, pass_) / (1e12 * TFLOPS)
            first = call_s + FLUSH_S
            block = 2 * first + 2 * PAUSE_S  # the first call, and the only one that counts
            if call_s < block_s:
                rounds = timing.rounds_in(block_s - call_s, call_s, 1) + timing.rounds_in(block_s, call_s, 1)
                block = first + rounds * first + 3 * PAUSE_S
            total += count * (first + turns * block)  # once to be checked
        return total


def block_s(loads: list[Load], seconds: float, turns: int) -> float:
    """The longest blocks with which all loads should take no more than `seconds`, between LEAST_BLOCK_S and
    MOST_BLOCK_S."""
    low, high = LEAST_BLOCK_S, MOST_BLOCK_S
    for _ in range(12):
        middle = (low * high) ** 0.5
        if sum(load.seconds(middle, turns) for load in loads) <= seconds:
            low = middle
        else:
            high = middle
    return low

"""Predicts the time of attention over many GPUs, from the costs of one GPU and of the links.

Nothing in this module measures several GPUs. With more ranks than KV heads, the ranks' plan is simulated one task after
the other, with messages that wait for no other message. dash_attn.distributed.simulate prints and draws the prediction.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from .. import schedule as _schedule
from .layout import check_layout
from .plan import Message, Task, make_plan

MOST_RANKS_PLAYED = 32
"""The largest number of gathering ranks whose plan is simulated. Larger numbers use a formula fitted to the
simulation."""
_ROWS_PLAYED = 16_384  # rows of a chunk: the schedule does not depend on them, and splits are those of long sequences


@dataclass(frozen=True)
class Costs:
    """The costs of one kind of GPU and its links. Rates count useful work; bandwidths are per GPU and direction."""

    forward_tflops: float = 658.0
    """TFLOP/s of the forward. Default: measured on an H200 with head_dim 128, causal, 4 heads and 16,384 tokens
    (benchmarks/README.md)."""
    backward_tflops: float = 608.0
    """TFLOP/s of the backward. Default: measured likewise with 16 heads."""
    node_gbs: float = 360.0
    """GB/s between GPUs of one node. Default: an assumed 0.8 of NVLink's nominal 450."""
    network_gbs: float = 45.0
    """GB/s of one GPU between nodes. Default: an assumed 0.9 of a 400 Gbit/s link."""
    hop_us: float = 10.0
    """Microseconds from the end of a task to the start of the next rank's, in addition to its bytes. Default:
    assumed."""
    task_us: float = 10.0
    """Microseconds that every launch takes in addition to its work. Default: assumed."""
    gpus_of_node: int = 8


@dataclass(frozen=True)
class Shape:
    """One layer of one sequence, with 16-bit elements."""

    seqlen: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    causal: bool = True
    layout: str = "zigzag"


@dataclass(frozen=True)
class Prediction:
    """The prediction for one layer's forward and backward. Times are in milliseconds."""

    gpus: int
    ulysses: int
    """The number of ranks over which heads are spread."""
    gather: int
    """The number of ranks over which rows are spread and keys are gathered; gpus = ulysses * gather."""
    forward_ms: float
    backward_ms: float
    ideal_ms: float
    """The time of the matrix products of both passes, spread evenly over all GPUs."""
    idle_share: float
    """The share of the backward's schedule by which it exceeds its work spread evenly."""
    network_bound: bool
    """Whether carrying the sums takes longer than the backward's schedule."""
    played: bool
    """Whether the plan was simulated; otherwise a formula replaces the simulation."""

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def share_of_ideal(self) -> float:
        """ideal / total: 1 is a perfect division."""
        return self.ideal_ms / self.total_ms


def predict(shape: Shape, gpus: int, costs: Costs | None = None) -> Prediction:
    """Predicts the time for a number of GPUs.

    The heads are spread over the largest divisor of the GPUs that exceeds neither the KV heads nor a node. The rest of
    the GPUs gather keys.

    Raises:
        ValueError: an argument is out of range; the message names the argument.
    """
    costs = Costs() if costs is None else costs
    _check(shape, gpus, costs)
    ulysses = max(n for n in range(1, min(gpus, shape.kv_heads, costs.gpus_of_node) + 1) if gpus % n == 0)
    gather = gpus // ulysses
    kv_heads = -(-shape.kv_heads // ulysses)  # of the rank with the most
    heads = kv_heads * (shape.heads // shape.kv_heads)
    pairs = shape.seqlen**2 / (2 if shape.causal else 1)
    flops = 4 * pairs * shape.head_dim  # in the forward of one head; the backward has 5 products instead of 2
    forward_ms = 1e3 * flops * heads / gather / (costs.forward_tflops * 1e12)
    backward_ms = 1e3 * 2.5 * flops * heads / gather / (costs.backward_tflops * 1e12)
    each_way = 4 * (shape.heads + shape.kv_heads) * shape.head_dim * shape.seqlen / gpus * (1 - 1 / ulysses)
    all_to_all_ms = each_way / (costs.node_gbs * 1e6)

    # GPUs of one node gather over the node's links, others over the network.
    link = (costs.node_gbs if gpus <= costs.gpus_of_node else costs.network_gbs) * 1e6  # bytes per millisecond
    gather_ms = 4 * shape.seqlen * kv_heads * shape.head_dim * (1 - 1 / gather) / link
    move_ms = 0.0
    if shape.causal and shape.layout == "contiguous" and gather > 1:
        # The ranks would have uneven work, so rows first move to zigzag chunks, and results move back.
        shape = replace(shape, layout="zigzag")
        move_ms = 4 * (heads + kv_heads) * shape.head_dim * shape.seqlen / gather * (1 - 1 / gather) / link
    # The keys of one KV head are gathered while the previous one is computed; only the first gather is exposed.
    forward_ms = max(forward_ms, gather_ms) + gather_ms / kv_heads
    played = gather <= MOST_RANKS_PLAYED
    factor = (_played if played else _formula)(shape, gather, heads, kv_heads, costs, link)
    carry_ms = 8 * shape.seqlen * kv_heads * shape.head_dim * (1 - 1 / (2 * gather)) / link if gather > 1 else 0.0
    scheduled_ms = backward_ms * factor
    network_ms = carry_ms + gather_ms
    return Prediction(
        gpus=gpus,
        ulysses=ulysses,
        gather=gather,
        forward_ms=all_to_all_ms + move_ms + forward_ms,
        backward_ms=all_to_all_ms + move_ms + max(scheduled_ms, network_ms) + gather_ms / kv_heads,
        ideal_ms=1e3 * flops * shape.heads / gpus * (1 / costs.forward_tflops + 2.5 / costs.backward_tflops) / 1e12,
        idle_share=1 - 1 / factor,
        network_bound=network_ms > scheduled_ms,
        played=played,
    )


def _check(shape: Shape, gpus: int, costs: Costs) -> None:
    check_layout(shape.layout)
    for name, value in (*vars(shape).items(), ("gpus", gpus)):
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads={shape.kv_heads}, got {shape.heads}")
    for name, value in vars(costs).items():
        least_is_allowed = name in ("hop_us", "task_us")
        if value < 0 or (value == 0 and not least_is_allowed):
            raise ValueError(f"{name} must be {'at least' if least_is_allowed else 'more than'} 0, got {value}")


def _chunks(shape: Shape, gather: int) -> int:
    return gather * (2 if shape.layout == "zigzag" else 1)


def _message_ms(shape: Shape, gather: int, costs: Costs, link: float) -> float:
    """Returns the time from a task's end to the start of the next rank's: dK and dV of a chunk of keys, in fp32."""
    return costs.hop_us / 1e3 + 8 * shape.seqlen / _chunks(shape, gather) * shape.head_dim / link


def _formula(shape: Shape, gather: int, heads: int, kv_heads: int, costs: Costs, link: float) -> float:
    """Returns the time of the schedule over its work spread evenly, within a tenth of the simulated plans.

    All chains of sums start on one rank, so the ranks begin one after the other. The last rank begins when the first
    split of the first KV head is half done, or done if chunks are contiguous. The messages of one chain and the
    launches of one rank add to that.
    """
    chunks = _chunks(shape, gather)
    rows = _ROWS_PLAYED * chunks
    splits = _schedule.problem(
        "descending", rows, rows, causal=shape.causal, head_dim=shape.head_dim, heads=heads // kv_heads, kv_heads=1
    ).splits
    sums = kv_heads * splits
    factor = 1 + (1 - 1 / gather) / sums / (2 if shape.layout == "zigzag" else 1)
    launches = sums * (chunks // gather) * (chunks / 2 if shape.causal and shape.layout == "zigzag" else chunks)
    waits_ms = chunks * _message_ms(shape, gather, costs, link) / sums + launches * costs.task_us / 1e3
    pairs = shape.seqlen**2 / (2 if shape.causal else 1)
    work_ms = 1e3 * 10 * pairs * shape.head_dim * heads / gather / (costs.backward_tflops * 1e12)
    return factor + waits_ms / work_ms


@functools.lru_cache(maxsize=256)
def _played(shape: Shape, gather: int, heads: int, kv_heads: int, costs: Costs, link: float) -> float:
    """Returns the same ratio from a simulation of the plan, with chunks of equal length."""
    if gather == 1:
        return 1.0
    count = _chunks(shape, gather)
    rows = _ROWS_PLAYED
    plan = make_plan(
        rows * count, rows * count, gather, layout=shape.layout, heads=heads, kv_heads=kv_heads,
        head_dim=shape.head_dim, causal=shape.causal, schedule="descending",
    )  # fmt: skip
    scale = (shape.seqlen / (rows * count)) ** 2
    per_pair = 1e3 * 10 * shape.head_dim * scale / (costs.backward_tflops * 1e12)
    message_ms = _message_ms(shape, gather, costs, link)
    finished: dict[Task, float] = {}
    free = [0.0] * gather
    position = [0] * gather
    went_on = True
    while went_on:
        went_on = False
        for rank, actions in enumerate(plan.actions):
            while position[rank] < len(actions):
                what = actions[position[rank]].what
                if isinstance(what, Task):
                    needed = [message.of for message in plan.needs.get(what, [])]
                    if not finished.keys() >= set(needed):
                        break
                    start = max([free[rank], *(finished[task] + message_ms for task in needed)])
                    finished[what] = free[rank] = start + plan.work[what] * per_pair + costs.task_us / 1e3
                position[rank] += 1
                went_on = True
    # No work waits for a result, so results count only at the end.
    sent = (a.what for actions in plan.actions for a in actions if isinstance(a.what, Message))
    free += [finished[message.of] + message_ms for message in sent]
    return max(free) / (sum(plan.work.values()) * per_pair / gather)

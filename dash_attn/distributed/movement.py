"""Moves pieces of tensors between the ranks of a group, with as few copies as possible."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .background import Background
from .channel import Channel, channel_of, made_together

# The width of the GPU's widest load and store. Single elements of 2 bytes do not reach its memory bandwidth.
_WORD = torch.complex128
_MOST_CTAS = 4
_message_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


class Move(NamedTuple):
    """One piece for each pair of ranks, with any strides. Both ends of a pair have the same shape and dtype."""

    sent: Sequence[Tensor]
    """The pieces for each rank."""
    received: Sequence[Tensor]
    """The pieces from each rank, which are written to."""


def exchange(channel: Channel, what: str, moves: Sequence[Move]) -> None:
    """Makes the moves, of which all ranks have the same number.

    While a move is in flight, the pieces of the next move are made contiguous and the pieces of the previous move are
    put in their places. Contiguous pieces are sent from and received into their own memory.

    Args:
        channel: the channel of the group.
        what: the name of the call, for messages.
        moves: the moves; all tensors are on one device, the group's.

    Raises:
        RankError: a rank died or stalls, for tensors on the CPU. On a GPU nothing waits here, and the watchdog of the
            group detects the loss.
    """
    me = channel.rank
    under_way = []
    for sent, received in moves:
        nothing = sent[me].new_empty(0)
        outgoing = [nothing if rank == me else _contiguous(x) for rank, x in enumerate(sent)]
        landing = [nothing if rank == me else _space_for(x) for rank, x in enumerate(received)]
        # Keeps the tensors alive until the later work on this stream.
        under_way.append((_start(channel, what, landing, outgoing), landing, outgoing))
    for sent, received in moves:
        _copy(received[me], sent[me])
    for (wait, landing, _), (_, received) in zip(under_way, moves):
        wait()
        for rank, x in enumerate(received):
            if rank != me and landing[rank] is not x:
                _copy(x, landing[rank])


def _start(channel: Channel, what: str, received: list[Tensor], sent: list[Tensor]) -> Callable[[], object]:
    """Starts an all-to-all of contiguous tensors. Call the result to wait for its end."""
    if channel.size == 1:
        return lambda: None
    if sent[0].device.type != "cpu":
        into, pieces = [_flat(x) for x in received], [_flat(x) for x in sent]
        return dist.all_to_all(into, pieces, group=channel.group, async_op=True).wait
    # gloo takes a single tensor.
    source = torch.cat([_bytes(x) for x in sent])
    sizes = [x.nbytes for x in received], [x.nbytes for x in sent]
    target = source.new_empty(sum(sizes[0]))
    channel.wait(lambda: dist.all_to_all_single(target, source, *sizes, group=channel.group, async_op=True), what)
    for piece, x in zip(received, target.split(sizes[0])):
        _bytes(piece).copy_(x)
    return lambda: None


def message_group(channel: Channel, what: str, device: torch.device) -> dist.ProcessGroup:
    """Returns the group for `send` and `receive`. All ranks must make the first call together, and wait for each other.

    On GPUs this is a separate NCCL group that uses few SMs. A message occupies these SMs until its other end arrives,
    and a task with as many work tiles as there are SMs takes twice as long if one SM is missing. torch keeps the group
    until the job's group is destroyed.

    Args:
        channel: the channel of the ranks.
        what: the name of the call, for messages.

    Raises:
        RankError: in the first call, if a rank died or stalls.
    """
    group, default = channel.group, dist.group.WORLD
    if device.type == "cpu":
        return group
    if (made := _message_groups.get(group)) is not None and (known := made()) is not None:
        return known
    assert default is not None
    if default.bound_device_id is not None and channel.size != default.size():
        return group  # NCCL would split the job's communicator, but not all of the job's ranks are here
    channel_of(group).exchange(what, {})  # NCCL would wait silently for a lost rank
    timeout = datetime.timedelta(seconds=channel.timeout)
    # The group's stream then comes from a pool that `turns` does not use.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    options.config.max_ctas = _MOST_CTAS
    ranks, stream = dist.get_process_group_ranks(group), torch.cuda.current_stream(device)

    def make() -> dist.ProcessGroup | None:
        with torch.cuda.stream(stream):  # also selects the device, which a new thread does not inherit
            made = dist.new_group(
                ranks, timeout=timeout, backend="nccl", pg_options=options, use_local_synchronization=True
            )
            # The first operation of a group must include all of its ranks.
            dist.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), min(ranks), made)
        return made

    made_now = made_together(f"an NCCL group of the ranks {ranks} of the job", channel.timeout, make)
    _message_groups[group] = weakref.ref(made_now)
    return made_now


def send(
    channel: Channel, group: dist.ProcessGroup, what: str, x: Tensor, receiver: int, tag: int
) -> Callable[[], object]:
    """Starts to send a contiguous tensor to a rank, which must `receive` it. Call the result to wait for the end.

    On a GPU this rank's messages and collectives run in the order in which they are started, and only the stream waits.
    On the CPU they may overtake each other, unless rank and tag are the same.

    Args:
        channel: the channel of the ranks.
        group: their `message_group`.
        what: the name of the call, for messages.
        tag: the tag, which must be the receiver's too.

    Raises:
        RankError: a rank died or stalls. The error is raised here or by the result, as in `exchange`.
    """
    return _begin(channel, group, what, dist.isend, x, receiver, tag)


def receive(
    channel: Channel, group: dist.ProcessGroup, what: str, x: Tensor, sender: int, tag: int
) -> Callable[[], object]:
    """Starts the other end of `send`, which writes into x. Errors are those of `send`."""
    return _begin(channel, group, what, dist.irecv, x, sender, tag)


def _begin(
    channel: Channel, group: dist.ProcessGroup, what: str, operation: Any, x: Tensor, other: int, tag: int
) -> Callable[[], object]:
    peer = dist.get_global_rank(channel.group, other)

    message_of_one = dist.P2POp(operation, _bytes(x), peer, group, tag)

    def start() -> dist.Work:
        # A batch of one message uses the group's NCCL communicator; a single message would create one for two ranks.
        (work,) = dist.batch_isend_irecv([message_of_one])
        return work

    if x.device.type != "cpu":
        return start().wait
    # gloo reports the end of a message only to the thread that waits for it.
    message = Background(channel.begin(start, what).wait)
    return lambda: channel.wait(lambda: message, what)


def _bytes(x: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor, in one dimension."""
    return _flat(x).view(torch.uint8)


def _flat(x: Tensor) -> Tensor:
    """Returns a contiguous tensor in one dimension with stride 1. (A view of one element may keep any stride.)"""
    return x.as_strided((x.numel(),), (1,))


def _contiguous(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return x
    copied = torch.empty_like(x, memory_format=torch.contiguous_format)
    _copy(copied, x)
    return copied


def _space_for(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)


def _copy(into: Tensor, x: Tensor) -> None:
    if _has_words(into) and _has_words(x):
        into, x = into.view(_WORD), x.view(_WORD)
    into.copy_(x)


def _has_words(x: Tensor) -> bool:
    """Whether the rows of adjacent elements consist of whole words at aligned addresses."""
    size, own = _WORD.itemsize, x.dtype.itemsize
    if x.dim() < 2 or x.numel() == 0 or x.stride(-1) != 1 or x.data_ptr() % size:
        return False
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return all(step * own % size == 0 for step in steps)

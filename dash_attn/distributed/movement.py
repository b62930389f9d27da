"""Pieces of tensors from rank to rank of a group: nothing but copies, and as few as there can be."""

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

# As wide as a GPU loads and stores at once. Elements of 2 bytes, one by one, do not fill its memory's bandwidth.
_WORD = torch.complex128
_MOST_CTAS = 4
_message_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


class Move(NamedTuple):
    """One piece for each pair of ranks, in any strides; the two ends of a pair have one shape and dtype."""

    sent: Sequence[Tensor]
    """To each rank."""
    received: Sequence[Tensor]
    """From each rank; they are written to."""


def exchange(channel: Channel, what: str, moves: Sequence[Move]) -> None:
    """Makes the moves, of which all ranks have as many.

    A move is on its way while pieces of the next are made contiguous, and while those of the one before are put in
    their places. What is contiguous already is sent from where it is, or received to where it belongs.

    Args:
        channel: of the group.
        what: the call, for messages.
        moves: all tensors are on one device, that of the group.

    Raises:
        RankError: a rank died or stalls, where tensors are on the CPU. On a GPU nobody waits here; there the watchdog
            of the group looks.
    """
    me = channel.rank
    under_way = []
    for sent, received in moves:
        nothing = sent[me].new_empty(0)
        outgoing = [nothing if rank == me else _contiguous(x) for rank, x in enumerate(sent)]
        landing = [nothing if rank == me else _space_for(x) for rank, x in enumerate(received)]
        # The tensors stay until what follows on this stream comes after them.
        under_way.append((_start(channel, what, landing, outgoing), landing, outgoing))
    for sent, received in moves:
        _copy(received[me], sent[me])
    for (wait, landing, _), (_, received) in zip(under_way, moves):
        wait()
        for rank, x in enumerate(received):
            if rank != me and landing[rank] is not x:
                _copy(x, landing[rank])


def _start(channel: Channel, what: str, received: list[Tensor], sent: list[Tensor]) -> Callable[[], object]:
    """An all-to-all of contiguous tensors; the result is called to wait for it."""
    if channel.size == 1:
        return lambda: None
    if sent[0].device.type != "cpu":
        into, pieces = [_flat(x) for x in received], [_flat(x) for x in sent]
        return dist.all_to_all(into, pieces, group=channel.group, async_op=True).wait
    # gloo takes one tensor.
    source = torch.cat([_bytes(x) for x in sent])
    sizes = [x.nbytes for x in received], [x.nbytes for x in sent]
    target = source.new_empty(sum(sizes[0]))
    channel.wait(lambda: dist.all_to_all_single(target, source, *sizes, group=channel.group, async_op=True), what)
    for piece, x in zip(received, target.split(sizes[0])):
        _bytes(piece).copy_(x)
    return lambda: None


def message_group(channel: Channel, what: str, device: torch.device) -> dist.ProcessGroup:
    """For `send` and `receive`; the first call must be made by all ranks, whose hosts wait for each other.

    On GPUs a group of its own, which takes few SMs. A message waits on them for its other end, and a task with as many
    work tiles as there are SMs takes twice as long where one is missing. torch keeps it until the job's group ends.

    Args:
        channel: of the ranks.
        what: the call, for messages.

    Raises:
        RankError: at the first call, a rank died or stalls.
    """
    group, default = channel.group, dist.group.WORLD
    if device.type == "cpu":
        return group
    if (made := _message_groups.get(group)) is not None and (known := made()) is not None:
        return known
    assert default is not None
    if default.bound_device_id is not None and channel.size != default.size():
        return group  # NCCL would split the communicator of the job, whose ranks are not all here
    channel_of(group).exchange(what, {})  # NCCL would wait in silence for one that is lost
    timeout = datetime.timedelta(seconds=channel.timeout)
    # Its stream is then of a pool that `turns` has none of.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    options.config.max_ctas = _MOST_CTAS
    ranks, stream = dist.get_process_group_ranks(group), torch.cuda.current_stream(device)

    def make() -> dist.ProcessGroup | None:
        with torch.cuda.stream(stream):  # and on its device: a new thread has neither
            made = dist.new_group(
                ranks, timeout=timeout, backend="nccl", pg_options=options, use_local_synchronization=True
            )
            # The first operation of a group is one of all its ranks.
            dist.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), min(ranks), made)
        return made

    made_now = made_together(f"a group of NCCL of the ranks {ranks} of the job", channel.timeout, make)
    _message_groups[group] = weakref.ref(made_now)
    return made_now


def send(
    channel: Channel, group: dist.ProcessGroup, what: str, x: Tensor, receiver: int, tag: int
) -> Callable[[], object]:
    """Begins to send a contiguous tensor to a rank, which begins to `receive` it; the result is called to wait for it.

    On a GPU this rank's messages and collectives follow each other, in the order in which they are begun, and only the
    stream waits. On the CPU they pass each other, unless rank and tag are the same.

    Args:
        channel: of the ranks.
        group: their `message_group`.
        what: the call, for messages.
        tag: the receiver's too.

    Raises:
        RankError: from the result, as `exchange`.
    """
    return _begin(channel, group, what, dist.isend, x, receiver, tag)


def receive(
    channel: Channel, group: dist.ProcessGroup, what: str, x: Tensor, sender: int, tag: int
) -> Callable[[], object]:
    """The other end of `send`; x is written to."""
    return _begin(channel, group, what, dist.irecv, x, sender, tag)


def _begin(
    channel: Channel, group: dist.ProcessGroup, what: str, operation: Any, x: Tensor, other: int, tag: int
) -> Callable[[], object]:
    peer = dist.get_global_rank(channel.group, other)
    # As a batch of one it has NCCL's communicator of the group, not one of the two ranks that would be made for it.
    (work,) = dist.batch_isend_irecv([dist.P2POp(operation, _bytes(x), peer, group, tag)])
    if x.device.type != "cpu":
        return work.wait
    # gloo tells the end of a message only to the thread that waits for it.
    message = Background(work.wait)
    return lambda: channel.wait(lambda: message, what)


def _bytes(x: Tensor) -> Tensor:
    """A contiguous tensor's, in one dimension."""
    return _flat(x).view(torch.uint8)


def _flat(x: Tensor) -> Tensor:
    """A contiguous tensor in one dimension, of stride 1. A view of one element may keep any stride."""
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
    """Whether rows of elements that lie side by side are whole words, at addresses that are multiples of them."""
    size, own = _WORD.itemsize, x.dtype.itemsize
    if x.dim() < 2 or x.numel() == 0 or x.stride(-1) != 1 or x.data_ptr() % size:
        return False
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return all(step * own % size == 0 for step in steps)

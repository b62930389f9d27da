"""Exchanges records between the ranks of a group before data moves, and identifies ranks that are lost.

Records go from host to host over gloo, so no call waits for a GPU. If a rank does not arrive, the others search for it
through the job's store: each of them notes that it is alive, and the ranks without a note are reported to all.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .background import Background

Made = TypeVar("Made")

_RECORD_BYTES = 4096
_LONGEST_TEXT = 1500
_LOOK_S = 0.2  # seconds between looks at the store
_GRACE_S = 1.0  # seconds for the other ranks to notice that a rank is missing
_LONGEST_PAUSE_S = 0.002


class RankError(RuntimeError):
    """One or several ranks prevent a call, so every rank of the group raises this error; the message gives the reason.

    Attributes:
        ranks: the numbers of these ranks in the group; empty if they are unknown.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.ranks = ranks


class Channel:
    """The connection of one rank to the others of its group. All ranks must make the same calls in the same order.

    The channel keeps no reference to its group. A group that outlives `destroy_process_group` leaves gloo's threads
    running until the interpreter ends, where a thread that releases a tensor kills the process.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._ranks_of_job = dist.get_process_group_ranks(group)
        self.timeout = _timeout_of(group)
        self._host = weakref.ref(group if _has_gloo(group) else _gloo_group(self._ranks_of_job, self.timeout))
        store = distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"dash_attn/{group.group_name}", store)
        # Kept between calls, so that one thread at most waits for a store that does not answer.
        self._look: Background[bool] | None = None
        self._calls = 0
        self._broken: RankError | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        return _existing(self._group)

    def exchange(self, what: str, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns every rank's record, in the order of the ranks.

        Args:
            what: the name of the call, for messages.
            record: a short record of values that JSON can represent.

        Raises:
            RankError: a rank died, stalls or makes another call.
        """
        if self._broken is not None:
            raise self._broken
        self._calls += 1
        text = json.dumps({**record, "what": what}).encode()
        if len(text) > _RECORD_BYTES:
            raise ValueError(f"record must have at most {_RECORD_BYTES} bytes, got {len(text)}")
        own = torch.frombuffer(bytearray(text.ljust(_RECORD_BYTES)), dtype=torch.uint8)
        texts = [bytearray(_RECORD_BYTES) for _ in range(self.size)]
        all_ranks = [torch.frombuffer(x, dtype=torch.uint8) for x in texts]
        self.wait(lambda: dist.all_gather(all_ranks, own, group=_existing(self._host), async_op=True), what)
        records = [json.loads(x) for x in texts]
        self._check_same_call(records)
        return records

    def fail_together(self, what: str, error: Exception) -> None:
        """Reports an error of this rank's call to the others instead of a record. The caller then raises the error."""
        self.exchange(what, {"error": f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]})

    def name(self, ranks: list[int]) -> str:
        """Returns `rank 2`, with its number in the job if that differs."""
        texts = [f"{r}" if self._ranks_of_job[r] == r else f"{r} (of the job {self._ranks_of_job[r]})" for r in ranks]
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"

    def wait(self, start: Any, what: str) -> None:
        """Starts a collective of CPU tensors or a message, and waits for its end.

        Raises:
            RankError: a rank died or stalls.
        """
        began = time.monotonic()
        with self._found_lost(what, began):
            work = start()
            looked, pause = began, 0.0
            while not work.is_completed():
                now = time.monotonic()
                if now - began > self.timeout - self._margin:
                    self._raise_lost(what, began, f"no answer for {now - began:.0f} s")
                if self._look is not None and self._look.is_completed():
                    look, self._look = self._look, None
                    try:
                        is_lost = look.wait()
                    except RuntimeError:
                        # The store is gone, but the ranks may be fine: the collective or its deadline ends the wait.
                        is_lost, looked = False, math.inf
                    if is_lost:
                        self._raise_lost(what, began, "another rank got no answer")
                if self._look is None and now - looked > _LOOK_S:
                    looked = now
                    self._look = Background(lambda: self._has("lost"))
                time.sleep(pause)
                pause = min(pause + 2e-5, _LONGEST_PAUSE_S)
            work.wait()

    def begin(self, start: Callable[[], Made], what: str) -> Made:
        """Starts a message and returns its work. gloo raises already here if the connection to the other end is lost.

        Raises:
            RankError: a rank died or stalls.
        """
        with self._found_lost(what, time.monotonic()):
            return start()

    @contextlib.contextmanager
    def _found_lost(self, what: str, began: float) -> Iterator[None]:
        """Turns gloo's error about a connection into the RankError that names the lost ranks."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            self._raise_lost(what, began, str(error).split(". ")[0])

    @property
    def _margin(self) -> float:
        """How many seconds before the group's timeout the ranks begin to search for missing ranks."""
        return min(10.0, 0.3 * self.timeout)

    def _raise_lost(self, what: str, began: float, cause: str) -> None:
        """Determines together with all live ranks which ranks are lost, and raises a RankError.

        A store whose host is frozen or has lost its power does not answer, and no timeout of torch's ends that wait.
        """
        now = time.monotonic()
        deadline = max(began + self.timeout, now + _GRACE_S) + _GRACE_S
        try:
            lost = Background(lambda: self._find_lost(began)).wait(deadline - now)
        except (RuntimeError, TimeoutError) as error:
            self._broken = RankError(
                f"{what} cannot be done: {cause}; the missing rank cannot be identified, because the job's store does "
                f"not answer ({str(error).splitlines()[0]}). The store runs in rank 0 of the job, "
                "unless torchrun runs it"
            )
            raise self._broken from None
        if self.rank in lost:
            text = f"the other ranks gave up on {self.name([self.rank])} (this rank), which came too late"
        elif lost:
            text = f"{self.name(lost)} died or stalls ({cause})"
        else:
            text = f"all ranks are alive, but a connection is lost ({cause})"
        self._broken = RankError(f"{what} cannot be done: {text}", tuple(lost))
        raise self._broken from None

    def _find_lost(self, began: float) -> list[int]:
        self._store.set("lost", "1")
        self._store.set(f"alive/{self.rank}", "1")
        asked = time.monotonic()
        while not self._has("verdict"):
            now = time.monotonic()
            missing = [rank for rank in range(self.size) if not self._has(f"alive/{rank}")]
            # A dead rank never comes back, so a single missing rank must be dead. Of several, some may only be busy.
            if now - asked > _GRACE_S and (len(missing) <= 1 or now - began > self.timeout):
                self._store.compare_set("verdict", "", json.dumps(missing))
            else:
                time.sleep(_LOOK_S / 4)
        return json.loads(self._store.get("verdict"))

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _check_same_call(self, records: list[dict[str, Any]]) -> None:
        wrong = [rank for rank, record in enumerate(records) if "error" in record]
        if wrong:
            if self.rank in wrong:
                return
            raise RankError(f"{self.name(wrong[:1])} cannot do its call: {records[wrong[0]]['error']}", tuple(wrong))
        self.require_same("the call", [record["what"] for record in records])

    def require_same(self, subject: str, values: list[Any]) -> None:
        """Raises a RankError if the ranks' values differ. The message names the ranks in the minority.

        Args:
            subject: what the values are, for the message.
            values: one value per rank.
        """
        texts = [json.dumps(value) for value in values]
        usual = max(texts, key=lambda text: (texts.count(text), -texts.index(text)))
        others = [rank for rank, text in enumerate(texts) if text != usual]
        if others:
            raise RankError(
                f"{subject} must be the same on every rank: {self.name(others)} got {_plain(values[others[0]])}, "
                f"{self.name([texts.index(usual)])} got {_plain(values[texts.index(usual)])}",
                tuple(others),
            )


class PartOfChannel(Channel):
    """Some of a channel's ranks, between which tensors move.

    Records, lost ranks and the names of ranks belong to the whole channel. A rank that waits here therefore learns of a
    rank that is lost anywhere in the group.
    """

    def __init__(self, whole: Channel, group: dist.ProcessGroup):
        self._whole, self._group = whole, weakref.ref(group)
        self.rank, self.size, self.timeout = dist.get_rank(group), dist.get_world_size(group), whole.timeout

    def exchange(self, what: str, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._whole.exchange(what, record)

    def name(self, ranks: list[int]) -> str:
        return self._whole.name(ranks)

    def wait(self, start: Any, what: str) -> None:
        self._whole.wait(start, what)

    def begin(self, start: Callable[[], Made], what: str) -> Made:
        return self._whole.begin(start, what)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _has_gloo(group: dist.ProcessGroup) -> bool:
    return "cpu:gloo" in str(distributed_c10d.get_backend_config(group))


def _gloo_group(ranks: list[int], timeout_s: float) -> dist.ProcessGroup:
    """Creates a group of these ranks of the job for CPU tensors."""
    if ranks != sorted(ranks):
        raise ValueError(f"mesh must have ascending ranks, got {ranks}")
    timeout = datetime.timedelta(seconds=timeout_s)
    return made_together(
        f"a gloo group of the ranks {ranks} of the job",
        timeout_s,
        lambda: dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True),
    )


def made_together(what: str, timeout_s: float, make: Callable[[], Made | None]) -> Made:
    """Returns the result of `make`, which all ranks call together after they have met in the job's store.

    Args:
        what: what is created, for the message.
        timeout_s: how many seconds the ranks wait for each other.
        make: the call that creates the result.

    Raises:
        RankError: a rank does not arrive within the timeout, or the store does not answer.
    """
    try:
        made = Background(make).wait(timeout_s + _GRACE_S)
    except (RuntimeError, TimeoutError) as error:
        raise RankError(
            f"{what} cannot be created: a rank died or stalls, or the job's store does not answer "
            f"({str(error).splitlines()[0]})"
        ) from None
    assert made is not None
    return made


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Returns how many seconds a collective of the group may take."""
    device = torch.device("cpu" if _has_gloo(group) else "cuda")
    return group._get_backend(device).options._timeout.total_seconds()


def _existing(reference: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    group = reference()
    if group is None:
        raise RuntimeError("the process group of the call has been destroyed")
    return group


_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel] = weakref.WeakKeyDictionary()


def channel_of(group: dist.ProcessGroup) -> Channel:
    """Returns the channel of a group. All of the group's ranks must make the first call on it together."""
    channel = _channels.get(group)
    if channel is None:
        channel = _channels[group] = Channel(group)
    return channel


_GroupsOfRanks = dict[tuple[int, ...], "weakref.ref[dist.ProcessGroup]"]
# For each job, the groups that are not the caller's. torch keeps them until the job's group is destroyed.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupsOfRanks] = weakref.WeakKeyDictionary()


def channel_of_ranks(ranks: list[int], part: dist.ProcessGroup) -> Channel:
    """Returns the channel of some of the job's ranks. All of them must make the first call on it together.

    Args:
        ranks: the ranks in ascending order.
        part: a group of some of the ranks, whose timeout is used for all.

    Raises:
        ValueError: the ranks do not ascend.
    """
    job = dist.group.WORLD
    assert job is not None
    if ranks == dist.get_process_group_ranks(job):
        return channel_of(job)
    made = _groups.setdefault(job, {})
    if tuple(ranks) not in made:
        made[tuple(ranks)] = weakref.ref(_gloo_group(ranks, _timeout_of(part)))
    return channel_of(_existing(made[tuple(ranks)]))

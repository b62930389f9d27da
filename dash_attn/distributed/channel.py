"""What the ranks of a group tell each other before data moves, and how a rank that is lost is found and named.

Records go from host to host over gloo, so no call waits for a GPU. A rank that does not come is looked for through the
job's store: each of the others notes there that it is alive, and who is left over is named to all.
"""

from __future__ import annotations

import datetime
import json
import math
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .background import Background

Made = TypeVar("Made")

_RECORD_BYTES = 4096
_LONGEST_TEXT = 1500
_LOOK_S = 0.2  # between looks at the store
_GRACE_S = 1.0  # for the others to see that one is looked for
_LONGEST_PAUSE_S = 0.002


class RankError(RuntimeError):
    """One or more ranks of the group are the cause that a call cannot be done on any; the message says why.

    Attributes:
        ranks: their numbers in the group; empty where nobody can say.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.ranks = ranks


class Channel:
    """Of one group on one rank. Every rank must make the same calls in the same order.

    It does not keep its group: one that outlives `destroy_process_group` has gloo's threads run on into the end of the
    interpreter, where one that lets go of a tensor ends the process.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._ranks_of_job = dist.get_process_group_ranks(group)
        self.timeout = _timeout_of(group)
        self._host = weakref.ref(group if _has_gloo(group) else _gloo_group(self._ranks_of_job, self.timeout))
        store = distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"dash_attn/{group.group_name}", store)
        # Kept from call to call: while the store does not answer, one thread waits for it and not one for each call.
        self._look: Background[bool] | None = None
        self._calls = 0
        self._broken: RankError | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        return _existing(self._group)

    def exchange(self, what: str, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every rank's record, in the order of the ranks.

        Args:
            what: the call, for messages.
            record: what JSON can hold, short.

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
        """Tells the others in place of a record that this rank's call was wrong; the caller raises."""
        self.exchange(what, {"error": f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]})

    def name(self, ranks: list[int]) -> str:
        """`rank 2`, with the rank in the job where that is another."""
        texts = [f"{r}" if self._ranks_of_job[r] == r else f"{r} (of the job {self._ranks_of_job[r]})" for r in ranks]
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"

    def wait(self, start: Any, what: str) -> None:
        """Starts a collective of CPU tensors, or takes up a message, and waits for its end.

        Raises:
            RankError: a rank died or stalls.
        """
        began = time.monotonic()
        try:
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
                        # The store is gone, which harms no rank: the collective or its deadline ends the wait.
                        is_lost, looked = False, math.inf
                    if is_lost:
                        self._raise_lost(what, began, "another rank waits for it in vain")
                if self._look is None and now - looked > _LOOK_S:
                    looked = now
                    self._look = Background(lambda: self._has("lost"))
                time.sleep(pause)
                pause = min(pause + 2e-5, _LONGEST_PAUSE_S)
            work.wait()
        except RankError:
            raise
        except RuntimeError as error:
            self._raise_lost(what, began, str(error).split(". ")[0])

    @property
    def _margin(self) -> float:
        """How long before the group's timeout ranks begin to look for who is missing."""
        return min(10.0, 0.3 * self.timeout)

    def _raise_lost(self, what: str, began: float, cause: str) -> None:
        """Finds out with all ranks that are alive which are not.

        A store whose host is frozen or has lost its power answers nothing, and no timeout of torch's ends the wait.
        """
        now = time.monotonic()
        deadline = max(began + self.timeout, now + _GRACE_S) + _GRACE_S
        try:
            lost = Background(lambda: self._find_lost(began)).wait(deadline - now)
        except (RuntimeError, TimeoutError) as error:
            self._broken = RankError(
                f"{what} cannot be done: {cause}; which rank is missing cannot be found out, because the job's store "
                f"does not answer ({str(error).splitlines()[0]}). It lives in rank 0 of the job, unless torchrun has it"
            )
            raise self._broken from None
        if self.rank in lost:
            text = f"the other ranks gave up on {self.name([self.rank])}, this one, which came too late"
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
            # One that died is never alive again: it must be the last that is missing. Of several, some may be busy.
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
        """Raises RankError where the ranks' values differ; those in the minority are named.

        Args:
            subject: what the values are, for the message.
            values: one for each rank.
        """
        texts = [json.dumps(value) for value in values]
        usual = max(texts, key=lambda text: (texts.count(text), -texts.index(text)))
        others = [rank for rank, text in enumerate(texts) if text != usual]
        if others:
            raise RankError(
                f"{subject} must be the same on every rank: {self.name(others)} got {_plain(values[others[0]])}, "
                f"{self.name([texts.index(usual)])} {_plain(values[texts.index(usual)])}",
                tuple(others),
            )


class PartOfChannel(Channel):
    """Some of a channel's ranks, between which tensors move.

    What is agreed on, who is lost and what ranks are called is the affair of the whole channel: so a rank that waits
    here learns of one that is lost anywhere.
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


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _has_gloo(group: dist.ProcessGroup) -> bool:
    return "cpu:gloo" in str(distributed_c10d.get_backend_config(group))


def _gloo_group(ranks: list[int], timeout_s: float) -> dist.ProcessGroup:
    """Of these ranks of the job, for tensors on the CPU."""
    if ranks != sorted(ranks):
        raise ValueError(f"mesh must be of ranks that ascend, got {ranks}")
    timeout = datetime.timedelta(seconds=timeout_s)
    return made_together(
        f"a group of gloo of the ranks {ranks} of the job",
        timeout_s,
        lambda: dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True),
    )


def made_together(what: str, timeout_s: float, make: Callable[[], Made | None]) -> Made:
    """What `make` returns, which ranks call together and for which they meet in the job's store.

    Args:
        what: is made, for the message.

    Raises:
        RankError: a rank does not come within the timeout, or the store does not answer.
    """
    try:
        made = Background(make).wait(timeout_s + _GRACE_S)
    except (RuntimeError, TimeoutError) as error:
        raise RankError(
            f"{what} cannot be made: one of them died or stalls, or the job's store does not answer "
            f"({str(error).splitlines()[0]})"
        ) from None
    assert made is not None
    return made


def _timeout_of(group: dist.ProcessGroup) -> float:
    """In seconds: how long a collective of the group may take."""
    device = torch.device("cpu" if _has_gloo(group) else "cuda")
    return group._get_backend(device).options._timeout.total_seconds()


def _existing(reference: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    group = reference()
    if group is None:
        raise RuntimeError("the process group of the call has been destroyed")
    return group


_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel] = weakref.WeakKeyDictionary()


def channel_of(group: dist.ProcessGroup) -> Channel:
    """The channel of a group; the first call on it must be made by all of its ranks."""
    channel = _channels.get(group)
    if channel is None:
        channel = _channels[group] = Channel(group)
    return channel


_GroupsOfRanks = dict[tuple[int, ...], "weakref.ref[dist.ProcessGroup]"]
# Of each job those that no caller has made; torch keeps them until the job's group is destroyed.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupsOfRanks] = weakref.WeakKeyDictionary()


def channel_of_ranks(ranks: list[int], part: dist.ProcessGroup) -> Channel:
    """The channel of ranks of the job; the first call on them must be made by all.

    Args:
        ranks: in ascending order.
        part: a group of some of them, whose timeout is that of all.

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

"""The backward of one rank with gathered keys: runs the rank's part of `plan` task by task.

dQ of this rank's queries is summed here. dK and dV of a chunk of keys arrive in fp32 from the rank whose queries come
earlier in the order, and go on to the rank whose queries come next. The last rank rounds them and sends them to their
owner. On GPUs streams wait instead of hosts, and tasks of different sums overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference import Chunk
from . import movement, parts
from .channel import Channel
from .layout import Rows
from .plan import Message, Plan, Task
from .turns import Held, Turns

# The group is the caller's, who may use small tags for messages of their own.
_FIRST_TAG = 0x0DA5_0000

Chain = tuple[int, int, int]
"""(KV head, split, chunk of keys)"""


class Chunks(NamedTuple):
    """The positions of the chunks, by chunk number."""

    own_queries: dict[int, Rows]
    """This rank's chunks, in its rows."""
    own_keys: dict[int, Rows]
    """Likewise."""
    queries: Sequence[Rows]
    """All chunks of queries, in the sequence."""
    keys: Sequence[Rows]
    """Likewise."""

    def place(self, task: Task) -> Chunk:
        first_query, first_key = self.queries[task.query_chunk].start, self.keys[task.kv_chunk].start
        return Chunk(self.queries[-1].stop, self.keys[-1].stop, first_query, first_key)


class Carrier:
    """One rank's part of one backward.

    Args:
        channel: the channel of the group.
        what: the name of the call, for messages.
        plan: the plan for these shapes.
        rule: the rule of all parts.
        operands: this rank's queries and all keys, of all heads.
        chunks: the positions of the chunks.
    """

    def __init__(
        self,
        channel: Channel,
        what: str,
        plan: Plan,
        rule: parts.Rule,
        operands: parts.Operands,
        chunks: Chunks,
    ):
        self._channel, self._what, self._plan, self._rule = channel, what, plan, rule
        self._operands, self._chunks = operands, chunks
        self._group = operands.q.shape[2] // operands.k.shape[2]
        self._message_group = movement.message_group(channel, what, operands.q.device)
        self._turns = Turns(operands.q)
        self._dq_sums: dict[tuple[int, int, int], Held] = {}
        # For each chain: the running sums, the sums of whole splits, and the rounded dK and dV in one tensor.
        self._key_sums: dict[Chain, Held] = {}
        self._totals: dict[Chain, Held] = {}
        self._results: dict[Chain, Held] = {}
        self._messages: dict[tuple[str, int], int] = {}

    def run(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Computes the gradients of this rank's rows into `dq`, `dk` and `dv`."""
        with self._turns:
            for kind, what in self._plan.actions[self._channel.rank]:
                if isinstance(what, Task):
                    with self._turns.turn():
                        self._add(what, dq)
                else:
                    with self._turns.message():
                        (self._send if kind == "send" else self._receive)(what)
        for chain, result in self._results.items():
            result.wait()
            rows = slice(*self._chunks.own_keys[chain[2]])
            for gradient, x in zip((dk, dv), self._rounded(result.x, chain)):
                gradient[:, rows, chain[0]] = x[:, :, 0]

    def _add(self, task: Task, dq: Tensor) -> None:
        """Runs a task: adds to dQ of its queries and to dK and dV of its keys, and finishes the sums that end here."""
        chain, of_dq = _chain_of(task), (task.kv_head, task.first_head, task.query_chunk)
        kv_head, split, chunk = chain
        first = kv_head * self._group + task.first_head
        rows, heads = slice(*self._chunks.own_queries[task.query_chunk]), slice(first, first + task.heads)
        keys, of_head = slice(*self._chunks.keys[chunk]), slice(kv_head, kv_head + 1)
        dout, q, k, v, out, lse, dlse = self._operands
        operands = parts.Operands(
            dout[:, rows, heads],
            q[:, rows, heads],
            k[:, keys, of_head],
            v[:, keys, of_head],
            out[:, rows, heads],
            lse[:, heads, rows],
            None if dlse is None else dlse[:, heads, rows],
        )
        held_dq, held_keys = self._dq_sums.pop(of_dq, None), self._key_sums.pop(chain, None)
        continues = held_dq is not None, held_keys is not None
        held_dq, held_keys = (
            self._turns.take(size, torch.float32) if held is None else held
            for held, size in zip((held_dq, held_keys), parts.sums_sizes(operands.q, operands.k, operands.v))
        )
        ends_dq, ends_split = self._plan.dq_orders[of_dq][-1] == task, self._plan.chains[chain][-1] == task
        following = (kv_head, split + 1, chunk) in self._plan.chains
        total = result = dk = dv = None
        if ends_split:
            total = self._totals.pop((kv_head, split - 1, chunk), None)
            if not following:
                result = self._space("result", chain)
                dk, dv = self._rounded(result.x, chain)
        for held in (held_dq, held_keys, total, result):
            if held is not None:
                held.wait()
        parts.add(
            self._rule,
            operands,
            parts.Sums(held_dq.x, held_keys.x),
            self._chunks.place(task),
            dq_continues=continues[0],
            keys_continue=continues[1],
            total=None if total is None else total.x,
            dq=dq[:, rows, heads] if ends_dq else None,
            dk=dk,
            dv=dv,
        )
        done = self._turns.begun()
        if ends_dq:
            self._turns.give_back(held_dq.x, done)
        else:
            self._dq_sums[of_dq] = Held(held_dq.x, done)
        if total is not None:
            self._turns.give_back(total.x, done)
        if result is not None:
            self._results[chain] = Held(result.x, done)
            self._turns.give_back(held_keys.x, done)
        else:
            (self._totals if ends_split else self._key_sums)[chain] = Held(held_keys.x, done)

    def _send(self, message: Message) -> None:
        held = self._of(message).pop(_chain_of(message.of))
        held.wait()
        tag = self._number("to", message.receiver)
        sent = movement.send(self._channel, self._message_group, self._what, held.x, message.receiver, tag)
        self._turns.give_back(held.x, sent)

    def _receive(self, message: Message) -> None:
        chain = _chain_of(message.of)
        space = self._space(message.kind, chain)
        space.wait()
        tag = self._number("from", message.sender)
        received = movement.receive(self._channel, self._message_group, self._what, space.x, message.sender, tag)
        self._of(message)[chain] = Held(space.x, received)

    def _of(self, message: Message) -> dict[Chain, Held]:
        return {"sums": self._key_sums, "total": self._totals, "result": self._results}[message.kind]

    def _space(self, kind: str, chain: Chain) -> Held:
        """Returns the space for a message of this kind."""
        keys = slice(*self._chunks.keys[chain[2]])
        q, k, v = self._operands.q[:, :0], self._operands.k[:, keys, :1], self._operands.v[:, keys, :1]
        if kind == "result":
            return self._turns.take(k.numel() + v.numel(), k.dtype)
        return self._turns.take(parts.sums_sizes(q, k, v)[1], torch.float32)

    def _rounded(self, result: Tensor, chain: Chain) -> tuple[Tensor, Tensor]:
        """Returns views of dK and dV of a chunk of one KV head, (batch, rows, 1, columns) each."""
        rows = len(self._chunks.keys[chain[2]])
        k, v = self._operands.k, self._operands.v
        shapes = [(x.shape[0], rows, 1, x.shape[-1]) for x in (k, v)]
        dk, dv = result.split([k.shape[0] * rows * shape[-1] for shape in shapes])
        return dk.view(shapes[0]), dv.view(shapes[1])

    def _number(self, way: str, rank: int) -> int:
        """Numbers the messages between two ranks, because gloo may reorder messages with the same tag."""
        number = self._messages[way, rank] = self._messages.get((way, rank), _FIRST_TAG - 1) + 1
        return number


def _chain_of(task: Task) -> Chain:
    return task.kv_head, task.split, task.kv_chunk

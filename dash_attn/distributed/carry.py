"""The backward of one rank where keys are gathered: its part of `plan`, run task by task.

dQ of this rank's queries is summed here. dK and dV of a chunk of keys come from the rank whose queries are visited
before, and go on to the one whose queries come next, in fp32; the last one rounds them and sends them to their owner.
On GPUs no host waits: streams do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import movement, parts
from .channel import Channel
from .layout import Rows
from .plan import Message, Plan, Task

# The group is the caller's, who may have messages of his own on their way: with small tags.
_FIRST_TAG = 0x0DA5_0000

Chain = tuple[int, int, int]
"""(KV head, split, chunk of keys)"""


class Chunks(NamedTuple):
    """Where chunks are, by their numbers in the sequence."""

    queries: dict[int, Rows]
    """This rank's, in its rows."""
    own_keys: dict[int, Rows]
    """Likewise."""
    keys: list[Rows]
    """Of all keys, in the sequence."""


class Carrier:
    """One rank's part of one backward.

    Args:
        channel: of the group.
        what: the call, for messages.
        plan: of these shapes.
        rule: of the parts.
        operands: of all heads, this rank's queries and all keys.
        causal: whether the mask is; then queries and keys are cut alike.
        chunks: where they are.
    """

    def __init__(
        self,
        channel: Channel,
        what: str,
        plan: Plan,
        rule: parts.Rule,
        operands: parts.Operands,
        causal: bool,
        chunks: Chunks,
    ):
        self._channel, self._what, self._plan, self._rule = channel, what, plan, rule
        self._operands, self._causal, self._chunks = operands, causal, chunks
        self._group = operands.q.shape[2] // operands.k.shape[2]
        self._dq_sums: dict[tuple[int, int, int], Tensor] = {}
        # Of chains: the sums so far, those of whole splits, and dK and dV rounded, one behind the other.
        self._key_sums: dict[Chain, Tensor] = {}
        self._totals: dict[Chain, Tensor] = {}
        self._results: dict[Chain, Tensor] = {}
        # How to wait for it, and its tensor, which must stay till then.
        self._under_way: dict[Message, tuple[Callable[[], object], Tensor]] = {}
        self._messages: dict[tuple[str, int], int] = {}

    def run(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Writes the gradients of this rank's rows."""
        for kind, what in self._plan.actions[self._channel.rank]:
            if isinstance(what, Task):
                for message in self._plan.needs.get(what, []):
                    self._wait_for(message)
                self._add(what, dq)
            elif kind == "send":
                self._send(what)
            else:
                self._receive(what)
        for message in list(self._under_way):
            self._wait_for(message)
        for chain, result in self._results.items():
            rows = slice(*self._chunks.own_keys[chain[2]])
            for gradient, x in zip((dk, dv), self._rounded(result, chain)):
                gradient[:, rows, chain[0]] = x[:, :, 0]

    def _add(self, task: Task, dq: Tensor) -> None:
        """A task: adds to dQ of its queries and to dK and dV of its keys, and ends the sums that it is the last of."""
        chain, of_dq = _chain_of(task), (task.kv_head, task.first_head, task.query_chunk)
        kv_head, split, chunk = chain
        first = kv_head * self._group + task.first_head
        rows, heads = slice(*self._chunks.queries[task.query_chunk]), slice(first, first + task.heads)
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
        sizes = parts.sums_sizes(operands.q, operands.k, operands.v)
        dq_sums, key_sums = self._dq_sums.get(of_dq), self._key_sums.get(chain)
        sums = parts.Sums(
            *(q.new_empty(size, dtype=torch.float32) if x is None else x for x, size in zip((dq_sums, key_sums), sizes))
        )
        self._dq_sums[of_dq], self._key_sums[chain] = sums
        ends_dq, ends_split = self._plan.dq_orders[of_dq][-1] == task, self._plan.chains[chain][-1] == task
        following = (kv_head, split + 1, chunk) in self._plan.chains
        total = dk = dv = None
        if ends_split:
            total = self._totals.pop((kv_head, split - 1, chunk), None)
            if not following:
                self._results[chain] = self._space("result", chain)
                dk, dv = self._rounded(self._results[chain], chain)
        parts.add(
            self._rule,
            operands,
            sums,
            causal=self._causal and chunk == task.query_chunk,
            dq_continues=dq_sums is not None,
            keys_continue=key_sums is not None,
            total=total,
            dq=dq[:, rows, heads] if ends_dq else None,
            dk=dk,
            dv=dv,
        )
        if ends_dq:
            del self._dq_sums[of_dq]
        if ends_split:
            del self._key_sums[chain]
            if following:
                self._totals[chain] = sums.keys

    def _send(self, message: Message) -> None:
        x = self._of(message).pop(_chain_of(message.of))
        tag = self._number("to", message.receiver)
        self._under_way[message] = movement.send(self._channel, self._what, x, message.receiver, tag), x

    def _receive(self, message: Message) -> None:
        chain = _chain_of(message.of)
        x = self._of(message)[chain] = self._space(message.kind, chain)
        tag = self._number("from", message.sender)
        self._under_way[message] = movement.receive(self._channel, self._what, x, message.sender, tag), x

    def _wait_for(self, message: Message) -> None:
        """And for those begun before it, which the plan allows: their tensors are let go of."""
        while message in self._under_way:
            wait, _ = self._under_way.pop(next(iter(self._under_way)))
            wait()

    def _of(self, message: Message) -> dict[Chain, Tensor]:
        return {"sums": self._key_sums, "total": self._totals, "result": self._results}[message.kind]

    def _space(self, kind: str, chain: Chain) -> Tensor:
        """For a message of this kind."""
        keys = slice(*self._chunks.keys[chain[2]])
        q, k, v = self._operands.q[:, :0], self._operands.k[:, keys, :1], self._operands.v[:, keys, :1]
        if kind == "result":
            return k.new_empty(k.numel() + v.numel())
        return k.new_empty(parts.sums_sizes(q, k, v)[1], dtype=torch.float32)

    def _rounded(self, result: Tensor, chain: Chain) -> tuple[Tensor, Tensor]:
        """dK and dV of a chunk of one KV head, (batch, rows, 1, columns) each."""
        rows = len(self._chunks.keys[chain[2]])
        k, v = self._operands.k, self._operands.v
        shapes = [(x.shape[0], rows, 1, x.shape[-1]) for x in (k, v)]
        dk, dv = result.split([k.shape[0] * rows * shape[-1] for shape in shapes])
        return dk.view(shapes[0]), dv.view(shapes[1])

    def _number(self, way: str, rank: int) -> int:
        """Messages between two ranks are numbered: gloo need not keep the order of those with the same tag."""
        number = self._messages[way, rank] = self._messages.get((way, rank), _FIRST_TAG - 1) + 1
        return number


def _chain_of(task: Task) -> Chain:
    return task.kv_head, task.split, task.kv_chunk

"""Random rollouts: every row that flash_attn_with_kvcache returns must have the bits of training's forward.

A rollout generates sequences over a KV cache as an engine with continuous batching does: each call takes some of the
sequences, a chunk of the prompt of one and a few new tokens of another. Works on any device, as gpu_support does.
"""

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from gpu_support import int_view

import dash_attn
from dash_attn.compat import flash_attn_3

MOST_NEW = 8  # new tokens of a sequence in one call, apart from chunks of a prompt
MOST_GENERATED = 40  # tokens of a sequence after its prompt
PAGE_SIZES = (None, 1, 2, 3, 5, 8, 12, 16, 16, 24, 48, 64, 64, 100, 128, 128, 256, 512)
HEADS = ((1, 1), (2, 1), (4, 4), (6, 3), (8, 1), (8, 2), (16, 2), (12, 4), (32, 4), (32, 8))
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (128, 128), (192, 128), (192, 192), (256, 256), (40, 40), (72, 200))
WINDOWS = (-1, -1, -1, 0, 17, 128, 700)
ATTENTION_CHUNKS = (0, 0, 0, 0, 50, 256)


class Sizes(NamedTuple):
    longest: int
    most_sequences: int
    most_heads: int


ON_GPU = Sizes(longest=3000, most_sequences=16, most_heads=32)
ON_CPU = Sizes(longest=150, most_sequences=4, most_heads=4)
COUNT = 100  # rollouts of the GPU test


class Call(NamedTuple):
    sequences: tuple[int, ...]
    counts: tuple[int, ...]
    """The new tokens of each."""
    is_dense: bool
    """Whether the queries are a dense batch, not a variable-length one."""
    appends: bool
    """Whether the call writes the new keys into the cache, not the caller."""
    causal: bool
    has_batch_idx: bool


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Its repr names every parameter of a failing case."""

    seed: int
    dtype: torch.dtype
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dims: tuple[int, int]
    page_size: int | None
    shared: int
    """Tokens with which every sequence begins, in pages that all sequences share."""
    window_left: int
    attention_chunk: int
    softcap: float
    has_sinks: bool
    trains_on_pack: bool
    """Whether training's forward takes all sequences in one variable-length batch, not each by itself."""
    calls: tuple[Call, ...]

    @property
    def cases(self) -> int:
        """Rows of one head of sequences that receive at most MOST_NEW tokens in a call."""
        return self.heads * sum(count for call in self.calls for count in call.counts if count <= MOST_NEW)


def random_rollout(chance: random.Random, sizes: Sizes) -> Rollout:
    page_size = chance.choice(PAGE_SIZES)
    shared = 0
    if page_size is not None and 2 * page_size <= sizes.longest and chance.random() < 0.3:
        shared = page_size * chance.randint(1, sizes.longest // (2 * page_size))
    lengths = tuple(
        shared + round(math.exp(chance.uniform(0, math.log(sizes.longest - shared))))
        for _ in range(chance.randint(1, sizes.most_sequences))
    )
    heads, kv_heads = chance.choice([heads for heads in HEADS if heads[0] <= sizes.most_heads])
    return Rollout(
        seed=chance.getrandbits(32),
        dtype=chance.choice((torch.bfloat16, torch.bfloat16, torch.float16)),
        lengths=lengths,
        heads=heads,
        kv_heads=kv_heads,
        head_dims=chance.choice(HEAD_DIMS),
        page_size=page_size,
        shared=shared,
        window_left=chance.choice(WINDOWS),
        attention_chunk=chance.choice(ATTENTION_CHUNKS),
        softcap=chance.choice((0.0, 0.0, 0.0, 5.0)),
        has_sinks=chance.random() < 0.25,
        trains_on_pack=chance.random() < 0.5,
        calls=tuple(_calls(chance, lengths, shared)),
    )


def rollouts(count: int, sizes: Sizes) -> Iterator[Rollout]:
    chance = random.Random(0)
    return (random_rollout(chance, sizes) for _ in range(count))


def _calls(chance: random.Random, lengths: tuple[int, ...], shared: int) -> Iterator[Call]:
    """Sequence 0 computes the shared tokens; after it, sequences take their turns until each has its length."""
    done = [shared] * len(lengths)
    prompts = [max(shared, length - chance.randint(1, MOST_GENERATED)) for length in lengths]

    def call(sequences: list[int], counts: list[int]) -> Call:
        is_dense = len(set(counts)) == 1 and chance.random() < 0.8
        causal = set(counts) != {1} or chance.random() < 0.5
        appends, has_batch_idx = chance.random() < 0.7, chance.random() < 0.3
        return Call(tuple(sequences), tuple(counts), is_dense, appends, causal, has_batch_idx)

    if shared:
        yield call([0], [shared])
    while unfinished := [b for b, length in enumerate(lengths) if done[b] < length]:
        generating = [b for b in unfinished if done[b] >= prompts[b]]
        if generating and chance.random() < 0.6:
            sequences = chance.sample(generating, chance.randint(1, len(generating)))
            most = min(MOST_NEW, *(lengths[b] - done[b] for b in sequences))
            counts = [chance.randint(1, most)] * len(sequences)
        else:
            sequences = chance.sample(unfinished, chance.randint(1, len(unfinished)))
            counts = []
            for b in sequences:
                rest = max(prompts[b] - done[b], 0)
                most = rest or min(MOST_NEW, lengths[b] - done[b])
                counts.append(rest if rest and chance.random() < 0.5 else chance.randint(1, most))
        yield call(sequences, counts)
        for b, count in zip(sequences, counts):
            done[b] += count


class Tensors:
    """The rows of all sequences after each other."""

    def __init__(self, rollout: Rollout, device: str):
        generator = torch.Generator(device).manual_seed(rollout.seed)
        self.offsets = torch.tensor([0, *rollout.lengths]).cumsum(0)
        dim, value_dim = rollout.head_dims

        def randn(heads: int, head_dim: int) -> torch.Tensor:
            shape = (sum(rollout.lengths), heads, head_dim)
            return torch.randn(shape, generator=generator, device=device).to(rollout.dtype)

        self.q = randn(rollout.heads, dim)
        self.k, self.v = (randn(rollout.kv_heads, own) for own in (dim, value_dim))
        for x in (self.k, self.v):
            for start in self.offsets.tolist()[1:-1]:
                x[start : start + rollout.shared] = x[: rollout.shared]
        self.scores = {"softcap": rollout.softcap}
        if rollout.has_sinks:
            self.scores["learnable_sink"] = torch.randn(rollout.heads, generator=generator, device=device)


def training(rollout: Rollout, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output of every row, (rows, heads, value_head_dim), and its log-sum-exp, (heads, rows)."""
    rows = tensors.q, tensors.k, tensors.v
    arguments = dict(causal=True, return_attn_probs=True, **_mask(rollout), **tensors.scores)
    if rollout.trains_on_pack:
        offsets, longest = tensors.offsets.to(torch.int32).to(tensors.q.device), max(rollout.lengths)
        return dash_attn.flash_attn_varlen_func(*rows, offsets, offsets, longest, longest, **arguments)[:2]
    alone = [
        dash_attn.flash_attn_func(*(x[None, start : start + length] for x in rows), **arguments)
        for start, length in zip(tensors.offsets.tolist(), rollout.lengths)
    ]
    return torch.cat([out[0] for out, _, _ in alone]), torch.cat([lse[0] for _, lse, _ in alone], dim=1)


def _mask(rollout: Rollout) -> dict[str, object]:
    """The window without a key behind the query, and the chunk, where there are any."""
    window = {} if rollout.window_left < 0 else {"window_size": (rollout.window_left, 0)}
    return window | ({"attention_chunk": rollout.attention_chunk} if rollout.attention_chunk else {})


class _Cache:
    """Places of keys in the cache, which holds NaN wherever there is no key. The table is on the CPU."""

    def __init__(self, rollout: Rollout, tensors: Tensors):
        size, batch = rollout.page_size, len(rollout.lengths)
        self.table = None
        rows, count = max(rollout.lengths) + 5, batch + 1
        if size is not None:
            blocks = -(-max(rollout.lengths) // size)
            rows, count = size, batch * blocks + 1
            order = torch.randperm(count, generator=torch.Generator().manual_seed(rollout.seed))
            self.table = order[: batch * blocks].view(batch, blocks).to(torch.int32)
            self.table[:, : rollout.shared // size] = self.table[0, : rollout.shared // size].clone()
            for b, length in enumerate(rollout.lengths):
                self.table[b, -(-length // size) :] = -1
        self.k, self.v = (x.new_full((count, rows, *x.shape[1:]), torch.nan) for x in (tensors.k, tensors.v))

    def write(self, sequence: int, places: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        where = torch.full_like(places, sequence)
        if self.table is not None:
            where, places = self.table[sequence, places // self.k.shape[1]].long(), places % self.k.shape[1]
        where, places = where.to(k.device), places.to(k.device)
        self.k[where, places], self.v[where, places] = k, v

    def arguments(self, call: Call) -> dict[str, torch.Tensor]:
        index = torch.tensor(call.sequences, dtype=torch.int32, device=self.k.device)
        if self.table is None:
            return {"cache_batch_idx": index}
        if call.has_batch_idx:
            return {"cache_batch_idx": index, "block_table": self.table.to(self.k.device)}
        return {"block_table": self.table[list(call.sequences)].to(self.k.device)}


@torch.no_grad()
def failure(rollout: Rollout, device: str) -> str | None:
    """Says how many calls return other bits than training, if any do. Waits once."""
    tensors = Tensors(rollout, device)
    expected_out, expected_lse = training(rollout, tensors)
    cache = _Cache(rollout, tensors)
    done = [0] + [rollout.shared] * (len(rollout.lengths) - 1)
    starts = tensors.offsets.tolist()
    differ = []
    for call in rollout.calls:
        places = [torch.arange(done[b], done[b] + count) for b, count in zip(call.sequences, call.counts)]
        rows = torch.cat([starts[b] + own for b, own in zip(call.sequences, places)]).to(device)
        if not call.appends:
            for b, own in zip(call.sequences, places):
                where = slice(starts[b] + int(own[0]), starts[b] + int(own[-1]) + 1)
                cache.write(b, own, tensors.k[where], tensors.v[where])
        seqlens = [done[b] + (0 if call.appends else count) for b, count in zip(call.sequences, call.counts)]
        out, lse = _attend(rollout, call, tensors, cache, rows, torch.tensor(seqlens, dtype=torch.int32, device=device))
        of_call = [(out, expected_out[rows]), (lse, expected_lse[:, rows])]
        differ.append(sum((int_view(found) != int_view(expected)).sum() for found, expected in of_call))
        for b, count in zip(call.sequences, call.counts):
            done[b] += count
    wrong = [(call, n) for call, n in zip(rollout.calls, torch.stack(differ).tolist(), strict=True) if n]
    if not wrong:
        return None
    call, elements = wrong[0]
    return (
        f"{rollout}: {len(wrong)} of {len(rollout.calls)} calls differ, the first in {elements} elements of the output "
        f"and the log-sum-exp: {call}"
    )


def _attend(
    rollout: Rollout, call: Call, tensors: Tensors, cache: _Cache, rows: torch.Tensor, seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output, (rows, heads, value_head_dim), and the log-sum-exp, (heads, rows)."""
    q = tensors.q[rows]
    new = (tensors.k[rows], tensors.v[rows]) if call.appends else ()
    arguments = dict(
        cache_seqlens=seqlens, causal=call.causal, return_softmax_lse=True, **cache.arguments(call), **_mask(rollout),
        **tensors.scores,
    )  # fmt: skip
    function = dash_attn.flash_attn_with_kvcache
    if rollout.attention_chunk or not call.is_dense:
        function = flash_attn_3.flash_attn_with_kvcache
        if "block_table" in arguments:
            arguments["page_table"] = arguments.pop("block_table")
    if not call.is_dense:
        offsets = torch.tensor([0, *call.counts], device=q.device).cumsum(0, dtype=torch.int32)
        arguments |= {"cu_seqlens_q": offsets, "max_seqlen_q": max(call.counts)}
        arguments |= {"cu_seqlens_k_new": offsets} if call.appends else {}
        return function(q, cache.k, cache.v, *new, **arguments)[:2]
    q, *new = (x.unflatten(0, (len(call.sequences), call.counts[0])) for x in (q, *new))
    out, lse = function(q, cache.k, cache.v, *new, **arguments)[:2]
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

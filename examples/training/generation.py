"""Generation with a paged cache of keys and values, continuous batching and prefix caching, for a model of `model`."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from dash_attn import flash_attn_with_kvcache

from .model import Llama, rotary_angles

PAGE_ROWS = 16


class Rows:
    """Rows of named tensors by their places, so that activations of two programs can be compared."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def put(self, name: str, places: Tensor, x: Tensor, *, of: int) -> None:
        """Stores x, (*places.shape, ...), at its places, of which there are `of`."""
        if name not in self._tensors:
            self._tensors[name] = x.new_zeros(of, *x.shape[places.dim() :])
        self._tensors[name][places.flatten()] = x.detach().flatten(0, places.dim() - 1)

    def at(self, places: Tensor) -> dict[str, Tensor]:
        """Returns the rows at places, by name, in the order in which the names were first stored."""
        return {name: x[places] for name, x in self._tensors.items()}


@dataclasses.dataclass
class Sequence:
    """A sequence, which begins with its prompt."""

    number: int
    tokens: list[int]
    prompt: int
    """The number of tokens of the prompt."""
    limit: int
    """The number of tokens at which generation stops."""
    log_probabilities: list[Tensor] = dataclasses.field(default_factory=list)
    """Those of the generated tokens when they were drawn, fp32 scalars."""
    table: list[int] = dataclasses.field(default_factory=list)
    """The pages of its keys, in order."""


class Generator:
    """Generates with a model whose weights do not change, so a new one is needed after each step of training.

    Args:
        model: the model, in bf16. Its layers' attention is replaced while it generates.
        pages: the number of pages of PAGE_ROWS keys. Pages are never given back.
        seed: the seed of the drawn tokens, and of the order in which pages are used.
        record: whether to keep q, k, v and the output of each attention, at the places of their keys.
    """

    def __init__(self, model: Llama, pages: int, *, seed: int, record: bool = False) -> None:
        self._model, self._seed, self._record, self._pages = model, seed, record, pages
        weight = model.embedding.weight
        self._device, shape = weight.device, model.shape
        size = (pages, PAGE_ROWS, shape.kv_heads, shape.head_dim)
        self._k, self._v = (
            [torch.zeros(size, dtype=weight.dtype, device=self._device) for _ in model.layers] for _ in range(2)
        )
        self._unused = random.Random(seed).sample(range(pages), pages)
        self._known: dict[tuple[int, ...], int] = {}
        """Filled pages, by all tokens up to their ends."""
        self._rows = Rows()
        self._angles = [x.to(self._device) for x in rotary_angles(torch.arange(pages * PAGE_ROWS), shape.head_dim)]
        self.computed = self.shared = 0
        """The rows of prompts that were computed, and those whose keys were already in a page."""

    @torch.no_grad()
    def __call__(self, sequences: list[Sequence], *, batch: int) -> None:
        """Generates up to the limit of every sequence, `batch` sequences at a time; a new one begins when one ends."""
        waiting, running = collections.deque(sequences), []
        while waiting or running:
            while waiting and len(running) < batch:
                running.append(waiting.popleft())
                self._begin(running[-1])
            running = [sequence for sequence in running if len(sequence.tokens) < sequence.limit]
            if running:
                self._draw(running, self._next(running, rows=1))

    def rows(self, sequences: list[Sequence]) -> dict[str, Tensor]:
        """Returns what was recorded for all tokens but the last of each sequence, one sequence after the other."""
        places = [self._places(self._table([s]), torch.arange(len(s.tokens) - 1)[None]) for s in sequences]
        return self._rows.at(torch.cat([x.flatten() for x in places]))

    def _begin(self, sequence: Sequence) -> None:
        """Computes the prompt after the pages that another sequence has filled with the same tokens."""
        prompt = tuple(sequence.tokens)
        ends = range(PAGE_ROWS, len(prompt) + 1, PAGE_ROWS)
        for end in ends[: (len(prompt) - 1) // PAGE_ROWS]:  # at least the last token is computed, for its logits
            if prompt[:end] not in self._known:
                break
            sequence.table.append(self._known[prompt[:end]])
        shared = len(sequence.table) * PAGE_ROWS
        self.shared, self.computed = self.shared + shared, self.computed + len(prompt) - shared
        self._draw([sequence], self._next([sequence], rows=len(prompt) - shared))
        self._known = {prompt[:end]: sequence.table[end // PAGE_ROWS - 1] for end in ends} | self._known

    def _draw(self, sequences: list[Sequence], log_probabilities: Tensor) -> None:
        """Draws a token for each sequence, by its number and place: not by the sequences beside it."""
        for sequence, of_tokens in zip(sequences, log_probabilities):
            seed = (self._seed * 1_000_003 + sequence.number) * 1_000_003 + len(sequence.tokens)
            token = torch.multinomial(of_tokens.exp().cpu(), 1, generator=torch.Generator().manual_seed(seed)).item()
            sequence.tokens.append(token)
            sequence.log_probabilities.append(of_tokens[token])

    def _next(self, sequences: list[Sequence], *, rows: int) -> Tensor:
        """Computes the last rows of each sequence. Returns log-probabilities of what follows, (sequences, tokens)."""
        for sequence in sequences:
            while len(sequence.table) * PAGE_ROWS < len(sequence.tokens):
                sequence.table.append(self._unused.pop())
        tokens = torch.tensor([sequence.tokens[-rows:] for sequence in sequences], device=self._device)
        starts = torch.tensor([len(sequence.tokens) - rows for sequence in sequences], device=self._device)
        table = self._table(sequences)
        positions = starts[:, None] + torch.arange(rows, device=self._device)
        places = self._places(table, positions)
        for layer in self._model.layers:
            layer.attention.attend = functools.partial(
                self._attend, layer=layer.layer, starts=starts.int(), table=table, places=places
            )
        cos, sin = (x[positions] for x in self._angles)
        return log_softmax(self._model.logits(tokens, (cos, sin))[:, -1], dim=-1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, starts: Tensor, table: Tensor, places: Tensor
    ) -> Tensor:
        out = flash_attn_with_kvcache(
            q, self._k[layer], self._v[layer], k, v, cache_seqlens=starts, block_table=table, causal=True
        )
        if self._record:
            for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
                self._rows.put(f"layers.{layer}.attention.{name}", places, x, of=self._pages * PAGE_ROWS)
        return out

    def _table(self, sequences: list[Sequence]) -> Tensor:
        longest = max(len(sequence.table) for sequence in sequences)
        padded = [sequence.table + [-1] * (longest - len(sequence.table)) for sequence in sequences]
        return torch.tensor(padded, dtype=torch.int32, device=self._device)

    def _places(self, table: Tensor, positions: Tensor) -> Tensor:
        positions = positions.to(self._device)
        return table.gather(1, positions // PAGE_ROWS) * PAGE_ROWS + positions % PAGE_ROWS

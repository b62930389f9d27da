"""The shapes that are measured, and the number of their operations."""

import collections
import dataclasses
import functools
import itertools
import random
from collections.abc import Iterable

from benchmarks.packs import PACKS

PASSES = ("backward", "forward", "both")
TOKENS, HIDDEN = 16384, 2048
UNBOUNDED = -1  # an unbounded side of a window
# Changes of the scores, by name. A name never changes its meaning, because results contain only the name. Head h has
# the slope 2^(-8 (h + 1) / heads); sinks are random.
SOFTCAPS = {"softcap 50": 50.0}
SCORES = (*SOFTCAPS, "alibi", "sinks")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Self-attention of a dense batch of equal lengths, or of a variable-length batch.

    Attributes:
        dtype: "bf16" or "fp16".
        mask: "full", "causal" or "window".
        seqlen: the length of the longest sequence.
        batch: the number of sequences.
        pack: the name in PACKS of the variable-length batch whose first `batch` sequences these are; None for a dense
            batch.
        window: for the mask "window": how many keys (before, after) its own a query sees, -1 for all.
        chunk: for the mask "window": the keys per chunk, outside of which a query sees none; 0 for no chunks.
        scores: a name of SCORES; None for unchanged scores.
        value_head_dim: the head dim of values and outputs, if it is not head_dim.
        dropout_p: the probability with which an element of the softmax is dropped.
    """

    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    mask: str
    seqlen: int
    batch: int
    pack: str | None = None
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    chunk: int = 0
    scores: str | None = None
    value_head_dim: int | None = None
    dropout_p: float = 0.0

    @classmethod
    def of_pack(cls, pack: str, head_dim: int, heads: int, kv_heads: int, mask: str, **options) -> "Shape":
        """Returns the shape of a whole variable-length batch, in bf16."""
        lengths = PACKS[pack]
        return cls("bf16", head_dim, heads, kv_heads, mask, max(lengths), len(lengths), pack, **options)

    @classmethod
    def of_row(cls, row: dict) -> "Shape":
        """Returns the shape of a result's row."""
        found = {field: row[field] for field in SHAPE_FIELDS} | {f: row[f] for f in LATER_FIELDS if f in row}
        if "window" in found:
            found["window"] = tuple(found["window"])  # JSON has lists
        return cls(**found)

    def row(self) -> dict:
        """Returns the entries of a result's row for the shape, without later fields that have their defaults."""
        later = [field for field, default in LATER_FIELDS.items() if getattr(self, field) != default]
        return {field: getattr(self, field) for field in (*SHAPE_FIELDS, *later)}

    def of_tokens(self, tokens: int) -> "Shape":
        """Returns as many of these sequences as have this many tokens together, and at least one."""
        if self.pack is None:
            return dataclasses.replace(self, batch=max(1, tokens // self.seqlen))
        lengths = self.lengths
        batch = max(1, sum(total <= tokens for total in itertools.accumulate(lengths)))
        return dataclasses.replace(self, batch=batch, seqlen=max(lengths[:batch]))

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of every sequence, in order."""
        return PACKS[self.pack][: self.batch] if self.pack else (self.seqlen,) * self.batch

    @property
    def pieces(self) -> tuple[int, ...]:
        """The lengths of the sequences after each is cut into its chunks, within which self-attention is the same."""
        if not self.chunk:
            return self.lengths
        return tuple(min(self.chunk, n - first) for n in self.lengths for first in range(0, n, self.chunk))

    @property
    def dense(self) -> "Shape | None":
        """The dense batch of the same sequences, for a variable-length batch of equal lengths."""
        equal = self.pack is not None and len(set(self.lengths)) == 1
        return dataclasses.replace(self, pack=None) if equal else None

    @property
    def plain(self) -> "Shape":
        """The same shape without `scores`."""
        return dataclasses.replace(self, scores=None)

    @property
    def undropped(self) -> "Shape":
        """The same shape without dropout."""
        return dataclasses.replace(self, dropout_p=0.0)

    def at_head_dim(self, head_dim: int) -> "Shape":
        """Returns the same shape with another head_dim, also for values."""
        return dataclasses.replace(self, head_dim=head_dim, value_head_dim=None)

    @property
    def softcap(self) -> float:
        """The soft cap; 0 for none."""
        return SOFTCAPS.get(self.scores, 0.0)

    @property
    def sides(self) -> tuple[int, int]:
        """How many keys before and after its own a query sees, without chunks."""
        return {"full": (UNBOUNDED, UNBOUNDED), "causal": (UNBOUNDED, 0)}.get(self.mask, self.window)

    @property
    def heads_name(self) -> str:
        return str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"

    @property
    def mask_name(self) -> str:
        window = f"({self.window[0]}, {self.window[1]})"
        return " ".join([self.mask, *[window] * (self.mask == "window"), *[f"chunk {self.chunk}"] * bool(self.chunk)])

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head dims of queries and keys, and of values."""
        return self.head_dim, self.value_head_dim or self.head_dim

    @property
    def head_dims_name(self) -> str:
        return f"({self.head_dim}, {self.value_head_dim})" if self.value_head_dim else str(self.head_dim)

    @property
    def sequences_name(self) -> str:
        if self.pack is None:
            return f"{self.batch}x{self.seqlen}"
        return f"pack {self.pack}" + (f"[:{self.batch}]" if self.batch < len(PACKS[self.pack]) else "")

    def __str__(self) -> str:
        scores = f" {self.scores}" if self.scores else ""
        head_dim = f"{self.head_dim}x{self.value_head_dim}" if self.value_head_dim else self.head_dim
        dropout = f" dropout {self.dropout_p}" if self.dropout_p else ""
        return f"{self.dtype} d{head_dim} h{self.heads_name} {self.mask_name} {self.sequences_name}{scores}{dropout}"


_FIELDS = dataclasses.fields(Shape)
SHAPE_FIELDS = tuple(field.name for field in _FIELDS if field.default is dataclasses.MISSING)
LATER_FIELDS = {field.name: field.default for field in _FIELDS if field.default is not dataclasses.MISSING}


@functools.cache
def _visible(sides: tuple[int, int], chunk: int, length: int) -> int:
    before, behind = (length if side == UNBOUNDED else side for side in sides)
    chunk = chunk or length
    total = 0
    for query in range(length):
        first = max(query - before, query - query % chunk)
        end = min(query + behind + 1, query - query % chunk + chunk, length)
        total += end - max(0, first)
    return total


def visible(shape: Shape) -> int:
    """Counts the pairs of a query and a visible key of one query head, in all sequences."""
    counts = collections.Counter(shape.lengths)
    return sum(count * _visible(shape.sides, shape.chunk, length) for length, count in counts.items())


def flops(shape: Shape, pass_: str) -> float:
    """Returns the floating-point operations: 2 * head_dim per product and pair of a query and a key.

    The forward has two products and the backward five, of which one and two have the head dim of values. In
    variable-length batches and windows the visible pairs count. In a dense batch, by the common convention, seqlen^2
    pairs count, and half of them for the causal mask.
    """
    if shape.pack or shape.mask == "window":
        pairs = visible(shape)
    else:
        pairs = shape.seqlen**2 * shape.batch / (2 if shape.causal else 1)
    qk, v = shape.head_dims
    columns = {"forward": qk + v, "backward": 3 * qk + 2 * v, "both": 4 * qk + 3 * v}
    return 2.0 * pairs * shape.heads * columns[pass_]


def _shape(head_dim: int, mask: str, seqlen: int, heads: int | None = None, kv_heads: int | None = None) -> Shape:
    heads = heads or HIDDEN // head_dim
    batch = TOKENS * HIDDEN // (seqlen * heads * head_dim)
    return Shape("bf16", head_dim, heads, kv_heads or heads, mask, seqlen, max(1, batch))


def full_grid() -> list[Shape]:
    """Returns hidden size 2048 and 16,384 tokens at each length, one longer length, and grouped heads with hidden size
    4096 and half the tokens."""
    shapes = []
    for mask in ("full", "causal"):
        for head_dim in (64, 128):
            shapes += [_shape(head_dim, mask, seqlen) for seqlen in (512, 1024, 2048, 4096, 8192, 16384)]
        shapes.append(_shape(128, mask, 32768))
        shapes += [_shape(128, mask, seqlen, 32, 8) for seqlen in (4096, 8192)]
    return shapes


def quick_grid() -> list[Shape]:
    return [_shape(d, mask, seqlen) for mask in ("full", "causal") for d in (64, 128) for seqlen in (1024, 8192)]


def bar_grid() -> list[Shape]:
    """Returns the shapes of the project's speed targets."""
    return [_shape(128, "full", 8192), _shape(128, "causal", 8192), _shape(64, "full", 8192)]


def head_dims_grid() -> list[Shape]:
    """Returns head dims other than 128, with the same tokens and lengths."""
    dims = ((96, None, 16), (128, None, 16), (192, 128, 16), (192, None, 8), (256, None, 8))
    return [
        Shape("bf16", head_dim, heads, heads, mask, seqlen, TOKENS // seqlen, value_head_dim=value_head_dim)
        for mask in ("full", "causal")
        for seqlen in (2048, 4096, 8192, 16384)
        for head_dim, value_head_dim, heads in dims
    ]


def _sharded(kv_heads: Iterable[int], groups: Iterable[int], sequences: Iterable[tuple[int, int]]) -> list[Shape]:
    """Returns all combinations, with both head dims, under the full and the causal mask; `sequences` are (batch,
    seqlen). Head dims and masks alternate, so that drift during a run affects all alike."""
    return [
        Shape("bf16", head_dim, kv * group, kv, mask, seqlen, batch)
        for kv, group, (batch, seqlen), head_dim, mask in itertools.product(
            kv_heads, groups, sequences, (64, 128), ("full", "causal")
        )
    ]


def sharded_grid() -> list[Shape]:
    """Returns what one GPU of a tensor-parallel group sees: 1 to 8 KV heads with 1, 4 or 8 query heads each."""
    return _sharded((1, 2, 4, 8), (1, 4, 8), ((1, 2048), (1, 8192), (1, 32768), (2, 4096), (4, 8192)))


# The seed of the held-out sample. Another seed gives another sample; no rule may be tuned on either.
HELD_OUT_SEED, HELD_OUT_SHAPES = 20261127, 60


def sharded_held_out_grid() -> list[Shape]:
    """Returns a fixed sample of similar shapes with other numbers, to check rules that were tuned on `sharded`."""
    every = _sharded((1, 3, 5), (2, 5, 16), ((1, 3072), (1, 12288), (1, 24576), (3, 6144), (2, 10240)))
    return random.Random(HELD_OUT_SEED).sample(every, HELD_OUT_SHAPES)


# The heads (query heads, KV heads) for variable-length batches, by head_dim.
PACK_HEADS = {128: (32, 8), 64: (32, 32)}


def _packs(names: Iterable[str], mask: str) -> list[Shape]:
    return [Shape.of_pack(name, head_dim, *heads, mask) for name in names for head_dim, heads in PACK_HEADS.items()]


def packed_bar_grid() -> list[Shape]:
    """Returns the variable-length batches of the project's speed targets."""
    return _packs(("8x2048", "lognormal", "one long", "sft mix"), "causal") + _packs(["lognormal"], "full")


def packed_grid() -> list[Shape]:
    """Returns variable-length batches: all of PACKS under the causal mask with both head dims, and some unmasked."""
    bar = packed_bar_grid()
    every = bar + _packs(PACKS, "causal") + _packs(("8x2048", "8192x34"), "full")
    return list(dict.fromkeys(every))


def _window(head_dim: int, heads: int, kv_heads: int, batch: int, seqlen: int, *window: int, chunk: int = 0) -> Shape:
    return Shape("bf16", head_dim, heads, kv_heads, "window", seqlen, batch, window=window, chunk=chunk)


def windows_bar_grid() -> list[Shape]:
    """Returns the windows of the project's speed targets."""
    return [
        _window(128, 32, 8, 1, 16384, 4095, 0),
        _window(128, 32, 8, 1, 32768, 4095, 0),
        _window(128, 16, 16, 2, 8192, 1023, 0),
        _window(128, 16, 16, 8, 2048, 1023, 0),
        _window(64, 64, 8, 2, 8192, 127, 0),
    ]


def windows_grid() -> list[Shape]:
    """Returns sliding windows: those of models that train with them at 2k to 32k, one to both sides, chunks, and
    windows in variable-length batches."""
    return [
        *windows_bar_grid(),
        _window(128, 32, 8, 2, 8192, 4095, 0),
        _window(128, 32, 16, 1, 16384, 1023, 0),
        _window(64, 12, 12, 4, 8192, 64, 64),
        _window(128, 40, 8, 1, 16384, UNBOUNDED, 0, chunk=8192),
        _window(128, 40, 8, 1, 32768, UNBOUNDED, 0, chunk=8192),
        Shape.of_pack("lognormal", 128, 32, 8, "window", window=(1023, 0)),
        Shape.of_pack("lognormal", 64, 64, 8, "window", window=(127, 0)),
    ]


def scores_grid() -> list[Shape]:
    """Returns shapes that show the cost of a score or a sink: each shape with it follows the same shape without."""
    dense = [_shape(128, mask, seqlen) for mask in ("causal", "full") for seqlen in (4096, 16384)]
    of_models = [_window(128, 32, 16, 2, 8192, 4095, 0), Shape("bf16", 64, 64, 8, "causal", 8192, 2)]
    window = _window(64, 64, 8, 2, 8192, 127, 0)
    named = [
        *((shape, ("softcap 50", "alibi")) for shape in dense),
        (of_models[0], ("softcap 50",)),
        *((shape, ("sinks",)) for shape in (of_models[1], window)),
    ]
    return [dataclasses.replace(shape, scores=scores) for shape, names in named for scores in (None, *names)]


DROPOUT = (1 / 8, 0.1)  # the first needs half of the random numbers


def dropout_grid() -> list[Shape]:
    """Returns shapes that show the cost of dropout: each shape without dropout, and then with dropout."""
    return [
        dataclasses.replace(_shape(head_dim, mask, seqlen), dropout_p=p)
        for mask in ("full", "causal")
        for head_dim in (64, 128)
        for seqlen in (2048, 8192)
        for p in (0.0, *DROPOUT)
    ]


GRIDS = {
    "full": full_grid,
    "quick": quick_grid,
    "bar": bar_grid,
    "sharded": sharded_grid,
    "sharded_held_out": sharded_held_out_grid,
    "head-dims": head_dims_grid,
    "packed": packed_grid,
    "packed-bar": packed_bar_grid,
    "windows": windows_grid,
    "windows-bar": windows_bar_grid,
    "scores": scores_grid,
    "dropout": dropout_grid,
}

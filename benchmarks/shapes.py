"""The shapes that are measured, and how many operations each takes."""

import dataclasses

PASSES = ("backward", "forward", "both")
TOKENS, HIDDEN = 16384, 2048


@dataclasses.dataclass(frozen=True)
class Shape:
    """Self-attention with equal lengths; dtype is "bf16" or "fp16", mask "full" or "causal"."""

    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    mask: str
    seqlen: int
    batch: int

    @classmethod
    def of_row(cls, row: dict) -> "Shape":
        """The shape of a result's row."""
        return cls(**{field: row[field] for field in SHAPE_FIELDS})

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"{self.dtype} d{self.head_dim} h{heads} {self.mask} {self.batch}x{self.seqlen}"


SHAPE_FIELDS = tuple(field.name for field in dataclasses.fields(Shape))


def flops(shape: Shape, pass_: str) -> float:
    """Floating-point operations by the common convention: two products of 2 * seqlen^2 * head_dim in the forward,
    halved for the causal mask, and five in the backward."""
    forward = 4.0 * shape.seqlen**2 * shape.heads * shape.batch * shape.head_dim / (2 if shape.causal else 1)
    return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[pass_]


def _shape(head_dim: int, mask: str, seqlen: int, heads: int | None = None, kv_heads: int | None = None) -> Shape:
    heads = heads or HIDDEN // head_dim
    batch = TOKENS * HIDDEN // (seqlen * heads * head_dim)
    return Shape("bf16", head_dim, heads, kv_heads or heads, mask, seqlen, max(1, batch))


def full_grid() -> list[Shape]:
    """Hidden size 2048 and 16,384 tokens at each length; one length beyond 16,384; grouped heads with hidden size 4096
    and half the tokens."""
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
    """The shapes that the project's speed targets are stated for."""
    return [_shape(128, "full", 8192), _shape(128, "causal", 8192), _shape(64, "full", 8192)]


# (query heads, KV heads, batch, seqlen). What is not measured for every head_dim and mask stands for itself in two.
COMMON = ((8, 8, 1, 2048), (8, 2, 1, 4096), (64, 8, 1, 4096), (8, 1, 2, 4096))
LOADS = {
    (64, "full"): (*COMMON, (16, 8, 2, 1024), (4, 4, 1, 16384), (12, 12, 64, 197)),
    (64, "causal"): (*COMMON, (8, 4, 1, 8192), (2, 1, 1, 32768), (12, 12, 8, 1024)),
    (128, "full"): (*COMMON, (8, 4, 1, 8192), (2, 1, 1, 32768)),
    (128, "causal"): (*COMMON, (16, 8, 2, 1024), (4, 4, 1, 16384)),
}


def loads_grid() -> list[Shape]:
    """Small loads: what one GPU has to do under tensor parallelism, 1 to 8 KV heads of 1 to 8 query heads each and one
    or two sequences of 1k to 32k, and batches of short sequences."""
    return [
        Shape("bf16", head_dim, heads, kv_heads, mask, seqlen, batch)
        for (head_dim, mask), loads in LOADS.items()
        for heads, kv_heads, batch, seqlen in loads
    ]


GRIDS = {"full": full_grid, "quick": quick_grid, "bar": bar_grid, "loads": loads_grid}

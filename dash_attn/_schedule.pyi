"""Written by tools/write_stub.py from the signatures of the compiled module."""

from collections.abc import Sequence

DROPOUT_BLOCK_BYTES: int
DROPOUT_BLOCK_ROWS: int
MAX_HEAD_DIM: int
POLICIES: tuple[str, ...]
YARDSTICKS: tuple[str, ...]

class BackwardPack:
    """The work of a backward of a pack, from (seqlen_q, seqlen_k) of each."""
    def __init__(self, schedule: str, lengths: Sequence[tuple[int, int]], *, heads: int, kv_heads: int, head_dim: int, value_head_dim: int | None = None, causal: bool, window: tuple[int, int] = (-1, -1), attention_chunk: int = 0, rows_outside: tuple[int, int] = (0, 0)) -> None: ...
    @property
    def most(self) -> dict: ...
    @property
    def num_numbers(self) -> int: ...
    @property
    def sequences(self) -> list[tuple[int, int]]: ...
    @property
    def totals(self) -> dict: ...
    def work_tiles(self, number: int, with_turns: bool = False) -> list[WorkTile]:
        """Of each CTA that has one, of the cluster that took a number. With turns: of order-free sums, where some head needs the order after all."""

class ForwardPack:
    """The query tiles of a forward of a pack, in the order of their numbers."""
    def __init__(self, lengths: Sequence[tuple[int, int]], *, heads: int, kv_heads: int, head_dim: int, value_head_dim: int | None = None, causal: bool, sms: int, window: tuple[int, int] = (-1, -1), attention_chunk: int = 0, rows_outside: tuple[int, int] = (0, 0), drops: bool = False) -> None: ...
    @property
    def head_groups(self) -> int: ...
    @property
    def most(self) -> dict: ...
    @property
    def num_tiles(self) -> int: ...
    @property
    def sequences(self) -> list[tuple[int, int]]: ...
    def tile(self, place: int) -> tuple[int, int, int, int]:
        """(sequence, head group, first position, where the next tile begins)."""
    @property
    def tile_positions(self) -> int: ...
    @property
    def totals(self) -> dict: ...

class ForwardTiles:
    """The query tiles of a forward, and the list in which they are worked on."""
    def __init__(self, *, batch: int, seqlen_q: int, seqlen_k: int, heads: int, kv_heads: int, head_dim: int, value_head_dim: int | None = None, causal: bool, sms: int, window: tuple[int, int] = (-1, -1), attention_chunk: int = 0, drops: bool = False) -> None: ...
    @property
    def head_groups(self) -> int: ...
    @property
    def last_groups(self) -> int: ...
    @property
    def num_tiles(self) -> int: ...
    def positions(self, index: int) -> tuple[int, int]:
        """First position of a tile in its sequence, and where the next tile begins."""
    @property
    def query_tiles(self) -> int: ...
    @property
    def takes_tiles(self) -> bool: ...
    def tile(self, place: int) -> tuple[int, int, int]:
        """(sequence, head group, index) of a place in the list."""
    @property
    def tile_positions(self) -> int: ...

class Problem:
    """Tile counts, mask ranges and work of one attention backward."""
    def __init__(self, seqlen_q: int, seqlen_k: int, *, tile_q: int, tile_k: int, causal: bool, batch: int = 1, kv_heads: int = 1, group_size: int = 1, cta_group: int = 1, head_swizzle: int = 1, last_heads: int = 0, splits: int = 1, window: tuple[int, int] = (-1, -1), attention_chunk: int = 0, first_own_key: int | None = None, keys_before: int = 0) -> None: ...
    @property
    def attention_chunk(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    @property
    def cta_group(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def head_swizzle(self) -> int: ...
    @property
    def heads_per_split(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    def kv_tiles_of(self, query_tile: int) -> tuple[int, int]:
        """(first, count) of the KV tiles with a key that a query tile sees."""
    @property
    def last_heads(self) -> int: ...
    @property
    def mask(self) -> str: ...
    def needs_masking(self, query_tile: int, kv_tile: int) -> bool:
        """Whether a query of the tile does not see a key of it."""
    @property
    def num_kv_tiles(self) -> int: ...
    @property
    def num_query_tiles(self) -> int: ...
    def query_tiles_of(self, kv_tile: int) -> tuple[int, int]:
        """(first, count) of the query tiles that see a key of a KV tile."""
    @property
    def seqlen_k(self) -> int: ...
    @property
    def seqlen_q(self) -> int: ...
    @property
    def splits(self) -> int: ...
    @property
    def tile_k(self) -> int: ...
    @property
    def tile_q(self) -> int: ...
    @property
    def window(self) -> tuple[int, int]: ...

class WorkTile:
    """What a CTA of the backward does between two looks at the counter."""
    @property
    def end_k(self) -> int: ...
    @property
    def end_q(self) -> int: ...
    @property
    def first_dq_tile(self) -> int: ...
    @property
    def first_query_head(self) -> int: ...
    @property
    def kv_head(self) -> int: ...
    @property
    def kv_tile(self) -> int: ...
    @property
    def lengths(self) -> tuple[int, int]: ...
    @property
    def query_heads(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def split(self) -> int: ...
    @property
    def split_tile(self) -> int: ...
    @property
    def splits(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def visits(self) -> str: ...

def add_order(schedule: str, problem: Problem) -> list[list[int]]:
    """KV tiles of each query tile, in the order in which their partials are added to dQ."""
def backward_tile_shape(head_dim: int, value_head_dim: int | None = None) -> tuple[int, int]:
    """(queries, keys) of one tile of the backward."""
def cta_group(schedule: str) -> int:
    """CTAs of the clusters that the kernel launches for the policy."""
def divide(dividend: int, divisor: int) -> tuple[int, int]:
    """(quotient, remainder), as kernels divide by an argument of the call."""
def divides(schedule: str) -> bool:
    """Whether a KV tile is in two groups, each with a part of its visits."""
def dropout_bits(seed: int, offset: int, *, p: float, sequence: int, heads: int, seqlen_q: int, seqlen_k: int, first_head: int, total_heads: int, first_query: int, first_key: int, mapping: str, rounds: int) -> bytearray:
    """Bits of one sequence, [head][block of 32 queries][block of 32 keys][128 bytes]: csrc/dropout/mask.h."""
def dropout_keeps(seed: int, offset: int, *, p: float, sequence: int, head: int, query: int, key: int, total_heads: int, mapping: str, rounds: int) -> bool:
    """Whether one element is kept."""
def dropout_kept_registers(bits: bytes, *, queries_are_rows: bool, columns: int, key_blocks: int, first_row: int, first_column: int, thread: int) -> list[bool]:
    """Which registers of a 64 x columns accumulator a thread keeps: csrc/dropout/fragment.h."""
def dropout_threshold(p: float) -> int:
    """How many of 256 random bytes keep an element."""
def first_number_of_head(schedule: str, problem: Problem, number: int) -> int:
    """Where KV tiles are divided: the smallest number of all splits of the KV head that a number is of."""
def fits(schedule: str, causal: bool, *, window: tuple[int, int] = (-1, -1), attention_chunk: int = 0) -> bool:
    """Whether the policy is defined for this mask."""
def forward_tile_shape(head_dim: int, value_head_dim: int | None = None) -> tuple[int, int]:
    """(queries, keys) of one tile of the forward."""
def groups(schedule: str, problem: Problem) -> list[list[int]]:
    """KV tiles of each group of one (sequence, KV head, split), by CTA of the cluster; where they are divided, each tile is in two groups."""
def has_kernel(schedule: str, *, causal: bool, head_dim: int, value_head_dim: int | None = None, window: tuple[int, int] = (-1, -1), attention_chunk: int = 0, changed_scores: bool = False, dropout: bool = False) -> bool:
    """Whether the policy has a kernel for such calls."""
def head_swizzle(schedule: str, problem: Problem, head_dim: int, value_head_dim: int | None = None, ctas: int = 0) -> int:
    """The (sequence, KV head, split)s whose work tiles a launch interleaves; where KV tiles are divided, that of a dense batch on so many CTAs (0: one head after the other, as in a pack)."""
def heads_together(schedule: str, problem: Problem) -> bool:
    """Whether the query heads of a work tile all take a step before any takes the next."""
def keys_need_order(*, max_product: float, min_step_product: float, seqlen_k: int) -> bool:
    """Whether a head, whatever its rows are, is left to the ordered sum in order-free accumulation."""
def keys_of(seqlen_q: int, seqlen_k: int, query: int, *, causal: bool, window: tuple[int, int] = (-1, -1), attention_chunk: int = 0) -> tuple[int, int]:
    """(first, count) of the keys that a query sees."""
def kv_tiles_of_queries(seqlen_q: int, seqlen_k: int, tile_k: int, first: int, end: int, *, causal: bool, window: tuple[int, int] = (-1, -1), attention_chunk: int = 0) -> tuple[tuple[int, int], tuple[int, int]]:
    """(first, count) of the KV tiles of which some of the queries first ... end - 1 sees a key, and of those of which each sees all."""
def last_heads(schedule: str, problem: Problem, head_dim: int, value_head_dim: int | None = None) -> int:
    """The last (sequence, KV head, split)s, whose work tiles a launch interleaves all together."""
def lse_needs_order(lse: float) -> bool:
    """Whether a row's log-sum-exp leaves its head to the ordered sum in order-free accumulation."""
def mask_name(*, causal: bool, window: tuple[int, int] = (-1, -1), attention_chunk: int = 0) -> str:
    """full, causal or window: the kernel that a call takes."""
def num_groups(schedule: str, problem: Problem) -> int:
    """Groups of KV tiles of the whole problem: the numbers that CTAs or clusters take."""
def num_splits(problem: Problem) -> int:
    """Into how many parts a launch cuts the query heads of a KV head."""
def padded_head_dims(head_dim: int, value_head_dim: int | None = None) -> tuple[int, int]:
    """Head dims of the kernels that take these."""
def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int], *, rounds: int) -> tuple[int, int, int, int]:
    """The 128 random bits of a counter and a key."""
def queries_of(seqlen_q: int, seqlen_k: int, key: int, *, causal: bool, window: tuple[int, int] = (-1, -1), attention_chunk: int = 0) -> tuple[int, int]:
    """(first, count) of the queries that see a key."""
def rank(schedule: str, problem: Problem, kv_tile: int, query_tile: int) -> int:
    """Place of a KV tile in the sum of dQ of a query tile that is live for it."""
def ranks(schedule: str, problem: Problem) -> list[list[int]]:
    """[kv_tile][query_tile]: rank, -1 where masked out."""
def resolve(schedule: str, *, causal: bool, head_dim: int, value_head_dim: int | None = None, window: tuple[int, int] = (-1, -1), attention_chunk: int = 0, changed_scores: bool = False, dropout: bool = False) -> str:
    """The policy that a schedule means for such calls."""
def rounded_to_units(x: float, exponent: int) -> int:
    """x in units of 2^-exponent, as order-free accumulation rounds a partial: of at most 2^31 units, less 2^9."""
def row_bound(*, dout_norm: float, delta: float, max_product: float, max_element: float, seqlen_k: int, half_precision: bool) -> float:
    """Of the sum of the magnitudes of a row's partials in order-free accumulation."""
def row_exponent(bound: float) -> int:
    """The fixed-point scale e of a row in order-free accumulation: units of 2^-e. One below the smallest e: none."""
def row_needs_order(*, exponent: int, dout_norm: float, min_step_product: float, head_dim: int, value_head_dim: int | None = None, keys: int, tiles: int) -> bool:
    """Whether a row leaves its head to the ordered sum in order-free accumulation."""
def steps(schedule: str, problem: Problem, group: int, kv_tile: int) -> tuple[int, int]:
    """(first, count) of the visits, of each query head, that a KV tile of the group makes in it."""
def visible_keys(*, causal: bool, seqlen_q: int, seqlen_k: int, first_query: int, end_query: int, window: tuple[int, int] = (-1, -1), attention_chunk: int = 0) -> list[tuple[int, int]]:
    """(first, end) of the keys that each of some queries sees."""
def visit(schedule: str, problem: Problem, kv_tile: int, step: int) -> int:
    """Query tile that a KV tile visits at a step."""
def visit_order(schedule: str, problem: Problem) -> list[list[int]]:
    """Query tiles of each KV tile, in the order of its visits."""
def walk(schedule: str, problem: Problem, kv_tile: int) -> list[tuple[int, int]]:
    """(step, query head of the split) of each step of a KV tile, in order."""
def work_tile(schedule: str, problem: Problem, number: int, cta_rank: int = 0) -> tuple[int, int, int, int] | None:
    """(batch, KV head, KV tile, split) of one CTA of the cluster that took a number; None when it sits it out."""

"""What the GPU tests share: random problems, poisoned outputs, calls of the backward op, comparison of bits.

Works on any device, so that tests/test_gpu_checks.py can try the checks themselves without a GPU.
"""

import contextlib
import dataclasses
import gc
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Iterator

import torch

import dash_attn  # noqa: F401  registers torch.ops.dash_attn
from dash_attn import schedule
from dash_attn._schedule import ForwardTiles
from dash_attn.dropout import DropoutBits, DropoutState, dropout_bits

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # float64_reference

from column_support import draw_columns, hidden_pairs
from float64_reference import PLAIN, Dropout, Scores, visible_keys

GRADIENTS = ("dq", "dk", "dv")
GUARD_ELEMENTS = 1024


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention problem; its repr names every parameter of a failing case."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype: torch.dtype = torch.bfloat16
    softmax_scale: float | None = None
    window: tuple[int, int] = (-1, -1)  # keys before and behind a query's own one; a negative number is no limit
    attention_chunk: int = 0
    softcap: float = 0.0
    alibi: str = ""  # slopes of "heads", the same for all sequences, or of "sequences"
    sinks: bool = False
    lse_gradient: bool = False
    value_head_dim: int | None = None  # None: head_dim
    dropout_p: float = 0.0
    column_bounds: int = 0  # of each key, in a mask by key columns; 0: there is no such mask
    column_heads: bool = False  # whether each KV head has a mask by key columns of its own

    @property
    def head_dims(self) -> dict[str, int]:
        """As dash_attn.schedule takes them."""
        return dict(head_dim=self.head_dim, value_head_dim=self.value_head_dim or self.head_dim)

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.softmax_scale is None else self.softmax_scale

    @property
    def mask(self) -> dict[str, object]:
        """As float64_reference and dash_attn.schedule take it."""
        return dict(causal=self.causal, window=self.window, attention_chunk=self.attention_chunk)

    @property
    def mask_kind(self) -> str:
        """Of the kernel that the mask chooses, whatever the lengths are."""
        left, right = self.window[0], 0 if self.causal else self.window[1]
        if left >= 0 or right > 0 or self.attention_chunk > 0:
            return "window"
        return "causal" if right == 0 else "full"

    @property
    def op_arguments(self) -> dict[str, object]:
        """What the ops are told of a batch beside its tensors."""
        return dict(
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            seqused_q=None,
            seqused_k=None,
            softmax_scale=self.scale,
            causal=self.causal,
            window_left=self.window[0],
            window_right=self.window[1],
            attention_chunk=self.attention_chunk,
            sinks=None,
            alibi_slopes=None,
            softcap=self.softcap,
        )


@dataclasses.dataclass
class Inputs:
    """dout, q, k, v drawn from a normal distribution, what else the scores are made of, and the forward's out and
    softmax_lse."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    softmax_lse: torch.Tensor
    scores: Scores = PLAIN
    columns: torch.Tensor | None = None  # startend_row_indices

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.dout, self.q, self.k, self.v, self.out, self.softmax_lse


def policies(problem: Problem) -> list[str]:
    """Every policy that has a kernel for the problem."""
    if problem.column_bounds:
        return ["descending"]
    scores = dict(changed_scores=bool(problem.softcap or problem.alibi), dropout=problem.dropout_p > 0)
    return list(schedule.fitting(**problem.mask, **problem.head_dims, **scores))


def schedules(causal: bool) -> list[str]:
    """Every policy that is defined for the causal mask, or for the full one."""
    return list(schedule.fitting(causal=causal))


def tiles_of(problem: Problem, policy: str) -> schedule.Problem:
    shape = dict(heads=problem.heads, kv_heads=problem.kv_heads, **problem.head_dims)
    return schedule.problem(policy, problem.seqlen_q, problem.seqlen_k, **shape, **problem.mask)


def needs_clusters(policy: str) -> bool:
    """Whether the policy's CTAs wait for each other within a cluster, which starts only where its SMs are free
    together."""
    return policy == "symmetric_shift"


def splits(problem: Problem) -> int:
    """Work tiles among which the backward divides the query heads of a KV head, for each KV tile."""
    return tiles_of(problem, "auto").splits


def forward_counts_tiles(problem: Problem, num_sms: int) -> bool:
    """Whether CTAs of the forward take tiles from a counter in memory."""
    tiles = ForwardTiles(
        batch=problem.batch,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        **problem.head_dims,
        causal=problem.causal,
        sms=num_sms,
        drops=problem.dropout_p > 0,
    )
    return tiles.takes_tiles


def random_qkv_dout(problem: Problem, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(seqlen: int, heads: int, head_dim: int = problem.head_dim) -> torch.Tensor:
        shape = (problem.batch, seqlen, heads, head_dim)
        return torch.randn(shape, generator=generator, device=device).to(problem.dtype)

    q = normal(problem.seqlen_q, problem.heads)
    k = normal(problem.seqlen_k, problem.kv_heads)
    of_values = problem.head_dims["value_head_dim"]
    v = normal(problem.seqlen_k, problem.kv_heads, of_values)
    return q, k, v, normal(problem.seqlen_q, problem.heads, of_values)


def random_scores(problem: Problem, device: str, seed: int = 0) -> Scores:
    """Sinks and the heads' slopes do not depend on the seed: sequences that are drawn with others have them too."""
    of_heads, of_sequences = (torch.Generator(device).manual_seed(number) for number in (7, 1000 + seed))
    batch, heads = problem.batch, problem.heads
    sinks = torch.randn(heads, generator=of_heads, device=device) + 1
    slopes = torch.rand(heads, generator=of_heads, device=device) / 4
    if problem.alibi == "sequences":
        slopes = torch.rand(batch, heads, generator=of_sequences, device=device) / 4
    dlse = torch.randn(batch, heads, problem.seqlen_q, generator=of_sequences, device=device)
    return Scores(
        problem.softcap,
        slopes if problem.alibi else None,
        sinks if problem.sinks else None,
        dlse if problem.lse_gradient else None,
        dropout=random_dropout(problem, device, seed) if problem.dropout_p else None,
    )


def random_columns(problem: Problem, device: str, seed: int = 0) -> torch.Tensor | None:
    """startend_row_indices of a batch, if the problem has a mask by key columns."""
    if not problem.column_bounds:
        return None
    heads = problem.kv_heads if problem.column_heads else 1
    lengths = problem.seqlen_q, problem.seqlen_k
    return draw_columns(problem.batch, heads, *lengths, problem.causal, problem.column_bounds, seed=seed).to(device)


def hidden_by_columns(problem: Problem, columns: torch.Tensor) -> torch.Tensor:
    """bool (batch, 1 or kv_heads, seqlen_q, seqlen_k) on the CPU, as float64_reference takes it."""
    of_heads = [hidden_pairs(head, problem.seqlen_q, problem.causal) for head in columns.cpu().flatten(0, 1)]
    return torch.stack(of_heads).unflatten(0, columns.shape[:2])


def random_dropout(problem: Problem, device: str, seed: int = 0) -> Dropout:
    """Bits with a state for each sequence. Those that nobody may look at, of blocks without a pair of a query and a key
    that it sees and of rows past the end, are inverted."""
    numbers = torch.Generator().manual_seed(2000 + seed)
    state = torch.randint(2**62, (problem.batch, 2), generator=numbers).to(device)
    made = dropout_bits(
        DropoutState(state), p=problem.dropout_p, batch=problem.batch, heads=problem.heads,
        seqlen_q=problem.seqlen_q, seqlen_k=problem.seqlen_k,
    )  # fmt: skip
    return Dropout(problem.dropout_p, made.mask(), with_poison(problem, made.bits), state)


def given_bits(dropout: Dropout) -> DropoutBits:
    """As the public functions take them."""
    batch, heads, seqlen_q, seqlen_k = dropout.keep.shape
    of_default = dict(mapping="bit_sliced", rounds=7, first_head=0, total_heads=heads, first_query=0, first_key=0)
    return DropoutBits(dropout.bits, DropoutState(dropout.rng_state), dropout.p, seqlen_q, seqlen_k, **of_default)


def with_poison(problem: Problem, bits: torch.Tensor) -> torch.Tensor:
    """The same bits of what is seen, all others inverted."""
    q_blocks, k_blocks = bits.shape[2:4]
    seen = torch.zeros(32 * q_blocks, 32 * k_blocks, dtype=torch.bool, device=bits.device)
    seen[: problem.seqlen_q, : problem.seqlen_k] = visible_keys(
        problem.seqlen_q, problem.seqlen_k, device=bits.device, **problem.mask
    )
    return bits ^ ~packed_bits(seen) if bits.numel() else bits


def packed_bits(mask: torch.Tensor) -> torch.Tensor:
    """uint8 (blocks of queries, blocks of keys, 128) of bool (queries, keys) in whole blocks: csrc/dropout/mask.h."""
    elements = torch.empty(128, 8, dtype=torch.int64)
    for query, key in itertools.product(range(32), range(32)):
        word = 2 * (4 * (query >> 1 & 3) + (key >> 1 & 3)) + (query >> 4)
        bit = 16 * (query & 1) + 8 * (key & 1) + 4 * (key >> 4) + 2 * (key >> 3 & 1) + (query >> 3 & 1)
        elements[4 * word + bit // 8, bit % 8] = 32 * query + key
    blocks = mask.unflatten(0, (-1, 32)).unflatten(2, (-1, 32)).transpose(1, 2).flatten(2)
    digits = blocks[..., elements.to(mask.device)]
    return (digits * 2 ** torch.arange(8, device=mask.device)).sum(-1).to(torch.uint8)


def forward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_margin: int = 0,
    scores: Scores = PLAIN,
    columns: torch.Tensor | None = None,
):
    """out and softmax_lse, by the op."""
    return torch.ops.dash_attn.forward(q, k, v, **of_scores(problem, scores, columns), sm_margin=sm_margin)


def of_scores(problem: Problem, scores: Scores, columns: torch.Tensor | None) -> dict[str, object]:
    """What both ops are told of a batch beside its tensors."""
    assert (columns is not None) == bool(problem.column_bounds), f"{problem}: the mask by key columns is missing"
    dropout = {} if scores.dropout is None else scores.dropout.arguments()
    beside = dict(sinks=scores.sinks, alibi_slopes=scores.alibi_slopes, startend_row_indices=columns)
    return dict(problem.op_arguments, **beside, **dropout)


def with_forward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    scores: Scores = PLAIN,
    columns: torch.Tensor | None = None,
) -> Inputs:
    out, softmax_lse = forward(problem, q, k, v, scores=scores, columns=columns)
    return Inputs(dout, q, k, v, out, softmax_lse, scores, columns)


def random_inputs(problem: Problem, device: str, seed: int = 0) -> Inputs:
    scores, columns = (draw(problem, device, seed) for draw in (random_scores, random_columns))
    return with_forward(problem, *random_qkv_dout(problem, device, seed), scores, columns)


class GuardedTensor:
    """An output filled with NaN inside a larger buffer of NaN; check() says whether the op wrote outside it."""

    def __init__(self, buffer: torch.Tensor, tensor: torch.Tensor):
        self.buffer = buffer
        self.tensor = tensor
        self.untouched = int_view(buffer).clone()

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> "GuardedTensor":
        size = math.prod(shape)
        buffer = torch.full((size + 2 * GUARD_ELEMENTS,), math.nan, dtype=dtype, device=device)
        return cls(buffer, buffer[GUARD_ELEMENTS : GUARD_ELEMENTS + size].view(shape))

    @classmethod
    def strided(cls, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> "GuardedTensor":
        batch, seqlen, heads, head_dim = shape
        buffer = torch.full((batch, seqlen + 3, heads + 1, head_dim + 16), math.nan, dtype=dtype, device=device)
        return cls(buffer, buffer[:, 1 : 1 + seqlen, :heads, 8 : 8 + head_dim])

    def writes_outside(self) -> torch.Tensor:
        """Number of guard elements whose bits changed, as a tensor on the device. Leaves NaN inside `tensor`."""
        self.tensor.fill_(math.nan)
        return (int_view(self.buffer) != self.untouched).sum()


def empty_gradients(inputs: Inputs, strided: bool = False) -> dict[str, GuardedTensor]:
    make = GuardedTensor.strided if strided else GuardedTensor.contiguous
    like = gradients_like(inputs)
    found = {name: make(tuple(x.shape), x.dtype, x.device) for name, x in like.items() if name != "dsinks"}
    if "dsinks" in like:
        found["dsinks"] = GuardedTensor.contiguous((len(like["dsinks"]),), torch.float32, inputs.q.device)
    return found


def gradients_like(inputs: Inputs) -> dict[str, torch.Tensor]:
    """What the gradients look like."""
    like = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    return like if inputs.scores.sinks is None else like | {"dsinks": inputs.scores.sinks}


def nan_gradients(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {
        name: torch.full_like(x, math.nan, memory_format=torch.contiguous_format)
        for name, x in gradients_like(inputs).items()
    }


def backward_into(
    gradients: dict[str, torch.Tensor], inputs: Inputs, problem: Problem, policy: str, sm_margin: int = 0
) -> None:
    torch.ops.dash_attn.backward(
        *inputs.tensors(),
        gradients["dq"],
        gradients["dk"],
        gradients["dv"],
        **of_scores(problem, inputs.scores, inputs.columns),
        schedule=policy,
        sm_margin=sm_margin,
        dsoftmax_lse=inputs.scores.dsoftmax_lse,
        dsinks=gradients.get("dsinks"),
    )


def backward(inputs: Inputs, problem: Problem, policy: str, sm_margin: int = 0) -> dict[str, torch.Tensor]:
    """Gradients written over NaN, so that an element the op leaves alone shows."""
    gradients = nan_gradients(inputs)
    backward_into(gradients, inputs, problem, policy, sm_margin)
    return gradients


def workspace_bytes(problem: Problem, policy: str, device: str) -> int:
    """What a backward allocates beside its gradients."""
    inputs = random_inputs(problem, device)
    gradients = nan_gradients(inputs)
    return requested_bytes(lambda: backward_into(gradients, inputs, problem, policy))


def requested_bytes(call: Callable[[], object]) -> int:
    """What the call has allocated at most at a time, as it asked for it: the allocator may hand out a larger block."""
    gc.collect()  # tensors of a cycle that are freed during the call would be taken from what it allocates
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@contextlib.contextmanager
def host_must_not_wait(what: str) -> Iterator[None]:
    """Around calls that must not wait for the GPU, which is busy with earlier work meanwhile."""
    torch.cuda.synchronize()
    start = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)  # clocks: about 0.2 s
    start.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not start.query(), f"{what}: the call returned only when earlier work had ended"


def int_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def first_mismatch(name: str, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """None where the bits of both tensors agree; else the first element that differs, with both values."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{name}: {actual.dtype}{tuple(actual.shape)} against {expected.dtype}{tuple(expected.shape)}"
    a, b = int_view(actual.contiguous()), int_view(expected.contiguous())
    different = a != b
    if not different.any().item():
        return None
    index = tuple(torch.nonzero(different)[0].tolist())
    bits = (1 << (8 * actual.element_size())) - 1
    return (
        f"{name}{list(index)}: {actual[index].item()!r} (bits {a[index].item() & bits:#x}) against "
        f"{expected[index].item()!r} (bits {b[index].item() & bits:#x}); "
        f"{int(different.sum())} of {actual.numel()} elements differ"
    )


def assert_same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    for name in expected:
        mismatch = first_mismatch(name, actual[name], expected[name])
        assert mismatch is None, f"{what}: {mismatch}"


def assert_finite(gradients: dict[str, torch.Tensor], what: str) -> None:
    """Outputs start as NaN: one that is still NaN was not written, and equal bits would mean nothing."""
    for name, x in gradients.items():
        assert bool(torch.isfinite(x).all()), f"{what}: {name} holds values that are not finite"

"""Packs of sequences for the GPU tests: where they lie, what lies around them, and what each sequence has alone.

Works on any device, as gpu_support does.
"""

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Sequence

import gpu_support as support
import torch
from float64_reference import PLAIN, Dropout, Scores
from gpu_support import GRADIENTS, Problem
from gradient_check import Bar

import dash_attn

LENGTHS = (0, 1, 63, 64, 65, 127, 129, 1000, 4096)
WEIGHTS = (6, 9, 9, 9, 9, 9, 9, 3, 1)
OUTPUTS = ("out", "softmax_lse", *GRADIENTS)

# What calls ask for, by the kernel that it chooses.
MASKS = {
    "full": (dict(causal=False),),
    "causal": (dict(causal=True), dict(causal=False, window=(-1, 0))),
    "window": (
        dict(causal=False, window=(0, 0)),
        dict(causal=True, window=(127, -1)),
        dict(causal=False, window=(500, 0)),
        dict(causal=False, window=(64, 64)),
        dict(causal=False, window=(-1, 10)),
        dict(causal=False, window=(10, -1)),
        dict(causal=False, window=(4000, 4000)),
        dict(causal=True, attention_chunk=100),
        dict(causal=False, attention_chunk=100),
        dict(causal=True, window=(70, 0), attention_chunk=4096),
    ),
}


@contextlib.contextmanager
def poisoned_allocations():
    """Memory that torch hands out in the block is full of NaN: what an op leaves as it got it shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def mask_arguments(problem: Problem) -> dict[str, object]:
    """What the public functions are told of a problem beside its tensors."""
    return dict(
        softmax_scale=problem.softmax_scale,
        causal=problem.causal,
        window_size=problem.window,
        attention_chunk=problem.attention_chunk,
        softcap=problem.softcap,
    )


def outputs_of(
    function, tensors: Sequence[torch.Tensor], dout: torch.Tensor, scores: Scores, arguments: dict
) -> dict[str, torch.Tensor]:
    """Of a public function: out and softmax_lse, and the gradients by autograd."""
    with poisoned_allocations():
        leaves = [x.detach().requires_grad_() for x in tensors]
        arguments = dict(arguments, alibi_slopes=scores.alibi_slopes, return_attn_probs=True)
        if scores.sinks is not None:
            arguments["learnable_sink"] = scores.sinks.detach().requires_grad_()
        if scores.dropout is not None:
            arguments |= dict(dropout_p=scores.dropout.p, dropout_bits=support.given_bits(scores.dropout))
        out, softmax_lse, *_ = function(*leaves, **arguments)
        wanted = [*leaves, *([] if scores.sinks is None else [arguments["learnable_sink"]])]
        if scores.dsoftmax_lse is None:
            gradients = torch.autograd.grad(out, wanted, dout)
        else:
            gradients = torch.autograd.grad((out, softmax_lse), wanted, (dout, scores.dsoftmax_lse))
    return dict(zip((*OUTPUTS, "dsinks"), (out.detach(), softmax_lse.detach(), *gradients)))


def dense_attention(
    problem: Problem, policy: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor,
    scores: Scores = PLAIN, columns: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    assert (columns is not None) == bool(problem.column_bounds), f"{problem}: the mask by key columns is missing"
    arguments = dict(mask_arguments(problem), schedule=policy, startend_row_indices=columns)
    return outputs_of(dash_attn.flash_attn_func, (q, k, v), dout, scores, arguments)


class Alone:
    """One sequence, and what a dense call on it alone gives, computed once a policy."""

    def __init__(self, problem: Problem, device: str, seed: int, cramped: bool = False, spoilt: bool = False):
        """`cramped`: order-free accumulation finds no room in it, and adds in order. `spoilt`: some values of it are
        not finite."""
        assert problem.batch == 1
        self.problem = problem
        tensors = support.random_qkv_dout(problem, device, seed)
        if cramped and problem.seqlen_k:
            tensors[2][:, min(7, problem.seqlen_k - 1)].mul_(1e4).clamp_(-6e4, 6e4)
        if spoilt:
            for i, x in enumerate(tensors):
                if x.shape[1] and (seed + i) % 2:  # two of the four, at a place of their own
                    x[:, 37 * (seed + i) % x.shape[1], :, i] = float(("inf", "nan", "-inf")[(seed + i) % 3])
        self.q, self.k, self.v, self.dout = (x[0] for x in tensors)
        self.scores = support.random_scores(problem, device, seed)
        self.columns = support.random_columns(problem, device, seed)
        self._outputs: dict[str, dict[str, torch.Tensor]] = {}

    def outputs(self, policy: str) -> dict[str, torch.Tensor]:
        if policy not in self._outputs:
            tensors = (x[None] for x in (self.q, self.k, self.v, self.dout))
            found = dense_attention(self.problem, policy, *tensors, self.scores, self.columns)
            self._outputs[policy] = {name: x if name == "dsinks" else x[0] for name, x in found.items()}
        return self._outputs[policy]


class Pool:
    """Sequences of many lengths to make packs of, three of each pair of lengths."""

    def __init__(self, problem: Problem, device: str):
        """`problem`: what the sequences have in common; its lengths mean nothing."""
        self.problem, self.device = problem, device
        self._sequences: dict[tuple[int, int, bool, bool], Alone] = {}

    def get(self, seqlen_q: int, seqlen_k: int, cramped: bool = False, spoilt: bool = False) -> Alone:
        key = seqlen_q, seqlen_k, cramped, spoilt
        if key not in self._sequences:
            problem = dataclasses.replace(self.problem, batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
            self._sequences[key] = Alone(problem, self.device, len(self._sequences), cramped, spoilt)
        return self._sequences[key]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where the sequences lie in the rows of a pack: those of the queries, or those of the keys."""

    total: int
    cu_seqlens: tuple[int, ...]
    lengths: tuple[int, ...]

    def places(self) -> list[slice]:
        return [slice(start, start + length) for start, length in zip(self.cu_seqlens, self.lengths)]

    def has_gaps(self) -> bool:
        return any(end - start != n for (start, end), n in zip(itertools.pairwise(self.cu_seqlens), self.lengths))

    def outside(self) -> list[int]:
        """How many rows lie before each sequence, and behind the last."""
        ends = [0, *(place.stop for place in self.places())]
        starts = [*(place.start for place in self.places()), self.total]
        return [start - end for end, start in zip(ends, starts)]

    def join(self, parts: Sequence[torch.Tensor], around: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """A tensor of all rows: `parts` at the places of the sequences, rows of `around` elsewhere."""
        between = [around.narrow(dim, 0, count) for count in self.outside()]
        pieces = [piece for pair in zip(between, parts) for piece in pair]
        return torch.cat([*pieces, between[-1]], dim)


def lay_out(lengths: Sequence[int], chance: random.Random, gaps: bool = False, total: int | None = None) -> Rows:
    """Rows before the first sequence and behind the last, now and then; with `gaps`, rows between two. `total`: rows in
    all, where the caller knows it."""
    places = [n + (chance.choice((0, 1, 5, 64, 130)) if gaps else 0) for n in lengths]
    starts = tuple(itertools.accumulate(places, initial=chance.choice((0, 0, 3))))
    if total is None:
        total = starts[-1] + chance.choice((0, 0, 1, 70))
    assert total >= starts[-1]
    return Rows(total, starts, tuple(lengths))


def garbage(count: int, like: torch.Tensor) -> torch.Tensor:
    """Rows (count, heads, head_dim) of what spoils any sum that it enters."""
    values = like.new_tensor([math.nan, math.inf, torch.finfo(like.dtype).max, -math.inf])
    rows = values[torch.arange(count, device=like.device) % 4]
    return rows[:, None, None].expand(count, *like.shape[1:])


@dataclasses.dataclass
class Pack:
    """Sequences in one call. Rows outside them are garbage, and so is all of sequence number `poisoned`."""

    sequences: list[Alone]
    rows_q: Rows
    rows_k: Rows
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    max_seqlen_q: int | torch.Tensor
    max_seqlen_k: int | torch.Tensor
    poisoned: int | None = None

    @property
    def problem(self) -> Problem:
        """Of the mask and the heads; its lengths are one sequence's."""
        return self.sequences[0].problem

    @property
    def scores(self) -> Scores:
        """Rows outside the sequences have a gradient of the log-sum-exp that is NaN, and so has the poisoned one."""
        parts = [sequence.scores for sequence in self.sequences]
        found = parts[0]
        if self.problem.alibi == "sequences":
            found = found._replace(alibi_slopes=torch.cat([part.alibi_slopes for part in parts]))
        if found.dropout is not None:
            found = found._replace(dropout=joined_dropout([part.dropout for part in parts]))
        if found.dsoftmax_lse is None:
            return found
        dlse = [part.dsoftmax_lse[0] for part in parts]
        if self.poisoned is not None:
            dlse[self.poisoned] = torch.full_like(dlse[self.poisoned], math.nan)
        around = dlse[0].new_full((1, 1), math.nan).expand(self.problem.heads, max(self.rows_q.outside()))
        return found._replace(dsoftmax_lse=self.rows_q.join(dlse, around, dim=1))

    @property
    def columns(self) -> torch.Tensor | None:
        """startend_row_indices of the pack. Rows outside the sequences hide all queries, or none."""
        if not self.problem.column_bounds:
            return None
        parts = [sequence.columns[0] for sequence in self.sequences]
        extremes = parts[0].new_tensor([-(2**31), 2**31 - 1]).repeat(max(self.rows_k.outside()) // 2 + 1)
        around = extremes[None, :, None].expand(parts[0].shape[0], -1, parts[0].shape[2])
        return self.rows_k.join(parts, around, dim=1)

    def name_of(self, number: int) -> str:
        lengths = f"{self.rows_q.lengths[number]} queries and {self.rows_k.lengths[number]} keys"
        starts = f"rows {self.rows_q.cu_seqlens[number]} and {self.rows_k.cu_seqlens[number]}"
        return f"sequence {number} of {lengths}, from {starts}"

    def __str__(self) -> str:
        used = f"seqused_q {self.seqused_q is not None}, seqused_k {self.seqused_k is not None}"
        lengths = " ".join(f"{q}x{k}" for q, k in zip(self.rows_q.lengths, self.rows_k.lengths))
        text = f"pack of {lengths[:300]} (queries x keys) in {self.rows_q.total} and {self.rows_k.total} rows"
        common = dataclasses.replace(self.problem, seqlen_q=0, seqlen_k=0)
        return f"{text}, {used}, sequence {self.poisoned} poisoned, {common}"

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All that a call reads from the device."""
        return (
            self.q, self.k, self.v, self.dout, self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k
        )  # fmt: skip


def joined_dropout(parts: Sequence[Dropout]) -> Dropout:
    """Of a pack of these sequences: bits of as many rows as the longest has, any where a sequence has fewer."""

    def joined(name: str, like: torch.Tensor) -> torch.Tensor:
        values = [getattr(part, name) for part in parts]
        size = (len(parts), like.shape[1], *(max(x.shape[dim] for x in values) for dim in (2, 3)), *like.shape[4:])
        whole = like.new_full(size, 0x5A if name == "bits" else True)
        for number, x in enumerate(values):
            whole[number, :, : x.shape[2], : x.shape[3]] = x[0]
        return whole

    keep, bits = joined("keep", parts[0].keep), joined("bits", parts[0].bits)
    return Dropout(parts[0].p, keep, bits, torch.cat([part.rng_state for part in parts]))


def make_pack(
    sequences: list[Alone],
    rows_q: Rows,
    rows_k: Rows,
    *,
    seqused: tuple[bool, bool] = (False, False),
    max_seqlens: tuple[int | torch.Tensor, int | torch.Tensor] | None = None,
    poisoned: int | None = None,
) -> Pack:
    """`seqused`: whether a call is given the lengths of queries and of keys where they fill the rows; where there are
    gaps, it is."""
    device = sequences[0].q.device

    def joined(name: str, rows: Rows) -> torch.Tensor:
        parts = [getattr(sequence, name) for sequence in sequences]
        if poisoned is not None:
            parts[poisoned] = garbage(parts[poisoned].shape[0], parts[poisoned])
        return rows.join(parts, garbage(max(rows.outside()), parts[0]))

    def numbers(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    return Pack(
        sequences=sequences,
        rows_q=rows_q,
        rows_k=rows_k,
        q=joined("q", rows_q),
        k=joined("k", rows_k),
        v=joined("v", rows_k),
        dout=joined("dout", rows_q),
        cu_seqlens_q=numbers(rows_q.cu_seqlens),
        cu_seqlens_k=numbers(rows_k.cu_seqlens),
        seqused_q=numbers(rows_q.lengths) if seqused[0] or rows_q.has_gaps() else None,
        seqused_k=numbers(rows_k.lengths) if seqused[1] or rows_k.has_gaps() else None,
        max_seqlen_q=max(rows_q.lengths) if max_seqlens is None else max_seqlens[0],
        max_seqlen_k=max(rows_k.lengths) if max_seqlens is None else max_seqlens[1],
        poisoned=poisoned,
    )


def pack_of_lengths(pool: Pool, lengths: Sequence[tuple[int, int]], **arguments) -> Pack:
    """(queries, keys) of each sequence, one behind the other and nothing between; what is behind is up to chance."""
    rows = [lay_out(own, random.Random(0)) for own in zip(*lengths)]
    return make_pack([pool.get(*own) for own in lengths], *rows, **arguments)


def random_pack(pool: Pool, chance: random.Random, most: int = 10, spoilt: float = 0.1) -> Pack:
    """`spoilt`: how many of the sequences hold values that are not finite."""
    count = chance.randint(1, most)
    lengths_q = chance.choices(LENGTHS, WEIGHTS, k=count)
    lengths_k = lengths_q if chance.random() < 0.4 else chance.choices(LENGTHS, WEIGHTS, k=count)
    sequences = [
        pool.get(*own, cramped=chance.random() < 0.2, spoilt=chance.random() < spoilt)
        for own in zip(lengths_q, lengths_k)
    ]
    rows_q, rows_k = (lay_out(own, chance, gaps=chance.random() < 0.3) for own in (lengths_q, lengths_k))

    def max_seqlen(lengths: list[int]) -> int | torch.Tensor:
        longest = max(lengths)
        return chance.choice((longest, 10**6, 0, torch.tensor(longest, device=pool.device)))

    return make_pack(
        sequences,
        rows_q,
        rows_k,
        seqused=(chance.random() < 0.2, chance.random() < 0.2),
        max_seqlens=(max_seqlen(lengths_q), max_seqlen(lengths_k)),
        poisoned=chance.randrange(count) if chance.random() < 0.3 else None,
    )


def varlen_attention(pack: Pack, policy: str, sm_margin: int = 0) -> dict[str, torch.Tensor]:
    """Both passes of the public function."""
    lengths = pack.cu_seqlens_q, pack.cu_seqlens_k, pack.max_seqlen_q, pack.max_seqlen_k
    arguments = dict(
        mask_arguments(pack.problem),
        seqused_q=pack.seqused_q,
        seqused_k=pack.seqused_k,
        sm_margin=sm_margin,
        schedule=policy,
        startend_row_indices=pack.columns,
    )

    def function(*tensors, **more):
        return dash_attn.flash_attn_varlen_func(*tensors, *lengths, **more)

    return outputs_of(function, (pack.q, pack.k, pack.v), pack.dout, pack.scores, arguments)


def expected_outputs(pack: Pack, policy: str) -> dict[str, torch.Tensor]:
    """What each sequence has alone, and outside the sequences zeros, or an infinite log-sum-exp. The gradient of sinks
    is the sum over the sequences, in their order."""
    alone = [sequence.outputs(policy) for sequence in pack.sequences]

    def joined(name: str) -> torch.Tensor:
        parts = [outputs[name] for outputs in alone]
        rows = pack.rows_k if name in ("dk", "dv") else pack.rows_q
        if name == "softmax_lse":
            heads = parts[0].shape[0]
            return rows.join(parts, parts[0].new_full((1, 1), math.inf).expand(heads, max(rows.outside())), dim=1)
        return rows.join(parts, parts[0].new_zeros((1, 1, 1)).expand(max(rows.outside()), *parts[0].shape[1:]))

    found = {name: joined(name) for name in OUTPUTS}
    if "dsinks" in alone[0]:
        found["dsinks"] = sum((outputs["dsinks"] for outputs in alone), torch.zeros_like(alone[0]["dsinks"]))
    return found


def own_rows(pack: Pack, outputs: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """Views of what one sequence has in the outputs of a pack."""
    place_q, place_k = pack.rows_q.places()[number], pack.rows_k.places()[number]
    places = {"softmax_lse": (slice(None), place_q), "dk": (place_k,), "dv": (place_k,)}
    return {name: outputs[name][places.get(name, (place_q,))] for name in OUTPUTS}


def any_difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> torch.Tensor:
    """Whether a bit differs, as a tensor on the device."""
    differ = [(support.int_view(actual[name]) != support.int_view(expected[name])).any() for name in expected]
    return torch.stack(differ).any()


def first_difference(pack: Pack, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str | None:
    """The first element whose bits differ, and the sequence that it is of."""
    for name in expected:
        mismatch = support.first_mismatch(name, actual[name], expected[name])
        if mismatch is None:
            continue
        if name == "dsinks":
            return f"{mismatch}; the sum over the sequences"
        rows = pack.rows_k if name in ("dk", "dv") else pack.rows_q
        differ = (support.int_view(actual[name]) != support.int_view(expected[name])).nonzero()[0].tolist()
        row = differ[1] if name == "softmax_lse" else differ[0]
        inside = [number for number, place in enumerate(rows.places()) if place.start <= row < place.stop]
        return f"{mismatch}; row {row} is {'of ' + pack.name_of(inside[0]) if inside else 'outside every sequence'}"
    return None


def assert_as_alone(pack: Pack, found: dict[str, dict[str, torch.Tensor]], what: str = "") -> None:
    """`found`: the outputs of the pack by policy. Waits once. What the poisoned sequence has is not looked at, and is
    overwritten."""
    expected = {policy: expected_outputs(pack, policy) for policy in found}
    if pack.poisoned is not None:
        for policy, outputs in found.items():
            own = own_rows(pack, expected[policy], pack.poisoned)
            for name, x in own_rows(pack, outputs, pack.poisoned).items():
                x.copy_(own[name])
            if "dsinks" in outputs:
                outputs["dsinks"].copy_(expected[policy]["dsinks"])
    differ = torch.stack([any_difference(found[policy], expected[policy]) for policy in found]).tolist()
    lines = [
        f"{policy}: {first_difference(pack, found[policy], expected[policy])}"
        for policy, differs in zip(found, differ)
        if differs
    ]
    assert not lines, f"{pack} {what}:\n" + "\n".join(lines)


def accuracy_failures(pack: Pack, found: dict[str, dict[str, torch.Tensor]]) -> list[str]:
    """What is further from float64 than tests/gpu/gradient_check.py allows, a line each; `found`: outputs by policy.

    Rows are judged one by one. Norms are of the whole pack, since of a sequence of one query, ours and PyTorch's alike,
    they are up to chance.
    """
    lines = []
    squares = {}  # by policy and output, for each sequence: error, limit, and which it is
    for number, sequence in enumerate(pack.sequences):
        problem, what = sequence.problem, pack.name_of(number)
        own = {policy: own_rows(pack, outputs, number) for policy, outputs in found.items()}
        if problem.seqlen_q == 0 or problem.seqlen_k == 0:
            for policy, outputs in own.items():
                wrong = [name for name in ("out", *GRADIENTS) if outputs[name].any()]
                sinks = sequence.scores.sinks
                lse = math.inf if sinks is None else sinks[:, None]
                wrong += [] if (outputs["softmax_lse"] == lse).all() else ["softmax_lse"]
                lines += [f"{what}, {policy}: {name} of a sequence without queries or keys" for name in wrong]
            continue
        own = {policy: {name: x[None] for name, x in outputs.items()} for policy, outputs in own.items()}
        first = next(iter(own.values()))
        tensors = (x[None] for x in (sequence.dout, sequence.q, sequence.k, sequence.v))
        bar = Bar(problem, support.Inputs(*tensors, first["out"], first["softmax_lse"], sequence.scores))
        for policy, outputs in own.items():
            errors = bar.errors({name: outputs[name] for name in ("out", *GRADIENTS)}, policy)
            for name, (error, limit, _, row_excess) in errors.items():
                if not row_excess <= 0:
                    lines.append(f"{what}, {policy}: {name}: a row is off by {row_excess:.3e} more than rounding")
                squares.setdefault((policy, name), []).append((error**2 - limit**2, error**2, limit**2, what))
            lines += [f"{what}, {policy}: {line}" for line in bar.lse_failures(outputs["softmax_lse"])]
    for (policy, name), of_sequences in squares.items():
        error, limit = (sum(squares) ** 0.5 for squares in list(zip(*of_sequences))[1:3])
        if not error <= limit:
            worst = max(of_sequences)[-1]
            lines.append(f"{worst} and others, {policy}: {name} is off by {error:.3e} in norm, allowed {limit:.3e}")
    return lines

"""Where two runs part: the first step, the first tensor in it, the blocks of that, and what may be the cause."""

from __future__ import annotations

import dataclasses
import os

from . import replays
from .runs import Key, Run, Whole, merge_orders
from .words import words_per_element

_CAUSES = {
    "data": "data", "weights": "weights", "activation": "forward", "activation_gradient": "backward",
    "local_gradient": "backward", "state": "optimizer", "updated_weights": "optimizer",
}  # fmt: skip
_NOT_FACTS = ("rank", "host", "folder", "command", "replay", "block", "format", "fingerprint")


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first tensor, in the order of execution, in which two runs differ.

    Attributes:
        step: the number of the step.
        key: the tensor; `kind`, `name`, `time`, and its `rank` if it belongs to one.
        what: what differs, in words.
        cause: data, weights, forward, backward, collective, optimizer, or two of them.
        reason: why this cause, in a sentence.
        after: the record before it, which agrees.
        blocks: numbers of the blocks that differ; None where they were not kept.
        block_count: how many blocks the tensor has.
        elements: the first element of the first block that differs and the one past its last, in row-major order.
        shape: of the whole tensor.
        ranks: ranks whose parts or copies differ, as far as the receipts tell.
        differing: for each kind, how many tensors of this step differ and how many were compared.
        replay: commands that repeat the step in run a and in run b, and leave the block's elements in files.
    """

    step: int
    key: Key
    what: str
    cause: str
    reason: str
    after: Key | None
    blocks: list[int] | None
    block_count: int
    elements: tuple[int, int] | None
    shape: tuple[int, ...]
    ranks: list[int]
    differing: dict[str, tuple[int, int]]
    replay: tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` finds.

    Attributes:
        steps: numbers of the steps that were compared, up to the first that differs.
        compared: how many tensors were, in all steps.
        first: the first difference; None where all that was compared is the same. The runs are the same where
            `not_compared` is empty too.
        not_compared: what was not, in words (how many records, or which steps), by the reason.
        facts: what the runs say of themselves and differs, by its name.
    """

    steps: list[int]
    compared: int
    first: Difference | None
    not_compared: dict[str, str]
    facts: dict[str, tuple[str | None, str | None]]


def what_differs(one: Whole, other: Whole) -> str | None:
    """What differs between a tensor in two runs, or between its copies in one; None where nothing does."""
    if one.shape != other.shape:
        return f"the shape: {list(one.shape)} and {list(other.shape)}"
    if one.dtype != other.dtype:
        return f"the dtype: {one.dtype} and {other.dtype}"
    for name, whole in (("a", one), ("b", other)):
        if whole.copies_differ:
            groups = " and ".join(f"ranks {list(ranks)}" for ranks in whole.copies_differ)
            return f"its copies in run {name}: {groups} have other bits"
    return None if one.sum == other.sum else "the bits"


def same_layout(a: dict[Key, Whole], b: dict[Key, Whole], world_sizes: tuple[int, int]) -> bool:
    """Whether, as far as their records tell, ranks hold the same parts in both runs."""
    if world_sizes[0] != world_sizes[1]:
        return False
    for key in a.keys() & b.keys():
        if key.rank is None and a[key].shape == b[key].shape:
            places = [{(part.rank, part.entry.shard) for part in run[key].parts} for run in (a, b)]
            if places[0] != places[1]:
                return False
    return True


def comparable(
    a: dict[Key, Whole], b: dict[Key, Whole], world_sizes: tuple[int, int]
) -> tuple[list[Key], dict[str, int]]:
    """The tensors of a step that can be compared, in their order of execution, and why others cannot."""
    left_out: dict[str, int] = {}
    keys = []
    alike = same_layout(a, b, world_sizes)
    for key in merge_orders(list(a), list(b)):
        why = None
        if key.rank is not None and not alike:
            why = "belongs to a rank alone, and the layouts differ (give it a Shard)"
        elif key not in a or key not in b:
            why = f"only in run {'a' if key in a else 'b'}"
        else:
            for name, whole in (("a", a[key]), ("b", b[key])):
                if whole.problem is not None:
                    why = f"run {name}: {whole.problem}"
        if why is None:
            keys.append(key)
        else:
            left_out[why] = left_out.get(why, 0) + 1
    return keys, left_out


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Comparison:
    """Compares the receipts of two runs, which may be cut over other numbers of ranks.

    Args:
        a, b: folders that Recorders have written.

    Raises:
        ValueError: a folder has no receipts, or not of all ranks; the runs have blocks of other sizes; they have no
            step, or no tensor, that can be compared.
    """
    runs = Run(a), Run(b)
    try:
        return _compare(*runs)
    finally:
        for run in runs:
            run.close()


def open_runs(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> tuple[Run, Run, list[int]]:
    """Both runs and the steps that both have; the errors are those of `compare`."""
    one, other = Run(a), Run(b)
    _check(one, other)
    return one, other, common_steps(one, other)


def _check(a: Run, b: Run) -> None:
    if a.block != b.block:
        raise ValueError(f"both runs must have blocks of one size, got {a.block} and {b.block} words")
    if not common_steps(a, b):
        raise ValueError(f"the runs must have a recorded step in common, got {a.steps[:5]}... and {b.steps[:5]}...")


def common_steps(a: Run, b: Run) -> list[int]:
    """Steps that all ranks of both runs have."""
    return sorted(set(a.steps) & set(b.steps))


def _compare(a: Run, b: Run) -> Comparison:
    _check(a, b)
    facts = {
        name.removeprefix("fact "): (a.meta.get(name), b.meta.get(name))
        for name in sorted(a.meta.keys() | b.meta.keys())
        if name not in _NOT_FACTS and a.meta.get(name) != b.meta.get(name)
    }
    sizes = a.world_size, b.world_size
    not_compared = _steps_not_compared(a, b)
    counts: dict[str, int] = {}
    steps, compared, before = [], 0, None
    for step in common_steps(a, b):
        of_a, of_b = a.step(step), b.step(step)
        keys, left_out = comparable(of_a, of_b, sizes)
        for why, count in left_out.items():
            counts[why] = counts.get(why, 0) + count
            not_compared[why] = f"{counts[why]} records"
        steps.append(step)
        compared += len(keys)
        different = {key: what for key in keys if (what := what_differs(of_a[key], of_b[key])) is not None}
        if different:
            first = _difference((a, b), (of_a, of_b), step, keys, different, before)
            return Comparison(steps, compared, first, not_compared, facts)
        before = step
    if not compared:
        raise ValueError(f"the runs must have a tensor in common that can be compared, got none: {not_compared}")
    return Comparison(steps, compared, None, not_compared, facts)


def _steps_not_compared(a: Run, b: Run) -> dict[str, str]:
    found = {}
    for name, run, other in (("a", a, b), ("b", b, a)):
        if alone := sorted(set(run.steps) - set(other.steps)):
            found[f"recorded in run {name} only"] = f"steps {_spans(alone)}"
        if run.unfinished:
            found[f"not recorded to their end in run {name}"] = f"steps {_spans(run.unfinished)}"
    return found


def _spans(steps: list[int]) -> str:
    """As 0, 2 to 5, 9; at most eight of them."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], step]
        else:
            spans.append([step])
    return ", ".join(" to ".join(map(str, span)) for span in spans[:8]) + (", ..." if len(spans) > 8 else "")


def _difference(
    runs: tuple[Run, Run],
    tensors: tuple[dict[Key, Whole], dict[Key, Whole]],
    step: int,
    keys: list[Key],
    different: dict[Key, str],
    before: int | None,
) -> Difference:
    key = next(key for key in keys if key in different)
    place = keys.index(key)
    whole, block = tensors[0][key], runs[0].block
    cause, reason = _cause(key, keys, different, tensors, runs, before)
    counts: dict[str, tuple[int, int]] = {}
    for other in keys:
        differ, of = counts.get(other.kind, (0, 0))
        counts[other.kind] = differ + (other in different), of + 1
    per = words_per_element(_dtype(whole.dtype))
    words = per
    for length in whole.shape:
        words *= length
    blocks, elements = _blocks_that_differ(runs, step, key, whole, tensors[1][key]), None
    if blocks:
        elements = blocks[0] * block // per, min(words, (blocks[0] + 1) * block) // per
    want = replays.Wanted(step, key.kind, key.name, key.time, blocks[0] if blocks else 0)
    commands = [replays.command(run.meta, want, str(run.path.resolve()) + f"_replay_{step}") for run in runs]
    ranks = _ranks_that_differ(runs, step, key, (whole, tensors[1][key]))
    return Difference(
        step, key, different[key], cause, reason, keys[place - 1] if place else None, blocks, -(-words // block),
        elements, whole.shape, ranks, counts, (commands[0], commands[1]),
    )  # fmt: skip


def _dtype(name: str):
    import torch

    return getattr(torch, name)


def _blocks_that_differ(runs: tuple[Run, Run], step: int, key: Key, a: Whole, b: Whole) -> list[int] | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return None
    for run, whole in zip(runs, (a, b)):
        if whole.copies_differ:
            of_ranks = run.blocks_of_ranks(step, key)
            usual, odd = whole.copies_differ[0][0], whole.copies_differ[-1][0]
            if usual not in of_ranks or odd not in of_ranks:
                return None
            return [n for n, value in of_ranks[odd].items() if of_ranks[usual].get(n) != value]
    one, other = (run.blocks(step, key) for run in runs)
    if one is None or other is None:
        return None
    return sorted(n for n in one.keys() | other.keys() if one.get(n, 0) != other.get(n, 0))


def _ranks_that_differ(runs: tuple[Run, Run], step: int, key: Key, wholes: tuple[Whole, Whole]) -> list[int]:
    if runs[0].world_size == 1:
        return []
    if key.rank is not None:
        return [key.rank]
    for whole, other in (wholes, wholes[::-1]):
        if whole.copies_differ:
            right = {} if other.copies_differ else {part.entry.shard: part.sum for part in other.parts}
            wrong = [p.rank for p in whole.parts if right.get(p.entry.shard, p.sum) != p.sum]
            return sorted(wrong or [rank for group in whole.copies_differ[1:] for rank in group])
    parts = [{(p.rank, p.entry.shard): p.sum for p in whole.parts} for whole in wholes]
    if parts[0].keys() != parts[1].keys():
        return []
    return sorted(rank for (rank, shard), value in parts[0].items() if parts[1][rank, shard] != value)


def _cause(
    key: Key,
    keys: list[Key],
    different: dict[Key, str],
    tensors: tuple[dict[Key, Whole], dict[Key, Whole]],
    runs: tuple[Run, Run],
    before: int | None,
) -> tuple[str, str]:
    kinds = {other.kind for other in keys}
    if key.kind == "weights":
        if before is None:
            return "weights", "the first step that both have recorded begins with other weights: another start"
        return "weights", (
            f"step {before} agrees to its end, and this one begins with other weights: they were changed outside of "
            "the optimizer's step, or in memory"
        )
    if key.kind == "gradient":
        return _cause_of_gradient(key, keys, tensors, runs)
    if key.kind == "activation":
        missing = [kind for kind in ("data", "weights") if kind not in kinds]
        if missing:
            return (
                f"{' or '.join(missing)} or forward",
                f"what came before agrees; {' and '.join(missing)} not compared",
            )
        return "forward", "the data and the weights of this step agree"
    if key.kind in ("activation_gradient", "local_gradient"):
        if "activation" not in kinds:
            return "forward or backward", "the data and weights agree as far as compared; no activations were compared"
        return "backward", "what is recorded of the forward agrees"
    if key.kind in ("state", "updated_weights"):
        if "gradient" not in kinds:
            return "backward or optimizer", "no gradients were compared"
        return "optimizer", "the gradients agree, as the optimizer got them"
    return _CAUSES[key.kind], "it is the first record of the step"


def _cause_of_gradient(
    key: Key, keys: list[Key], tensors: tuple[dict[Key, Whole], dict[Key, Whole]], runs: tuple[Run, Run]
) -> tuple[str, str]:
    local = [other for other in keys if other.kind == "local_gradient" and other.name == key.name]
    if local:
        return "collective", (
            "the gradients of each rank agree before the reduction, and what the optimizer gets does not: the "
            "reduction, or what changes gradients after it, such as clipping"
        )
    if runs[0].world_size == runs[1].world_size == 1:
        if not any(other.kind == "activation" for other in keys):
            return "forward or backward", "the data and weights agree as far as compared; no activations were compared"
        return "backward", "there is one rank, and what is recorded of the forward agrees"
    return "backward or collective", "no gradients from before the reduction could be compared"

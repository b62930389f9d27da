"""Where two runs part: the first step, the first tensor in it, the blocks of that, and what may be the cause."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

from . import replays
from .pairs import Compared, Progress, common_steps, compare_steps, what_differs
from .runs import Key, Run, Whole
from .words import words_per_element

_NOT_FACTS = ("rank", "host", "folder", "command", "replay", "block", "format", "fingerprint")
# What decides the bits of a call, as recorded since dash_attn 0.2.0.
CODE = ("bits version", "library sources", "Python sources")


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first tensor, in the order of execution, in which two runs differ.

    Attributes:
        step: the number of the step.
        key: the tensor; `kind`, `name`, `time`, and its `rank` if it belongs to one.
        what: what differs, in words.
        cause: data, weights, buffers, forward, backward, collective, optimizer, or some of them.
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
        facts: what the runs say of themselves and differs, by its name; None where a run does not say it. Among them
            are those of `CODE`, by which code of different bits is told.
    """

    steps: list[int]
    compared: int
    first: Difference | None
    not_compared: dict[str, str]
    facts: dict[str, tuple[str | None, str | None]]


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str], *, progress: Progress | None = None) -> Comparison:
    """Compares the receipts of two runs, which may be cut over other numbers of ranks.

    Args:
        a, b: folders that Recorders have written.
        progress: called after each step with the number of steps that are done, and of all.

    Raises:
        ValueError: a folder has no receipts, or not of all ranks; a file cannot be read; the runs have blocks of other
            sizes; they have no step, or no tensor, that can be compared.
        OSError: a file cannot be read.
    """
    with open_runs(a, b) as runs:
        return _compare(*runs, progress)


@contextlib.contextmanager
def open_runs(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Iterator[tuple[Run, Run]]:
    """Both runs; the errors are those of `compare`."""
    with contextlib.closing(Run(a)) as one, contextlib.closing(Run(b)) as other:
        if one.block != other.block:
            raise ValueError(f"both runs must have blocks of one size, got {one.block} and {other.block} words")
        if not common_steps(one, other):
            raise ValueError(
                f"the runs must have a recorded step in common, got {one.steps[:5]}... and {other.steps[:5]}..."
            )
        yield one, other


def _compare(a: Run, b: Run, progress: Progress | None) -> Comparison:
    facts = {
        name.removeprefix("fact "): (a.meta.get(name), b.meta.get(name))
        for name in sorted(a.meta.keys() | b.meta.keys())
        if name not in _NOT_FACTS and a.meta.get(name) != b.meta.get(name)
    }
    not_compared = _steps_not_compared(a, b)
    counts: dict[str, int] = {}
    steps, compared, before = [], 0, None
    for found in compare_steps(a, b, progress):
        for why, count in found.left_out.items():
            counts[why] = counts.get(why, 0) + count
            not_compared[why] = f"{counts[why]} records"
        steps.append(found.step)
        compared += len(found.keys)
        if found.differing:
            return Comparison(steps, compared, _difference((a, b), found, before), not_compared, facts)
        before = found.step
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


def _difference(runs: tuple[Run, Run], found: Compared, before: int | None) -> Difference:
    step, keys = found.step, found.keys
    key = next(key for key in keys if key in found.differing)
    place = keys.index(key)
    tensors = runs[0].tensors(found.rows[0]), runs[1].tensors(found.rows[1])
    whole, block = tensors[0][key], runs[0].block
    what = what_differs(whole, tensors[1][key]) or "the bits"
    cause, reason = _cause(key, keys, tensors, runs, before)
    counts: dict[str, tuple[int, int]] = {}
    for other in keys:
        differ, of = counts.get(other.kind, (0, 0))
        counts[other.kind] = differ + (other in found.differing), of + 1
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
        step, key, what, cause, reason, keys[place - 1] if place else None, blocks, -(-words // block),
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
    one, other = (run.blocks(step).get(key) for run in runs)
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
    tensors: tuple[dict[Key, Whole], dict[Key, Whole]],
    runs: tuple[Run, Run],
    before: int | None,
) -> tuple[str, str]:
    kinds = {other.kind for other in keys}
    if key.kind in ("weights", "buffers"):
        if before is None:
            return key.kind, f"the first step that both have recorded begins with other {key.kind}: another start"
        by = "the optimizer's step" if key.kind == "weights" else "a step"
        return key.kind, (
            f"step {before} agrees to its end, and this one begins with other {key.kind}: they were changed outside of "
            f"{by}, or in memory"
        )
    if key.kind == "gradient":
        return _cause_of_gradient(key, keys, tensors, runs)
    if key.kind in ("activation", "updated_buffers"):
        missing = [kind for kind in ("data", "weights") if kind not in kinds]
        if missing:
            return (
                f"{' or '.join(missing)} or forward",
                f"what came before agrees; {' and '.join(missing)} not compared",
            )
        if key.kind == "updated_buffers":
            return "forward", "all that is recorded before the end of the step agrees; or they were changed in memory"
        return "forward", "the data and the weights of this step agree"
    if key.kind in ("activation_gradient", "local_gradient"):
        if "activation" not in kinds:
            return "forward or backward", "the data and weights agree as far as compared; no activations were compared"
        return "backward", "what is recorded of the forward agrees"
    if key.kind in ("state", "updated_weights"):
        if "gradient" not in kinds:
            return "backward or optimizer", "no gradients were compared"
        return "optimizer", "the gradients agree, as the optimizer got them"
    return "data", "it is the first record of the step"


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

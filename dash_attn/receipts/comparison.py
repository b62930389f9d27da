"""Finds the first difference between two runs: its step, its tensor, the blocks that differ, and the likely cause."""

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
        key: the tensor's `kind`, `name`, `time`, and its `rank` if the tensor belongs to one rank.
        what: a description of what differs.
        cause: one or several of data, weights, buffers, forward, backward, collective, and optimizer.
        reason: a sentence that explains the cause.
        after: the last record before the difference, which agrees.
        blocks: the numbers of the blocks that differ; None if the runs did not keep the block sums of this step.
        block_count: the number of blocks of the tensor.
        elements: the first element of the first differing block and one past its last, in row-major order.
        shape: the shape of the whole tensor.
        ranks: the ranks whose parts or copies differ, as far as the receipts show.
        differing: for each kind, how many tensors of this step differ and how many were compared.
        replay: commands that replay the step in run a and in run b and write the elements of the block to files.
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
    """The result of `compare`.

    Attributes:
        steps: the numbers of the steps that were compared, up to the first step that differs.
        compared: the number of tensors that were compared, over all steps.
        first: the first difference; None if everything that was compared agrees. The runs agree if `not_compared` is
            empty as well.
        not_compared: for each reason, the number of records or the steps that were not compared, as text.
        facts: for each fact in which the runs differ, its values in run a and in run b; None if a run does not state
            the fact. The facts in `CODE` show whether the runs used code with different bits.
    """

    steps: list[int]
    compared: int
    first: Difference | None
    not_compared: dict[str, str]
    facts: dict[str, tuple[str | None, str | None]]


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str], *, progress: Progress | None = None) -> Comparison:
    """Compares the receipts of two runs. The runs may have different numbers of ranks.

    Args:
        a: the folder that the Recorder of run a wrote.
        b: the folder that the Recorder of run b wrote.
        progress: a function that is called after each step with the number of finished steps and the total.

    Returns:
        The first difference, and everything that could not be compared.

    Raises:
        ValueError: a folder lacks the receipts of some or all ranks, a file is damaged, the runs have different block
            sizes, or the runs have no step or no comparable tensor in common.
        OSError: a file cannot be read.
    """
    with open_runs(a, b) as runs:
        return _compare(*runs, progress)


@contextlib.contextmanager
def open_runs(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Iterator[tuple[Run, Run]]:
    """Opens both runs. Raises the errors of `compare`."""
    with contextlib.closing(Run(a)) as one, contextlib.closing(Run(b)) as other:
        if one.block != other.block:
            raise ValueError(f"both runs must have the same block size, got {one.block} and {other.block} words")
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
        raise ValueError(f"the runs must have a comparable tensor in common, got none: {not_compared}")
    return Comparison(steps, compared, None, not_compared, facts)


def _steps_not_compared(a: Run, b: Run) -> dict[str, str]:
    found = {}
    for name, run, other in (("a", a, b), ("b", b, a)):
        if alone := sorted(set(run.steps) - set(other.steps)):
            found[f"recorded only in run {name}"] = f"steps {_spans(alone)}"
        if run.unfinished:
            found[f"not recorded to the end in run {name}"] = f"steps {_spans(run.unfinished)}"
    return found


def _spans(steps: list[int]) -> str:
    """Formats steps as in "0, 2 to 5, 9", with at most eight spans."""
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
            return key.kind, f"the {key.kind} already differ at the start of the first step that both runs recorded"
        by = "the optimizer's step" if key.kind == "weights" else "a step"
        return key.kind, (
            f"step {before} agrees to its end, but the {key.kind} differ at the start of this step: something outside "
            f"of {by} changed them, or a memory fault did"
        )
    if key.kind == "gradient":
        return _cause_of_gradient(key, keys, tensors, runs)
    if key.kind in ("activation", "updated_buffers"):
        missing = [kind for kind in ("data", "weights") if kind not in kinds]
        if missing:
            return (
                f"{' or '.join(missing)} or forward",
                f"everything before it agrees, but {' and '.join(missing)} could not be compared",
            )
        if key.kind == "updated_buffers":
            return "forward", "all earlier records of the step agree; a memory fault is also possible"
        return "forward", "the data and the weights of this step agree"
    if key.kind in ("activation_gradient", "local_gradient"):
        if "activation" not in kinds:
            return "forward or backward", "the compared data and weights agree, but no activations were compared"
        return "backward", "the recorded part of the forward agrees"
    if key.kind in ("state", "updated_weights"):
        if "gradient" not in kinds:
            return "backward or optimizer", "no gradients were compared"
        return "optimizer", "the gradients that the optimizer received agree"
    return "data", "this is the first record of the step"


def _cause_of_gradient(
    key: Key, keys: list[Key], tensors: tuple[dict[Key, Whole], dict[Key, Whole]], runs: tuple[Run, Run]
) -> tuple[str, str]:
    local = [other for other in keys if other.kind == "local_gradient" and other.name == key.name]
    if local:
        return "collective", (
            "the gradients of each rank agree before the reduction, but those that the optimizer received do not: the "
            "cause is the reduction, or something that changes gradients after it, such as clipping"
        )
    if runs[0].world_size == runs[1].world_size == 1:
        if not any(other.kind == "activation" for other in keys):
            return "forward or backward", "the compared data and weights agree, but no activations were compared"
        return "backward", "the run has one rank, and the recorded part of the forward agrees"
    return "backward or collective", "the gradients from before the reduction could not be compared"

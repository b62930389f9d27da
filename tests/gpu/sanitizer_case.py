"""Small shapes for compute-sanitizer: both passes, every policy, every kind of mask, every row of the tile table, who
makes dQ of a sum, ragged and unequal lengths, packs with gaps and sequences of nothing, masks by key columns, scores
with softcap, slopes and sinks, dropout with the generator of its bits.

    compute-sanitizer --tool memcheck python tests/gpu/sanitizer_case.py

Inputs and reference are computed on the CPU, so that the only kernels under the tool are ours.
"""

import argparse
import dataclasses
import pathlib
import sys

import torch

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]

import gpu_support as support
import pack_checks
from float64_reference import Attention, Dropout, Scores, attention_float64, relative_error
from gpu_support import Problem
from pack_checks import Pool, Rows

KINDS = ("dense", "tiles", "short", "sums", "windows", "packs", "columns", "scores", "dropout")
HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
WHOLE = HEAD_DIMS[0], HEAD_DIMS[2]  # at which every problem is tried
# The last one's query heads are split over work tiles.
SHAPES = ((200, 330, 4, 2), (330, 200, 2, 2), (1, 65, 2, 1), (130, 65, 128, 1))
WINDOWS = (
    dict(causal=False, window=(64, 64)),
    dict(causal=True, window=(127, -1)),
    dict(causal=False, window=(10, -1)),
    dict(causal=True, attention_chunk=100),
)
WINDOWED_SHAPES = ((200, 330, 4, 2), (330, 200, 2, 2))
PACK_MASKS = (dict(causal=False), dict(causal=True), WINDOWS[0])
# Every form of a mask by key columns, for all heads together and for each KV head.
COLUMNS = (
    dict(causal=True, column_bounds=1),
    dict(causal=True, column_bounds=2, column_heads=True),
    dict(causal=False, column_bounds=2, column_heads=True),
    dict(causal=False, column_bounds=4, window=(100, 64)),
)
PACK_COLUMNS = (dict(COLUMNS[0], column_heads=True), dict(causal=False, column_bounds=4))
ALL_OF_SINKS = dict(sinks=True, lse_gradient=True)
SCORES = (
    dict(causal=True, softcap=20.0),
    dict(causal=False, softcap=20.0, **ALL_OF_SINKS),
    dict(causal=True, alibi="sequences", **ALL_OF_SINKS),
    dict(WINDOWS[1], softcap=20.0, **ALL_OF_SINKS),
    dict(WINDOWS[0], alibi="heads"),
)
PACK_SCORES = (SCORES[1], SCORES[2], dict(WINDOWS[1], **ALL_OF_SINKS))
DROPPED = dict(dropout_p=0.1)
DROPOUT = (
    dict(causal=False, **DROPPED),
    dict(causal=True, **ALL_OF_SINKS, **DROPPED),
    dict(WINDOWS[0], **DROPPED),
)
# Queries and keys of each sequence; the rows where they start, and where the last one ends; rows in all.
PACK = ((70, 65), (0, 0), (129, 130), (1, 0), (0, 40), (65, 200))
PACK_ROWS_Q = Rows(300, (2, 72, 72, 210, 211, 220, 290), tuple(q for q, _ in PACK))
PACK_ROWS_K = Rows(470, (0, 65, 70, 200, 200, 240, 440), tuple(k for _, k in PACK))
# racecheck follows the arrival of every thread at a barrier, and not that of a lane for its warp. So it takes for races
# what such arrivals alone put in order: one work tile of a CTA after the other, and a sum of dQ that comes to where
# consumers have staged partials, as with `shift` however few the work tiles are (docs/design_decisions.md).
NOT_FOR_RACECHECK = ("sums", "shift")  # a kind of case, and a policy
# Far above the rounding of bf16, far below a wrong tile.
TOLERANCE = 0.02


class Case:
    """A call of either pass: what it is, its arguments on the GPU, and what it should give."""

    def __init__(
        self,
        what: str,
        problem: Problem,
        tensors: tuple[torch.Tensor, ...],
        scores: Scores,
        columns: torch.Tensor | None,
        exact: Attention,
        **lengths: torch.Tensor,
    ):
        """`tensors`: q, k, v and dout."""
        self.what, self.problem, self.exact = what, problem, exact
        self.q, self.k, self.v, self.dout = (x.cuda() for x in tensors)
        given = dict(lengths, sinks=scores.sinks, alibi_slopes=scores.alibi_slopes, startend_row_indices=columns)
        self.arguments = dict(problem.op_arguments, **{name: x.cuda() for name, x in given.items() if x is not None})
        if scores.dropout is not None:
            self.arguments |= self.dropout_arguments(scores.dropout)
        self.dsoftmax_lse = None if scores.dsoftmax_lse is None else scores.dsoftmax_lse.cuda()

    def dropout_arguments(self, dropout: Dropout) -> dict[str, object]:
        """Of a pack its bits; of a batch the state, so that the generator runs in both passes."""
        if self.arguments["cu_seqlens_q"] is None:
            dropout = dropout._replace(bits=None)
        return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in dropout.arguments().items()}

    @classmethod
    def dense(cls, problem: Problem) -> "Case":
        tensors, scores = support.random_qkv_dout(problem, "cpu"), support.random_scores(problem, "cpu")
        columns = support.random_columns(problem, "cpu")
        exact = exact_of(problem, *tensors, scores, columns)
        return cls(str(problem), problem, tensors, scores, columns, exact)

    @classmethod
    def pack(cls, problem: Problem) -> "Case":
        pool = Pool(problem, "cpu")
        pack = pack_checks.make_pack([pool.get(*lengths) for lengths in PACK], PACK_ROWS_Q, PACK_ROWS_K)
        outputs = []
        for own in pack.sequences:
            tensors = (x[None] for x in (own.q, own.k, own.v, own.dout))
            outputs.append(exact_of(own.problem, *tensors, own.scores, own.columns))
        joined = {}
        for name in ("out", *support.GRADIENTS):
            parts = [getattr(x, name)[0] for x in outputs]
            rows = pack.rows_k if name in ("dk", "dv") else pack.rows_q
            joined[name] = rows.join(parts, parts[0].new_zeros((max(rows.outside()), *parts[0].shape[1:])))
        # Outside the sequences the backward must not read it.
        lse = [x.softmax_lse[0] for x in outputs]
        around = torch.full((problem.heads, max(pack.rows_q.outside())), float("nan"))
        dsinks = sum(x.dsinks for x in outputs) if problem.sinks else None
        gradients = (joined[x] for x in support.GRADIENTS)
        exact = Attention(joined["out"], pack.rows_q.join(lse, around, dim=1), *gradients, dsinks)
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
        lengths = {name: getattr(pack, name) for name in names}
        tensors = pack.q, pack.k, pack.v, pack.dout
        return cls(str(pack), problem, tensors, pack.scores, pack.columns, exact, **lengths)

    def forward(self, sm_margin: int = 0) -> dict[str, torch.Tensor]:
        out, _ = torch.ops.dash_attn.forward(self.q, self.k, self.v, **self.arguments, sm_margin=sm_margin)
        return {"out": out}

    def backward(self, policy: str) -> dict[str, torch.Tensor]:
        out, softmax_lse = self.exact.out.to(self.q.dtype).cuda(), self.exact.softmax_lse.float().cuda()
        like = zip(support.GRADIENTS, (self.q, self.k, self.v))
        gradients = {name: torch.empty(x.shape, dtype=x.dtype).cuda() for name, x in like}
        dsinks = torch.empty(self.problem.heads).cuda() if self.problem.sinks else None
        torch.ops.dash_attn.backward(
            self.dout, self.q, self.k, self.v, out, softmax_lse, *gradients.values(),
            **self.arguments, schedule=policy, sm_margin=0, dsoftmax_lse=self.dsoftmax_lse, dsinks=dsinks,
        )  # fmt: skip
        return gradients if dsinks is None else gradients | {"dsinks": dsinks}

    def errors(self, outputs: dict[str, torch.Tensor]) -> dict[str, float]:
        return {name: relative_error(x.cpu(), getattr(self.exact, name)) for name, x in outputs.items()}


def exact_of(problem: Problem, q, k, v, dout, scores: Scores, columns: torch.Tensor | None) -> Attention:
    hidden = None if columns is None else support.hidden_by_columns(problem, columns)
    return attention_float64(q, k, v, dout, softmax_scale=problem.scale, scores=scores, hidden=hidden, **problem.mask)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A call to make."""

    kind: str
    problem: Problem
    is_pack: bool = False
    forward_alone: bool = False

    def case(self) -> Case:
        return Case.pack(self.problem) if self.is_pack else Case.dense(self.problem)


def planned(head_dims: tuple[int, int], sms: int, shapes: int = len(SHAPES)) -> list[Planned]:
    """Every problem at these head dims, on a GPU of so many SMs."""

    def problem_of(*shape: int, **options) -> Problem:
        return Problem(1, *shape, head_dims[0], value_head_dim=head_dims[1], **dict(dict(causal=False), **options))

    dense = [problem_of(*shape, causal=causal) for causal in (False, True) for shape in SHAPES[:shapes]]
    heads = sms // 3 + 4
    # Two KV tiles a head: all of them have an SM, and not all parts of those that are divided.
    dense.append(problem_of(70, 130, heads, heads))
    # Of the forward: more query tiles than SMs.
    tiles = [problem_of(400, 150, heads, heads, causal=causal) for causal in (False, True)]
    # Short query tiles: of the first rows of threads, of rows of several heads, and of one head's.
    shapes_of_short = ((1, 2100, 16, 2), (20, 2100, 8, 2), (70, 2100, 2, 2))
    short = [problem_of(*shape, causal=causal) for shape, causal in zip(shapes_of_short, (True, False, True))]
    # Of the backward: so many work tiles that the main kernel makes dQ of its sums.
    sums = [dataclasses.replace(problem_of(70, 130, 8, 8, causal=causal), batch=64) for causal in (False, True)]
    sums.append(dataclasses.replace(sums[0], causal=True, column_bounds=1))
    windows = [problem_of(*shape, **mask) for shape in WINDOWED_SHAPES[:shapes] for mask in WINDOWS]
    packs = [problem_of(0, 0, 4, 2, **mask) for mask in PACK_MASKS]
    columns = [problem_of(*WINDOWED_SHAPES[i % 2], **mask) for i, mask in enumerate(COLUMNS)]
    packs_of_columns = [problem_of(0, 0, 4, 2, **mask) for mask in PACK_COLUMNS]
    scores = [problem_of(*WINDOWED_SHAPES[0], **of_scores) for of_scores in SCORES]
    dropped = [problem_of(*WINDOWED_SHAPES[0], **of_dropout) for of_dropout in DROPOUT]
    packs_of_dropout = [problem_of(0, 0, 4, 2, **of_dropout) for of_dropout in DROPOUT]
    packs_of_scores = [problem_of(0, 0, 4, 2, **of_scores) for of_scores in PACK_SCORES]
    return [
        *(Planned("dense", problem) for problem in dense),
        *(Planned("tiles", problem, forward_alone=True) for problem in tiles),
        *(Planned("short", problem, forward_alone=True) for problem in short),
        *(Planned("sums", problem) for problem in sums),
        *(Planned("windows", problem) for problem in windows),
        *(Planned("packs", problem, is_pack=True) for problem in packs),
        *(Planned("columns", problem) for problem in columns),
        *(Planned("columns", problem, is_pack=True) for problem in packs_of_columns),
        *(Planned("scores", problem) for problem in scores),
        *(Planned("scores", problem, is_pack=True) for problem in packs_of_scores),
        *(Planned("dropout", problem) for problem in dropped),
        *(Planned("dropout", problem, is_pack=True) for problem in packs_of_dropout),
    ]


def selected(dims: list[tuple[int, int]], kinds: list[str], sms: int, shapes: int, everything: bool) -> list[Planned]:
    """At 64 and 128, or with `everything`, all problems of the kinds; at other head dims every third of each kind,
    others from row to row, so that all of them take little longer than two rows."""
    found = []
    for number, head_dims in enumerate(dims):
        every = 1 if everything or head_dims in WHOLE else 3
        for kind in kinds:
            of_kind = [one for one in planned(head_dims, sms, shapes) if one.kind == kind]
            found += of_kind[number % min(every, len(of_kind)) :: every]
    return found


def head_dims_of(text: str) -> tuple[int, int]:
    """ "128", or "192x128" of q and k x of v."""
    qk, _, of_values = text.partition("x")
    return int(qk), int(of_values or qk)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=head_dims_of, nargs="+", default=HEAD_DIMS, help="as 128 or 192x128")
    parser.add_argument("--everything", action="store_true", help="every problem, not only at 64 and 128")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help=f"how many of {SHAPES} (lengths, heads)")
    parser.add_argument("--passes", nargs="+", choices=("forward", "backward"), default=["forward", "backward"])
    parser.add_argument("--cases", nargs="+", choices=KINDS, default=KINDS, help="tiles: more than SMs")
    parser.add_argument("--racecheck", action="store_true", help="leave out what that tool takes for races")
    parser.add_argument("--share", default="0/1", help="i/n: only the ith of n shares of the problems")
    arguments = parser.parse_args()
    share, shares = map(int, arguments.share.split("/"))
    failures = 0

    def report(what: str, errors: dict[str, float]) -> None:
        nonlocal failures
        wrong = any(not error < TOLERANCE for error in errors.values())
        failures += wrong
        row = " ".join(f"{name} {error:.1e}" for name, error in errors.items())
        print(f"{'WRONG' if wrong else 'ok   '} {what}: {row}", flush=True)

    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    left_out = NOT_FOR_RACECHECK if arguments.racecheck else ()
    cases = [kind for kind in arguments.cases if kind not in left_out]
    chosen = selected(arguments.head_dims, cases, sms, arguments.shapes, arguments.everything)
    for one in chosen[share::shares]:
        passes = [name for name in arguments.passes if name == "forward" or not one.forward_alone]
        if not passes:
            continue
        case = one.case()
        if "forward" in passes:
            report(f"{case.what} forward", case.errors(case.forward()))
            # Two SMs have query tiles of as many rows as there are.
            report(f"{case.what} forward on two SMs", case.errors(case.forward(sms - 2)))
        for policy in support.policies(case.problem) if "backward" in passes else ():
            if policy in left_out:
                continue
            report(f"{case.what} {policy}", case.errors(case.backward(policy)))
    print(f"{failures} wrong", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

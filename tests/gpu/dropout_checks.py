"""Dropout of the GPU tests: bits, states and results of both passes through the public functions.

Works on any device, as gpu_support does.
"""

import dataclasses
from collections.abc import Callable

import gpu_support as support
import torch
from float64_reference import Scores
from gpu_support import Inputs, Problem
from pack_checks import poisoned_allocations

import dash_attn
from dash_attn.dropout import DropoutBits, DropoutState, dropout_bits

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
OWN_MASKS = (64, 128)  # head dims at which the full and the causal mask have kernels of their own with dropout
MASKS = {
    "full": dict(causal=False),
    "causal": dict(causal=True),
    "left": dict(causal=True, window=(70, -1)),
    "both": dict(causal=False, window=(64, 33)),
    "chunk": dict(causal=True, attention_chunk=100),
}


def problem_of(head_dims: tuple[int, int], shape: tuple[int, ...], dropout_p: float = 0.1, **options) -> Problem:
    """`shape`: batch, queries, keys, query heads, KV heads."""
    return Problem(*shape, head_dims[0], value_head_dim=head_dims[1], dropout_p=dropout_p, **options)


def check_replays(
    graph: torch.cuda.CUDAGraph,
    results: dict[str, torch.Tensor],
    eager: Callable[[], dict[str, torch.Tensor]],
    label: str,
) -> None:
    """Each replay of a graph that leaves `results` drops other elements, and follows torch's seed as `eager` does."""

    def replay() -> dict[str, torch.Tensor]:
        graph.replay()
        return {name: x.clone() for name, x in results.items()}

    torch.manual_seed(4)
    first, second = replay(), replay()
    assert all(not torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(4)
    support.assert_same_bits(replay(), first, f"{label}, a replay under the same seed")
    support.assert_same_bits(replay(), second, f"{label}, the next one")
    # Both passes drop the same: an eager call under that seed has these bits.
    torch.manual_seed(4)
    support.assert_same_bits(eager(), first, f"{label}, eager")


def single(problem: Problem, query: int, key: int) -> torch.Tensor:
    """bool, in whole blocks: of that element alone."""
    blocks = [-(-length // 32) for length in (problem.seqlen_q, problem.seqlen_k)]
    found = torch.zeros(32 * blocks[0], 32 * blocks[1], dtype=torch.bool)
    found[query, key] = True
    return found


def with_bits(inputs: Inputs, bits: torch.Tensor | None, p: float | None = None) -> Scores:
    """The scores of `inputs` with other bits, or with the state alone."""
    dropout = inputs.scores.dropout
    return inputs.scores._replace(dropout=dropout._replace(bits=bits, p=dropout.p if p is None else p))


def with_scores(problem: Problem, inputs: Inputs, scores: Scores) -> Inputs:
    return support.with_forward(problem, inputs.q, inputs.k, inputs.v, inputs.dout, scores)


def results(problem: Problem, inputs: Inputs, policy: str, sm_margin: int = 0) -> dict[str, torch.Tensor]:
    """Of the ops: the output, the log-sum-exp and the gradients. Memory that is not written is NaN."""
    with poisoned_allocations():
        out, softmax_lse = support.forward(problem, inputs.q, inputs.k, inputs.v, sm_margin, inputs.scores)
        inputs = dataclasses.replace(inputs, out=out, softmax_lse=softmax_lse)
        return {"out": out, "softmax_lse": softmax_lse, **support.backward(inputs, problem, policy, sm_margin)}


def without_dropout(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
    """The same without dropout, under a mask of the same kind as the kernel that drops: where it has none of the full
    or the causal mask, that is a window without bounds."""
    plain = dataclasses.replace(problem, dropout_p=0.0)
    if problem.head_dim not in OWN_MASKS and problem.mask_kind != "window":
        right = 0 if problem.causal else problem.seqlen_q + problem.seqlen_k
        plain = dataclasses.replace(plain, causal=False, window=(problem.seqlen_q + problem.seqlen_k, right))
    scores = inputs.scores._replace(dropout=None)
    return plain, with_scores(plain, inputs, scores)


def bits_for(problem: Problem, state: DropoutState, **options) -> DropoutBits:
    sizes = dict(batch=problem.batch, heads=problem.heads, seqlen_q=problem.seqlen_q, seqlen_k=problem.seqlen_k)
    return dropout_bits(state, p=problem.dropout_p, **{**sizes, **options})


def public(problem: Problem, inputs: Inputs, policy: str = "auto", **options) -> dict[str, torch.Tensor]:
    """Of flash_attn_func and autograd. `options`: dropout_bits, if anything."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    arguments = dict(causal=problem.causal, window_size=problem.window, attention_chunk=problem.attention_chunk)
    out = dash_attn.flash_attn_func(*leaves, dropout_p=problem.dropout_p, schedule=policy, **arguments, **options)
    found = torch.autograd.grad(out, leaves, inputs.dout)
    return dict(zip(("out", *support.GRADIENTS), (out.detach(), *found)))

"""Computes the gradients of a GRPO step twice: with each prompt once per answer, and with each prompt once.

    python examples/shared_prompts.py

GRPO (arXiv 2402.03300) samples several answers to each prompt. The advantage of an answer is its reward, less the mean
reward of the prompt's answers, divided by their standard deviation. The step is the first one after sampling, so all
ratios of probabilities are 1 and nothing is clipped. Tokens and rewards are random, and the model is a small Llama.

Without sharing, a packed batch has one sequence for each answer: the prompt and the answer. With sharing, it has one
sequence for each prompt: the prompt and all of its answers, under a mask by key columns that hides the answers from
each other (docs/masks.md). The example prints the number of tokens of both, compares their gradients, compares the bits
of two runs with sharing, and on a GPU measures the times of both.

The gradients may differ by roundings only. The error of the bf16 gradients without sharing is their distance from the
gradients in fp32 with PyTorch's attention. If the gradients with sharing are as accurate, the two differ by at most
twice this error, which is the bar for each parameter. The exit status is 0 if all differences are within the bar and
all bits of the two runs are equal.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from training import ordered
from training.attention import Attend
from training.clock import Clock
from training.layout import Layout
from training.model import Llama, Shape, rotary_angles
from training.text import VOCABULARY

from dash_attn import flash_attn_varlen_func
from dash_attn.masks import prefix_tree_mask

# The largest difference between two gradients of equal error, by the triangle inequality, in units of that error.
BAR = 2


@dataclasses.dataclass(frozen=True)
class Group:
    """A prompt and answers to it. An answer's part of the loss is -weight times its mean log-probability."""

    prompt: Tensor
    answers: list[Tensor]
    weights: list[float]

    def separated(self) -> list[Group]:
        return [Group(self.prompt, [answer], [weight]) for answer, weight in zip(self.answers, self.weights)]


@dataclasses.dataclass(frozen=True)
class Pack:
    """A packed batch with one sequence for each group.

    Attributes:
        tokens: int64 (1, rows).
        angles: those of the rows' rotary positions. Every answer begins at the position after the prompt.
        offsets: int32 (groups + 1,), the first row of each sequence, and the end.
        longest: the number of rows of the longest sequence.
        mask: the mask by key columns; None if no group has several answers.
        predicting: int64 (answer tokens,), the row that predicts each token of an answer.
        targets: int64 (answer tokens,), those tokens.
        weights: fp32 (answer tokens,), the factors of their negative log-probabilities in the loss.
    """

    tokens: Tensor
    angles: tuple[Tensor, Tensor]
    offsets: Tensor
    longest: int
    mask: Tensor | None
    predicting: Tensor
    targets: Tensor
    weights: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = (self.offsets, self.offsets, self.longest, self.longest)
        return flash_attn_varlen_func(q[0], k[0], v[0], *lengths, causal=True, startend_row_indices=self.mask)[None]


def sampled(prompts: int, prompt: int, answers: int, answer: int) -> list[Group]:
    """Returns random groups: `prompts` prompts of `prompt` tokens, and answers of answer / 2 to `answer` tokens."""
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> Tensor:
        return torch.randint(VOCABULARY, (length,), generator=generator)

    groups = []
    for _ in range(prompts):
        rewards = torch.rand(answers, generator=generator)
        advantages = (rewards - rewards.mean()) / rewards.std()
        lengths = torch.randint((answer + 1) // 2, answer + 1, (answers,), generator=generator)
        weights = (advantages / (prompts * answers)).tolist()
        groups.append(Group(tokens(prompt), [tokens(length) for length in lengths.tolist()], weights))
    return groups


def pack_of(groups: list[Group], head_dim: int, device: torch.device) -> Pack:
    tokens, positions, offsets, masks, predicting, weights = [], [], [0], [], [], []
    for group in groups:
        end = len(group.prompt)
        last_of_prompt = offsets[-1] + end - 1
        positions.append(torch.arange(end))
        for answer, weight in zip(group.answers, group.weights):
            rows = torch.arange(len(answer))
            positions.append(len(group.prompt) + rows)
            # The last token of the prompt predicts the first token of every answer.
            predicting.append(torch.where(rows == 0, last_of_prompt, offsets[-1] + end - 1 + rows))
            weights.append(torch.full((len(answer),), weight / len(answer)))
            end += len(answer)
        tokens += [group.prompt, *group.answers]
        offsets.append(offsets[-1] + end)
        parents, lengths = [-1] + [0] * len(group.answers), [len(group.prompt), *map(len, group.answers)]
        masks.append(prefix_tree_mask(parents, lengths)[0])
    shares = any(len(group.answers) > 1 for group in groups)
    return Pack(
        tokens=torch.cat(tokens)[None].to(device),
        angles=tuple(x.to(device) for x in rotary_angles(torch.cat(positions), head_dim)),
        offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        longest=max(end - start for start, end in zip(offsets, offsets[1:])),
        mask=torch.cat(masks, dim=1).to(device) if shares else None,
        predicting=torch.cat(predicting).to(device),
        targets=torch.cat([answer for group in groups for answer in group.answers]).to(device),
        weights=torch.cat(weights).to(device),
    )


def backward(model: Llama, pack: Pack, attend: Attend) -> None:
    """Adds the gradients of the loss of a pack to those of the model."""
    for layer in model.layers:
        layer.attention.attend = attend
    hidden = model.hidden(pack.tokens, pack.angles)[0]
    logits = model.head(hidden[pack.predicting]).float()
    loss = (pack.weights * cross_entropy(logits, pack.targets, reduction="none")).sum()
    loss.backward()


def gradients(model: Llama, pack: Pack) -> dict[str, Tensor]:
    model.zero_grad()
    backward(model, pack, pack.attend)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def model_of(shape: Shape, clock: Clock, device: torch.device) -> Llama:
    """Returns a model in bf16, which has the same weights every time."""
    # Positions come with the packs, and not from the layout.
    model = Llama(shape, plain_attention, clock, Layout(0, 1, 1, 1, 1), seed=0)
    return model.to(device, torch.bfloat16)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def gradients_in_fp32(model: Llama, packs: list[Pack]) -> dict[str, Tensor]:
    """Returns the gradients of the sum of the packs' losses with PyTorch's attention.

    Args:
        model: a model in fp32.
        packs: packs of one answer each.
    """
    model.zero_grad()
    for pack in packs:
        # The scores of all layers would take too much memory.
        backward(model, pack, lambda q, k, v: checkpoint(plain_attention, q, k, v, use_reentrant=False))
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def distances(found: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Returns the Euclidean norm of the difference for each parameter."""
    return {name: float((found[name].float() - other[name].float()).norm()) for name in found}


def report_differences(shared: dict[str, Tensor], without: dict[str, Tensor], exact: dict[str, Tensor]) -> bool:
    """Prints the largest differences between the gradients, and returns whether all are within the bar."""
    difference, error = distances(shared, without), distances(without, exact)
    relative = {name: difference[name] / float(exact[name].norm()) for name in exact}
    of_error = {name: difference[name] / error[name] for name in exact}
    worst, worst_of_error = (max(x, key=x.__getitem__) for x in (relative, of_error))
    is_close = all(difference[name] <= BAR * error[name] for name in exact)  # False for NaN
    print(f"largest relative difference of the gradients: {relative[worst]:.2e} ({worst})")
    print(
        f"largest difference beside the error without sharing: {of_error[worst_of_error]:.2f} ({worst_of_error}), "
        f"{'within' if is_close else 'NOT within'} the bar of {BAR}"
    )
    return is_close


def report_times(clock: Clock, model: Llama, packs: dict[str, Pack], rounds: int) -> None:
    """Prints the median times of gradients, forward and backward, measured in turns."""
    for number in range(rounds):
        for i, pack in enumerate(packs.values()):
            with clock.step(number * len(packs) + i):
                gradients(model, pack)
    times = list(clock.finished(wait=True))
    for i, name in enumerate(packs):
        own = times[i :: len(packs)]
        step = statistics.median(1000 * x.seconds for x in own)
        attention = statistics.median(
            sum(map(sum, (x.milliseconds["attention", of_pass] for of_pass in ("forward", "backward")))) for x in own
        )
        print(f"time {name}: {step:.1f} ms, of which attention {attention:.1f} ms")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prompts", type=int, default=2, help="prompts of the batch")
    add("--prompt", type=int, default=4096 if gpu else 40, help="tokens of a prompt")
    add("--answers", type=int, default=8, help="answers to each prompt")
    add(
        "--answer", type=int, default=1024 if gpu else 12, help="tokens of an answer at most, and half of them at least"
    )
    add("--layers", type=int, default=8 if gpu else 2)
    add("--width", type=int, default=1024 if gpu else 64)
    add("--heads", type=int, default=8 if gpu else 4, help="query heads")
    add("--kv-heads", type=int, default=4 if gpu else 2, help="KV heads")
    add("--hidden", type=int, default=2816 if gpu else 128, help="columns of the MLP")
    add("--rounds", type=int, default=5, help="measurements of the time on a GPU")
    arguments = parser.parse_args(argv)
    for name, value in vars(arguments).items():
        # One answer has no standard deviation, and in a sequence of one token queries and keys have no gradients.
        least = 2 if name in ("answers", "prompt") else 1
        if value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    try:
        arguments.shape = Shape(
            arguments.layers, arguments.width, arguments.heads, arguments.kv_heads, arguments.hidden
        )
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    ordered.prepare(True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, clock = arguments.shape, Clock(device, arguments.layers)
    groups = sampled(arguments.prompts, arguments.prompt, arguments.answers, arguments.answer)
    separate = [one for group in groups for one in group.separated()]
    packs = {
        "without sharing": pack_of(separate, shape.head_dim, device),
        "with sharing": pack_of(groups, shape.head_dim, device),
    }
    model = model_of(shape, clock, device)
    print("tokens computed:", ", ".join(f"{pack.tokens.numel():,} {name}" for name, pack in packs.items()))
    with ordered.deterministic_torch(True):
        without, shared, again = (gradients(model, packs[name]) for name in (*packs, "with sharing"))
        single = [pack_of([one], shape.head_dim, device) for one in separate]
        is_close = report_differences(
            shared, without, gradients_in_fp32(model_of(shape, clock, device).float(), single)
        )
        is_equal = all(shared[name].equal(again[name]) for name in shared)
        print(f"bits of two runs with sharing: {'equal' if is_equal else 'NOT EQUAL'}")
        if device.type == "cuda":
            report_times(clock, model, packs, arguments.rounds)
    return 0 if is_close and is_equal else 1


if __name__ == "__main__":
    sys.exit(main())

"""Generates with a paged cache, trains on the result in packs, and compares the log-probabilities of every token.

    python examples/rollout.py [--steps 2] [--folder rollout] [--products one_row]

A small Llama of bytes continues prompts, several times each, with paged decoding, continuous batching and prefix
caching. A step of policy-gradient training then computes the log-probabilities of the same tokens in packed batches.
With dash_attn in both, and linear layers whose rows do not depend on the batch, the ratio of the policies,
exp(new - old), is exactly 1.0 for every token. With torch's attention in training it is not, and receipts show which
tensor of which rows differs first. No GPU is needed. The exit status is 0 if both comparisons come out so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import sys

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from training.attention import make_attention
from training.clock import Clock
from training.generation import PAGE_ROWS, Generator, Rows, Sequence
from training.layout import Layout
from training.model import Llama, Shape, rotary_angles
from training.products import PRODUCTS
from training.text import Text

from dash_attn import flash_attn_varlen_func
from dash_attn.info import why_no_kernels_run
from dash_attn.receipts import Recorder, compare

ATTENTION = ("dash_attn", "sdpa")


@dataclasses.dataclass(frozen=True)
class Sizes:
    shape: Shape
    prompts: int
    """Prompts per step; all begin with the same SYSTEM tokens."""
    samples: int
    """Sequences per prompt."""
    new: int
    """Generated tokens per sequence, more or less."""
    batch: int
    """Sequences that are generated at the same time."""
    pack: int
    """The largest number of rows of a packed batch."""


SIZES = {
    "cpu": Sizes(Shape(layers=2, width=64, heads=4, kv_heads=2, hidden=128), 2, 3, new=12, batch=4, pack=160),
    "cuda": Sizes(Shape(layers=4, width=512, heads=8, kv_heads=2, hidden=1024), 8, 8, new=128, batch=24, pack=4096),
}
SYSTEM = 2 * PAGE_ROWS + 5


class Pack:
    """All tokens but the last of some sequences, one sequence after the other, and the tokens that follow them."""

    def __init__(self, sequences: list[Sequence], device: str) -> None:
        lengths = [len(sequence.tokens) - 1 for sequence in sequences]
        generated = [torch.arange(n) >= sequence.prompt - 1 for n, sequence in zip(lengths, sequences)]
        tokens, following = (
            torch.tensor([token for s in sequences for token in s.tokens[i : len(s.tokens) - 1 + i]]) for i in (0, 1)
        )
        self.offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        self.tokens, self.following = tokens[None].to(device), following.to(device)
        self.positions = torch.cat([torch.arange(n) for n in lengths])
        self.generated = torch.cat(generated).nonzero().flatten().to(device)
        self.cu_seqlens = torch.tensor(self.offsets, dtype=torch.int32, device=device)
        self.longest = max(lengths)


def packs_of(sequences: list[Sequence], rows: int) -> list[list[Sequence]]:
    """Fills packs of at most `rows` rows with the sequences, in reverse order so that their neighbours are others."""
    packs, filled = [], rows
    for sequence in reversed(sequences):
        length = len(sequence.tokens) - 1
        if filled + length > rows:
            packs.append([])
            filled = 0
        packs[-1].append(sequence)
        filled += length
    return packs


def attend(q: Tensor, k: Tensor, v: Tensor, *, pack: Pack, attention: str) -> Tensor:
    """Computes causal attention within each sequence of a pack; the tensors are (1, rows, heads, head_dim)."""
    if attention == "dash_attn":
        cu_seqlens, longest = pack.cu_seqlens, pack.longest
        out = flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens, cu_seqlens, longest, longest, causal=True)
        return out[None]
    of_one = make_attention(attention)
    parts = zip(pack.offsets, pack.offsets[1:])
    return torch.cat([of_one(*(x[:, start:stop] for x in (q, k, v))) for start, stop in parts], dim=1)


def log_probabilities(model: Llama, pack: Pack, attention: str, rows: Rows) -> Tensor:
    """Returns the log-probabilities of a pack's generated tokens, fp32, and stores what attention sees and returns."""
    device = pack.tokens.device
    places = torch.arange(pack.offsets[-1], device=device)[None]

    def recorded(q: Tensor, k: Tensor, v: Tensor, *, layer: int) -> Tensor:
        out = attend(q, k, v, pack=pack, attention=attention)
        for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
            rows.put(f"layers.{layer}.attention.{name}", places, x, of=pack.offsets[-1])
        return out

    for layer in model.layers:
        layer.attention.attend = functools.partial(recorded, layer=layer.layer)
    cos, sin = (x.to(device)[pack.positions] for x in rotary_angles(torch.arange(pack.longest), model.shape.head_dim))
    of_tokens = log_softmax(model.logits(pack.tokens, (cos, sin))[0], dim=-1)
    return of_tokens[pack.generated, pack.following[pack.generated]]


def record(folder: pathlib.Path, model: Llama, packs: list[dict[str, Tensor]]) -> None:
    """Writes receipts of named tensors with a step for each pack, and a block for each row of q and out."""
    with Recorder(folder, kinds="activation", block=model.shape.width) as recorder:
        for number, tensors in enumerate(packs):
            with recorder.step(number):
                for name, x in tensors.items():
                    recorder.tap(x, name)


def prompts(text: Text, sizes: Sizes, step: int) -> list[Sequence]:
    """Returns sequences that hold their prompts: the same beginning, a part for each prompt, `samples` of each."""
    system = text.batch(0, seed=0, sequences=1, seqlen=SYSTEM - 1)[0].tolist()
    parts = text.batch(step, seed=1, sequences=sizes.prompts, seqlen=PAGE_ROWS + 8)
    found = []
    for number in range(sizes.prompts * sizes.samples):
        part = number // sizes.samples
        tokens = system + parts[part, : PAGE_ROWS + 3 * (part % 3)].tolist()
        # Limits differ, so that sequences end one after the other and others take their places.
        limit = len(tokens) + sizes.new + number * 5 % 7
        found.append(Sequence(number, tokens, prompt=len(tokens), limit=limit))
    return found


def advantages(sequences: list[Sequence], samples: int) -> Tensor:
    """Returns each sequence's share of lower-case letters minus the mean over its prompt."""
    shares = torch.tensor(
        [sum(97 <= token < 123 for token in s.tokens[s.prompt :]) / (len(s.tokens) - s.prompt) for s in sequences]
    ).view(-1, samples)
    return (shares - shares.mean(1, keepdim=True)).flatten()


@dataclasses.dataclass(frozen=True)
class Found:
    """What a step found: for each of ATTENTION in training, the ratios of the policies, fp32 (generated tokens,)."""

    ratios: dict[str, Tensor]
    computed: int
    shared: int
    packs: int


def train(
    seed: int,
    model: Llama,
    optimizer: torch.optim.Optimizer,
    sequences: list[Sequence],
    sizes: Sizes,
    folder: pathlib.Path,
) -> Found:
    """Generates, compares both kinds of attention in training with the rollout, and trains with dash_attn."""
    device = model.embedding.weight.device
    pages = sum(-(-sequence.limit // PAGE_ROWS) for sequence in sequences)
    generator = Generator(model, pages, seed=seed, record=True)
    generator(sequences, batch=sizes.batch)
    of_packs = packs_of(sequences, sizes.pack)
    weights = advantages(sequences, sizes.samples)
    ratios: dict[str, list[Tensor]] = {name: [] for name in ATTENTION}
    records: dict[str, list[dict[str, Tensor]]] = {name: [] for name in ("rollout", *ATTENTION)}
    total = sum(len(sequence.log_probabilities) for sequence in sequences)
    for of_pack in of_packs:
        pack = Pack(of_pack, device)
        old = torch.stack([x for sequence in of_pack for x in sequence.log_probabilities])
        records["rollout"].append({**generator.rows(of_pack), "log_probabilities": old})
        of_tokens = torch.cat([weights[s.number].expand(len(s.log_probabilities)) for s in of_pack]).to(device)
        for attention in reversed(ATTENTION):  # dash_attn's ratios are those that train
            rows = Rows()
            with torch.set_grad_enabled(attention == "dash_attn"):
                new = log_probabilities(model, pack, attention, rows)
                ratio = (new - old).exp()
            ratios[attention].append(ratio.detach())
            everything = torch.arange(pack.offsets[-1], device=device)
            records[attention].append({**rows.at(everything), "log_probabilities": new.detach()})
        (-(ratio * of_tokens).sum() / total).backward()
    for name, of_name in records.items():
        record(folder / name, model, of_name)
    optimizer.step()
    optimizer.zero_grad()
    of_attention = {name: torch.cat(parts) for name, parts in ratios.items()}
    return Found(of_attention, generator.computed, generator.shared, len(of_packs))


def is_as_expected(attention: str, ratios: Tensor, folder: pathlib.Path) -> bool:
    """Prints what the ratios and the receipts say about an attention in training."""
    others, furthest = int((ratios != 1).sum()), float((ratios - 1).abs().max())
    print(f"  training with {attention}: {others} ratios differ from 1.0, by up to {furthest:.2g}")
    compared = compare(folder / "rollout", folder / attention)
    first = compared.first
    if first is None:
        print("    receipts: every q, k, v, output and log-probability has the bits of the rollout")
    else:
        print(f"    receipts: pack {first.step} differs first in {len(first.blocks)} rows of {first.key.name}")
        print(f"    receipts: {first.after.name}, recorded before it, has the bits of the rollout")
    return not compared.not_compared and (others == 0) == (first is None) == (attention == "dash_attn")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="steps of training, each with a new rollout")
    parser.add_argument("--folder", type=pathlib.Path, default="rollout", help="for receipts; must not hold any yet")
    parser.add_argument(
        "--products", choices=PRODUCTS, help="how linear layers compute rows (default: megatron on a GPU, else one_row)"
    )
    arguments = parser.parse_args(argv)
    device = "cuda" if why_no_kernels_run() is None else "cpu"
    products = arguments.products or ("megatron" if device == "cuda" else "one_row")
    if products == "megatron" and device == "cpu":
        parser.error("--products must be one_row without a GPU that runs the kernels, got megatron")
    sizes = SIZES[device]
    clock = Clock(torch.device(device), sizes.shape.layers)
    model = Llama(sizes.shape, make_attention("dash_attn"), clock, Layout(0, 1, 1, 1, 1), seed=0)
    model = model.to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text, succeeded = Text(), True
    for step in range(arguments.steps):
        sequences = prompts(text, sizes, step)
        folder = arguments.folder / f"step_{step}"
        with PRODUCTS[products]():
            found = train(step, model, optimizer, sequences, sizes, folder)
        print(
            f"step {step} on {device} with products {products}: {found.ratios['dash_attn'].numel()} tokens generated, "
            f"{found.computed} rows of prompts computed and {found.shared} shared, {found.packs} packs"
        )
        succeeded &= all([is_as_expected(name, ratios, folder) for name, ratios in found.ratios.items()])
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())

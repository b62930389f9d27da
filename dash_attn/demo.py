"""Shows what deterministic attention is for: `python -m dash_attn.demo`, which `make demo` runs.

A small transformer is trained twice with dash_attn, and twice without. On a Hopper GPU the runs without dash_attn use
PyTorch's flash attention, whose gradients depend on the order in which partial sums arrive. Elsewhere PyTorch's
attention repeats as well, so the demo flips one bit of one gradient in the second run instead, as faulty hardware
might. Receipts then show where two runs diverge. The demo draws the losses and the receipts of the runs that diverge.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import dash_attn
from dash_attn import receipts
from dash_attn.info import why_no_kernels_run
from dash_attn.pictures import new_figure
from dash_attn.receipts.picture import draw

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
VOCABULARY = 256
FLIPPED_STEP, FLIPPED_ELEMENT, FLIPPED_BIT = 5, 1000, 12
FLIPPED_TENSOR = "layers.0.q"


@dataclasses.dataclass(frozen=True)
class Size:
    """Of the model and of its training."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    layers: int
    steps: int

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of {self.heads} heads of {self.head_dim}, batch {self.batch}, seqlen {self.seqlen}, "
            f"{self.steps} steps in bf16"
        )


CPU = Size(batch=2, seqlen=96, heads=4, head_dim=32, layers=2, steps=30)
GPU = Size(batch=2, seqlen=4096, heads=16, head_dim=128, layers=2, steps=30)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two runs that should be the same: how they differ from other pairs, their losses (steps,), and their receipts."""

    name: str
    losses: tuple[Tensor, Tensor]
    folders: tuple[pathlib.Path, pathlib.Path]


def attention_of_dash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dash_attn.flash_attn_func(q, k, v, causal=True)


def attention_of_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def flipped(tensor: Tensor) -> Tensor:
    """A copy in which one bit of one element is another."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    tensor.view(-1).view(torch.int16)[FLIPPED_ELEMENT] ^= 1 << FLIPPED_BIT
    return tensor


class TransformerLayer(nn.Module):
    """A pre-norm transformer layer; x is (batch, seqlen, heads * head_dim)."""

    def __init__(self, name: str, size: Size, attention: Attention) -> None:
        super().__init__()
        width = size.heads * size.head_dim
        self.name, self.heads, self.attention = name, size.heads, attention
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, flip: bool) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if flip:
            q.register_hook(flipped)
        q = receipts.tap(q, f"{self.name}.q")
        out = receipts.tap(self.attention(q, k, v), f"{self.name}.attention")
        x = x + self.proj(out.flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Transformer(nn.Module):
    def __init__(self, size: Size, attention: Attention) -> None:
        super().__init__()
        width = size.heads * size.head_dim
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.layers = nn.ModuleList(TransformerLayer(f"layers.{i}", size, attention) for i in range(size.layers))

    def forward(self, tokens: Tensor, flip: bool) -> Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, flip and f"layers.{number}.q" == FLIPPED_TENSOR)
        return self.head(x)


def train(folder: pathlib.Path, size: Size, device: str, attention: Attention, flip: bool = False) -> Tensor:
    """Trains from fixed seeds, writes receipts to the folder, and returns the loss of every step, fp32 (steps,)."""
    torch.manual_seed(0)
    model = Transformer(size, attention).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    options: dict[str, Any] = {"model": model, "kinds": ("data", "activation", "activation_gradient", "gradient")}
    options |= {"optimizer": optimizer, "taps": ("embedding", "layers.*", "head"), "blocks_every": 1, "block": 64}
    with receipts.Recorder(folder, **options) as recorder:
        for step in range(size.steps):
            generator = torch.Generator().manual_seed(step)
            # Sorted tokens, so that there is something to learn.
            tokens = torch.randint(VOCABULARY, (size.batch, size.seqlen + 1), generator=generator).sort(1).values
            tokens = tokens.to(device)
            with recorder.step(step, data=tokens):
                logits = model(tokens[:, :-1], flip and step == FLIPPED_STEP)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    return torch.stack(losses).cpu()


def train_pair(
    name: str, folder: pathlib.Path, size: Size, device: str, attention: Attention, flip: bool = False
) -> Pair:
    """Two runs, in the second of which a bit flips if `flip` is set."""
    start = time.perf_counter()
    folders = folder / "first", folder / "second"
    print(f"\n== Trained twice: {name}", flush=True)
    losses = train(folders[0], size, device, attention), train(folders[1], size, device, attention, flip)
    print(f"time:     {time.perf_counter() - start:.1f} s", flush=True)
    return Pair(name, losses, folders)


def report(pair: Pair) -> receipts.Difference | None:
    """Prints where the losses and the receipts of a pair diverge, and returns the first difference."""
    one, other = pair.losses
    parts = torch.nonzero(one != other).flatten().tolist()
    print(f"losses:   {f'differ from step {parts[0]} on' if parts else f'the same bits in all {len(one)} steps'}")
    found = receipts.compare(*pair.folders)
    first = found.first
    if first is None:
        print(f"receipts: the same bits in all {found.compared} tensors of {len(found.steps)} steps")
        return None
    print(f"receipts: step {first.step}, {first.key}: {first.what}")
    print(f"          {first.reason}")
    return first


def draw_losses(pairs: list[Pair], path: pathlib.Path) -> None:
    """How far apart the losses of each pair are, by step."""
    figure = new_figure(9, 5)
    axes = figure.subplots()
    for pair, colour in zip(pairs, ("#2a7f3a", "#b3202a")):
        apart = (pair.losses[0] - pair.losses[1]).abs()
        always = ": exactly 0 in every step" if not apart.any() else f": up to {apart.max():.2g}"
        axes.plot(range(len(apart)), apart.tolist(), color=colour, marker="o", markersize=3, label=pair.name + always)
    axes.set_yscale("symlog", linthresh=1e-6)
    axes.set_ylim(bottom=-2e-7)
    axes.set_xlabel("training step")
    axes.set_ylabel("difference between the losses of the two runs")
    repeating = [pair.name for pair in pairs if torch.equal(*pair.losses)]
    message = f"only the runs with {' and '.join(repeating)} agree" if repeating else "no two runs agree"
    if len(repeating) == len(pairs):
        message = "all pairs of runs agree"
    axes.set_title(f"The same model, seed and data, trained twice: {message}", loc="left")
    axes.legend(loc="center right")
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dash_attn.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("demo_output"), help="folder of the charts")
    arguments = parser.parse_args(sys.argv[1:])
    reason = why_no_kernels_run()
    if reason is None:
        size, device = GPU, "cuda"
        print(f"On {torch.cuda.get_device_name()}, with dash_attn's kernels.")
        without, attention = "PyTorch's flash attention", attention_of_torch
    else:
        size, device = CPU, "cpu"
        print(f"On the CPU, with dash_attn's reference ({reason}).")
        without, attention = "one flipped bit", attention_of_dash_attn
    print(f"torch {torch.__version__}; {size}")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        ours = train_pair("dash_attn", folder / "with", size, device, attention_of_dash_attn)
        repeats = report(ours) is None and torch.equal(*ours.losses)
        theirs = train_pair(without, folder / "without", size, device, attention, flip=device == "cpu")
        first = report(theirs)
        arguments.output.mkdir(parents=True, exist_ok=True)
        draw_losses([ours, theirs], arguments.output / "losses.png")
        draw(*theirs.folders, arguments.output / "receipts.png")
    print(f"\nThe pictures are {arguments.output / 'losses.png'} and {arguments.output / 'receipts.png'}.")
    found = first is not None and (first.step, first.key.name) == (FLIPPED_STEP, FLIPPED_TENSOR)
    print(f"The runs with dash_attn agree in every bit: {'yes' if repeats else 'NO'}.")
    if device == "cpu":
        print(f"Receipts found the flipped bit: {'yes' if found else 'NO'}.")
    return 0 if repeats and (found or device != "cpu") else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Trains a small transformer layer twice, flips one bit in the second run, and finds the flip with receipts.

    python examples/receipts.py [--folder receipts] [--bit 12]

Each run is a separate process and writes its receipts to a folder, `a` or `b`. In the second run a bit of the queries'
gradient flips in step 3. Then `python -m dash_attn.receipts compare` finds the step, the tensor, the block and the
likely cause, and prints the commands that replay the step; the replays show the element and the bit. No GPU is needed,
and a GPU finds the same. The exit status is 0 if the flipped bit is found.
"""

import argparse
import pathlib
import subprocess
import sys

import torch

from dash_attn import flash_attn_func
from dash_attn.receipts import Recorder, compare, tap

STEPS, FLIPPED_STEP, FLIPPED_ELEMENT = 6, 3, 1000
BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 64, 2, 32
WIDTH = HEADS * HEAD_DIM


class Layer(torch.nn.Module):
    """Attention with a residual connection, and a loss on its output."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, tokens, step, bit):
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).view(*tokens.shape, 3, HEADS, HEAD_DIM).unbind(2)
        if step == FLIPPED_STEP and bit is not None:
            q.register_hook(lambda gradient: flipped(gradient, bit))
        q = tap(q, "q")
        out = tap(flash_attn_func(q, k, v, causal=True), "attention")
        return self.head(x + out.reshape(x.shape))


def flipped(tensor, bit):
    """Returns a copy in which one bit of one element is flipped."""
    tensor = tensor.clone()
    tensor.view(-1).view(torch.int16)[FLIPPED_ELEMENT] ^= 1 << bit
    return tensor


def train(folder, bit):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Layer().to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Recorder(folder, model=model, optimizer=optimizer, taps=["embedding", "head"], block=1024) as recorder:
        for step in range(STEPS):
            tokens = torch.randint(256, (BATCH, SEQLEN + 1), generator=torch.Generator().manual_seed(step)).to(device)
            with recorder.step(step, data=tokens):
                logits = model(tokens[:, :-1], step, bit)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                tap(loss, "loss").backward()
                optimizer.step()
                optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="receipts", help="folder for the receipts; must not hold any yet")
    parser.add_argument("--bit", type=int, default=12, help="the bit that flips in the second run, 0 to 15")
    parser.add_argument("--run", choices=["a", "b"], help="run only one of the trainings")
    arguments = parser.parse_args()
    folder = pathlib.Path(arguments.folder)
    if arguments.run is not None:
        train(folder / arguments.run, arguments.bit if arguments.run == "b" else None)
        return 0
    for run in ("a", "b"):
        command = [sys.executable, __file__, "--folder", arguments.folder, "--bit", str(arguments.bit), "--run", run]
        subprocess.run(command, check=True)
    folders = [str(folder / run) for run in ("a", "b")]
    subprocess.run([sys.executable, "-m", "dash_attn.receipts", "compare", *folders])
    first = compare(*folders).first
    return 0 if first is not None and (first.step, first.key.name) == (FLIPPED_STEP, "q") else 1


if __name__ == "__main__":
    sys.exit(main())

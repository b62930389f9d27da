"""Trains a small transformer in plain PyTorch twice, without and with dash_attn as the kernel of its attention.

    python examples/torch_sdpa.py

The model calls torch.nn.functional.scaled_dot_product_attention. The single line that mentions dash_attn is `activate`.
The kernels run on a Hopper GPU, and the slow reference elsewhere. Each training runs twice, and the example compares
the bits of the losses and of the weights.
"""

import argparse
import hashlib

import torch
import torch.nn.functional as F
from torch import nn

import dash_attn.integrations.torch as dash_torch

VOCABULARY, HEADS = 256, 8


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, seqlen, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, seqlen, 3, HEADS, width // HEADS)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def train(device, steps, batch, seqlen, width, layers):
    """Returns the losses, and a digest of the final weights."""
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))
    model.to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (batch, seqlen + 1)).to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([x.detach().flatten() for x in model.parameters()])
    return losses, hashlib.sha256(weights.cpu().view(torch.int16).numpy().tobytes()).hexdigest()[:16]


def main():
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20 if on_gpu else 3)
    parser.add_argument("--seqlen", type=int, default=4096 if on_gpu else 64)
    arguments = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"
    size = dict(batch=4, seqlen=arguments.seqlen, width=1024 if on_gpu else 64, layers=4 if on_gpu else 2)

    for name in ("PyTorch's own attention", "dash_attn"):
        if name == "dash_attn":
            dash_torch.activate(device_types=[device])
        runs = [train(device, arguments.steps, **size) for _ in range(2)]
        losses, weights = runs[0]
        print(f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}, weights {weights}, ", end="")
        print("the same bits in both runs" if runs[0] == runs[1] else "DIFFERENT BITS in the second run")
    dash_torch.restore()


if __name__ == "__main__":
    main()

"""Trains a small Llama of transformers twice and compares the bytes: `python examples/train_transformers.py`.

Weights and data are random, so nothing is downloaded. The kernels run on a Hopper GPU, and the reference elsewhere. The
example needs dash_attn, transformers and the version of kernels that transformers requires.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from dash_attn.info import why_no_kernels_run
from dash_attn.integrations.transformers import install


def train(steps: int, device: str) -> tuple[list[float], list[torch.Tensor]]:
    """Returns losses and final weights. Each row packs two sequences, which position_ids separate."""
    torch.manual_seed(0)
    length, width = (1024, 512) if device == "cuda" else (48, 64)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=width // 16, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=install(), dtype=torch.bfloat16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    positions = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)])[None].to(device)
    ids = torch.randint(0, 256, (1, length)).to(device)
    losses = []
    for _ in range(steps):
        loss = model(ids, position_ids=positions, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    device = "cuda" if why_no_kernels_run() is None else "cpu"
    # The other kernels of the model are torch's.
    torch.use_deterministic_algorithms(True, warn_only=True)
    (losses, weights), (again, others) = train(steps, device), train(steps, device)
    print(f"on {device}, losses:", *(f"{loss:.6f}" for loss in losses))
    equal = losses == again and all(map(torch.equal, weights, others))
    print(f"the second run has the same bytes in every loss and weight: {'yes' if equal else 'NO'}")
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())

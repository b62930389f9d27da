"""Runs torchtitan's VarlenAttention with dash_attn as its kernel: `python examples/torchtitan_attention.py`.

The example needs torchtitan 0.3. On a Hopper GPU torchtitan activates "FA3" by itself; elsewhere the example activates
the name, for the reference.
"""

import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

import dash_attn.integrations.torch as dash_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    dash_torch.register("FA3", device_types=[DEVICE])  # the only line about dash_attn, before the model is built
    attention = VarlenAttention(VarlenAttention.Config())
    if current_flash_attention_impl() != "FA3":
        activate_flash_attention_impl("FA3")
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 256, 4, 64, device=DEVICE).bfloat16().unbind()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    # Two documents in the first row of the batch, one in the second.
    offsets = torch.tensor([0, 100, 256, 512], dtype=torch.int32, device=DEVICE)
    documents = VarlenMetadata(offsets, offsets, 256, 256)
    runs = [torch.autograd.grad(attention(*leaves, attention_masks=documents), leaves, dout) for _ in range(3)]
    equal = all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))
    print("the gradients of three runs have the same bits" if equal else "THE BITS DIFFER")


if __name__ == "__main__":
    main()

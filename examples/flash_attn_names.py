"""A program that imports only flash_attn: `python -m dash_attn.run examples/flash_attn_names.py`.

The attention runs dash_attn's kernels on a Hopper GPU, and its reference elsewhere.
"""

import importlib.metadata

import flash_attn
import torch
from flash_attn import flash_attn_func

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    print("flash_attn", flash_attn.__version__, "of the distribution", importlib.metadata.version("flash-attn"))
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 256, 4, 64, device=DEVICE, dtype=torch.bfloat16).unbind()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    runs = [torch.autograd.grad(flash_attn_func(*leaves, causal=True), leaves, dout) for _ in range(3)]
    equal = all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))
    print("the gradients of three runs have the same bits" if equal else "THE BITS DIFFER")


if __name__ == "__main__":
    main()

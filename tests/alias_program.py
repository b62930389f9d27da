"""A program that knows flash_attn alone, as dash_attn.run and the others start it: `alias_program.py DEVICE`.

It prints JSON: {"versions": of flash_attn and FlashAttention-3, "same": by function, whether out and gradients have the
bits of dash_attn, "calls": of our forward and backward}.
"""

import json
import sys

import flash_attn
import flash_attn_interface
import torch
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from kernel_counts import kernels_in

import dash_attn


def private(q, k, v, dout):
    """As ring attention calls them."""
    options = (0.0, q.shape[-1] ** -0.5, True, -1, -1, 0.0, None)
    out, lse, _, _ = _flash_attn_forward(q, k, v, *options, False)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    _flash_attn_backward(dout, q, k, v, out, lse, *gradients, *options, False)
    return out, *gradients


def main(device):
    shape = (2, 700, 8, 128) if device == "cuda" else (1, 20, 2, 16)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(shape).bfloat16().to(device) for _ in range(4))
    offsets = torch.tensor([0, shape[1] // 3, shape[0] * shape[1]], dtype=torch.int32, device=device)
    pack = (offsets, offsets, shape[0] * shape[1], shape[0] * shape[1])

    def dense(module):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = module.flash_attn_func(*leaves, causal=True)
        return out, *torch.autograd.grad(out, leaves, dout)

    def packed(module):
        leaves = [x.flatten(0, 1).clone().requires_grad_() for x in (q, k, v)]
        out = module.flash_attn_varlen_func(*leaves, *pack, causal=True)
        return out, *torch.autograd.grad(out, leaves, dout.flatten(0, 1))

    functions = {
        "flash_attn.flash_attn_func": lambda: dense(flash_attn),
        "flash_attn.flash_attn_varlen_func": lambda: packed(flash_attn),
        "flash_attn_interface.flash_attn_func": lambda: dense(flash_attn_interface),
        "flash_attn_interface.flash_attn_varlen_func": lambda: packed(flash_attn_interface),
        "flash_attn.flash_attn_interface._flash_attn_forward": lambda: private(q, k, v, dout),
    }
    found, calls = kernels_in(lambda: {name: function() for name, function in functions.items()})
    expected = {False: dense(dash_attn), True: packed(dash_attn)}
    same = {name: all(map(torch.equal, results, expected["varlen" in name])) for name, results in found.items()}
    versions = [flash_attn.__version__, flash_attn_interface.__version__]
    print(json.dumps({"versions": versions, "same": same, "calls": calls}))


if __name__ == "__main__":
    main(sys.argv[1])

"""Inputs of the public functions, and what the kernels were called with."""

import contextlib

import torch

import dash_attn

# The arguments before FlashAttention-2's common ones, and the keywords that not all functions have.
FUNCTIONS = {
    dash_attn.flash_attn_func: (["q", "k", "v"], {}),
    dash_attn.flash_attn_kvpacked_func: (["q", "kv"], {}),
    dash_attn.flash_attn_qkvpacked_func: (["qkv"], {"num_heads_q": None}),
}
_OFFSETS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
_USED = {"seqused_q": None, "seqused_k": None}
VARLEN_FUNCTIONS = {
    dash_attn.flash_attn_varlen_func: (["q", "k", "v", *_OFFSETS], _USED),
    dash_attn.flash_attn_varlen_kvpacked_func: (["q", "kv", *_OFFSETS], _USED),
    dash_attn.flash_attn_varlen_qkvpacked_func: (
        ["qkv", "cu_seqlens", "max_seqlen"],
        {"num_heads_q": None, "seqused": None},
    ),
}


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def qkv_tensors(seqlen_q, seqlen_k, heads=4, kv_heads=2, head_dim=32, batch=2, dtype=torch.bfloat16):
    q = randn(batch, seqlen_q, heads, head_dim, dtype=dtype, seed=1)
    k = randn(batch, seqlen_k, kv_heads, head_dim, dtype=dtype, seed=2)
    v = randn(batch, seqlen_k, kv_heads, head_dim, dtype=dtype, seed=3)
    dout = randn(batch, seqlen_q, heads, head_dim, dtype=dtype, seed=4).detach()
    return q, k, v, dout


def out_and_gradients(function, inputs, dout, **arguments):
    out = function(*inputs, **arguments)
    return out, *torch.autograd.grad(out, inputs, dout)


def assert_same_bits(actual, expected):
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, e), i


def inputs_of(function, batch=1, seqlen=9, heads=2, head_dim=8):
    """Inputs of one of the functions, all the same values."""
    q, k, v = (randn(batch, seqlen, heads, head_dim, seed=seed).detach() for seed in range(3))
    packed = {"q": q, "k": k, "v": v, "kv": torch.stack((k, v), dim=2), "qkv": torch.stack((q, k, v), dim=2)}
    return [packed[name].requires_grad_() for name in FUNCTIONS[function][0]]


GRADIENTS = ("dq", "dk", "dv")
PACK = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
MASK = ("causal", "window_left", "window_right", "attention_chunk")


@contextlib.contextmanager
def kernel_calls():
    """The calls of the kernels in the block: [kernel, its arguments by name]."""
    calls = []
    with torch.library._scoped_library("dash_attn_C", "IMPL") as library:
        for name in ("forward", "backward"):
            compute = getattr(dash_attn.ops, f"_{name}_cpu")
            names = [argument.name for argument in getattr(torch.ops.dash_attn_C, name).default._schema.arguments]

            def record(*arguments, name=name, compute=compute, names=names):
                # torch leaves out the last ones where they are their defaults.
                calls.append((name, dict(zip(names, arguments))))
                compute(*arguments)

            library.impl(name, record, "CPU", allow_override=True)
        yield calls

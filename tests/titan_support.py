"""torchtitan's VarlenAttention and flash_attn_varlen_func on the same documents, for the tests on CPUs and on GPUs."""

import torch
from interface_support import out_and_gradients, qkv_tensors
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

from dash_attn import flash_attn_varlen_func

BATCH = 2


def tensors(seqlen, device="cpu", heads=4, kv_heads=2, head_dim=32):
    """q, k, v and a gradient of the output."""
    drawn = qkv_tensors(seqlen, seqlen, heads=heads, kv_heads=kv_heads, head_dim=head_dim, batch=BATCH)
    *inputs, dout = (x.detach().to(device) for x in drawn)
    return [x.requires_grad_() for x in inputs], dout


def documents(seqlen, device="cpu"):
    """Two documents in the first row of the batch, one in the second."""
    offsets = torch.tensor([0, 2 * seqlen // 3, seqlen, BATCH * seqlen], dtype=torch.int32, device=device)
    return VarlenMetadata(offsets, offsets, seqlen, seqlen)


def attention_of(window):
    return VarlenAttention(VarlenAttention.Config(window_size=window))


def by_torchtitan(attention, inputs, dout, masks):
    """out, dq, dk, dv of a VarlenAttention."""
    return out_and_gradients(lambda *x: attention(*x, attention_masks=masks, scale=0.2, enable_gqa=True), inputs, dout)


def by_dash_attn(window, inputs, dout, masks):
    """The same by flash_attn_varlen_func."""

    def function(*x):
        rows = (tensor.flatten(0, 1) for tensor in x)
        out = flash_attn_varlen_func(*rows, *masks[:4], window_size=window, softmax_scale=0.2)
        return out.unflatten(0, x[0].shape[:2])

    return out_and_gradients(function, inputs, dout)


def log_sum_exps(inputs, masks):
    """Of torchtitan's epilogue and of ours: (out, softmax_lse) of causal attention, each (rows, heads, ...)."""
    found = attention_of((-1, 0))(
        *inputs, attention_masks=masks, enable_gqa=True, out_transform=lambda out, lse: (out, lse)
    )
    rows = (x.flatten(0, 1) for x in inputs)
    out, lse, _ = flash_attn_varlen_func(*rows, *masks[:4], causal=True, return_attn_probs=True)
    return [x.flatten(0, 1) for x in found], [out, lse.T]

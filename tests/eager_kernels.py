"""flash_attn's private functions in PyTorch's own operators at the dtype of the inputs: how accurate a ring of parts is
whose kernels these are. The names of the arguments are those that ring-flash-attn looks for; what it never uses here is
not looked at."""

import torch
from float64_reference import attention_in_dtype, sequences_of, visible_keys


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal,
    window_size_left, window_size_right, softcap, alibi_slopes, return_softmax,
):  # fmt: skip
    part = attention_in_dtype(q, k, v, softmax_scale=softmax_scale, causal=causal)
    return part.out, part.softmax_lse, None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
    window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    """The chain rule as autograd has it for `attention_in_dtype`: every intermediate tensor is rounded."""
    group = q.shape[2] // k.shape[2]
    k_heads, v_heads = (x.repeat_interleave(group, dim=2) for x in (k, v))
    q_t, k_t, v_t, dout_t, out_t = (x.transpose(1, 2) for x in (q, k_heads, v_heads, dout, out))
    s = q_t @ k_t.transpose(-1, -2) * softmax_scale
    s = s.masked_fill(~visible_keys(q.shape[1], k.shape[1], causal, q.device), -torch.inf)
    p = (s.float() - softmax_lse[..., None]).exp().to(q.dtype)
    row_sums = (dout_t.float() * out_t.float()).sum(-1, keepdim=True)
    ds = (p.float() * ((dout_t @ v_t.transpose(-1, -2)).float() - row_sums)).to(q.dtype) * softmax_scale
    for gradient, of_heads in ((dq, ds @ k_t), (dk, ds.transpose(-1, -2) @ q_t), (dv, p.transpose(-1, -2) @ dout_t)):
        of_heads = of_heads.transpose(1, 2)
        gradient.copy_(of_heads if gradient is dq else of_heads.unflatten(2, (-1, group)).sum(3))


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    out, softmax_lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for queries, keys in zip(sequences_of(cu_seqlens_q.tolist()), sequences_of(cu_seqlens_k.tolist()), strict=True):
        tensors = (x[None] for x in (q[queries], k[keys], v[keys]))
        part = attention_in_dtype(*tensors, softmax_scale=softmax_scale, causal=causal)
        out[queries], softmax_lse[:, queries] = part.out[0], part.softmax_lse[0]
    return out, softmax_lse, None, None


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    for queries, keys in zip(sequences_of(cu_seqlens_q.tolist()), sequences_of(cu_seqlens_k.tolist()), strict=True):
        of_rows = (queries, queries, keys, keys, queries)
        tensors = (x[rows][None] for x, rows in zip((dout, q, k, v, out), of_rows))
        gradients = (x[rows][None] for x, rows in zip((dq, dk, dv), (queries, keys, keys)))
        _flash_attn_backward(
            *tensors, softmax_lse[:, queries][None], *gradients, 0.0, softmax_scale, causal, -1, -1, 0.0, None, False
        )

"""Bad inputs and the exact message each gets, before anything is computed."""

import inspect
import math

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import dash_attn
from dash_attn import flash_attn_func, flash_attn_varlen_func, schedule

BF16, FP32 = torch.bfloat16, torch.float32


def t(*shape, dtype=BF16, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def good():
    return {"q": t(2, 5, 4, 16), "k": t(2, 7, 2, 16), "v": t(2, 7, 2, 16)}


# Changes to good(), the error and its whole message.
TENSORS = [
    ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got [1.0]"),
    ({"q": [t(2, 5, 4, 16)] * 3}, TypeError,
     "q must be a torch.Tensor, got a list of 3, the first of them a tensor of shape (2, 5, 4, 16)"),
    ({"q": [0.0] * 1000}, TypeError,
     "q must be a torch.Tensor, got [" + "0.0, " * 15 + "0.0,... (list)"),
    ({"v": np.zeros((2, 7, 2, 16))}, TypeError, "v must be a torch.Tensor, got numpy.ndarray of shape (2, 7, 2, 16)"),
    ({"q": torch.nested.nested_tensor([t(5, 4, 16), t(3, 4, 16)])}, TypeError,
     "q must be a dense tensor (torch.strided), got a nested tensor"),
    ({"k": None}, TypeError, "k must be a torch.Tensor, got None (NoneType)"),
    ({"v": t(2, 7, 2, 16).to_sparse()}, TypeError, "v must be a dense tensor (torch.strided), got torch.sparse_coo"),
    ({"q": t(5, 4, 16)}, ValueError,
     "q must have shape (batch, seqlen, heads, head_dim), got 3 dimensions: (5, 4, 16)"),
    ({"v": t(1, 2, 7, 2, 16)}, ValueError,
     "v must have shape (batch, seqlen, heads, head_dim), got 5 dimensions: (1, 2, 7, 2, 16)"),
    ({"q": t(2, 5, 4, 16, dtype=torch.float32)}, TypeError,
     "q must be torch.bfloat16 or torch.float16, got torch.float32"),
    ({"k": t(2, 7, 2, 16, dtype=torch.float8_e4m3fn)}, TypeError,
     "k must be torch.bfloat16 or torch.float16, got torch.float8_e4m3fn"),
    ({"k": t(2, 7, 2, 16, dtype=torch.float16)}, TypeError,
     "k must have the dtype of q, torch.bfloat16, got torch.float16"),
    ({"v": t(2, 7, 2, 16, dtype=torch.float16)}, TypeError,
     "v must have the dtype of q, torch.bfloat16, got torch.float16"),
    ({"q": t(2, 5, 4, 16, device="meta")}, ValueError, "k must be on the device of q, meta, got cpu"),
    ({"q": t(2, 5, 4, 264)}, ValueError, "q must have a head_dim from 1 to 256, got 264"),
    ({"q": t(2, 5, 4, 0)}, ValueError, "q must have a head_dim from 1 to 256, got 0"),
    ({"v": t(2, 7, 2, 257)}, ValueError, "v must have a head_dim from 1 to 256, got 257"),
    ({"v": t(2, 7, 2, 0)}, ValueError, "v must have a head_dim from 1 to 256, got 0"),
    ({"k": t(3, 7, 2, 16)}, ValueError, "k must have the batch size of q, 2, got 3"),
    ({"k": t(2, 7, 2, 24)}, ValueError, "k must have the head_dim of q, 16, got 24"),
    ({"k": t(2, 7, 3, 16)}, ValueError, "k must have a number of heads that divides the 4 heads of q, got 3"),
    ({"k": t(2, 7, 8, 16)}, ValueError, "k must have a number of heads that divides the 4 heads of q, got 8"),
    ({"k": t(2, 7, 0, 16)}, ValueError, "k must have a number of heads that divides the 4 heads of q, got 0"),
    ({"q": t(2, 5, 0, 16)}, ValueError, "k must have a number of heads that divides the 0 heads of q, got 2"),
    ({"v": t(2, 8, 2, 16)}, ValueError,
     "v must have the shape of k except for the head_dim, (2, 7, 2, 16), got (2, 8, 2, 16)"),
    ({"v": t(2, 7, 4, 24)}, ValueError,
     "v must have the shape of k except for the head_dim, (2, 7, 2, 16), got (2, 7, 4, 24)"),
    ({"k": t(1, 1, 1, 1).expand(2, 2**30, 2, 16)}, ValueError,
     "k must have a seqlen of at most 1073741823, got 1073741824"),
]  # fmt: skip

DROPOUT = "dropout_p must be from 0 to below 1 in fp32, got "
SOFTCAP = "softcap must be a finite number or None (0 or less disables it), got "
CAP_RANGE = "softcap * log2(e) and softmax_scale / softcap must be finite in fp32, got "
SLOPES = "alibi_slopes must have shape (heads,) = (4,) or (batch, heads) = (2, 4), got "
SINK = "learnable_sink (s_aux) must be "
WINDOW = "window_size must be (left, right), each an int or None, got "
MARGIN = "sm_margin must be at least 0 and less than the SMs of the GPU (at most 144 on Hopper), got "


NAMES = f"schedule must be one of {', '.join(map(repr, ('auto', *schedule.POLICIES)))}, got "


def schedules(causal):
    names = ", ".join(map(repr, ("auto", *schedule.fitting(causal=causal))))
    return f"schedule must be one of {names} under the {'causal' if causal else 'full'} mask, got "


WINDOW_SCHEDULES = "schedule must be one of 'auto', 'descending', 'spt', 'order_free' under the window mask, got "

# Arguments that all functions share.
ARGUMENTS = [
    ({"dropout_p": 1.0}, ValueError, DROPOUT + "1.0"),
    ({"dropout_p": math.nan}, ValueError, DROPOUT + "nan"),
    ({"dropout_p": 10**400}, ValueError, DROPOUT + "an integer of 1329 bits"),
    ({"dropout_p": np.array([0.1, 0.2])}, TypeError,
     "dropout_p must be a number from 0 to below 1, got numpy.ndarray of shape (2,)"),
    ({"dropout_bits": t(4)}, TypeError, "dropout_bits must be a dash_attn.dropout.DropoutBits or None, got Tensor"),
    ({"window_size": 128}, TypeError, WINDOW + "128"),
    ({"window_size": None}, TypeError, WINDOW + "None (NoneType)"),
    ({"window_size": (-1, -1, -1)}, ValueError, WINDOW + "(-1, -1, -1)"),
    ({"window_size": (5,)}, ValueError, WINDOW + "(5,)"),
    ({"window_size": "12"}, TypeError, WINDOW + "'12'"),
    ({"window_size": np.array([4.0, 0.0])}, TypeError, WINDOW + "[4.0, 0.0]"),
    ({"window_size": torch.tensor([True, True])}, TypeError, WINDOW + "[True, True]"),
    ({"window_size": torch.tensor([1, 2, 3])}, ValueError, WINDOW + "[1, 2, 3]"),
    ({"window_size": torch.tensor([[4, 0]])}, TypeError, WINDOW + "a tensor of shape (1, 2)"),
    ({"window_size": torch.tensor([4, 0], device="meta")}, TypeError, WINDOW + "a tensor of shape (2,)"),
    ({"window_size": (-1, 0.5)}, TypeError, WINDOW + "(-1, 0.5)"),
    ({"window_size": (True, 5)}, TypeError, WINDOW + "(True, 5)"),
    ({"window_size": [torch.ones(()), 5]}, TypeError, WINDOW + "[1.0, 5]"),
    ({"softcap": "30"}, TypeError, "softcap must be a finite number or None, got '30'"),
    ({"softcap": True}, TypeError, "softcap must be a finite number or None, got True"),
    ({"softcap": torch.ones(())}, TypeError, "softcap must be a finite number or None, got a tensor of shape ()"),
    ({"softcap": math.nan}, ValueError, SOFTCAP + "nan"),
    ({"softcap": math.inf}, ValueError, SOFTCAP + "inf"),
    ({"softcap": 1e-42, "softmax_scale": 0.25}, ValueError, CAP_RANGE + "softcap=1e-42 and softmax_scale=0.25"),
    ({"softcap": 1e-30, "softmax_scale": 1e9}, ValueError, CAP_RANGE + "softcap=1e-30 and softmax_scale=1e+09"),
    ({"softcap": 3e38, "softmax_scale": 0.25}, ValueError, CAP_RANGE + "softcap=3e+38 and softmax_scale=0.25"),
    ({"softcap": 10**400}, ValueError, "softcap * log2(e) must be finite in fp32, got softcap=an integer of 1329 bits"),
    ({"alibi_slopes": [0.5] * 4}, TypeError, "alibi_slopes must be a torch.Tensor, got [0.5, 0.5, 0.5, 0.5]"),
    ({"alibi_slopes": t(4)}, TypeError, "alibi_slopes must be torch.float32, got torch.bfloat16"),
    ({"alibi_slopes": t(3, dtype=FP32)}, ValueError, SLOPES + "(3,)"),
    ({"alibi_slopes": t(4, 4, dtype=FP32)}, ValueError, SLOPES + "(4, 4)"),
    ({"alibi_slopes": t(1, 2, 4, dtype=FP32)}, ValueError, SLOPES + "(1, 2, 4)"),
    ({"alibi_slopes": t(4, dtype=FP32, device="meta")}, ValueError,
     "alibi_slopes must be on the device of q, cpu, got meta"),
    ({"alibi_slopes": t(4, dtype=FP32).requires_grad_()}, NotImplementedError,
     "alibi_slopes must not require a gradient (there is none for slopes), got a tensor that does"),
    ({"alibi_slopes": t(2, 4, dtype=FP32), "softcap": 30.0}, NotImplementedError,
     "softcap and alibi_slopes must not be given together (no kernel has both), got softcap=30 and alibi_slopes of "
     "shape (2, 4)"),
    ({"learnable_sink": 0.0}, TypeError, "learnable_sink must be a torch.Tensor, got 0.0"),
    ({"s_aux": [0.0] * 4}, TypeError, "s_aux must be a torch.Tensor, got [0.0, 0.0, 0.0, 0.0]"),
    ({"s_aux": t(4), "learnable_sink": t(4)}, ValueError,
     "learnable_sink and s_aux are two names of one argument, got both: one must be None"),
    ({"s_aux": t(4, dtype=torch.int32)}, TypeError, SINK + "of a floating-point dtype, got torch.int32"),
    ({"s_aux": t(3)}, ValueError, SINK + "of shape (heads,) = (4,), got (3,)"),
    ({"learnable_sink": t(2, 4)}, ValueError, SINK + "of shape (heads,) = (4,), got (2, 4)"),
    ({"learnable_sink": t(4, device="meta")}, ValueError, SINK + "on the device of q, cpu, got meta"),
    ({"qv": t(2, 5, 4, 16)}, NotImplementedError,
     "qv must be None (a second query-value product is not supported), got a tensor of shape (2, 5, 4, 16)"),
    ({"q_descale": t(2, 2)}, NotImplementedError,
     "q_descale must be None (fp8 is not supported), got a tensor of shape (2, 2)"),
    ({"k_descale": t(2, 2)}, NotImplementedError,
     "k_descale must be None (fp8 is not supported), got a tensor of shape (2, 2)"),
    ({"v_descale": t(2, 2)}, NotImplementedError,
     "v_descale must be None (fp8 is not supported), got a tensor of shape (2, 2)"),
    ({"startend_row_indices": [0]}, TypeError, "startend_row_indices must be a torch.Tensor, got [0]"),
    ({"attention_chunk": -1}, ValueError, "attention_chunk must be at least 0, got -1"),
    ({"attention_chunk": 64.0}, TypeError, "attention_chunk must be an int or None, got 64.0"),
    ({"attention_chunk": torch.tensor([4, 0])}, TypeError,
     "attention_chunk must be an int or None, got a tensor of shape (2,)"),
    ({"attention_chunk": True}, TypeError, "attention_chunk must be an int or None, got True"),
    ({"num_splits": 2.0}, TypeError, "num_splits must be an int (it is ignored), got 2.0"),
    ({"num_splits": None}, TypeError, "num_splits must be an int (it is ignored), got None (NoneType)"),
    ({"pack_gqa": "yes"}, TypeError, "pack_gqa must be None or a bool (it is ignored), got 'yes'"),
    ({"causal": 2}, TypeError, "causal must be a bool, got 2"),
    ({"causal": None}, TypeError, "causal must be a bool, got None (NoneType)"),
    ({"causal": np.ones(2, dtype=bool)}, TypeError, "causal must be a bool, got numpy.ndarray of shape (2,)"),
    ({"deterministic": "yes"}, TypeError, "deterministic must be a bool, got 'yes'"),
    ({"return_attn_probs": None}, TypeError, "return_attn_probs must be a bool, got None (NoneType)"),
    ({"return_max_logits": None}, TypeError, "return_max_logits must be a bool, got None (NoneType)"),
    ({"softmax_scale": "1"}, TypeError, "softmax_scale must be a finite number or None, got '1'"),
    ({"softmax_scale": True}, TypeError, "softmax_scale must be a finite number or None, got True"),
    ({"softmax_scale": torch.ones(())}, TypeError,
     "softmax_scale must be a finite number or None, got a tensor of shape ()"),
    ({"softmax_scale": math.nan}, ValueError, "softmax_scale must be a finite number or None, got nan"),
    ({"softmax_scale": -math.inf}, ValueError, "softmax_scale must be a finite number or None, got -inf"),
    ({"softmax_scale": np.True_}, TypeError, "softmax_scale must be a finite number or None, got np.True_ (bool)"),
    ({"softmax_scale": 2.4e38}, ValueError,
     "softmax_scale * log2(e) must be finite in fp32, got softmax_scale=2.4e+38"),
    ({"softmax_scale": -1e300}, ValueError,
     "softmax_scale * log2(e) must be finite in fp32, got softmax_scale=-1e+300"),
    ({"softmax_scale": 10**400}, ValueError,
     "softmax_scale * log2(e) must be finite in fp32, got softmax_scale=an integer of 1329 bits"),
    ({"sm_margin": -1}, ValueError, MARGIN + "-1"),
    ({"sm_margin": 144}, ValueError, MARGIN + "144"),
    ({"sm_margin": 10**6}, ValueError, MARGIN + "1000000"),
    ({"sm_margin": 2**70}, ValueError, MARGIN + "1180591620717411303424"),
    ({"sm_margin": 1.5}, TypeError, "sm_margin must be an int, got 1.5"),
    ({"sm_margin": True}, TypeError, "sm_margin must be an int, got True"),
    ({"sm_margin": None}, TypeError, "sm_margin must be an int, got None (NoneType)"),
    ({"schedule": "fastest"}, ValueError, NAMES + "'fastest'"),
    ({"schedule": "decending"}, ValueError, NAMES + "'decending'; did you mean 'descending'?"),
    ({"schedule": "Shift"}, ValueError, NAMES + "'Shift'; did you mean 'shift'?"),
    ({"schedule": None}, ValueError, "schedule must be 'auto' or the name of a policy, got None (NoneType)"),
    ({"schedule": "symmetric_shift"}, ValueError, schedules(False) + "'symmetric_shift'"),
    ({"schedule": "shift", "causal": True}, ValueError, schedules(True) + "'shift'"),
    ({"schedule": "atomic"}, ValueError, NAMES + "'atomic'"),
    ({"schedule": "shift", "window_size": (5, 5)}, ValueError, WINDOW_SCHEDULES + "'shift'"),
    ({"schedule": "symmetric_shift", "causal": True, "attention_chunk": 8}, ValueError,
     WINDOW_SCHEDULES + "'symmetric_shift'"),
]  # fmt: skip

KVPACKED = [
    ({"kv": t(2, 7, 2, 16)}, ValueError,
     "kv must have shape (batch, seqlen, 2, kv_heads, head_dim), got 4 dimensions: (2, 7, 2, 16)"),
    ({"kv": t(2, 7, 3, 2, 16)}, ValueError,
     "kv must have shape (batch, seqlen, 2, kv_heads, head_dim), with 2 for keys and values, got 3 in its place: "
     "(2, 7, 3, 2, 16)"),
    ({"kv": t(2, 7, 2, 3, 16)}, ValueError, "kv must have a number of heads that divides the 4 heads of q, got 3"),
    ({"kv": t(1, 7, 2, 2, 16)}, ValueError, "kv must have the batch size of q, 2, got 1"),
    ({"kv": t(2, 7, 2, 2, 8)}, ValueError, "kv must have the head_dim of q, 16, got 8"),
    ({"kv": t(2, 7, 2, 2, 16, dtype=torch.float16)}, TypeError,
     "kv must have the dtype of q, torch.bfloat16, got torch.float16"),
    ({"q": t(2, 5, 4, 300)}, ValueError, "q must have a head_dim from 1 to 256, got 300"),
]  # fmt: skip

SPLIT = (
    "num_heads_q must be a positive multiple of kv_heads with num_heads_q + 2 * kv_heads equal to the {} heads of qkv, "
    "got {}"
)
QKVPACKED = [
    ({"qkv": t(2, 7, 12, 16)}, ValueError,
     "qkv must have shape (batch, seqlen, 3, heads, head_dim), got 4 dimensions: (2, 7, 12, 16)"),
    ({"qkv": t(2, 7, 2, 4, 16)}, ValueError,
     "qkv must have shape (batch, seqlen, 3, heads, head_dim), with 3 for queries, keys and values, got 2 in its "
     "place: (2, 7, 2, 4, 16)"),
    ({"qkv": t(2, 7, 3, 0, 16)}, ValueError,
     "qkv must have at least one head, got (2, 7, 3, 0, 16)"),
    ({"qkv": t(2, 7, 3, 4, 257)}, ValueError, "qkv must have a head_dim from 1 to 256, got 257"),
    ({"qkv": t(2, 7, 3, 4, 16, dtype=torch.float64)}, TypeError,
     "qkv must be torch.bfloat16 or torch.float16, got torch.float64"),
    ({"num_heads_q": 4}, ValueError,
     "qkv must have shape (batch, seqlen, num_heads_q + 2 * kv_heads, head_dim), got 5 dimensions: (2, 7, 3, 4, 16)"),
    ({"qkv": t(2, 7, 8, 16), "num_heads_q": 4.0}, TypeError, "num_heads_q must be an int or None, got 4.0"),
    ({"qkv": t(2, 7, 8, 16), "num_heads_q": 0}, ValueError, SPLIT.format(8, 0)),
    ({"qkv": t(2, 7, 8, 16), "num_heads_q": 5}, ValueError, SPLIT.format(8, 5)),
    ({"qkv": t(2, 7, 8, 16), "num_heads_q": 8}, ValueError, SPLIT.format(8, 8)),
    ({"qkv": t(2, 7, 8, 16), "num_heads_q": 2}, ValueError, SPLIT.format(8, 2)),
]  # fmt: skip


def i32(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


def good_pack():
    tensors = {"q": t(9, 4, 16), "k": t(12, 2, 16), "v": t(12, 2, 16)}
    offsets = {"cu_seqlens_q": i32(0, 4, 9), "cu_seqlens_k": i32(0, 4, 12)}
    return {**tensors, **offsets, "max_seqlen_q": 5, "max_seqlen_k": 8}


HINT = "max_seqlen_{} must be an int of at least 0 or an integer tensor of shape (), got {}"
ROWS = "cu_seqlens_{} must hold non-decreasing offsets from 0 to {}, the number of rows, got {}"

PAGES = {"k": t(3, 4, 2, 16), "v": t(3, 4, 2, 16), "block_table": i32(0, 1, 2, 0).view(2, 2)}

# Changes to good_pack(), the error and its whole message.
PACKS = [
    ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got [1.0]"),
    ({"q": t(2, 5, 4, 16)}, ValueError, "q must have shape (total, heads, head_dim), got 4 dimensions: (2, 5, 4, 16)"),
    ({"k": t(12, 16)}, ValueError, "k must have shape (total, heads, head_dim), got 2 dimensions: (12, 16)"),
    ({"v": t(11, 2, 16)}, ValueError,
     "v must have the shape of k except for the head_dim, (12, 2, 16), got (11, 2, 16)"),
    ({"k": t(12, 3, 16)}, ValueError, "k must have a number of heads that divides the 4 heads of q, got 3"),
    ({"k": t(12, 2, 24)}, ValueError, "k must have the head_dim of q, 16, got 24"),
    ({"k": t(12, 2, 16, dtype=torch.float16)}, TypeError,
     "k must have the dtype of q, torch.bfloat16, got torch.float16"),
    ({"q": t(1, 1, 1).expand(2**30, 4, 16)}, ValueError,
     "q must have a total of at most 1073741823, got 1073741824"),
    ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q must be a torch.Tensor, got None (NoneType)"),
    ({"cu_seqlens_k": [0, 4, 12]}, TypeError, "cu_seqlens_k must be a torch.Tensor, got [0, 4, 12]"),
    ({"cu_seqlens_q": i32(0, 4, 9, dtype=torch.int64)}, TypeError,
     "cu_seqlens_q must be torch.int32, got torch.int64"),
    ({"cu_seqlens_k": i32(0, 4, 12, dtype=torch.float32)}, TypeError,
     "cu_seqlens_k must be torch.int32, got torch.float32"),
    ({"cu_seqlens_q": i32()}, ValueError, "cu_seqlens_q must have shape (batch + 1,), got (0,)"),
    ({"cu_seqlens_q": i32(0, 4, 9)[None]}, ValueError, "cu_seqlens_q must have shape (batch + 1,), got (1, 3)"),
    ({"cu_seqlens_k": i32(0, 12)}, ValueError, "cu_seqlens_k must have shape (batch + 1,) = (3,), got (2,)"),
    ({"cu_seqlens_k": i32(0, 1, 4, 1, 12)[::2]}, ValueError, "cu_seqlens_k must be contiguous, got strides (2,)"),
    ({"cu_seqlens_q": i32(0, 4, 9).to("meta")}, ValueError,
     "cu_seqlens_q must be on the device of q, cpu, got meta"),
    ({"seqused_q": i32(4, 5, 6)}, ValueError, "seqused_q must have shape (batch,) = (2,), got (3,)"),
    ({"seqused_k": i32(4, 5, dtype=torch.int64)}, TypeError, "seqused_k must be torch.int32, got torch.int64"),
    ({"seqused_k": 5}, TypeError, "seqused_k must be a torch.Tensor, got 5"),
    ({"max_seqlen_q": -1}, ValueError, HINT.format("q", -1)),
    ({"max_seqlen_k": None}, TypeError, HINT.format("k", "None (NoneType)")),
    ({"max_seqlen_k": 5.0}, TypeError, HINT.format("k", "5.0")),
    ({"max_seqlen_q": True}, TypeError, HINT.format("q", "True")),
    ({"max_seqlen_q": i32(5)}, TypeError, HINT.format("q", "a tensor of shape (1,)")),
    ({"max_seqlen_k": torch.ones(())}, TypeError, HINT.format("k", "a tensor of shape ()")),
    ({"block_table": [[0], [1]]}, TypeError, "block_table must be a torch.Tensor, got [[0], [1]]"),
    ({"block_table": i32(0, 1)[:, None]}, ValueError,
     "k must have shape (num_blocks, block_size, kv_heads, head_dim) with block_table, got (12, 2, 16)"),
    (PAGES | {"block_table": i32(0, 1)}, ValueError, "block_table must have shape (batch, max_blocks), got (2,)"),
    (PAGES | {"block_table": i32(0, 1, 2)[None]}, ValueError,
     "block_table must have shape (batch, max_blocks) = (2, 3), got (1, 3)"),
    (PAGES | {"block_table": i32(0, 1, 2, 3).view(2, 2)}, ValueError,
     "block_table must be from 0 to 2 (room in the cache, sizes of tables), got [2, 3]"),
    (PAGES | {"cu_seqlens_k": i32(0, 9, 12)}, ValueError,
     "the differences of cu_seqlens_k must be from 0 to 8 (room in the cache, sizes of tables), got [9, 3]"),
    (PAGES | {"cu_seqlens_k": i32(0, 4, 2)}, ValueError,
     "the differences of cu_seqlens_k must be from 0 to 8 (room in the cache, sizes of tables), got [4, -2]"),
    (PAGES | {"cu_seqlens_k": i32(0, 4)}, ValueError, "cu_seqlens_k must have shape (batch + 1,) = (3,), got (2,)"),
    (PAGES | {"seqused_k": i32(3, 9)}, ValueError,
     "seqused_k must be from 0 to 8 (room in the cache, sizes of tables), got [3, 9]"),
    (PAGES | {"v": t(3, 5, 2, 16)}, ValueError,
     "v must have the shape of k except for the head_dim, (3, 4, 2, 16), got (3, 5, 2, 16)"),
    (PAGES | {"dropout_p": 0.1}, NotImplementedError, "dropout_p must be 0.0 (no dropout with block_table), got 0.1"),
    (PAGES | {"return_max_logits": True}, NotImplementedError,
     "return_max_logits must be False (block_table is given), got True"),
    (PAGES | {"schedule": "decending"}, ValueError, NAMES + "'decending'; did you mean 'descending'?"),
    (PAGES | {"max_seqlen_k": 5.0}, TypeError, HINT.format("k", "5.0")),
    (PAGES | {"k": t(3, 4, 2, 16).requires_grad_()}, NotImplementedError,
     "block_table must be None if a gradient is required (paged keys and values have no backward; torch.no_grad() "
     "turns gradients off), got a tensor of shape (2, 2) and k that requires one"),
    (PAGES | {"s_aux": t(4).requires_grad_()}, NotImplementedError,
     "block_table must be None if a gradient is required (paged keys and values have no backward; torch.no_grad() "
     "turns gradients off), got a tensor of shape (2, 2) and s_aux that requires one"),
    (PAGES | {"alibi_slopes": t(4, dtype=torch.float32).requires_grad_()}, NotImplementedError,
     "block_table must be None if a gradient is required (paged keys and values have no backward; torch.no_grad() "
     "turns gradients off), got a tensor of shape (2, 2) and alibi_slopes that requires one"),
    # Of the CPU alone: elsewhere values are not read.
    ({"cu_seqlens_q": i32(0, 5, 4)}, ValueError, ROWS.format("q", 9, [0, 5, 4])),
    ({"cu_seqlens_q": i32(0, 4, 10)}, ValueError, ROWS.format("q", 9, [0, 4, 10])),
    ({"cu_seqlens_k": i32(-1, 4, 12)}, ValueError, ROWS.format("k", 12, [-1, 4, 12])),
    ({"seqused_q": i32(4, 6)}, ValueError,
     "seqused_q must hold numbers from 0 to the lengths in cu_seqlens_q, [4, 5], got [4, 6]"),
    ({"seqused_k": i32(-1, 3)}, ValueError,
     "seqused_k must hold numbers from 0 to the lengths in cu_seqlens_k, [4, 8], got [-1, 3]"),
]  # fmt: skip

PACKS_KVPACKED = [
    ({"kv": t(12, 2, 16)}, ValueError,
     "kv must have shape (total, 2, kv_heads, head_dim), got 3 dimensions: (12, 2, 16)"),
    ({"kv": t(12, 3, 2, 16)}, ValueError,
     "kv must have shape (total, 2, kv_heads, head_dim), with 2 for keys and values, got 3 in its place: "
     "(12, 3, 2, 16)"),
    ({"cu_seqlens_k": i32(0, 12)}, ValueError, "cu_seqlens_k must have shape (batch + 1,) = (3,), got (2,)"),
]  # fmt: skip

PACKS_QKVPACKED = [
    ({"qkv": t(2, 7, 3, 4, 16)}, ValueError,
     "qkv must have shape (total, 3, heads, head_dim), got 5 dimensions: (2, 7, 3, 4, 16)"),
    ({"qkv": t(9, 2, 4, 16)}, ValueError,
     "qkv must have shape (total, 3, heads, head_dim), with 3 for queries, keys and values, got 2 in its place: "
     "(9, 2, 4, 16)"),
    ({"num_heads_q": 4}, ValueError,
     "qkv must have shape (total, num_heads_q + 2 * kv_heads, head_dim), got 4 dimensions: (9, 3, 4, 16)"),
    ({"qkv": t(9, 8, 16), "num_heads_q": 5}, ValueError, SPLIT.format(8, 5)),
    ({"cu_seqlens": i32(0, 9, dtype=torch.int64)}, TypeError, "cu_seqlens must be torch.int32, got torch.int64"),
    ({"cu_seqlens": None}, TypeError, "cu_seqlens must be a torch.Tensor, got None (NoneType)"),
    ({"seqused": i32(1)}, ValueError, "seqused must have shape (batch,) = (2,), got (1,)"),
    ({"max_seqlen": "9"}, TypeError, HINT.format("q", "'9'").replace("_q", "")),
]  # fmt: skip


def forms():
    q, k, v = good().values()
    yield flash_attn_func, good()
    yield dash_attn.flash_attn_kvpacked_func, {"q": q, "kv": torch.stack((k, v), dim=2)}
    yield dash_attn.flash_attn_qkvpacked_func, {"qkv": t(2, 7, 3, 4, 16)}
    q, k, v, *offsets = good_pack().items()
    yield flash_attn_varlen_func, good_pack()
    yield dash_attn.flash_attn_varlen_kvpacked_func, dict([q, ("kv", torch.stack((k[1], v[1]), dim=1)), *offsets])
    yield (
        dash_attn.flash_attn_varlen_qkvpacked_func,
        {"qkv": t(9, 3, 4, 16), "cu_seqlens": i32(0, 4, 9), "max_seqlen": 5},
    )


@pytest.fixture(autouse=True)
def nothing_is_computed(monkeypatch):
    def unexpected(*_):
        raise AssertionError("computed before the arguments were checked")

    monkeypatch.setattr(dash_attn.ops.reference, "forward", unexpected)


def assert_raises(function, arguments, error, message):
    with pytest.raises(error) as raised:
        function(**arguments)
    assert type(raised.value) is error
    assert str(raised.value) == message


@pytest.mark.parametrize("change, error, message", TENSORS)
def test_tensors(change, error, message):
    assert_raises(flash_attn_func, {**good(), **change}, error, message)


@pytest.mark.parametrize("form", range(6))
@pytest.mark.parametrize("change, error, message", ARGUMENTS)
def test_arguments(form, change, error, message):
    function, arguments = list(forms())[form]
    assert_raises(function, {**arguments, **change}, error, message)


@pytest.mark.parametrize("change, error, message", KVPACKED)
def test_kvpacked(change, error, message):
    function, arguments = list(forms())[1]
    assert_raises(function, {**arguments, **change}, error, message)


@pytest.mark.parametrize("change, error, message", QKVPACKED)
def test_qkvpacked(change, error, message):
    function, arguments = list(forms())[2]
    assert_raises(function, {**arguments, **change}, error, message)


@pytest.mark.parametrize("form, change, error, message", [
    *((3, *case) for case in PACKS), *((4, *case) for case in PACKS_KVPACKED), *((5, *case) for case in PACKS_QKVPACKED)
])  # fmt: skip
def test_packs(form, change, error, message):
    function, arguments = list(forms())[form]
    assert_raises(function, {**arguments, **change}, error, message)


def test_long_offsets_are_cut_short():
    arguments = good_pack() | {"cu_seqlens_q": i32(*range(20)), "cu_seqlens_k": i32(*[0] * 20)}
    message = ROWS.format("q", 9, [*range(16)]).replace("15]", "15, ...]")
    assert_raises(flash_attn_varlen_func, arguments, ValueError, message)


def test_mixed_devices():
    with FakeTensorMode():
        tensors = {**good(), "v": t(2, 7, 2, 16, device="cuda")}
        assert_raises(flash_attn_func, tensors, ValueError, "v must be on the device of q, cpu, got cuda:0")


def test_every_argument_is_checked():
    tried = {name for change, _, _ in ARGUMENTS for name in change}
    accepted = set(inspect.signature(flash_attn_func).parameters) - {"q", "k", "v"}
    assert tried == accepted
    tried |= {name for change, _, _ in PACKS for name in change}
    assert tried == set(inspect.signature(flash_attn_varlen_func).parameters)


def test_the_order_of_flash_attention_3_is_noticed():
    with pytest.raises(TypeError, match="FlashAttention-3 has softmax_scale in this position"):
        flash_attn_func(*good().values(), 0.25, True)
    with pytest.raises(TypeError, match="FlashAttention-3 has seqused_q in this position"):
        flash_attn_varlen_func(*good_pack().values(), i32(4, 5), i32(4, 8))


def test_schedule_errors_read_like_the_schedule_modules():
    with pytest.raises(ValueError) as raised:
        schedule.resolve("shift", causal=True)
    assert str(raised.value) == schedules(True) + "'shift'"
    with pytest.raises(ValueError) as raised:
        schedule.resolve("shift", causal=False, attention_chunk=3)
    assert str(raised.value) == WINDOW_SCHEDULES + "'shift'"

"""What the functions of dash_attn.compat do not take, and which hints they take."""

import pytest
import torch
from compat_support import dense, packed

from dash_attn.compat import flash_attn_2, flash_attn_3


def t(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


Q, K, V, DOUT = dense(5, 7)
FORWARD_2 = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size_left": -1, "window_size_right": -1,
    "softcap": 0.0, "alibi_slopes": None, "return_softmax": False,
}  # fmt: skip


def forward_2(**change):
    return flash_attn_2._flash_attn_forward(**{"q": Q, "k": K, "v": V} | FORWARD_2 | change)


def varlen_2(**change):
    q, k, v, _, cu_seqlens_q, cu_seqlens_k = packed()
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    arguments = tensors | {"max_seqlen_q": 25, "max_seqlen_k": 12} | FORWARD_2 | change
    return flash_attn_2._flash_attn_varlen_forward(**arguments)


def backward_2(**change):
    out, lse, *_ = forward_2()
    tensors = {"dout": DOUT, "q": Q, "k": K, "v": V, "out": out, "softmax_lse": lse, "dq": None, "dk": None, "dv": None}
    options = {name: value for name, value in FORWARD_2.items() if name != "return_softmax"} | {"deterministic": True}
    return flash_attn_2._flash_attn_backward(**tensors | options | change)


def forward_3(**change):
    return flash_attn_3._flash_attn_forward(**{"q": Q, "k": K, "v": V} | change)


def backward_3(**change):
    out, lse, *_ = forward_3()
    tensors = {"dout": DOUT, "q": Q, "k": K, "v": V, "out": out, "softmax_lse": lse}
    return flash_attn_3._flash_attn_backward(**tensors | change)


def func_3(**change):
    return flash_attn_3.flash_attn_func(**{"q": Q, "k": K, "v": V} | change)


def varlen_func_3(**change):
    q, k, v, _, cu_seqlens_q, cu_seqlens_k = packed()
    return flash_attn_3.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, 25, 12, **change)


def kvcache_3(**change):
    return flash_attn_3.flash_attn_with_kvcache(**{"q": Q, "k_cache": K, "v_cache": V} | change)


NO_DROPOUT = "dropout_p must be 0.0 (this function has no dropout; dash_attn.flash_attn_func has it), got 0.1"
NO_FP8 = "{} must be None (fp8 is not supported), got a tensor of shape (2, 2)"
NO_QV = "qv must be None (a second query-value product is not supported), got a tensor of shape (2, 5, 4, 32)"
USED = {"seqused_k": torch.tensor([7, 3], dtype=torch.int32)}
SEQUED = {"sequed_k": USED["seqused_k"]}
HALVES = t(3, 7, 2, 32)
REFUSED = [
    (forward_2, {"dropout_p": 0.1}, NotImplementedError, NO_DROPOUT),
    (varlen_2, {"dropout_p": 0.1}, NotImplementedError, NO_DROPOUT),
    (backward_2, {"dropout_p": 0.1}, NotImplementedError, NO_DROPOUT),
    (func_3, {"dropout_p": 0.1}, NotImplementedError, NO_DROPOUT),
    (varlen_func_3, {"dropout_p": 0.1}, NotImplementedError, NO_DROPOUT),
    (varlen_2, {"leftpad_k": t(4)}, NotImplementedError,
     "leftpad_k must be None (padding on the left is not supported), got a tensor of shape (4,)"),
    (func_3, {"qv": t(2, 5, 4, 32)}, NotImplementedError, NO_QV),
    (forward_3, {"qv": t(2, 5, 4, 32)}, NotImplementedError, NO_QV),
    (kvcache_3, {"qv": t(2, 5, 4, 32)}, NotImplementedError, NO_QV),
    (forward_3, {"q_descale": t(2, 2)}, NotImplementedError, NO_FP8.format("q_descale")),
    (kvcache_3, {"k_descale": t(2, 2)}, NotImplementedError, NO_FP8.format("k_descale")),
    (func_3, {"v_descale": t(2, 2)}, NotImplementedError, NO_FP8.format("v_descale")),
    (forward_3, {"page_table": t(2, 1), "cu_seqlens_k": t(3)}, ValueError,
     "cu_seqlens_k must be None with a cache (page_table, kv_batch_idx, leftpad_k or k_new)"),
    (forward_3, {"out_": t(2, 5, 4, 16)}, ValueError,
     "out_ must have shape and dtype (2, 5, 4, 32) of torch.bfloat16, got (2, 5, 4, 16) of torch.bfloat16"),
    (forward_3, {"seqused_k": t(2, dtype=torch.int32), "q": t(5, 4, 32)}, ValueError,
     "q must have shape (batch, seqlen, heads, head_dim) without cu_seqlens_q, got (5, 4, 32)"),
    (forward_3, {"num_splits": 1.5}, TypeError, "num_splits must be an int (it is ignored), got 1.5"),
    (forward_3, {"scheduler_metadata": 3}, TypeError, "scheduler_metadata must be a torch.Tensor, got 3"),
    (forward_3, {"max_seqlen_q": -1}, ValueError,
     "max_seqlen_q must be an int of at least 0 or an integer tensor of shape (), got -1"),
    (forward_2, {"softmax_scale": "1"}, TypeError, "softmax_scale must be a finite number or None, got '1'"),
    (forward_2, {"causal": 2}, TypeError, "causal must be a bool, got 2"),
    (forward_2, {"return_softmax": "yes"}, TypeError, "return_softmax must be a bool, got 'yes'"),
    (forward_2, {"window_size_left": 1.5}, TypeError,
     "window_size must be (left, right), each an int or None, got (1.5, -1)"),
    (forward_2, {"q": [1.0]}, TypeError, "q must be a torch.Tensor, got [1.0]"),
    (backward_2, {"deterministic": "yes"}, TypeError, "deterministic must be a bool, got 'yes'"),
    (backward_2, {"dq": 3}, TypeError, "dq must be a torch.Tensor, got 3"),
    (backward_2, {"dq": t(2, 5, 4, 16)}, ValueError,
     "dq must have the shape of q, (2, 5, 4, 32), got (2, 5, 4, 16)"),
    (backward_3, {"dk": t(2, 7, 2, 32, dtype=torch.float16)}, TypeError,
     "dk must have the dtype of k, torch.bfloat16, got torch.float16"),
    (backward_3, {"softmax_lse": t(2, 4, 6, dtype=torch.float32)}, ValueError,
     "softmax_lse must have shape (batch, heads, seqlen_q) = (2, 4, 5), got (2, 4, 6)"),
    (forward_3, USED | {"v": None}, TypeError, "v must be a torch.Tensor, got None (NoneType)"),
    (forward_3, USED | {"v": t(7, 2, 32)}, ValueError,
     "v must have shape (batch, seqlen, heads, head_dim) without cu_seqlens_k, got (7, 2, 32)"),
    (forward_3, USED | {"v": t(1, 14, 2, 32)}, ValueError,
     "v must have the shape of k except for the head_dim, (2, 7, 2, 32), got (1, 14, 2, 32)"),
    (forward_3, USED | {"q": t(3, 5, 4, 32)}, ValueError, "k must have the batch size of q, got (2, 7, 2, 32)"),
    (forward_3, {"q": t(9, 4, 32), "cu_seqlens_q": t(4, dtype=torch.int32)}, ValueError,
     "k must have the batch size of cu_seqlens_q of shape (4,), got (2, 7, 2, 32)"),
    (backward_3, SEQUED | {"dq": t(2, 4, 5, 32)}, ValueError,
     "dq must have the shape of q, (2, 5, 4, 32), got (2, 4, 5, 32)"),
    (backward_3, SEQUED | {"dv": t(2, 7, 2, 32, dtype=torch.float32)}, TypeError,
     "dv must have the dtype of v, torch.bfloat16, got torch.float32"),
    (backward_3, SEQUED | {"dk": K}, ValueError, "dk must not share memory with k"),
    (backward_3, SEQUED | dict.fromkeys(("dk", "dv"), t(2, 7, 2, 32)), ValueError,
     "dk must not share memory with dv"),
    (backward_3, SEQUED | dict(zip(("dk", "dv"), (HALVES[0:2], HALVES[1:3]))), ValueError,
     "dk must not share memory with dv"),
    (backward_3, SEQUED | {"dk": t(1, 7, 2, 32).expand(2, -1, -1, -1)}, ValueError,
     "dk must have one memory location per element, got strides (0, 64, 32, 1)"),
    (backward_3, SEQUED | {"dout": t(2, 5, 4, 16)}, ValueError,
     "dout must have the shape of q with the head_dim of v, (2, 5, 4, 32), got (2, 5, 4, 16)"),
    (backward_3, SEQUED | {"out": t(10, 4, 32)}, ValueError,
     "out must have the shape of q with the head_dim of v, (2, 5, 4, 32), got (10, 4, 32)"),
    (backward_3, SEQUED | {"softmax_lse": t(40, dtype=torch.float32)}, ValueError,
     "softmax_lse must have shape (batch, heads, seqlen_q) = (2, 4, 5), got (40,)"),
    (backward_3, SEQUED | {"softmax_lse": None}, TypeError, "softmax_lse must be a torch.Tensor, got None (NoneType)"),
    (backward_3, {"deterministic": 2}, TypeError, "deterministic must be a bool, got 2"),
]  # fmt: skip


@pytest.mark.parametrize("function, change, error, message", REFUSED, ids=lambda x: getattr(x, "__name__", None))
def test_refused(function, change, error, message):
    with pytest.raises(error) as raised:
        function(**change)
    assert str(raised.value).splitlines()[0] == message


@pytest.mark.parametrize("function, hints", [
    (forward_2, {"return_softmax": True}), (forward_2, {"return_softmax": None}), (forward_2, {"dropout_p": None}),
    (forward_2, {"window_size_left": None, "window_size_right": None}), (forward_2, {"causal": 0}),
    (varlen_2, {"zero_tensors": True}), (varlen_2, {"max_seqlen_q": torch.tensor(3)}),
    (forward_3, {"num_splits": 0}), (forward_3, {"num_splits": 8}), (forward_3, {"pack_gqa": True}),
    (forward_3, {"scheduler_metadata": t(3, dtype=torch.int32)}), (forward_3, {"sm_margin": 2}),
    (func_3, {"num_splits": 8, "pack_gqa": False, "deterministic": None, "return_attn_probs": False}),
    (kvcache_3, {"num_splits": 8, "pack_gqa": True, "sm_margin": 1, "max_seqlen_q": 5}),
])  # fmt: skip
def test_hints_change_nothing(function, hints):
    results, expected = function(**hints), function()
    if isinstance(results, torch.Tensor):
        results, expected = (results,), (expected,)
    assert len(results) == len(expected) and all(map(torch.equal, results, expected))


@pytest.mark.parametrize("hints", [{"deterministic": False}, {"deterministic": None}, {"rng_state": t(2)}], ids=str)
def test_hints_of_the_backward_change_nothing(hints):
    gradients = []
    for change in (hints, {}):
        gradients.append([torch.full_like(x, torch.nan) for x in (Q, K, V)])
        backward_2(**change, **dict(zip(("dq", "dk", "dv"), gradients[-1])))
    assert all(map(torch.equal, *gradients))

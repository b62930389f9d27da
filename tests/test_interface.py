"""flash_attn_func and its packed forms on CPU tensors: arguments, gradients, packing, layouts and autograd."""

import inspect
import itertools
import typing

import numpy as np
import pytest
import torch
from float64_reference import attention_float64, error_limits, relative_error, visible_keys
from interface_support import (
    FUNCTIONS,
    GRADIENTS,
    PACK,
    VARLEN_FUNCTIONS,
    assert_same_bits,
    inputs_of,
    kernel_calls,
    out_and_gradients,
    qkv_tensors,
    randn,
)
from products import pairwise, spread

import dash_attn
from dash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.schedule import POLICIES, fitting, policy_number, resolve

OUTPUTS = ("out", "softmax_lse")
# FlashAttention-2's arguments after the tensors, then FlashAttention-3's that it lacks, then the names of a sink.
FLASH_ATTENTION_2 = [
    ("dropout_p", 0.0), ("softmax_scale", None), ("causal", False), ("window_size", (-1, -1)), ("softcap", 0.0),
    ("alibi_slopes", None), ("deterministic", False), ("return_attn_probs", False),
]  # fmt: skip
FLASH_ATTENTION_3 = {
    "qv": None, "q_descale": None, "k_descale": None, "v_descale": None, "attention_chunk": 0, "num_splits": 1,
    "pack_gqa": None, "sm_margin": 0,
}  # fmt: skip
SINK = {"learnable_sink": None, "s_aux": None}


@pytest.mark.parametrize("function", [*FUNCTIONS, *VARLEN_FUNCTIONS], ids=lambda f: f.__name__)
def test_signature(function):
    tensors, extra = (FUNCTIONS | VARLEN_FUNCTIONS)[function]
    parameters = inspect.signature(function).parameters
    positional = [(p.name, p.default) for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    paged = [("block_table", None)] if function is flash_attn_varlen_func else []
    assert positional == [(name, inspect.Parameter.empty) for name in tensors] + FLASH_ATTENTION_2 + paged
    own = {"schedule": "auto", "dropout_bits": None, "startend_row_indices": None, "return_max_logits": False}
    assert keywords == {**SINK, **FLASH_ATTENTION_3, **extra, **own}
    assert len(parameters) == len(positional) + len(keywords)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_defaults_may_be_given(function):
    inputs = inputs_of(function)
    expected = function(*inputs)
    positional = function(*inputs, 0, 8**-0.5, False, [-1, -1], 0, None, True, False, **FLASH_ATTENTION_3, **SINK)
    assert torch.equal(positional, expected)


CHANGES = [
    {"dropout_p": None}, {"dropout_p": np.float32(0)}, {"softcap": None}, {"softcap": 0}, {"softcap": -1.0},
    {"softcap": -np.inf}, {"attention_chunk": None}, {"num_splits": 0}, {"num_splits": np.int64(1)}, {"num_splits": 4},
    {"num_splits": -1},
    {"pack_gqa": False}, {"pack_gqa": True}, {"pack_gqa": np.True_},
    {"deterministic": None}, {"deterministic": 1}, {"deterministic": np.True_}, {"return_attn_probs": np.False_},
    {"window_size": (None, None)}, {"window_size": (-1, None)}, {"window_size": [-9, -2]},
    {"window_size": (2**30, 2**70)}, {"window_size": (np.int64(-1), np.int64(-1))}, {"attention_chunk": 2**70},
    {"sm_margin": np.int64(3)}, {"softmax_scale": 8**-0.5}, {"softmax_scale": np.float64(8**-0.5)},
]  # fmt: skip


@pytest.mark.parametrize(
    "change, function, causal",
    spread(itertools.product(CHANGES, FUNCTIONS), [False, True]),
    ids=lambda x: x.__name__ if callable(x) else str(x),
)
def test_arguments_that_change_nothing_are_accepted(change, function, causal):
    inputs = inputs_of(function)
    actual = function(*inputs, causal=causal, **change)
    assert torch.equal(actual, function(*inputs, causal=causal))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("arguments", [
    {"causal": 1}, {"causal": np.True_}, {"causal": np.int32(1)}, {"causal": True, "window_size": (-1, 0)},
    {"window_size": (-1, 0)}, {"window_size": (None, 0)}, {"window_size": [2**31, np.int64(0)]},
    {"causal": True, "window_size": (-1, 3)}, {"causal": True, "window_size": (2**40, -1), "attention_chunk": 2**40},
], ids=str)  # fmt: skip
def test_ways_to_ask_for_the_causal_mask(function, arguments):
    inputs = inputs_of(function)
    actual = function(*inputs, **arguments)
    assert torch.equal(actual, function(*inputs, causal=True)) and not torch.equal(actual, function(*inputs))


@pytest.mark.parametrize("causal", [0, np.False_])
def test_flags_that_are_false(causal):
    inputs = inputs_of(flash_attn_func)
    assert torch.equal(flash_attn_func(*inputs, causal=causal), flash_attn_func(*inputs))


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("schedule", POLICIES)
def test_arguments_reach_the_kernels(function, schedule):
    causal = schedule in fitting(causal=True)
    inputs = inputs_of(function)
    with kernel_calls() as calls:
        out = function(*inputs, softmax_scale=0.3, causal=causal, sm_margin=3, schedule=schedule)
        torch.autograd.grad(out.float().sum(), inputs)
    (forward, forward_arguments), (backward, backward_arguments) = calls
    assert (forward, backward) == ("forward", "backward")
    nothing = dict.fromkeys((*PACK, "sinks", "alibi_slopes"))
    expected = nothing | {"softmax_scale": 0.3, "softcap": 0.0, "causal": causal, "sm_margin": 3}
    expected |= {"window_left": -1, "window_right": -1, "attention_chunk": 0}
    assert {name: x for name, x in forward_arguments.items() if name not in ("q", "k", "v", *OUTPUTS)} == expected
    expected |= {"dsoftmax_lse": None, "dsinks": None, "schedule": policy_number(schedule)}
    tensors = ("dout", "q", "k", "v", *OUTPUTS, *GRADIENTS)
    assert {name: x for name, x in backward_arguments.items() if name not in tensors} == expected


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(9, 9), (300, 700)])
def test_auto_looks_neither_at_the_other_heads_nor_at_the_batch(lengths, causal):
    """Tensor parallelism divides the heads among GPUs, and must not change the order of a head's sums."""
    policies = set()
    for batch, kv_heads in ((1, 1), (1, 2), (1, 16), (7, 2)):
        *inputs, dout = qkv_tensors(*lengths, 2 * kv_heads, kv_heads, 8, batch)
        with kernel_calls() as calls:
            out_and_gradients(flash_attn_func, inputs, dout, causal=causal)
        policies.add(calls[-1][1]["schedule"])
    assert policies == {policy_number(resolve("auto", causal=causal, head_dim=8))}


@pytest.mark.parametrize("function", [*FUNCTIONS, *VARLEN_FUNCTIONS], ids=lambda f: f.__name__)
def test_defaults_are_not_looked_at(function, monkeypatch):
    """A call that asks for nothing special pays for no check of it: it takes 8 us of the host, of which one is much."""

    def unexpected(*arguments, **keywords):
        raise AssertionError("checked what was left at its default")

    seldom = "reject_unsupported", "as_window", "as_attention_chunk", "as_flag", "as_sm_margin", "check_max_seqlen"
    for name in (*seldom, "as_scores", "as_number", "check_schedule"):
        monkeypatch.setattr(dash_attn.checks, name, unexpected)
    if function in FUNCTIONS:
        arguments = inputs_of(function)
    else:
        offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
        given = {"cu_seqlens": offsets, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        given |= {"max_seqlen": 5, "max_seqlen_q": 5, "max_seqlen_k": 5, "q": randn(9, 2, 8), "k": randn(9, 2, 8)}
        given |= {"v": randn(9, 2, 8), "kv": randn(9, 2, 2, 8), "qkv": randn(9, 3, 2, 8)}
        arguments = [given[name] for name in VARLEN_FUNCTIONS[function][0]]
    function(*arguments, causal=True, schedule="spt", softmax_scale=0.3)


def test_exports():
    functions = {f.__name__ for f in (*FUNCTIONS, *VARLEN_FUNCTIONS, flash_attn_with_kvcache)}
    assert functions == set(dash_attn.__all__) and all(hasattr(dash_attn, name) for name in functions)


@pytest.mark.parametrize("function", [*FUNCTIONS, *VARLEN_FUNCTIONS, flash_attn_with_kvcache], ids=lambda f: f.__name__)
def test_annotated(function):
    hints = typing.get_type_hints(function)
    assert set(hints) == {*inspect.signature(function).parameters, "return"}


def assert_accurate(actual, inputs, dout, **formula):
    """Of out, dq, dk and dv of bf16 or fp16 inputs."""
    with torch.no_grad():
        truth = attention_float64(*inputs, dout, **formula)
    limits = error_limits(truth, *inputs, dout, actual[0].detach(), rounded_factors=False, **formula)
    for (name, limit), x in zip(limits.items(), actual, strict=True):
        error = (x.detach().double() - getattr(truth, name)).norm()
        assert error <= limit, f"{name}: off by {error:.3e} in norm, allowed {limit:.3e}"


@pytest.mark.parametrize(
    "lengths, heads, head_dim, causal, dtype",
    pairwise(
        [(130, 130), (65, 200), (1, 127)],
        [(3, 3), (4, 2), (4, 1)],
        [8, 64, 100, 128],
        [False, True],
        [torch.bfloat16, torch.float16],
    ),
    ids=str,
)
def test_accuracy(lengths, heads, head_dim, causal, dtype):
    *inputs, dout = qkv_tensors(*lengths, *heads, head_dim, batch=1, dtype=dtype)
    actual = out_and_gradients(flash_attn_func, inputs, dout, causal=causal)
    assert all(x.dtype == dtype for x in actual)
    assert_accurate(actual, inputs, dout, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(200, 65), (127, 1)])
def test_more_queries_than_keys(seqlen_q, seqlen_k, causal):
    """Under the causal mask the first queries see no key: output 0, log-sum-exp +inf, gradient 0."""
    *inputs, dout = qkv_tensors(seqlen_q, seqlen_k)
    out, lse, dropped = flash_attn_func(*inputs, causal=causal, return_attn_probs=True)
    gradients = torch.autograd.grad(out, inputs, dout)
    with torch.no_grad():
        truth = attention_float64(*inputs, causal=causal)
    blind = ~visible_keys(seqlen_q, seqlen_k, causal).any(dim=1)
    assert blind.sum() == (seqlen_q - seqlen_k if causal else 0)
    assert (out[:, blind] == 0).all() and (lse[:, :, blind] == torch.inf).all()
    assert (gradients[0][:, blind] == 0).all()
    torch.testing.assert_close(lse, truth.softmax_lse.float(), rtol=1e-5, atol=1e-5)
    assert dropped.shape == (0,)
    # With one key, the true dq and dk are 0: error_limits bounds what fp32 leaves of them.
    assert_accurate((out, *gradients), inputs, dout, causal=causal)


@pytest.mark.parametrize("softmax_scale", [None, 1, 0.05, -0.3, 0.0])
def test_softmax_scale(softmax_scale):
    *inputs, dout = qkv_tensors(40, 50)
    actual = out_and_gradients(flash_attn_func, inputs, dout, softmax_scale=softmax_scale, causal=True)
    assert_accurate(actual, inputs, dout, softmax_scale=softmax_scale, causal=True)


def test_return_attn_probs():
    *inputs, dout = qkv_tensors(40, 50)
    out, lse, dropped = flash_attn_func(*inputs, return_attn_probs=True)
    assert torch.equal(out, flash_attn_func(*inputs))
    assert lse.shape == (2, 4, 40) and lse.dtype == torch.float32 and lse.requires_grad
    # As FlashAttention-2 without dropout.
    assert dropped.shape == (0,) and dropped.dtype == out.dtype and dropped.device == out.device


@pytest.mark.parametrize("schedule", ["auto", *POLICIES])
@pytest.mark.parametrize("causal", [False, True])
def test_same_bits_every_time(schedule, causal):
    if schedule not in ("auto", *fitting(causal=causal)):
        pytest.skip("the policy is not defined for this mask")
    *inputs, dout = qkv_tensors(200, 300, head_dim=64)
    first = out_and_gradients(flash_attn_func, inputs, dout, causal=causal, schedule=schedule)
    for deterministic in (False, True):
        again = out_and_gradients(
            flash_attn_func, inputs, dout, causal=causal, schedule=schedule, deterministic=deterministic, sm_margin=5
        )
        assert_same_bits(again, first)


def test_schedule_reaches_the_sums():
    *inputs, dout = qkv_tensors(700, 700, heads=1, kv_heads=1, head_dim=128, batch=1, dtype=torch.float16)
    descending, spt = (
        out_and_gradients(flash_attn_func, inputs, dout, schedule=schedule) for schedule in ("descending", "spt")
    )
    assert_same_bits(descending[:1], spt[:1])
    assert not any(map(torch.equal, descending[1:], spt[1:]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 20])
def test_packed_equals_unpacked(head_dim, causal):
    q, k, v, dout = qkv_tensors(60, 60, heads=2, kv_heads=2, head_dim=head_dim)
    out, dq, dk, dv = out_and_gradients(flash_attn_func, (q, k, v), dout, causal=causal)

    kv = torch.stack((k, v), dim=2).detach().requires_grad_()
    actual = out_and_gradients(dash_attn.flash_attn_kvpacked_func, (q, kv), dout, causal=causal)
    assert_same_bits(actual, (out, dq, torch.stack((dk, dv), dim=2)))

    qkv = torch.stack((q, k, v), dim=2).detach().requires_grad_()
    actual = out_and_gradients(dash_attn.flash_attn_qkvpacked_func, (qkv,), dout, causal=causal)
    assert_same_bits(actual, (out, torch.stack((dq, dk, dv), dim=2)))


def test_packed_by_heads_equals_unpacked():
    q, k, v, dout = qkv_tensors(60, 60, heads=6, kv_heads=2)
    out, *gradients = out_and_gradients(flash_attn_func, (q, k, v), dout)
    qkv = torch.cat((q, k, v), dim=2).detach().requires_grad_()
    actual = out_and_gradients(dash_attn.flash_attn_qkvpacked_func, (qkv,), dout, num_heads_q=6)
    assert_same_bits(actual, (out, torch.cat(gradients, dim=2)))


def test_kvpacked_with_grouped_heads_and_unequal_lengths():
    q, k, v, dout = qkv_tensors(30, 70, heads=6, kv_heads=3)
    out, dq, dk, dv = out_and_gradients(flash_attn_func, (q, k, v), dout, causal=True)
    kv = torch.stack((k, v), dim=2).detach().requires_grad_()
    actual = out_and_gradients(dash_attn.flash_attn_kvpacked_func, (q, kv), dout, causal=True)
    assert_same_bits(actual, (out, dq, torch.stack((dk, dv), dim=2)))


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_packed_gradients_are_written_into_one_tensor():
    qkv = randn(2, 30, 3, 4, 16)
    with kernel_calls() as calls:
        (gradient,) = torch.autograd.grad(dash_attn.flash_attn_qkvpacked_func(qkv).float().square().sum(), qkv)
    _, arguments = calls[-1]
    assert [arguments[name].data_ptr() for name in GRADIENTS] == [g.data_ptr() for g in gradient.unbind(2)]


def layouts(tensor):
    """The same values in other memory layouts."""
    yield "transposed", tensor.detach().transpose(1, 2).contiguous().transpose(1, 2)
    yield "last dimension not contiguous", tensor.detach().transpose(1, 3).contiguous().transpose(1, 3)
    wide = tensor.new_zeros(*tensor.shape[:3], tensor.shape[3] + 5)
    wide[..., 3:-2] = tensor.detach()
    yield "base and strides not aligned", wide[..., 3:-2]
    yield "slice of a stack", torch.stack((tensor.detach(),) * 2, dim=1)[:, 1]


def test_strided_inputs():
    *inputs, dout = qkv_tensors(40, 50)
    expected = out_and_gradients(flash_attn_func, inputs, dout, causal=True)
    for relaid in zip(*map(list, map(layouts, (*inputs, dout)))):
        *relaid_inputs, relaid_dout = (tensor for _, tensor in relaid)
        for tensor in relaid_inputs:
            tensor.requires_grad_()
        actual = out_and_gradients(flash_attn_func, relaid_inputs, relaid_dout, causal=True)
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a, e), relaid[0][0]


def test_expanded_output_gradient():
    *inputs, _ = qkv_tensors(40, 50)
    (actual,) = torch.autograd.grad(flash_attn_func(*inputs).sum(), inputs[0])
    (expected,) = torch.autograd.grad(flash_attn_func(*inputs), inputs[0], torch.ones_like(inputs[0]))
    assert torch.equal(actual, expected)


def test_gradients_only_where_needed():
    q, k, v, dout = qkv_tensors(40, 50)
    expected = out_and_gradients(flash_attn_func, (q, k, v), dout)
    out = flash_attn_func(q.detach(), k, v.detach())
    out.backward(dout)
    assert torch.equal(k.grad, expected[2]) and q.grad is None and v.grad is None
    assert not flash_attn_func(q.detach(), k.detach(), v.detach()).requires_grad
    with torch.no_grad():
        assert not flash_attn_func(q, k, v).requires_grad


def test_inputs_of_one_tensor():
    """q is k is v: the three gradients add up."""
    x, _, _, dout = qkv_tensors(40, 40, heads=2, kv_heads=2)
    (actual,) = torch.autograd.grad(flash_attn_func(x, x, x, causal=True), x, dout)
    parts = [x.detach().clone().requires_grad_() for _ in range(3)]
    expected = torch.autograd.grad(flash_attn_func(*parts, causal=True), parts, dout)
    assert relative_error(actual, sum(e.double() for e in expected)) < 5e-3


@pytest.mark.parametrize("function, inputs", [
    (flash_attn_func, [(1, 9, 2, 16)] * 3),
    (flash_attn_func, [(1, 9, 2, 12)] * 3),
    (dash_attn.flash_attn_kvpacked_func, [(1, 9, 2, 16), (1, 9, 2, 2, 16)]),
    (dash_attn.flash_attn_qkvpacked_func, [(1, 9, 3, 2, 16)]),
])  # fmt: skip
def test_second_differentiation_raises(function, inputs):
    inputs = [randn(*shape) for shape in inputs]
    gradients = torch.autograd.grad(function(*inputs).sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="^attention must be differentiated at most once"):
        torch.autograd.grad(gradients[0].float().square().sum(), inputs[0])


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty_sums(shape, causal):
    """No batch, no query or no key: outputs and gradients are sums over nothing, 0."""
    batch, seqlen_q, seqlen_k = shape
    *inputs, dout = qkv_tensors(seqlen_q, seqlen_k, batch=batch)
    out, lse, _ = flash_attn_func(*inputs, causal=causal, return_attn_probs=True)
    assert out.shape == inputs[0].shape and (out == 0).all()
    assert lse.shape == (batch, 4, seqlen_q) and (lse == torch.inf).all()
    for gradient, tensor in zip(torch.autograd.grad(out, inputs, dout), inputs):
        assert gradient.shape == tensor.shape and (gradient == 0).all()

"""flash_attn_func and its packed forms on CPU tensors: gradients, packing, layouts, autograd and torch.compile."""

import inspect

import pytest
import torch
from float64_reference import attention_float64, attention_in_dtype, relative_error, visible_keys

import dash_attn
from dash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from dash_attn.schedule import POLICIES, fitting

# FlashAttention-2's arguments after the tensors, then FlashAttention-3's that it lacks, then this package's.
FLASH_ATTENTION_2 = [
    ("dropout_p", 0.0), ("softmax_scale", None), ("causal", False), ("window_size", (-1, -1)), ("softcap", 0.0),
    ("alibi_slopes", None), ("deterministic", False), ("return_attn_probs", False),
]  # fmt: skip
FLASH_ATTENTION_3 = {
    "qv": None, "q_descale": None, "k_descale": None, "v_descale": None, "attention_chunk": 0, "num_splits": 1,
    "pack_gqa": None, "sm_margin": 0,
}  # fmt: skip
FUNCTIONS = {
    flash_attn_func: (["q", "k", "v"], {}),
    flash_attn_kvpacked_func: (["q", "kv"], {}),
    flash_attn_qkvpacked_func: (["qkv"], {"num_heads_q": None}),
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


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_signature(function):
    tensors, extra = FUNCTIONS[function]
    parameters = inspect.signature(function).parameters
    positional = [(p.name, p.default) for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert positional == [(name, inspect.Parameter.empty) for name in tensors] + FLASH_ATTENTION_2
    assert keywords == {**FLASH_ATTENTION_3, **extra, "schedule": "auto"}
    assert len(parameters) == len(positional) + len(keywords)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_defaults_may_be_given(function):
    inputs = {"q": randn(1, 9, 2, 8), "k": randn(1, 9, 2, 8), "v": randn(1, 9, 2, 8), "kv": randn(1, 9, 2, 2, 8),
              "qkv": randn(1, 9, 3, 2, 8)}  # fmt: skip
    inputs = [inputs[name] for name in FUNCTIONS[function][0]]
    expected = function(*inputs)
    positional = function(*inputs, 0, 8**-0.5, False, [-1, -1], 0, None, True, False, **FLASH_ATTENTION_3)
    assert torch.equal(positional, expected)


def test_exports():
    assert dash_attn.__version__ == "0.1.0"
    assert {f.__name__ for f in FUNCTIONS} == set(dash_attn.__all__)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [8, 64, 100, 128])
@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (4, 2), (4, 1)])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(130, 130), (65, 200), (1, 127)])
def test_no_less_accurate_than_pytorch(seqlen_q, seqlen_k, heads, kv_heads, head_dim, causal, dtype):
    *inputs, dout = qkv_tensors(seqlen_q, seqlen_k, heads, kv_heads, head_dim, batch=1, dtype=dtype)
    actual = out_and_gradients(flash_attn_func, inputs, dout, causal=causal)
    with torch.no_grad():
        truth = attention_float64(*inputs, dout, causal=causal)
    bar = attention_in_dtype(*inputs, dout, causal=causal)
    for name, a, t, b in zip(("out", "dq", "dk", "dv"), actual, (truth.out, *truth[2:]), (bar.out, *bar[2:])):
        assert a.dtype == dtype
        assert relative_error(a, t) <= relative_error(b, t), name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(200, 65), (127, 1)])
def test_more_queries_than_keys(seqlen_q, seqlen_k, causal):
    """Under the causal mask the first queries see no key: output 0, log-sum-exp +inf, gradient 0."""
    *inputs, dout = qkv_tensors(seqlen_q, seqlen_k)
    out, lse, dropped = flash_attn_func(*inputs, causal=causal, return_attn_probs=True)
    dq, dk, dv = torch.autograd.grad(out, inputs, dout)
    with torch.no_grad():
        truth = attention_float64(*inputs, dout, causal=causal)
    blind = ~visible_keys(seqlen_q, seqlen_k, causal).any(dim=1)
    assert blind.sum() == (seqlen_q - seqlen_k if causal else 0)
    assert (out[:, blind] == 0).all() and (lse[:, :, blind] == torch.inf).all() and (dq[:, blind] == 0).all()
    torch.testing.assert_close(lse, truth.softmax_lse.float(), rtol=1e-5, atol=1e-5)
    assert dropped is None
    assert relative_error(out, truth.out) < 5e-3 and relative_error(dv, truth.dv) < 5e-3
    if seqlen_k == 1:
        # The softmax of one score is constant: the true gradient is 0, and what is left is the rounding of `out`.
        assert truth.dq.abs().max() < 1e-12 and dq.abs().max() < 0.1 and dk.abs().max() < 1.0
    else:
        assert relative_error(dq, truth.dq) < 5e-3 and relative_error(dk, truth.dk) < 5e-3


@pytest.mark.parametrize("softmax_scale", [None, 1, 0.05, -0.3, 0.0])
def test_softmax_scale(softmax_scale):
    *inputs, dout = qkv_tensors(40, 50)
    actual = out_and_gradients(flash_attn_func, inputs, dout, softmax_scale=softmax_scale, causal=True)
    with torch.no_grad():
        truth = attention_float64(*inputs, dout, softmax_scale=softmax_scale, causal=True)
    for a, t in zip(actual, (truth.out, *truth[2:])):
        assert relative_error(a, t) < 5e-3


def test_return_attn_probs():
    *inputs, dout = qkv_tensors(40, 50)
    out, lse, dropped = flash_attn_func(*inputs, return_attn_probs=True)
    assert torch.equal(out, flash_attn_func(*inputs))
    assert lse.shape == (2, 4, 40) and lse.dtype == torch.float32 and not lse.requires_grad
    assert dropped is None


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
    ascending, spt = (
        out_and_gradients(flash_attn_func, inputs, dout, schedule=schedule) for schedule in ("ascending", "spt")
    )
    assert not torch.equal(ascending[1], spt[1])
    assert_same_bits((ascending[0], *ascending[2:]), (spt[0], *spt[2:]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 20])
def test_packed_equals_unpacked(head_dim, causal):
    q, k, v, dout = qkv_tensors(60, 60, heads=2, kv_heads=2, head_dim=head_dim)
    out, dq, dk, dv = out_and_gradients(flash_attn_func, (q, k, v), dout, causal=causal)

    kv = torch.stack((k, v), dim=2).detach().requires_grad_()
    actual = out_and_gradients(flash_attn_kvpacked_func, (q, kv), dout, causal=causal)
    assert_same_bits(actual, (out, dq, torch.stack((dk, dv), dim=2)))

    qkv = torch.stack((q, k, v), dim=2).detach().requires_grad_()
    actual = out_and_gradients(flash_attn_qkvpacked_func, (qkv,), dout, causal=causal)
    assert_same_bits(actual, (out, torch.stack((dq, dk, dv), dim=2)))


def test_packed_by_heads_equals_unpacked():
    q, k, v, dout = qkv_tensors(60, 60, heads=6, kv_heads=2)
    out, *gradients = out_and_gradients(flash_attn_func, (q, k, v), dout)
    qkv = torch.cat((q, k, v), dim=2).detach().requires_grad_()
    actual = out_and_gradients(flash_attn_qkvpacked_func, (qkv,), dout, num_heads_q=6)
    assert_same_bits(actual, (out, torch.cat(gradients, dim=2)))


def test_kvpacked_with_grouped_heads_and_unequal_lengths():
    q, k, v, dout = qkv_tensors(30, 70, heads=6, kv_heads=3)
    out, dq, dk, dv = out_and_gradients(flash_attn_func, (q, k, v), dout, causal=True)
    kv = torch.stack((k, v), dim=2).detach().requires_grad_()
    actual = out_and_gradients(flash_attn_kvpacked_func, (q, kv), dout, causal=True)
    assert_same_bits(actual, (out, dq, torch.stack((dk, dv), dim=2)))


def test_packed_gradients_are_written_into_one_tensor(monkeypatch):
    seen = {}
    backward = dash_attn.ops.backward

    def spy(dout, q, k, v, out, softmax_lse, dq, dk, dv, *rest):
        seen["gradients"] = (dq, dk, dv)
        return backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *rest)

    monkeypatch.setattr(dash_attn.ops, "backward", spy)
    qkv = randn(2, 30, 3, 4, 16)
    (gradient,) = torch.autograd.grad(flash_attn_qkvpacked_func(qkv).float().square().sum(), qkv)
    assert {g.untyped_storage().data_ptr() for g in seen["gradients"]} == {gradient.untyped_storage().data_ptr()}


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
    (flash_attn_kvpacked_func, [(1, 9, 2, 16), (1, 9, 2, 2, 16)]),
    (flash_attn_qkvpacked_func, [(1, 9, 3, 2, 16)]),
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


def test_under_autocast():
    *inputs, dout = qkv_tensors(20, 20)
    expected = out_and_gradients(flash_attn_func, inputs, dout)
    with torch.autocast("cpu", dtype=torch.float16):
        actual = out_and_gradients(flash_attn_func, inputs, dout)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("function, inputs, arguments", [
    (flash_attn_func, [(2, 33, 4, 20), (2, 50, 2, 20), (2, 50, 2, 20)], {"schedule": "spt"}),
    (flash_attn_kvpacked_func, [(2, 33, 4, 16), (2, 50, 2, 2, 16)], {}),
    (flash_attn_qkvpacked_func, [(2, 33, 3, 4, 16)], {"softmax_scale": 0.3}),
    (flash_attn_qkvpacked_func, [(2, 33, 8, 16)], {"num_heads_q": 4}),
])  # fmt: skip
def test_compiles_to_one_graph(function, inputs, arguments):
    torch._dynamo.reset()
    inputs = [randn(*shape) for shape in inputs]

    def layer(*tensors):
        return function(*(t * 0.5 for t in tensors), causal=True, **arguments) * 2

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    out = layer(*inputs)
    dout = torch.randn(out.shape).to(out.dtype)
    expected = (out, *torch.autograd.grad(out, inputs, dout))
    out = compiled(*inputs)
    assert_same_bits((out, *torch.autograd.grad(out, inputs, dout)), expected)

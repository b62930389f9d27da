"""What torch does with a function: compile, export, trace, checkpoint, autocast, inference mode, meta tensors."""

import pytest
import torch
from interface_support import FUNCTIONS, assert_same_bits, inputs_of, out_and_gradients, qkv_tensors, randn

from dash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func


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


@pytest.mark.parametrize("name, values", [("softmax_scale", (0.1, 0.2, -0.3, 1, 0.5)), ("sm_margin", (0, 4, 7, 1, 0))])
def test_compiles_with_arguments_that_change(name, values):
    torch._dynamo.reset()
    *inputs, dout = qkv_tensors(20, 30)

    def layer(value):
        return flash_attn_func(*inputs, causal=True, **{name: value})

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for value in values:
        actual, expected = compiled(value), layer(value)
        assert torch.equal(actual, expected)
        assert_same_bits(torch.autograd.grad(actual, inputs, dout), torch.autograd.grad(expected, inputs, dout))


def test_compiles_with_lengths_that_change():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flash_attn_func, backend=counter, fullgraph=True)
    for seqlen in (20, 31, 47, 60):
        *inputs, _ = qkv_tensors(seqlen, seqlen)
        assert torch.equal(compiled(*inputs, causal=True), flash_attn_func(*inputs, causal=True))
    assert counter.frame_count == 2


def test_exports_with_lengths_that_change():
    q, k, v, _ = qkv_tensors(20, 30)
    module = torch.nn.Module()
    module.forward = lambda q, k, v: flash_attn_func(q, k, v, causal=True)
    lengths = ({1: torch.export.Dim("seqlen_q")}, {1: torch.export.Dim("seqlen_k")}, {1: torch.export.Dim("seqlen_k")})
    exported = torch.export.export(module, (q, k, v), dynamic_shapes=lengths)
    others = qkv_tensors(33, 50)[:3]
    assert torch.equal(exported.module()(*others), flash_attn_func(*others, causal=True))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_meta_tensors(function):
    inputs = [t.detach().to("meta").requires_grad_() for t in inputs_of(function, head_dim=20)]
    out, lse, _ = function(*inputs, return_attn_probs=True)
    assert out.is_meta and out.shape == (1, 9, 2, 20) and out.dtype == torch.bfloat16
    assert lse.is_meta and lse.shape == (1, 2, 9) and lse.dtype == torch.float32
    for gradient, tensor in zip(torch.autograd.grad(out.sum(), inputs), inputs):
        assert gradient.is_meta and gradient.shape == tensor.shape


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    *inputs, dout = qkv_tensors(20, 30)
    expected = out_and_gradients(flash_attn_func, inputs, dout)
    out = torch.utils.checkpoint.checkpoint(flash_attn_func, *inputs, use_reentrant=reentrant)
    out.backward(dout)
    assert_same_bits((out, *(t.grad for t in inputs)), expected)


def test_selective_checkpoint_sees_the_forward():
    *inputs, dout = qkv_tensors(20, 30)
    seen = []

    def policy(context, op, *arguments, **keywords):
        seen.append(op)
        return torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE

    out = torch.utils.checkpoint.checkpoint(
        flash_attn_func, *inputs, use_reentrant=False,
        context_fn=lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(policy),
    )  # fmt: skip
    torch.autograd.grad(out, inputs, dout)
    assert torch.ops.dash_attn.forward.default in seen


def test_forward_mode_differentiation_raises():
    """It has no formula, and must not count the output as constant."""
    q, k, v, _ = (x.detach() for x in qkv_tensors(5, 5))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises((RuntimeError, NotImplementedError), match="jvp|forward AD|forward-mode"):
            flash_attn_func(dual, k, v)


def test_make_fx_sees_both_passes():
    *inputs, dout = qkv_tensors(20, 30)

    def step(*inputs):
        return torch.autograd.grad(flash_attn_func(*inputs), inputs, dout)

    graph = torch.fx.experimental.proxy_tensor.make_fx(step)(*inputs)
    called = {node.target for node in graph.graph.nodes}
    assert {torch.ops.dash_attn.forward.default, torch.ops.dash_attn.backward.default} <= called
    assert_same_bits(graph(*inputs), step(*inputs))


def test_under_inference_mode():
    inputs = qkv_tensors(20, 30, head_dim=20)[:3]
    expected = flash_attn_func(*inputs)
    with torch.inference_mode():
        assert torch.equal(flash_attn_func(*inputs), expected)


def test_graph_kept_and_freed():
    *inputs, dout = qkv_tensors(20, 30)
    out = flash_attn_func(*inputs)
    first = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    assert_same_bits(torch.autograd.grad(out, inputs, dout), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, inputs, dout)


def test_saved_tensors_are_guarded():
    *inputs, dout = qkv_tensors(20, 30)
    out = flash_attn_func(*inputs)
    out.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, inputs, dout)

"""What torch does with a function: compile, export, trace, checkpoint, autocast, inference mode, meta tensors."""

import pathlib
import subprocess
import sys

import pytest
import torch
from interface_support import (
    FUNCTIONS,
    assert_same_bits,
    inputs_of,
    kernel_calls,
    out_and_gradients,
    qkv_tensors,
    randn,
)
from pack_support import Pack, int32

import dash_attn
from dash_attn import flash_attn_func, flash_attn_qkvpacked_func


def test_under_autocast():
    *inputs, dout = qkv_tensors(20, 20)
    expected = out_and_gradients(flash_attn_func, inputs, dout)
    with torch.autocast("cpu", dtype=torch.float16):
        actual = out_and_gradients(flash_attn_func, inputs, dout)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("function, inputs, arguments", [
    (flash_attn_func, [(2, 33, 4, 20), (2, 50, 2, 20), (2, 50, 2, 20)], {"schedule": "spt"}),
    (dash_attn.flash_attn_kvpacked_func, [(2, 33, 4, 16), (2, 50, 2, 2, 16)], {}),
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


def test_selective_checkpoint_of_the_docs():
    """The policy of docs/usage.md: the forward runs once."""
    usage = pathlib.Path(__file__).parents[1] / "docs" / "usage.md"
    if not usage.is_file():
        pytest.skip("docs/ is not beside the tests")
    section = usage.read_text().partition("## Activation checkpointing")[2]
    snippet = section.partition("```python\n")[2].partition("```")[0]
    q, k, v, dout = qkv_tensors(20, 30)
    given = {"layer": lambda x: flash_attn_func(x, k, v, causal=True), "x": q}
    with kernel_calls() as calls:
        exec(snippet, given)
        actual = given["out"], *torch.autograd.grad(given["out"], (q, k, v), dout)
    assert [name for name, _ in calls] == ["forward", "backward"]
    assert_same_bits(actual, out_and_gradients(flash_attn_func, (q, k, v), dout, causal=True))


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("place", ["q", "k", "v", "alibi_slopes", "learnable_sink"])
@pytest.mark.parametrize("function", [flash_attn_func, dash_attn.flash_attn_with_kvcache], ids=lambda f: f.__name__)
def test_forward_mode_differentiation_raises(function, place, with_gradients):
    """It has no formula, and must not count the output as constant, not under torch.no_grad() either."""
    q, k, v, _ = (x.detach() for x in qkv_tensors(5, 5))
    inputs = {"q": q, "k": k, "v": v} | ({} if place in "qkv" else {place: torch.ones(q.shape[2])})
    with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(with_gradients):
        inputs[place] = torch.autograd.forward_ad.make_dual(inputs[place], torch.ones_like(inputs[place]))
        q, k, v = (inputs.pop(name) for name in "qkv")
        with pytest.raises(NotImplementedError, match="^attention has no derivative in forward mode"):
            function(q, k, v, **inputs)


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


def varlen_calls(pack, hint):
    """Each function of packs with its inputs, and all its other arguments by name."""
    cu_seqlens_q, cu_seqlens_k = pack.offsets()[:2]
    two = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": hint, "max_seqlen_k": hint}
    q, k, v = (x.detach().requires_grad_() for x in pack[:3])
    yield dash_attn.flash_attn_varlen_func, [q, k, v], {**two, **pack.used()}
    yield (
        dash_attn.flash_attn_varlen_kvpacked_func,
        [q, torch.stack((k, v), 1).detach().requires_grad_()],
        {**two, **pack.used()},
    )
    one = {"cu_seqlens": cu_seqlens_q, "max_seqlen": hint}
    yield dash_attn.flash_attn_varlen_qkvpacked_func, [torch.stack((q, k, v), 1).detach().requires_grad_()], one


def self_attention(lengths, head_dim=16):
    return Pack.of([(n, n) for n in lengths], tail=len(lengths), heads=2, kv_heads=2, head_dim=head_dim)


@pytest.mark.parametrize("form", range(3))
@pytest.mark.parametrize("as_tensor", [False, True])
def test_packs_compile_with_lengths_that_change(form, as_tensor):
    """Numbers of sequences, rows and hints; no lengths make another graph, none is read."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = None
    for lengths in ([5, 9, 20], [30, 2], [0, 7, 7, 16], [11, 3, 8, 1, 40]):
        pack = self_attention(lengths, head_dim=20)
        hint = torch.tensor(max(lengths)) if as_tensor else max(lengths)
        function, inputs, arguments = list(varlen_calls(pack, hint))[form]
        compiled = compiled or torch.compile(function, backend=counter, fullgraph=True)
        actual, expected = (f(*inputs, **arguments, causal=True, window_size=(6, -1)) for f in (compiled, function))
        assert torch.equal(actual, expected)
        gradients = [torch.autograd.grad(out, inputs, pack.dout) for out in (actual, expected)]
        assert_same_bits(*gradients)
    assert counter.frame_count == 2


def test_packs_export_with_lengths_that_change():
    module = torch.nn.Module()
    module.forward = lambda q, k, v, offsets: dash_attn.flash_attn_varlen_func(
        q, k, v, offsets, offsets, 99, 99, causal=True
    )
    rows, sequences = torch.export.Dim("rows"), torch.export.Dim("offsets")
    first, other = self_attention([5, 9, 20]), self_attention([30, 0, 2, 7])
    shapes = ({0: rows}, {0: rows}, {0: rows}, {0: sequences})
    exported = torch.export.export(module, (*first[:3], int32(first.offsets_q)), dynamic_shapes=shapes)
    arguments = (*other[:3], int32(other.offsets_q))
    assert torch.equal(exported.module()(*arguments), module(*arguments))


@pytest.mark.parametrize("form", range(3))
def test_meta_tensors_of_packs(form):
    function, inputs, arguments = list(varlen_calls(self_attention([5, 9], head_dim=20), 9))[form]
    inputs = [x.detach().to("meta").requires_grad_() for x in inputs]
    arguments = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    out, lse, _ = function(*inputs, **arguments, return_attn_probs=True)
    assert out.is_meta and out.shape == (16, 2, 20) and out.dtype == torch.bfloat16
    assert lse.is_meta and lse.shape == (2, 16) and lse.dtype == torch.float32
    for gradient, tensor in zip(torch.autograd.grad(out.sum(), inputs), inputs):
        assert gradient.is_meta and gradient.shape == tensor.shape


@pytest.mark.parametrize("form", range(3))
def test_checkpoint_and_traces_of_packs(form):
    pack = Pack.of([(20, 20), (9, 9)], used=[(3, 20), (9, 1)], heads=2, kv_heads=2)
    function, inputs, arguments = list(varlen_calls(pack, 20))[form]
    expected = out_and_gradients(function, inputs, pack.dout, **arguments)
    out = torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False, **arguments)
    assert_same_bits((out, *torch.autograd.grad(out, inputs, pack.dout)), expected)

    def step(*inputs):
        return torch.autograd.grad(function(*inputs, **arguments), inputs, pack.dout)

    graph = torch.fx.experimental.proxy_tensor.make_fx(step)(*inputs)
    called = {node.target for node in graph.graph.nodes}
    assert {torch.ops.dash_attn.forward.default, torch.ops.dash_attn.backward.default} <= called
    assert_same_bits(graph(*inputs), expected[1:])
    with torch.inference_mode():
        assert torch.equal(function(*inputs, **arguments), expected[0])


def test_compiled_autograd_keeps_windows_and_lengths():
    torch._dynamo.reset()
    pack = Pack.of([(20, 30), (9, 9)], used=[(3, 20), (9, 1)])
    function, inputs, arguments = next(varlen_calls(pack, 20))
    arguments |= {"window_size": (4, 2), "attention_chunk": 7}
    expected = out_and_gradients(function, inputs, pack.dout, **arguments)
    out = function(*inputs, **arguments)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out.backward(pack.dout)
    assert_same_bits((out, *(x.grad for x in inputs)), expected)


def test_import_leaves_the_compiler_out():
    """torch._dynamo takes a second to import, which every process would pay for."""
    code = "import sys, dash_attn; sys.exit('torch._dynamo' in sys.modules)"
    folder = pathlib.Path(dash_attn.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=folder).returncode == 0

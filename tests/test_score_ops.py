"""What torch does with scores: the ops' contracts and errors, compile, export, meta tensors, checkpoint."""

import pytest
import torch
from float64_reference import Scores
from interface_support import FUNCTIONS, assert_same_bits, inputs_of, qkv_tensors
from pack_support import int32
from score_support import dense, draw, results_of

import dash_attn  # noqa: F401  registers torch.ops.dash_attn
from dash_attn import flash_attn_func, flash_attn_varlen_func

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
ONE_GRAPH = {"backend": "aot_eager", "fullgraph": True}
FORMS = {
    "softcap": dict(softcap=2.0),
    "slopes": dict(alibi="heads"),
    "slopes of sequences, sinks": dict(alibi="batch", sinks=torch.float32),
    "softcap, sinks, log-sum-exp": dict(softcap=2.0, sinks=torch.float32, lse_gradient=True),
}
FORM = pytest.mark.parametrize("form", FORMS)
PACK = {
    "cu_seqlens_q": int32([0, 7, 7, 18]), "cu_seqlens_k": int32([1, 13, 20, 20]), "seqused_q": None,
    "seqused_k": int32([12, 3, 0]),
}  # fmt: skip


def op_arguments(form, is_pack, seqlen_k=30):
    """Of a forward, and what a backward takes beside them, by name."""
    q, k, v, dout = (x.detach() for x in qkv_tensors(20, seqlen_k, head_dim=16))
    drawn = draw(3 if is_pack else 2, 4, 20, **FORMS[form])
    scores = dict(sinks=drawn.sinks, alibi_slopes=drawn.alibi_slopes, softcap=drawn.softcap)
    pack = PACK if is_pack else dict.fromkeys(PACK)
    dlse = drawn.dsoftmax_lse
    if is_pack:
        q, k, v, dout = (x[0] for x in (q, k, v, dout))
        dlse = None if dlse is None else dlse[0]
    mask = dict(causal=True, window_left=9, window_right=-1, attention_chunk=0)
    forward = dict(q=q, k=k, v=v, **pack, softmax_scale=0.25, **mask, sm_margin=0, **scores)
    return forward, dict(dout=dout, dsoftmax_lse=dlse)


def backward_arguments(form, is_pack, **shape):
    forward, more = op_arguments(form, is_pack, **shape)
    out, lse = torch.ops.dash_attn.forward(**forward)
    gradients = {f"d{name}": torch.empty_like(forward[name]) for name in ("q", "k", "v")}
    dsinks = None if forward["sinks"] is None else torch.empty(4)
    return {**forward, **more, **gradients, "out": out, "softmax_lse": lse, "dsinks": dsinks, "schedule": "auto"}


LAST = ("dropout_bits", "rng_state", "dropout_p", "max_seqlen_q", "max_seqlen_k", "startend_row_indices")


def in_order(op, named):
    """All but the last ones, which have defaults and nothing to do with scores."""
    return tuple(named[argument.name] for argument in op._schema.arguments if argument.name not in LAST)


@pytest.mark.parametrize("seqlen_k", [30, 0])
@pytest.mark.parametrize("is_pack", [False, True])
@FORM
def test_opcheck(form, is_pack, seqlen_k):
    if is_pack and seqlen_k == 0:
        pytest.skip("the pack has keys")
    ops = torch.ops.dash_attn
    for op, named in (
        (ops.forward.default, op_arguments(form, is_pack, seqlen_k=seqlen_k)[0]),
        (ops.backward.default, backward_arguments(form, is_pack, seqlen_k=seqlen_k)),
    ):
        torch.library.opcheck(op, in_order(op, named))


@FORM
def test_opcheck_of_functions_with_a_derivative(form):
    forward, _ = op_arguments(form, True)
    named = {**forward, "schedule": "auto"}
    named |= {name: named[name].requires_grad_() for name in ("q", "k", "v")}
    if named["sinks"] is not None:
        named["sinks"] = named["sinks"].bfloat16().requires_grad_()
    op = torch.ops.dash_attn.attention.default
    torch.library.opcheck(op, in_order(op, named), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("change, message", [
    ({"sinks": torch.zeros(4).bfloat16()}, "sinks must be torch.float32, got torch.bfloat16"),
    ({"sinks": torch.zeros(5)}, "sinks must be of shape (heads,) = (4,), got (5,)"),
    ({"sinks": None}, "dsinks must be None where sinks is, got a tensor"),
    ({"softcap": -2.0}, "softcap must be a finite number of at least 0 or None, got -2"),
    ({"alibi_slopes": torch.zeros(3)},
     "alibi_slopes must have shape (heads,) = (4,) or (batch, heads) = (2, 4), got (3,)"),
    ({"dsinks": torch.zeros(4).half()}, "dsinks must be torch.float32, got torch.float16"),
    ({"dsinks": torch.zeros(3)}, "dsinks must be of shape (heads,) = (4,), got (3,)"),
    ({"dsinks": torch.zeros(8)[::2]}, "dsinks must be contiguous, got strides (2,)"),
    ({"dsoftmax_lse": torch.zeros(2, 20, 4)},
     "dsoftmax_lse must have shape (batch, heads, seqlen_q) = (2, 4, 20), got (2, 20, 4)"),
    ({"dsoftmax_lse": torch.zeros(2, 4, 20).double()}, "dsoftmax_lse must be torch.float32, got torch.float64"),
])  # fmt: skip
def test_errors_leave_the_gradients_alone(change, message):
    named = backward_arguments("softcap, sinks, log-sum-exp", False)
    written = [named[name].fill_(7.0) for name in ("dq", "dk", "dv", "dsinks")]
    if "alibi_slopes" in change:
        named["softcap"] = 0.0
    with pytest.raises((TypeError, ValueError)) as error:
        torch.ops.dash_attn.backward(**{**named, **change})
    assert str(error.value) == message
    assert all((x == 7).all() for x in written)


@pytest.mark.parametrize("written, other", [
    ("dsinks", "sinks"), ("dsinks", "softmax_lse"), ("dsinks", "dsoftmax_lse"), ("dq", "dsoftmax_lse"),
    ("dk", "sinks"), ("dv", "dsinks"),
])  # fmt: skip
def test_gradients_must_not_share_memory(written, other):
    named = backward_arguments("softcap, sinks, log-sum-exp", False)
    memory = torch.zeros(1 << 16)
    for name in (written, other):
        like = named[name]
        named[name] = memory.view(like.dtype)[: like.numel()].view(like.shape)
    with pytest.raises(ValueError, match=r"^d\w+ must not share memory with \w+$"):
        torch.ops.dash_attn.backward(**named)


def test_overwriting_what_is_saved_is_noticed():
    named = backward_arguments("softcap, sinks, log-sum-exp", False)
    product = torch.ones(4, requires_grad=True) * named["dsinks"]  # saves dsinks
    torch.ops.dash_attn.backward(**named)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@FORM
def test_compiles_to_one_graph(form, function):
    torch._dynamo.reset()
    inputs = inputs_of(function, seqlen=40)
    scores = draw(1, 2, 40, **FORMS[form])
    dout = torch.randn(1, 40, 2, 8).bfloat16()
    compiled = torch.compile(function, **ONE_GRAPH)
    expected, found = (results_of(f, inputs, dout, scores, causal=True) for f in (function, compiled))
    assert_same_bits(found.values(), expected.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_compiles_with_arguments_that_change(dtype):
    """Another softcap is another graph; the sink's gradient has its dtype."""
    torch._dynamo.reset()
    q, k, v, dout = (x.detach() for x in qkv_tensors(20, 30))
    compiled = torch.compile(flash_attn_func, **ONE_GRAPH)
    for softcap in (0.0, 1.5, 30, None):
        scores = draw(2, 4, 20, sinks=dtype)._replace(softcap=softcap)
        expected, found = (results_of(f, (q, k, v), dout, scores) for f in (flash_attn_func, compiled))
        assert found["dsinks"].dtype == dtype
        assert_same_bits(found.values(), expected.values())


def test_packs_compile_with_lengths_that_change():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flash_attn_varlen_func, backend=counter, fullgraph=True)
    for lengths in ([5, 9, 20], [30, 2], [0, 7, 7, 16]):
        offsets = int32([0, *torch.tensor(lengths).cumsum(0).tolist()])
        q, k, v, dout = (torch.randn(sum(lengths), 4, 8).bfloat16() for _ in range(4))
        scores = draw(len(lengths), 4, 1, alibi="batch", sinks=torch.float32)
        scores = scores._replace(dsoftmax_lse=torch.randn(4, sum(lengths)))

        def call(function, q, k, v, **more):
            return function(q, k, v, offsets, offsets, 30, 30, causal=True, **more)

        expected, found = (
            results_of(lambda *x, f=f, **more: call(f, *x, **more), (q, k, v), dout, scores)
            for f in (flash_attn_varlen_func, compiled)
        )
        assert_same_bits(found.values(), expected.values())
    assert counter.frame_count == 2


def test_an_unused_log_sum_exp_costs_a_graph_nothing():
    """Of a call that does not return it, no gradient of zeros is made."""
    q, k, v, dout = qkv_tensors(20, 30)

    def step(q, k, v):
        return torch.autograd.grad(flash_attn_func(q, k, v), (q, k, v), dout)

    graph = torch.fx.experimental.proxy_tensor.make_fx(step)(q, k, v)
    (backward,) = [node for node in graph.graph.nodes if node.target == torch.ops.dash_attn.backward.default]
    names = [argument.name for argument in backward.target._schema.arguments]
    given = dict(zip(names, backward.args)) | backward.kwargs
    assert [given.get(name) for name in ("sinks", "alibi_slopes", "dsoftmax_lse", "dsinks")] == [None] * 4


def test_meta_tensors():
    q, k, v = (x.detach().to("meta").requires_grad_() for x in qkv_tensors(20, 30, head_dim=20)[:3])
    sinks = torch.zeros(4, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out, lse, _ = flash_attn_func(q, k, v, s_aux=sinks, softcap=2.0, return_attn_probs=True)
    assert lse.is_meta and lse.shape == (2, 4, 20) and lse.requires_grad
    *_, dsinks = torch.autograd.grad((out.sum(), lse.sum()), (q, k, v, sinks))
    assert dsinks.is_meta and dsinks.shape == (4,) and dsinks.dtype == torch.bfloat16


@FORM
def test_compiled_autograd(form):
    torch._dynamo.reset()
    q, k, v, dout = (x.detach() for x in qkv_tensors(20, 30))
    scores = draw(2, 4, 20, **FORMS[form])
    expected = dense(q, k, v, dout, scores)
    leaves = [x.requires_grad_() for x in (q, k, v, *([] if scores.sinks is None else [scores.sinks]))]
    out, lse, _ = flash_attn_func(
        q, k, v, softcap=scores.softcap, alibi_slopes=scores.alibi_slopes, s_aux=scores.sinks, return_attn_probs=True
    )
    outputs, cotangents = [out], [dout]
    if scores.dsoftmax_lse is not None:
        outputs, cotangents = [out, lse], [dout, scores.dsoftmax_lse]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        torch.autograd.backward(outputs, cotangents)
    assert_same_bits([x.grad for x in leaves], list(expected.values())[2:])


def test_second_differentiation_raises():
    q, k, v, _ = qkv_tensors(20, 30)
    sinks = torch.zeros(4, requires_grad=True)
    for wanted in ([q], [sinks], [q, sinks]):
        out, lse, _ = flash_attn_func(q, k, v, s_aux=sinks, return_attn_probs=True)
        gradients = torch.autograd.grad(out.float().sum() + lse.sum(), wanted, create_graph=True)
        with pytest.raises(RuntimeError, match="^attention must be differentiated at most once"):
            torch.autograd.grad(gradients[-1].float().square().sum(), wanted)


def test_checkpoint():
    q, k, v, dout = qkv_tensors(20, 30)
    scores = Scores(sinks=torch.randn(4), softcap=3.0)
    expected = dense(*(x.detach() for x in (q, k, v, dout)), scores)
    sinks = scores.sinks.clone().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(flash_attn_func, q, k, v, softcap=3.0, s_aux=sinks, use_reentrant=False)
    found = torch.autograd.grad(out, (q, k, v, sinks), dout)
    assert_same_bits((out, *found), [x for name, x in expected.items() if name != "softmax_lse"])


def test_changing_slopes_before_the_backward_is_noticed():
    q, k, v, dout = qkv_tensors(20, 30)
    slopes = torch.rand(4)
    out = flash_attn_func(q, k, v, alibi_slopes=slopes)
    slopes.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)

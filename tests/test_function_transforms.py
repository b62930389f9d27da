"""torch.func's transforms, torch.vmap and is_grads_batched: the bits of torch.autograd.grad, one call at a time."""

import functools

import pytest
import torch
from interface_support import FUNCTIONS, assert_same_bits, randn
from pack_support import int32

from dash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.compat import flash_attn_2, flash_attn_3

COUNT = 3
# torch says so of every op without a rule of its own, whose loop is what is wanted.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def batches(function, head_dim=20):
    """`COUNT` inputs of a function, in a first dimension."""
    q, k, v = (randn(COUNT, 2, 9, 2, head_dim, seed=seed).detach() for seed in range(3))
    packed = {"q": q, "k": k, "v": v, "kv": torch.stack((k, v), dim=3), "qkv": torch.stack((q, k, v), dim=3)}
    return [packed[name] for name in FUNCTIONS[function][0]]


def cotangent(shape):
    """Uneven numbers, which may be made under any transform."""
    return torch.arange(torch.Size(shape).numel()).mul(0.7).sin().view(shape).to(torch.bfloat16)


def loss_of(function, **arguments):
    def loss(*inputs):
        out = function(*inputs, causal=True, **arguments)
        return (out * cotangent(out.shape)).float().sum()

    return loss


def gradients(loss, *inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(loss(*inputs), inputs)


def stacked(of_each):
    return [torch.stack(parts) for parts in zip(*of_each, strict=True)]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradients(function):
    inputs, loss = batches(function), loss_of(function)
    places = tuple(range(len(inputs)))
    expected = stacked(gradients(loss, *(x[i] for x in inputs)) for i in range(COUNT))
    grad = torch.func.grad(loss, places)
    assert_same_bits(grad(*(x[1] for x in inputs)), [x[1] for x in expected])
    assert_same_bits(torch.vmap(grad)(*inputs), expected)
    assert_same_bits(torch.func.grad(lambda *x: torch.vmap(loss)(*x).sum(), places)(*inputs), expected)
    in_last = torch.vmap(grad, in_dims=-1, out_dims=-1)(*(x.movedim(0, -1) for x in inputs))
    assert_same_bits(in_last, [x.movedim(0, -1) for x in expected])


def test_vmap_of_some_inputs():
    q, k, v = batches(flash_attn_func)
    loss = loss_of(flash_attn_func)
    actual = torch.vmap(torch.func.grad(loss, (0, 1, 2)), in_dims=(0, None, None))(q, k[0], v[0])
    assert_same_bits(actual, stacked(gradients(loss, q[i], k[0], v[0]) for i in range(COUNT)))
    outs = torch.vmap(flash_attn_func, in_dims=(None, 0, 0))(q[0], k, v)
    assert torch.equal(outs, torch.stack([flash_attn_func(q[0], k[i], v[i]) for i in range(COUNT)]))


def test_vmap_of_vmap():
    q, k, v = batches(flash_attn_func)
    loss = loss_of(flash_attn_func)
    of_queries = torch.vmap(torch.func.grad(loss), in_dims=(0, None, None))
    expected = [[gradients(loss, q[i], k[j], v[j])[0] for i in range(COUNT)] for j in range(COUNT)]
    actual = torch.vmap(of_queries, in_dims=(None, 0, 0))(q, k, v)
    assert torch.equal(actual, torch.stack([torch.stack(row) for row in expected]))


@pytest.mark.parametrize("function", [flash_attn_func, torch.func.grad(loss_of(flash_attn_func))])
def test_vmap_over_nothing(function):
    inputs = [x[:0] for x in batches(flash_attn_func)]
    with pytest.raises(ValueError, match="torch.vmap must add a dimension of at least 1 to .* dash_attn, got 0"):
        torch.vmap(function)(*inputs)


def test_packs_and_their_offsets():
    q, k, v = (x[:, 0] for x in batches(flash_attn_func))
    offsets = int32([[0, 4, 9], [1, 2, 8], [0, 9, 9]])

    def loss(q, k, v, offsets):
        out = flash_attn_varlen_func(q, k, v, offsets, offsets, 9, 9, causal=True, window_size=(3, 0))
        return (out * cotangent(out.shape)).float().sum()

    expected = stacked(gradients(lambda *x, i=i: loss(*x, offsets[i]), q[i], k[i], v[i]) for i in range(COUNT))
    assert_same_bits(torch.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, v, offsets), expected)


@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_log_sum_exps_and_sinks(of):
    q, k, v = batches(flash_attn_func)
    sinks = randn(COUNT, 2, seed=7).detach()

    def loss(q, k, v, sinks):
        out, lse, _ = flash_attn_func(q, k, v, softcap=2.0, return_attn_probs=True, learnable_sink=sinks)
        parts = {"out": (out * cotangent(out.shape)).float().sum(), "lse": (lse * cotangent(lse.shape)).sum()}
        return sum(parts.values()) if of == "both" else parts[of]

    expected = stacked(gradients(loss, q[i], k[i], v[i], sinks[i]) for i in range(COUNT))
    assert_same_bits(torch.vmap(torch.func.grad(loss, (0, 1, 2, 3)))(q, k, v, sinks), expected)


def test_dropout():
    inputs = [x[0] for x in batches(flash_attn_func)]
    loss = loss_of(flash_attn_func, dropout_p=0.25)
    torch.manual_seed(0)
    expected = gradients(loss, *inputs)
    torch.manual_seed(0)
    assert_same_bits(torch.func.grad(loss, (0, 1, 2))(*inputs), expected)
    same, different = (
        torch.vmap(torch.func.grad(loss), in_dims=(0, None, None), randomness=how)(inputs[0].expand(2, -1, -1, -1, -1),
                                                                                   *inputs[1:])
        for how in ("same", "different")
    )  # fmt: skip
    assert torch.equal(*same) and not torch.equal(*different)


def test_vjp_of_several_gradients():
    inputs = [x[0] for x in batches(flash_attn_func)]
    out, pull = torch.func.vjp(flash_attn_func, *inputs)
    douts = cotangent((COUNT, *out.shape))
    expected = stacked(gradients(lambda *x, d=d: (flash_attn_func(*x) * d).sum(), *inputs) for d in douts)
    assert_same_bits(torch.vmap(pull)(douts), expected)


@pytest.mark.parametrize("function, arguments", [
    *((function, {}) for function in FUNCTIONS),
    (flash_attn_qkvpacked_func, {"num_heads_q": 2}), (flash_attn_func, {"dropout_p": 0.25}),
], ids=lambda x: x.__name__ if callable(x) else str(x))  # fmt: skip
def test_batched_gradients(function, arguments):
    inputs = [x[0].requires_grad_() for x in batches(function)]
    if "num_heads_q" in arguments:
        inputs = [inputs[0].detach().flatten(2, 3).requires_grad_()]
    sinks = randn(2, seed=7)
    out, lse, _ = function(*inputs, causal=True, learnable_sink=sinks, return_attn_probs=True, **arguments)
    given = {out: cotangent((COUNT, *out.shape)), lse: cotangent((COUNT, *lse.shape)).float()}
    leaves = [*inputs, sinks]
    for outputs in ([out], [lse], [out, lse]):
        batch = [given[x] for x in outputs]
        expected = stacked(torch.autograd.grad(outputs, leaves, d, retain_graph=True) for d in zip(*batch))
        actual = torch.autograd.grad(outputs, leaves, batch, is_grads_batched=True, retain_graph=True)
        assert_same_bits(actual, expected)


def test_batched_gradients_of_a_pack():
    inputs = [x[0, 0].requires_grad_() for x in batches(flash_attn_func)]
    out = flash_attn_varlen_func(*inputs, *[int32([0, 4, 9])] * 2, 5, 5, causal=True)
    douts = cotangent((COUNT, *out.shape))
    expected = stacked(torch.autograd.grad(out, inputs, d, retain_graph=True) for d in douts)
    assert_same_bits(torch.autograd.grad(out, inputs, douts, is_grads_batched=True), expected)


@pytest.mark.parametrize("used", [None, [3, 5]])
def test_private_forward_of_flash_attention_3(used):
    q = randn(2, 5, 2, 8)
    arguments = {"seqused_k": None if used is None else int32(used), "causal": True}

    def loss(q):
        out, lse, *_ = flash_attn_3._flash_attn_forward(q, q, q, **arguments)
        return out.float().sum() + lse.nan_to_num(neginf=0.0).sum()

    leaf = q.clone().requires_grad_()
    assert_same_bits([torch.func.grad(loss)(q)], torch.autograd.grad(loss(leaf), leaf))


def test_the_names_of_flash_attn():
    q, k, v = (x[0] for x in batches(flash_attn_2.flash_attn_func))
    loss = loss_of(flash_attn_2.flash_attn_func)
    assert_same_bits(torch.func.grad(loss, (0, 1, 2))(q, k, v), gradients(loss, q, k, v))


def test_second_derivatives_and_slopes_raise():
    q, k, v = (x[0] for x in batches(flash_attn_func))
    loss = loss_of(flash_attn_func)
    twice = torch.func.grad(lambda q: torch.func.grad(loss)(q, k, v).float().sum())
    with pytest.raises(RuntimeError, match="^attention must be differentiated at most once, got a second"):
        twice(q)
    for forward_mode in (torch.func.jvp, lambda f, x, _: torch.func.linearize(f, *x)):
        with pytest.raises(NotImplementedError, match="^attention has no derivative in forward mode"):
            forward_mode(lambda q: flash_attn_func(q, k, v), (q,), (q,))
    for function in (loss, torch.func.grad(loss), torch.vmap(loss)):
        with pytest.raises(NotImplementedError, match="^attention must not be called under torch.func.functionalize"):
            torch.func.functionalize(function)(q[None], k[None], v[None])
    with pytest.raises(NotImplementedError, match="^alibi_slopes must not require a gradient"):
        torch.func.grad(lambda slopes: loss_of(flash_attn_func, alibi_slopes=slopes)(q, k, v))(torch.ones(2))


@pytest.mark.parametrize("head_dim", [20, 32])  # a cache that is copied, and one that is read in place
def test_functionalize_with_a_cache(head_dim):
    q, k, v = (x[0] for x in batches(flash_attn_func, head_dim))
    decode = functools.partial(flash_attn_with_kvcache, cache_seqlens=3)
    assert torch.equal(torch.func.functionalize(decode)(q, k, v), decode(q, k, v))
    with pytest.raises(RuntimeError, match="dash_attn::append"):
        torch.func.functionalize(decode)(q[:, :1], k, v, k[:, :1], v[:, :1])


def test_the_ops_follow_torchs_rules():
    q, k, v = (x[0] for x in batches(flash_attn_func, head_dim=16))
    numbers = (None, None, None, None, 0.25, True, -1, -1, 0)
    forward = torch.ops.flash_attn._dash_attn_forward
    torch.library.opcheck(forward.default, (q, k, v, *numbers))
    out, lse = forward(q, k, v, *numbers)
    assert_same_bits((out, lse), torch.ops.dash_attn.forward(q, k, v, *numbers))
    arguments = (*numbers, "auto", 0, torch.zeros(2), None, True, 0.0, None, None, 0.0, None, None, None)
    torch.library.opcheck(torch.ops.dash_attn._gradients.default, (q, q, k, v, out, lse, None, *arguments))

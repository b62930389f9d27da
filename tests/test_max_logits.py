"""return_max_logits: the largest logit of each query head in each sequence."""

import math

import pytest
import torch
from float64_reference import PLAIN, Scores, visible_keys
from interface_support import FUNCTIONS, VARLEN_FUNCTIONS, assert_same_bits, inputs_of, qkv_tensors
from pack_support import Pack, int32
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

from dash_attn import flash_attn_func, flash_attn_varlen_func, masks

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 5)},
    "chunk": {"causal": True, "attention_chunk": 32},
}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 3.0])
SCORES = {
    "plain": PLAIN,
    "softcap": Scores(softcap=0.8),
    "slopes": Scores(alibi_slopes=SLOPES),
    "sinks": Scores(sinks=torch.full((4,), 50.0)),
}


def arguments_of(scores):
    return {"softcap": scores.softcap, "alibi_slopes": scores.alibi_slopes, "learnable_sink": scores.sinks}


def truth(q, k, scores=PLAIN, scale=None, *, window_size=(-1, -1), hidden=None, causal=False, attention_chunk=0):
    """(batch, heads) in float64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    products = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(group, 2)) * scale
    seen = visible_keys(
        q.shape[1], k.shape[1], causal, window=window_size, attention_chunk=attention_chunk, hidden=hidden
    )
    return scores.of(products).masked_fill(~seen, -math.inf).flatten(2).amax(-1)


def assert_near(found, expected):
    assert found.dtype == torch.float32 and not found.requires_grad
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(150, 170), (170, 150)], ids=str)
@torch.no_grad()
def test_against_float64(mask, scores, lengths):
    q, k, v, _ = qkv_tensors(*lengths)
    given = arguments_of(SCORES[scores]) | MASKS[mask]
    out, max_logits = flash_attn_func(q, k, v, return_max_logits=True, **given)
    assert_near(max_logits, truth(q, k, SCORES[scores], **MASKS[mask]))
    assert torch.equal(out, flash_attn_func(q, k, v, **given))


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@torch.no_grad()
def test_scales_of_any_sign(scale):
    q, k, v, _ = qkv_tensors(40, 50)
    _, max_logits = flash_attn_func(q, k, v, softmax_scale=scale, causal=True, return_max_logits=True)
    assert_near(max_logits, truth(q, k, scale=scale, causal=True))


@torch.no_grad()
def test_logits_below_zero():
    q, k, v, _ = qkv_tensors(70, 90)
    q, k = q.abs(), -k.abs()
    _, max_logits = flash_attn_func(q, k, v, return_max_logits=True)
    assert (max_logits < 0).all()
    assert_near(max_logits, truth(q, k))


@torch.no_grad()
def test_columns():
    q, k, v, _ = qkv_tensors(100, 100, batch=1)
    documents = torch.arange(100)[None] // 30
    columns = masks.document_mask(documents)
    hidden = (documents[0][:, None] != documents[0])[None, None]
    _, max_logits = flash_attn_func(q, k, v, causal=True, startend_row_indices=columns, return_max_logits=True)
    assert_near(max_logits, truth(q, k, causal=True, hidden=hidden))


LENGTHS = [(70, 90), (0, 30), (40, 0), (1, 1), (130, 20)]


@pytest.mark.parametrize("scores", ["plain", "slopes"])
@torch.no_grad()
def test_sequences_of_a_pack_have_the_bits_that_they_have_alone(scores):
    pack = Pack.of(LENGTHS, first=3, tail=5)
    given = arguments_of(SCORES[scores]) | {"causal": True, "return_max_logits": True}
    _, max_logits = flash_attn_varlen_func(*pack[:3], *pack.offsets(), **given)
    assert max_logits.shape == (len(LENGTHS), 4)
    for (queries, keys), (rows_q, rows_k), found in zip(LENGTHS, pack.sequences(), max_logits):
        q, k, v = pack.q[None, rows_q], pack.k[None, rows_k], pack.v[None, rows_k]
        assert torch.equal(found, flash_attn_func(q, k, v, **given)[1][0])
        if queries and keys:
            assert_near(found[None], truth(q, k, SCORES[scores], causal=True))
        else:
            assert (found == -math.inf).all()


@torch.no_grad()
def test_rows_outside_of_sequences_do_not_enter():
    pack = Pack.of([(40, 50), (30, 20)], used=[(33, 41), (0, 20)], tail=4)
    arguments = dict(causal=True, return_max_logits=True, **pack.used())
    _, expected = flash_attn_varlen_func(*pack[:3], *pack.offsets(), **arguments)
    rows_q, rows_k = pack.outside()
    pack.q[rows_q], pack.k[rows_k] = math.nan, math.inf
    _, found = flash_attn_varlen_func(*pack[:3], *pack.offsets(), **arguments)
    assert torch.equal(found, expected) and (found[1] == -math.inf).all() and found[0].isfinite().all()


@torch.no_grad()
def test_bits_do_not_depend_on_other_sequences_and_heads():
    q, k, v, _ = qkv_tensors(60, 80, heads=4, kv_heads=2, batch=3)
    _, expected = flash_attn_func(q, k, v, causal=True, return_max_logits=True)
    for number in range(3):
        alone = [x[number : number + 1] for x in (q, k, v)]
        assert torch.equal(flash_attn_func(*alone, causal=True, return_max_logits=True)[1][0], expected[number])
    of_heads = (q[:, :, 2:], k[:, :, 1:], v[:, :, 1:])
    assert torch.equal(flash_attn_func(*of_heads, causal=True, return_max_logits=True)[1], expected[:, 2:])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@torch.no_grad()
def test_scores_that_are_no_numbers(value):
    """They concern their head alone, and only where they are seen."""
    q, k, v, _ = qkv_tensors(40, 40)
    _, expected = flash_attn_func(q, k, v, causal=True, return_max_logits=True)
    q[0, 20, 1] = 1.0
    q[0, 20, 1, 0] = value
    k[0, :, 0, 0] = 1.0
    _, found = flash_attn_func(q, k, v, causal=True, return_max_logits=True)
    assert found[0, 1].isnan() and torch.equal(found[0, 2:], expected[0, 2:]) and torch.equal(found[1], expected[1])
    k[1, 39, 0] = value  # which the last query alone sees
    _, found = flash_attn_func(q[:, :39], k, v, window_size=(-1, -1), causal=False, return_max_logits=True)
    assert found[1, :2].isnan().all() and found[1, 2:].isfinite().all()
    _, found = flash_attn_func(q[1:, :39], k[1:, :39], v[1:, :39], causal=True, return_max_logits=True)
    assert found.isfinite().all()


@torch.no_grad()
def test_scores_of_minus_infinity_and_no_scores():
    q, k, v, _ = qkv_tensors(10, 12)
    q[..., 0], k[0] = 1.0, 0.0
    k[0, ..., 0] = -math.inf
    _, found = flash_attn_func(q, k, v, return_max_logits=True)
    assert (found[0] == -math.inf).all() and found[1].isfinite().all()
    for sinks in (None, torch.zeros(4)):
        _, found = flash_attn_func(q, k[:, :0], v[:, :0], learnable_sink=sinks, return_max_logits=True)
        assert torch.equal(found, torch.full((2, 4), -math.inf))
        _, found = flash_attn_func(q[:, :0], k, v, learnable_sink=sinks, return_max_logits=True)
        assert torch.equal(found, torch.full((2, 4), -math.inf))


@pytest.mark.parametrize("function", [*FUNCTIONS, *VARLEN_FUNCTIONS], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_every_function_returns_them_last_and_changes_nothing_else(function, dropout_p):
    if function in FUNCTIONS:
        inputs, lengths = inputs_of(function), []
    else:
        dense = list(FUNCTIONS)[list(VARLEN_FUNCTIONS).index(function)]
        inputs = [x.detach()[0].requires_grad_() for x in inputs_of(dense)]
        offsets = int32([0, 9])
        sides = 1 if len(inputs) == 1 else 2
        lengths = [offsets] * sides + [9] * sides

    def results(**more):
        torch.manual_seed(5)
        found = function(*inputs, *lengths, dropout_p=dropout_p, causal=True, **more)
        out = found[0] if isinstance(found, tuple) else found
        return found, torch.autograd.grad(out.float().sum(), inputs)

    out, gradients = results()
    (found, max_logits), found_gradients = results(return_max_logits=True)
    assert_same_bits((found, *found_gradients), (out, *gradients))
    with_lse, _ = results(return_attn_probs=True)
    (*with_both, again), _ = results(return_attn_probs=True, return_max_logits=True)
    assert_same_bits(with_both, with_lse)
    q, k = (x[None] if function in VARLEN_FUNCTIONS else x for x in qk_of(inputs))
    assert_near(max_logits, truth(q, k, causal=True))
    assert torch.equal(again, max_logits)


def qk_of(inputs):
    """q and k in the inputs of a function."""
    if len(inputs) == 3:
        return inputs[:2]
    packed = inputs[-1].detach()
    return (packed.select(-3, 0), packed.select(-3, 1)) if len(inputs) == 1 else (inputs[0], packed.select(-3, 0))


def test_they_have_no_gradient():
    q, k, v, _ = qkv_tensors(9, 9)
    out, max_logits = flash_attn_func(q, k, v, return_max_logits=True)
    assert out.requires_grad and not max_logits.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        max_logits.sum().backward()


def test_compiled():
    q, k, v, dout = qkv_tensors(30, 40)
    call = torch.compile(
        lambda *x: flash_attn_func(*x, causal=True, return_max_logits=True), fullgraph=True, backend="aot_eager"
    )
    expected, found = flash_attn_func(q, k, v, causal=True, return_max_logits=True), call(q, k, v)
    assert_same_bits(found, expected)
    assert not found[1].requires_grad
    assert_same_bits(torch.autograd.grad(found[0], (q, k, v), dout), torch.autograd.grad(expected[0], (q, k, v), dout))


def test_the_op():
    q, k, v, _ = (x.detach() for x in qkv_tensors(30, 40))
    arguments = (q, k, v, None, None, None, None, 0.2, True, -1, -1, 0)
    torch.library.opcheck(torch.ops.dash_attn.forward_and_max_logits.default, arguments)
    pack = Pack.of(LENGTHS)
    arguments = (*pack[:3], *pack.offsets()[:2], None, None, 0.2, True, -1, -1, 0)
    torch.library.opcheck(torch.ops.dash_attn.forward_and_max_logits.default, arguments)


def test_transforms_are_refused():
    q, k, v, _ = (x.detach() for x in qkv_tensors(9, 9))
    message = r"return_max_logits must be False \(transforms of torch.func are not supported with it\), got True"
    with pytest.raises(NotImplementedError, match=message):
        torch.vmap(lambda *x: flash_attn_func(*x, return_max_logits=True))(q[None], k[None], v[None])


@pytest.mark.parametrize("name", ["alibi_slopes", "softcap", "dropout"])
def test_scores_that_a_gpu_does_not_support_raise_while_a_graph_is_traced(name):
    """torch.compile traces with FakeTensors, which stand for tensors of a device without being on it."""

    def call(device):
        q = torch.empty(2, 9, 4, 32, dtype=torch.bfloat16, device=device)
        given = {
            "alibi_slopes": {"alibi_slopes": torch.ones(4, device=device)}, "softcap": {"softcap": 2.0},
            "dropout": {"dropout_p": 0.1},
        }[name]  # fmt: skip
        return flash_attn_func(q, q, q, return_max_logits=True, **given)

    with FakeTensorMode():
        assert call("cpu")[1].shape == (2, 4)
        message = f"^return_max_logits must be False with {name} on a GPU, got True"
        with pytest.raises(NotImplementedError, match=message):
            call("cuda")


def test_the_op_checks_scores_without_values():
    """FakeTensorMode raises an error of its own when an op raises NotImplementedError."""
    with FakeTensorMode():
        q = torch.empty(2, 9, 4, 32, dtype=torch.bfloat16, device="cuda")
        arguments = (q, q, q, None, None, None, None, 0.2, True, -1, -1, 0)
        torch.ops.dash_attn.forward_and_max_logits.default(*arguments)
        with pytest.raises(UnsupportedOperatorException) as raised:
            torch.ops.dash_attn.forward_and_max_logits.default(*arguments, softcap=2.0)
    assert str(raised.value.__context__) == "return_max_logits must be False with softcap on a GPU, got True"

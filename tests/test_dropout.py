"""`dropout_p` of the public functions, on CPU tensors."""

import functools
import math

import pytest
import torch
from dropout_float64 import gradients
from float64_reference import PLAIN, Scores
from products import pairwise
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.utils.checkpoint import checkpoint

import dash_attn
from dash_attn import flash_attn_func, flash_attn_varlen_func
from dash_attn.dropout import DropoutState, dropout_bits

BF16 = torch.bfloat16
LENGTHS = [5, 0, 40, 33]
OFFSETS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)


def tensors(*shape, heads=4, kv_heads=2, head_dim=64, value_head_dim=None, dtype=BF16, seed=0):
    """q, k, v and dout; shape: what stands before the heads."""
    generator = torch.Generator().manual_seed(seed)
    value_head_dim = value_head_dim or head_dim
    shapes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_head_dim), (heads, value_head_dim)
    made = [torch.randn(*shape, *inner, generator=generator).to(dtype) for inner in shapes]
    return [x.requires_grad_() for x in made[:3]] + made[3:]


def bits_like(q, k, p, state=None, **arguments):
    sizes = {"batch": q.shape[0], "heads": q.shape[2], "seqlen_q": q.shape[1], "seqlen_k": k.shape[1]}
    return dropout_bits(DropoutState.of(42) if state is None else state, p=p, **{**sizes, **arguments})


def results(function, inputs, dout, **arguments):
    """The output and the gradients of the inputs."""
    out = function(*inputs, **arguments)
    return out.detach(), *torch.autograd.grad(out, [x for x in inputs if x.requires_grad], dout)


def assert_near(actual, inputs, dout, keep, p, **settings):
    """No further from float64 than the same formula in eager PyTorch."""
    truth = gradients(*inputs, dout, keep, p, **settings)
    eager = gradients(*inputs, dout, keep, p, dtype=inputs[0].dtype, **settings)
    for name, a, t, e in zip(("out", "dq", "dk", "dv"), actual, (truth[0], *truth[2:5]), (eager[0], *eager[2:5])):
        assert (a.double() - t).norm() <= (e.double() - t).norm(), name


MASKS = {}, {"causal": True}, {"window_size": (20, 11)}, {"attention_chunk": 30}
DIMS = (64, 64), (128, 128), (192, 128), (40, 40), (12, 20)


@pytest.mark.parametrize("mask, dims, schedule", pairwise(MASKS, DIMS, ["auto", "spt"]), ids=str)
def test_gradients_with_the_exported_mask(mask, dims, schedule):
    head_dim, value_head_dim = dims
    *inputs, dout = tensors(2, 65, head_dim=head_dim, value_head_dim=value_head_dim)
    bits = bits_like(*inputs[:2], 0.125)
    actual = results(flash_attn_func, inputs, dout, dropout_p=0.125, dropout_bits=bits, schedule=schedule, **mask)
    formula = {"window": mask.get("window_size", (-1, -1)), "attention_chunk": mask.get("attention_chunk", 0)}
    formula |= {"causal": mask.get("causal", False), "softmax_scale": head_dim**-0.5}
    assert_near(actual, inputs, dout, bits.mask(), 0.125, **formula)


@pytest.mark.parametrize("scores", [
    {"softcap": 3.0}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    {"learnable_sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
], ids=["softcap", "slopes", "sinks"])  # fmt: skip
def test_beside_changed_scores(scores):
    *inputs, dout = tensors(2, 65)
    bits = bits_like(*inputs[:2], 0.25)
    actual = results(flash_attn_func, inputs, dout, dropout_p=0.25, dropout_bits=bits, causal=True, **scores)
    of_formula = Scores(scores.get("softcap", 0.0), scores.get("alibi_slopes"), scores.get("learnable_sink"))
    assert_near(actual, inputs, dout, bits.mask(), 0.25, softmax_scale=0.125, causal=True, scores=of_formula or PLAIN)


def test_order_free_sums_are_refused():
    q, k, v, _ = tensors(2, 40)
    message = "schedule='order_free' supports plain scores without dropout up to head dim 128; got dropout"
    with pytest.raises(ValueError, match=f"^{message}$"):
        flash_attn_func(q, k, v, dropout_p=0.1, schedule="order_free")


def test_a_state_is_drawn_from_torchs_generator():
    *inputs, dout = tensors(2, 40)

    def run():
        return results(flash_attn_func, inputs, dout, dropout_p=0.3)

    torch.manual_seed(3)
    first, second = run(), run()
    torch.manual_seed(3)
    assert all(map(torch.equal, first, run()))
    assert not torch.equal(first[0], second[0])
    # The bits are those of the state that a caller would have drawn.
    torch.manual_seed(3)
    bits = bits_like(*inputs[:2], 0.3, state=DropoutState.draw())
    given = results(flash_attn_func, inputs, dout, dropout_p=0.3, dropout_bits=bits)
    assert all(map(torch.equal, first, given))


def test_packed_arguments_have_the_same_bits():
    q, k, v, dout = tensors(2, 40, kv_heads=4)
    kv, qkv = (torch.stack(x, dim=2).detach().requires_grad_() for x in ((k, v), (q, k, v)))
    in_one = torch.cat((q, k, v), dim=2).detach().requires_grad_()
    calls = [
        (flash_attn_func, (q, k, v), {}), (dash_attn.flash_attn_kvpacked_func, (q, kv), {}),
        (dash_attn.flash_attn_qkvpacked_func, (qkv,), {}),
        (dash_attn.flash_attn_qkvpacked_func, (in_one,), {"num_heads_q": 4}),
    ]  # fmt: skip
    gathered = []
    for function, inputs, arguments in calls:
        torch.manual_seed(1)
        out, *grads = results(function, inputs, dout, dropout_p=0.2, causal=True, **arguments)
        gathered.append((out, *(part.flatten(2) for part in grads)))
    expected = torch.cat(gathered[0][1:], dim=2)
    for out, *grads in gathered[1:]:
        assert torch.equal(out, gathered[0][0]) and torch.equal(torch.cat(grads, dim=2), expected)


PACK = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS, "max_seqlen_q": 40, "max_seqlen_k": 40}


@pytest.mark.parametrize("own_states", [False, True])
def test_a_sequence_of_a_pack_has_the_bits_that_it_has_alone(own_states):
    *inputs, dout = tensors(sum(LENGTHS))
    numbers = torch.randint(2**62, (len(LENGTHS), 2), generator=torch.Generator().manual_seed(1))
    state = DropoutState(numbers if own_states else numbers[0])
    sizes = {"p": 0.2, "heads": 4, "seqlen_q": max(LENGTHS), "seqlen_k": max(LENGTHS)}
    bits = dropout_bits(state, batch=len(LENGTHS), **sizes)
    together = results(flash_attn_varlen_func, inputs, dout, **PACK, dropout_p=0.2, dropout_bits=bits, causal=True)
    for b, length in enumerate(LENGTHS):
        rows = slice(OFFSETS[b], OFFSETS[b + 1])
        alone = [x.detach()[None, rows].requires_grad_() for x in inputs]
        own = bits_like(*alone[:2], 0.2, state=DropoutState(numbers[b])) if own_states else None
        if own is None:
            whole = bits_like(*alone[:2], 0.2, state=state, batch=b + 1)
            own = type(whole)(**{**vars(whole), "bits": whole.bits[b:].contiguous()})
        expected = results(flash_attn_func, alone, dout[None, rows], dropout_p=0.2, dropout_bits=own, causal=True)
        for a, e in zip(together, expected):
            assert torch.equal(a[None, rows], e), length


def test_lengths_in_use_of_a_pack():
    *inputs, _ = tensors(80)
    offsets, used = torch.tensor([0, 40, 80], dtype=torch.int32), torch.tensor([7, 33], dtype=torch.int32)
    bits = dropout_bits(DropoutState.of(1), p=0.2, batch=2, heads=4, seqlen_q=33, seqlen_k=33)
    pack = {"seqused_q": used, "seqused_k": used, "dropout_p": 0.2, "dropout_bits": bits}
    out = flash_attn_varlen_func(*inputs, offsets, offsets, 40, 40, **pack)
    last = [x.detach()[None, 40:73] for x in inputs]
    own = dropout_bits(DropoutState.of(1), p=0.2, batch=2, heads=4, seqlen_q=33, seqlen_k=33)
    own = type(own)(**{**vars(own), "bits": own.bits[1:].contiguous()})
    assert torch.equal(out[None, 40:73], flash_attn_func(*last, dropout_p=0.2, dropout_bits=own))
    assert (out[7:40] == 0).all() and (out[73:] == 0).all()


def test_shards_of_heads_have_the_bits_of_the_whole():
    *inputs, dout = tensors(2, 40)
    whole = results(flash_attn_func, inputs, dout, dropout_p=0.2, dropout_bits=bits_like(*inputs[:2], 0.2))
    for shard in range(2):
        heads, kv_heads = slice(2 * shard, 2 * shard + 2), slice(shard, shard + 1)
        parts = [x.detach()[:, :, s].requires_grad_() for x, s in zip(inputs, (heads, kv_heads, kv_heads))]
        bits = bits_like(*parts[:2], 0.2, first_head=2 * shard, total_heads=4)
        actual = results(flash_attn_func, parts, dout[:, :, heads], dropout_p=0.2, dropout_bits=bits)
        for a, e, part in zip(actual, whole, (heads, heads, kv_heads, kv_heads)):
            assert torch.equal(a, e[:, :, part])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_drops_the_same(use_reentrant):
    *inputs, dout = tensors(2, 40)
    torch.manual_seed(9)
    expected = results(lambda *x: flash_attn_func(*x, dropout_p=0.2), inputs, dout)
    torch.manual_seed(9)
    out = checkpoint(lambda *x: flash_attn_func(*x, dropout_p=0.2), *inputs, use_reentrant=use_reentrant)
    torch.rand(5)  # what is drawn between the passes does not matter
    out.backward(dout)
    assert all(map(torch.equal, (out, *(x.grad for x in inputs)), expected))


def saved_for_backward(**arguments):
    saved = []
    *inputs, _ = tensors(2, 40)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        flash_attn_func(*inputs, dropout_p=0.2, **arguments)
    return saved


def test_memory_does_not_grow_with_bits_unless_they_are_given():
    assert {x.dtype for x in saved_for_backward()} == {BF16, torch.float32, torch.int64}
    *inputs, _ = tensors(2, 40)
    assert torch.uint8 in {x.dtype for x in saved_for_backward(dropout_bits=bits_like(*inputs[:2], 0.2))}


def test_log_sum_exp_is_the_one_without_dropout():
    *inputs, _ = tensors(2, 40)
    _, lse, _ = flash_attn_func(*inputs, dropout_p=0.3, return_attn_probs=True, causal=True)
    assert torch.equal(lse, flash_attn_func(*inputs, return_attn_probs=True, causal=True)[1])


def test_gradient_of_the_log_sum_exp():
    *inputs, dout = tensors(1, 40)
    bits = bits_like(*inputs[:2], 0.25)
    out, lse, _ = flash_attn_func(*inputs, dropout_p=0.25, dropout_bits=bits, return_attn_probs=True)
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(1))
    actual = (out.detach(), *torch.autograd.grad([out, lse], inputs, [dout, dlse]))
    assert_near(actual, inputs, dout, bits.mask(), 0.25, softmax_scale=0.125, dlse=dlse)


def test_signs_of_probabilities_are_the_mask():
    q, k, v, dout = tensors(2, 40)
    bits = bits_like(q, k, 0.3)
    _, lse, signed = flash_attn_func(q, k, v, dropout_p=0.3, dropout_bits=bits, causal=True, return_attn_probs=True)
    assert signed.shape == (2, 4, 128, 128) and signed.dtype == BF16 and not signed.requires_grad
    seen = torch.ones(40, 40).tril().bool()
    assert torch.equal((signed[:, :, :40, :40] >= 0)[..., seen], bits.mask()[..., seen])
    assert (signed[:, :, :40, :40][..., ~seen] == 0).all() and (signed[:, :, 40:] == 0).all()
    # FlashAttention-2's tests make the output of it so.
    weights = torch.where(signed < 0, 0, signed)[:, :, :40, :40].double() / 0.7
    out = (weights @ v.repeat_interleave(2, dim=2).transpose(1, 2).double()).transpose(1, 2)
    arguments = q, k, v, dout, bits.mask(), 0.3
    truth, eager = (gradients(*arguments, softmax_scale=0.125, causal=True, dtype=x)[0] for x in (torch.float64, BF16))
    for actual in (out, flash_attn_func(q, k, v, dropout_p=0.3, dropout_bits=bits, causal=True)):
        assert (actual.double() - truth).norm() <= (eager.double() - truth).norm()


@pytest.mark.parametrize("lengths", [(40, 40), (129, 300), (0, 5)], ids=str)
def test_probabilities_on_a_meta_device_have_their_shape(lengths):
    q, k, v = (torch.zeros(2, n, heads, 64, dtype=BF16) for n, heads in zip((*lengths, lengths[1]), (4, 2, 2)))
    of = {"dropout_p": 0.2, "return_attn_probs": True}
    calls = [(flash_attn_func, (q, k, v)), (dash_attn.flash_attn_kvpacked_func, (q, torch.stack((k, v), dim=2)))]
    if lengths[0] == lengths[1]:
        qkv = torch.cat((q, k, v), dim=2)
        calls.append((functools.partial(dash_attn.flash_attn_qkvpacked_func, num_heads_q=4), (qkv,)))
    for function, given in calls:
        expected = function(*given, **of)
        for found, like in zip(function(*(x.to("meta") for x in given), **of), expected):
            assert found.is_meta and found.shape == like.shape and found.dtype == like.dtype


def test_probabilities_of_a_pack_are_refused_in_a_capture(monkeypatch):
    """A dense call has no lengths to read."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    of = {"dropout_p": 0.2, "return_attn_probs": True}
    with FakeTensorMode():
        q, offsets = torch.empty(80, 4, 64, dtype=BF16, device="cuda"), torch.empty(3, dtype=torch.int32, device="cuda")
        message = "^return_attn_probs must be False during CUDA graph capture with dropout in a "
        with pytest.raises(RuntimeError, match=message):
            flash_attn_varlen_func(q, q, q, offsets, offsets, 40, 40, **of)
        flash_attn_varlen_func(q, q, q, offsets, offsets, 40, 40, dropout_p=0.2)
    cpu, offsets = torch.zeros(80, 4, 64, dtype=BF16), torch.tensor([0, 40, 80], dtype=torch.int32)
    flash_attn_varlen_func(cpu, cpu, cpu, offsets, offsets, 40, 40, **of)


def test_the_op_refuses_scores_that_no_kernel_combines_with_dropout_while_a_graph_is_traced():
    """FakeTensorMode raises an error of its own when an op raises NotImplementedError."""
    with FakeTensorMode():
        q, state = torch.empty(2, 9, 4, 64, dtype=BF16, device="cuda"), torch.empty(2, dtype=torch.int64, device="cuda")
        arguments = (q, q, q, None, None, None, None, 0.2, True, -1, -1, 0)
        torch.ops.dash_attn.forward.default(*arguments, rng_state=state, dropout_p=0.1)
        with pytest.raises(UnsupportedOperatorException) as raised:
            torch.ops.dash_attn.forward.default(*arguments, rng_state=state, dropout_p=0.1, softcap=2.0)
    assert "dropout_p must be 0.0 with softcap or alibi_slopes on a GPU" in str(raised.value.__context__)


def test_bits_of_probability_zero_change_nothing():
    *inputs, _ = tensors(1, 9)
    whole = flash_attn_func(*inputs)
    assert torch.equal(flash_attn_func(*inputs, dropout_p=0.0, dropout_bits=bits_like(*inputs[:2], 0.0)), whole)


def test_ops_follow_torchs_rules():
    q, k, v, dout = (x.detach() for x in tensors(1, 9, heads=2))
    mask = (None, None, None, None, 0.125, True, -1, -1, 0)
    dropout = {"rng_state": torch.tensor([1, 2]), "dropout_p": 0.2}
    torch.library.opcheck(torch.ops.dash_attn.forward.default, (q, k, v, *mask), dropout)
    out, lse = torch.ops.dash_attn.forward(q, k, v, *mask, **dropout)
    gradients = (torch.empty_like(x) for x in (q, k, v))
    arguments = (dout, q, k, v, out, lse, *gradients, *mask, "auto", 0)
    torch.library.opcheck(torch.ops.dash_attn.backward.default, arguments, dropout)


def test_compiled_calls_drop_as_the_state_says():
    *inputs, dout = tensors(1, 40)
    state = torch.tensor([5, 6])

    def attention(q, k, v, rng_state):
        settings = {"rng_state": rng_state, "dropout_p": 0.2}
        return torch.ops.dash_attn.attention(q, k, v, None, True, "auto", 0, **settings)[0]

    expected = results(lambda *x: attention(*x, state), inputs, dout)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, results(lambda *x: compiled(*x, state), inputs, dout), expected))


P = "dropout_p must be from 0 to below 1 in fp32, got "
SHAPE = "dropout_bits must have shape (batch, heads, ceil(seqlen_q / 32), ceil(seqlen_k / 32), 128) = (2, 4, 2, 2, 128)"


def bits_of(**change):
    return dropout_bits(DropoutState.of(1), **{
        "p": 0.1, "batch": 2, "heads": 4, "seqlen_q": 40, "seqlen_k": 40, **change
    })  # fmt: skip


@pytest.mark.parametrize("arguments, error, message", [
    ({"dropout_p": 1.0}, ValueError, P + "1.0"),
    ({"dropout_p": -0.1}, ValueError, P + "-0.1"),
    ({"dropout_p": math.nan}, ValueError, P + "nan"),
    ({"dropout_p": "0.1"}, TypeError, "dropout_p must be a number from 0 to below 1, got '0.1'"),
    ({"dropout_p": torch.tensor(0.1)}, TypeError,
     "dropout_p must be a number from 0 to below 1 (FlashAttention-3 has softmax_scale in this position: pass it by "
     "name), got a tensor of shape () and softmax_scale=None (NoneType)"),
    ({"dropout_bits": torch.zeros(1)}, TypeError,
     "dropout_bits must be a dash_attn.dropout.DropoutBits or None, got Tensor"),
    ({"dropout_p": 0.0, "dropout_bits": bits_of()}, ValueError,
     "dropout_bits must be made for dropout_p=0.0, got bits for p=0.1"),
    ({"dropout_bits": bits_of(p=0.2)}, ValueError, "dropout_bits must be made for dropout_p=0.1, got bits for p=0.2"),
    ({"dropout_bits": bits_of(batch=3)}, ValueError, SHAPE + ", got (3, 4, 2, 2, 128)"),
    ({"dropout_bits": bits_of(heads=2)}, ValueError, SHAPE + ", got (2, 2, 2, 2, 128)"),
    ({"dropout_bits": bits_of(seqlen_q=80)}, ValueError, SHAPE + ", got (2, 4, 3, 2, 128)"),
    ({"dropout_bits": bits_of(seqlen_k=32)}, ValueError, SHAPE + ", got (2, 4, 2, 1, 128)"),
])  # fmt: skip
def test_errors(arguments, error, message):
    *inputs, _ = tensors(2, 40)
    with pytest.raises(error) as raised:
        flash_attn_func(*inputs, **{"dropout_p": 0.1, **arguments})
    assert str(raised.value) == message


def test_bits_of_a_pack_must_have_its_longest_sequence():
    *inputs, _ = tensors(sum(LENGTHS))
    bits = dropout_bits(DropoutState.of(1), p=0.2, batch=len(LENGTHS), heads=4, seqlen_q=40, seqlen_k=32)
    message = (
        "^dropout_bits must have 2 blocks of queries and 2 of keys for sequence 2 of 40 queries and 40 keys, got 2 a"
    )
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(*inputs, **PACK, dropout_p=0.2, dropout_bits=bits)


OP_P = "dropout_p must be above 0 and below 1 in fp32 where dropout_bits or rng_state is given, got "
ONE = "dropout_bits and rng_state: exactly one must be given with dropout_p above 0, got "
STATE = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize("arguments, error, message", [
    ({"dropout_p": 0.0, "rng_state": STATE}, ValueError, OP_P + "0"),
    ({"dropout_p": 1.5, "rng_state": STATE}, ValueError, OP_P + "1.5"),
    ({"dropout_p": 0.1}, ValueError, ONE + "neither"),
    ({"dropout_p": 0.1, "rng_state": STATE.int()}, TypeError, "rng_state must be torch.int64, got torch.int32"),
    ({"dropout_p": 0.1, "rng_state": STATE.new_zeros(3, 2)}, ValueError,
     "rng_state must have shape (2,) or (batch, 2) = (2, 2), got (3, 2)"),
    ({"dropout_p": 0.1, "rng_state": STATE.to("meta")}, ValueError,
     "rng_state must be on the device of q, cpu, got meta"),
    ({"dropout_p": 0.1, "dropout_bits": bits_of().bits.int()}, TypeError,
     "dropout_bits must be torch.uint8, got torch.int32"),
    ({"dropout_p": 0.1, "dropout_bits": bits_of().bits.to("meta")}, ValueError,
     "dropout_bits must be on the device of q, cpu, got meta"),
    ({"dropout_p": 0.1, "dropout_bits": bits_of().bits.mT.contiguous().mT}, ValueError,
     "dropout_bits must be contiguous, got strides (2048, 512, 256, 1, 2)"),
])  # fmt: skip
def test_errors_of_the_ops(arguments, error, message):
    *inputs, _ = tensors(2, 40)
    with pytest.raises(error) as raised:
        torch.ops.dash_attn.attention(*inputs, None, False, "auto", 0, **arguments)
    assert str(raised.value) == message


def test_one_pass_takes_bits_or_their_state():
    """Both are for an op with a derivative: of the bits the forward is made, of the state the backward."""
    q, k, v, _ = (x.detach() for x in tensors(2, 40))
    with pytest.raises(ValueError) as raised:
        torch.ops.dash_attn.forward(
            q, k, v, None, None, None, None, 0.125, False, -1, -1, 0, dropout_bits=bits_of().bits, rng_state=STATE,
            dropout_p=0.1,
        )  # fmt: skip
    assert str(raised.value) == ONE + "both"

"""Dropout of packs from a state: the longest lengths that bits are made for, and that neither pass keeps any."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from dash_attn.dropout import DropoutState, dropout_bits

BF16 = torch.bfloat16
HEADS = 4
# (queries, keys)
LENGTHS = ((33, 40), (0, 5), (7, 65), (40, 1))
LONGEST = {"max_seqlen_q": 40, "max_seqlen_k": 65}
P = {"dropout_p": 0.25}


def offsets_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


CU_SEQLENS = {"cu_seqlens_q": offsets_of(x[0] for x in LENGTHS), "cu_seqlens_k": offsets_of(x[1] for x in LENGTHS)}
TOTALS = tuple(int(x[-1]) for x in CU_SEQLENS.values())


def tensors(totals=TOTALS, kv_heads=2, device="cpu"):
    """q, k and v as leaves, and dout."""
    numbers = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(rows, heads, 64, generator=numbers).to(BF16).to(device)
        for rows, heads in ((totals[0], HEADS), (totals[1], kv_heads), (totals[1], kv_heads), (totals[0], HEADS))
    )
    return *(x.requires_grad_() for x in (q, k, v)), dout


def states(own: bool) -> torch.Tensor:
    numbers = torch.randint(2**62, (len(LENGTHS), 2), generator=torch.Generator().manual_seed(1))
    return numbers if own else numbers[0]


def attention(q, k, v, causal=True, lengths=CU_SEQLENS, **dropout):
    """The op that has a derivative."""
    return torch.ops.dash_attn.attention(q, k, v, None, causal, "auto", 0, **lengths, **dropout)[0]


def results(function, inputs, dout):
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


def assert_same(found, expected):
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_state_drops_what_its_bits_do(causal, own):
    *inputs, dout = tensors()
    state = states(own)
    bits = dropout_bits(DropoutState(state), p=0.25, batch=len(LENGTHS), heads=HEADS, seqlen_q=40, seqlen_k=65).bits
    expected = results(lambda *x: attention(*x, causal, dropout_bits=bits, **P), inputs, dout)
    found = results(lambda *x: attention(*x, causal, rng_state=state, **LONGEST, **P), inputs, dout)
    assert_same(found, expected)
    # Longer ones change nothing.
    longer = {"max_seqlen_q": 41, "max_seqlen_k": 10**6}
    assert_same(results(lambda *x: attention(*x, causal, rng_state=state, **longer, **P), inputs, dout), expected)


def test_a_sequence_with_a_state_of_its_own_drops_what_it_does_alone():
    *inputs, dout = tensors()
    together = results(lambda *x: attention(*x, rng_state=states(True), **LONGEST, **P), inputs, dout)
    starts_q, starts_k = (x.tolist() for x in CU_SEQLENS.values())
    for b, state in enumerate(states(True)):
        queries, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        rows = queries, keys, keys
        alone = [x.detach()[None, own].requires_grad_() for x, own in zip(inputs, rows)]
        expected = results(
            lambda *x, own=state: attention(*x, lengths={}, rng_state=own, **P), alone, dout[None, queries]
        )
        assert_same((x[None, own] for x, own in zip(together, (queries, *rows))), expected)


def test_nothing_but_the_state_is_kept_for_the_backward():
    *inputs, dout = tensors()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = flash_attn_varlen_func(*inputs, **CU_SEQLENS, **LONGEST, **P)
    assert {x.dtype for x in saved} == {BF16, torch.float32, torch.int64, torch.int32}
    assert [x.shape for x in saved if x.dtype == torch.int64] == [(2,)]
    torch.autograd.grad(out, inputs, dout)


def test_every_function_of_packs_draws_the_same():
    q, k, v, dout = tensors((80, 80), kv_heads=HEADS)
    offsets = torch.tensor([0, 33, 33, 80], dtype=torch.int32)
    kv, qkv = (torch.stack(x, dim=1).detach().requires_grad_() for x in ((k, v), (q, k, v)))
    in_one = torch.cat((q, k, v), dim=1).detach().requires_grad_()
    calls = [
        (flash_attn_varlen_func, (q, k, v), (offsets, offsets, 47, 47), {}),
        (flash_attn_varlen_kvpacked_func, (q, kv), (offsets, offsets, 47, 47), {}),
        (flash_attn_varlen_qkvpacked_func, (qkv,), (offsets, 47), {}),
        (flash_attn_varlen_qkvpacked_func, (in_one,), (offsets, 47), {"num_heads_q": HEADS}),
    ]
    found = []
    for function, inputs, lengths, options in calls:
        torch.manual_seed(3)
        out = function(*inputs, *lengths, causal=True, **P, **options)
        gradients = torch.autograd.grad(out, inputs, dout)
        found.append((out, torch.cat([x.flatten(1) for x in gradients], dim=1)))
    for each in found[1:]:
        assert_same(each, found[0])


def test_sequences_of_a_pack_have_the_masks_of_a_dense_batch():
    q, k, v = (torch.cat([x[:40]] * 2).detach() for x in tensors((80, 80))[:3])
    offsets = torch.tensor([0, 40, 80], dtype=torch.int32)
    torch.manual_seed(5)
    out = flash_attn_varlen_func(q, k, v, offsets, offsets, 40, 40, **P)
    assert not torch.equal(out[:40], out[40:])
    torch.manual_seed(5)
    assert torch.equal(out, flash_attn_func(*(x.unflatten(0, (2, 40)) for x in (q, k, v)), **P).flatten(0, 1))


@pytest.mark.parametrize("given", [False, True], ids=["state", "bits"])
def test_probabilities_have_the_signs_of_the_mask(given):
    *inputs, _ = tensors()
    torch.manual_seed(4)
    bits = dropout_bits(DropoutState.draw(), p=0.25, batch=len(LENGTHS), heads=HEADS, seqlen_q=40, seqlen_k=65)
    mask = bits.mask()
    torch.manual_seed(4)
    dropout = {**P, "dropout_bits": bits if given else None}
    signed = flash_attn_varlen_func(*inputs, **CU_SEQLENS, **LONGEST, **dropout, return_attn_probs=True)[2]
    assert signed.shape == (len(LENGTHS), HEADS, 128, 128)
    for b, (queries, keys) in enumerate(LENGTHS):
        assert torch.equal(signed[b, :, :queries, :keys] >= 0, mask[b, :, :queries, :keys])
        assert not signed[b, :, queries:].any() and not signed[b, :, :, keys:].any()


def test_compiles_to_one_graph_for_all_longest_lengths():
    def step(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, rng_state):
        lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        longest = {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
        return attention(q, k, v, True, lengths, rng_state=rng_state, **longest, **P)

    def through_the_function(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, _):
        longest = longest_q, longest_k
        return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, dropout_p=0.25, causal=True)

    packs = [((33, 40), (7, 66), (41, 3)), ((50, 19), (2, 70), (11, 12)), ((64, 64), (1, 1), (1, 30))]
    for function in (step, through_the_function):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        for number, lengths in enumerate(packs):
            queries, keys = zip(*lengths)
            *inputs, dout = tensors((sum(queries), sum(keys)))
            rest = (offsets_of(queries), offsets_of(keys), max(queries), max(keys), torch.tensor([5, 6]))
            stance = torch.compiler.set_stance("fail_on_recompile") if number else contextlib.nullcontext()
            torch.manual_seed(7)
            expected = results(lambda *x, rest=rest, of=function: of(*x, *rest), inputs, dout)
            torch.manual_seed(7)
            with stance:
                assert_same(results(lambda *x, rest=rest, of=compiled: of(*x, *rest), inputs, dout), expected)


@pytest.mark.parametrize("own", [False, True])
def test_opcheck(own):
    q, k, v, dout = (x.detach() for x in tensors((40, 40)))
    cu_seqlens = offsets_of((33, 0, 7, 0))
    numbers = (cu_seqlens, cu_seqlens, None, None, 0.125, True, -1, -1, 0)
    dropout = {"rng_state": states(own), "max_seqlen_q": 33, "max_seqlen_k": 33, **P}
    torch.library.opcheck(torch.ops.dash_attn.forward.default, (q, k, v, *numbers), dropout)
    out, lse = torch.ops.dash_attn.forward(q, k, v, *numbers, **dropout)
    gradients = (torch.empty_like(x) for x in (q, k, v))
    arguments = (dout, q, k, v, out, lse, *gradients, *numbers, "auto", 0)
    torch.library.opcheck(torch.ops.dash_attn.backward.default, arguments, dropout)


NEEDED = "{} must be an int of at least 0 with rng_state in a variable-length batch, got {}"


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda"])
@pytest.mark.parametrize("change, message", [
    ({"max_seqlen_q": None}, NEEDED.format("max_seqlen_q", None)),
    ({"max_seqlen_k": None}, NEEDED.format("max_seqlen_k", None)),
    ({"max_seqlen_q": -1}, NEEDED.format("max_seqlen_q", -1)),
    ({"max_seqlen_k": -7}, NEEDED.format("max_seqlen_k", -7)),
])  # fmt: skip
def test_ops_need_the_longest_lengths(change, message, device):
    """Of CUDA tensors too, which are made up here."""
    with contextlib.ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(FakeTensorMode())
        q, k, v = (torch.empty(rows, heads, 64, dtype=BF16, device=device) for rows, heads in ((9, 4), (8, 2), (8, 2)))
        lengths = {name: torch.zeros(3, dtype=torch.int32, device=device) for name in CU_SEQLENS}
        dropout = {"rng_state": torch.zeros(2, dtype=torch.int64, device=device), **LONGEST, **P, **change}
        for op, arguments in (
            (torch.ops.dash_attn.attention, (None, True, "auto", 0)),
            (torch.ops.dash_attn.forward, (*lengths.values(), None, None, 0.125, True, -1, -1, 0)),
        ):
            of_op = lengths if op is torch.ops.dash_attn.attention else {}
            with pytest.raises(ValueError) as raised:
                op(q, k, v, *arguments, **of_op, **dropout)
            assert str(raised.value) == message


def test_ops_on_cuda_tensors_take_a_state_for_a_pack():
    """As far as a machine without a GPU can tell: shapes, of tensors that are made up."""
    with FakeTensorMode():
        q, k, v = (torch.empty(9, heads, 64, dtype=BF16, device="cuda") for heads in (4, 2, 2))
        lengths = {name: torch.zeros(3, dtype=torch.int32, device="cuda") for name in CU_SEQLENS}
        state = torch.zeros(2, dtype=torch.int64, device="cuda")
        out = attention(q, k, v, lengths=lengths, rng_state=state, **LONGEST, **P)
        assert out.shape == (9, 4, 64) and out.device.type == "cuda"


SHORT = "{} must be at least the length of the longest sequence with dropout, {}, got {}"


@pytest.mark.parametrize("change, message", [
    ({"max_seqlen_q": 39}, SHORT.format("max_seqlen_q", 40, 39)),
    ({"max_seqlen_k": 0}, SHORT.format("max_seqlen_k", 65, 0)),
    ({"max_seqlen_q": torch.tensor(39)}, SHORT.format("max_seqlen_q", 40, 39)),
    ({"max_seqlen_q": torch.tensor(-1)}, NEEDED.format("max_seqlen_q", -1)),
    ({"max_seqlen_q": torch.tensor(40.0)},
     "max_seqlen_q must be an int of at least 0 or an integer tensor of shape (), got a tensor of shape ()"),
    ({"max_seqlen_k": torch.tensor([65])},
     "max_seqlen_k must be an int of at least 0 or an integer tensor of shape (), got a tensor of shape (1,)"),
    ({"cu_seqlens_q": offsets_of((33, 0, 7, 41))},
     "cu_seqlens_q must hold non-decreasing offsets from 0 to 80, the number of rows, got [0, 33, 33, 40, 81]"),
])  # fmt: skip
def test_lengths_that_are_too_short_raise(change, message):
    *inputs, _ = tensors()
    before = torch.get_rng_state()
    with pytest.raises((TypeError, ValueError)) as raised:
        flash_attn_varlen_func(*inputs, **{**CU_SEQLENS, **LONGEST, **P, **change})
    assert str(raised.value).startswith(message)
    if isinstance(raised.value, TypeError):  # before a state is drawn
        assert torch.equal(torch.get_rng_state(), before)


FUNCTIONS_OF_LENGTHS = {
    flash_attn_varlen_func: (lambda q, k, v: (q, k, v), ("max_seqlen_q", "max_seqlen_k")),
    flash_attn_varlen_kvpacked_func: (lambda q, k, v: (q, torch.stack((k, v), 1)), ("max_seqlen_q", "max_seqlen_k")),
    flash_attn_varlen_qkvpacked_func: (lambda q, k, v: (torch.stack((q, k, v), 1),), ("max_seqlen",)),
}


@pytest.mark.parametrize("function", FUNCTIONS_OF_LENGTHS, ids=lambda function: function.__name__)
def test_lengths_in_tensors_are_read(function, monkeypatch):
    """As transformers gives them for packs by position_ids: one tensor for both sides, which is read once."""
    *inputs, dout = (x.detach() for x in tensors((80, 80), kv_heads=HEADS))
    pack, names = FUNCTIONS_OF_LENGTHS[function]
    offsets = [CU_SEQLENS["cu_seqlens_q"]] * len(names)
    reads = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda x: reads.append(x) or item(x))

    def call(length, packed):
        torch.manual_seed(3)
        return function(*packed, *offsets, **dict.fromkeys(names, length), **P)

    packed = [x.requires_grad_() for x in pack(*inputs)]
    expected = results(lambda *x: call(40, x), packed, dout)
    longest = torch.tensor(40, dtype=torch.int32)
    assert_same(results(lambda *x: call(longest, x), packed, dout), expected)
    assert [x is longest for x in reads] == [True]
    given = {"dropout_bits": dropout_bits(DropoutState.of(1), p=0.25, batch=4, heads=HEADS, seqlen_q=40, seqlen_k=40)}
    function(*packed, *offsets, **dict.fromkeys(names, longest), **P, **given)  # which needs no lengths
    assert len(reads) == 1
    on_meta = [x.to("meta") for x in packed]
    out = function(*on_meta, *(x.to("meta") for x in offsets), **dict.fromkeys(names, longest.to("meta")), **P)
    assert out.is_meta and out.shape == expected[0].shape


def test_lengths_in_tensors_are_not_read_in_the_capture_of_a_graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        q = torch.empty(80, HEADS, 64, dtype=BF16, device="cuda")
        offsets, longest = (torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in ((5,), ()))
        with pytest.raises(RuntimeError, match="^max_seqlen_q must be an int during CUDA graph capture with"):
            flash_attn_varlen_func(q, q, q, offsets, offsets, longest, longest, **P)


def test_the_backward_refuses_them_too_and_writes_nothing():
    q, k, v, dout = (x.detach() for x in tensors())
    numbers = (*CU_SEQLENS.values(), None, None, 0.125, True, -1, -1, 0)
    dropout = {"rng_state": states(False), **LONGEST, **P}
    out, lse = torch.ops.dash_attn.forward(q, k, v, *numbers, **dropout)
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    for wrong in ({"max_seqlen_q": 39}, {"max_seqlen_k": None}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be"):
            torch.ops.dash_attn.backward(
                dout, q, k, v, out, lse, *gradients, *numbers, "auto", 0, **{**dropout, **wrong}
            )
    assert all(x.isnan().all() for x in gradients)


def test_lengths_in_use_are_those_that_count():
    q, k, v, _ = tensors((80, 80))
    offsets, used = torch.tensor([0, 40, 80], dtype=torch.int32), torch.tensor([7, 33], dtype=torch.int32)
    pack = {"seqused_q": used, "seqused_k": used, **P}
    torch.manual_seed(1)
    out = flash_attn_varlen_func(q, k, v, offsets, offsets, 33, 33, **pack)
    torch.manual_seed(1)
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, offsets, offsets, 40, 40, **pack))
    with pytest.raises(ValueError, match="^" + SHORT.format("max_seqlen_q", 33, 32)):
        flash_attn_varlen_func(q, k, v, offsets, offsets, 32, 33, **pack)


def test_hints_may_be_tensors_where_bits_are_given():
    *inputs, _ = tensors()
    bits = dropout_bits(DropoutState.of(1), p=0.25, batch=len(LENGTHS), heads=HEADS, seqlen_q=40, seqlen_k=65)
    hints = {name: torch.tensor(length) for name, length in LONGEST.items()}
    given = flash_attn_varlen_func(*inputs, **CU_SEQLENS, **hints, **P, dropout_bits=bits)
    assert torch.equal(given, flash_attn_varlen_func(*inputs, **CU_SEQLENS, **LONGEST, **P, dropout_bits=bits))


def test_packs_without_rows():
    for totals, lengths in (((0, 5), ((0, 5),)), ((5, 0), ((5, 0),)), ((0, 0), ())):
        *inputs, dout = tensors(totals)
        offsets = (offsets_of([own[side] for own in lengths]) for side in (0, 1))
        out, *gradients = results(
            lambda *x, of=tuple(offsets): flash_attn_varlen_func(*x, *of, 5, 5, **P), inputs, dout
        )
        assert not any(x.any() for x in (out, *gradients))


def test_a_pack_of_equal_lengths_is_the_dense_batch():
    q, k, v, dout = tensors((120, 120))
    offsets = torch.arange(0, 121, 40, dtype=torch.int32)
    torch.manual_seed(5)
    packed = results(lambda *x: flash_attn_varlen_func(*x, offsets, offsets, 40, 40, **P), (q, k, v), dout)
    dense = [x.detach().unflatten(0, (3, 40)).requires_grad_() for x in (q, k, v)]
    torch.manual_seed(5)
    expected = results(lambda *x: flash_attn_func(*x, **P), dense, dout.unflatten(0, (3, 40)))
    assert_same(packed, (x.flatten(0, 1) for x in expected))


@pytest.mark.parametrize("scores", ["softcap", "alibi_slopes"])
def test_no_pack_of_cuda_tensors_drops_beside_changed_scores(scores):
    """Before anything runs: these tensors are made up."""
    with FakeTensorMode():
        x = torch.empty(9, 4, 64, dtype=BF16, device="cuda")
        offsets = torch.zeros(3, dtype=torch.int32, device="cuda")
        given = {"softcap": 5.0} if scores == "softcap" else {scores: torch.empty(4, device="cuda")}
        message = r"^dropout_p must be 0.0 with softcap or alibi_slopes on a GPU \(no kernel combines them\), got 0.25$"
        with pytest.raises(NotImplementedError, match=message):
            flash_attn_varlen_func(x, x, x, offsets, offsets, 5, 5, **P, **given)
        out = flash_attn_varlen_func(x, x, x, offsets, offsets, 5, 5, **P)
        assert out.shape == x.shape and out.device.type == "cuda"

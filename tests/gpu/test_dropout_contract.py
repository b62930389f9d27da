"""The bits of results with dropout follow from the inputs, the state and p; and states are drawn as torch says."""

import dataclasses

import dropout_checks
import gpu_support as support
import pytest
import torch
from bit_checks import check_sm_margins, check_under_load
from dropout_checks import HEAD_DIMS, MASKS, problem_of
from test_sm_margin import kernels
from torch.utils.checkpoint import checkpoint

import dash_attn
from dash_attn.dropout import DropoutBits, DropoutState, dropout_bits

DIMS = pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
MASK = pytest.mark.parametrize("mask", ["causal", "left"])
SHAPE = (2, 515, 515, 8, 2)
CALLS, CALLS_IN_FLIGHT = 24, 8


def inputs_of(head_dims, mask, device, shape=SHAPE, seed=0):
    problem = problem_of(head_dims, shape, **MASKS[mask])
    return problem, support.random_inputs(problem, device, seed)


def from_state(inputs: support.Inputs) -> support.Inputs:
    """The same call without bits, which are then made in each pass."""
    return dataclasses.replace(inputs, scores=dropout_checks.with_bits(inputs, None))


@MASK
@DIMS
def test_calls_under_load(head_dims, mask, perturbation, device):
    problem, inputs = inputs_of(head_dims, mask, device)
    for given in (inputs, from_state(inputs)):
        check_under_load(given, problem, perturbation, CALLS, CALLS_IN_FLIGHT)


@MASK
@DIMS
def test_sm_margin(head_dims, mask, device, num_sms):
    problem, inputs = inputs_of(head_dims, mask, device)
    check_sm_margins(from_state(inputs), problem, num_sms, (1, num_sms // 2, num_sms - 2))
    expected = support.forward(problem, inputs.q, inputs.k, inputs.v, scores=inputs.scores)
    for sm_margin in (1, num_sms // 2, num_sms - 1):
        found = support.forward(problem, inputs.q, inputs.k, inputs.v, sm_margin, inputs.scores)
        for name, x, y in zip(("out", "softmax_lse"), found, expected):
            mismatch = support.first_mismatch(name, x, y)
            assert mismatch is None, f"{problem}, sm_margin={sm_margin}: {mismatch}"


@MASK
@DIMS
def test_kept_bits_and_their_state_are_the_same(head_dims, mask, device):
    problem, inputs = inputs_of(head_dims, mask, device)
    for policy in support.policies(problem):
        expected = dropout_checks.results(problem, inputs, policy)
        support.assert_finite(expected, f"{problem} {policy}")
        found = dropout_checks.results(problem, from_state(inputs), policy)
        support.assert_same_bits(found, expected, f"{problem} {policy}, of the state")


@MASK
@DIMS
def test_neighbours_in_the_batch(head_dims, mask, device):
    """A sequence with a state of its own, alone and at every place of a batch."""
    alone, inputs = inputs_of(head_dims, mask, device, (1, 300, 333, 8, 2), seed=1)
    batch = dataclasses.replace(alone, batch=3)
    for place in range(3):
        tensors = support.random_qkv_dout(batch, device, seed=2 + place)
        for x, own in zip(tensors, (inputs.q, inputs.k, inputs.v, inputs.dout)):
            x[place] = own[0]
        scores = support.random_scores(batch, device, seed=2 + place)
        state = scores.dropout.rng_state.clone()
        state[place] = inputs.scores.dropout.rng_state[0]
        scores = scores._replace(dropout=scores.dropout._replace(bits=None, rng_state=state))
        among = support.with_forward(batch, *tensors, scores)
        for policy in support.policies(alone):
            expected = dropout_checks.results(alone, inputs, policy)
            found = dropout_checks.results(batch, among, policy)
            own = {name: x[place : place + 1] for name, x in found.items()}
            support.assert_same_bits(own, expected, f"{batch} {policy}, place {place}")


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_a_pack_of_equal_lengths_is_the_dense_batch(head_dims, device):
    """Under one state: sequence b has the number b in both."""
    problem, inputs = inputs_of(head_dims, "causal", device, (3, 130, 130, 4, 2))
    offsets = torch.arange(0, 3 * 130 + 1, 130, dtype=torch.int32, device=device)
    found = []
    for is_pack in (False, True):
        torch.manual_seed(11)
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        options = dict(dropout_p=0.1, causal=True)
        if is_pack:
            rows, lengths = [x.flatten(0, 1) for x in leaves], (offsets, offsets, 130, 130)
            out = dash_attn.flash_attn_varlen_func(*rows, *lengths, **options).unflatten(0, (3, 130))
        else:
            out = dash_attn.flash_attn_func(*leaves, **options)
        gradients = torch.autograd.grad(out, leaves, inputs.dout)
        found.append(dict(zip(("out", *support.GRADIENTS), (out.detach(), *gradients))))
    support.assert_same_bits(found[1], found[0], f"{problem}, as a pack")


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_a_shard_of_the_heads(head_dims, device):
    """Its part of the whole mask, and with it the bits of its heads among all."""
    problem, inputs = inputs_of(head_dims, "causal", device)
    state = DropoutState.of(3, 9, device)
    whole = dropout_checks.public(problem, inputs, dropout_bits=dropout_checks.bits_for(problem, state))
    for kv_head in range(2):
        heads, kv_heads = slice(4 * kv_head, 4 * kv_head + 4), slice(kv_head, kv_head + 1)
        part = dataclasses.replace(problem, heads=4, kv_heads=1)
        own = dataclasses.replace(
            inputs, q=inputs.q[:, :, heads], k=inputs.k[:, :, kv_heads], v=inputs.v[:, :, kv_heads],
            dout=inputs.dout[:, :, heads],
        )  # fmt: skip
        bits = dropout_checks.bits_for(part, state, first_head=4 * kv_head, total_heads=8)
        found = dropout_checks.public(part, own, dropout_bits=bits)
        expected = {name: x[:, :, kv_heads if name in ("dk", "dv") else heads] for name, x in whole.items()}
        support.assert_same_bits(found, expected, f"{part}, KV head {kv_head} of 2")


@MASK
@DIMS
def test_stream(head_dims, mask, perturbation, device):
    """Another than the current one, with bits that are made there too."""
    problem, inputs = inputs_of(head_dims, mask, device)
    for policy in support.policies(problem):
        expected = dropout_checks.results(problem, inputs, policy)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        perturbation.enqueue(16)
        with torch.cuda.stream(side):
            found = dropout_checks.results(problem, from_state(inputs), policy)
        side.synchronize()
        support.assert_same_bits(found, expected, f"{problem} {policy}, on a side stream")


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_torchs_seed(head_dims, device):
    problem, inputs = inputs_of(head_dims, "causal", device)
    torch.manual_seed(3)
    first, second = (dropout_checks.public(problem, inputs) for _ in range(2))
    torch.manual_seed(3)
    support.assert_same_bits(dropout_checks.public(problem, inputs), first, f"{problem}, the same seed")
    assert not torch.equal(first["out"], second["out"])
    torch.manual_seed(3)
    bits = dropout_checks.bits_for(problem, DropoutState.draw(device))
    given = dropout_checks.public(problem, inputs, dropout_bits=bits)
    support.assert_same_bits(given, first, f"{problem}, bits of the state that is drawn")


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128)], ids=str)
def test_checkpointing(head_dims, use_reentrant, device):
    problem, inputs = inputs_of(head_dims, "causal", device)
    torch.manual_seed(9)
    expected = dropout_checks.public(problem, inputs)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]

    def attention(*x):
        return dash_attn.flash_attn_func(*x, dropout_p=problem.dropout_p, causal=True)

    torch.manual_seed(9)
    out = checkpoint(attention, *leaves, use_reentrant=use_reentrant, preserve_rng_state=True)
    torch.rand(7, device=device)
    gradients = torch.autograd.grad(out, leaves, inputs.dout) if not use_reentrant else None
    if use_reentrant:  # which knows backward() alone
        out.backward(inputs.dout)
        gradients = tuple(x.grad for x in leaves)
    found = dict(zip(("out", *support.GRADIENTS), (out.detach(), *gradients)))
    support.assert_same_bits(found, expected, f"{problem}, checkpointed")


def test_a_call_keeps_no_bits_but_those_that_are_given(device):
    problem, inputs = inputs_of((64, 64), "causal", device)
    for bits in (None, dropout_checks.bits_for(problem, DropoutState.of(1, 2, device))):
        saved = []
        q = inputs.q.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda x, of=saved: of.append(x.dtype) or x, lambda x: x):
            dash_attn.flash_attn_func(q, inputs.k, inputs.v, dropout_p=0.1, dropout_bits=bits)
        assert (torch.uint8 in saved) == (bits is not None)


def captured(problem, inputs):
    """A graph of both passes under torch's generator, and what it writes."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]

    def step():
        out = dash_attn.flash_attn_func(*leaves, dropout_p=problem.dropout_p, causal=problem.causal)
        return out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    # torch sets the captured generator's seed and offset on the capture's stream too, and nothing else orders that
    # before what the first replay sets them to on another one.
    torch.cuda.synchronize()
    return graph, dict(zip(("out", *support.GRADIENTS), results))


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_each_replay_of_a_graph_has_a_mask_of_its_own(head_dims, device):
    problem, inputs = inputs_of(head_dims, "causal", device)
    graph, results = captured(problem, inputs)
    dropout_checks.check_replays(graph, results, lambda: dropout_checks.public(problem, inputs), str(problem))


def test_a_graph_with_a_state_follows_its_tensor(device):
    """As a caller that advances states itself needs it."""
    problem, inputs = inputs_of((128, 128), "causal", device)
    inputs = from_state(inputs)
    state = inputs.scores.dropout.rng_state
    dropout_checks.results(problem, inputs, "auto")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, softmax_lse = support.forward(problem, inputs.q, inputs.k, inputs.v, scores=inputs.scores)
        among = dataclasses.replace(inputs, out=out, softmax_lse=softmax_lse)
        gradients = support.backward(among, problem, "auto")
    for _ in range(3):
        state += 1
        graph.replay()
        found = {"out": out, "softmax_lse": softmax_lse, **gradients}
        support.assert_same_bits(dropout_checks.results(problem, inputs, "auto"), found, f"{problem}, a replay")


def test_the_host_does_not_wait(device):
    problem, inputs = inputs_of((128, 128), "causal", device)
    dropout_checks.public(problem, inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        dropout_checks.public(problem, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128)], ids=str)
def test_compiled_calls(head_dims, device):
    """Of the op with a state, so that the same is dropped with and without the compiler."""
    problem, inputs = inputs_of(head_dims, "causal", device)
    state = DropoutState.of(5, 6, device).rng_state

    def attention(q, k, v, rng_state):
        settings = {"rng_state": rng_state, "dropout_p": problem.dropout_p}
        return torch.ops.dash_attn.attention(q, k, v, None, True, "auto", 0, **settings)[0]

    found = []
    for function in (attention, torch.compile(attention, fullgraph=True)):
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = function(*leaves, state)
        gradients = torch.autograd.grad(out, leaves, inputs.dout)
        found.append(dict(zip(("out", *support.GRADIENTS), (out.detach(), *gradients))))
    support.assert_same_bits(found[1], found[0], f"{problem}, compiled")


def test_compiled_calls_draw_their_state(device):
    """As eager ones do under the same seed, in both passes; without the backend that has random numbers of its own."""
    problem, inputs = inputs_of((128, 128), "causal", device)

    def attention(q, k, v):
        return dash_attn.flash_attn_func(q, k, v, dropout_p=problem.dropout_p, causal=True)

    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    found = []
    for function in (attention, compiled, compiled):
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        torch.manual_seed(6)
        out = function(*leaves)
        gradients = torch.autograd.grad(out, leaves, inputs.dout)
        found.append(dict(zip(("out", *support.GRADIENTS), (out.detach(), *gradients))))
    support.assert_same_bits(found[1], found[0], f"{problem}, compiled")
    support.assert_same_bits(found[2], found[1], f"{problem}, compiled, the second call")


@pytest.mark.parametrize("head_dims", [(64, 64), (256, 256)], ids=str)
def test_no_kernel_has_more_ctas_than_sms_are_left(head_dims, device, num_sms, tmp_path):
    """The generator of the bits among them."""
    problem, inputs = inputs_of(head_dims, "causal", device, (4, 1100, 1100, 16, 8))
    inputs = from_state(inputs)
    for sm_margin in (1, num_sms // 2, num_sms - 2):
        found = kernels(lambda: dropout_checks.results(problem, inputs, "auto", sm_margin), tmp_path / "trace.json")
        assert any("generator" in name for name in found), list(found)
        more = {name[:80]: ctas for name, ctas in found.items() if ctas > num_sms - sm_margin}
        assert not more, f"sm_margin={sm_margin} of {num_sms} SMs: {more}"


def test_one_state_numbers_its_sequences(device):
    """Sequence b of a call with one state has the mask of number b, whatever batch it is in."""
    problem, inputs = inputs_of((64, 64), "causal", device, (3, 130, 130, 4, 2))
    state = DropoutState.of(7, 8, device)
    whole = dropout_checks.public(problem, inputs, dropout_bits=dropout_checks.bits_for(problem, state))
    first = dataclasses.replace(problem, batch=2)
    own = dataclasses.replace(
        inputs, **{name: getattr(inputs, name)[:2] for name in ("q", "k", "v", "dout", "out", "softmax_lse")}
    )
    found = dropout_checks.public(first, own, dropout_bits=dropout_checks.bits_for(first, state))
    support.assert_same_bits(found, {name: x[:2] for name, x in whole.items()}, f"{first}, of a larger batch")
    made = dropout_bits(state, p=0.1, batch=3, heads=4, seqlen_q=130, seqlen_k=130)
    assert isinstance(made, DropoutBits) and not torch.equal(made.bits[0], made.bits[1])

"""Packs whose bits are made of a state in each pass: what they drop, what is kept of them, and errors."""

import dataclasses
import random
import subprocess
import sys

import dropout_checks
import gpu_support as support
import pack_checks
import pytest
import torch
from dropout_checks import HEAD_DIMS, MASKS, problem_of
from pack_checks import Pack, Pool, assert_as_alone, lay_out, make_pack
from test_sm_margin import kernels

import dash_attn
from dash_attn.dropout import DropoutState, dropout_bits

DIMS = pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
MASK = pytest.mark.parametrize("mask", ["full", "causal", "both"])
LENGTHS = [(70, 65), (0, 0), (129, 200), (1, 1), (0, 40), (300, 130)]
FAR_TOO_LONG = 10**6


def pack_of(problem: support.Problem, device: str, gaps: bool = False, poisoned: int | None = None) -> Pack:
    pool, chance = Pool(problem, device), random.Random(1)
    rows = [lay_out(own, chance, gaps=gaps) for own in zip(*LENGTHS)]
    return make_pack([pool.get(*own) for own in LENGTHS], *rows, poisoned=poisoned)


def of_states(pack: Pack, policy: str, sm_margin: int = 0, **longest: int) -> dict[str, torch.Tensor]:
    """Both passes of the op with a state for each sequence, and without bits."""
    left, right = pack.problem.window
    lengths = {name: getattr(pack, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")}
    longest = {"max_seqlen_q": pack.max_seqlen_q, "max_seqlen_k": pack.max_seqlen_k, **longest}

    def attention(*tensors, dropout_p, dropout_bits, alibi_slopes, return_attn_probs, learnable_sink=None):
        assert alibi_slopes is None and return_attn_probs
        return torch.ops.dash_attn.attention(
            *tensors, pack.problem.softmax_scale, pack.problem.causal, policy, sm_margin, left, right,
            pack.problem.attention_chunk, **lengths, sinks=learnable_sink, rng_state=dropout_bits.state.rng_state,
            dropout_p=dropout_p, **longest,
        )  # fmt: skip

    return pack_checks.outputs_of(attention, (pack.q, pack.k, pack.v), pack.dout, pack.scores, {})


@MASK
@DIMS
def test_each_sequence_drops_what_it_does_alone(head_dims, mask, device):
    """With a state of its own; gaps, rows in use, empty sequences and one that is poisoned. Alone it has bits that are
    given, and of which those that nobody may look at are inverted."""
    problem = problem_of(head_dims, (1, 0, 0, 4, 2), **MASKS[mask], sinks=True, lse_gradient=True)
    for gaps, poisoned in ((False, None), (True, 2)):
        pack = pack_of(problem, device, gaps, poisoned)
        for policy in support.policies(problem):
            assert_as_alone(pack, {policy: of_states(pack, policy)})


@DIMS
def test_lengths_that_are_longer_change_nothing(head_dims, device):
    problem = problem_of(head_dims, (1, 0, 0, 4, 2), **MASKS["causal"])
    pack = pack_of(problem, device)
    for longest in (dict(max_seqlen_q=301, max_seqlen_k=FAR_TOO_LONG), dict(max_seqlen_q=FAR_TOO_LONG)):
        assert_as_alone(pack, {"auto": of_states(pack, "auto", **longest)})


@pytest.mark.parametrize("head_dims", [(64, 64), (256, 256)], ids=str)
def test_sm_margin(head_dims, device, num_sms, tmp_path):
    """Neither pass has a kernel with more CTAs than SMs are left, the generator among them, and no bit changes."""
    problem = problem_of(head_dims, (1, 0, 0, 16, 8), **MASKS["causal"])
    pack = pack_of(problem, device)
    for sm_margin in (1, num_sms // 2, num_sms - 2):
        found = kernels(lambda margin=sm_margin: of_states(pack, "auto", margin), tmp_path / "trace.json")
        assert any("generator" in name for name in found), list(found)
        more = {name[:80]: ctas for name, ctas in found.items() if ctas > num_sms - sm_margin}
        assert not more, f"sm_margin={sm_margin} of {num_sms} SMs: {more}"
        assert_as_alone(pack, {"auto": of_states(pack, "auto", sm_margin)})


@dataclasses.dataclass
class Call:
    """Both passes of the public function, which draws a state."""

    leaves: list[torch.Tensor]
    dout: torch.Tensor
    cu_seqlens: torch.Tensor
    longest: int

    @classmethod
    def of(cls, device: str, lengths: tuple[int, ...], head_dims: tuple[int, int] = (64, 64), heads: int = 4) -> "Call":
        problem = problem_of(head_dims, (1, sum(lengths), sum(lengths), heads, 2), **MASKS["causal"])
        q, k, v, dout = (x[0] for x in support.random_qkv_dout(problem, device, 0))
        offsets = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        return cls([x.requires_grad_() for x in (q, k, v)], dout, offsets, max(lengths))

    def forward(self) -> torch.Tensor:
        lengths = self.cu_seqlens, self.cu_seqlens, self.longest, self.longest
        return dash_attn.flash_attn_varlen_func(*self.leaves, *lengths, dropout_p=0.1, causal=True)

    def both(self) -> dict[str, torch.Tensor]:
        out = self.forward()
        gradients = torch.autograd.grad(out, self.leaves, self.dout)
        return dict(zip(("out", *support.GRADIENTS), (out.detach(), *gradients)))


def test_bits_are_not_kept_for_the_backward(device):
    """Measured: what the forward leaves behind is its results and a state."""
    call = Call.of(device, (2000, 2048, 100), heads=16)
    call.both()  # what is made once
    bits_bytes = 3 * 16 * 2048 * 2048 // 8
    slack = 4 << 20  # that torch's allocator rounds up by
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.dtype) or x, lambda x: x):
        out = call.forward()
    kept = torch.cuda.memory_allocated() - before
    results = out.numel() * out.element_size() + 4 * out.shape[0] * out.shape[1]  # and the log-sum-exp
    assert torch.uint8 not in saved
    assert kept <= results + slack < bits_bytes, f"{kept} bytes are kept, {results} of results, {bits_bytes} of bits"
    assert torch.cuda.max_memory_allocated() - before >= bits_bytes  # they were there
    gradients = torch.autograd.grad(out, call.leaves, call.dout)
    of_gradients = sum(x.numel() * x.element_size() for x in gradients)
    del out
    assert torch.cuda.memory_allocated() - before <= of_gradients + slack


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_each_replay_of_a_graph_has_a_mask_of_its_own(head_dims, device):
    """And the lengths that its tensors have then, as long as they are no longer than those of the capture."""
    call = Call.of(device, (130, 300, 77), head_dims)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call.both()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call.both()
    for lengths in ((130, 300, 77), (300, 7, 200)):
        call.cu_seqlens.copy_(torch.tensor([0, *lengths]).cumsum(0))
        dropout_checks.check_replays(graph, results, call.both, str(lengths))


def test_the_host_does_not_wait(device):
    call = Call.of(device, (130, 300, 77))
    call.both()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.both()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_probabilities_have_the_signs_of_the_state_that_is_drawn(device):
    call, lengths = Call.of(device, (70, 0, 33)), (70, 0, 33)
    offsets = call.cu_seqlens, call.cu_seqlens, call.longest, call.longest
    torch.manual_seed(8)
    signed = dash_attn.flash_attn_varlen_func(*call.leaves, *offsets, dropout_p=0.1, return_attn_probs=True)[2]
    torch.manual_seed(8)
    mask = dropout_bits(DropoutState.draw(device), p=0.1, batch=3, heads=4, seqlen_q=70, seqlen_k=70).mask()
    for b, length in enumerate(lengths):
        assert torch.equal(signed[b, :, :length, :length] >= 0, mask[b, :, :length, :length]), b


def test_probabilities_are_refused_in_a_capture(device):
    """Their shape would have to be read; nothing has been captured of the call that is refused."""
    call = Call.of(device, (70, 0, 33))
    offsets = call.cu_seqlens, call.cu_seqlens, call.longest, call.longest
    q, k, v = (x.detach() for x in call.leaves)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        zeros = torch.zeros_like(q)  # a graph of nothing is warned of
        with pytest.raises(RuntimeError, match="^return_attn_probs must be False during CUDA graph capture with"):
            dash_attn.flash_attn_varlen_func(q, k, v, *offsets, dropout_p=0.1, return_attn_probs=True)
    assert zeros.shape == q.shape


def test_longest_lengths_in_a_tensor_are_read_but_in_the_capture_of_a_graph(device):
    call = Call.of(device, (70, 33))
    in_tensor = dataclasses.replace(call, longest=torch.tensor(70, device=device))
    outs = []
    for same in (call, in_tensor):
        torch.manual_seed(1)
        outs.append(same.forward())
    assert torch.equal(*outs)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        zeros = torch.zeros_like(call.leaves[0])  # a graph of nothing is warned of
        with pytest.raises(RuntimeError, match="^max_seqlen_q must be an int during CUDA graph capture with"):
            in_tensor.forward()
    assert zeros.shape == call.leaves[0].shape


def test_longest_lengths_that_are_no_ints_raise_before_anything_runs(device):
    call = Call.of(device, (70, 33))
    with pytest.raises(TypeError, match="^max_seqlen_q must be an int of at least 0"):
        dataclasses.replace(call, longest=None).forward()
    q, k, v = (x.detach() for x in call.leaves)
    state = DropoutState.of(1, 2, device).rng_state
    numbers = (call.cu_seqlens, call.cu_seqlens, None, None, 0.125, True, -1, -1, 0)
    dropout = dict(rng_state=state, dropout_p=0.1)
    message = "^max_seqlen_{} must be an int of at least 0 with rng_state in a variable-length batch, got {}"
    cases = [
        ("q", {}, "None"), ("q", dict(max_seqlen_k=70), "None"), ("k", dict(max_seqlen_q=70), "None"),
        ("k", dict(max_seqlen_q=70, max_seqlen_k=-1), "-1"),
    ]  # fmt: skip
    for side, wrong, text in cases:
        with pytest.raises(ValueError, match=message.format(side, text)):
            torch.ops.dash_attn.forward(q, k, v, *numbers, **dropout, **wrong)


TOO_SHORT = """
import dash_attn, torch
q, k, v = (torch.randn(300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
cu_seqlens = torch.tensor([0, 100, 200, 300], dtype=torch.int32, device="cuda")
numbers = (cu_seqlens, cu_seqlens, None, None, 0.125, True, -1, -1, 0)
dropout = dict(rng_state=torch.tensor([1, 2], device="cuda"), dropout_p=0.1)
right, wrong = dict(max_seqlen_q=100, max_seqlen_k=100), dict({longest})
out, lse = torch.ops.dash_attn.forward(q, k, v, *numbers, **dropout, **(right if {backward} else wrong))
torch.cuda.synchronize()
print("forward done", flush=True)
gradients = [torch.empty_like(x) for x in (q, k, v)]
torch.ops.dash_attn.backward(out, q, k, v, out, lse, *gradients, *numbers, "auto", 0, **dropout, **wrong)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("side", ["q", "k"])
def test_a_sequence_beyond_the_bits_is_an_error_on_the_device(side, backward, device):
    """In a process of its own, which can do no more with the device."""
    longest = {"max_seqlen_q": 100, "max_seqlen_k": 100, f"max_seqlen_{side}": 64}
    text = ", ".join(f"{name}={length}" for name, length in longest.items())
    program = TOO_SHORT.format(longest=text, backward=backward)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode != 0 and "CUDA error" in result.stderr, result.stderr
    assert ("forward done" in result.stdout) == backward
    kind = "queries" if side == "q" else "keys"
    assert f"with dropout no sequence must have more {kind} than max_seqlen_{side}" in result.stdout, result.stdout


def test_a_pack_and_a_dense_batch_have_the_same_bits_under_one_seed(device):
    """Of equal lengths, in which sequence b has the number b; and through the functions that take tensors in one."""
    problem = problem_of((64, 64), (3, 130, 130, 4, 4), **MASKS["causal"])
    inputs = support.random_inputs(problem, device)
    torch.manual_seed(2)
    expected = dropout_checks.public(problem, inputs)
    offsets = torch.arange(0, 391, 130, dtype=torch.int32, device=device)
    qkv = torch.stack([x.detach().flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v)], dim=1).requires_grad_()
    torch.manual_seed(2)
    out = dash_attn.flash_attn_varlen_qkvpacked_func(qkv, offsets, 130, dropout_p=problem.dropout_p, causal=True)
    (gradient,) = torch.autograd.grad(out, qkv, inputs.dout.flatten(0, 1))
    found = dict(zip(("out", *support.GRADIENTS), (out.detach(), *gradient.unbind(1))))
    found = {name: x.unflatten(0, (3, 130)) for name, x in found.items()}
    support.assert_same_bits(found, expected, f"{problem}, qkv in one")

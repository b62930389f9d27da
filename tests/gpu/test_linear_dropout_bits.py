"""linear_with_dropout_bits and dropout_bits_beside on a GPU: y, bits and gradients, under load and in graphs."""

import linear_checks
import pytest
import torch
from float64_reference import relative_error
from linear_checks import SHAPES, call, expected_bits, operands
from pack_checks import poisoned_allocations
from torch.nn import functional

from dash_attn import flash_attn_func
from dash_attn.dropout import DropoutState, dropout_bits, dropout_bits_beside, layout, linear_with_dropout_bits

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)
BF16 = torch.bfloat16
LARGE = (4096, 3072, 2048)
MASKS = [dict(), dict(causal=True), dict(window_size=(100, 40)), dict(causal=True, attention_chunk=70)]
MODES = [("bit_sliced", 7), ("bit_sliced", 10), ("flash_attention_2", 7)]


@DTYPES
@SHAPE
@pytest.mark.parametrize("bias", [False, True])
def test_sums_of_whole_numbers_are_exact(shape, dtype, bias, device):
    given = operands(shape, dtype, device, bias=bias, whole=True)
    with poisoned_allocations():
        y, _ = call(given)
    linear_checks.check_whole_numbers(given, y)


@DTYPES
@pytest.mark.parametrize("shape", [*SHAPES, LARGE], ids=str)
def test_errors_are_no_larger_than_torchs(shape, dtype, device):
    given = operands(shape, dtype, device)
    with poisoned_allocations():
        y, _ = call(given)
    linear_checks.check_errors(given, y)


@pytest.mark.parametrize("mapping, rounds", MODES)
@pytest.mark.parametrize("p", [0.125, 0.1, 1e-30, 0.999])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_bits_are_the_generators(mask, p, mapping, rounds, device):
    """Byte for byte, and what the one leaves out the other does too: the poison stays."""
    given = operands((515, 264, 136), BF16, device)
    state = torch.tensor([[3, 5], [2**62 + 1, -7]], device=device)
    left, right = mask.get("window_size", (-1, -1))
    numbers = (
        p, 300, 1100, 1, 5, 64, 96, mapping == "flash_attention_2", rounds, mask.get("causal", False), left, right,
        mask.get("attention_chunk", 0), 0,
    )  # fmt: skip
    for own in (False, True):
        rng_state = state if own else state[1]
        found, expected = (torch.full(layout.shape_of(2, 3, 300, 1100), 0xA5, dtype=torch.uint8, device=device)
                           for _ in range(2))  # fmt: skip
        y = given.x.new_full((515, 264), float("nan"))
        torch.ops.dash_attn_C.dropout_bits(expected, rng_state, *numbers)
        torch.ops.dash_attn_C.linear_with_dropout_bits(y, found, *given.tensors(), rng_state, *numbers)
        differ = (found != expected).nonzero()
        assert not len(differ), f"own={own}: {len(differ)} bytes differ, the first at {differ[0].tolist()}"
        linear_checks.check_errors(given, y)


@pytest.mark.parametrize("shape", [(1, 8, 8), LARGE], ids=str)
@pytest.mark.parametrize("sizes", [
    dict(batch=1, heads=1, seqlen_q=1, seqlen_k=1), dict(batch=0), dict(batch=2, heads=16, seqlen_q=2048, seqlen_k=2000)
], ids=["one", "none", "many"])  # fmt: skip
def test_few_products_beside_many_bits_and_many_beside_few(shape, sizes, device):
    given = operands(shape, BF16, device, whole=True)
    with poisoned_allocations():
        y, bits = call(given, **sizes)
    linear_checks.check_whole_numbers(given, y)
    assert torch.equal(bits, expected_bits(device, **sizes))


def test_rows_do_not_depend_on_others(device):
    """Of a row its sums alone: not on how many rows there are, nor on others that are not finite."""
    given = operands((1000, 520, 328), BF16, device)
    whole, _ = call(given)
    for rows in (1, 64, 129, 300):
        part, _ = call(linear_checks.Operands(given.x[:rows], given.weight, given.bias))
        assert torch.equal(part, whole[:rows]), rows
    spoilt = given.x.clone()
    spoilt[130] = float("nan")
    found, _ = call(linear_checks.Operands(spoilt, given.weight, given.bias))
    assert found[130].isnan().all()
    others = torch.arange(1000, device=device) != 130
    assert torch.equal(found[others], whole[others])


def test_operands_of_any_strides(device):
    given = operands((2 * 65, 264, 136), BF16, device, whole=True)
    expected = given.exact().to(BF16)
    wide = torch.cat((given.x, given.x), dim=1)
    buffer = torch.empty(given.x.numel() + 1, dtype=BF16, device=device)
    buffer[1:] = given.x.flatten()
    bias = torch.stack((given.bias, given.bias), dim=1)[:, 1]
    weight = given.weight.mT.contiguous().mT
    for x in (wide[:, :136], wide[:, 136:], buffer[1:].view_as(given.x), given.x.mT.contiguous().mT):
        assert torch.equal(call(linear_checks.Operands(x, weight, bias))[0], expected)
    shaped = given.x.view(2, 65, 136)
    assert torch.equal(call(linear_checks.Operands(shaped, given.weight, given.bias))[0], expected.view(2, 65, 264))
    turned = linear_checks.Operands(shaped.transpose(0, 1), given.weight, given.bias)
    assert torch.equal(call(turned)[0], expected.view(2, 65, 264).transpose(0, 1))


@DTYPES
def test_calls_under_load(dtype, perturbation, device):
    given = operands((2049, 2056, 1032), dtype, device)
    sizes = dict(batch=2, heads=8, seqlen_q=1024, seqlen_k=1000)
    y, bits = call(given, **sizes)
    assert torch.equal(bits, expected_bits(device, **sizes))
    for first in range(0, 20, 5):
        perturbation.enqueue(12)
        found = []
        for _ in range(5):
            perturbation.move_allocations()
            found.append(call(given, **sizes))
        for number, (other, other_bits) in enumerate(found, first):
            assert torch.equal(other, y) and torch.equal(other_bits, bits), f"call {number} of 20"


def test_sm_margin(device, num_sms):
    given = operands((1000, 776, 328), BF16, device)
    y, bits = call(given)
    for sm_margin in (1, num_sms // 2, num_sms - 2, num_sms - 1):
        found = call(given, sm_margin=sm_margin)
        assert torch.equal(found[0], y) and torch.equal(found[1], bits), sm_margin
    with pytest.raises(
        (ValueError, RuntimeError), match=f"sm_margin must be at least 0 and less than the {num_sms} SMs"
    ):
        call(given, sm_margin=num_sms)


@DTYPES
def test_gradients(dtype, device):
    """No further from float64 than those of torch's linear layer, which they are."""
    given = operands((515, 264, 136), dtype, device)
    dy = torch.randn(515, 264, generator=torch.Generator().manual_seed(9)).to(device, dtype)
    leaves = [t.requires_grad_() for t in given.tensors()]
    y, _ = linear_with_dropout_bits(*leaves, state=DropoutState.of(1, 2, device), p=0.1, **linear_checks.SIZES)
    found = torch.autograd.grad(y, leaves, dy)
    of_torch = torch.autograd.grad(functional.linear(*leaves), leaves, dy)
    exact = dy.double() @ leaves[1].double(), dy.double().mT @ leaves[0].double(), dy.double().sum(0)
    for name, ours, torchs, true in zip(("x", "weight", "bias"), found, of_torch, exact):
        errors = [relative_error(g, true) for g in (ours, torchs)]
        assert ours.dtype == dtype and errors[0] <= linear_checks.MARGIN * errors[1], (name, errors)


def attention_inputs(device, rows=(2, 256)):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(*rows, 4, 64, generator=generator).to(device, BF16).requires_grad_() for _ in range(3)]


def through_attention(inputs, bits) -> list[torch.Tensor]:
    out = flash_attn_func(*inputs, dropout_p=0.1, dropout_bits=bits, causal=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]


OF_ATTENTION = dict(p=0.1, batch=2, heads=4, seqlen_q=256, seqlen_k=256)


@pytest.mark.parametrize("mask", [{}, dict(causal=True)], ids=["every pair", "causal"])
def test_attention_takes_the_bits_and_its_backward_makes_them_again(mask, device):
    state, inputs = DropoutState.of(5, 6, device), attention_inputs(device)
    expected = through_attention(inputs, dropout_bits(state, **OF_ATTENTION))
    given = operands((512, 264, 136), BF16, device)
    with poisoned_allocations():
        _, bits = linear_with_dropout_bits(*given.tensors(), state=state, **OF_ATTENTION, **mask)
        with dropout_bits_beside(state, **OF_ATTENTION, **mask) as beside:
            functional.linear(*given.tensors())
        for made in (bits, beside.bits):
            assert all(map(torch.equal, through_attention(inputs, made), expected))
        # The backward does not look at the bits that it was not to keep.
        out = flash_attn_func(*inputs, dropout_p=0.1, dropout_bits=bits, causal=True)
        bits.bits.zero_()
        found = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(map(torch.equal, found, expected[1:]))


def test_graphs(device):
    """A layer, bits beside another and attention in one graph, with the state that the graph is replayed with."""
    given, inputs = operands((512, 264, 136), BF16, device), attention_inputs(device)
    numbers = torch.tensor([5, 6], device=device)

    def step():
        state = DropoutState(numbers)
        y, bits = linear_with_dropout_bits(*given.tensors(), state=state, causal=True, **OF_ATTENTION)
        with dropout_bits_beside(state, causal=True, **OF_ATTENTION) as beside:
            other = functional.linear(*given.tensors())
        return [y, other, *through_attention(inputs, bits), *through_attention(inputs, beside.bits)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (7, 8):
        numbers.copy_(torch.tensor([seed, 9]))
        given.x.copy_(torch.randn_like(given.x))
        expected = step()
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        graph.replay()
        assert all(map(torch.equal, captured, expected)), seed
        assert all(map(torch.equal, captured[2:6], captured[6:]))


def test_the_host_does_not_wait(device):
    given, state = operands((512, 264, 136), BF16, device), DropoutState.of(5, 6, device)

    def run():
        linear_with_dropout_bits(*given.tensors(), state=state, **OF_ATTENTION)
        with dropout_bits_beside(state, **OF_ATTENTION):
            functional.linear(*given.tensors())

    run()
    torch.cuda.synchronize()
    start = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)  # clocks: about 0.2 s
    start.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not start.query(), "the calls returned only when earlier work had ended"


def test_bits_beside_under_load(perturbation, device):
    """They wait for a state that is written late, whoever uses them waits for them, and freed memory is not theirs."""
    sizes = dict(p=0.1, batch=2, heads=8, seqlen_q=1024, seqlen_k=1000)
    given = operands(LARGE, BF16, device)
    expected = [dropout_bits(DropoutState.of(n, 1, device), **sizes).bits for n in range(20)]
    states = torch.tensor([[n, 1] for n in range(20)], device=device)
    torch.cuda.synchronize()
    found = []
    for number in range(20):
        perturbation.enqueue(3)
        perturbation.move_allocations()
        numbers = torch.zeros(2, dtype=torch.int64, device=device)
        torch.cuda._sleep(1_000_000)
        numbers.copy_(states[number])
        with dropout_bits_beside(DropoutState(numbers), **sizes) as beside:
            functional.linear(*given.tensors())
        copy = beside.bits.bits.clone()
        beside.bits.bits.fill_(0xA5)
        del beside, numbers  # the next ones get their memory
        found.append(copy)
    for number, (bits, true) in enumerate(zip(found, expected)):
        assert torch.equal(bits, true), f"block {number} of 20"


def test_bits_beside_on_a_stream_of_the_callers(device):
    given, state = operands((512, 264, 136), BF16, device), DropoutState.of(5, 6, device)
    expected = dropout_bits(state, **OF_ATTENTION).bits
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        with dropout_bits_beside(state, **OF_ATTENTION) as beside:
            functional.linear(*given.tensors())
        copy = beside.bits.bits.clone()
    stream.synchronize()
    assert torch.equal(copy, expected)

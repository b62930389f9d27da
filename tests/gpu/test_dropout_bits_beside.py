"""dropout_bits_beside on a GPU: bits, and gradients of the attention that takes them, under load and in graphs."""

import gpu_support as support
import pytest
import torch
from pack_checks import poisoned_allocations
from torch.nn import functional

from dash_attn import flash_attn_func
from dash_attn.dropout import DropoutState, dropout_bits, dropout_bits_beside

BF16 = torch.bfloat16


def operands(rows, columns, depth, device):
    """x and weight of a linear layer for bits to be made beside."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(device, BF16) for shape in ((rows, depth), (columns, depth))]


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
    x, weight = operands(512, 264, 136, device)
    with poisoned_allocations():
        with dropout_bits_beside(state, **OF_ATTENTION, **mask) as beside:
            functional.linear(x, weight)
        bits = beside.bits
        assert all(map(torch.equal, through_attention(inputs, bits), expected))
        # The backward does not look at the bits that it was not to keep.
        out = flash_attn_func(*inputs, dropout_p=0.1, dropout_bits=bits, causal=True)
        bits.bits.zero_()
        found = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(map(torch.equal, found, expected[1:]))


def test_graphs(device):
    """A layer, bits beside it and attention in one graph, with the state that the graph is replayed with."""
    (x, weight), inputs = operands(512, 264, 136, device), attention_inputs(device)
    numbers = torch.tensor([5, 6], device=device)

    def step():
        state = DropoutState(numbers)
        with dropout_bits_beside(state, causal=True, **OF_ATTENTION) as beside:
            y = functional.linear(x, weight)
        return [y, *through_attention(inputs, beside.bits)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (7, 8):
        numbers.copy_(torch.tensor([seed, 9]))
        x.copy_(torch.randn_like(x))
        expected = step()
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        graph.replay()
        assert all(map(torch.equal, captured, expected)), seed


def test_the_host_does_not_wait(device):
    (x, weight), state = operands(512, 264, 136, device), DropoutState.of(5, 6, device)

    def run():
        with dropout_bits_beside(state, **OF_ATTENTION):
            functional.linear(x, weight)

    run()
    with support.host_must_not_wait("bits beside a linear layer"):
        run()


def test_bits_beside_under_load(perturbation, device):
    """They wait for a state that is written late, whoever uses them waits for them, and freed memory is not theirs."""
    sizes = dict(p=0.1, batch=2, heads=8, seqlen_q=1024, seqlen_k=1000)
    x, weight = operands(4096, 3072, 2048, device)
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
            functional.linear(x, weight)
        copy = beside.bits.bits.clone()
        beside.bits.bits.fill_(0xA5)
        del beside, numbers  # the next ones get their memory
        found.append(copy)
    for number, (bits, true) in enumerate(zip(found, expected)):
        assert torch.equal(bits, true), f"block {number} of 20"


def test_bits_beside_on_a_stream_of_the_callers(device):
    (x, weight), state = operands(512, 264, 136, device), DropoutState.of(5, 6, device)
    expected = dropout_bits(state, **OF_ATTENTION).bits
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        with dropout_bits_beside(state, **OF_ATTENTION) as beside:
            functional.linear(x, weight)
        copy = beside.bits.bits.clone()
    stream.synchronize()
    assert torch.equal(copy, expected)

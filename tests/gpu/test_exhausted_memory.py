"""A call whose workspace does not fit raises torch's own error, and the next call works."""

from collections.abc import Callable, Iterator

import pytest
import torch

from dash_attn import flash_attn_func

MIB = 1 << 20


@pytest.fixture
def limit_memory() -> Iterator[Callable[[int], None]]:
    """A function that lets this process allocate only so many bytes more."""

    def limit(more: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_backward(device, limit_memory):
    """Its thread is autograd's, where an error that is not caught ends the process."""
    generator = torch.Generator(device).manual_seed(0)
    shape, of_keys = (1, 8192, 64, 64), (1, 8192, 1, 64)  # dq has 64 MiB, the sums of dq 128
    shapes = (shape, of_keys, of_keys, shape)
    q, k, v, dout = (torch.randn(x, generator=generator, device=device, dtype=torch.bfloat16) for x in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(q, k, v, causal=True)
    expected = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    limit_memory(120 * MIB)
    text = r"^CUDA out of memory\. Tried to allocate a workspace of \d+ bytes on cuda:0"
    with pytest.raises(torch.OutOfMemoryError, match=text):
        torch.autograd.grad(out, inputs, dout, retain_graph=True)
    limit_memory(600 * MIB)
    for gradient, known in zip(torch.autograd.grad(out, inputs, dout), expected):
        assert torch.equal(gradient, known)

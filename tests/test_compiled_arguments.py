"""Numbers that torch.compile makes symbols of: float arguments, lengths, and length hints that come from tensors."""

import itertools

import pytest
import torch
from interface_support import assert_same_bits, randn
from pack_support import int32
from products import pairwise, spread

import dash_attn
from dash_attn.compat import flash_attn_2, flash_attn_3

LENGTHS = (5, 13)
OFFSETS = int32([0, 5, 18])
X = randn(2, 9, 2, 32)  # of a pack its rows
DENSE = {
    "flash_attn_func": lambda of, x, **given: of(x, x, x, **given),
    "flash_attn_kvpacked_func": lambda of, x, **given: of(x, torch.stack((x, x), 2), **given),
    "flash_attn_qkvpacked_func": lambda of, x, **given: of(torch.stack((x, x, x), 2), **given),
}
PACKED = {
    "flash_attn_varlen_func": lambda of, x, n, **given: of(x, x, x, OFFSETS, OFFSETS, n, n, **given),
    "flash_attn_varlen_kvpacked_func": lambda of, x, n, **given: of(
        x, torch.stack((x, x), 1), OFFSETS, OFFSETS, n, n, **given
    ),
    "flash_attn_varlen_qkvpacked_func": lambda of, x, n, **given: of(
        torch.stack((x, x, x), 1), OFFSETS, n, **given
    ),
}  # fmt: skip
CALLS = DENSE | {
    name: lambda of, x, call=call, **given: call(of, x.flatten(0, 1), max(LENGTHS), **given)
    for name, call in PACKED.items()
}
NUMBERS = [{}, {"softcap": 2.0}, {"softmax_scale": 0.3}, {"dropout_p": 0.25}, {"softcap": 0.0, "softmax_scale": 2}]


def assert_one_graph(function, *arguments, backend="eager", **options):
    """`function`, compiled, is one graph and has the results and gradients of eager mode."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend=backend, **options)):
        torch.manual_seed(0)
        out = call(*arguments)
        wanted = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        results.append((out, *(torch.autograd.grad(out, wanted, dout) if out.requires_grad else ())))
    assert_same_bits(results[1], results[0])
    # A backend that specializes numbers starts again, which counts as a graph more.
    if backend == "eager":
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# Every number of the two functions that the others end in; of those, two that take each number somewhere.
SYMBOLIC = [
    *itertools.product(("flash_attn_func", "flash_attn_varlen_func"), NUMBERS),
    *spread(((name,) for name in CALLS for _ in range(2) if "packed" in name), NUMBERS),
]


@pytest.mark.parametrize("name, numbers, backend", spread(SYMBOLIC, ["eager", "aot_eager"]), ids=str)
def test_symbolic_numbers_are_one_graph(name, numbers, backend):
    """With dynamic=True the defaults are symbols too."""
    of, call = getattr(dash_attn, name), CALLS[name]
    assert_one_graph(lambda x: call(of, x, causal=True, **numbers), X, backend=backend, dynamic=True)


@pytest.mark.parametrize("numbers", [{}, {"softcap": 2.0}, {"softmax_scale": 0.3}], ids=str)
def test_symbolic_numbers_of_other_functions_are_one_graph(numbers):
    for function in (
        lambda x: dash_attn.flash_attn_with_kvcache(x[:, :2], x, x, causal=True, **numbers),
        lambda x: flash_attn_3.flash_attn_func(x, x, x, causal=True, **numbers),
        lambda x: flash_attn_3.flash_attn_with_kvcache(x[:, :2], x, x, causal=True, **numbers),
        lambda x: flash_attn_2._flash_attn_forward(x, x, x, 0.0, numbers.get("softmax_scale", 0.2), True, -1, -1, 0.0,
                                                   None, False)[0],
    ):  # fmt: skip
        assert_one_graph(function, X, dynamic=True)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name, values", [
    ("dropout_p", (0.1, 0.2, 0.25, 0.0, 0.3)), ("softcap", (1.0, 2.5, 0.0, 30)), ("softmax_scale", (0.1, 0.2, -0.3, 1)),
])  # fmt: skip
def test_numbers_that_vary(name, values, dynamic):
    torch._dynamo.reset()

    def layer(x, value):
        return dash_attn.flash_attn_func(x, x, x, causal=True, **{name: value})

    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=dynamic)
    for value in values:
        torch.manual_seed(0)
        expected = layer(X, value)
        torch.manual_seed(0)
        assert torch.equal(compiled(X, value), expected), value


def test_a_wrong_probability_raises_when_compiled_too():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, p: dash_attn.flash_attn_func(x, x, x, p), backend="eager", dynamic=True)
    with pytest.raises(ValueError, match="^dropout_p must be from 0 to below 1 in fp32, got 1.5$"):
        compiled(X, 1.5)


@pytest.mark.parametrize(
    "name, as_tensor, dropout_p, backend", pairwise(PACKED, [False, True], [0.0, 0.25], ["eager", "aot_eager"]), ids=str
)
def test_hints_read_from_tensors_in_a_graph(name, as_tensor, dropout_p, backend):
    def layer(x, offsets):
        longest = offsets.diff().max()
        hint = longest if as_tensor else longest.item()
        return PACKED[name](getattr(dash_attn, name), x, hint, causal=True, dropout_p=dropout_p)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_one_graph(layer, X.detach().flatten(0, 1).requires_grad_(), OFFSETS, backend=backend)


def test_hints_read_from_tensors_of_other_functions():
    def private(x, offsets):
        hint = offsets.diff().max().item()
        return flash_attn_2._flash_attn_varlen_forward(x, x, x, offsets, offsets, hint, hint, 0.0, 0.2, True)[0]

    def of_cache(x, offsets):
        hint = offsets.diff().max().item()
        cache = x.unflatten(0, (2, 9))
        return flash_attn_3.flash_attn_with_kvcache(x, cache, cache, cu_seqlens_q=offsets, max_seqlen_q=hint)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for layer in (private, of_cache):
            assert_one_graph(layer, X.detach().flatten(0, 1), OFFSETS)


def test_a_hint_makes_no_graph_of_its_own():
    torch._dynamo.reset()
    x = X.flatten(0, 1)
    compiled = torch.compile(
        lambda x, n: dash_attn.flash_attn_varlen_func(x, x, x, OFFSETS, OFFSETS, n, n), fullgraph=True,
        backend="eager", dynamic=True,
    )  # fmt: skip
    expected = compiled(x, 13)
    with torch.compiler.set_stance("fail_on_recompile"):
        for hint in (14, 10**6, -1):
            assert torch.equal(compiled(x, hint), expected)


def test_a_number_of_sequences_that_only_the_device_knows():
    def of_sequences(x, begins):
        offsets = begins.nonzero().view(-1).int()
        return dash_attn.flash_attn_varlen_func(x, x, x, offsets, offsets, 9, 9, causal=True)

    x, begins = randn(18, 2, 20).detach(), torch.zeros(19, dtype=torch.bool)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(of_sequences, fullgraph=True, backend="aot_eager")
        for places in ([0, 5, 18], [0, 18], [0, 1, 9, 12, 18]):
            begins.zero_()[places] = True
            assert_same_bits(compiled(x, begins), of_sequences(x, begins))
        with pytest.raises(RuntimeError, match=">= 1"):
            compiled(x, begins.zero_())

"""PyTorch's attention functions on a Hopper GPU with dash_attn behind them: which kernel runs, and its bits."""

import contextlib
import warnings

import gpu_support as support
import pytest
import torch
import torch.nn.functional as F
from float64_reference import attention_float64, error_limits
from kernel_names import assert_ours, kernels, ours
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

import dash_attn.integrations.torch as door
from dash_attn import flash_attn_func, flash_attn_varlen_func

REPEATS = 50
NAMES = ("out", "dq", "dk", "dv")
# torch 2.11 takes grouped heads without being told.
GROUPED = {"enable_gqa": True} if "enable_gqa" in varlen.varlen_attn.__kwdefaults__ else {}
OFFSETS = [0, 700, 701, 701, 1900, 4000]


@pytest.fixture(autouse=True)
def state():
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    door.restore()
    assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn


def tensors(device, batch=2, seqlen=1100, heads=16, kv_heads=16, head_dim=128, dtype=torch.bfloat16, seed=0):
    """q, k, v and a gradient of the output, (batch, seqlen, heads, head_dim)."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [(batch, seqlen, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    *inputs, dout = (torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes)
    return [x.requires_grad_() for x in inputs], dout


def sdpa(q, k, v, **arguments):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **arguments).transpose(1, 2)


def causal_sdpa(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def results(attention, inputs, dout):
    out = attention(*inputs)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, inputs, dout)), strict=True))


def choice(inputs, **arguments) -> SDPBackend:
    return SDPBackend(torch._fused_sdp_choice(*(x.transpose(1, 2) for x in inputs), **arguments))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_choice_of_sdpa(dtype, head_dim, device):
    """Flash, whatever PyTorch chooses without us; cuDNN comes back with `restore`."""
    inputs, dout = tensors(device, head_dim=head_dim, dtype=dtype)
    before = choice(inputs, is_causal=True)
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}: {before.name} comes first")
    door.activate(fallback="error")
    assert choice(inputs, is_causal=True) == SDPBackend.FLASH_ATTENTION
    assert_ours(lambda: results(causal_sdpa, inputs, dout))
    door.restore()
    assert choice(inputs, is_causal=True) == before
    assert not ours(kernels(lambda: results(causal_sdpa, inputs, dout)), "")


@pytest.mark.parametrize("kv_heads", [16, 4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 100, 128, 192])
def test_sdpa_has_our_bits(head_dim, is_causal, kv_heads, device):
    """Of flash_attn_func; a head_dim that is no multiple of 8 is padded by PyTorch, which keeps the scale."""
    inputs, dout = tensors(device, head_dim=head_dim, kv_heads=kv_heads)
    expected = results(lambda *x: flash_attn_func(*x, causal=is_causal), inputs, dout)
    door.activate(fallback="error")
    grouped = {"enable_gqa": True} if kv_heads < 16 else {}
    actual = results(lambda *x: sdpa(*x, is_causal=is_causal, **grouped), inputs, dout)
    support.assert_same_bits(actual, expected, "scaled_dot_product_attention")
    contiguous = [x.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_() for x in inputs]
    actual = results(lambda *x: sdpa(*x, is_causal=is_causal, **grouped), contiguous, dout)
    support.assert_same_bits(actual, expected, "(batch, heads, seqlen, head_dim) side by side")


def packed_tensors(device, heads=8, kv_heads=2):
    inputs, dout = tensors(device, batch=1, seqlen=OFFSETS[-1] + 50, heads=heads, kv_heads=kv_heads)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    return [x.detach()[0].requires_grad_() for x in inputs], dout[0], (offsets, offsets, 2100, 2100)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (256, 0)], ids=str)
def test_varlen_attn_has_our_bits(window, device):
    inputs, dout, offsets = packed_tensors(device)
    expected = results(lambda *x: flash_attn_varlen_func(*x, *offsets, window_size=window), inputs, dout)
    door.activate(fallback="error")

    def attention(*x):
        return varlen.varlen_attn(*x, *offsets, window_size=window, **GROUPED)

    support.assert_same_bits(results(attention, inputs, dout), expected, "varlen_attn")
    assert_ours(lambda: results(attention, inputs, dout))


def test_jagged_nested_tensors(device):
    door.activate(fallback="error")
    inputs, dout, _ = packed_tensors(device, kv_heads=8)
    offsets = torch.tensor([0, 700, 701, len(dout)], dtype=torch.int32, device=device)

    def attention(*x):
        nested = [torch.nested.nested_tensor_from_jagged(y, offsets).transpose(1, 2) for y in x]
        return F.scaled_dot_product_attention(*nested, is_causal=True).transpose(1, 2).values()

    actual = results(attention, inputs, dout)
    expected = results(lambda *x: flash_attn_varlen_func(*x, offsets, offsets, 1, 1, causal=True), inputs, dout)
    support.assert_same_bits(actual, expected, "a jagged nested tensor")


def distinct(attention, inputs, dout, perturbation) -> int:
    """How many different gradients there are in REPEATS calls beside other work."""
    found = set()
    for _ in range(REPEATS):
        perturbation.move_allocations()
        perturbation.enqueue(8)
        gradients = results(attention, inputs, dout)
        found.add(tuple(support.int_view(x.contiguous()).long().sum().item() for x in gradients.values()))
    return len(found)


@pytest.mark.parametrize("kind", ["sdpa", "varlen"])
def test_bits_under_load(kind, perturbation, device):
    """Ours are the same in every call. How many PyTorch's own have is printed: chance decides."""
    if kind == "sdpa":
        inputs, dout = tensors(device, batch=4, seqlen=4096)
        attention = causal_sdpa
    else:
        inputs, dout, offsets = packed_tensors(device, heads=16, kv_heads=4)

        def attention(*x):
            return varlen.varlen_attn(*x, *offsets, window_size=(-1, 0), **GROUPED)

    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION] if kind == "sdpa" else [None]
    for backend in backends:
        with sdpa_kernel(backend) if backend else contextlib.nullcontext():
            try:
                count = distinct(attention, inputs, dout, perturbation)
            except RuntimeError as error:
                print(f"{kind}, PyTorch's {backend}: {error}")
                continue
        print(f"{kind}, PyTorch's {backend or 'default'}: {count} different results in {REPEATS} calls")
    door.activate(fallback="error")
    expected = results(attention, inputs, dout)
    for _ in range(REPEATS):
        perturbation.move_allocations()
        perturbation.enqueue(8)
        support.assert_same_bits(results(attention, inputs, dout), expected, kind)


@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_with_torch(is_causal, device):
    """Both are roundings of one truth: ours within its bound, PyTorch's own printed beside it."""
    inputs, dout = tensors(device, heads=4, kv_heads=4)

    def attention(*x):
        return sdpa(*x, is_causal=is_causal)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        by_torch = results(attention, inputs, dout)
    door.activate(fallback="error")
    actual = results(attention, inputs, dout)
    with torch.no_grad():
        exact = attention_float64(*inputs, dout, causal=is_causal)
    limits = error_limits(exact, *inputs, dout, actual["out"], rounded_factors=True, causal=is_causal)
    for name, limit in limits.items():
        ours_off, torch_off = ((x[name].double() - getattr(exact, name)).norm() for x in (actual, by_torch))
        print(f"{name}: {ours_off:.3e} from the truth, allowed {limit:.3e}, PyTorch's {torch_off:.3e}")
        assert ours_off <= limit, name


def test_our_gradients_of_torchs_forward(device):
    """The output keeps PyTorch's bits, and the gradients repeat."""
    inputs, dout = tensors(device, batch=4, seqlen=2048)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = causal_sdpa(*inputs)
    door.activate(forward="torch", fallback="error")
    first = results(causal_sdpa, inputs, dout)
    assert torch.equal(first["out"], before)
    names = kernels(lambda: results(causal_sdpa, inputs, dout))
    assert ours(names, "backward_kernel") and not ours(names, "forward_kernel"), names
    for _ in range(10):
        support.assert_same_bits(results(causal_sdpa, inputs, dout), first, "our backward of PyTorch's forward")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend, device):
    if backend == "inductor":
        pytest.importorskip("triton", reason="inductor needs triton on a GPU")
    inputs, dout = tensors(device)
    door.activate(fallback="error")
    expected = results(causal_sdpa, inputs, dout)
    torch._dynamo.reset()
    compiled = torch.compile(causal_sdpa, backend=backend, fullgraph=True)
    support.assert_same_bits(results(compiled, inputs, dout), expected, backend)
    assert_ours(lambda: results(compiled, inputs, dout))


def test_captured_graph(device):
    inputs, dout = tensors(device)
    door.activate(fallback="error")
    expected = results(causal_sdpa, inputs, dout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(causal_sdpa, inputs, dout)
    for _ in range(3):
        for x in captured.values():
            x.fill_(float("nan"))
        graph.replay()
        support.assert_same_bits(captured, expected, "a replayed graph")


def test_what_we_have_no_kernel_for(device):
    """Dropout goes to PyTorch's kernel, with a warning; with fallback='error' it raises."""
    inputs, dout = tensors(device)
    dropped = {"dropout_p": 0.1, "is_causal": True}

    def attention(*x):
        torch.manual_seed(0)
        return sdpa(*x, **dropped)

    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            before = results(attention, inputs, dout)
        door.activate()
        with pytest.warns(UserWarning, match="dash_attn.integrations.torch does not support dropout_p=0.1"):
            support.assert_same_bits(results(attention, inputs, dout), before, "the former kernel")
    finally:
        torch.use_deterministic_algorithms(False)
    door.activate(fallback="error")
    with pytest.raises(NotImplementedError, match="dash_attn.integrations.torch does not support dropout_p=0.1"):
        attention(*inputs)


@pytest.mark.parametrize("warn_only", [False, True])
def test_deterministic_algorithms(warn_only, device):
    """torch's switch is neither needed nor in the way."""
    inputs, dout = tensors(device)
    door.activate(fallback="error")
    expected = results(causal_sdpa, inputs, dout)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            support.assert_same_bits(results(causal_sdpa, inputs, dout), expected, "the switch")
    finally:
        torch.use_deterministic_algorithms(False)


def test_training(device):
    """Losses and weights of a tiny model, in bytes."""

    def train():
        torch.manual_seed(0)
        embed, head = torch.nn.Embedding(128, 256), torch.nn.Linear(256, 128)
        layers = torch.nn.ModuleList(torch.nn.MultiheadAttention(256, 4, batch_first=True) for _ in range(2))
        model = torch.nn.ModuleList([embed, layers, head]).to(device, torch.bfloat16)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        hidden = torch.nn.Transformer.generate_square_subsequent_mask(1024, device=device, dtype=torch.bfloat16)
        for _ in range(5):
            tokens = torch.randint(128, (4, 1025)).to(device)
            x = embed(tokens[:, :-1])
            for layer in layers:
                x = x + layer(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0]
            loss = F.cross_entropy(head(x).float().flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        weights = torch.cat([x.detach().flatten() for x in model.parameters()])
        return {"losses": torch.stack(losses), "weights": weights}

    door.activate(fallback="error")
    first = train()
    assert_ours(train)
    for _ in range(3):
        support.assert_same_bits(train(), first, "a training")

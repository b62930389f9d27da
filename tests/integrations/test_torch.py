"""PyTorch's own attention functions with dash_attn behind them, on the CPU, where the reference is the kernel."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from float64_reference import attention_float64, error_limits, sequences_of
from interface_support import assert_same_bits, kernel_calls, out_and_gradients, qkv_tensors
from mask_support import name_of, window
from pack_support import Pack, int32, run, run_alone
from torch.nn.attention import varlen
from torch.utils.checkpoint import checkpoint

import dash_attn.integrations.torch as door
from dash_attn import flash_attn_func, flash_attn_varlen_func

aten = torch.ops.aten
PASSES = ["forward", "backward"]
LENGTHS = [(11, 11), (1, 1), (0, 0), (70, 70)]
# torch 2.11 takes grouped heads without being told.
GROUPED = {"enable_gqa": True} if "enable_gqa" in varlen.varlen_attn.__kwdefaults__ else {}
MASKS = [window(-1, -1), window(-1, 0), window(7, 0), window(3, 5)]


@pytest.fixture(autouse=True)
def active():
    door.activate(device_types=["cpu"], fallback="error")
    yield
    door.restore()


def sdpa(q, k, v, **arguments):
    """Of tensors (batch, seqlen, heads, head_dim), as `flash_attn_func`."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **arguments).transpose(1, 2)


def cuda_sdpa(q, k, v, is_causal=False, scale=None):
    """The op that `F.scaled_dot_product_attention` ends in on a GPU."""
    operands = (x.transpose(1, 2) for x in (q, k, v))
    return aten._scaled_dot_product_flash_attention(*operands, 0.0, is_causal, scale=scale)[0].transpose(1, 2)


SDPA = pytest.mark.parametrize("attention", [sdpa, cuda_sdpa])


def packed(pack, mask, attention=varlen.varlen_attn, **arguments):
    """out, dq, dk, dv by varlen_attn."""
    inputs = [x.detach().requires_grad_() for x in (pack.q, pack.k, pack.v)]
    out = attention(*inputs, *pack.offsets(), window_size=mask["window"], **GROUPED, **arguments)
    return out.detach(), *torch.autograd.grad(out, inputs, pack.dout)


@SDPA
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_sdpa(attention, dtype, is_causal, scale):
    """The bits of flash_attn_func, and no further from the truth than eager attention is."""
    *inputs, dout = qkv_tensors(70, 70, heads=4, kv_heads=4, batch=2, dtype=dtype)
    with kernel_calls() as calls:
        actual = out_and_gradients(attention, inputs, dout, is_causal=is_causal, scale=scale)
    assert [name for name, _ in calls] == PASSES
    formula = {"softmax_scale": scale, "causal": is_causal}
    assert_same_bits(actual, out_and_gradients(flash_attn_func, inputs, dout, **formula))
    with torch.no_grad():
        exact = attention_float64(*inputs, dout, **formula)
    limits = error_limits(exact, *inputs, dout, actual[0].detach(), rounded_factors=False, **formula)
    for (name, limit), found in zip(limits.items(), actual, strict=True):
        assert (found.detach().double() - getattr(exact, name)).norm() <= limit, name


def test_grouped_heads():
    *inputs, dout = qkv_tensors(20, 20, heads=6, kv_heads=2)
    expected = out_and_gradients(flash_attn_func, inputs, dout, causal=True)
    assert_same_bits(out_and_gradients(cuda_sdpa, inputs, dout, is_causal=True), expected)
    assert_same_bits(out_and_gradients(sdpa, inputs, dout, is_causal=True, enable_gqa=True), expected)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(9, 33), (33, 9), (0, 5), (5, 0)])
def test_unequal_and_empty_lengths(seqlen_q, seqlen_k):
    *inputs, dout = qkv_tensors(seqlen_q, seqlen_k, heads=2)
    expected = out_and_gradients(flash_attn_func, inputs, dout)
    assert_same_bits(out_and_gradients(cuda_sdpa, inputs, dout), expected)
    assert_same_bits(out_and_gradients(sdpa, inputs, dout), expected)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(9, 33), (33, 9)])
def test_causal_and_unequal_lengths_are_left_to_torch(seqlen_q, seqlen_k):
    """On a CPU its causal mask begins at the first key, ours ends at the last one."""
    *inputs, dout = qkv_tensors(seqlen_q, seqlen_k, heads=2, kv_heads=2)
    with pytest.raises(NotImplementedError, match=f"is_causal with {seqlen_q} queries and {seqlen_k} keys"):
        sdpa(*inputs, is_causal=True)
    aten_name = "_scaled_dot_product_flash_attention_for_cpu_backward"
    q, k, v, out = (x.detach().transpose(1, 2) for x in (*inputs, inputs[0]))
    with pytest.raises(NotImplementedError, match=f"is_causal with {seqlen_q} queries and {seqlen_k} keys"):
        getattr(aten, aten_name)(out, q, k, v, out, out[..., 0].float(), 0.0, True)
    door.restore()
    expected = out_and_gradients(sdpa, inputs, dout, is_causal=True)
    door.activate(device_types=["cpu"])
    with pytest.warns(UserWarning, match="is_causal"):
        actual = out_and_gradients(sdpa, inputs, dout, is_causal=True)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_layouts(order):
    """Output and gradients have the strides that the meta functions promise to compiled code."""
    shape, positions = (2, 3, 10, 16), (*order, 3)
    inputs = [torch.randn([shape[i] for i in positions], dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, dout = (x.permute([positions.index(i) for i in range(4)]) for x in inputs)
    for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"):
        forward, backward = getattr(aten, name), getattr(aten, f"{name}_backward")
        found, promised = [], []
        for results, tensors in ((found, (q, k, v, dout)), (promised, [x.to("meta") for x in (q, k, v, dout)])):
            of_forward = forward(*tensors[:3], 0.0, True)
            lengths, seeds = of_forward[2:6], of_forward[6:8]  # none of the CPU's
            results += [x for x in of_forward if isinstance(x, torch.Tensor)]
            results += backward(tensors[3], *tensors[:3], *of_forward[:2], *lengths, 0.0, True, *seeds)
        for x, y in zip(found, promised, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype), name


def test_results_of_the_packed_op():
    pack = Pack.of(LENGTHS, head_dim=16)
    offsets = pack.offsets()
    for q in (pack.q, pack.q.transpose(0, 1).contiguous().transpose(0, 1)):
        found = aten._flash_attention_forward(q, pack.k, pack.v, *offsets, 0.0, False, False)
        to_meta = [x.to("meta") for x in (q, pack.k, pack.v, *offsets[:2])]
        promised = aten._flash_attention_forward(*to_meta, *offsets[2:], 0.0, False, False)
        assert [(x.shape, x.stride(), x.dtype) for x in found] == [(x.shape, x.stride(), x.dtype) for x in promised]


@pytest.mark.parametrize("mask", MASKS, ids=name_of)
def test_varlen_attn(mask):
    pack = Pack.of(LENGTHS, tail=3)
    with kernel_calls() as calls:
        actual = packed(pack, mask, scale=0.2)
    assert [name for name, _ in calls] == PASSES
    out, _, *gradients = run(pack, window_size=mask["window"], softmax_scale=0.2)
    assert_same_bits(actual, (out, *gradients))
    for queries, keys in pack.sequences():
        alone = run_alone(pack, queries, keys, window_size=mask["window"], softmax_scale=0.2)
        of_sequence = [x[rows] for x, rows in zip(actual, (queries, queries, keys, keys), strict=True)]
        assert_same_bits(of_sequence, [alone[0], *alone[2:]])


def test_the_packed_op_with_dense_batches():
    *inputs, dout = qkv_tensors(20, 31)
    for causal, left, right in [(True, None, None), (True, -1, 0), (False, 4, 2), (False, None, 0)]:

        def attention(q, k, v):
            windows = {"window_size_left": left, "window_size_right": right}
            return aten._flash_attention_forward(q, k, v, None, None, 20, 31, 0.0, causal, False, **windows)[0]

        expected = out_and_gradients(flash_attn_func, inputs, dout, causal=causal, window_size=(left, right))
        assert_same_bits(out_and_gradients(attention, inputs, dout), expected)


def test_log_sum_exp():
    pack = Pack.of(LENGTHS)
    arguments = {"return_aux": varlen.AuxRequest(lse=True), "window_size": (-1, 0), **GROUPED}
    _, lse = varlen.varlen_attn(pack.q, pack.k, pack.v, *pack.offsets(), **arguments)
    assert torch.equal(lse, run(pack, causal=True)[1])


@pytest.mark.skipif("seqused_k" not in varlen.varlen_attn.__kwdefaults__, reason="this torch has no seqused_k")
def test_lengths_in_use():
    """seqused_k, of caches that are not full; PyTorch has no gradient for it."""
    pack = Pack.of([(4, 20), (1, 9)], used=[(4, 13), (1, 0)])
    used = int32(pack.used_k)
    arguments = {"seqused_k": used, "window_size": (-1, 0), "num_splits": 4, **GROUPED}
    out = varlen.varlen_attn(pack.q, pack.k, pack.v, *pack.offsets(), **arguments)
    tensors = (pack.q, pack.k, pack.v, *pack.offsets())
    assert torch.equal(out, flash_attn_varlen_func(*tensors, causal=True, seqused_k=used))


@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="this torch has no varlen_attn_out")
def test_into_an_output():
    pack = Pack.of(LENGTHS)
    out = torch.full_like(pack.q, torch.nan)
    varlen.varlen_attn_out(out, pack.q, pack.k, pack.v, *pack.offsets(), window_size=(-1, 0), **GROUPED)
    assert torch.equal(out, run(pack, causal=True)[0])


def test_values_of_another_head_dim():
    pack = Pack.of(LENGTHS, heads=2, kv_heads=2, head_dim=24)
    v = pack.v[..., :16]
    out = varlen.varlen_attn(pack.q, pack.k, v, *pack.offsets())
    assert torch.equal(out, flash_attn_varlen_func(pack.q, pack.k, v, *pack.offsets()))


def test_jagged_nested_tensors(monkeypatch):
    """Their attention is the packed op where flash attention is chosen, which PyTorch does on a GPU only."""
    monkeypatch.setattr("torch.nested._internal.sdpa.can_use_flash_attention", lambda params: True)
    pack = Pack.of([(3, 3), (8, 8)], kv_heads=4)

    def attention(q, k, v, offsets_q, *_):
        nested = [torch.nested.nested_tensor_from_jagged(x, offsets_q).transpose(1, 2) for x in (q, k, v)]
        return F.scaled_dot_product_attention(*nested, is_causal=True).transpose(1, 2).values()

    inputs = [x.detach().requires_grad_() for x in (pack.q, pack.k, pack.v)]
    with kernel_calls() as calls:
        actual = out_and_gradients(lambda *x: attention(*x, *pack.offsets()), inputs, pack.dout)
    assert [name for name, _ in calls] == PASSES
    out, _, *gradients = run(pack, causal=True)
    assert_same_bits(actual, (out, *gradients))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    """The bits of eager mode, and the kernels are called when the graph runs."""
    pack = Pack.of(LENGTHS, kv_heads=4)
    *inputs, dout = qkv_tensors(20, 20, kv_heads=4)
    for attention in (sdpa, cuda_sdpa):
        expected = out_and_gradients(attention, inputs, dout, is_causal=True)
        torch._dynamo.reset()
        compiled = torch.compile(attention, backend=backend, fullgraph=True)
        for _ in range(2):
            with kernel_calls() as calls:
                assert_same_bits(out_and_gradients(compiled, inputs, dout, is_causal=True), expected)
            assert [name for name, _ in calls] == PASSES
    torch._dynamo.reset()
    compiled = torch.compile(varlen.varlen_attn, backend=backend, fullgraph=True)
    with kernel_calls() as calls:
        assert_same_bits(packed(pack, MASKS[1], compiled), packed(pack, MASKS[1]))
    assert [name for name, _ in calls] == PASSES * 2


def test_a_graph_compiled_before(active):
    """It calls the op, whatever is behind it when it runs."""
    *inputs, dout = qkv_tensors(20, 20, kv_heads=4)
    door.restore()
    torch._dynamo.reset()
    compiled = torch.compile(sdpa, backend="aot_eager", fullgraph=True)
    before = out_and_gradients(compiled, inputs, dout, is_causal=True)
    door.activate(device_types=["cpu"])
    with kernel_calls() as calls:
        after = out_and_gradients(compiled, inputs, dout, is_causal=True)
    assert [name for name, _ in calls] == PASSES
    assert not all(torch.equal(x, y) for x, y in zip(before, after))
    assert_same_bits(after, out_and_gradients(flash_attn_func, inputs, dout, causal=True))


@SDPA
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(attention, use_reentrant):
    *inputs, dout = qkv_tensors(20, 20, kv_heads=4)

    def causal(q, k, v):
        return attention(q, k, v, is_causal=True)

    with kernel_calls() as calls:
        out = checkpoint(causal, *inputs, use_reentrant=use_reentrant)
        out.backward(dout)
    assert [name for name, _ in calls] == ["forward", "forward", "backward"]
    expected = out_and_gradients(flash_attn_func, inputs, dout, causal=True)
    assert_same_bits((out, *(x.grad for x in inputs)), expected)


def test_autocast():
    *inputs, dout = qkv_tensors(20, 20, kv_heads=4)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sdpa(*wide, is_causal=True)
    gradients = torch.autograd.grad(out, wide, dout)
    expected = out_and_gradients(flash_attn_func, inputs, dout, causal=True)
    assert_same_bits((out, *gradients), (expected[0], *(x.float() for x in expected[1:])))


def test_gradients_of_expanded_tensors():
    """out.sum() gives the backward a gradient without memory of its own, and keys of one batch may serve all."""
    *inputs, _ = qkv_tensors(20, 20, kv_heads=4, batch=3)

    def of(attention, **arguments):
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        attention(q, k[:1].expand(3, -1, -1, -1), v, **arguments).sum().backward()
        return q.grad, k.grad, v.grad

    assert_same_bits(of(sdpa, is_causal=True), of(flash_attn_func, causal=True))


def test_rows_of_no_sequence_and_repeats():
    pack = Pack.of(LENGTHS, first=2, tail=5)
    first = packed(pack, MASKS[2])
    for rows in sequences_of([0, 2]) + [slice(-5, None)]:
        assert all((x[rows] == 0).all() for x in first)
    for _ in range(3):
        assert_same_bits(packed(pack, MASKS[2]), first)

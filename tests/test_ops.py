"""The torch.library ops: their schema, their contracts with torch, and how CUDA tensors reach the kernels."""

import math
import types

import pytest
import torch

from dash_attn import checks, ops
from dash_attn.schedule import POLICIES


def operands(batch=2, seqlen_q=20, seqlen_k=30, heads=4, kv_heads=2, head_dim=16, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    shapes = [(seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads), (seqlen_q, heads)]
    q, k, v, dout = (torch.randn(batch, s, h, head_dim, generator=generator).to(dtype) for s, h in shapes)
    return q, k, v, dout


def backward_arguments(schedule="auto", causal=True, **shape):
    q, k, v, dout = operands(**shape)
    out, lse = torch.ops.dash_attn.forward(q, k, v, 0.25, causal)
    return [dout, q, k, v, out, lse, *map(torch.empty_like, (q, k, v)), 0.25, causal, schedule, 0]


def test_schemas():
    assert str(torch.ops.dash_attn.forward.default._schema) == (
        "dash_attn::forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, SymInt sm_margin=0) -> (Tensor, Tensor)"
    )
    assert str(torch.ops.dash_attn.backward.default._schema) == (
        "dash_attn::backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a6!) dq, "
        "Tensor(a7!) dk, Tensor(a8!) dv, float softmax_scale, bool causal, str schedule, SymInt sm_margin) -> ()"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(20, 30), (30, 20), (1, 1), (5, 0), (0, 5)])
def test_opcheck_forward(seqlen_q, seqlen_k, causal, dtype):
    q, k, v, _ = operands(seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype)
    torch.library.opcheck(torch.ops.dash_attn.forward.default, (q, k, v, 0.25, causal))


def test_opcheck_forward_strided():
    q, k, v, _ = operands()
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    torch.library.opcheck(torch.ops.dash_attn.forward.default, (*strided, 0.25, True))


@pytest.mark.parametrize("schedule, causal", [("auto", False), ("auto", True), ("spt", True), ("shift", False)])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(20, 30), (30, 20), (0, 5)])
def test_opcheck_backward(seqlen_q, seqlen_k, schedule, causal):
    arguments = backward_arguments(schedule, causal, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    torch.library.opcheck(torch.ops.dash_attn.backward.default, tuple(arguments))


def test_backward_writes_strided_gradients():
    arguments = backward_arguments()
    torch.ops.dash_attn.backward(*arguments)
    expected = arguments[6:9]
    strided = [torch.full((*t.shape[:3], 2 * t.shape[3]), 7.0, dtype=t.dtype)[..., ::2] for t in expected]
    arguments[6:9] = strided
    torch.ops.dash_attn.backward(*arguments)
    for actual, gradient in zip(strided, expected):
        assert torch.equal(actual, gradient)
        assert (actual._base[..., 1::2] == 7).all()


def test_ops_have_no_autograd_of_their_own():
    q, k, v, _ = operands()
    out, _ = torch.ops.dash_attn.forward(q.requires_grad_(), k, v, 0.25, True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        out.sum().backward()


@pytest.mark.parametrize("change, message", [
    ({0: torch.zeros(2, 20, 4, 8, dtype=torch.bfloat16)},
     "dout must have the shape of q, (2, 20, 4, 16), got (2, 20, 4, 8)"),
    ({0: torch.zeros(2, 20, 4, 16)}, "dout must have the dtype of q, torch.bfloat16, got torch.float32"),
    ({4: torch.zeros(2, 20, 2, 16, dtype=torch.bfloat16)},
     "out must have the shape of q, (2, 20, 4, 16), got (2, 20, 2, 16)"),
    ({5: torch.zeros(2, 20, 4)}, "softmax_lse must have shape (batch, heads, seqlen_q) = (2, 4, 20), got (2, 20, 4)"),
    ({5: torch.zeros(2, 4, 20, dtype=torch.float64)}, "softmax_lse must be torch.float32, got torch.float64"),
    ({7: torch.zeros(2, 30, 4, 16, dtype=torch.bfloat16)},
     "dk must have the shape of k, (2, 30, 2, 16), got (2, 30, 4, 16)"),
    ({8: torch.zeros(2, 30, 2, 1, dtype=torch.bfloat16).expand(2, 30, 2, 16)},
     "dv must have one memory location per element, got strides (60, 2, 1, 0)"),
    ({9: math.nan}, "softmax_scale must be a finite number or None, got nan"),
    ({11: "shift"}, "schedule must be one of 'auto', 'ascending', 'descending', 'spt', 'symmetric_shift', 'order_free', 'spt_descending' when "
                    "causal=True, got 'shift'"),
    ({11: "atomic"}, "schedule must be one of 'auto', 'ascending', 'descending', 'spt', 'symmetric_shift', 'order_free', 'spt_descending' when "
                     "causal=True, got 'atomic'"),
    ({12: -1}, "sm_margin must be at least 0, got -1"),
])  # fmt: skip
def test_backward_errors_leave_the_gradients_alone(change, message):
    arguments = backward_arguments()
    for gradient in arguments[6:9]:
        gradient.fill_(7.0)
    gradients = arguments[6:9]
    for index, value in change.items():
        arguments[index] = value
    with pytest.raises((TypeError, ValueError)) as error:
        torch.ops.dash_attn.backward(*arguments)
    assert str(error.value) == message
    assert all((gradient == 7).all() for gradient in gradients)


def test_forward_errors():
    q, k, v, _ = operands(head_dim=12)
    with pytest.raises(ValueError, match="^q must have a head_dim that is a multiple of 8, got 12$"):
        torch.ops.dash_attn.forward(q, k, v, 0.25, True)
    q, k, v, _ = operands()
    with pytest.raises(ValueError, match="^sm_margin must be at least 0, got -1$"):
        torch.ops.dash_attn.forward(q, k, v, 0.25, True, -1)
    with pytest.raises(ValueError, match="^softmax_scale must be a finite number or None, got inf$"):
        torch.ops.dash_attn.forward(q, k, v, math.inf, True)


# The CUDA implementations up to the kernels, on CPU tensors: what they pass on is computed by the reference instead.


@pytest.fixture
def cuda_implementations(monkeypatch):
    """The functions registered for CUDA, with the kernels they call replaced; `calls` holds what those were given."""
    calls = []

    def kernel_forward(q, k, v, out, lse, scale, causal, sm_margin):
        assert out.is_contiguous() and lse.is_contiguous() and scale > 0 and sm_margin == 3
        calls.append((q, k, v, out))
        for target, result in zip((out, lse), ops.reference.forward(q, k, v, softmax_scale=scale, causal=causal)):
            target.copy_(result)

    def kernel_backward(dout, q, k, v, out, lse, dq, dk, dv, scale, causal, policy, sm_margin):
        assert lse.is_contiguous() and scale > 0 and isinstance(policy, int)
        calls.append((dout, q, k, v, out, dq, dk, dv))
        order = ops.reference.tile_order(
            POLICIES[policy], q.shape[1], k.shape[1], head_dim=q.shape[3], causal=causal
        )
        results = ops.reference.backward(dout, q, k, v, out, lse, softmax_scale=scale, causal=causal, order=order)
        for gradient, result in zip((dq, dk, dv), results):
            gradient.copy_(result)

    kernels = types.SimpleNamespace(
        ops=types.SimpleNamespace(
            dash_attn_C=types.SimpleNamespace(forward=kernel_forward, backward=kernel_backward),
        )
    )
    monkeypatch.setattr(ops, "torch", types.SimpleNamespace(**{**vars(torch), **vars(kernels)}))
    monkeypatch.setattr(ops, "_require_kernels", lambda device: None)
    return types.SimpleNamespace(forward=ops._forward_cuda, backward=ops._backward_cuda, calls=calls)


def odd_layouts(tensor):
    yield tensor
    yield tensor.transpose(1, 2).contiguous().transpose(1, 2)
    yield tensor.transpose(1, 3).contiguous().transpose(1, 3)
    wide = tensor.new_zeros(*tensor.shape[:3], tensor.shape[3] + 5)
    wide[..., 3:-2] = tensor
    yield wide[..., 3:-2]
    yield tensor[:, :1].expand(tensor.shape)


@pytest.mark.parametrize("scale", [0.25, -0.25, 0.0])
@pytest.mark.parametrize("layout", range(5))
@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_cuda_implementations_hand_on_what_the_kernels_take(cuda_implementations, seqlen_q, layout, scale):
    q, k, v, dout = (list(odd_layouts(t))[layout] for t in operands(seqlen_q=seqlen_q))
    out, lse = cuda_implementations.forward(q, k, v, scale, True, 3)
    expected_out, expected_lse = torch.ops.dash_attn.forward(q, k, v, scale, True)
    assert torch.equal(out, expected_out) and out.stride() == expected_out.stride()
    assert torch.equal(lse, expected_lse) and lse.stride() == expected_lse.stride()

    gradients = [list(odd_layouts(torch.zeros_like(t)))[min(layout, 3)] for t in (q, k, v)]
    expected = [torch.zeros(t.shape, dtype=t.dtype) for t in (q, k, v)]
    cuda_implementations.backward(dout, q, k, v, out, lse, *gradients, scale, True, "auto", 0)
    torch.ops.dash_attn.backward(dout, q, k, v, out, lse, *expected, scale, True, "auto", 0)
    for actual, gradient in zip(gradients, expected):
        assert torch.equal(actual, gradient)
    for tensor in (t for call in cuda_implementations.calls for t in call):
        assert tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
        assert all(size == 1 or (s > 0 and s % 8 == 0) for size, s in zip(tensor.shape[:-1], tensor.stride()[:-1]))


def test_what_the_kernels_can_address_is_not_copied(cuda_implementations):
    qkv = torch.randn(2, 20, 3, 4, 16).to(torch.bfloat16)
    q, k, v = qkv.unbind(2)
    out, lse = cuda_implementations.forward(q, k, v, 0.25, True, 3)
    gradients = torch.empty_like(qkv).unbind(2)
    cuda_implementations.backward(out, q, k, v, out, lse, *gradients, 0.25, True, "spt", 0)
    forward, backward = cuda_implementations.calls
    assert [t.data_ptr() for t in forward] == [t.data_ptr() for t in (q, k, v, out)]
    assert [t.data_ptr() for t in backward] == [t.data_ptr() for t in (out, q, k, v, out, *gradients)]


def test_cuda_implementations_launch_nothing_for_empty_sums(cuda_implementations):
    q, k, v, dout = operands(seqlen_k=0)
    out, lse = cuda_implementations.forward(q, k, v, 0.25, False, 3)
    gradients = [torch.ones_like(t) for t in (q, k, v)]
    cuda_implementations.backward(dout, q, k, v, out, lse, *gradients, 0.25, False, "auto", 0)
    assert cuda_implementations.calls == []
    assert (out == 0).all() and (lse == torch.inf).all() and (gradients[0] == 0).all()


def test_missing_kernels_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(ops, "__file__", str(tmp_path / "ops.py"))
    with pytest.raises(RuntimeError, match=r"installed without its CUDA kernels \(no _C\*\.so in .*nvcc"):
        ops._load_kernels.__wrapped__()
    (tmp_path / "_C.abi3.so").touch()
    (tmp_path / "_C.old.so").touch()
    with pytest.raises(RuntimeError, match=r"one _C\*\.so .* got _C\.abi3\.so, _C\.old\.so"):
        ops._load_kernels.__wrapped__()


def test_other_gpus_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100")
    with pytest.raises(RuntimeError) as error:
        ops._require_hopper.__wrapped__(0)
    assert str(error.value) == (
        "q must be on a GPU of compute capability 9.0 (Hopper: H100, H200, GH200), got NVIDIA A100 with compute "
        "capability 8.0"
    )


def test_sm_margin_must_leave_an_sm(monkeypatch):
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    checks.check_sm_margin(131, torch.device("cuda:1"))
    with pytest.raises(ValueError, match="^sm_margin must be less than the 132 SMs of cuda:1, got 132$"):
        checks.check_sm_margin(132, torch.device("cuda:1"))

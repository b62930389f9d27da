"""Activation of dash_attn in PyTorch: what it changes, what `restore` puts back, and calls without a kernel of ours."""

import concurrent.futures
import multiprocessing
import warnings

import pytest
import torch
import torch.nn.functional as F
from float64_reference import attention_float64, error_limits
from interface_support import assert_same_bits, kernel_calls, out_and_gradients, qkv_tensors
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

import dash_attn.integrations.torch as door
from dash_attn import flash_attn_func, ops
from dash_attn.schedule import policy_number

aten = torch.ops.aten
CPU = ["cpu"]


@pytest.fixture(autouse=True)
def state():
    """Every test leaves PyTorch as it was."""
    before = state_of_torch()
    yield
    door.restore()
    assert state_of_torch() == before
    assert not runs_dash_attn()


def state_of_torch():
    return (
        registry.list_flash_attention_impls(),
        registry.current_flash_attention_impl(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        getattr(varlen, "_should_use_cudnn", None),
    )


def inputs_and_gradient(dtype=torch.bfloat16, seqlen=20, head_dim=32):
    *inputs, dout = qkv_tensors(seqlen, seqlen, kv_heads=4, head_dim=head_dim, dtype=dtype)
    return inputs, dout


def sdpa(q, k, v, **arguments):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **arguments).transpose(1, 2)


def runs_dash_attn():
    """Of F.scaled_dot_product_attention forward and backward."""
    with kernel_calls() as calls:
        out_and_gradients(sdpa, *inputs_and_gradient(), is_causal=True)
    assert [name for name, _ in calls] in ([], ["forward", "backward"])
    return bool(calls)


class Other:
    """Another library's implementation, on the CPU: an output of sevens and gradients of eights."""

    def __init__(self):
        self.active = 0

    def __call__(self):
        library = torch.library.Library("aten", "IMPL")
        name = "_scaled_dot_product_flash_attention_for_cpu"
        library.impl(name, self.forward, "CPU", allow_override=True)
        library.impl(f"{name}_backward", self.backward, "CPU", allow_override=True)
        self.library, self.active = library, self.active + 1
        return self

    def remove(self):
        self.library, self.active = None, self.active - 1

    @staticmethod
    def forward(query, key, value, *_, **__):
        return torch.full_like(query, 7), torch.zeros(query.shape[:3])

    @staticmethod
    def backward(grad_out, query, key, value, *_, **__):
        return tuple(torch.full_like(x, 8) for x in (query, key, value))


@pytest.fixture
def other():
    found = Other()
    registry.register_flash_attention_impl("other", register_fn=found)
    yield found
    door.restore()
    if registry.current_flash_attention_impl() is not None:
        registry.restore_flash_attention_impl()
    assert found.active == 0
    registry._registry._FLASH_ATTENTION_IMPLS.pop("other")


def test_activate_and_restore():
    assert not door.is_active() and not runs_dash_attn()
    door.activate(device_types=CPU)
    assert door.is_active() and runs_dash_attn()
    assert registry.current_flash_attention_impl() == "dash_attn"
    door.restore()
    assert not door.is_active() and not runs_dash_attn()


def test_restore_without_activate(other):
    door.restore()
    registry.activate_flash_attention_impl("other")
    door.restore()
    assert registry.current_flash_attention_impl() == "other" and other.active == 1


def test_activating_twice():
    """The later choices hold, and one restore ends both."""
    door.activate(device_types=CPU, fallback="error")
    door.activate(device_types=CPU, fallback="former", schedule="spt")
    inputs, dout = inputs_and_gradient()
    with kernel_calls() as calls:
        actual = out_and_gradients(sdpa, inputs, dout)
    assert calls[-1][1]["schedule"] == policy_number("spt")
    assert_same_bits(actual, out_and_gradients(flash_attn_func, inputs, dout, schedule="spt"))
    with pytest.warns(UserWarning, match="dtype"):
        sdpa(*(x.float() for x in inputs))
    door.restore()
    assert not runs_dash_attn()


@pytest.fixture
def _kernels_not_needed(monkeypatch):
    """For tests that look at what is registered for CUDA tensors, and call none of it."""
    monkeypatch.setattr(ops, "why_no_kernels", None)


@pytest.mark.usefixtures("_kernels_not_needed")
@pytest.mark.parametrize("enabled", [True, False])
def test_cudnn_stands_aside(enabled):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        for _ in range(2):
            door.activate()
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert not varlen._should_use_cudnn(0)
        registry.restore_flash_attention_impl()  # PyTorch's own way to end it
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
        assert not door.is_active()
        door.activate(device_types=CPU)
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.usefixtures("_kernels_not_needed")
def test_the_ops_of_a_gpu_are_ours():
    """On the machine that has none: which kernel the dispatcher holds for CUDA tensors."""
    names = ["_scaled_dot_product_flash_attention", "_flash_attention_forward"]
    names += [f"{names[0]}_backward", "_flash_attention_backward"]

    def kernels():
        return [torch._C._dispatch_dump(f"aten::{name}").count("dash_attn/integrations/torch.py") for name in names]

    assert kernels() == [0] * 4
    door.activate()
    assert kernels() == [1] * 4
    door.activate(forward="torch")
    assert kernels() == [0, 0, 1, 1]


def test_the_implementation_that_was_active_comes_back(other):
    registry.activate_flash_attention_impl("other")
    inputs, dout = inputs_and_gradient()
    door.activate(device_types=CPU)
    assert other.active == 0 and runs_dash_attn()
    door.activate(device_types=CPU)
    door.restore()
    assert registry.current_flash_attention_impl() == "other" and other.active == 1
    assert (sdpa(*inputs) == 7).all()


def test_another_implementation_takes_over(other):
    """Whoever activates last is active; then there is nothing for restore to do."""
    door.activate(device_types=CPU)
    registry.activate_flash_attention_impl("other")
    assert not door.is_active() and not runs_dash_attn()
    door.restore()
    assert registry.current_flash_attention_impl() == "other" and other.active == 1


def test_a_name_that_a_framework_activates(other):
    door.register("other", device_types=CPU)
    assert not door.is_active()
    registry.activate_flash_attention_impl("other")
    assert door.is_active() and runs_dash_attn() and other.active == 0
    assert registry.current_flash_attention_impl() == "other"
    door.register("other", device_types=CPU, schedule="spt")
    registry.activate_flash_attention_impl("other")
    with kernel_calls() as calls:
        out_and_gradients(sdpa, *inputs_and_gradient())
    assert calls[-1][1]["schedule"] == policy_number("spt")
    door.restore()
    assert registry.current_flash_attention_impl() is None
    registry.activate_flash_attention_impl("other")
    assert other.active == 1 and not runs_dash_attn()


def test_forward_of_torch():
    """PyTorch's output, and our gradients from its log-sum-exp."""
    inputs, dout = inputs_and_gradient()
    before = sdpa(*inputs, is_causal=True)
    door.activate(forward="torch", device_types=CPU)
    with kernel_calls() as calls:
        out, *gradients = out_and_gradients(sdpa, inputs, dout, is_causal=True)
    assert [name for name, _ in calls] == ["backward"]
    assert torch.equal(out, before)
    inputs = [x.detach() for x in inputs]
    exact = attention_float64(*inputs, dout, causal=True)
    limits = error_limits(exact, *inputs, dout, out.detach(), rounded_factors=False, causal=True)
    for name, actual in zip(("dq", "dk", "dv"), gradients, strict=True):
        assert (actual.double() - getattr(exact, name)).norm() <= limits[name], name


@pytest.mark.parametrize("name", [None, "other"])
def test_forward_of_another_implementation(other, name):
    """Also where ours is registered under its name."""
    inputs, dout = inputs_and_gradient()
    if name is None:
        door.activate(forward="other", device_types=CPU)
    else:
        door.register(name, forward="other", device_types=CPU)
        registry.activate_flash_attention_impl(name)
    assert other.active == 1
    with kernel_calls() as calls:
        out, *gradients = out_and_gradients(sdpa, inputs, dout)
    assert [name for name, _ in calls] == ["backward"]
    assert (out == 7).all() and not any((x == 8).all() for x in gradients)
    # What is left to the kernel that was there is left to its own.
    wide, wide_dout = inputs_and_gradient(torch.float32)
    with pytest.warns(UserWarning, match="_backward runs the kernel that dash_attn replaces"):
        assert all((x == 8).all() for x in out_and_gradients(sdpa, wide, wide_dout)[1:])
    door.restore()
    assert other.active == 0


def test_an_activation_that_fails(other):
    def broken():
        raise ImportError("there is no such library")

    registry.register_flash_attention_impl("broken", register_fn=broken)
    registry.activate_flash_attention_impl("other")
    try:
        with pytest.raises(ImportError, match="no such library"):
            door.activate(forward="broken", device_types=CPU)
        assert not door.is_active() and not runs_dash_attn()
        assert registry.current_flash_attention_impl() == "other"
    finally:
        registry._registry._FLASH_ATTENTION_IMPLS.pop("broken")


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"forward": "FA9"}, ValueError, "forward must be one of 'dash_attn', 'torch', 'FA3', 'FA4', got 'FA9'"),
        ({"fallback": "math"}, ValueError, "fallback must be one of 'former', 'error', got 'math'"),
        ({"schedule": "fastest"}, ValueError, "schedule must be one of 'auto', .*, got 'fastest'"),
        ({"schedule": 3}, ValueError, "schedule must be one of"),
        ({"device_types": ["xpu"]}, ValueError, "device_types must be one or both of 'cuda' and 'cpu', got"),
        ({"device_types": []}, ValueError, "device_types must be one or both of"),
        ({"device_types": "cuda"}, TypeError, "device_types must be a sequence of 'cuda' and 'cpu', got 'cuda'"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        door.activate(**arguments)
    assert not door.is_active()


def test_an_installation_without_kernels_says_so_at_once(monkeypatch, other):
    """And not at the first call of a model on a GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ops, "why_no_kernels", "dash_attn was installed without its CUDA kernels")
    registry.activate_flash_attention_impl("other")
    for call in (door.activate, door.register):
        with pytest.raises(RuntimeError, match="installed without its CUDA kernels"):
            call()
    assert not door.is_active() and registry.current_flash_attention_impl() == "other"
    assert "dash_attn" not in registry.list_flash_attention_impls()
    door.activate(device_types=CPU)
    assert runs_dash_attn()


def test_bad_name():
    with pytest.raises(TypeError, match="name must be a non-empty string, got ''"):
        door.register("")


def former_cases():
    mask = torch.ones(20, 20, dtype=torch.bool)
    return {
        "dtype": (inputs_and_gradient(torch.float32), {}, "tensors of dtype torch.float32"),
        "head_dim": (inputs_and_gradient(head_dim=20), {}, "a head_dim of 20"),
        "wide": (inputs_and_gradient(head_dim=264), {}, "a head_dim of 264"),
        "mask": (inputs_and_gradient(), {"attn_mask": mask}, "attn_mask"),
    }


@pytest.mark.parametrize("case", list(former_cases()))
def test_what_is_not_served(case):
    """It runs as if we were not there, and is said once; or raises, if that was asked for."""
    (inputs, dout), arguments, words = former_cases()[case]
    expected = out_and_gradients(sdpa, inputs, dout, **arguments)
    door.activate(device_types=CPU)
    with pytest.warns(
        UserWarning, match=f"torch does not support {words}: .* the kernel that dash_attn replaces"
    ) as said:
        actual = out_and_gradients(sdpa, inputs, dout, **arguments)
    assert [warning.filename for warning in said] == [__file__]
    assert_same_bits(actual, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(out_and_gradients(sdpa, inputs, dout, **arguments), expected)
    door.activate(device_types=CPU, fallback="error")
    with pytest.raises(NotImplementedError, match=f"torch does not support {words}, and fallback is 'error'"):
        sdpa(*inputs, **arguments)


@pytest.mark.parametrize(
    "position, value, words",
    [(7, 0.1, "dropout_p=0.1"), (9, True, "return_debug_mask"), ("alibi_slopes", torch.ones(4), "alibi_slopes"),
     ("block_table", torch.zeros(1, 1, dtype=torch.int32), "block_table")],
)  # fmt: skip
def test_what_nobody_has_a_kernel_for(position, value, words):
    """The ops of a GPU on a CPU have no former kernel."""
    inputs, _ = inputs_and_gradient()
    arguments = [*inputs, None, None, 20, 20, 0.0, False, False]
    named = {}
    if isinstance(position, int):
        arguments[position] = value
    elif position in str(aten._flash_attention_forward.default._schema):
        named[position] = value
    else:
        pytest.skip(f"this torch has no {position}")
    door.activate(device_types=CPU)
    with pytest.raises(NotImplementedError, match=f"{words}, and PyTorch has no kernel here either"):
        aten._flash_attention_forward(*arguments, **named)


def test_wrong_tensors_are_refused_by_name():
    inputs, _ = inputs_and_gradient()
    q, k, v = (x.detach().flatten(0, 1) for x in inputs)
    door.activate(device_types=CPU)
    offsets = torch.tensor([0, 20, 40])
    with pytest.raises(TypeError, match="cu_seqlens_q must be torch.int32, got torch.int64"):
        aten._flash_attention_forward(q, k, v, offsets, offsets, 20, 20, 0.0, False, False)


def test_torchs_choice_of_a_kernel_stays():
    """A model may still ask for another one."""
    inputs, _ = inputs_and_gradient()
    door.activate(device_types=CPU)
    with kernel_calls() as calls, sdpa_kernel(SDPBackend.MATH):
        sdpa(*inputs)
    assert not calls


def test_threads():
    cases = [qkv_tensors(40, 40, kv_heads=4, head_dim=16) for _ in range(8)]
    expected = [out_and_gradients(flash_attn_func, inputs, dout, causal=True) for *inputs, dout in cases]
    door.activate(device_types=CPU)

    def compute(case):
        *inputs, dout = case
        return out_and_gradients(sdpa, inputs, dout, is_causal=True)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for actual, of_one in zip(pool.map(compute, cases), expected, strict=True):
                assert_same_bits(actual, of_one)


def answer(results):
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    results.put((door.is_active(), runs_dash_attn()))


@pytest.mark.parametrize("method, inherits", [("fork", True), ("spawn", False)])
def test_child_processes(method, inherits):
    """One made by fork inherits the state, one made by spawn starts without."""
    door.activate(device_types=CPU)
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=answer, args=(results,))
    child.start()
    assert results.get(timeout=120) == (inherits, inherits)
    child.join(60)
    assert child.exitcode == 0
    assert runs_dash_attn()

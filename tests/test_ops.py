"""The torch.library ops: their schema, their contracts with torch, and what the kernels are called with.

The way from an op to a kernel is one code for the CPU and CUDA; here the kernel at its end is the reference.
"""

import math

import pytest
import torch
from interface_support import kernel_calls

from dash_attn import ops
from dash_attn.schedule import fitting, policy_number, resolve

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")


def operands(batch=2, seqlen_q=20, seqlen_k=30, heads=4, kv_heads=2, head_dim=16, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    shapes = [(seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads), (seqlen_q, heads)]
    q, k, v, dout = (torch.randn(batch, s, h, head_dim, generator=generator).to(dtype) for s, h in shapes)
    return q, k, v, dout


# Of both ops, between the tensors and the schedule: a dense batch, the scale, the mask without a window.
def settings(causal=True, scale=0.25, window=(-1, -1), attention_chunk=0):
    return (None, None, None, None, scale, causal, *window, attention_chunk)


SCALE, MASK, SCHEDULE, MARGIN = 13, slice(14, 18), 18, 19  # where a backward's arguments have them


def backward_arguments(schedule="auto", causal=True, window=(-1, -1), attention_chunk=0, **shape):
    q, k, v, dout = operands(**shape)
    chosen = settings(causal, window=window, attention_chunk=attention_chunk)
    out, lse = torch.ops.dash_attn.forward(q, k, v, *chosen)
    return [dout, q, k, v, out, lse, *map(torch.empty_like, (q, k, v)), *chosen, schedule, 0]


PACK = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k"
NUMBERS = "float softmax_scale, bool causal, int window_left, int window_right, int attention_chunk"
OPTIONS = (
    "float? softmax_scale, bool causal, str schedule, SymInt sm_margin, int window_left=-1, int window_right=-1, "
    "int attention_chunk=0"
)
OPTIONAL_PACK = PACK.replace(",", "=None,") + "=None"
SCORES = "Tensor? sinks, Tensor? alibi_slopes"
OPTIONAL_DROPOUT = "Tensor? dropout_bits=None, Tensor? rng_state=None, float dropout_p=0."
OPTIONAL_SCORES = f"Tensor? sinks=None, Tensor? alibi_slopes=None, float softcap=0., {OPTIONAL_DROPOUT}"
KERNEL_NUMBERS = NUMBERS.replace("softmax_scale", "softmax_scale, float softcap")
COLUMNS = "Tensor? startend_row_indices=None"
LAST = f"SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, {COLUMNS}"
OUTPUTS = "(Tensor out, Tensor softmax_lse)"
AND_MAX_LOGITS = "(Tensor out, Tensor softmax_lse, Tensor max_logits)"
READ = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse"
SCHEMAS = [
    f"dash_attn::forward(Tensor q, Tensor k, Tensor v, {PACK}, {NUMBERS}, SymInt sm_margin=0, {OPTIONAL_SCORES}, "
    f"{LAST}) -> {OUTPUTS}",
    f"dash_attn::backward({READ}, Tensor(a6!) dq, Tensor(a7!) dk, Tensor(a8!) dv, {PACK}, {NUMBERS}, str schedule, "
    "SymInt sm_margin, Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? dsoftmax_lse=None, "
    f"Tensor(a9!)? dsinks=None, float softcap=0., {OPTIONAL_DROPOUT}, {LAST}) -> ()",
    f"dash_attn::attention(Tensor q, Tensor k, Tensor v, {OPTIONS}, {OPTIONAL_PACK}, {OPTIONAL_SCORES}, {LAST}) -> "
    f"{OUTPUTS}",
    f"dash_attn::attention_kvpacked(Tensor q, Tensor kv, {OPTIONS}, {OPTIONAL_PACK}, {OPTIONAL_SCORES}, {LAST}) -> "
    f"{OUTPUTS}",
    f"dash_attn::attention_qkvpacked(Tensor qkv, SymInt? num_heads_q, {OPTIONS}, Tensor? cu_seqlens=None, "
    f"Tensor? seqused=None, {OPTIONAL_SCORES}, SymInt? max_seqlen=None, {COLUMNS}) -> {OUTPUTS}",
    f"dash_attn_C::forward(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) softmax_lse, {PACK}, {SCORES}, "
    f"{KERNEL_NUMBERS}, int sm_margin, {OPTIONAL_DROPOUT}, {COLUMNS}, Tensor(c!)? max_logits=None) -> ()",
    f"dash_attn_C::backward({READ}, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, {PACK}, {SCORES}, "
    f"Tensor? dsoftmax_lse, Tensor(d!)? dsinks, {KERNEL_NUMBERS}, int schedule, int sm_margin, {OPTIONAL_DROPOUT}, "
    f"{COLUMNS}) -> ()",
]


SCHEMAS += [
    schema.replace("(", "_and_max_logits(", 1).replace(OUTPUTS, AND_MAX_LOGITS)
    for schema in SCHEMAS
    if schema.endswith(OUTPUTS)
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.split("(")[0])
def test_schemas(schema):
    library, name = schema.split("(")[0].split("::")
    assert str(getattr(getattr(torch.ops, library), name).default._schema) == schema


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(20, 30), (30, 20), (1, 1), (5, 0), (0, 5)])
def test_opcheck_forward(seqlen_q, seqlen_k, causal, dtype):
    q, k, v, _ = operands(seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype)
    torch.library.opcheck(torch.ops.dash_attn.forward.default, (q, k, v, *settings(causal)))


def test_opcheck_forward_strided():
    q, k, v, _ = operands()
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    torch.library.opcheck(torch.ops.dash_attn.forward.default, (*strided, *settings()))


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
    out, _ = torch.ops.dash_attn.forward(q.requires_grad_(), k, v, *settings())
    with pytest.raises(RuntimeError, match="derivative for dash_attn::forward is not implemented"):
        out.sum().backward()


NAMES = ", ".join(map(repr, ("auto", *fitting(causal=True))))
SCHEDULES = f"schedule must be one of {NAMES} under the causal mask, got "


@pytest.mark.parametrize("change, message", [
    ({0: torch.zeros(2, 20, 4, 8, dtype=torch.bfloat16)},
     "dout must have the shape of q with the head_dim of v, (2, 20, 4, 16), got (2, 20, 4, 8)"),
    ({0: torch.zeros(2, 20, 4, 16)}, "dout must have the dtype of q, torch.bfloat16, got torch.float32"),
    ({4: torch.zeros(2, 20, 2, 16, dtype=torch.bfloat16)},
     "out must have the shape of q with the head_dim of v, (2, 20, 4, 16), got (2, 20, 2, 16)"),
    ({5: torch.zeros(2, 20, 4)}, "softmax_lse must have shape (batch, heads, seqlen_q) = (2, 4, 20), got (2, 20, 4)"),
    ({5: torch.zeros(2, 4, 20, dtype=torch.float64)}, "softmax_lse must be torch.float32, got torch.float64"),
    ({7: torch.zeros(2, 30, 4, 16, dtype=torch.bfloat16)},
     "dk must have the shape of k, (2, 30, 2, 16), got (2, 30, 4, 16)"),
    ({8: torch.zeros(2, 30, 2, 1, dtype=torch.bfloat16).expand(2, 30, 2, 16)},
     "dv must have one memory location per element, got strides (60, 2, 1, 0)"),
    ({SCALE: math.nan}, "softmax_scale must be a finite number or None, got nan"),
    ({6: torch.zeros(2, 20, 4, 16)}, "dq must have the dtype of q, torch.bfloat16, got torch.float32"),
    ({7: torch.zeros(2, 30, 2, 16)}, "dk must have the dtype of k, torch.bfloat16, got torch.float32"),
    ({8: torch.zeros(2, 30, 2, 16).half()}, "dv must have the dtype of v, torch.bfloat16, got torch.float16"),
    ({SCALE: 1e300}, "softmax_scale * log2(e) must be finite in fp32, got softmax_scale=1e+300"),
    ({SCHEDULE: "shift"}, SCHEDULES + "'shift'"),
    ({SCHEDULE: "atomic"}, SCHEDULES + "'atomic'"),
    ({MASK.stop - 1: -1}, "attention_chunk must be at least 0, got -1"),
    ({MARGIN: -1}, "sm_margin must be at least 0 and less than the SMs of the GPU, got -1"),
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
        torch.ops.dash_attn.forward(q, k, v, *settings())
    q, k, v, _ = operands()
    with pytest.raises(ValueError, match="^sm_margin must be at least 0 and less than the SMs of the GPU, got -1$"):
        torch.ops.dash_attn.forward(q, k, v, *settings(), -1)
    with pytest.raises(ValueError, match="^softmax_scale must be a finite number or None, got inf$"):
        torch.ops.dash_attn.forward(q, k, v, *settings(scale=math.inf))


@pytest.mark.parametrize("index, like", [(0, 1), (4, 1), (5, 5), (6, 1), (7, 2), (8, 3)])
def test_devices_must_agree(index, like):
    arguments = backward_arguments()
    arguments[index] = arguments[like].to("meta")
    name = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")[index]
    with pytest.raises(ValueError, match=f"^{name} must be on the device of [qkv], cpu, got meta$"):
        torch.ops.dash_attn.backward(*arguments)


@pytest.mark.parametrize("written, other", [
    ("dk", "dv"), ("dq", "q"), ("dk", "k"), ("dk", "v"), ("dv", "v"), ("dv", "v"), ("dq", "dout"),
    ("dq", "out"), ("dv", "k"),
])  # fmt: skip
def test_gradients_must_not_share_memory(written, other):
    names = ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"]
    arguments = backward_arguments()
    arguments[names.index(written)] = arguments[names.index(other)]
    with pytest.raises(ValueError, match=r"^d[qkv] must not share memory with \w+$"):
        torch.ops.dash_attn.backward(*arguments)


def test_gradients_apart_from_the_log_sum_exp():
    arguments = backward_arguments()
    softmax_lse = arguments[5]
    memory = torch.zeros(arguments[6].numel() // 2 + softmax_lse.numel(), dtype=torch.float32)
    arguments[5] = memory[: softmax_lse.numel()].view(softmax_lse.shape)
    arguments[6] = memory.view(torch.bfloat16)[: arguments[6].numel()].view(arguments[6].shape)
    with pytest.raises(ValueError, match="^dq must not share memory with softmax_lse$"):
        torch.ops.dash_attn.backward(*arguments)


def test_a_gradient_whose_rows_overlap():
    arguments = backward_arguments()
    dq = arguments[6]
    rows = torch.zeros(2 * dq.numel(), dtype=dq.dtype)
    arguments[6] = rows.as_strided(dq.shape, (dq.stride(0), dq.shape[-1], dq.shape[-1], 1))
    with pytest.raises(ValueError, match="^dq must have one memory location per element, got strides"):
        torch.ops.dash_attn.backward(*arguments)


def test_overwriting_what_is_saved_is_noticed():
    arguments = backward_arguments()
    factor = torch.ones_like(arguments[6], requires_grad=True)
    product = factor * arguments[6]  # saves dq
    torch.ops.dash_attn.backward(*arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_gradients_that_overlap_in_part():
    arguments = backward_arguments()
    both = torch.zeros(3, 30, 2, 16, dtype=torch.bfloat16)
    arguments[7:9] = both[:2], both[1:]
    with pytest.raises(ValueError, match="^dv must not share memory with dk$"):
        torch.ops.dash_attn.backward(*arguments)


def odd_layouts(tensor):
    yield tensor
    yield tensor.transpose(1, 2).contiguous().transpose(1, 2)
    yield tensor.transpose(1, 3).contiguous().transpose(1, 3)
    wide = tensor.new_zeros(*tensor.shape[:3], tensor.shape[3] + 5)
    wide[..., 3:-2] = tensor
    yield wide[..., 3:-2]
    # Strides that are right, and a base that is not.
    flat = tensor.new_zeros(tensor.numel() + 4)
    flat[4:] = tensor.flatten()
    yield flat[4:].view(tensor.shape)
    yield tensor[:, :1].expand(tensor.shape)


def addressable(tensor):
    aligned = tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
    return aligned and all(n == 1 or (s > 0 and s % 8 == 0) for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1]))


@pytest.mark.parametrize("scale", [0.25, -0.25, 0.0])
@pytest.mark.parametrize("layout", range(6))
@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_kernels_get_what_they_take(seqlen_q, layout, scale):
    contiguous = operands(seqlen_q=seqlen_q)
    if layout == 5:
        contiguous = tuple(t[:, :1].repeat(1, t.shape[1], 1, 1) for t in contiguous)
    q, k, v, dout = (list(odd_layouts(t))[layout] for t in contiguous)
    gradients = [list(odd_layouts(torch.zeros_like(t)))[min(layout, 4)] for t in (q, k, v)]
    with kernel_calls() as calls:
        out, lse = torch.ops.dash_attn.forward(q, k, v, *settings(scale=scale), 3)
        torch.ops.dash_attn.backward(dout, q, k, v, out, lse, *gradients, *settings(scale=scale), "auto", 3)
    (_, forward), (_, backward) = calls
    given, read = list(forward.values())[:5], list(backward.values())[:9]
    assert forward["softmax_scale"] > 0 and backward["softmax_scale"] > 0
    assert all(map(addressable, (*given[:4], *read[:5], *read[6:])))
    assert given[4].is_contiguous() and read[5].is_contiguous()

    expected_out, expected_lse = torch.ops.dash_attn.forward(*contiguous[:3], *settings(scale=scale))
    assert torch.equal(out, expected_out) and out.is_contiguous() and torch.equal(lse, expected_lse)
    expected = [torch.zeros_like(t) for t in contiguous[:3]]
    torch.ops.dash_attn.backward(
        contiguous[3], *contiguous[:3], expected_out, expected_lse, *expected, *settings(scale=scale), "auto", 0
    )
    for actual, gradient in zip(gradients, expected):
        assert torch.equal(actual, gradient)


def test_a_log_sum_exp_of_any_strides():
    arguments = backward_arguments()
    torch.ops.dash_attn.backward(*arguments)
    expected = [t.clone() for t in arguments[6:9]]
    arguments[5] = arguments[5].transpose(1, 2).contiguous().transpose(1, 2)
    torch.ops.dash_attn.backward(*arguments)
    assert all(map(torch.equal, arguments[6:9], expected))


def test_what_the_kernels_can_address_is_not_copied():
    qkv = torch.randn(2, 20, 3, 4, 16).to(torch.bfloat16)
    q, k, v = qkv.unbind(2)
    dout = torch.randn(2, 20, 4, 16).to(torch.bfloat16)
    gradients = torch.empty_like(qkv).unbind(2)
    with kernel_calls() as calls:
        out, lse = torch.ops.dash_attn.forward(q, k, v, *settings(), 3)
        torch.ops.dash_attn.backward(dout, q, k, v, out, lse, *gradients, *settings(), "spt", 0)
    (_, forward), (_, backward) = calls
    forward, backward = list(forward.values()), list(backward.values())
    assert [t.data_ptr() for t in forward[:5]] == [t.data_ptr() for t in (q, k, v, out, lse)]
    assert [t.data_ptr() for t in backward[:9]] == [t.data_ptr() for t in (dout, q, k, v, out, lse, *gradients)]


@pytest.mark.parametrize("causal", [False, True])
def test_the_schedule_reaches_the_kernel(causal):
    """Its number, and so, with several tiles, its bits."""
    shape = dict(batch=1, seqlen_q=300, seqlen_k=900, heads=1, kv_heads=1, head_dim=128)
    bits = set()
    for schedule in ("auto", *fitting(causal=causal)):
        arguments = backward_arguments(schedule, causal, dtype=torch.float16, **shape)
        arguments[-1] = 3
        with kernel_calls() as calls:
            torch.ops.dash_attn.backward(*arguments)
        policy = resolve(schedule, causal=causal, head_dim=128)
        given = calls[-1][1]
        assert (given["causal"], given["schedule"], given["sm_margin"]) == (causal, policy_number(policy), 3)
        bits.add(arguments[6].view(torch.int16).numpy().tobytes())
    assert len(bits) > 2


@pytest.mark.parametrize("shape", [{"seqlen_k": 0}, {"seqlen_q": 0}, {"batch": 0}], ids=str)
def test_nothing_is_launched_for_empty_sums(shape):
    q, k, v, dout = operands(**shape)
    gradients = [torch.ones_like(t) for t in (q, k, v)]
    with kernel_calls() as calls:
        out, lse = torch.ops.dash_attn.forward(q, k, v, *settings(False), 3)
        torch.ops.dash_attn.backward(dout, q, k, v, out, lse, *gradients, *settings(False), "auto", 0)
    assert calls == []
    assert (out == 0).all() and (lse == torch.inf).all() and all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("key", ["CPU", "CUDA", "Meta", "Autograd"])
def test_registered(key, name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dash_attn::{name}", key)


def test_missing_libraries_are_named(tmp_path):
    assert ops.why_not_loaded("_C", "no kernels", tmp_path) == f"no kernels (no _C*.so in {tmp_path})"
    (tmp_path / "_C.abi3.so").touch()
    assert "file too short" in ops.why_not_loaded("_C", "no kernels", tmp_path)
    (tmp_path / "_C.old.so").touch()
    reason = ops.why_not_loaded("_C", "no kernels", tmp_path)
    assert reason.endswith("got _C.abi3.so, _C.old.so: remove the stale ones")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
def test_cuda_tensors_without_kernels_raise():
    """Called as the dispatcher would for CUDA tensors, which there are none of here."""
    q, k, v, _ = operands()
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    out, lse = torch.empty_like(q), torch.empty(2, 4, 20)
    with pytest.raises(RuntimeError, match="^this torch is built without CUDA$"):
        arguments = (q, k, v, out, lse, *[None] * 6, 0.25, 0.0, *settings()[5:], 0)
        torch.ops.dash_attn_C.forward.default.redispatch(keys, *arguments)


def pack_arguments(schedule="auto", **pack):
    """Of a backward; `pack` replaces the lengths, by name."""
    pack = {
        "cu_seqlens_q": torch.tensor([0, 7, 7, 18], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([1, 13, 20, 28], dtype=torch.int32),
        "seqused_q": None, "seqused_k": torch.tensor([12, 3, 8], dtype=torch.int32),
    } | pack  # fmt: skip
    q, k, v, dout = (x[0] for x in operands(batch=1))
    numbers = (*pack.values(), *settings(window=(6, -1), attention_chunk=9)[4:])
    softmax_lse = torch.zeros(4, 20)
    return [dout, q, k, v, q.clone(), softmax_lse, *map(torch.empty_like, (q, k, v)), *numbers, schedule, 0]


@pytest.mark.parametrize("schedule", ["auto", "spt", "order_free"])
def test_opcheck_packs(schedule):
    arguments = pack_arguments(schedule)
    forward = torch.ops.dash_attn.forward.default
    torch.library.opcheck(forward, (*arguments[1:4], *arguments[9:18]))
    arguments[4:6] = forward(*arguments[1:4], *arguments[9:18])
    torch.library.opcheck(torch.ops.dash_attn.backward.default, tuple(arguments))


@pytest.mark.parametrize("window", [(5, 3), (-1, 4)])
def test_opcheck_windows(window):
    arguments = backward_arguments(causal=False, window=window, attention_chunk=11)
    torch.library.opcheck(torch.ops.dash_attn.forward.default, (*arguments[1:4], *arguments[9:18]))
    torch.library.opcheck(torch.ops.dash_attn.backward.default, tuple(arguments))


def test_opcheck_functions_with_a_derivative():
    """The ones that models call, of a dense batch and of packs."""
    dense, pack = backward_arguments(), pack_arguments()
    offsets = pack[9:13]
    q, k, v = (x.requires_grad_() for x in pack[1:4])
    ops = torch.ops.dash_attn
    common, window = (0.25, True, "auto", 0), (5, -1, 0)
    for op, arguments in (
        (ops.attention, (*(x.detach().requires_grad_() for x in dense[1:4]), *common)),
        (ops.attention, (q, k, v, *common, *window, *offsets)),
        (ops.attention_kvpacked, (q, torch.stack((k, v), 1).detach().requires_grad_(), *common, *window, *offsets)),
        (ops.attention_qkvpacked, (q.detach().requires_grad_(), 2, *common, *window, offsets[0])),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


OFFSETS = torch.tensor([0, 7, 7, 18], dtype=torch.int32)


@pytest.mark.parametrize("change, message", [
    ({"cu_seqlens_k": None}, "cu_seqlens_q and cu_seqlens_k must be given both or neither, got cu_seqlens_q alone"),
    ({"cu_seqlens_q": None}, "cu_seqlens_q and cu_seqlens_k must be given both or neither, got cu_seqlens_k alone"),
    ({"cu_seqlens_q": None, "cu_seqlens_k": None}, "seqused_k must be None where cu_seqlens_k is, got a tensor"),
    ({"cu_seqlens_q": None, "cu_seqlens_k": None, "seqused_q": OFFSETS[:3], "seqused_k": None},
     "seqused_q must be None where cu_seqlens_q is, got a tensor"),
    ({"cu_seqlens_q": OFFSETS.long()}, "cu_seqlens_q must be torch.int32, got torch.int64"),
    ({"cu_seqlens_k": OFFSETS[:3]}, "cu_seqlens_k must have shape (batch + 1,) = (4,), got (3,)"),
    ({"seqused_q": OFFSETS}, "seqused_q must have shape (batch,) = (3,), got (4,)"),
    ({"seqused_q": OFFSETS[:3].to("meta")}, "seqused_q must be on the device of q, cpu, got meta"),
])  # fmt: skip
def test_errors_of_packs(change, message):
    arguments = pack_arguments(**change)
    for op, given in (
        (torch.ops.dash_attn.forward, (*arguments[1:4], *arguments[9:18])),
        (torch.ops.dash_attn.backward, arguments),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            op(*given)
        assert str(error.value) == message


def test_the_log_sum_exp_of_a_pack_has_no_batch():
    arguments = pack_arguments()
    arguments[5] = torch.zeros(1, 4, 20)
    message = r"^softmax_lse must have shape \(heads, total_q\) = \(4, 20\), got \(1, 4, 20\)$"
    with pytest.raises(ValueError, match=message):
        torch.ops.dash_attn.backward(*arguments)


@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_is_launched_for_packs_without_rows(batch):
    offsets = torch.zeros(batch + 1, dtype=torch.int32)
    arguments = pack_arguments(cu_seqlens_q=offsets, cu_seqlens_k=offsets, seqused_k=None)
    if batch:
        arguments[2:4], arguments[7:9] = ([x[:0] for x in arguments[i : i + 2]] for i in (2, 7))
    with kernel_calls() as calls:
        out, lse = torch.ops.dash_attn.forward(*arguments[1:4], *arguments[9:18])
        torch.ops.dash_attn.backward(*arguments)
    assert calls == [] and not out.any() and (lse == torch.inf).all()
    assert not any(gradient.any() for gradient in arguments[6:9])

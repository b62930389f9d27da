"""Megatron-core trains with our kernels, with the same bits in every run. Needs megatron-core beside the kernels."""

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import gpu_support  # noqa: E402
import megatron_support as support  # noqa: E402
import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import dash_attn  # noqa: E402

STEPS, REPEATS = 6, 3
SETTINGS = {
    "grouped": {"num_query_groups": 2},
    "window": {"window_size": (255, 0), "window_attn_skip_freq": 2},
    "sinks": {"softmax_type": "learnable"},
}
SIZE = {"hidden_size": 512, "num_attention_heads": 8, "seqlen": 1024, "device": "cuda"}


@pytest.fixture(scope="module", autouse=True)
def megatron(hopper, tmp_path_factory):
    # What torch itself adds in no fixed order, such as the gradient of an embedding, is not ours to test.
    torch.use_deterministic_algorithms(True, warn_only=True)
    with support.process_group(tmp_path_factory.mktemp("megatron") / "store", backend="nccl"):
        yield
    torch.use_deterministic_algorithms(False)


def train(settings) -> dict[str, torch.Tensor]:
    """The losses, the gradients of the last step and the parameters after it."""
    model = support.gpt(True, **SIZE, **settings)
    inputs = support.tokens(seqlen=SIZE["seqlen"], device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(STEPS):
        found = support.loss_and_gradients(model, inputs)
        losses.append(found.pop("loss"))
        optimizer.step()
    parameters = {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": torch.stack(losses), **found, **parameters}


@pytest.mark.parametrize("name", SETTINGS)
def test_runs_have_the_same_bits(name):
    first = train(SETTINGS[name])
    gpu_support.assert_finite(first, name)
    assert first["losses"][-1] < first["losses"][0]
    for repeat in range(REPEATS):
        gpu_support.assert_same_bits(train(SETTINGS[name]), first, f"{name}, run {repeat}")


def test_our_kernels_run():
    model, inputs = support.gpt(True, **SIZE), support.tokens(seqlen=SIZE["seqlen"], device="cuda")
    support.loss_and_gradients(model, inputs)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        support.loss_and_gradients(model, inputs)
        torch.cuda.synchronize()
    names = [event.name for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    for kernel in ("forward_kernel", "backward_kernel"):
        ran = [name for name in names if "dash_attn::" in name and kernel in name]
        assert len(ran) == 2, f"{kernel} of each of the two layers, got {ran}"
    assert not [name for name in names if "flash" in name.lower() and "dash_attn::" not in name]


def test_model_is_as_accurate_as_with_megatrons_attention():
    found = support.accuracy(support.tokens(seqlen=SIZE["seqlen"], device="cuda"), draws=4, **SIZE)
    found.pop("loss")  # one number, which has float32's rounding too
    assert all(ours <= theirs for ours, theirs in found.values()), found


@pytest.mark.parametrize("folded", (1, 4))
def test_sequences_have_the_bits_of_a_dense_batch(folded):
    """Heads of all sequences stand side by side in the call of the door."""
    heads, shape = 8, (700, folded, 8, 64)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    side_by_side = dash_attn.flash_attn_func(*(x.flatten(1, 2)[None] for x in leaves), causal=True)
    dense = dash_attn.flash_attn_func(*(x.transpose(0, 1) for x in leaves), causal=True)
    dense_gradients = torch.autograd.grad(dense, leaves, dout.transpose(0, 1))
    gradients = torch.autograd.grad(side_by_side, leaves, dout.flatten(1, 2)[None])
    assert torch.equal(side_by_side[0].unflatten(1, (folded, heads)), dense.transpose(0, 1))
    assert all(map(torch.equal, gradients, dense_gradients))

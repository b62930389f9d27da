"""A tiny model of litgpt, whose attention is PyTorch's scaled_dot_product_attention."""

import pytest
import torch

pytest.importorskip("litgpt.model", reason="litgpt is not installed", exc_type=ImportError)

from interface_support import kernel_calls  # noqa: E402
from litgpt.config import Config  # noqa: E402
from litgpt.model import GPT  # noqa: E402

import dash_attn.integrations.torch as door  # noqa: E402

LAYERS = 2


def step(dtype):
    """Loss and gradients of a model and tokens that are the same in every call."""
    torch.manual_seed(0)
    config = Config(
        name="tiny", block_size=32, n_layer=LAYERS, n_head=4, n_query_groups=2, n_embd=64, padded_vocab_size=96,
        rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", intermediate_size=128,
    )  # fmt: skip
    model = GPT(config).to(dtype)
    tokens = torch.randint(96, (2, 33))
    logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach(), *(x.grad for x in model.parameters())


def test_loss_and_gradients():
    """No further from float64 than PyTorch's own attention takes it, and the same in every run."""
    truth, by_torch = step(torch.float64), step(torch.bfloat16)
    door.activate(device_types=["cpu"], fallback="error")
    try:
        with kernel_calls() as calls:
            actual = step(torch.bfloat16)
        again = step(torch.bfloat16)
    finally:
        door.restore()
    assert [name for name, _ in calls] == ["forward"] * LAYERS + ["backward"] * LAYERS
    assert all(torch.equal(x, y) for x, y in zip(actual, again, strict=True))

    def error(found):
        return sum((x.double() - y).square().sum() / y.square().sum() for x, y in zip(found, truth, strict=True))

    # A tenth for chance: most of either error is of the model's other layers.
    assert error(actual) <= 1.1 * error(by_torch)

"""torchtitan's VarlenAttention, which activates the implementation named "FA3" on a Hopper GPU."""

import pytest

pytest.importorskip("torchtitan.models.common.attention", reason="torchtitan is not installed", exc_type=ImportError)

import example_support  # noqa: E402
import titan_support as support  # noqa: E402
from interface_support import assert_same_bits, kernel_calls  # noqa: E402
from torch.nn.attention import current_flash_attention_impl  # noqa: E402

import dash_attn.integrations.torch as door  # noqa: E402

SEQLEN = 20


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    """As where torchtitan finds a Hopper GPU; the tensors are on the CPU."""
    monkeypatch.setattr("torchtitan.tools.utils.get_cuda_flash_attention_impl", lambda: "FA3")
    door.register("FA3", device_types=["cpu"])
    yield
    door.restore()


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (7, 0)])
def test_varlen_attention(window):
    assert current_flash_attention_impl() is None
    attention = support.attention_of(window)
    assert current_flash_attention_impl() == "FA3" and door.is_active()
    (inputs, dout), documents = support.tensors(SEQLEN), support.documents(SEQLEN)
    with kernel_calls() as calls:
        actual = support.by_torchtitan(attention, inputs, dout, documents)
    assert [name for name, _ in calls] == ["forward", "backward"]
    assert_same_bits(actual, support.by_dash_attn(window, inputs, dout, documents))
    for _ in range(2):
        assert_same_bits(support.by_torchtitan(attention, inputs, dout, documents), actual)


def test_the_log_sum_exp_of_its_epilogue():
    found, expected = support.log_sum_exps(support.tensors(SEQLEN)[0], support.documents(SEQLEN))
    assert_same_bits(found, expected)


@pytest.mark.slow
def test_example():
    assert example_support.last_line("torchtitan_attention.py") == "the gradients of three runs have the same bits"

"""The demo says of bits that differ that they differ."""

import pytest
import torch

from dash_attn import demo, ops

SIZE = demo.Size(batch=1, seqlen=24, heads=2, head_dim=8, repeats=4)


class Attention:
    """Stands for an attention; of its backward passes, those whose numbers are in `odd` have another last bit."""

    def __init__(self, odd):
        attention = self
        self.odd, self.calls = odd, 0

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k, v):
                return q + k + v

            @staticmethod
            def backward(ctx, dout):
                dv = dout.clone()
                if attention.calls in attention.odd:
                    dv.view(torch.int16)[0, -1, -1, -1] ^= 1
                attention.calls += 1
                return dout, dout, dv

        self.function = Function

    def __call__(self, q, k, v, causal=True, schedule="auto"):
        return self.function.apply(q, k, v)


def inputs():
    return demo.attention_inputs(SIZE, "cpu")


@pytest.mark.parametrize("odd, differing", [((), 0), ((3,), 1), ((1, 2, 4), 3), ((0,), 4)])
def test_differing_runs_counts_what_differs_from_the_first(odd, differing):
    assert demo.differing_runs(Attention(odd), inputs(), SIZE.repeats) == differing


@pytest.mark.parametrize("odd, said", [((), "0 of 4 runs differ"), ((2, 3), "2 of 4 runs differ")])
def test_repeats_are_reported(odd, said, monkeypatch, capsys):
    monkeypatch.setattr(demo.dash_attn, "flash_attn_func", Attention(odd))
    assert demo.show_repeats(SIZE, "cpu") == (not odd)
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("odd, said", [((), "all gradients have the same bits"), ((1,), "THE BITS DIFFER")])
def test_a_layer_that_differs_is_reported(odd, said, monkeypatch, capsys):
    monkeypatch.setattr(demo.dash_attn, "flash_attn_func", Attention(odd))
    assert demo.show_layer(SIZE, "cpu") == (not odd)
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("layer, repeats, status", [(True, True, 0), (False, True, 1), (True, False, 1)])
def test_exit_status(layer, repeats, status, monkeypatch, capsys):
    # As after a change of torch: the GPU is there, and the kernels are files that cannot be loaded.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(ops, "why_no_kernels", "_C.abi3.so cannot be loaded")
    monkeypatch.setattr(demo, "show_layer", lambda size, device: layer)
    monkeypatch.setattr(demo, "show_repeats", lambda size, device: repeats)
    for name in ("show_orders", "show_schedules"):
        monkeypatch.setattr(demo, name, lambda *arguments: None)
    monkeypatch.setattr(demo.sys, "argv", ["demo"])
    assert demo.main() == status
    printed = capsys.readouterr().out
    assert "On the CPU, with dash_attn's reference (_C.abi3.so cannot be loaded)." in printed
    assert ("All bits agree: yes" if status == 0 else "All bits agree: NO") in printed


def test_digest_is_of_every_byte():
    tensors = [torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.zeros(3)]
    first = demo.digest(tensors)
    assert first == demo.digest([t.clone() for t in tensors])
    assert first == demo.digest([tensors[0].mT.contiguous().mT, tensors[1]]), "whatever the strides"
    tensors[1].view(torch.int32)[2] ^= 1
    assert demo.digest(tensors) != first

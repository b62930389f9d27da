"""The demo tells runs that differ from runs that do not, on small models."""

import pytest
import torch

from dash_attn import demo

SIZE = demo.Size(batch=1, seqlen=40, heads=2, head_dim=16, layers=2, steps=8)


def pair(folder, flip=False, attention=demo.attention_of_dash_attn):
    return demo.train_pair("dash_attn", folder, SIZE, "cpu", attention, flip)


@pytest.mark.parametrize("attention", [demo.attention_of_dash_attn, demo.attention_of_torch])
def test_runs_that_repeat(attention, tmp_path, capsys):
    """On a CPU also with PyTorch's attention."""
    assert demo.report(pair(tmp_path, attention=attention)) is None
    said = capsys.readouterr().out
    assert "losses:   the same bits in all 8 steps" in said and "receipts: the same bits in all " in said


def test_a_flipped_bit_is_found(tmp_path, capsys):
    flipped = pair(tmp_path, flip=True)
    first = demo.report(flipped)
    step = demo.FLIPPED_STEP
    assert (first.step, first.key.name, first.cause) == (step, demo.FLIPPED_TENSOR, "backward")
    equal = torch.eq(*flipped.losses)
    assert equal[: step + 1].all() and not equal[step + 1 :].any()
    assert f"losses:   differ from step {step + 1} on\nreceipts: step {step}, activation_gradient" in (
        capsys.readouterr().out
    )


def test_both_attentions_are_causal_attention():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 12, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    ours, theirs = demo.attention_of_dash_attn(q, k, v), demo.attention_of_torch(q, k, v)
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    "ours, theirs, message",
    [
        (0.0, 1e-3, "only the runs with dash_attn agree"),
        (0.0, 0.0, "all pairs of runs agree"),
        (1e-3, 1e-3, "no two runs agree"),
    ],
)
def test_the_picture_says_which_runs_agree(ours, theirs, message, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda axes, title, **_: titles.append(title))
    losses = torch.linspace(5, 4, 6)
    pairs = [demo.Pair(name, (losses, losses + by), ()) for name, by in (("dash_attn", ours), ("others", theirs))]
    demo.draw_losses(pairs, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert titles == [f"The same model, seed and data, trained twice: {message}"]


@pytest.mark.parametrize("what, status", [("", 0), ("runs of dash_attn differ", 1), ("the bit is not flipped", 1)])
def test_exit_status(what, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "why_no_kernels_run", lambda: "_C.abi3.so cannot be loaded")
    monkeypatch.setattr(demo, "CPU", SIZE)
    train_pair, flips = demo.train_pair, {"runs of dash_attn differ": (True, True), "the bit is not flipped": (0, 0)}
    wanted = iter(flips.get(what, (False, True)))
    monkeypatch.setattr(demo, "train_pair", lambda *arguments, flip=False: train_pair(*arguments, next(wanted)))
    monkeypatch.setattr(demo.sys, "argv", ["demo", "--output", str(tmp_path)])
    assert demo.main() == status
    printed = capsys.readouterr().out
    assert "On the CPU, with dash_attn's reference (_C.abi3.so cannot be loaded)." in printed
    assert ("agree in every bit: NO" in printed) == ("differ" in what)
    assert ("flipped bit: NO" in printed) == ("not flipped" in what)
    if what != "the bit is not flipped":
        assert {path.name for path in tmp_path.iterdir()} == {"losses.png", "receipts.png"}

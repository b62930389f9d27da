"""The prediction of context parallelism's time: what must hold of it whatever the costs are."""

import dataclasses
import subprocess
import sys

import pytest

from dash_attn.distributed import prediction
from dash_attn.distributed.prediction import Costs, Shape, predict
from dash_attn.distributed.simulate import main, table

FREE = Costs(node_gbs=1e9, network_gbs=1e9, hop_us=0.0, task_us=0.0)
LONG = Shape(seqlen=1_048_576)


def test_heads_alone_divide_evenly_where_links_cost_nothing():
    for gpus in (1, 2, 4, 8):
        assert predict(LONG, gpus, FREE).share_of_ideal == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("layout, causal", [("zigzag", True), ("zigzag", False), ("contiguous", False)])
@pytest.mark.parametrize("gather", [2, 4, 16, 32])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_the_pipe_fills_once(layout, causal, gather, kv_heads):
    """docs/distributed.md's formula, from the plan: 1 + (1 - 1/c) / (2 H S), twice that for contiguous chunks."""
    shape = Shape(65536, 4 * kv_heads, kv_heads, 128, causal, layout)
    costs = dataclasses.replace(FREE, gpus_of_node=1)
    p = predict(shape, gather, costs)
    splits = 2 if causal else 1  # of four query heads
    fill = (1 - 1 / gather) / (kv_heads * splits) / (2 if layout == "zigzag" else 1)
    assert (p.ulysses, p.gather, p.played) == (1, gather, True)
    assert 1 / (1 - p.idle_share) == pytest.approx(1 + fill, rel=1e-3)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen", [131_072, 1_048_576])
def test_the_formula_goes_on_where_the_played_plans_end(monkeypatch, layout, causal, seqlen):
    shape = Shape(seqlen, causal=causal, layout=layout)
    played = predict(shape, 8 * 32)
    monkeypatch.setattr(prediction, "MOST_RANKS_PLAYED", 1)
    formula = predict(shape, 8 * 32)
    assert played.played and not formula.played
    assert formula.backward_ms == pytest.approx(played.backward_ms, rel=0.15)


def test_more_gpus_are_never_better_than_ideal_and_the_network_binds_in_the_end():
    costs = dataclasses.replace(Costs(), hop_us=0.0, task_us=0.0)
    predictions = [predict(Shape(131_072), gpus, costs) for gpus in (2, 8, 16, 64, 512, 4096)]
    assert all(p.share_of_ideal <= 1 and p.ulysses * p.gather == p.gpus for p in predictions)
    shares = [p.share_of_ideal for p in predictions]
    assert shares == sorted(shares, reverse=True)
    assert [p.ulysses for p in predictions] == [2, 8, 8, 8, 8, 8]
    assert predictions[-1].network_bound and not predictions[2].network_bound


def test_heads_that_do_not_divide_leave_ranks_with_fewer():
    """8 KV heads on 6 GPUs: some have two, some one."""
    assert predict(LONG, 6, FREE).share_of_ideal == pytest.approx(8 / (6 * 2), abs=1e-4)


def test_costs_are_arguments():
    slow = dataclasses.replace(Costs(), backward_tflops=304.0)
    assert predict(LONG, 8, slow).backward_ms == pytest.approx(2 * predict(LONG, 8).backward_ms, rel=0.01)
    far = dataclasses.replace(Costs(), network_gbs=4.5)
    assert predict(LONG, 64, far).forward_ms > predict(LONG, 64).forward_ms
    assert predict(LONG, 8, far) == predict(LONG, 8)


def test_the_table_says_what_it_is(capsys):
    shape = Shape(65536)
    assert table(shape, [predict(shape, 2)]).startswith("PREDICTION, not a measurement")
    assert main(["--gpus", "2", "16", "--seqlen", "65536"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("PREDICTION") and lines[2].split()[:4] == ["2", "2", "x", "1"] and len(lines) == 6


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gpus", "0"], "gpus must be at least 1, got 0"),
        (["--heads", "5"], "heads must be a multiple of kv_heads=8, got 5"),
        (["--node-gbs", "0"], "node_gbs must be more than 0, got 0.0"),
        (["--hop-us", "-1"], "hop_us must be at least 0, got -1.0"),
        (["--gpus", "2", "--png", "x.jpg"], "path must end in .png, got 'x.jpg'"),
    ],
)
def test_what_the_command_refuses(capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_draws(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "prediction.png"
    command = [sys.executable, "-m", "dash_attn.distributed.simulate", "--gpus", "2", "8", "--png", str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"wrote {path}" in printed and path.read_bytes().startswith(b"\x89PNG")
    help_text = subprocess.run([*command[:3], "--help"], capture_output=True, text=True, check=True).stdout
    assert "PREDICTION" in help_text

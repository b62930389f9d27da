"""The analytical model of dropout: `python -m dash_attn.dropout.model`."""

import dataclasses
import itertools
import json
import pathlib
import re
import subprocess
import sys

import pytest

from dash_attn.dropout import model
from dash_attn.dropout.model import command

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
H200 = model.MACHINES["h200"]
SETTINGS = model.Settings()


def figures(**values):
    return dataclasses.replace(SETTINGS, **{name: model.Figure(value, "given") for name, value in values.items()})


def times(settings=SETTINGS, *, block="Llama-3 8B", seqlen=8192, backward=False, causal=True, machine=H200):
    arguments = {"tokens": 16384, "causal": causal, "backward": backward}
    return model.times(model.BLOCKS[block], seqlen, machine, settings, **arguments)


def test_measured_rates_are_those_of_the_results():
    files = {"forward": "h200_2026-11-22_f8a3122_forward.json", "backward": "h200_2026-11-21_d9f3fb9.json"}
    for name, file in files.items():
        rates = getattr(H200, name)
        assert file in rates.source and rates.source.startswith("measured")
        for row in json.loads((RESULTS / file).read_text())["rows"]:
            is_ours = row["impl"] == "dash_attn" and row["pass"] == name and row["schedule"] in (None, "auto")
            if is_ours and row["head_dim"] == 128 and row["kv_heads"] == row["heads"] and row["seqlen"] >= 2048:
                assert rates.at(row["seqlen"], row["mask"] == "causal") == pytest.approx(row["tflops"], abs=0.6)


def test_what_is_not_measured_is_labelled():
    for machine in model.MACHINES.values():
        sources = {name: source for name, _, source in model.constants(machine, SETTINGS)}
        assert sources["gemm_tflops"].startswith("unmeasured") and sources["gemm_slowdown"].startswith("unmeasured")
        is_measured = sources["causal forward, TFLOP/s"].startswith("measured")
        assert is_measured == (machine.name == "h200")


def test_a_gemm_and_a_generator_together():
    # Without interference the shorter is for nothing.
    assert model.together(3.0, 1.0, 0, 0) == 3.0 and model.together(1.0, 3.0, 0, 0) == 3.0
    # Two that slow each other down to half of their speed take as long as one after the other.
    assert model.together(2.0, 2.0, 1, 1) == 4.0
    for gemm, generator, a, b in itertools.product((0.5, 1, 4), (0.25, 1, 6), (0, 0.1, 1), (0, 0.5, 2)):
        took = model.together(gemm, generator, a, b)
        assert max(gemm, generator) <= took + 1e-12
        # Work that is left at each moment, step by step.
        left, now, step = [gemm, generator], 0.0, 1e-3
        while max(left) > 0:
            both = min(left) > 0
            for i, slowdown in enumerate((a, b)):
                left[i] -= step / (1 + slowdown) if both else step
            now += step
        assert took == pytest.approx(now, abs=0.02)


def test_ways_differ_by_what_they_hide():
    for block, backward in itertools.product(model.BLOCKS, (False, True)):
        free = times(figures(gemm_slowdown=0, generator_slowdown=0, exposed_use=0), block=block, backward=backward)
        assert free.overlapped == pytest.approx(free.gemms + free.attention)
        assert free.sequential == pytest.approx(free.gemms + free.attention + free.generator)
        none = times(figures(hidden_in_attention=1.0, hidden_in_backward=1.0), block=block, backward=backward)
        assert none.fused == pytest.approx(none.gemms + none.attention)


def test_a_generator_that_a_gemm_cannot_hide_is_left_over():
    slow = dataclasses.replace(H200, imad_wide_lanes=model.Figure(1, "given"))
    settings = figures(gemm_slowdown=0, generator_slowdown=0, exposed_use=0)
    t = times(settings, seqlen=16384, machine=slow)
    projection = model.BLOCKS["Llama-3 8B"].projection_flops(16384) / (H200.gemm_tflops.value * 1e12)
    assert t.generator > projection
    assert t.overlapped == pytest.approx(t.sequential - projection)


def test_rounds_and_planes_and_lengths_say_how_long_the_generator_takes():
    def generator(rounds=7, planes=8, **arguments):
        return times(model.Settings(rounds=rounds, planes=planes), **arguments).generator

    assert generator(3) < generator(5) < generator(7) < generator(10)
    assert generator(planes=4) == pytest.approx(generator() / 2, rel=0.1)
    assert generator(seqlen=16384, causal=False) == pytest.approx(2 * generator(causal=False))
    assert generator(causal=False) / generator() == pytest.approx(256 / ((1 + 256) / 2 + 8), rel=0.01)
    # Two calls of Philox for 32 elements: 2 x 7 rounds x 2 products.
    assert model.generator_instructions(7, 8)[0] == 28 / 32


def test_as_many_bits_are_counted_as_the_generator_makes():
    """It makes whole blocks, and those within the reach of a tile of the backward."""
    sources = "".join(path.read_text() for path in (ROOT / "csrc" / "generator").glob("*.h"))
    (reach,) = map(int, re.findall(r"constexpr int kReach = (\d+);", sources))
    block = model.BLOCKS["Llama-3 8B"]
    for seqlen in (32, 100, 2048, 8192):
        of_row = -(-seqlen // 32)
        blocks = 0
        for first_query in range(0, 32 * of_row, 32):
            # The last query that is near sees its own key and those before; as far behind it bits may be looked at.
            end_key = min(first_query + 32 + reach, seqlen) + reach
            blocks += min(-(-end_key // 32), of_row)
        assert block.generated(3 * seqlen, seqlen, True) == 3 * block.heads * 1024 * blocks
        assert block.generated(3 * seqlen, seqlen, False) == 3 * block.heads * 1024 * of_row**2


def test_a_further_call_and_a_second_stream_take_their_time():
    plain, slow = times(), times(figures(call_us=10, fork_us=100, generator_start_us=1000))
    assert slow.fused - plain.fused == pytest.approx(4 * 10e-6)
    assert slow.generator - plain.generator == pytest.approx(1e-3)
    assert slow.sequential - plain.sequential == pytest.approx(5 * 10e-6 + 1e-3)
    without = times(figures(call_us=10, generator_start_us=1000))
    assert slow.overlapped - without.overlapped == pytest.approx(100e-6)


def test_command_prints_a_table_and_draws(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "PACKAGED", tmp_path / "none.json")
    path = tmp_path / "model.png"
    model.main(["--seqlens", "2048", "8192", "--rounds", "10", "--png", str(path), "--gemm-slowdown", "0.2"])
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if any(line.startswith(f"| {name} |") for name in model.BLOCKS)]
    assert len(rows) == 2 * len(model.BLOCKS) and "10 rounds" in printed
    assert "| gemm_slowdown | 0.2 | given |" in printed
    assert "| gemm_tflops | 700 | unmeasured: bf16, large GEMMs |" in printed
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_command_runs_as_a_module():
    run = [sys.executable, "-m", "dash_attn.dropout.model", "--seqlens", "2048"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Predicted, h200, causal mask, 7 rounds")


@pytest.mark.parametrize("arguments, message", [
    (["--rounds", "0"], "rounds must be at least 1, got 0"),
    (["--seqlens", "2048", "0"], "seqlens must be at least 1, got 0"),
    (["--gemm-slowdown", "-1"], "gemm_slowdown must be a finite number of at least 0, got -1.0"),
    (["--clock-ghz", "0"], "clock_ghz must be a finite number above 0, got 0.0"),
    (["--hidden-in-attention", "1.5"], "hidden_in_attention must be at most 1, got 1.5"),
    (["--png", "model.pdf"], "path must end in .png, got 'model.pdf'"),
])  # fmt: skip
def test_errors(arguments, message):
    with pytest.raises(SystemExit) as raised:
        model.main(arguments)
    assert str(raised.value) == f"dash_attn.dropout.model: {message}"

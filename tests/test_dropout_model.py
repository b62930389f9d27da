"""The analytical model of dropout: `python -m dash_attn.dropout.model`."""

import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys

import pytest

from dash_attn.dropout import model

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
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
        none = times(figures(hidden_in_attention=1.0), block=block, backward=backward)
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
    assert generator(seqlen=16384) == pytest.approx(2 * generator())
    assert generator(causal=False) == pytest.approx(2 * generator())
    # Two calls of Philox for 32 elements: 2 x 7 rounds x 2 products.
    assert model.generator_instructions(7, 8)[0] == 28 / 32


def test_command_prints_a_table_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "model.png"
    arguments = ["--seqlens", "2048", "8192", "--rounds", "10", "--png", str(path), "--gemm-slowdown", "0.2"]
    command = [sys.executable, "-m", "dash_attn.dropout.model", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if any(line.startswith(f"| {name} |") for name in model.BLOCKS)]
    assert len(rows) == 2 * len(model.BLOCKS) and "10 rounds" in done.stdout
    assert "| gemm_slowdown | 0.2 | given |" in done.stdout
    assert "| gemm_tflops | 700 | unmeasured: bf16, large GEMMs |" in done.stdout
    assert path.read_bytes().startswith(b"\x89PNG")


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

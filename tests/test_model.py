"""The model of the machine: its parts, and how well the committed machine predicts the committed measurements."""

import dataclasses
import json
import math
import statistics

import pytest

from benchmarks import calibrate, model, report
from benchmarks.shapes import Shape, full_grid
from dash_attn import _schedule, schedule

SHAPE = Shape("bf16", 128, 16, 16, "causal", 2048, 4)


@pytest.fixture(scope="module")
def machine():
    return model.read(model.MACHINE)


@pytest.fixture(scope="module")
def compared(machine):
    return report.compare(machine, json.loads(model.CALIBRATION.read_text()))


def test_the_kernel_is_the_one_that_is_compiled():
    stages, adders = _schedule.BACKWARD_STAGES, _schedule.BACKWARD_ADDERS
    assert model.KERNEL == {"staging": stages, "adders": adders, "loads_ahead": stages}


def test_a_machine_survives_its_file(machine, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(model.dumps(machine))
    assert model.read(path) == machine
    assert model.MACHINE.read_text() == model.dumps(machine)


def test_prediction_scales_with_the_work(machine):
    once, four_times = (
        model.predict(machine, "descending", dataclasses.replace(SHAPE, batch=batch)) for batch in (8, 32)
    )
    assert four_times.us == pytest.approx(4 * once.us, rel=0.1)
    assert once.us > once.clocks / once.mhz
    busier = model.predict(machine, "descending", dataclasses.replace(SHAPE, seqlen=16384))
    assert busier.mhz < once.mhz <= machine.most_mhz


def test_time_around_the_main_kernel_is_interpolated(machine):
    points = {128: [[1000, 10.0], [2000, 14.0], [4000, 20.0]]}
    around = dataclasses.replace(machine, around_us=points)

    def at(queries):
        return model.around_us(around, Shape("bf16", 128, 1, 1, "full", queries, 1))

    assert at(1) == 10.0
    assert at(1500 / 128) == pytest.approx(12.0)
    assert at(3000 / 128) == pytest.approx(17.0)
    assert at(8000 / 128) == pytest.approx(40.0)


def test_minimise():
    found = model.minimise(lambda x: math.log(x[0] / 3) ** 2 + math.log(x[1] / 500) ** 2, [1.0, 100.0], 200)
    assert found == pytest.approx([3, 500], rel=1e-3)


def synthetic_calibration(machine):
    """What a machine with exactly these costs would measure."""
    rows = []
    tiles = {head_dim: schedule.tile_shape(head_dim) for head_dim in calibrate.HEAD_DIMS}
    for probe in calibrate.probes(machine.sms, tiles):
        clocks = model.play(machine, probe.schedule, probe, probe.sms).makespan
        if probe.shows == "code" or probe.seqlen_q * probe.batch <= 70_000:  # enough of them, and quick
            rows.append({**vars(probe), "mhz": 2000, "backward": clocks / 2000})
    preprocess = 16 * 2048 * 4 / machine.memory / 1000  # us for a batch and column of head_dim, at 1 GHz
    kernels = [
        {**vars(dataclasses.replace(SHAPE, head_dim=head_dim, batch=batch))}
        | {"us": 100.0 * batch, "backward": 90.0 * batch}
        | {"mhz": 1000, "preprocess": preprocess * batch * head_dim}
        for head_dim in (64, 128)
        for batch in (1, 4)
    ]
    grid = []
    for seqlen, clocks in ((512, 3e6), (1024, 1e6), (2048, 2e6)):
        shape = dataclasses.replace(SHAPE, seqlen=seqlen)
        main = model.play(machine, "spt", shape)
        tensor = main.num_tasks * model.tensor_clocks(shape, model.tiles_of("spt", shape)) / machine.sms
        mhz = 2000 - 800 * tensor / clocks - 300 * main.memory_time / clocks
        grid.append({**vars(shape), "schedule": "spt", "us": 2 * [clocks / mhz], "mhz": 2 * [mhz]})
    latency = {
        "launch_ns": machine.launch / 2,
        "hop_ns": {"8 CTAs, 0 bytes": 500.0},
        "add_clocks": {f"{machine.sms} CTAs, every 4000 clocks": machine.add},
        "read_clocks": {"far": machine.poll},
    }
    return {"meta": {"sms": machine.sms}, "latency": latency, "probes": rows, "kernels": kernels, "grid": grid}


@pytest.mark.slow
def test_fit_finds_the_costs_of_a_made_up_machine(machine):
    code = {"128 full shift": 1.03, "128 full spt": 0.99}
    made_up = dataclasses.replace(machine, step={64: 4400.0, 128: 4300.0}, work={64: 6000.0, 128: 6000.0}, code=code)
    fitted = model.fit(synthetic_calibration(made_up), evaluations=300)
    for head_dim in (64, 128):
        assert fitted.step[head_dim] == pytest.approx(made_up.step[head_dim], rel=0.03)
    assert fitted.code["128 full shift"] / fitted.code["128 full spt"] == pytest.approx(1.03 / 0.99, rel=0.01)
    assert fitted.memory == pytest.approx(made_up.memory)
    clock = (fitted.idle_mhz, fitted.mhz_per_tensor_share, fitted.mhz_per_memory_share)
    assert clock == pytest.approx((2000, 800, 300), rel=0.1)
    assert fitted.around_us[64] == [[64 * 16 * 2048, 10.0], [64 * 16 * 2048 * 4, 40.0]]


def test_probes_are_no_shape_of_the_grid_and_run_every_policy():
    tiles = {head_dim: schedule.tile_shape(head_dim) for head_dim in calibrate.HEAD_DIMS}
    probes = calibrate.probes(132, tiles)
    assert len(set(probes)) == len(probes)
    grid = {(s.head_dim, s.mask, s.batch * s.heads, s.seqlen) for s in full_grid()}
    assert not {(p.head_dim, p.mask, p.batch * p.heads, p.seqlen_q) for p in probes if p.seqlen_q == p.seqlen_k} & grid
    assert all(1 <= p.sms <= 132 and _schedule.fits(p.schedule, p.causal) for p in probes)
    assert {p.schedule for p in probes} == {"ascending", "descending", "spt", "shift", "symmetric_shift"}


def test_calibrate_needs_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate.torch.cuda, "is_available", lambda: False)
    assert calibrate.main(["--json", str(tmp_path / "c.json")]) == 2
    assert "GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_times_within_ten_percent(compared):
    """The bar for the ordered policies; ascending under the causal mask misses it, and docs/model.md says so."""
    assert len(compared) == 105
    assert max(abs(row.error) for row in compared if not row.chaotic) < 0.10
    assert statistics.median(abs(row.error) for row in compared if row.chaotic) < 0.20


def test_ranking(compared):
    found = [pair[2] for rows in report.by_shape(compared).values() for pair in report.pairs(rows)]
    assert len(found) == 135
    assert found.count("differ") <= 0.08 * (len(found) - found.count("tie"))  # docs/model.md names them
    assert found.count("tie") < len(found) / 2
    by_clocks = [
        kind for rows in report.by_shape(compared).values() for _, _, kind in report.pairs(rows, report.CLOCKS)
    ]
    assert by_clocks.count("differ") <= 0.05 * (len(by_clocks) - by_clocks.count("tie"))
    for rows in report.by_shape(compared).values():
        fastest, choice = report.best(rows)
        assert choice.us / fastest.us - 1 < 0.06


@pytest.mark.slow
def test_report_into_a_document(tmp_path, capsys):
    document = tmp_path / "model.md"
    mark = "<!-- written by benchmarks.report -->\n"
    document.write_text(f"before\n{mark}old\n<!-- end -->\nafter\n")
    report.main([str(model.MACHINE), str(model.CALIBRATION), "--document", str(document)])
    printed = capsys.readouterr().out
    assert "By times, 135 pairs of policies" in printed and 'The policy of "auto" takes' in printed
    assert document.read_text() == f"before\n{mark}{printed}<!-- end -->\nafter\n"
    document.write_text("no mark")
    with pytest.raises(ValueError, match="must contain the line '<!-- written by benchmarks.report -->' once, got 0"):
        report.main([str(model.MACHINE), str(model.CALIBRATION), "--document", str(document)])


def test_plot(compared, tmp_path):
    report.draw(compared, tmp_path / "model.png")
    assert (tmp_path / "model.png").stat().st_size > 20_000


def test_noise_and_pairs():
    def row(policy, first, second, predicted):
        return report.Compared(SHAPE, policy, (first, second), 1.0, model.Prediction(predicted, 1.0, 1.0))

    rows = [row("ascending", 100, 100, 9.0), row("spt", 100.4, 100.6, 3.0), row("descending", 110, 110, 8.0)]
    assert report.noise(rows) == report.TIE
    kinds = {(first.policy, second.policy): kind for first, second, kind in report.pairs(rows)}
    expected = {("ascending", "spt"): "tie", ("ascending", "descending"): "differ", ("spt", "descending"): "agree"}
    assert kinds == expected
    shaky = [row("ascending", 100, 110, 9.0), row("descending", 110, 120, 8.0)]
    assert report.noise(shaky) > 0.17 and [pair[2] for pair in report.pairs(shaky)] == ["tie"]


@pytest.mark.parametrize(
    "policy, causal, seqlen, head_dim, head_swizzle, last_heads",
    [
        ("descending", True, 512, 128, 64, 0),
        ("descending", True, 4096, 64, 16, 0),
        ("descending", True, 8192, 128, 8, 0),
        ("descending", True, 32768, 128, 4, 0),
        ("order_free", True, 512, 64, 4, 64),
        ("order_free", True, 8192, 128, 2, 2),
        ("order_free", False, 1024, 128, 4, 16),
        ("order_free", False, 32768, 128, 1, 1),
        ("atomic", True, 4096, 256, 4, 0),
        ("symmetric_shift", True, 1024, 64, 64, 0),
        ("spt", True, 512, 64, 1, 0),
        ("ascending", True, 512, 64, 1, 0),
        ("spt", False, 512, 64, 64, 0),
        ("shift", False, 16384, 128, 1, 0),
    ],
)
def test_head_swizzle_of_the_launch(policy, causal, seqlen, head_dim, head_swizzle, last_heads):
    tiles = schedule.problem(policy, seqlen, seqlen, causal=causal, head_dim=head_dim, head_swizzle=None)
    assert (tiles.head_swizzle, tiles.last_heads) == (head_swizzle, last_heads)


@pytest.mark.parametrize("batch, heads, kv_heads, seqlen, ctas, head_swizzle", [
    (1, 8, 8, 2048, 132, 8), (1, 8, 8, 2048, 128, 8), (1, 8, 8, 2048, 127, 1), (1, 8, 8, 2048, 255, 8),
    (1, 8, 8, 2048, 256, 1), (2, 4, 4, 2048, 128, 8), (2, 16, 4, 2048, 128, 8), (1, 9, 9, 2048, 132, 1),
    (2, 1, 1, 8192, 132, 2),
])  # fmt: skip
def test_where_all_heads_of_shift_come_together(batch, heads, kv_heads, seqlen, ctas, head_swizzle):
    """Where each KV tile has a CTA, but not each part of one."""
    counts = dict(batch=batch, heads=heads, kv_heads=kv_heads)
    tiles = schedule.problem("shift", seqlen, seqlen, causal=False, head_dim=64, **counts)
    assert _schedule.head_swizzle("shift", tiles, 64, ctas=ctas) == head_swizzle

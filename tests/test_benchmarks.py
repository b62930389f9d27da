"""The benchmark's arithmetic, files and table, on the CPU: no figure here means anything."""

import json
import math
import pathlib

import pytest
import torch

from benchmarks import compare, peers, plot, run, timing
from benchmarks.shapes import GRIDS, Shape, flops

SHAPE = Shape("bf16", 128, 16, 16, "full", 8192, 2)
TINY = Shape("bf16", 64, 2, 1, "causal", 96, 1)


def test_flops_follow_the_convention():
    forward = 4 * 8192**2 * 16 * 2 * 128
    assert flops(SHAPE, "forward") == forward
    assert flops(SHAPE, "backward") == 2.5 * forward
    assert flops(SHAPE, "both") == 3.5 * forward
    causal = Shape(**{**vars(SHAPE), "mask": "causal"})
    assert flops(causal, "backward") == flops(SHAPE, "backward") / 2
    grouped = Shape(**{**vars(SHAPE), "kv_heads": 4})
    assert flops(grouped, "backward") == flops(SHAPE, "backward")


def test_full_grid():
    shapes = GRIDS["full"]()
    assert len(shapes) == len(set(shapes)) == 30
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    for mask in ("full", "causal"):
        for head_dim, heads in ((64, 32), (128, 16)):
            of_grid = [s for s in shapes if (s.mask, s.head_dim, s.heads, s.kv_heads) == (mask, head_dim, heads, heads)]
            assert [s.seqlen for s in of_grid] == lengths + ([32768] if head_dim == 128 else [])
            assert all(s.batch * s.seqlen == 16384 for s in of_grid if s.seqlen <= 16384)
        assert [(s.seqlen, s.batch) for s in shapes if s.kv_heads == 8 and s.mask == mask] == [(4096, 2), (8192, 1)]


def test_bar_and_quick_grids_are_in_the_full_one():
    assert set(GRIDS["bar"]()) | set(GRIDS["quick"]()) <= set(GRIDS["full"]())
    assert len(GRIDS["bar"]()) == 3


def test_every_policy_that_fits_the_mask_is_measured():
    assert [v.schedule for v in peers.DashAttn().variants(SHAPE)] == ["ascending", "descending", "spt", "shift", "order_free"]
    causal = peers.DashAttn().variants(TINY)
    assert [v.schedule for v in causal] == ["ascending", "descending", "spt", "symmetric_shift", "order_free", "spt_descending"]
    assert all(v.deterministic for v in causal)
    (yardstick,) = peers.DashAttn(["atomic"]).variants(SHAPE)
    assert yardstick.schedule == "atomic" and not yardstick.deterministic
    chosen = peers.DashAttn(["auto", "shift"])
    assert [v.schedule for v in chosen.variants(SHAPE)] == ["auto", "shift"]
    assert [v.schedule for v in chosen.variants(TINY)] == ["auto"]


def test_peers_are_left_out_with_a_reason_where_they_cannot_run():
    for peer in peers.PEERS.values():
        assert peer().unavailable(torch.device("cpu")) == "needs a CUDA device"


def test_random_tensors_are_normal():
    tensors = peers.random_tensors(TINY, torch.device("cpu"))
    assert tensors.q.shape == (1, 96, 2, 64) and tensors.k.shape == tensors.v.shape == (1, 96, 1, 64)
    for x in vars(tensors).values():
        assert x.dtype == torch.bfloat16 and abs(x.float().std().item() - 1) < 0.05


def test_deterministic_switch_is_put_back():
    assert not torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    with peers.deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == filling


def test_median_leaves_out_what_raises():
    calls = []

    def fails():
        raise RuntimeError("not this shape")

    times, errors = timing.median_ms(
        {"works": lambda: calls.append(1), "fails": fails}, device=torch.device("cpu"), min_time_s=0.0
    )
    assert list(times) == ["works"] and times["works"] >= 0
    assert list(errors) == ["fails"] and "not this shape" in str(errors["fails"])
    assert len(calls) == 1 + timing.TURNS * (timing.TRIAL_CALLS + timing.MIN_ROUNDS)


def test_each_variant_is_measured_in_blocks_of_its_own():
    order = []
    timing.median_ms(
        {name: lambda name=name: order.append(name) for name in "ab"}, device=torch.device("cpu"), min_time_s=0.0
    )
    block = timing.TRIAL_CALLS + timing.MIN_ROUNDS
    assert order == list("ab") + timing.TURNS * (block * ["a"] + block * ["b"])


@pytest.fixture(scope="module")
def result_file(tmp_path_factory):
    """A run of the whole program at a toy size."""
    folder = tmp_path_factory.mktemp("benchmark")
    path = folder / "result.json"
    arguments = ["--device", "cpu", "--grid", "full", "--max-seqlen", "512", "--tokens", "64", "--min-time", "0"]
    arguments += ["--schedules", "ascending", "shift", "--pass", "backward", "forward"]
    assert run.main([*arguments, "--json", str(path), "--png", str(folder / "result.png")]) == 0
    return path


def test_json_schema(result_file):
    result = json.loads(result_file.read_text())
    assert list(result) == ["meta", "rows"]
    assert list(result["meta"]) == ["gpu", "driver", "cuda", "torch", "commit", "date"]
    fields = "impl pass schedule deterministic dtype head_dim heads kv_heads mask seqlen batch ms tflops".split()
    # Both schedules under the full mask and one under the causal one, a forward for each shape.
    assert len(result["rows"]) == 2 * (2 + 1) + 2 * (1 + 1)
    for row in result["rows"]:
        assert list(row) == fields == list(run.ROW_FIELDS)
        assert row["impl"] == "dash_attn" and row["deterministic"] is True and row["mask"] in ("full", "causal")
        assert (row["schedule"] is None) == (row["pass"] == "forward")
        shape = Shape(**{field: row[field] for field in run.SHAPE_FIELDS})
        assert math.isclose(row["tflops"], flops(shape, row["pass"]) / row["ms"] * 1e-9, rel_tol=0.1, abs_tol=0.006)


def test_peers_of_another_result(result_file):
    peers_file = json.loads((pathlib.Path(plot.__file__).parent / "results" / "peers_h200.json").read_text())
    for row in peers_file["rows"]:
        assert set(row) == set(run.ROW_FIELDS) and row["impl"] != "dash_attn"
        shape = Shape(**{field: row[field] for field in run.SHAPE_FIELDS})
        assert math.isclose(row["tflops"], flops(shape, row["pass"]) / row["ms"] * 1e-9, rel_tol=1e-3)
    own = json.loads(result_file.read_text())
    assert plot.with_peers(own, peers_file)["rows"] == own["rows"]  # toy shapes: no peer has them
    grid = {"meta": own["meta"], "rows": [{**peers_file["rows"][0], "impl": "dash_attn"}, {**peers_file["rows"][0], "impl": "fa2"}]}
    merged = plot.with_peers(grid, peers_file)["rows"]
    assert [row["impl"] for row in merged].count("dash_attn") == 1
    assert {row["impl"] for row in merged} == {"dash_attn", "fa2", "fa3", "cudnn"}
    assert sum(row["impl"] == "fa2" and row["pass"] == "backward" and not row["deterministic"] for row in merged) == 1


def test_png_is_drawn(result_file, tmp_path):
    assert result_file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    plot.draw(json.loads(result_file.read_text()), tmp_path / "forward.png", "forward")
    assert (tmp_path / "forward.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no rows of pass 'both'"):
        plot.draw(json.loads(result_file.read_text()), tmp_path / "both.png", "both")


def test_commit_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(run.COMMIT_VARIABLE, "abc123")
    assert run.metadata(torch.device("cpu"))["commit"] == "abc123"


def test_an_unknown_schedule_is_refused():
    with pytest.raises(SystemExit, match="got zigzag"):
        run.main(["--device", "cpu", "--schedules", "zigzag"])


def test_a_failure_of_ours_fails_the_run(monkeypatch, capsys):
    def broken(self, variant, shape, tensors):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(peers.DashAttn, "prepare", broken)
    assert run.main(["--device", "cpu", "--grid", "bar", "--tokens", "64", "--max-seqlen", "8192"]) == 1
    assert "failed: dash_attn ascending: RuntimeError: no kernel" in capsys.readouterr().out


def row(impl, schedule, deterministic, seqlen, tflops, mask="full"):
    shape = {"dtype": "bf16", "head_dim": 128, "heads": 16, "kv_heads": 16, "mask": mask, "seqlen": seqlen, "batch": 2}
    head = {"impl": impl, "pass": "backward", "schedule": schedule, "deterministic": deterministic}
    return {**head, **shape, "ms": 1.0, "tflops": tflops}


def test_compare_within_one_result(tmp_path):
    rows = [row("dash_attn", "shift", True, 1024, 300.0), row("dash_attn", "spt", True, 1024, 200.0)]
    rows += [row("fa2", None, True, 1024, 150.0), row("fa2", None, False, 1024, 400.0), row("fa2", None, True, 2048, 1.0)]
    rows += [row("dash_attn", "shift", True, 4096, 450.0), row("fa2", None, True, 4096, 900.0)]
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"meta": {}, "rows": rows}))
    figures = compare.read(path, "backward")
    first, second = compare.compare(figures, figures)
    assert first.ours.schedule == "shift" and first.ratio(first.best_deterministic) == 2.0
    assert first.ratio(first.best_other) == 0.75
    assert second.ratio(second.best_deterministic) == 0.5 and second.best_other is None
    text = compare.report([first, second])
    assert text.endswith("all               1.000 (2)    0.750 (1)")
    (named,) = compare.compare(figures, figures, schedule="spt")
    assert named.ours.tflops == 200.0
    assert compare.read(path, "forward") == {}


def test_compare_with_a_table_of_peers(tmp_path):
    ours, theirs = tmp_path / "ours.json", tmp_path / "peers.json"
    ours.write_text(json.dumps({"rows": [row("dash_attn", "spt", True, 1024, 300.0, "causal")]}))
    shape = {"head_dim": 128, "heads": 16, "kv_heads": 16, "mask": "causal", "seqlen": 1024, "batch": 2}
    backward = {"a": {"det": 250.0, "nondet": 600.0}, "b": {"det": 200.0}, "c": {"nondet": 500.0}}
    theirs.write_text(json.dumps({"rows": [{**shape, "backward": backward, "forward": {"a": 70.0}}]}))
    (found,) = compare.compare(compare.read(ours, "backward"), compare.read(theirs, "backward"))
    assert (found.best_deterministic.impl, found.best_other.impl) == ("a", "a")
    assert found.ratio(found.best_deterministic) == 1.2 and found.ratio(found.best_other) == 0.5
    assert [f.tflops for f in compare.read(theirs, "forward")[found.shape]] == [70.0]


def test_pairs_take_the_time_of_both_passes(tmp_path):
    path = tmp_path / "peers.json"
    shape = {"head_dim": 128, "heads": 16, "kv_heads": 16, "mask": "full", "seqlen": 1024, "batch": 2}
    table = {**shape, "backward": {"a": {"det": 250.0}, "b": {"nondet": 500.0}}, "forward": {"a": 100.0, "c": 200.0}}
    path.write_text(json.dumps({"rows": [table]}))
    ((of_shape, figures),) = compare.read(path, "both").items()
    assert {(f.impl, f.deterministic) for f in figures} == {("c+a", True), ("c+b", False)}
    for figure, backward in zip(figures, (250.0, 500.0)):
        ms = sum(flops(of_shape, pass_) / tflops for pass_, tflops in (("forward", 200.0), ("backward", backward)))
        assert math.isclose(figure.tflops, flops(of_shape, "both") / ms)


def test_geometric_mean():
    assert math.isclose(compare.geometric_mean([0.5, 2.0, 8.0]), 2.0)

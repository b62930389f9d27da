"""The benchmark's arithmetic, files and table, on the CPU: no figure here means anything."""

import dataclasses
import json
import math
import pathlib
import subprocess
import types

import pytest
import torch

from benchmarks import check, compare, document, peers, plot, run, timing
from benchmarks.shapes import GRIDS, Shape, flops
from dash_attn import build_record, schedule

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


def test_head_dims_grid_compares_head_dims_at_the_same_shapes():
    shapes = {d: [s for s in GRIDS["head-dims"]() if s.head_dim == d] for d in (96, 128)}
    assert [dataclasses.replace(s, head_dim=128) for s in shapes[96]] == shapes[128]
    assert len(set(shapes[96])) == 8 and all(s.batch * s.seqlen == 16384 for s in shapes[96])
    assert flops(shapes[96][0], "backward") == 0.75 * flops(shapes[128][0], "backward")


def test_every_policy_that_fits_the_mask_is_measured():
    for shape in (SHAPE, TINY):
        variants = [v.schedule for v in peers.DashAttn().variants(shape)]
        assert variants == ["auto", *schedule.fitting(causal=shape.causal)]
    causal = peers.DashAttn().variants(TINY)
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
    assert tensors.cu_seqlens is None and tensors.lengths == {}
    for x in (tensors.q, tensors.k, tensors.v, tensors.dout):
        assert x.dtype == torch.bfloat16 and abs(x.float().std().item() - 1) < 0.05


def test_deterministic_switch_is_put_back():
    assert not torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    with peers.deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == filling


@pytest.fixture(scope="module")
def result_file(tmp_path_factory):
    """A run of the whole program at a toy size."""
    folder = tmp_path_factory.mktemp("benchmark")
    path = folder / "result.json"
    arguments = ["--device", "cpu", "--grid", "full", "--max-seqlen", "512", "--tokens", "64", "--min-time", "0"]
    arguments += ["--schedules", "spt", "shift", "--pass", "backward", "forward"]
    assert run.main([*arguments, "--json", str(path), "--png", str(folder / "result.png")]) == 0
    return path


@pytest.mark.slow
def test_json_schema(result_file):
    result = json.loads(result_file.read_text())
    assert list(result) == ["meta", "rows"]
    assert list(result["meta"]) == ["gpu", "driver", "cuda", "torch", "commit", "date", "before", "after"]
    fields = "impl pass schedule deterministic dtype head_dim heads kv_heads mask seqlen batch ms repeats_ms tflops"
    fields = fields.split()
    # Both schedules under the full mask and one under the causal one, a forward for each shape.
    assert len(result["rows"]) == 2 * (2 + 1) + 2 * (1 + 1)
    for row in result["rows"]:
        assert list(row) == fields == list(run.ROW_FIELDS)
        assert row["impl"] == "dash_attn" and row["deterministic"] is True and row["mask"] in ("full", "causal")
        assert (row["schedule"] is None) == (row["pass"] == "forward")
        assert len(row["repeats_ms"]) == timing.TURNS and min(row["repeats_ms"]) <= row["ms"] <= max(row["repeats_ms"])
        shape = Shape(**{field: row[field] for field in run.SHAPE_FIELDS})
        assert math.isclose(row["tflops"], flops(shape, row["pass"]) / row["ms"] * 1e-9, rel_tol=0.1, abs_tol=0.006)


def test_peers_of_another_result(result_file):
    peers_file = json.loads((pathlib.Path(plot.__file__).parent / "results" / "peers_h200.json").read_text())
    fields = set(run.ROW_FIELDS) - {"repeats_ms"}
    for row in peers_file["rows"]:
        assert set(row) == fields and row["impl"] != "dash_attn"
        shape = Shape(**{field: row[field] for field in run.SHAPE_FIELDS})
        assert math.isclose(row["tflops"], flops(shape, row["pass"]) / row["ms"] * 1e-9, rel_tol=1e-3)
    own = json.loads(result_file.read_text())
    for row in peers_file["same_run"]:
        assert set(row) == fields | {"run"} and row["run"] in peers_file["meta"]["same_run"]
    assert set(compare.NAMES) == set(peers_file["meta"]["impls"]), "a version of each peer"
    assert plot.with_peers(own, peers_file)["rows"] == own["rows"]  # toy shapes: no peer has them
    grid = {"meta": own["meta"], "rows": [{**peers_file["rows"][0], "impl": impl} for impl in ("dash_attn", "fa2")]}
    merged = plot.with_peers(grid, peers_file)["rows"]
    assert [row["impl"] for row in merged].count("dash_attn") == 1
    assert {row["impl"] for row in merged} == {"dash_attn", "fa2", "fa3", "cudnn", "dash-authors"}
    assert sum(row["impl"] == "fa2" and row["pass"] == "backward" and not row["deterministic"] for row in merged) == 1


def test_png_is_drawn(result_file, tmp_path):
    assert result_file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    plot.draw(json.loads(result_file.read_text()), tmp_path / "forward.png", "forward")
    assert (tmp_path / "forward.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="must have rows of pass 'both', got none"):
        plot.draw(json.loads(result_file.read_text()), tmp_path / "both.png", "both")


def test_a_picture_of_shapes_that_are_no_series_has_a_place_for_each(tmp_path):
    def panels_of(grid):
        heads = {"impl": "dash_attn", "schedule": "auto", "deterministic": True, "pass": "backward"}
        rows = [{**heads, **vars(shape), "tflops": 1.0 + i} for i, shape in enumerate(grid)]
        meta = {"gpu": "none", "cuda": "none", "torch": "none", "commit": "none"}
        return {"meta": meta, "rows": rows}, plot.panels({"rows": rows}, "backward")

    _, by_length = panels_of(GRIDS["full"]())
    assert len(by_length) == 6 and plot.are_series(GRIDS["full"]())
    shapes = [Shape("bf16", 64, 8, 1, "full", 1024, batch) for batch in (1, 2)] + GRIDS["sharded"]()
    shapes.append(Shape("bf16", 64, 12, 12, "full", 197, 64))
    assert not plot.are_series(shapes)
    result, shape_by_shape = panels_of(shapes)
    assert len(shape_by_shape) == 4
    shown = [shape for lines in shape_by_shape.values() for points in lines.values() for shape in points]
    assert sorted(map(str, shown)) == sorted(map(str, shapes))
    for lines in shape_by_shape.values():
        for points in lines.values():
            places = [plot.place_of(shape, False) for shape in points]
            assert len(set(places)) == len(places)
            lengths = [shape.seqlen for shape in points]
            assert lengths == sorted(lengths)
    assert "12\n64x197" in [plot.place_of(shape, False) for shape in shapes]
    plot.draw(result, tmp_path / "shapes.png", "backward")
    assert (tmp_path / "shapes.png").stat().st_size > 1000


def test_documents_quote_a_run_of_windows(tmp_path):
    result = document.ROOT / "benchmarks" / "results" / "h200_2026-11-27_5742ba2.json"
    plain = document.Quoted(result)
    assert "Sliding windows" not in document.details(plain) and "the windows" not in document.by_shape(plain)
    rows = []
    for i, shape in enumerate(GRIDS["windows-bar"]()):
        for impl, policy, deterministic in (("dash_attn", "auto", True), ("fa3", None, False)):
            head = {"impl": impl, "schedule": policy, "deterministic": deterministic, **shape.row(), "ms": 1.0}
            rows.append({**head, "pass": "backward", "tflops": 200.0 if i == 0 and policy else 400.0})
            forward = {"schedule": None, "deterministic": True, "pass": "forward"}
            rows.append({**head, **forward, "tflops": 500.0})
    path = tmp_path / "windows.json"
    path.write_text(json.dumps({"meta": {"commit": "abcdef" * 7, "gpu": "NVIDIA H200"}, "rows": rows}))
    quoted = document.Quoted(result, **{"windows-bar": path})
    said = " ".join(document.details(quoted).split())
    assert "the backward 0.87 times that of FlashAttention-3, minimum 0.50 (5)" in said
    assert "the forward 1.00 times that of FlashAttention-3, minimum 1.00 (5)" in said
    by_shape = document.by_shape(quoted)
    assert by_shape.count("| 64 | 64/8 | window (127, 0) | 2 x 8192 | **400** |") == 1
    assert by_shape.count("| 128 | 32/8 | window (4095, 0) | 1 x 16384 | **500** |") == 1


def test_commit_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(run.COMMIT_VARIABLE, "abc123")
    assert run.metadata(torch.device("cpu"))["commit"] == "abc123"


@pytest.mark.parametrize("status, suffix", [("", ""), (" M csrc/x.h\n", "-dirty"), ("?? csrc/new.h\n", "-dirty")])
def test_a_tree_that_differs_from_its_commit_is_dirty(status, suffix, monkeypatch):
    asked = []

    def git(command, **options):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "abc123\n" if "rev-parse" in command else status)

    monkeypatch.delenv(run.COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(run.subprocess, "run", git)
    assert run.commit() == "abc123" + suffix
    assert {"csrc", "dash_attn"} <= set(asked[-1]) and "-uno" not in asked[-1]


def test_the_gpus_state_is_asked_for_by_name(monkeypatch):
    def nvidia_smi(command, **options):
        assert command[0] == "nvidia-smi" and "--id=GPU-12-34" in command
        fields = next(c for c in command if c.startswith("--query-gpu=")).removeprefix("--query-gpu=").split(",")
        answers = {"clocks.sm": "1755", "clocks.mem": "3201", "power.draw": "690.12", "temperature.gpu": "61"}
        return subprocess.CompletedProcess(command, 0, ", ".join(answers[field] for field in fields) + "\n")

    properties = types.SimpleNamespace(uuid="12-34")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(run.subprocess, "run", nvidia_smi)
    expected = {"sm_mhz": "1755", "memory_mhz": "3201", "watts": "690.12", "celsius": "61"}
    assert run.state(torch.device("cuda")) == expected
    assert run.state(torch.device("cpu")) is None


def test_an_unknown_schedule_is_refused():
    with pytest.raises(SystemExit, match="error: --schedules must be among auto, .*, got zigzag"):
        run.main(["--device", "cpu", "--schedules", "zigzag"])


@pytest.mark.parametrize("policies", [None, "Ordered", "OrderedAndYardsticks"])
def test_a_yardstick_that_is_not_built_is_refused(monkeypatch, policies):
    path = None if policies is None else pathlib.Path("_C.abi3.so")
    monkeypatch.setattr(build_record, "kernels_file", lambda: path)
    kernel = types.SimpleNamespace(policies=policies)
    monkeypatch.setattr(build_record, "read", lambda _: types.SimpleNamespace(kernels=(kernel,)))
    run.check_schedules(["auto", "spt"])
    if policies == "OrderedAndYardsticks":
        run.check_schedules(["auto", "atomic"])
    else:
        with pytest.raises(SystemExit, match="--schedules must be built, but this build lacks ascending, atomic: "):
            run.check_schedules(["auto", "atomic", "ascending"])


def test_bad_arguments_end_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="error: --device must be available, got cuda"):
        run.main(["--device", "cuda"])
    with pytest.raises(SystemExit, match="error: --baseline must be a compiled library, got nowhere.so"):
        run.main(["--device", "cpu", "--baseline", "nowhere.so"])
    with pytest.raises(SystemExit, match="error: --max-seqlen 1 leaves no shape"):
        run.main(["--device", "cpu", "--max-seqlen", "1"])


@pytest.mark.slow
def test_a_failure_of_ours_fails_the_run(monkeypatch, capsys):
    def broken(self, variant, shape, tensors):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(peers.DashAttn, "prepare", broken)
    assert run.main(["--device", "cpu", "--grid", "bar", "--tokens", "64", "--max-seqlen", "8192"]) == 1
    assert "failed: dash_attn auto: RuntimeError: no kernel" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_wrong_results_are_not_timed(name, monkeypatch, capsys):
    """A tile of the last KV head of the last sequence, as every other one, is off by 2% in norm."""
    original = peers.DashAttn.prepare

    def wrong(self, variant, shape, x):
        calls = original(self, variant, shape, x)

        def spoilt(results, names):
            found = [results] if isinstance(results, torch.Tensor) else list(results)
            for i, of in enumerate(names):
                if of == name:
                    found[i] = found[i] * 1.02
            return found[0] if len(found) == 1 else tuple(found)

        return {
            "forward": lambda: spoilt(calls["forward"](), ["out"]),
            "backward": lambda: spoilt(calls["backward"](), ["dq", "dk", "dv"]),
        }

    monkeypatch.setattr(peers.DashAttn, "prepare", wrong)
    implementations = [peers.DashAttn(["descending"])]
    rows, failures = run.measure(TINY, implementations, ["forward", "backward"], torch.device("cpu"), 0.0)
    bad, good = ("forward", "backward") if name == "out" else ("backward", "forward")
    assert [row["pass"] for row in rows] == [good]
    assert len(failures) == 1 and f"{bad}: wrong {name}: relative error 2.0" in failures[0]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_right_results_pass_the_check(mask, kv_heads, monkeypatch):
    """Against float32 sums in pieces shorter than the sequence."""
    monkeypatch.setattr(check, "QUERIES_AT_ONCE", 48)
    shape = Shape("bf16", 64, 4, kv_heads, mask, 130, 2)
    tensors = peers.random_tensors(shape, torch.device("cpu"))
    reference = check.Reference(shape, tensors)
    calls = peers.DashAttn().prepare(peers.Variant("dash_attn", "spt", True), shape, tensors)
    assert [reference.wrong(calls[pass_]()) for pass_ in ("forward", "backward", "both")] == [None] * 3
    dq, dk, dv = calls["backward"]()
    assert "wrong dq" in reference.wrong((dq + float("nan"), dk, dv))


def row(impl, schedule, deterministic, seqlen, tflops, mask="full"):
    shape = {"dtype": "bf16", "head_dim": 128, "heads": 16, "kv_heads": 16, "mask": mask, "seqlen": seqlen, "batch": 2}
    head = {"impl": impl, "pass": "backward", "schedule": schedule, "deterministic": deterministic}
    return {**head, **shape, "ms": 1.0, "tflops": tflops}


def test_compare_counts_one_deterministic_schedule_of_ours(tmp_path):
    rows = [row("dash_attn", "auto", True, 1024, 300.0), row("dash_attn", "spt", True, 1024, 200.0)]
    rows += [row("dash_attn", "atomic", False, 1024, 999.0)]
    rows += [row("fa2", None, True, 1024, 150.0), row("fa2", None, False, 1024, 400.0)]
    rows += [row("fa2", None, True, 2048, 1.0)]
    rows += [row("dash_attn", "auto", True, 4096, 450.0), row("fa2", None, True, 4096, 900.0)]
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"meta": {}, "rows": rows}))
    figures = compare.read(path, "backward")
    first, second = compare.compare(figures, figures)
    assert first.ours.schedule == "auto" and first.ratio(first.best(True)) == 2.0
    assert first.ratio(first.best(False)) == 0.75
    assert second.ratio(second.best(True)) == 0.5 and second.best(False) is None
    (named,) = compare.compare(figures, figures, schedule="spt")
    assert named.ours.tflops == 200.0
    assert compare.compare(figures, figures, schedule="atomic") == []
    assert compare.read(path, "forward") == {}


def test_means_are_over_the_shapes_where_a_peer_was_measured():
    def shape_of(seqlen):
        return Shape.of_row(row("x", None, True, seqlen, 1.0))

    def peer(impl, deterministic, tflops):
        return compare.Figure(impl, None, deterministic, tflops)

    ours = compare.Figure("dash_attn", "auto", True, 400.0)
    first = compare.Comparison(shape_of(512), ours, [peer("fa2", True, 100.0), peer("fa3", True, 200.0)])
    second = compare.Comparison(shape_of(1024), ours, [peer("fa2", True, 200.0), peer("fa3", False, 400.0)])
    both = [first, second]
    short, long = first.shape, second.shape
    assert compare.mean(both, True, "fa2") == compare.Mean(pytest.approx(8**0.5), 2, 2.0, long)
    assert compare.mean(both, True, "fa3") == compare.Mean(pytest.approx(2.0), 1, 2.0, short)
    assert compare.mean(both, True) == compare.Mean(pytest.approx(2.0), 2, 2.0, short)
    assert compare.mean(both, False) == compare.Mean(pytest.approx(1.0), 1, 1.0, long)
    assert compare.mean(both, True, "fa4") is None
    notes, missing = compare.footnotes(both)
    assert list(notes.values()) == ["a", "b"]
    assert {letter: list(map(str, peers)) for letter, peers in missing.items()} == {
        "a": ["FlashAttention-3"],
        "b": ["FlashAttention-3, deterministic"],
    }
    text = compare.report(both)
    assert "[a] not measured here: FlashAttention-3\n" in text and "FlashAttention-2, deterministic" in text
    (line,) = [line for line in text.splitlines() if line.startswith(str(short))]
    assert line.split()[-3:] == ["-", "-", "[a]"]


def test_compare_says_what_is_of_one_run(tmp_path, capsys):
    ours, theirs = tmp_path / "ours.json", tmp_path / "peers.json"
    ours.write_text(json.dumps({"rows": [row("dash_attn", "auto", True, 1024, 300.0)]}))
    apart = [row("fa3", None, True, 1024, 150.0)]
    together = [{"run": "monday", **row("dash_attn", "auto", True, 1024, 290.0)}]
    together += [{"run": "monday", **row("fa3", None, True, 1024, 200.0)}]
    meta = {"same_run": {"monday": "dash_attn 1234"}}
    theirs.write_text(json.dumps({"meta": meta, "rows": apart, "same_run": together}))
    compare.main([str(ours), "--peers", str(theirs)])
    printed = capsys.readouterr().out
    separate, same = printed.split("measured together with the baselines, monday (dash_attn 1234)")
    assert "a different run" in separate and "2.000 (1)" in separate and "1.450 (1)" in same
    compare.main([str(theirs.with_name("ours.json")), "--peers", str(theirs)])
    with pytest.raises(SystemExit, match="error: no shape has both a backward of dash_attn with --schedule spt"):
        compare.main([str(ours), "--peers", str(theirs), "--schedule", "spt"])


def test_a_file_of_both_sides_is_one_run(tmp_path, capsys):
    path = tmp_path / "result.json"
    rows = [row("dash_attn", "auto", True, 1024, 300.0), row("fa2", None, True, 1024, 150.0)]
    path.write_text(json.dumps({"rows": rows}))
    compare.main([str(path)])
    assert capsys.readouterr().out.startswith("backward: baselines of the same run")


def test_a_grid_has_its_mean_and_its_least_ratio_in_each_pass(tmp_path, capsys):
    """Of one run: the backward over a peer's mode that is not deterministic, the forward, and no other grid's shape."""
    family = GRIDS["sharded"]()
    other = GRIDS["full"]()[0]
    rows = []
    for shape, ours in ((family[0], 800.0), (family[1], 200.0), (other, 1.0)):
        figures = {"dash_attn": ("auto", True, ours), "fa3": (None, False, 400.0)}
        for impl, (policy, deterministic, tflops) in figures.items():
            head = {"impl": impl, "pass": "backward", "schedule": policy, "deterministic": deterministic}
            rows.append({**head, **vars(shape), "ms": 1.0, "tflops": tflops})
            head = {"impl": impl, "pass": "forward", "schedule": None, "deterministic": True}
            rows.append({**head, **vars(shape), "ms": 1.0, "tflops": 300.0 if impl == "fa3" else 2 * tflops})
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"rows": rows}))
    compare.main([str(path), "--pass", "backward", "forward", "--grid", "sharded"])
    backward, forward = capsys.readouterr().out.split("\n\nforward: ")
    assert str(other) not in backward + forward
    (line,) = [line for line in backward.splitlines() if line.startswith("  FlashAttention-3 ")]
    assert line.split("FlashAttention-3")[1].split() == f"1.000 (2) of 2, minimum 0.500 at {family[1]}".split()
    assert f" of 2, minimum 1.333 at {family[1]}" in forward
    with pytest.raises(SystemExit, match="error: no shape of the grid bar has both"):
        compare.main([str(path), "--pass", "both", "--grid", "bar"])


def test_pairs_take_the_time_of_both_passes():
    backward = [row("a", None, True, 1024, 250.0), row("b", None, False, 1024, 500.0)]
    forward = [row("a", None, True, 1024, 100.0), row("c", None, True, 1024, 200.0)]
    forward = [{**of_peer, "pass": "forward"} for of_peer in forward]
    ((of_shape, figures),) = compare.figures([*backward, *forward], "both").items()
    assert {(f.impl, f.deterministic) for f in figures} == {("a", True), ("b", False)}
    for figure, alone in zip(figures, (250.0, 500.0)):
        ms = sum(flops(of_shape, pass_) / tflops for pass_, tflops in (("forward", 200.0), ("backward", alone)))
        assert math.isclose(figure.tflops, flops(of_shape, "both") / ms)


def test_geometric_mean():
    assert math.isclose(compare.geometric_mean([0.5, 2.0, 8.0]), 2.0)

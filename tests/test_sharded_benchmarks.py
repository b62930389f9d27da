"""The benchmark of what one GPU of a tensor-parallel group sees: its families, the time a run takes, parts, sums."""

import argparse
import collections
import hashlib
import json

import pytest
import torch

from benchmarks import bars, budget, document, files, peers, plot, run, sharded, timing
from benchmarks.shapes import GRIDS, Shape, flops

FAMILY, HELD_OUT = GRIDS["sharded"](), GRIDS["sharded_held_out"]()
CALLS = {"backward": 8, "forward": 4}  # of the documented command


def of(shape):
    return shape.kv_heads, shape.heads // shape.kv_heads, (shape.batch, shape.seqlen)


def test_the_family_has_every_combination():
    assert len(FAMILY) == len(set(FAMILY)) == 240 == 2 * 2 * 4 * 3 * 5
    assert {(s.head_dim, s.mask) for s in FAMILY} == {(d, mask) for d in (64, 128) for mask in ("full", "causal")}
    kv_heads, groups, sequences = (set(values) for values in zip(*map(of, FAMILY)))
    assert (kv_heads, groups) == ({1, 2, 4, 8}, {1, 4, 8})
    assert sequences == {(1, 2048), (1, 8192), (1, 32768), (2, 4096), (4, 8192)}
    assert set(bars.LEAST_TFLOPS) <= set(FAMILY)


def test_the_held_out_family_is_fixed_and_shares_no_number():
    assert len(HELD_OUT) == len(set(HELD_OUT)) == 60 and HELD_OUT == GRIDS["sharded_held_out"]()
    kv_heads, groups, sequences = (set(values) for values in zip(*map(of, HELD_OUT)))
    assert (kv_heads, groups) == ({1, 3, 5}, {2, 5, 16})
    assert sequences == {(1, 3072), (1, 12288), (1, 24576), (3, 6144), (2, 10240)}
    assert not sequences & {of(s)[2] for s in FAMILY} and not groups & {of(s)[1] for s in FAMILY}
    assert min(collections.Counter((s.head_dim, s.mask) for s in HELD_OUT).values()) >= 10
    named = "\n".join(map(str, HELD_OUT))
    assert hashlib.sha256(named.encode()).hexdigest()[:16] == "43ff43a83a0dc9a3", "another sample is another family"


def expected_seconds(shapes, block_s, turns=budget.TURNS):
    return sum(budget.Load(shape, CALLS).seconds(block_s, turns) for shape in shapes)


def test_a_run_with_all_peers_fits_its_minutes():
    """With the shortest block there is time to spare."""
    for grid, shapes in (("sharded", FAMILY), ("sharded_held_out", HELD_OUT)):
        seconds = 60 * sharded.MINUTES[grid]
        block_s = budget.block_s([budget.Load(s, CALLS) for s in shapes], seconds, budget.TURNS)
        assert 0.95 * seconds < expected_seconds(shapes, block_s) <= seconds
        assert block_s > 5e-3 > 2 * budget.LEAST_BLOCK_S
        assert expected_seconds(shapes, budget.LEAST_BLOCK_S) < 0.7 * seconds


def test_less_time_makes_shorter_blocks_down_to_the_least():
    loads = [budget.Load(s, CALLS) for s in FAMILY]
    blocks = [budget.block_s(loads, seconds, budget.TURNS) for seconds in (2000, 1000, 500, 100, -1)]
    assert blocks == sorted(blocks, reverse=True) and blocks[2] < blocks[1] < blocks[0]
    assert blocks[-2:] == [budget.LEAST_BLOCK_S] * 2
    assert budget.block_s(loads[:1], 1e9, budget.TURNS) == pytest.approx(budget.MOST_BLOCK_S, rel=0.01)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_share_the_shapes_and_the_time(parts):
    shares = [run.Part(i, parts).of(FAMILY) for i in range(1, parts + 1)]
    assert sorted(map(str, sum(shares, []))) == sorted(map(str, FAMILY))
    assert all(share == [s for s in FAMILY if s in set(share)] for share in shares)
    work = [sum(flops(s, "backward") for s in share) for share in shares]
    assert max(work) < 1.3 * min(work) and len({len(share) for share in shares}) == 1


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/", "a/b", "-1/4", "1/0", ""])
def test_a_part_that_is_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be I/N with 1 <= I <= N, got"):
        run.Part.parse(text)


def test_a_short_block_of_a_long_call_is_two_calls():
    class Timer:
        def __init__(self, ms):
            self.ms, self.rounds = ms, []

        def times_ms(self, call, rounds):
            self.rounds.append(rounds)
            return [self.ms] * rounds

    def rounds_of(ms):
        timer = Timer(ms)
        times = timing.short_block_ms(timer, lambda: None, min_time_s=0.010)
        assert times == [ms] * timer.rounds[-1]
        return timer.rounds

    assert rounds_of(30.0) == [1, 1]
    assert rounds_of(2.5) == [1, 3, 4], "a warm-up of 10 ms with the first call, 10 ms that count"
    assert rounds_of(6.0) == [1, 1, 1]


TINY = [
    Shape("bf16", head_dim, heads, kv_heads, mask, 64, 1)
    for head_dim in (64, 128)
    for mask in ("full", "causal")
    for heads, kv_heads in ((1, 1), (4, 1))
]
PROGRAM = ["--device", "cpu", "--grid", "sharded", "--pass", "backward", "forward", "--schedules", "auto", "order_free"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Runs of the whole program over the parts of a toy family."""
    folder = tmp_path_factory.mktemp("parts")
    paths = [folder / f"part{i}.json" for i in (1, 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(GRIDS, "sharded", lambda: TINY)
        for i, path in enumerate(paths, 1):
            options = ["--minutes", "0.001", "--part", f"{i}/2", "--json", str(path)]
            assert run.main([*PROGRAM, *options]) == 0
    return paths


def test_the_parts_are_merged_into_the_whole_family(parts, tmp_path, capsys):
    merged = tmp_path / "merged.json"
    assert run.main(["--merge", *map(str, parts), "--json", str(merged)]) == 0
    result = json.loads(merged.read_text())
    rows = [json.loads(path.read_text())["rows"] for path in parts]
    assert result["rows"] == rows[0] + rows[1] and all(rows)
    measured = collections.Counter((Shape.of_row(r), r["pass"], r["schedule"]) for r in result["rows"])
    passes = (("backward", "auto"), ("backward", "order_free"), ("forward", None))
    assert measured == {(shape, *of_pass): 1 for shape in TINY for of_pass in passes}
    assert all(len(row["repeats_ms"]) == budget.TURNS == 4 for row in result["rows"])
    meta = result["meta"]
    assert (
        meta["commit"] == run.commit() and meta["torch"] == torch.__version__ and {"gpu", "cuda", "driver"} <= set(meta)
    )
    assert list(meta["parts"]) == ["1/2", "2/2"] and all({"date", "before"} <= set(p) for p in meta["parts"].values())
    printed = capsys.readouterr().out
    assert "backward, TFLOP/s" in printed and "over the best baseline" not in printed, "there is no peer on a CPU"


def test_parts_that_do_not_belong_together(parts, tmp_path):
    one, two = (json.loads(path.read_text()) for path in parts)
    with pytest.raises(ValueError, match="the parts must be 1 to 2 of 2, got 1/2$"):
        files.merged({"a": one})
    with pytest.raises(ValueError, match="the parts must be 1 to 2 of 2, got 1/2, 1/2"):
        files.merged({"a": one, "b": one})
    for key in files.SAME_IN_PARTS:
        other = {**two, "meta": {**two["meta"], key: "other"}}
        with pytest.raises(ValueError, match=f"b has {key} 'other', but a has "):
            files.merged({"a": one, "b": other})
    whole = {**two, "meta": {k: v for k, v in two["meta"].items() if k != "part"}}
    with pytest.raises(ValueError, match="b is not a part of a run"):
        files.merged({"a": one, "b": whole})
    with pytest.raises(
        SystemExit, match="error: --merge must be results of the parts of one run: .* must be 1 to 2 of 2"
    ):
        run.main(["--merge", str(parts[0]), "--json", str(tmp_path / "merged.json")])
    assert not list(tmp_path.iterdir())


def test_bad_times_end_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="error: --minutes must be above 0, got 0.0"):
        run.main([*PROGRAM, "--minutes", "0"])
    with pytest.raises(SystemExit, match="error: --baseline needs --min-time"):
        run.main([*PROGRAM, "--baseline", str(tmp_path)])
    with pytest.raises(SystemExit, match="error: --part 9/9 leaves no shape of the grid bar"):
        run.main(["--device", "cpu", "--grid", "bar", "--part", "9/9"])
    with pytest.raises(SystemExit):
        run.main([*PROGRAM, "--minutes", "1", "--min-time", "1"])
    assert "--min-time: not allowed with argument --minutes" in capsys.readouterr().err


def test_each_shape_gets_a_share_of_the_time_that_is_left(monkeypatch):
    monkeypatch.setitem(GRIDS, "sharded", lambda: TINY)
    asked, efforts = [], []

    def block_s(loads, seconds, turns):
        asked.append(([load.shape for load in loads], loads[0].calls, seconds, turns))
        return 0.001 * len(asked)

    def measure(calls, device, **effort):
        efforts.append(effort)
        return {}, {}

    monkeypatch.setattr(budget, "block_s", block_s)
    monkeypatch.setattr(timing, "measure", measure)
    assert run.main([*PROGRAM, "--minutes", "2", "--turns", "5"]) == 0
    assert [shapes for shapes, *_ in asked] == [TINY[i:] for i in range(len(TINY))]
    assert all(calls == {"backward": 2, "forward": 1} and turns == 5 for _, calls, _, turns in asked)
    seconds = [left for *_, left, _ in asked]
    assert seconds == sorted(seconds, reverse=True) and 60 < seconds[-1] < seconds[0] <= 120
    expected = [dict(min_time_s=5 * 0.001 * i, turns=5, short=True) for i in range(1, len(TINY) + 1)]
    assert efforts == [pytest.approx(effort) for effort in expected]


def test_versions_of_the_peers_are_recorded():
    arguments = run.parser().parse_args(["--part", "2/3"])
    found = run.parts_and_versions(arguments, [peers.DashAttn(), *(peer() for peer in peers.PEERS.values())])
    assert found["part"] == "2/3" and list(found["impls"]) == ["fa2", "cudnn", "fa3", "fa4"]
    assert torch.__version__ in found["impls"]["fa2"] and "nvidia-cudnn-frontend" in found["impls"]["cudnn"]
    assert found["impls"]["fa3"].startswith("FlashAttention-3 ")
    assert run.parts_and_versions(run.parser().parse_args([]), [peers.DashAttn()]) == {}


def test_other_grids_measure_in_long_blocks():
    arguments = run.parser().parse_args(["--grid", "full"])
    assert run.minutes_of(arguments) is None
    assert run.minutes_of(run.parser().parse_args(["--grid", "full", "--minutes", "3"])) == 3
    assert run.minutes_of(run.parser().parse_args(["--grid", "sharded", "--min-time", "0.1"])) is None
    assert run.minutes_of(run.parser().parse_args(["--grid", "sharded"])) == sharded.MINUTES["sharded"]


def rows_of(shapes, tflops):
    """`tflops` by (impl, pass, deterministic): a figure, or one for each shape."""
    found = []
    for shape in shapes:
        for (impl, pass_, deterministic), figure in tflops.items():
            schedule = "auto" if (impl, pass_) == ("dash_attn", "backward") else None
            head = {"impl": impl, "pass": pass_, "schedule": schedule, "deterministic": deterministic}
            value = figure(shape) if callable(figure) else figure
            found.append({**head, **shape.row(), "ms": 1.0, "repeats_ms": [1.0] * 4, "tflops": value})
    return found


WORST = next(s for s in FAMILY if (s.head_dim, s.mask, s.heads, s.seqlen) == (64, "full", 8, 32768))
FIGURES = {
    ("dash_attn", "backward", True): lambda shape: 300.0 if shape == WORST else 600.0,
    ("fa3", "backward", False): 500.0,
    ("cudnn", "backward", False): 400.0,
    ("fa3", "backward", True): 300.0,
    ("cudnn", "backward", True): 400.0,
    ("dash_attn", "forward", True): 660.0,
    ("fa3", "forward", True): 600.0,
    ("fa4", "forward", True): 550.0,
}


@pytest.fixture
def result(tmp_path):
    path = tmp_path / "result.json"
    meta = {"gpu": "NVIDIA H200", "driver": "1", "cuda": "13.0", "torch": "2.11.0", "commit": "abcdef" * 7}
    path.write_text(json.dumps({"meta": meta, "rows": rows_of(FAMILY, FIGURES)}))
    return path


def test_the_summary_is_over_the_best_peer_of_each_mode(result):
    heads, columns, *groups, title = sharded.summary(json.loads(result.read_text())["rows"]).splitlines()[:8]
    lines = {line.split("  ")[0]: [cell.strip() for cell in line.split("  ")[1:] if cell] for line in groups}
    assert list(lines) == ["d64 full", "d64 causal", "d128 full", "d128 causal", "all"]
    spoilt = 2 ** (-1 / 60)
    assert lines["d64 full"] == [f"{1.2 * spoilt:.3f}, minimum 0.60 (60)", f"{1.5 * spoilt:.3f}, minimum 0.75 (60)",
                                 "1.100, minimum 1.10 (60)"]  # fmt: skip
    assert lines["d128 causal"][:2] == ["1.200, minimum 1.20 (60)", "1.500, minimum 1.50 (60)"]
    assert lines["all"][0].endswith("minimum 0.60 (240)")
    worst = sharded.summary(json.loads(result.read_text())["rows"]).splitlines()[8:]
    assert len(worst) == 10 and worst[0].split() == [*str(WORST).split(), "0.60", "0.75", "1.10"]
    assert sharded.summary(rows_of(FAMILY[:3], {("dash_attn", "forward", True): 1.0})) == ""


def test_the_bars_of_the_family(result):
    claims = bars.CLAIMS["sharded"](bars.Run(result, "sharded"))
    with_bar = {(c.of, c.pass_, c.against): c for c in claims if c.bar}
    assert [(*key, c.bar, c.least_bar, c.verdict()) for key, c in with_bar.items()] == [
        ("all", "backward", "the best non-deterministic baseline", 1.0, 0.9, "met in the mean, not at every shape"),
        ("all", "backward", "the best deterministic baseline", 1.15, 1.0, "met in the mean, not at every shape"),
        ("all", "forward", "the best baseline", 1.05, 0.95, "met"),
        ("128 causal", "backward", "TFLOP/s", 600.0, None, "met"),
    ]  # fmt: skip
    first = with_bar["all", "backward", "the best non-deterministic baseline"]
    assert first.cells()[-2:] == [f"0.60 ({WORST})", "1.00, minimum 0.90"]
    (eight, thirty_two) = [c for c in claims if c.against == "TFLOP/s"]
    assert eight.bar == 570 and eight.mean.worst.heads_name == "8/1" and eight.verdict() == "met"
    assert thirty_two.cells()[4:] == ["600", "600 (bf16 d128 h32/4 causal 1x32768)", "600"]
    assert len(claims) == 3 * 5 + 2
    below = bars.Claim("", "", "", bars.Mean(0.99, 2, 0.95, WORST), 1.0, 0.9)
    assert below.verdict() == "missed"


def test_the_held_out_family_has_the_same_bars(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"meta": {"commit": "abcdef" * 7}, "rows": rows_of(HELD_OUT, FIGURES)}))
    claims = bars.CLAIMS["sharded_held_out"](bars.Run(path, "sharded_held_out"))
    assert [c.verdict() for c in claims if c.bar] == ["met"] * 3 and len(claims) == 3 * 5


def test_documents_quote_the_family_and_its_picture(result, tmp_path, monkeypatch):
    monkeypatch.setattr(document, "ROOT", tmp_path)
    main = tmp_path / "main.json"
    main.write_text(document.PEERS.with_name("h200_2026-11-27_5742ba2.json").read_text())
    quoted = document.Quoted(main, sharded=result)
    assert document.readme(quoted) == document.readme(document.Quoted(main)), "README.md quotes the main run alone"
    said, without = document.details(quoted), document.details(document.Quoted(main))
    assert "--grid sharded" not in without and said.startswith(without.rstrip())
    assert "![Throughput over the best baselines, shape by shape](results/main_sharded.png)" in said
    lines = said.splitlines()
    of_all = "| all | forward | the best baseline | 240 | 1.10 | 1.10 (bf16 d64 h1 full 1x2048) | 1.05, minimum 0.95 |"
    assert of_all in lines
    assert any(line.startswith("| 64 full | forward | the best baseline | 60 ") for line in lines)
    assert document.by_shape(quoted).count("\n| 128 | 8/1 | causal | 1 x 8192 |") == 2


def test_the_picture_has_a_panel_for_each_head_dim_and_mask(result, tmp_path):
    plot.draw_ratios(json.loads(result.read_text()), tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="must have a shape with ours and a baseline"):
        plot.draw_ratios({"rows": []}, tmp_path / "none.png")

"""The benchmark's softcap, slopes and sinks, on the CPU. No figure here means anything."""

import dataclasses
import json
import types

import pytest
import torch

import dash_attn
from benchmarks import baseline, check, document, peers, plot, run
from benchmarks.compare import OURS
from benchmarks.packs import PACKS
from benchmarks.shapes import GRIDS, SCORES, Shape, flops

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_packs(monkeypatch):
    monkeypatch.setitem(PACKS, "mixed", (3, 70, 0, 33, 1, 40))


def small(scores, mask="causal", pack=None, **options):
    if pack:
        return Shape.of_pack(pack, 64, 4, 2, mask, scores=scores, **options)
    return Shape("bf16", 64, 4, 2, mask, 70, 2, scores=scores, **options)


def test_grid():
    """Each shape with scores follows the same one without, so that one run has the ratio."""
    shapes = GRIDS["scores"]()
    assert len(shapes) == len(set(shapes)) == len(set(map(str, shapes)))
    for i, shape in enumerate(shapes):
        assert shape.scores is None or shape.plain in shapes[:i]
        assert flops(shape, "backward") == flops(shape.plain, "backward")
    assert {shape.scores for shape in shapes} == {None, *SCORES}
    at_128 = {(s.mask, s.scores) for s in shapes if s.head_dim == 128 and s.mask != "window"}
    assert at_128 == {(mask, scores) for mask in ("full", "causal") for scores in (None, "softcap 50", "alibi")}
    sinks = [(s.head_dim, s.heads, s.kv_heads, s.mask, s.window) for s in shapes if s.scores == "sinks"]
    assert (64, 64, 8, "window", (127, 0)) in sinks
    for shape in shapes:
        assert Shape.of_row(json.loads(json.dumps(shape.row()))) == shape
    assert str(small("sinks")) == "bf16 d64 h4/2 causal 2x70 sinks"


@pytest.mark.parametrize("pack", [None, "mixed"])
@pytest.mark.parametrize("mask", [dict(mask="full"), dict(mask="causal"), dict(mask="window", window=(9, 3))], ids=str)
@pytest.mark.parametrize("scores", SCORES)
def test_our_results_are_right(scores, mask, pack):
    shape = small(scores, **mask, pack=pack)
    rows, failures = run.measure(shape, [peers.DashAttn(["auto"])], list(run.PASSES), CPU, 0.0, turns=1)
    assert failures == [] and [Shape.of_row(row) for row in rows] == [shape] * 3


@pytest.mark.parametrize("scores", SCORES)
def test_a_call_without_the_scores_is_wrong(scores):
    shape = small(scores)
    x = peers.random_tensors(shape, CPU)
    x.q *= 60  # so that a cap of 50 tells
    if x.sinks is not None:
        x.sinks += 60
    ours = peers.Variant(OURS, "auto", True)
    right = peers.DashAttn().prepare(ours, shape, x)
    plain = peers.DashAttn().prepare(ours, shape.plain, dataclasses.replace(x, alibi_slopes=None, sinks=None))
    reference = check.Reference(shape, x)
    for pass_ in ("forward", "backward"):
        assert reference.wrong(right[pass_]()) is None
        assert reference.wrong(plain[pass_]()).startswith("wrong ")


def test_who_takes_what():
    taken = {
        peer.name: {s for s in SCORES if peer.variants(small(s))}
        for peer in (peers.TorchFlashAttention2(), peers.TorchCudnn(), peers.FlashAttention3(), peers.FlashAttention4())
    }
    assert taken == {"fa2": set(), "cudnn": set(), "fa3": {"softcap 50"}, "fa4": {"softcap 50", "sinks"}}
    others = [peer for peer in peers.PEERS.values() if peer is not peers.TorchMemoryEfficient]  # with dropout alone
    assert all(peer().variants(small(None)) for peer in others)
    older = baseline.Baseline.__new__(baseline.Baseline)
    older._schedules = ["descending"]
    assert [bool(older.variants(small(s))) for s in (None, *SCORES)] == [True, False, False, False]


@pytest.mark.parametrize("peer, scores", [
    (peers.FlashAttention3, "softcap 50"), (peers.FlashAttention4, "softcap 50"), (peers.FlashAttention4, "sinks"),
])  # fmt: skip
def test_peers_are_asked_for_the_same(peer, scores, monkeypatch):
    """By their own names; ours stands in for them."""

    def flash_attn_func(q, k, v, *, causal, window_size, deterministic, **options):
        asked.append(set(options))
        return dash_attn.flash_attn_func(q, k, v, causal=causal, **options)

    asked = []
    module = types.SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=None)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: module)
    rows, failures = run.measure(small(scores), [peer()], ["forward", "backward"], CPU, 0.0, turns=1)
    assert failures == [] and {row["pass"] for row in rows} == {"forward", "backward"}
    assert asked[0] == ({"softcap"} if scores == "softcap 50" else {"learnable_sink"})


def test_the_whole_program(tmp_path, capsys):
    path = tmp_path / "scores.json"
    arguments = ["--device", "cpu", "--grid", "scores", "--max-seqlen", "8192", "--tokens", "8", "--min-time", "0"]
    shapes = [dataclasses.replace(s, seqlen=32, batch=1, heads=4, kv_heads=2) for s in GRIDS["scores"]()[:6]]
    arguments += ["--schedules", "auto", "--pass", "backward", "forward", "--json", str(path), "--peers"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(GRIDS, "scores", lambda: list(dict.fromkeys(shapes)))
        assert run.main([*arguments, "--png", str(tmp_path / "scores.png")]) == 0
    printed = capsys.readouterr().out
    ratios = printed.split("throughput over that without changed scores\n")[1]
    for pass_ in ("backward", "forward"):
        for scores in ("softcap 50", "alibi"):
            (line,) = [x for x in ratios.splitlines() if x.startswith(f"  {pass_} ") and f" {scores}: " in x]
            assert float(line.rsplit(" ", 1)[1]) > 0
    assert (tmp_path / "scores.png").is_file()


def result_of(grid, path, tflops):
    """A file of figures at every shape of a grid; `tflops`: (impl, deterministic, pass, shape) -> a number or None."""
    rows = []
    for shape in GRIDS[grid]():
        for impl, deterministic in ((OURS, True), ("fa3", True), ("fa3", False)):
            for pass_ in ("backward", "forward") if deterministic else ("backward",):
                schedule = "auto" if (impl, pass_) == (OURS, "backward") else None
                found = tflops(impl, deterministic, pass_, shape)
                head = {"impl": impl, "schedule": schedule, "deterministic": deterministic, "pass": pass_}
                rows += [{**head, **shape.row(), "tflops": found, "ms": 1.0}] if found else []
    path.write_text(json.dumps({"meta": {"commit": "abcdef" * 7, "gpu": "NVIDIA H200"}, "rows": rows}))
    return path


def quoting(**own):
    result = document.ROOT / "benchmarks" / "results" / "h200_2026-11-27_5742ba2.json"
    return document.Quoted(result, **{name.replace("_", "-"): path for name, path in own.items()})


def test_documents_quote_head_dims_beside_their_bars(tmp_path):
    def tflops(impl, deterministic, pass_, shape):
        if impl == OURS:
            return 450.0 if shape.head_dim == 96 else 400.0 if shape.seqlen == 2048 and shape.causal else 500.0
        refused = shape.head_dim == 256 and deterministic and pass_ == "backward"
        return None if refused else 400.0 if deterministic else 500.0

    quoted = quoting(head_dims=result_of("head-dims", tmp_path / "result.json", tflops))
    text = document.details(quoted)
    said = " ".join(text.split())
    assert "(`--grid head-dims`), both sides in one run of commit abcdefabcdef on one H200. Speedup" in said
    lines = text.splitlines()
    # Of eight shapes one has 400: (500 / 400) ** (7 / 8) of 400, and 0.8 ** (1 / 8) of 500.
    assert "| 96 | backward | dash_attn at 128 | 8 | 0.93 | 0.90 (full, 8x2048) | 0.90 |" in lines
    of_fa3 = "| FlashAttention-3, deterministic | 8 | 1.22 | 1.00 (causal, 8x2048) | 1.15 |"
    assert f"| (192, 128) | backward {of_fa3}" in lines and f"| 192 | backward {of_fa3}" in lines
    assert "| 256 | backward | FlashAttention-3 | 8 | 0.97 | 0.80 (causal, 8x2048) | 1.00 |" in lines
    assert "| 256 | forward | FlashAttention-3 | 8 | 1.22 | 1.00 (causal, 8x2048) | 1.00 |" in lines
    assert "| 128 | forward | FlashAttention-3 | 8 | 1.22 | 1.00 (causal, 8x2048) | - |" in lines
    assert not any(line.startswith("| 256 | backward | FlashAttention-3, deterministic") for line in lines)
    by_shape = document.by_shape(quoted).splitlines()
    assert by_shape.count("| 96 | 16 | causal | 8 x 2048 | **450** | 1.12 | 1.12 | 0.90 |") == 1, "backward"
    assert "| (192, 128) | 16 | full | 4 x 4096 | **500** | - | 1.25 | 1.00 |" in by_shape
    assert "| 256 | 8 | full | 4 x 4096 | **500** | - | - | 1.00 |" in by_shape


def test_documents_quote_what_scores_cost(tmp_path):
    def tflops(impl, deterministic, pass_, shape):
        if impl == OURS:
            return {None: 500.0, "softcap 50": 400.0}.get(shape.scores, 600.0)
        return {None: 450.0, "softcap 50": 200.0}.get(shape.scores)

    quoted = quoting(scores=result_of("scores", tmp_path / "result.json", tflops))
    lines = document.details(quoted).splitlines()
    for pass_ in ("backward", "forward"):
        of = f"| softcap 50, 128 causal | {pass_} |"
        assert f"{of} dash_attn without it | 2 | 0.80 | 0.80 (causal, 4x4096) | 0.85 |" in lines
        assert f"{of} FlashAttention-3 | 2 | 2.00 | 2.00 (causal, 4x4096) | - |" in lines
        of = f"| sinks, 64 window | {pass_} |"
        assert f"{of} dash_attn without it | 1 | 1.20 | 1.20 (window (127, 0), 2x8192) | - |" in lines
    by_shape = document.by_shape(quoted).splitlines()
    assert "| 128 | 16 | causal, softcap 50 | 4 x 4096 | **400** | 0.80 | 2.00 | 2.00 |" in by_shape
    assert "| 128 | 16 | causal, alibi | 4 x 4096 | **600** | 1.20 | - |" in by_shape, "forward"


def test_a_result_of_another_grid_is_refused(tmp_path):
    path = result_of("sharded", tmp_path / "result.json", lambda *_: 400.0)
    with pytest.raises(SystemExit, match="--head-dims must be a result of that grid with peers, got .*result.json"):
        document.details(quoting(head_dims=path))


def test_a_run_without_scores_prints_no_ratio():
    row = {"impl": OURS, "pass": "forward", "schedule": None, **small(None).row(), "ms": 1.0}
    assert run.against_plain([row]) == ""
    assert "softcap 50: 0.500" in run.against_plain([row, {**row, **small("softcap 50").row(), "ms": 2.0}])


def test_a_picture_has_a_place_for_each():
    shapes = GRIDS["scores"]()
    assert not plot.are_series(shapes)
    places = {(plot.panel_of(s, False), plot.place_of(s, False)) for s in shapes}
    assert len(places) == len(shapes)

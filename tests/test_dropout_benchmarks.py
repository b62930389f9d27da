"""The benchmark's dropout, on the CPU. No figure here means anything."""

import dataclasses
import itertools
import json
import types

import pytest
import torch

from benchmarks import bars, check, compare, document, generator, peers, run
from benchmarks.compare import BITS, OURS
from benchmarks.shapes import GRIDS, Shape, flops

CPU = torch.device("cpu")
PLAIN = "dash_attn without dropout"


def small(p=0.1, mask="causal", **options):
    return Shape("bf16", 64, 4, 2, mask, 70, 2, dropout_p=p, **options)


def test_grid():
    """Each shape without dropout comes before the same ones with it, of 16,384 tokens."""
    shapes = GRIDS["dropout"]()
    assert len(shapes) == len(set(shapes)) == len(set(map(str, shapes))) == 24
    for i, shape in enumerate(shapes):
        assert shape.batch * shape.seqlen == 16384 and (not shape.dropout_p or shape.undropped in shapes[:i])
        assert flops(shape, "both") == flops(shape.undropped, "both")
        assert Shape.of_row(json.loads(json.dumps(shape.row()))) == shape
    of = {(s.mask, s.head_dim, s.seqlen, s.dropout_p) for s in shapes}
    assert of == set(itertools.product(("full", "causal"), (64, 128), (2048, 8192), (0.0, 0.125, 0.1)))
    assert str(small()) == "bf16 d64 h4/2 causal 2x70 dropout 0.1"


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("implementation", [peers.DashAttn, peers.DashAttnBits])
def test_our_results_are_right(implementation, mask):
    shape = small(mask=mask)
    rows, failures = run.measure(shape, [implementation(["auto"])], list(run.PASSES), CPU, 0.0, turns=1)
    assert failures == [] and [(row["impl"], Shape.of_row(row)) for row in rows] == [(implementation.name, shape)] * 3


def test_results_without_dropout_or_with_another_mask_are_wrong():
    shape = small(0.125)
    x = peers.random_tensors(shape, CPU)
    reference = check.Reference(shape, x)
    ours = peers.Variant(OURS, "auto", True)
    plain = peers.DashAttn().prepare(ours, shape.undropped, dataclasses.replace(x, dropout=None))
    x.dropout.state.rng_state.add_(1)
    other = peers.DashAttn().prepare(ours, shape, x)
    for pass_ in ("forward", "backward"):
        assert reference.wrong(plain[pass_]()).startswith("wrong ")
        assert reference.wrong(other[pass_]()).startswith("wrong ")
        # Of a mask that nobody knows only how much is dropped can be told.
        assert reference.wrong(other[pass_](), own_mask=True) is None
        assert reference.wrong(plain[pass_](), own_mask=True).startswith("wrong ")


def test_a_call_that_draws_its_mask_is_marked():
    shape = small()
    x = peers.random_tensors(shape, CPU)
    ours = peers.Variant(OURS, "auto", True)
    marked = {
        way.name: [isinstance(call, peers.OwnMask) for call in way().prepare(ours, shape, x).values()]
        for way in (peers.DashAttn, peers.DashAttnBits)
    }
    assert marked == {OURS: [False, False, True], BITS: [False, False, False]}


def test_who_takes_dropout():
    dense = Shape("bf16", 64, 4, 4, "causal", 70, 2, dropout_p=0.1)
    taken = {name: len(peer().variants(dense)) for name, peer in peers.PEERS.items()}
    assert taken == {"fa2": 2, "cudnn": 1, "cudnn-deterministic": 0, "memory-efficient": 1, "fa3": 0, "fa4": 0}
    assert not peers.TorchMemoryEfficient().variants(dense.undropped)
    assert not peers.TorchMemoryEfficient().variants(small()), "grouped heads"
    assert not peers.DashAttnBits().variants(dense.undropped)
    schedules = [variant.schedule for variant in peers.DashAttn().variants(dense)]
    assert "auto" in schedules and not {"shift", "symmetric_shift", "atomic"} & set(schedules)


@pytest.mark.parametrize("name", ["fa2", "cudnn", "memory-efficient"])
def test_peers_are_asked_for_the_same_probability(name, monkeypatch):
    """Every op of torch's that they call gets it; what they return does not matter here."""
    shape = Shape("bf16", 64, 4, 4, "causal", 70, 2, dropout_p=0.125)
    x, asked = peers.random_tensors(shape, CPU), []

    class Aten:
        def __getattr__(self, op):
            def call(*arguments, **options):
                schema = getattr(torch.ops.aten, op).default._schema
                bound = dict(zip((a.name for a in schema.arguments), arguments)) | options
                assert bound.keys() <= {a.name for a in schema.arguments}
                asked.append((op, bound["dropout_p"], bound["is_causal"]))
                return (x.q.transpose(1, 2),) * len(schema.returns)

            return call

    class Torch:
        ops = types.SimpleNamespace(aten=Aten())

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(peers, "torch", Torch())
    peer = peers.PEERS[name]()
    calls = peer.prepare(peer.variants(shape)[0], shape, x)
    assert all(isinstance(call, peers.OwnMask) for call in calls.values())
    calls["both"]()
    assert len({op for op, _, _ in asked}) == 2 and {(p, causal) for _, p, causal in asked} == {(0.125, True)}


def test_the_whole_program(tmp_path, capsys):
    torch.manual_seed(0)
    path = tmp_path / "dropout.json"
    shapes = [dataclasses.replace(s, seqlen=32, batch=1, heads=4, kv_heads=4) for s in GRIDS["dropout"]()[:3]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(GRIDS, "dropout", lambda: shapes)
        arguments = ["--device", "cpu", "--grid", "dropout", "--min-time", "0", "--schedules", "auto", "--peers"]
        arguments += ["--pass", "backward", "forward", "both", "--json", str(path)]
        assert run.main([*arguments, "--png", str(tmp_path / "dropout.png")]) == 0
        assert "failed" not in capsys.readouterr().out
        result = json.loads(path.read_text())
        for row in result["rows"]:
            row["tflops"] = 1 / row["ms"]  # which is 0 in two digits here
        path.write_text(json.dumps(result))
        bars.main([str(path), "--grid", "dropout"])
    found = {(row["impl"], row["pass"], row.get("dropout_p", 0.0)) for row in json.loads(path.read_text())["rows"]}
    ways = {(OURS, 0.0), (OURS, 0.125), (OURS, 0.1), (BITS, 0.125), (BITS, 0.1)}
    assert found == {(impl, pass_, p) for impl, p in ways for pass_ in run.PASSES}
    assert "dropout 0.125, 64, existing bits" in capsys.readouterr().out


def result_of(path, ours=1.0, bits=0.95, torchs=0.5):
    """Figures at every shape: of ours without dropout 500, else these shares of it; "fa2" is the fastest peer."""
    rows = []
    for shape in GRIDS["dropout"]():
        for pass_ in ("backward", "forward", "both"):
            shares = {OURS: ours if shape.dropout_p else 1.0, "fa2": torchs, "memory-efficient": torchs / 2}
            if shape.dropout_p:
                shares[BITS] = bits
            for impl, share in shares.items():
                own = impl in (OURS, BITS)
                head = {"impl": impl, "schedule": "auto" if own and pass_ != "forward" else None, "deterministic": own}
                rows.append({**head, "pass": pass_, **shape.row(), "tflops": 500.0 * share, "ms": 1.0})
    path.write_text(json.dumps({"meta": {"commit": "abcdef" * 7, "gpu": "NVIDIA H200"}, "rows": rows}))
    return path


def verdicts(path):
    claims = bars.of_dropout(bars.Run(path, "dropout"))
    return {(c.of, c.pass_, c.against): c.verdict() for c in claims}


def test_each_bar_is_met_or_missed(tmp_path):
    found = verdicts(result_of(tmp_path / "a.json", ours=0.88, bits=0.92, torchs=0.5))
    for p in (0.125, 0.1):
        for pass_ in ("forward", "backward"):
            assert found[f"dropout {p}, 128, existing bits", pass_, PLAIN] == "missed"  # 1 / 1.06 is 0.943
            assert found[f"dropout {p}, 64, existing bits", pass_, PLAIN] == "met"  # 1 / 1.10 is 0.909
        for head_dim in (64, 128):
            assert found[f"dropout {p}, {head_dim}", "both", PLAIN] == "met"  # 1 / 1.15 is 0.870
        assert found[f"dropout {p}", "both", bars.FASTEST] == "met"
        assert found[f"dropout {p}", "both", "memory-efficient"] == "no target"
    found = verdicts(result_of(tmp_path / "b.json", ours=0.86, bits=0.95, torchs=0.7))
    assert found["dropout 0.1, 128", "both", PLAIN] == "missed"
    assert found["dropout 0.1", "both", bars.FASTEST] == "missed"
    assert found["dropout 0.1, 128, existing bits", "forward", PLAIN] == "met"


def test_bits_that_are_there_are_no_peer(tmp_path):
    figures = compare.read(result_of(tmp_path / "a.json"), "both")
    rows = compare.compare(figures, figures)
    assert {peer.impl for peer in compare.measured_peers(rows)} == {"fa2", "memory-efficient"}


def test_documents_quote_dropout(tmp_path):
    result = document.ROOT / "benchmarks" / "results" / "h200_2026-11-27_5742ba2.json"
    quoted = document.Quoted(result, dropout=result_of(tmp_path / "a.json", ours=0.8, bits=0.95))
    lines = document.details(quoted).splitlines()
    of = f"| dropout 0.1, 128, existing bits | backward | {PLAIN} | 4 | 0.95 | 0.95 (full, 8x2048) | 0.94 |"
    assert of in lines
    assert "| dropout 0.1 | both | the fastest baseline with dropout | 8 | 1.60 | 1.60 (full, 8x2048) | 1.25 |" in lines
    by_shape = document.by_shape(quoted).splitlines()
    assert "| 128 | 16 | causal, dropout 0.1 | 8 x 2048 | **400** | 0.80 | 1.60 | 3.20 |" in by_shape


def test_the_generator_alone(tmp_path, capsys, monkeypatch):
    assert {(s.seqlen, s.causal, s.dropout_p) for s in generator.shapes()} == {
        (n, causal, p) for n in (2048, 8192) for causal in (False, True) for p in (0.125, 0.1)
    }
    of_70 = dataclasses.replace(small(), batch=1)
    of_352 = dataclasses.replace(of_70, seqlen=352)  # 11 blocks: the first two rows do not reach the last ones
    assert [generator.blocks_of(x) for x in (of_70, of_352)] == [4 * 9, 4 * (121 - 2 - 1)]
    monkeypatch.setattr(generator, "shapes", lambda: [of_70])
    path = tmp_path / "generator.json"
    generator.main(["--device", "cpu", "--min-time", "0", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["mapping"], row["rounds"]) for row in rows] == list(generator.MAPPINGS)
    for row in rows:
        assert row["elements_per_s"] / row["gb_per_s"] == pytest.approx(8e9)
        assert row["gb_per_s"] * row["ms"] == pytest.approx(36 * 128e-6, rel=0.05)
    assert "bit_sliced" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="error: --max-seqlen 1 leaves no shape of the grid dropout"):
        generator.main(["--device", "cpu", "--max-seqlen", "1"])

"""The constants of dropout's model from microbenchmarks, and its predictions beside measured rows: on results that are
made up of known constants."""

import copy
import dataclasses
import itertools
import json

import pytest

from dash_attn.dropout import model
from dash_attn.dropout.model import command, formulas, judge

TRUE = {
    "imad_wide_lanes": 32.0, "logic_lanes": 60.0, "clock_ghz": 1.5, "gemm_tflops": 650.0,
    "gemm_slowdown": 0.3, "generator_slowdown": 0.8,
    "hidden_in_attention": 0.25, "hidden_in_backward": -0.5, "forward_use": 1.5, "backward_use": 3.0,
    "generator_start_us": 4.0, "call_us": 1.0, "fork_us": 6.0,
}  # fmt: skip
EFFICIENCIES = {(7, 4): 0.8, (10, 4): 0.85, (7, 8): 0.9, (10, 8): 0.95}


def figures(owner):
    names = {field.name for field in dataclasses.fields(owner)} & TRUE.keys()
    return dataclasses.replace(owner, **{name: model.Figure(TRUE[name], "made up") for name in names})


MACHINE = figures(model.MACHINES["h200"])


def settings(rounds=7, planes=4):
    efficiency = model.Figure(EFFICIENCIES[rounds, planes], "made up")
    one = model.Figure(1.0, "made up")
    base = model.Settings(rounds=rounds, planes=planes, generator_efficiency=efficiency, exposed_use=one)
    return figures(base)


def generator_ms(elements, rounds=7, planes=4):
    return 1e3 * model.generator_time(elements, MACHINE, settings(rounds, planes))


def made_up():
    """A result in which everything takes what the model says."""
    result = {"meta": {"gpu": "NVIDIA H200", "cuda": "13.0", "torch": "2.11", "commit": "abc", "p": 0.125, "sms": 132}}
    result["instructions"] = [
        {"instruction": "lop3", "lanes": TRUE["logic_lanes"]},
        {"instruction": "imad.wide", "lanes": TRUE["imad_wide_lanes"]},
        {"instruction": "rounds of philox", "lanes": 70.0},
    ]
    result["generator"] = [
        {"rounds": rounds, "planes": planes, "elements": n, "ms": generator_ms(n, rounds, planes)}
        for (rounds, planes), n in itertools.product(EFFICIENCIES, (2**24, 2**28, 2**32))
    ]
    result["gemm"] = [{"flops": flops, "ms": flops / 650e9, "mhz": 1500} for flops in (1e12, 3e12)]
    result["overheads"] = [{"of": name, "us": TRUE[f"{name}_us"], "how": "so"} for name in ("call", "fork")]
    result["pairs"] = []
    for gemm, generator in ((1.0, 0.1), (1.0, 0.5), (1.0, 1.1), (0.3, 1.0)):
        both = model.together(gemm, generator, TRUE["gemm_slowdown"], TRUE["generator_slowdown"]) + 6e-3
        alone = {"gemm_ms": gemm, "generator_ms": generator}
        result["pairs"].append({"where": "streams", **alone, "both_ms": both})
        result["pairs"].append({"where": "inside", **alone, "both_ms": 9.0})  # of an older result, and ignored
    result["attention"] = []
    for (pass_, products), seqlen in itertools.product((("forward", 4), ("backward", 10)), (1024, 4096, 16384)):
        pairs = 16 * 16384 * seqlen / 2
        plain = products * 128 * pairs / 600e9
        bits, inside = of_attention(pairs, pass_)
        times = {"plain_ms": plain, "bits_ms": plain + bits, "fa2_ms": 2 * plain, "fa2_dropout_ms": 2 * plain + inside}
        result["attention"].append({"pass": pass_, "seqlen": seqlen, "pairs": pairs, **times})
    result["rows"] = [row_of(*key) for key in itertools.product(model.BLOCKS, (2048, 32768), ("forward", "backward"))]
    return result


def of_attention(pairs, pass_):
    """Milliseconds that bits, and random numbers made inside, take."""
    of = pairs, MACHINE, settings()
    parts = (function(*of, backward=pass_ == "backward") for function in (formulas.use_time, formulas.inside_time))
    return tuple(1e3 * part for part in parts)


def row_of(name, seqlen, pass_):
    block, tokens, backward = model.BLOCKS[name], max(16384, seqlen), pass_ == "backward"
    pairs, elements = block.pairs(tokens, seqlen, True), block.generated(tokens, seqlen, True)
    gemms = {"qkv": 2.0, "out": 1.0, "up": 4.0, "down": 3.0}
    attention = 1e-9 * pairs
    bits, inside = of_attention(pairs, pass_)
    generator = generator_ms(elements)
    before = gemms["out" if backward else "qkv"]
    calls = 9 if backward else 5
    rest = sum(gemms.values()) - before + attention + bits + (calls - 1) * 1e-3
    at_once = model.together(before, generator, 0.3, 0.8) + 6e-3
    return {
        "block": name, "seqlen": seqlen, "tokens": tokens, "pass": pass_, "calls": calls, "pairs": pairs,
        "elements": elements, "gemm_ms": gemms, "attention_ms": attention, "attention_bits_ms": attention + bits,
        "generator_ms": {"7": generator, "10": generator_ms(elements, 10)},
        "sequential_ms": rest + before + generator + 1e-3, "overlapped_ms": rest + at_once,
        "fa2_ms": 2 * attention, "fa2_dropout_ms": 2 * attention + inside,
    }  # fmt: skip


def test_lines():
    assert model.line([(x, 3 + 2 * x) for x in (1.0, 10.0, 1000.0)]) == pytest.approx((3, 2))
    # Relative errors count: the same absolute error moves the line less where y is large.
    start, slope = model.line([(0.0, 1.0), (1.0, 2.0), (1000.0, 1031.0)])
    assert start == pytest.approx(1, abs=0.05) and slope == pytest.approx(1.03, abs=0.01)
    for points in ([(1.0, 2.0), (1.0, 3.0)], [(1.0, 0.0), (2.0, 1.0)]):
        with pytest.raises(ValueError, match="points must have at least two different x and every y above 0"):
            model.line(points)


def test_proportions():
    assert model.proportion([(2.0, 6.0, 1.0), (5.0, 15.0, 9.0)]) == pytest.approx(3)
    # What an error is relative to weighs.
    assert model.proportion([(1.0, 1.0, 1e-3), (1.0, 5.0, 1.0)]) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("a, b", [(0.0, 0.0), (0.05, 0.33), (0.5, 0.1), (0.9, 1.0), (0.1, 3.0)])
def test_interference_is_found(a, b):
    ratios = [(1.0, 0.05), (1.0, 0.3), (0.4, 0.3), (0.2, 1.0), (0.1, 1.0)]
    found = model.interference([(t, r, model.together(t, r, a, b) + 0.01) for t, r in ratios], fork=0.01)
    assert found == pytest.approx((a, b), abs=0.02)


def test_two_that_only_run_one_behind_the_other_are_predicted_so():
    ratios = [(1.0, 0.05), (1.0, 0.3), (0.4, 0.3), (0.2, 1.0)]
    a, b = model.interference([(t, r, t + r) for t, r in ratios])
    for t, r in ((3.0, 0.7), (0.5, 2.0)):
        assert model.together(t, r, a, b) == pytest.approx(t + r, rel=2e-3)


def test_planes():
    assert {p: model.planes_of(p) for p in (0.125, 0.5, 0.1, 0.3)} == {0.125: 4, 0.5: 4, 0.1: 8, 0.3: 8}


def test_constants_are_found_again():
    fitted = model.fitted(made_up(), "made_up.json")
    assert fitted.machine.name == "h200" and fitted.settings.planes == 4
    for owner in (fitted.machine, fitted.settings):
        for field in {field.name for field in dataclasses.fields(owner)} & TRUE.keys():
            figure = getattr(owner, field)
            assert figure.value == pytest.approx(TRUE[field], rel=0.01, abs=2e-3), field
            assert figure.source.startswith("measured: made_up.json"), field
    for key, efficiency in EFFICIENCIES.items():
        assert fitted.settings_of(*key).generator_efficiency.value == pytest.approx(efficiency)
    assert fitted.settings.generator_efficiency.value == pytest.approx(0.8)
    unknown = fitted.settings_of(5, 8)
    assert unknown.rounds == 5 and unknown.generator_efficiency.value == pytest.approx(0.875)
    assert unknown.generator_efficiency.source.startswith("unmeasured")


def test_rows_that_are_judged_change_no_constant():
    result = made_up()
    before = model.fitted(result, "x")
    for row in result["rows"]:
        row.update(sequential_ms=1.0, overlapped_ms=1.0, attention_ms=5.0, generator_ms={"7": 9.0})
    assert model.fitted(result, "x") == before


def test_what_is_missing_stays_labelled():
    fitted = model.fitted({"meta": {"gpu": "NVIDIA H200", "p": 0.1}}, "empty.json")
    assert fitted.settings.planes == 8
    sources = {name: source for name, _, source in model.constants(fitted.machine, fitted.settings)}
    for name in TRUE.keys() - {"logic_lanes"}:
        assert sources[name].startswith("unmeasured"), name


def test_other_machines_have_their_own_sizes_and_the_measured_rates():
    fitted = model.fitted(made_up(), "x")
    a100 = fitted.on("a100")
    assert a100.sms.value == 108 and a100.logic_lanes.value == 60
    assert a100.gemm_tflops.value == pytest.approx(650 * 312 / 989, rel=1e-3)
    assert not a100.gemm_tflops.is_measured and not a100.logic_lanes.is_measured
    table = judge.elsewhere(fitted, seqlens=(2048,)).splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == ["h200", "a100", "b200", "h200, GEMMs twice as fast"]


def test_what_follows_the_model_is_within():
    result = made_up()
    found = model.every(result, model.fitted(result, "x"))
    assert {one.of for one in found} == {
        "generator, 7 rounds", "generator, 10 rounds", "attention with bits", "sequential", "overlapped",
        "FlashAttention-2 with dropout",
    }  # fmt: skip
    assert len(found) == 2 * len(model.BLOCKS) * 2 * 6
    assert max(abs(one.error) for one in found) < 5e-3
    assert model.verdict(found).startswith(f"{len(found)} of {len(found)} predictions are within 10%")


def test_a_measurement_counts_once():
    """Of two blocks of one shape: the second one's row is shown with whose it is, and not counted."""
    result = made_up()
    row = next(row for row in result["rows"] if row["block"] == "Llama-3 70B")
    row |= {"measured_as": "Llama-2 70B", "overlapped_ms": 1.2 * row["overlapped_ms"]}
    found = model.every(result, model.fitted(result, "x"))
    report = model.report(result, model.fitted(result, "x"))
    assert f"{len(found) - 6} of {len(found) - 6} predictions are within 10%" in report
    assert "overlapped 23 of 23" in report and "Not counted: Llama-3 70B (as Llama-2 70B)." in report
    assert report.count("| Llama-3 70B (as Llama-2 70B) | 2048 | forward |") == 2


def test_a_call_takes_no_time_below_zero():
    result = made_up()
    result["overheads"][0]["us"] = -2.19
    call = model.fitted(result, "x").settings.call_us
    assert (call.value, call.source) == (0.0, "measured: x: so, -2.19, set to 0")


def test_what_does_not_is_named():
    result = made_up()
    row = result["rows"][0]
    row["overlapped_ms"] *= 1.2
    fitted = model.fitted(result, "x")
    (missed,) = (one for one in model.every(result, fitted) if not one.is_within)
    assert (missed.of, missed.block, missed.seqlen, missed.pass_) == ("overlapped", "GPT-3 175B", 2048, "forward")
    assert missed.error == pytest.approx(1 / 1.2 - 1, abs=5e-3) and "NOT within" in str(missed)
    report = model.report(result, fitted)
    assert "Not within: overlapped of GPT-3 175B, 2048, forward (-17%)." in report
    assert "sequential 24 of 24, overlapped 23 of 24" in report
    assert "furthest off for GPT-3 175B, 2048, forward: 1.0" in report


def test_gains_are_ratios_of_what_was_measured():
    result = made_up()
    row = result["rows"][0]
    gain = model.gains(result, model.fitted(result, "x"))[0]
    assert gain["measured"] == row["sequential_ms"] / row["overlapped_ms"]
    assert gain["predicted"] == pytest.approx(gain["measured"], rel=1e-3)
    assert gain["theirs"] == row["fa2_dropout_ms"] / row["fa2_ms"]


def test_rows_with_parts_missing_are_judged_by_what_is_there():
    result = made_up()
    fitted = model.fitted(result, "x")
    row = copy.deepcopy(result["rows"][0])
    del row["gemm_ms"]["up"], row["fa2_dropout_ms"], row["generator_ms"]["10"]
    assert {one.of for one in judge.judged(row, fitted)} == {"generator, 7 rounds", "attention with bits"}
    bare = {key: row[key] for key in ("block", "seqlen", "pass", "pairs", "elements", "calls")}
    assert list(judge.judged(bare, fitted)) == []
    assert "No time of a block" in model.report({**result, "rows": [bare]}, fitted)


def test_the_command_takes_a_result(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "measured.json", tmp_path / "model.png"
    path.write_text(json.dumps(made_up()))
    model.main(["--measured", str(path), "--png", str(picture), "--seqlens", "2048"])
    printed = capsys.readouterr().out
    assert "predictions are within 10%" in printed and "| gemm_tflops | 650 | measured: measured.json" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    model.main(["--measured", str(path), "--gpu", "a100", "--fork-us", "50"])
    assert "| fork_us | 50 | given |" in capsys.readouterr().out


def test_the_command_takes_the_result_that_the_package_brings(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "PACKAGED", tmp_path / "h200.json")
    (tmp_path / "h200.json").write_text(json.dumps(made_up()))
    model.main([])
    assert "measured: h200.json" in capsys.readouterr().out


@pytest.mark.parametrize("text, message", [
    ("{", "measured must be a JSON file of benchmarks.dropout_model, got "),
    ("[]", "whose meta has no p"),
    ('{"meta": {"gpu": null}}', "whose meta has no p"),
])  # fmt: skip
def test_files_that_are_no_results(tmp_path, text, message):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match=message):
        model.main(["--measured", str(path)])
    with pytest.raises(SystemExit, match="No such file"):
        model.main(["--measured", str(tmp_path / "none.json")])

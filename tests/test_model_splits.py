"""The model beside backwards that were measured with forced splits of the query heads."""

import json
import math
import statistics

import pytest

from benchmarks import model, splits

MEASURED = model.RESULTS / "h200_2026-11-27_cb2c966_splits.json"
MOST_FLOPS = 0.1e12  # the shapes that are quick to predict


@pytest.fixture(scope="module")
def result():
    return json.loads(MEASURED.read_text())


@pytest.fixture(scope="module")
def found(result):
    return splits.cases(model.read(model.MACHINE), result, 128, MOST_FLOPS)


def errors(cases):
    return [math.log(case.ratio) for case in cases]


def test_every_measured_number_of_splits_is_a_case(result, found):
    rows = [row for row in result["rows"] if row["head_dim"] == 128 and row["mask"] != "window"]
    measured = {
        (row["heads"], row["kv_heads"], row["batch"], row["seqlen"], row["mask"], int(n)): 1e3 * ms
        for row in rows
        for n, ms in row["ms_by_splits"]["descending"].items()
    }
    for case in found:
        s = case.shape
        assert measured[s.heads, s.kv_heads, s.batch, s.seqlen, s.mask, case.splits] == case.us
    assert len(found) > 100 and {case.splits for case in found} >= {1, 2, 4, 8}


def test_predictions_of_forced_splits(found):
    assert abs(statistics.fmean(errors(found))) < 0.02
    assert sum(abs(case.ratio - 1) <= 0.05 for case in found) >= 0.8 * len(found)
    assert max(map(abs, errors(found))) < 0.16


def test_a_split_costs_more_than_a_work_tile(result, found, monkeypatch):
    """Without the cost of a split the model takes many splits for quicker than they are."""
    monkeypatch.setattr(model, "SPLIT_CLOCKS", 0)
    without = splits.cases(model.read(model.MACHINE), result, 128, MOST_FLOPS)
    assert [c for c in found if c.splits == 1] == [c for c in without if c.splits == 1]
    many = [statistics.fmean(errors(c for c in cases if c.splits >= 4)) for cases in (found, without)]
    assert abs(many[0]) < 0.05 and many[1] < -0.10


def test_the_report_has_a_line_for_each_group(capsys):
    splits.main([str(MEASURED), "--most", "0.01"])
    heads, *lines = capsys.readouterr().out.splitlines()
    assert heads.split()[0] == "predicted/measured"
    names = {line[:18].strip() for line in lines}
    assert {"all", "KV heads 1", "seqlen 1024", "splits 1", "splits 4"} <= names
    groups = [line for line in lines if line.startswith("splits")]
    assert sum(int(line[18:].split()[0]) for line in groups) == int(lines[0][18:].split()[0])
    with pytest.raises(SystemExit, match="error: --most 0.0 leaves no shape"):
        splits.main([str(MEASURED), "--most", "0"])

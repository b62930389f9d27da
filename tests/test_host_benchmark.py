"""The benchmark of the host's time, on the CPU."""

import json

import pytest
import torch

from benchmarks import host, run


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(host.measure, "__defaults__", (1, 2))


def test_rows_and_table(tmp_path, short, capsys):
    path = tmp_path / "host.json"
    assert run.main(["--host", "--device", "cpu", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert {"gpu", "torch", "commit", "date"} <= set(result["meta"])
    measured = {(row["impl"], row["pass"]) for row in result["rows"]}
    assert {(impl, pass_) for impl in (host.OURS, host.TORCH) for pass_ in host.PASSES} <= measured
    assert all(row["host_us"] > 0 and row["seqlen"] == 128 for row in result["rows"])
    assert "ratio" in capsys.readouterr().out


def test_what_cannot_be_imported_is_left_out(monkeypatch, short, capsys):
    monkeypatch.setitem(host.IMPLEMENTATIONS, "absent", lambda: __import__("no_such_module"))
    assert "absent" not in {row["impl"] for row in host.measure(torch.device("cpu"))}
    assert "left out absent: ModuleNotFoundError" in capsys.readouterr().out


def test_median_of_blocks(monkeypatch):
    """One block that something else disturbed does not show."""
    values = iter([1000.0] * (2 * host.WARM_UP_BLOCKS) + [5.0, 7.0, 900.0, 7.0, 5.0, 900.0])
    monkeypatch.setattr(host, "IMPLEMENTATIONS", {host.OURS: lambda: torch.nn.functional.scaled_dot_product_attention})
    monkeypatch.setattr(host, "_block_us", lambda call, count, device: next(values))
    rows = host.measure(torch.device("cpu"), 1, 3)
    assert {row["pass"]: row["host_us"] for row in rows} == {"forward": 5.0, "both": 7.0}

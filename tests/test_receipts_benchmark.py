"""The benchmark of receipts, on the CPU."""

import json

import pytest
import torch

from benchmarks import receipts


def test_rows_and_table(tmp_path, capsys):
    path = tmp_path / "receipts.json"
    small = "--layers 1 --width 64 --head-dim 32 --seqlen 32 --batch 1 --microbatches 2 --turns 2 --steps 1"
    arguments = ["--device", "cpu", "--elements", str(300 * 4096), "--json", str(path), *small.split()]
    assert receipts.main(arguments) == 0
    result = json.loads(path.read_text())
    assert len(result["op"]) == 6 and all(row["ms"] > 0 and row["predicted_ms"] > 0 for row in result["op"])
    step = result["step"]
    weights = 64 * 64 * (3 + 1 + 4 + 4) + 2 * 64
    assert step["parameters"] == weights and len(step["shares"]) == 2
    # Weights twice, gradients and the optimizer's two averages, its six counters of steps, and the data.
    assert step["bytes"] == 5 * 2 * weights + 6 * 4 + 2 * 32 * 64
    text = capsys.readouterr().out
    assert "300 tensors, torch.bfloat16" in text and "share of receipts" in text and "at most 0.50%" in text


def test_what_is_predicted():
    """Memory is the limit of words of 2 and 4 bytes, multiplication of single bytes."""
    for size, limit in ((1, "products"), (2, "memory"), (4, "memory")):
        rates = receipts.predicted_rates(size)
        assert min(rates, key=rates.get) == limit
    one = torch.empty(10**9, dtype=torch.bfloat16, device="meta")
    assert receipts.predicted_ms([one]) == pytest.approx(1e3 * 2e9 / (0.9 * 4.8e12) + 0.002)
    assert receipts.predicted_ms([one[:0]] * 57) == pytest.approx(0.004)


def test_sizes_that_are_refused(capsys):
    with pytest.raises(SystemExit):
        receipts.main(["--device", "cpu", "--elements", "1000"])
    assert "--elements must be at least 1228800, got 1000" in capsys.readouterr().err

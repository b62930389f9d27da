"""The benchmarks of decoding and of masks by key columns run, check their results, and write what they print."""

import json

import pytest
import torch

from benchmarks import column_masks, decoding


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_decoding(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decoding, "CASES", [decoding.Case(2, 64, 4, 2, head_dim=32, new_tokens=2)])
    decoding.main(["--out", str(tmp_path / "out.json"), "--page-sizes", "16", "32", "--min-time", "0.001"])
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert list(row["tb_per_s"]) == ["plain", "16", "32"] and all(rate > 0 for rate in row["tb_per_s"].values())
    assert "2 x 64, 4/2 heads of 32, 2 tokens" in capsys.readouterr().out


def test_decoding_counts_keys_and_values_once():
    assert decoding.Case(3, 100, 8, 2, head_dim=64).bytes == 3 * 100 * 2 * (64 + 64) * 2


def test_wrong_pages_are_found(monkeypatch):
    real = decoding.flash_attn_with_kvcache

    def wrong(*args, block_table=None, **arguments):
        return real(*args, block_table=None if block_table is None else block_table.flip(0), **arguments)

    monkeypatch.setattr(decoding, "flash_attn_with_kvcache", wrong)
    with pytest.raises(ValueError, match="pages of 16 rows give other bits than the plain cache"):
        decoding.calls_of(decoding.Case(2, 32, 2, 1, head_dim=32), torch.device("cpu"), [16])


def test_column_masks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(column_masks, "CASES", [column_masks.documents(64, 256), column_masks.shared_question(64, 16)])
    column_masks.main(
        ["--out", str(tmp_path / "out.json"), "--no-flex", "--head-dims", "32", "--heads", "2", "--kv-heads", "1",
         "--min-time", "0.001"]
    )  # fmt: skip
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    found = {(row["case"], row["impl"], row["pass"]) for row in rows}
    assert ("documents of 64", "packs", "backward") in found and ("question of 64", "columns", "forward") in found
    assert "of causal" in capsys.readouterr().out

"""The benchmark of context parallelism, on gloo processes."""

import importlib.util
import json

import pytest

from benchmarks import context_parallel
from benchmarks.context_parallel_peers import TORCH_KERNELS

PEERS = [*(f"torch context parallel, {kernels}" for kernels in TORCH_KERNELS), "ring-flash-attn zigzag"]


@pytest.mark.slow
def test_rows_and_table(tmp_path, capfd):
    path = tmp_path / "result.json"
    leave_out = PEERS[1:2]  # a trial on CPUs has one kernel for both
    options = ["--device", "cpu", "--seqlens", "32", "--rounds", "1", "--block", "0.01", "--json", str(path)]
    assert context_parallel.main([*options, "--leave-out", *leave_out]) == 0
    result = json.loads(path.read_text())
    text = capfd.readouterr().out
    rows = {row["impl"]: row for row in result["rows"]}
    ours = ["dash_attn contiguous", "dash_attn zigzag", "dash_attn by heads"]
    for name in ours:
        assert all(error["same_bits"] for error in rows[name]["errors"].values())
    expected = {"one GPU", *ours, PEERS[0]}
    if importlib.util.find_spec("ring_flash_attn") is not None:
        expected.add(PEERS[-1])
    assert rows.keys() == expected
    assert {row["impl"] for row in result["left_out"]} == set(PEERS) - expected
    for name, row in rows.items():
        assert row["ms"] > 0 and row["of_ideal"] == pytest.approx(rows["one GPU"]["ms"] / 2 / row["ms"])
        assert name == "one GPU" or max(error["relative"] for error in row["errors"].values()) < 0.01
    movements = {row["movement"]: row for row in result["movements"]}
    assert len(movements) == 9
    # Of a rank's 16 rows half of the heads, 32 of queries and twice 8 of keys, 128 columns of 2 bytes.
    assert movements["zigzag: q, k, v to heads"]["bytes"] == 16 * (32 + 2 * 8) // 2 * 128 * 2
    assert "zigzag: at least 0.88 of the ideal" in text and "contiguous: not slower than torch" in text


@pytest.mark.slow
def test_more_ranks_than_kv_heads(tmp_path, capfd):
    path = tmp_path / "result.json"
    options = ["--device", "cpu", "--seqlens", "512", "--rounds", "1", "--block", "0.01", "--json", str(path)]
    assert context_parallel.main([*options, "--kv-heads", "1", "--leave-out", *PEERS]) == 0
    result = json.loads(path.read_text())
    rows = {row["impl"]: row for row in result["rows"]}
    assert rows.keys() == {"one GPU", "dash_attn contiguous", "dash_attn zigzag"} and not result["movements"]
    assert {row["kv_heads"] for row in rows.values()} == {1}
    assert all(error["same_bits"] for name in rows if "dash" in name for error in rows[name]["errors"].values())
    assert "512 tokens, 32/1 heads of 128" in capfd.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--ranks", "3"], "--ranks must divide the 8 KV heads, or be more, got 3"),
        (["--kv-heads", "5"], "--kv-heads must divide the 32 heads, got 5"),
        (["--seqlens", "66"], "--seqlens must be multiples of twice the ranks, 4, got 66"),
    ],
)
def test_what_is_refused(capsys, options, message):
    with pytest.raises(SystemExit):
        context_parallel.main(["--device", "cpu", *options])
    assert message in capsys.readouterr().err

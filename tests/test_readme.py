"""What the README quotes is what the committed results say."""

import json
import pathlib
import re

from benchmarks import compare

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RESULT, PEERS = RESULTS / "h200_2026-11-21.json", RESULTS / "peers_h200.json"
PEER_CELLS = r"(?:(\d+) \([^)]+\)|-) \| ([\d.]+|-) \|"
TABLE_ROW = re.compile(
    rf"^\| (\d+) \| ([\d/]+) \| (full|causal) \| (\d+) \| \*\*(\d+)\*\* \| {PEER_CELLS} {PEER_CELLS}$", re.M
)


def compared(pass_, schedule="auto"):
    return compare.compare(compare.read(RESULT, pass_), compare.read(PEERS, pass_), schedule)


def test_benchmark_table():
    rows = compared("backward")
    quoted = TABLE_ROW.findall((ROOT / "README.md").read_text())
    assert len(quoted) == len(rows) == 30
    for row, cells in zip(rows, quoted):
        shape = row.shape
        heads = str(shape.heads) if shape.heads == shape.kv_heads else f"{shape.heads}/{shape.kv_heads}"
        expected = [str(shape.head_dim), heads, shape.mask, str(shape.seqlen), f"{row.ours.tflops:.0f}"]
        for peer in (row.best_deterministic, row.best_other):
            expected += [f"{peer.tflops:.0f}", f"{row.ratio(peer):.2f}"] if peer else ["", "-"]
        assert list(cells) == expected, shape
    meta = json.loads(RESULT.read_text())["meta"]
    assert meta["gpu"] == "NVIDIA H200" and re.fullmatch("[0-9a-f]{40}", meta["commit"])


def test_geometric_means():
    text = (ROOT / "README.md").read_text()

    def mean(rows, deterministic=True):
        peers = [(row, row.best_deterministic if deterministic else row.best_other) for row in rows]
        return f"{compare.geometric_mean([row.ratio(peer) for row, peer in peers if peer]):.2f}"

    backward, both, forward = compared("backward"), compared("both"), compared("forward", None)
    assert f"ratios: {mean(backward)} to the fastest deterministic peer, {mean(backward, False)} to the fastest of" in text
    worst = min(row.ratio(row.best_deterministic) for row in forward)
    assert f"same shapes: {mean(forward)} times the best of" in text and f"geometric mean, {worst:.2f} at worst" in text
    alone = [row for row in both if not (row.shape.kv_heads < row.shape.heads and row.shape.mask == "full")]
    assert f"autograd: {mean(both)} times the best" in text and f"({mean(alone)} without the two shapes" in text


def test_files_the_readme_names_exist():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target

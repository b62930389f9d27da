"""What the README quotes is what the committed result says."""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "h200_2026-11-20.json"
TABLE_ROW = re.compile(r"^\| (\d+) \| ([\d/]+) \| (full|causal) \| (\d+) \| \*\*(\d+)\*\* \| (\d+) \| (\d+) \| (\d+) \|$", re.M)


def test_benchmark_table():
    from dash_attn import schedule

    result = json.loads(RESULT.read_text())
    figures = {}
    for row in result["rows"]:
        shape = row["head_dim"], row["heads"], row["kv_heads"], row["mask"], row["seqlen"]
        figures[shape, row["impl"], row["deterministic"], row["schedule"]] = row["tflops"]
    shapes = {key[0] for key in figures}
    rows = TABLE_ROW.findall((ROOT / "README.md").read_text())
    assert len(rows) == len(shapes) > 0
    for head_dim, heads, mask, seqlen, *quoted in rows:
        query_heads, _, kv_heads = heads.partition("/")
        shape = int(head_dim), int(query_heads), int(kv_heads or query_heads), mask, int(seqlen)
        auto = schedule.resolve("auto", causal=mask == "causal", seqlen_q=shape[4], seqlen_k=shape[4])
        measured = [figures[shape, "dash_attn", True, auto]]
        measured += [figures[shape, impl, det, None] for impl, det in (("fa2", True), ("fa2", False), ("cudnn", False))]
        assert [f"{x:.0f}" for x in measured] == quoted, shape
    assert result["meta"]["gpu"] == "NVIDIA H200" and re.fullmatch("[0-9a-f]{40}", result["meta"]["commit"])


def test_files_the_readme_names_exist():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target

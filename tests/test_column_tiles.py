"""csrc/contract/columns.h and placement/columns.h on the host: which tiles are live under a mask by key columns."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ROOT / "tests" / "column_tiles_on_host.cpp"


def run(csrc, program):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler is on this machine")
    subprocess.run([compiler, "-O2", "-std=c++20", f"-I{csrc}", str(SOURCE), "-o", str(program)], check=True)
    return subprocess.run([program], capture_output=True, text=True)


def test_tiles_agree_with_elements(tmp_path):
    result = run(ROOT / "csrc", tmp_path / "run")
    assert (result.returncode, result.stdout) == (0, "tiles agree with elements\n")


@pytest.mark.parametrize(
    "right, wrong, message",
    [
        ("ceil_div(min_int(all.first, ", "ceil_div(min_int(all.first - 1, ", "a tile with visible elements is skipped"),
        ("high.first < low.end()", "false", "the count of visits"),
        ("if (skipped[0].contains(last)) last = skipped[0].first - 1;", "", "the last visit"),
        ("some[0].overlaps(queries) || ", "", "a tile is not masked"),
        (" || grid.needs_masking(query_tile, kv)", "", "a tile is not masked"),
        (".contains(kv) && !hidden.hides_all(queries)", ".contains(kv)", "a tile without visible elements is walked"),
        ("kv_tiles_of_queries(first, end)", "kv_tiles_of_queries(first, first + 1)",
         "a tile with visible elements is skipped by a part"),
        ("ceil_div(seqlen_q, kPartRows) * kPartRows - ", "seqlen_q - ", "a tile's first query"),
        ("is_long ? place_in_head : long_tiles + place_in_head", "place_in_head",
         "a work tile before one that it waits for"),
    ],
)  # fmt: skip
def test_faults_are_found(tmp_path, right, wrong, message):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    files = ("contract/columns.h", "placement/columns.h", "placement/work_tile.h")
    paths = [tmp_path / "csrc" / file for file in files]
    (path,) = [path for path in paths if right in path.read_text()]
    assert path.read_text().count(right) == 1
    path.write_text(path.read_text().replace(right, wrong))
    result = run(tmp_path / "csrc", tmp_path / "run")
    assert result.returncode == 1 and result.stdout.startswith(message)

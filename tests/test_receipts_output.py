"""What comparisons print and draw: names of any kind, commands for a shell, progress, and many records at once."""

import contextlib
import io
import json
import os
import pathlib
import random
import re
import sqlite3
import subprocess
import sys

import pytest
import torch

import dash_attn
from dash_attn import build_record
from dash_attn.receipts import Recorder, Shard, compare, pairs, replays
from dash_attn.receipts.__main__ import main
from dash_attn.receipts.fingerprints import block_span
from dash_attn.receipts.runs import Run
from dash_attn.receipts.store import Entry, Writer, rank_file
from dash_attn.receipts.text import printable

NAMES = [
    "\x1b]0;title\x07\x1b[2J", "a\nthe runs agree: no record differs", "a\rthe same", "\x9b31m", "\u202edlrow",
    "\u2028",
    "$x^{$", "$", r"\$a$", r"$\frac$", "\\", "größe", "张量", "a\0b", "%s{}", "_" * 3000, "",
]  # fmt: skip


def record(folder, tensors, *, steps=range(1), **options):
    with Recorder(folder, block=8, **options) as recorder:
        for step in steps:
            with recorder.step(step):
                for name, tensor in tensors.items():
                    recorder.record(tensor, name, "activation")


def pair_of(folder, names, **options):
    """Two runs that differ in the last of the tensors."""
    tensors = {name: torch.arange(20.0) + place for place, name in enumerate(names)}
    record(folder / "a", tensors, **options)
    record(folder / "b", tensors | {names[-1]: torch.zeros(20)}, **options)
    return str(folder / "a"), str(folder / "b")


def check_text(text):
    assert all(c.isprintable() or c == "\n" for c in text), text
    assert "the runs agree: no record differs" not in text.splitlines()


def test_runs_of_other_code_are_told_first(tmp_path, monkeypatch, capsys):
    """A receipt without the versions, as older releases wrote it, is compared all the same."""
    a, b, tensors = str(tmp_path / "a"), str(tmp_path / "b"), {"x": torch.arange(20.0)}
    record(tmp_path / "a", tensors)
    assert main(["compare", a, a]) == 0
    assert "different code" not in capsys.readouterr().out
    built = Run(a).meta["library sources"]
    monkeypatch.setattr(dash_attn, "__bits_version__", 1)
    monkeypatch.setattr(build_record, "library_sources", lambda: "0123456789abcdef")
    record(tmp_path / "b", tensors)
    assert main(["compare", a, b]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == (
        f"the runs used different code of dash_attn: bits version 2 and 1; library sources {built} and 0123456789abcdef"
    )
    assert second == "  a new bits version changes results on purpose: docs/contract.md lists what changed"
    with contextlib.closing(sqlite3.connect(rank_file(tmp_path / "b", 0))) as database, database:
        database.execute("DELETE FROM meta WHERE key IN ('bits version', 'library sources', 'Python sources')")
    assert main(["compare", a, b]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "bits version 2 and not recorded; " in first and first.endswith(" and not recorded")


@pytest.mark.parametrize("place", range(len(NAMES)))
def test_names_of_any_kind(tmp_path, capsys, place):
    """No name reaches the terminal as it is; lines are those of the command."""
    pytest.importorskip("matplotlib")
    name = NAMES[place]
    pair = pair_of(tmp_path, ["x", name], facts={name: name}, replay=f"train {name}")
    assert main(["compare", *pair, "--png", str(tmp_path / "where.png")]) == 1
    out, err = capsys.readouterr()
    check_text(out + err)
    assert f"  first: activation {printable(name)}\n" in out
    assert (tmp_path / "where.png").read_bytes().startswith(b"\x89PNG")
    assert main(["compare", *pair, "--json"]) == 1
    check_text(capsys.readouterr().out)


def test_random_names(tmp_path, capsys):
    """Many at once, of the characters that terminals and matplotlib take for something else."""
    pytest.importorskip("matplotlib")
    rng = random.Random(0)
    characters = "$\\^_{}%&#~ab \n\r\t\x1b\x9b\x7f\u202e\u2029\U000e0001é"
    names = list({"".join(rng.choices(characters, k=rng.randrange(1, 12))) for _ in range(150)})
    assert main(["compare", *pair_of(tmp_path, names), "--png", str(tmp_path / "where.png")]) == 1
    check_text("".join(capsys.readouterr()))


def test_a_terminal_without_the_characters(tmp_path):
    command = [sys.executable, "-m", "dash_attn.receipts", "compare", *pair_of(tmp_path, ["x", "größe"])]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (1, b"") and b"first: activation gr\\xf6\\xdfe\n" in done.stdout


def test_names_in_errors_and_elements(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "a\nb\x1b"
    assert main(["compare", str(folder), str(folder)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "a\\nb\\x1b" in err
    pair_of(folder, ["x\x1b[2J"])
    want = dict(step=0, kind="activation", name="x\x1b[2J", time=0, block=0)
    monkeypatch.setenv("DASH_ATTN_RECEIPTS_DUMP", json.dumps(want))
    for run, value in (("c", 1.0), ("d", 2.0)):
        with pytest.raises(SystemExit):
            record(folder / run, {"x\x1b[2J": torch.full((3,), value)})
    capsys.readouterr()
    assert main(["elements", str(folder / "c"), str(folder / "d")]) == 1
    out = capsys.readouterr().out
    check_text(out)
    assert "activation x\\x1b[2J, block 0: 3 of 3 words differ" in out


@pytest.mark.parametrize(
    "run, status", [("check one && check two", 0), ("check one; check two", 0), ("false && check", 1)]
)
def test_replay_commands_in_a_shell(tmp_path, run, status):
    """Every part of the command sees the variables, in its folder, and nothing that comes after the command does."""
    script = tmp_path / "check"
    words = '"$1" "$PWD" "$DASH_ATTN_RECEIPTS_PATH" "$DASH_ATTN_RECEIPTS_DUMP"'
    script.write_text(f"#!/bin/sh\nprintf '%s|%s|%s|%s\\n' {words}\n")
    script.chmod(0o755)
    folder = tmp_path / "a folder 'of' mine"
    folder.mkdir()
    want = replays.Wanted(3, "gradient", 'it\'s "x"', 0, 1)
    text = replays.command({"folder": str(folder), "command": "", "replay": run}, want, "/the path")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shell = [text, "echo $? ${DASH_ATTN_RECEIPTS_PATH-unset} $PWD"]
    done = subprocess.run(
        ["sh", "-c", "\n".join(shell)], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )
    *lines, last = done.stdout.splitlines()
    dumped = '{"step": 3, "kind": "gradient", "name": "it\'s \\"x\\"", "time": 0, "block": 1}'
    expected = [f"{word}|{folder}|/the path|{dumped}" for word in ("one", "two")]
    assert (lines, last) == ([] if status else expected, f"{status} unset {tmp_path}")


def test_no_part_runs_in_another_folder(tmp_path):
    want = replays.Wanted(0, "gradient", "x", 0, 0)
    text = replays.command({"folder": str(tmp_path / "gone"), "command": "", "replay": "echo a; echo b"}, want, "path")
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_for_terminals(tmp_path, capsys, monkeypatch):
    pair = pair_of(tmp_path, ["x", "y"], steps=range(30))
    assert main(["compare", pair[0], pair[0]]) == 0
    assert capsys.readouterr().err == ""
    now = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    record(tmp_path / "c", {"z": torch.ones(20)}, steps=range(26))
    for other, status, count in ((pair[0], 0, 30), (pair[1], 1, 0), (str(tmp_path / "c"), 2, 26)):
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        assert main(["compare", pair[0], other]) == status
        shown = re.findall(r"\rcomparing: (\d+) of \d+ steps", terminal.getvalue())
        assert shown == [str(step) for step in range(1, count + 1)]
        # The line is gone before anything else is printed.
        assert terminal.getvalue().count("\r\x1b[K") == 1
        assert terminal.getvalue().partition("\r\x1b[K")[2].startswith("error: " if status == 2 else "")


def test_equal_steps_are_skipped(tmp_path, monkeypatch):
    """However many there are, tensors are looked at once, and in the step that differs."""
    same, steps = {f"x{i}": torch.arange(20.0) + i for i in range(9)}, range(200)
    for name in "ab":
        record(tmp_path / name, same, steps=steps)
    with Recorder(tmp_path / "b", block=8, resume=True) as recorder, recorder.step(200):
        recorder.record(torch.zeros(3), "x0", "activation")
    with Recorder(tmp_path / "a", block=8, resume=True) as recorder, recorder.step(200):
        recorder.record(torch.ones(3), "x0", "activation")
    calls, tensors = [], Run.tensors
    monkeypatch.setattr(Run, "tensors", lambda run, rows: calls.append(run) or tensors(run, rows))
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.compared == 9 * 200 + 1 and found.first.step == 200 and len(calls) == 2 + 2 + 2


def test_the_picture_shows_every_step(tmp_path, monkeypatch):
    """More steps than columns: a column is red where one of its steps differs."""
    from dash_attn.receipts import picture

    record(tmp_path / "a", {"x": torch.ones(9), "y": torch.ones(9)}, steps=range(100))
    with Recorder(tmp_path / "b", block=8) as recorder:
        for step in range(100):
            with recorder.step(step):
                recorder.record(torch.ones(9), "x", "activation")
                recorder.record(torch.ones(9) * (2 if step in (37, 99) else 1), "y", "activation")
    monkeypatch.setattr(picture, "_MAX_COLUMNS", 7)
    with pairs_of_runs(tmp_path) as (a, b):
        order, columns, first = picture._scan(a, b, list(range(100)), None)
    rows = [[column[key] for column in columns] for key in order]
    assert rows == [[0] * 7, [0, 0, 1, 0, 0, 0, 1]] and first == (37, order[1])


def pairs_of_runs(folder):
    from dash_attn.receipts.comparison import open_runs

    return open_runs(folder / "a", folder / "b")


def test_random_steps_against_a_slow_comparison(tmp_path):
    """Which tensors differ, by sums that are compared at once, is what each tensor's own comparison says."""
    rng = random.Random(4)
    for name in "ab":
        with Recorder(tmp_path / name, block=8) as recorder:
            for step in range(60):
                with recorder.step(step):
                    for place in range(rng.choice([3, 4]) if step > 30 else 4):
                        value = rng.random() < 0.2 if name == "b" else 0
                        recorder.record(torch.full((9,), float(value)), f"x{place}", "activation")
    some = 0
    with pairs_of_runs(tmp_path) as (a, b):
        for found in pairs.compare_steps(a, b):
            of_a, of_b = a.tensors(found.rows[0]), b.tensors(found.rows[1])
            slow = {key for key in of_a.keys() & of_b.keys() if pairs.what_differs(of_a[key], of_b[key])}
            assert found.differing == slow and set(found.keys) == of_a.keys() & of_b.keys()
            some += len(slow)
    assert some > 10


def test_random_ranks_against_a_slow_comparison(tmp_path):
    """The same for three ranks, of which each has copies, parts, and tensors of its own."""
    rng, whole = random.Random(5), Shard.whole((12,))
    for name in "ab":
        for rank in range(3):
            part = Shard.along((12,), 0, (4 * rank, 4 * rank + 4))
            layout = [("copy", whole, False), ("part", part, False), ("own", whole, True), ("other", whole, False)]
            entries = [
                Entry(name_of, "weights", 0, "float32", shard, own, *block_span(shard, torch.float32, 8))
                for name_of, shard, own in layout
            ]
            meta = {"rank": str(rank), "world_size": "3", "block": "8", "folder": "/", "command": "train"}
            writer = Writer(rank_file(tmp_path / name, rank), meta)
            for step in range(150):
                of_step = entries[: 3 if step % 7 == 0 else 4]
                sums = [int(rng.random() < 0.02) for _ in of_step]
                writer.write(step, of_step, sums, b"", complete=True, forget=-1)
            writer.close()
    equal, some = 0, set()
    with pairs_of_runs(tmp_path) as (a, b):
        for found in [*pairs.compare_steps(a, b), *pairs.compare_steps(a, a)]:
            of_a = a.tensors(found.rows[0])
            of_b = of_a if found.rows[0] == found.rows[1] else b.tensors(found.rows[1])
            slow = {key: what for key in of_a if (what := pairs.what_differs(of_a[key], of_b[key]))}
            assert found.differing == slow.keys() and set(found.keys) == of_a.keys()
            some |= {(key.name, what.partition(":")[0]) for key, what in slow.items()}
            equal += not slow
    assert equal > 10 and {name for name, _ in some} == {"copy", "part", "own", "other"}
    assert ("copy", "its copies in run a") in some and ("copy", "its copies in run b") in some

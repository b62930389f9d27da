"""Receipts as files: killed writers, slow readers, second writers, read-only folders, and damage of every kind."""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import sqlite3
import tempfile
import threading
import time

import pytest
import torch
from receipts_support import STEPS, Plant, train

from dash_attn.receipts import Recorder, Shard, compare, receipt, store
from dash_attn.receipts.__main__ import main
from dash_attn.receipts.runs import Run
from dash_attn.receipts.store import Entry, Writer, pack, rank_file, row_crc

META = {"rank": "0", "world_size": "1", "block": "8", "folder": "/", "command": "train"}
FILE = "rank_00000.sqlite"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run in which nothing is planted, and one in which a gradient differs from step 2 on."""
    path = tmp_path_factory.mktemp("runs")
    train(path / "clean")
    train(path / "planted", Plant("gradient"))
    return path


def in_child(function):
    """The exit status of a process that calls `function`; 100 where it raises."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(100)
    return child


def steps_of(folder):
    with contextlib.closing(Run(folder)) as run:
        return run.steps


def write_steps(folder, steps, **options):
    """Steps of 40 tensors with large blocks, so that commits take as long as they can."""
    entries = [Entry(f"layer.{i}", "weights", 0, "float32", Shard.whole((800,)), False, 0, 100) for i in range(40)]
    blocks = pack("q", [1] * 4000)
    writer = Writer(rank_file(folder, 0), META, **options)
    for step in steps:
        writer.write(step, entries, [100] * 40, blocks, complete=True, forget=step - 5)
    writer.close()


def status_of_compare(a, b, capsys):
    """The exit status, and the one line of the error, if there is one."""
    capsys.readouterr()
    status = main(["compare", str(a), str(b)])
    err = capsys.readouterr().err
    assert (status == 2) == bool(err) and err.count("\n") <= 1, err
    return status, err


def test_killed_at_any_time(tmp_path, capsys):
    """What a killed process leaves is whole steps; they can be read where they are, and gone on with."""
    write_steps(tmp_path / "whole", range(300))
    rng, sizes, turn = random.Random(0), set(), 0
    # Later and later, until enough runs have got far enough, however slow the machine is.
    while turn < 20 or len(sizes) <= 10 or max(sizes) <= 5:
        turn += 1
        assert turn < 200, f"runs that were killed have {sorted(sizes)} steps"
        folder = tmp_path / f"killed_{turn}"
        child = in_child(lambda: write_steps(folder, range(100_000)))
        while not rank_file(folder, 0).exists():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01 * turn))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        files = sorted(file.name for file in folder.iterdir())
        try:
            steps = len(steps_of(folder))
        except ValueError as error:  # so early that there is no table
            assert "no such table: meta" in str(error) or "its format is None" in str(error)
        else:
            sizes.add(steps)
            assert not steps or status_of_compare(tmp_path / "whole", folder, capsys)[0] == (0 if steps == 300 else 3)
            assert sorted(file.name for file in folder.iterdir()) == files
        write_steps(folder, range(300), resume=True)
        assert status_of_compare(tmp_path / "whole", folder, capsys) == (0, "")


def with_hot_journal(source, folder):
    """A copy of a receipt whose writer died in the middle of a commit under a rollback journal."""
    shutil.copytree(source, folder / "before")
    database = sqlite3.connect(folder / "before" / FILE, isolation_level=None)
    database.execute("PRAGMA cache_size = 1")
    database.execute("BEGIN")
    database.execute("UPDATE step SET sums = zeroblob(30000)")
    database.execute("UPDATE blocks SET sums = zeroblob(30000)")
    shutil.copytree(folder / "before", folder / "after")
    database.close()
    assert (folder / "after" / f"{FILE}-journal").stat().st_size > 1000
    return folder / "after"


def test_a_hot_journal(runs, tmp_path, capsys):
    """The old content is read, and nothing is written beside it."""
    killed = with_hot_journal(runs / "clean", tmp_path)
    before = {file.name: file.read_bytes() for file in killed.iterdir()}
    assert status_of_compare(runs / "clean", killed, capsys) == (0, "")
    assert {file.name: file.read_bytes() for file in killed.iterdir()} == before


def copy_while_open(folder, target):
    """The files of a recorder that is still open, without its shared memory."""
    recorder = Recorder(folder, block=8)
    for step in range(3):
        with recorder.step(step, data=torch.arange(20)):
            pass
    while len(steps_of(folder)) < 3:
        time.sleep(0.01)
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*-shm"))
    recorder.close()
    assert (target / f"{FILE}-wal").stat().st_size > 0
    assert sorted(file.name for file in folder.iterdir()) == ["rank_00000.lock", FILE]


@pytest.mark.parametrize("what", ["closed", "log", "journal"])
def test_a_folder_in_which_nothing_can_be_written(runs, tmp_path, what):
    """Of a run that ended, and of runs that were killed; the superuser may write anywhere, so somebody else reads."""
    with tempfile.TemporaryDirectory() as outer:
        folder = pathlib.Path(outer, "run")
        if what == "closed":
            shutil.copytree(runs / "clean", folder)
        elif what == "log":
            copy_while_open(tmp_path / "run", folder)
        else:
            shutil.copytree(with_hot_journal(runs / "clean", tmp_path), folder)
        os.chmod(outer, 0o755)
        for file in folder.iterdir():
            file.chmod(0o444)
        folder.chmod(0o555)
        scratch = pathlib.Path(outer, "scratch")  # TMPDIR may be one that others cannot write to
        scratch.mkdir()
        scratch.chmod(0o777)

        def read():
            tempfile.tempdir = str(scratch)
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            with pytest.raises(OSError):
                (folder / "new").touch()
            found = compare(folder, folder)
            assert found.first is None and len(found.steps) == (3 if what == "log" else STEPS)

        assert os.waitpid(in_child(read), 0)[1] == 0
        folder.chmod(0o755)


def test_a_reader_does_not_stop_the_writer(tmp_path):
    """One that reads a step for as long as the training takes, and one that reads it all when it is over."""
    recorder = Recorder(tmp_path / "run", block=8)
    with recorder.step(0, data=torch.ones(3)):
        pass
    while not steps_of(tmp_path / "run"):
        time.sleep(0.01)
    database = sqlite3.connect(tmp_path / "run" / FILE, isolation_level=None)
    database.execute("BEGIN")
    assert database.execute("SELECT count(*) FROM step").fetchone() == (1,)
    began = time.monotonic()
    for step in range(1, 50):
        with recorder.step(step, data=torch.ones(3)):
            pass
    recorder.close()
    assert time.monotonic() - began < store.LOCK_WAIT_S, "the writer has waited for the reader's lock"
    assert database.execute("SELECT count(*) FROM step").fetchone() == (1,)
    assert len(steps_of(tmp_path / "run")) == 50
    database.close()
    assert len(steps_of(tmp_path / "run")) == 50


def test_a_locked_file_is_called_locked(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(receipt, "LOCK_WAIT_S", 0.1)
    shutil.copytree(runs / "clean", tmp_path / "run")
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / FILE, isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        status, err = status_of_compare(runs / "clean", tmp_path / "run", capsys)
        assert (
            status == 2
            and "rank_00000.sqlite" in err
            and "another process has kept the file locked for more than 0.1 seconds" in err
        )


def test_resuming_waits_for_readers(runs, tmp_path, monkeypatch):
    """A reader has a lock on a closed receipt, for as long as it reads."""
    shutil.copytree(runs / "clean", tmp_path / "run")
    with contextlib.closing(
        sqlite3.connect(tmp_path / "run" / FILE, check_same_thread=False, isolation_level=None)
    ) as database:
        database.execute("BEGIN")
        database.execute("SELECT * FROM step").fetchall()
        monkeypatch.setattr(store, "LOCK_WAIT_S", 0.1)
        message = f"no other process has locked, got .*{FILE}, which has been locked for more than 0.1 seconds: close"
        with pytest.raises(ValueError, match=message):
            Recorder(tmp_path / "run", block=8, resume=True)
        monkeypatch.undo()
        timer = threading.Timer(6, database.execute, ["COMMIT"])  # later than SQLite's default of 5 s
        timer.start()
        Recorder(tmp_path / "run", block=8, resume=True).close()
        timer.join()


def test_a_lock_file_with_content(tmp_path):
    (tmp_path / "rank_00000.lock").write_bytes(b"no database" * 1000)
    with pytest.raises(ValueError, match="whose .lock files are empty, got .*rank_00000.lock: file is not a database"):
        Recorder(tmp_path, block=8)


def test_a_second_writer_is_refused(tmp_path):
    """In this process, in another, and not once the first is gone; a child of the first does not keep it out."""
    message = "path must be a folder that no other recorder writes to, got .*: another recorder has rank_00000.sqlite"
    recorder = Recorder(tmp_path, block=8)
    with pytest.raises(ValueError, match=message):
        Recorder(tmp_path, block=8, resume=True)

    def another():
        with pytest.raises(ValueError, match=message):
            Recorder(tmp_path, block=8, resume=True)

    assert os.waitpid(in_child(another), 0)[1] == 0
    asleep = in_child(lambda: time.sleep(60))
    try:
        with recorder.step(0, data=torch.ones(3)):
            pass
        recorder.close()
        with Recorder(tmp_path, block=8, resume=True) as recorder, recorder.step(1, data=torch.ones(3)):
            pass
    finally:
        os.kill(asleep, signal.SIGKILL)
        os.waitpid(asleep, 0)
    assert steps_of(tmp_path) == [0, 1]


def test_a_rank_that_is_there_twice(runs, tmp_path):
    shutil.copytree(runs / "clean", tmp_path / "run")
    shutil.copy(tmp_path / "run" / FILE, tmp_path / "run" / "rank_00001.sqlite")
    with pytest.raises(ValueError, match="rank_00001.sqlite is the receipt of rank 0 of 1"):
        compare(tmp_path / "run", runs / "clean")


def edited(source, folder, *statements):
    """A copy of a receipt after some SQL."""
    shutil.copytree(source, folder)
    with contextlib.closing(sqlite3.connect(folder / FILE, isolation_level=None)) as database:
        for statement in statements:
            database.execute(*statement) if isinstance(statement, tuple) else database.execute(statement)
    return folder


def test_blocks_that_contradict_their_sum(runs, tmp_path, capsys):
    """A sum with a checksum of its own, as if it had been wrong before it was written."""
    with contextlib.closing(sqlite3.connect(runs / "clean" / FILE)) as database:
        *row, sums, _ = database.execute("SELECT * FROM step WHERE step = 1").fetchone()
    row = (*row, sums[:24] + bytes([sums[24] ^ 4]) + sums[25:])
    change = ("UPDATE step SET sums = ?, crc = ? WHERE step = 1", (row[-1], row_crc("step", row)))
    status, err = status_of_compare(runs / "clean", edited(runs / "clean", tmp_path / "run", change), capsys)
    assert status == 2 and f"run/{FILE} cannot be read" in err and "in step 1 do not add up to its sum" in err


@pytest.mark.parametrize(
    "statement, message",
    [
        ("UPDATE step SET sums = zeroblob(length(sums)) WHERE step = 3", "table step does not match its checksum"),
        ("UPDATE step SET sums = NULL", "table step does not match its checksum"),
        ("UPDATE step SET complete = 0", "table step does not match its checksum"),
        ("UPDATE step SET step = step + 10", "table step does not match its checksum"),
        ("UPDATE tensor SET name = 'other' WHERE id = 3", "table tensor does not match its checksum"),
        ("UPDATE tensor SET ranges = '['", "table tensor does not match its checksum"),
        ("UPDATE sequence SET tensors = zeroblob(length(tensors))", "table sequence does not match its checksum"),
        ("UPDATE meta SET value = 'x' WHERE key = 'rank'", "table meta does not match its checksum"),
        ("UPDATE meta SET value = '1' WHERE key = 'format'", "its format is 1, but this version of dash_attn reads 2"),
        ("DELETE FROM sequence", "sequence 0 is missing"),
        ("DELETE FROM tensor WHERE id = 3", "3"),
        ("DELETE FROM meta WHERE key = 'folder'", "its table meta lacks folder"),
        ("DELETE FROM meta", "its format is None"),
        ("DROP TABLE meta", "no such table: meta"),
        ("DROP TABLE step", "no such table: step"),
        ("DROP TABLE sequence", "no such table: sequence"),
        ("DROP TABLE tensor", "no such table: tensor"),
        ("ALTER TABLE step DROP COLUMN crc", "table step does not match its checksum"),
    ],
)
def test_rows_that_are_wrong(runs, tmp_path, capsys, statement, message):
    """A status of 2, and one line that names the file."""
    wrong = edited(runs / "clean", tmp_path / "wrong", statement)
    for pair in ((runs / "clean", wrong), (wrong, runs / "clean")):
        status, err = status_of_compare(*pair, capsys)
        assert status == 2 and f"{wrong / FILE} cannot be read as a receipt: " in err and message in err


def test_a_tensor_of_no_dtype(runs, tmp_path, capsys):
    """Its row has a checksum of its own, as if it had been wrong before it was written."""
    with contextlib.closing(sqlite3.connect(runs / "clean" / FILE)) as database:
        row = list(database.execute("SELECT * FROM tensor WHERE id = 0").fetchone()[:-1])
    row[5] = "nn"
    change = ("UPDATE tensor SET dtype = 'nn', crc = ? WHERE id = 0", (row_crc("tensor", row),))
    status, err = status_of_compare(runs / "clean", edited(runs / "clean", tmp_path / "run", change), capsys)
    assert status == 2 and f"run/{FILE} cannot be read as a receipt: a tensor entry is invalid: Entry(" in err


def test_tables_of_blocks_are_read_where_runs_differ(runs, tmp_path, capsys):
    for name, statement, message in (
        ("zeros", "UPDATE blocks SET sums = zeroblob(length(sums))", "table blocks does not match its checksum"),
        ("none", "DROP TABLE blocks", "no such table: blocks"),
    ):
        wrong = edited(runs / "planted", tmp_path / name, statement)
        status, err = status_of_compare(runs / "clean", wrong, capsys)
        assert status == 2 and f"{wrong / FILE} cannot be read as a receipt: " in err and message in err


def test_files_that_are_none(runs, tmp_path, capsys):
    for name, content in (("empty", b""), ("short", b"SQLite format 3\0"), ("text", b"no database" * 1000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_bytes(content)
        status, err = status_of_compare(runs / "clean", tmp_path / name, capsys)
        assert status == 2 and str(tmp_path / name / FILE) in err
    (tmp_path / "folder" / FILE).mkdir(parents=True)
    assert status_of_compare(runs / "clean", tmp_path / "folder", capsys)[0] == 2


def damage(rng, content):
    """Some bytes flipped, a stretch that is zeros or noise or is gone, or the end cut off."""
    content = bytearray(content)
    start = rng.randrange(len(content))
    stop = min(len(content), start + rng.choice([1, 16, 512, 4096]))
    kind = rng.randrange(8)
    if kind < 4:
        for _ in range(rng.choice([1, 1, 2, 10])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == 4:
        content[start:stop] = bytes(stop - start)
    elif kind == 5:
        content[start:stop] = rng.randbytes(stop - start)
    elif kind == 6:
        del content[start:stop]
    else:
        del content[start:]
    return bytes(content)


def test_random_damage(runs, tmp_path, capsys):
    """A damaged file is an error or has the result of the undamaged one, which does not depend on where it is."""

    def result(folder):
        status = main(["compare", str(runs / "clean"), str(folder), "--json"])
        out, err = capsys.readouterr()
        if status != 2:
            return status, out.replace(str(folder), "")
        assert str(folder) in err and err.count("\n") == 1 and not out, err
        return status, None

    rng, found = random.Random(1), {0: 0, 1: 0, 2: 0}
    for name in ("clean", "planted"):
        folder = tmp_path / name
        shutil.copytree(runs / name, folder)
        content, expected = (folder / FILE).read_bytes(), result(folder)
        for _ in range(250):
            (folder / FILE).write_bytes(damage(rng, content))
            status, out = result(folder)
            assert status == 2 or (status, out) == expected
            found[status] += 1
    assert found[2] > 200 and found[0] + found[1] > 10, found


def test_random_damage_of_a_log(tmp_path, capsys):
    """What the log of a killed process has lost is steps of the end, or the file."""
    copy_while_open(tmp_path / "run", tmp_path / "copy")
    log = tmp_path / "copy" / f"{FILE}-wal"
    content, rng = log.read_bytes(), random.Random(2)
    for _ in range(60):
        log.write_bytes(damage(rng, content))
        assert status_of_compare(tmp_path / "run", tmp_path / "copy", capsys)[0] in (0, 2, 3)


def test_resuming_what_is_damaged(runs, tmp_path):
    for name, statement, message in (
        ("tensor", "UPDATE tensor SET name = 'x' WHERE id = 1", "damaged: a row of its table tensor does not"),
        ("no_text", "UPDATE tensor SET name = CAST(x'ff' AS TEXT)", "damaged: a row of its table tensor does"),
        ("rank", "UPDATE meta SET value = 1 WHERE key = 'rank'", "receipts whose rank is 0, got .* with 1"),
        ("format", "UPDATE meta SET value = 1 WHERE key = 'format'", "receipts whose format is 2, got .* with 1"),
        ("no_meta", "DROP TABLE meta", f"got .*no_meta/{FILE}, whose tables are not of format 2"),
        ("no_blocks", "DROP TABLE blocks", f"got .*no_blocks/{FILE}, whose tables are not of format 2"),
        ("no_crc", "ALTER TABLE step DROP COLUMN crc", f"got .*no_crc/{FILE}, whose tables are not of format 2"),
    ):
        wrong = edited(runs / "clean", tmp_path / name, statement)
        with pytest.raises(ValueError, match=message):
            Recorder(wrong, block=8, resume=True)
    wrong = edited(runs / "clean", tmp_path / "no_page")
    with contextlib.closing(sqlite3.connect(wrong / FILE)) as database:
        (page,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'step'").fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    with (wrong / FILE).open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(bytes(size))
    with pytest.raises(ValueError, match=f"got .*no_page/{FILE}, damaged: Page {page}"):
        Recorder(wrong, block=8, resume=True)
    (wrong / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(
        ValueError, match="that can be continued, got .*, which is not a receipt: file is not a database"
    ):
        Recorder(wrong, block=8, resume=True)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Recorder(tmp_path / "file" / "run", block=8)


def test_random_damage_of_a_replays_block(runs, tmp_path, capsys, monkeypatch):
    want = dict(step=2, kind="gradient", name="layers.1.weight", time=0, block=2)
    monkeypatch.setenv("DASH_ATTN_RECEIPTS_DUMP", json.dumps(want))
    for name, plant in (("a", None), ("b", Plant("gradient"))):
        with pytest.raises(SystemExit):
            train(tmp_path / name, plant)
    arguments = ["elements", str(tmp_path / "a"), str(tmp_path / "b")]
    capsys.readouterr()
    assert main(arguments) == 1
    expected, file, rng = capsys.readouterr().out, tmp_path / "b" / "block_00000.pt", random.Random(3)
    content, errors = file.read_bytes(), 0
    for _ in range(150):
        file.write_bytes(damage(rng, content))
        status = main(arguments)
        out, err = capsys.readouterr()
        assert (status, out) in ((1, expected), (2, ""))
        if status == 2:
            assert f"{file} cannot be read as the block of a replay: " in err and err.count("\n") == 1
            errors += 1
    assert errors > 50
    torch.save({"step": 2}, file)
    assert main(arguments) == 2 and "it lacks block, dtype" in capsys.readouterr().err

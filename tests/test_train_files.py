"""What a run of examples/train.py leaves on the disk: a damaged checkpoint is named and not used, and a kill
leaves each file as it was or as it is to be."""

import json
import pathlib
import re
import sys

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

import train_report  # noqa: E402
from training import checkpoints, files, report, safe_files  # noqa: E402

CONFIG = {"ranks": 1, "seed": 0}


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_and_optimizer(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(37, 11), torch.nn.Linear(11, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 37)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def numbers(model, optimizer):
    return [*model.parameters(), *(x for state in optimizer.state.values() for x in state.values())]


@pytest.fixture
def saved(group, tmp_path):
    """A folder with the checkpoints 2, 4 and 6, and what each of them holds."""
    kept = {}
    for step in (2, 4, 6):
        kept[step] = model_and_optimizer(step)
        checkpoints.save(tmp_path / "checkpoints", step, *kept[step])
    return tmp_path / "checkpoints", kept


def resumed(root, at_most=sys.maxsize):
    """The step of the checkpoint that is taken, and the numbers that it gives."""
    trained = model_and_optimizer(99)
    step = checkpoints.load_last(root, at_most, *trained)
    return step, numbers(*trained)


def same(a, b):
    return all(x.equal(y) for x, y in zip(a, b, strict=True))


def names_of(root):
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_gives_what_was_saved(saved):
    root, kept = saved
    for at_most, step in ((sys.maxsize, 6), (6, 6), (5, 4), (2, 2)):
        found, of_step = resumed(root, at_most)
        assert found == step and same(of_step, numbers(*kept[step]))
    assert resumed(root, 1)[0] == 0 and resumed(root / "nowhere")[0] == 0
    assert names_of(root) == ["step_00000002", "step_00000004", "step_00000006"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_flipped_bit_is_found_wherever_it_is(saved, capsys, name):
    root, kept = saved
    path = root / "step_00000006" / name
    content = path.read_bytes()
    generator = torch.Generator().manual_seed(1)
    places = torch.randint(8 * len(content), (25,), generator=generator).tolist()
    for place in [0, 8 * len(content) - 1, *places]:
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        step, found = resumed(root)
        assert step == 4 and same(found, numbers(*kept[4]))
        said = capsys.readouterr().err
        assert f"warning: skipped the damaged checkpoint {path.parent}: {name} does not match" in said
    path.write_bytes(content)
    assert resumed(root)[0] == 6 and not capsys.readouterr().err


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "name, harm, message",
    [
        ("__0_0.distcp", cut, r"__0_0.distcp has \d+ of its \d+ bytes"),
        (".metadata", cut, r".metadata has \d+ of its \d+ bytes"),
        (".metadata", lambda path: path.write_bytes(b""), ".metadata has 0 of its"),
        ("__0_0.distcp", pathlib.Path.unlink, "__0_0.distcp is missing"),
        ("fingerprints.json", cut, "JSONDecodeError: "),
        ("fingerprints.json", pathlib.Path.unlink, "FileNotFoundError: .*fingerprints.json"),
        ("fingerprints.json", lambda path: path.write_text("[]"), "TypeError: "),
        ("another", pathlib.Path.touch, "another is not one of its files"),
        (
            "fingerprints.json",
            lambda path: path.write_text(path.read_text().replace("dash-attn-", "other-")),
            "its fingerprints are other-",
        ),
    ],
)
def test_the_checkpoint_before_a_damaged_one_is_taken(saved, capsys, name, harm, message):
    root, kept = saved
    harm(root / "step_00000006" / name)
    step, found = resumed(root)
    assert step == 4 and same(found, numbers(*kept[4]))
    assert re.search(f"step_00000006: {message}", capsys.readouterr().err)


def test_ranks_may_see_files_late(tmp_path):
    run_ranks("train_worker.py", 2, tmp_path, "two_late_listing")
    assert names_of(tmp_path / "step_00000002") == [".metadata", "__0_0.distcp", "__1_0.distcp", "fingerprints.json"]


def test_without_an_undamaged_checkpoint_nothing_is_loaded(saved):
    root, _ = saved
    for folder in root.iterdir():
        cut(folder / "__0_0.distcp")
    trained = model_and_optimizer(99)
    before = [x.clone() for x in numbers(*trained)]
    message = r"--resume found no undamaged checkpoint in '.*': steps \[4, 2\] are all damaged; use --resume 0 to start"
    with pytest.raises(ValueError, match=message):
        checkpoints.load_last(root, 5, *trained)
    assert same(numbers(*trained), before)
    assert resumed(root, 0)[0] == 0


def test_a_save_that_is_interrupted_leaves_no_checkpoint(saved, monkeypatch):
    root, kept = saved

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "_file_fingerprint", stop)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(root, 8, *kept[2])
    monkeypatch.undo()
    assert "partial_step_00000008" in names_of(root) and resumed(root)[0] == 6
    checkpoints.drop_after(root, 6)
    assert names_of(root) == ["step_00000002", "step_00000004", "step_00000006"]


def test_dropping_that_is_interrupted_leaves_one_history(saved, monkeypatch):
    """Whichever checkpoints are left begin with the first ones. Once more it goes through."""
    root, _ = saved
    rename, calls = pathlib.Path.rename, []

    def once(self, target):
        calls.append(target)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", once)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.drop_after(root, 2)
    monkeypatch.undo()
    assert names_of(root) == ["dropped_step_00000006", "step_00000002", "step_00000004"]
    checkpoints.drop_after(root, 2)
    assert names_of(root) == ["dropped_step_00000004", "dropped_step_00000006", "step_00000002"]
    # Dropped once more, a checkpoint takes the place of the one of its step that was dropped before.
    checkpoints.save(root, 4, *model_and_optimizer(7))
    checkpoints.drop_after(root, 0)
    names = ["dropped_step_00000002", "dropped_step_00000004", "dropped_step_00000006"]
    assert names_of(root) == names and resumed(root)[0] == 0


def begun(folder, start, rank=0, config=CONFIG):
    return files.Files(folder, rank, start, config, lambda *_: None)


@pytest.fixture
def left(tmp_path):
    """The folder of a run of five steps, of two ranks."""
    (tmp_path / "times").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"ranks": 2}))
    (tmp_path / "losses.txt").write_text("".join(f"{step} 0x1p+{step} 1.0\n" for step in range(5)))
    for rank in (0, 1):
        lines = (json.dumps({"step": step, "seconds": 1.0}) + "\n" for step in range(5))
        (tmp_path / "times" / f"rank_{rank:05d}.jsonl").write_text("".join(lines))
    return tmp_path


def steps_in(folder):
    """The steps in losses.txt, and in the times of the ranks 0 and 1."""
    found = [[int(line.split()[0]) for line in (folder / "losses.txt").read_text().splitlines()]]
    for path in sorted((folder / "times").iterdir()):
        if path.suffix == ".jsonl":
            found.append([json.loads(line)["step"] for line in path.read_text().splitlines()])
    return found


def test_going_on_keeps_the_steps_before(left):
    """Also of ranks that the run has no more: with more ranks again they would be of another history."""
    begun(left, 3)
    assert steps_in(left) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("moment", range(8))
def test_a_kill_loses_no_line(left, monkeypatch, moment):
    """At the first, second and so on of the moments at which something gets to the disk."""
    fsync, calls = safe_files.os.fsync, []

    def fatal(handle):
        calls.append(handle)
        if len(calls) > moment:
            raise KeyboardInterrupt
        fsync(handle)

    monkeypatch.setattr(safe_files.os, "fsync", fatal)
    with pytest.raises(KeyboardInterrupt):
        begun(left, 3)
    monkeypatch.undo()
    assert all(steps in ([0, 1, 2], [0, 1, 2, 3, 4]) for steps in steps_in(left))
    assert json.loads((left / "config.json").read_text())["ranks"] in (1, 2)
    begun(left, 3)
    assert steps_in(left) == [[0, 1, 2]] * 3


def test_lines_that_are_cut_or_damaged(left):
    losses = left / "losses.txt"
    whole = losses.read_text()
    losses.write_text(whole + "5 0x1p")
    assert steps_in_after(left, 9) == [0, 1, 2, 3, 4]
    losses.write_text(whole.replace("2 0x", "\0\0\0\0"))
    with pytest.raises(ValueError, match="losses.txt' must have lines of steps, got a damaged line 3: "):
        begun(left, 4)
    times = left / "times" / "rank_00000.jsonl"
    times.write_text(times.read_text() + "[3]\n")
    with pytest.raises(ValueError, match="rank_00000.jsonl' must have lines of steps, got a damaged line 5: "):
        report.read(left, 0)


def steps_in_after(folder, start):
    begun(folder, start)
    return steps_in(folder)[0]


@pytest.mark.parametrize("content", ['{"ranks": 2, "se', "", "[1]"])
def test_a_damaged_config(left, content, capsys):
    (left / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config.json' must be a JSON object .*, got a damaged file .*; restore it"):
        files.check_config(left, CONFIG, resume=True)
    assert train_report.main([str(left)]) == 2
    assert "config.json' must be a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["losses.txt", "checkpoints", "config.json"])
def test_a_run_that_is_there_is_not_written_over(left, name):
    """Whatever of it is there."""
    (left / "checkpoints").mkdir()
    for path in [left / other for other in ("losses.txt", "config.json") if other != name]:
        path.unlink()
    if name != "checkpoints":
        (left / "checkpoints").rmdir()
    with pytest.raises(FileExistsError, match="--out must be a folder without a run"):
        files.check_config(left, CONFIG, resume=False)

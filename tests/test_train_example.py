"""examples/train.py on gloo processes: a run repeats byte by byte, killed and resumed too; attention has the same bits
on every layout; what does not repeat, and who is slow, is found."""

import gc
import gzip
import json
import pathlib
import shutil
import sys

import pytest
import torch
from global_settings import VARIABLE, global_settings, settings_put_back
from rank_processes import run_ranks

from dash_attn.receipts import compare
from dash_attn.receipts.__main__ import main as receipts

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

import train  # noqa: E402
import train_proof  # noqa: E402
import train_report  # noqa: E402
from train_worker import CHECKPOINT_EVERY, KILLED_IN, STEPS, TINY  # noqa: E402
from training import flops, ordered, report  # noqa: E402
from training.clock import Clock  # noqa: E402
from training.files import check_config  # noqa: E402
from training.layout import Layout  # noqa: E402
from training.text import Text  # noqa: E402


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs; `killed.log` has what the ranks said of which one was killed."""
    folder = tmp_path_factory.mktemp("runs")
    logs = run_ranks("train_worker.py", 2, folder, "two", must_succeed=False)
    (folder / "killed.log").write_text("\n".join(logs))
    shutil.copytree(folder / "killed", folder / "as_it_was_killed")
    shutil.copytree(folder / "two_again", folder / "half")
    run_ranks("train_worker.py", 2, folder, "two_killed_in_checkpoint", must_succeed=False)
    shutil.copytree(folder / "half", folder / "half_as_it_was_killed")
    run_ranks("train_worker.py", 2, folder, "two_resumed")
    shutil.copytree(folder / "two", folder / "two_moved", ignore=shutil.ignore_patterns("receipts"))
    run_ranks("train_worker.py", 1, folder, "one")
    shutil.copytree(folder / "one", folder / "branch")
    run_ranks("train_worker.py", 1, folder, "one_branch", must_succeed=False)
    shutil.copytree(folder / "branch", folder / "branch_as_it_was_killed")
    (folder / "branch.log").write_text("\n".join(run_ranks("train_worker.py", 1, folder, "one_branch_resumed")))
    run_ranks("train_worker.py", 4, folder, "four")
    return folder


def same(runs, one, other):
    """Whether the command finds no receipt that differs."""
    return receipts(["compare", *(str(runs / name / "receipts") for name in (one, other))]) == 0


def losses(runs, name):
    return (runs / name / "losses.txt").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name, steps", [("one", STEPS), ("two", STEPS), ("four", 1)])
def test_the_same_run_twice(runs, name, steps, capsys):
    assert losses(runs, name) == losses(runs, f"{name}_again") and len(losses(runs, name).splitlines()) == steps
    assert same(runs, name, f"{name}_again")
    out = capsys.readouterr().out
    assert f"records of {steps} steps" in out and "not compared" not in out


@pytest.mark.slow
def test_the_loss_falls(runs):
    values = [float.fromhex(line.split()[1]) for line in losses(runs, "one").decode().splitlines()]
    assert values[-1] < values[0] < 6  # about log 256 at the beginning
    # Other layouts add in other orders, and nothing else is different.
    others = [float.fromhex(line.split()[1]) for line in losses(runs, "two").decode().splitlines()]
    assert values == pytest.approx(others, rel=1e-3)


@pytest.mark.slow
def test_killed_and_resumed(runs, capsys):
    before = losses(runs, "as_it_was_killed")
    assert before != losses(runs, "two") and losses(runs, "two").startswith(before)
    assert before.count(b"\n") >= CHECKPOINT_EVERY and (runs / "as_it_was_killed/checkpoints/step_00000002").exists()
    assert f"rank 0 failed in step {KILLED_IN}, " in (runs / "killed.log").read_text()
    assert losses(runs, "killed") == losses(runs, "two")
    assert same(runs, "killed", "two") and f"of {STEPS} steps" in capsys.readouterr().out
    for name in ("two", "killed"):
        lines = (runs / name / "times" / "rank_00001.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(STEPS))


@pytest.mark.slow
def test_a_kill_after_a_resume_loses_no_line(runs):
    """Also where the steps up to the kill have not been handed to the disk by a checkpoint."""
    folder = runs / "branch_as_it_was_killed"
    before = losses(runs, "one").splitlines()
    lines = losses(runs, "branch_as_it_was_killed").splitlines()
    assert lines[:CHECKPOINT_EVERY] == before[:CHECKPOINT_EVERY]
    assert [int(line.split()[0]) for line in lines] in ([0, 1], [0, 1, 2])
    times = (folder / "times" / "rank_00000.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in times] in ([0, 1], [0, 1, 2])
    assert json.loads((folder / "config.json").read_text())["attention"] == "noisy"


def checkpoints_of(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.slow
def test_resuming_from_a_step_drops_later_checkpoints(runs):
    """What goes on after a kill is the new history, not the end of the old one."""
    assert checkpoints_of(runs / "one") == ["step_00000002", "step_00000004"]
    assert checkpoints_of(runs / "branch_as_it_was_killed") == ["dropped_step_00000004", "step_00000002"]
    assert ", from step 2: " in (runs / "branch.log").read_text()
    assert checkpoints_of(runs / "branch") == [
        "dropped_step_00000004", "step_00000002", "step_00000004", "step_00000006"
    ]  # fmt: skip
    old, new = losses(runs, "one").splitlines(), losses(runs, "branch").splitlines()
    assert new[:3] == old[:3] and new[3] != old[3] and len(new) == STEPS + 2


@pytest.mark.slow
def test_a_rank_killed_in_a_checkpoint_leaves_no_checkpoint(runs):
    partial = ["dropped_step_00000004", "partial_step_00000004", "step_00000002"]
    assert checkpoints_of(runs / "half_as_it_was_killed") == partial
    assert checkpoints_of(runs / "half") == ["dropped_step_00000004", "step_00000002", "step_00000004"]
    assert losses(runs, "half") == losses(runs, "two")


@pytest.mark.slow
def test_a_run_moves_to_another_number_of_processes(runs):
    """With the weights that it had: the steps before are kept, and the next one's loss goes on from there."""
    lines = losses(runs, "two_moved").decode().splitlines()
    assert len(lines) == STEPS + 1 and "\n".join(lines[:STEPS]) + "\n" == losses(runs, "two").decode()
    assert float(lines[-1].split()[2]) < float(lines[0].split()[2])


@pytest.mark.slow
@pytest.mark.parametrize("other", ["slow", "two", "four"])
def test_attention_has_the_same_bits_on_every_layout(runs, other):
    """Of equal inputs: one process, two with a half of the sequences each, two and four that share sequences."""
    found = compare(runs / "one" / "probe", runs / other / "probe")
    assert found.first is None and not found.not_compared and found.compared == 2 * (4 + 4)


@pytest.mark.slow
def test_attention_that_is_not_deterministic_parts(runs, capsys):
    assert losses(runs, "noisy") == losses(runs, "noisy_again")  # of the first step, before any gradient
    assert receipts(["compare", str(runs / "noisy/receipts"), str(runs / "noisy_again/receipts")]) == 1
    out = capsys.readouterr().out
    assert "the runs first differ in step 0\n  first: activation_gradient layers.1.attention.q\n" in out
    assert "likely cause: backward" in out
    # Nor is it dash_attn's, of which only this gradient's last bits are other ones.
    first = compare(runs / "one" / "receipts", runs / "noisy" / "receipts").first
    assert (first.key.kind, first.key.name) == ("activation_gradient", "layers.1.attention.q")


@pytest.mark.slow
def test_a_step_is_replayed_beside_its_run(runs):
    assert len(losses(runs, "noisy").splitlines()) == 1 and not (runs / "noisy" / "checkpoints").exists()
    block = torch.load(runs / "replay" / "block_00000.pt")
    assert block["name"] == "layers.1.attention.q" and block["words"].numel() == 4 * 48 * 4 * 8
    first = compare(runs / "noisy" / "receipts", runs / "replay").first
    assert first.key.name == "layers.1.attention.q" and "--resume 0" in first.replay[0]


@pytest.mark.slow
def test_receipts_say_what_was_run(runs):
    found = compare(runs / "one" / "receipts", runs / "noisy" / "receipts")
    assert found.facts == {"attention": ('"dash_attn"', '"noisy"')}
    config = json.loads((runs / "one" / "config.json").read_text())
    assert config["text_sha256"] == Text().sha256 and "lib/python" in config["text"]


@pytest.mark.slow
def test_a_slow_rank_is_named(runs, capsys, tmp_path):
    assert train_report.main([str(runs / "slow"), "--skip", "1"]) == 0
    out = capsys.readouterr().out
    for region in ("attention", "mlp"):
        assert f"rank 1 is slow: its {region} takes " in out
    assert "rank 0 is slow" not in out
    pytest.importorskip("matplotlib")
    assert train_report.main([str(runs / "slow"), "--skip", "1", "--png", str(tmp_path / "map.png")]) == 0
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert train_report.main([str(runs / "slow"), "--skip", "9"]) == 2
    assert "of more than 9 steps" in capsys.readouterr().err


def test_a_gpu_that_is_slowed_now_and_then_is_named(tmp_path):
    """In every third step, which no median shows."""
    config = {"ranks": 2, "context": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "times").mkdir()
    for rank in (0, 1):
        of_steps = []
        for step in range(12):
            ms = 3.0 if rank == 1 and step % 3 == 0 else 1.0
            regions = ("attention forward", "attention backward", "mlp forward", "mlp backward")
            of_steps.append(json.dumps({"step": step, "seconds": 1.0, **{name: [ms, ms] for name in regions}}))
        (tmp_path / "times" / f"rank_{rank:05d}.jsonl").write_text("\n".join(of_steps) + "\n")
    slow = report.slow_ranks(report.read(tmp_path, skip=0))
    assert sorted((rank, region) for rank, region, _ in slow) == [(1, "attention"), (1, "mlp")]
    assert all(abs(ratio - 5 / 3) < 1e-9 for *_, ratio in slow)


@pytest.mark.slow
def test_waiting_is_not_blamed_on_attention(runs, capsys):
    """Ranks that share a sequence wait for each other inside of attention."""
    train_report.main([str(runs / "two"), "--skip", "0"])
    out = capsys.readouterr().out
    assert "and the wait for them" in out and "its attention" not in out


@pytest.mark.slow
def test_trace(runs):
    with gzip.open(runs / "one" / "traces" / "rank_00000.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"attention 0", "attention 1", "ProfilerStep#1", "ProfilerStep#2"} <= names


@pytest.mark.slow
def test_table_of_costs(runs):
    found = json.loads((runs / "costs.json").read_text())
    (result,) = found["results"]
    variants = [(row["attention"], row["deterministic"], row["receipts"]) for row in result["rows"]]
    assert variants == [
        ("dash_attn", True, False), ("dash_attn", False, False), ("sdpa", True, False), ("sdpa", False, False),
        ("dash_attn", True, True),
    ]  # fmt: skip
    assert all(row["tokens_per_second"] > 0 and 0 < row["attention_share"] < 1 for row in result["rows"])
    assert result["peers"]["flash_attn_3"].startswith("not here: ") and "tiny sizes" in found["device"]


@pytest.mark.slow
def test_proof(runs, tmp_path, monkeypatch, capsys):
    """What it says of runs that repeat, and of one that does not."""
    folders = {
        "1_first": "one",
        "1_again": "one_again",
        "1_killed": "one",
        "2c2_first": "two",
        "2c2_again": "two_again",
    }
    folders |= {"2c2_killed": "killed", "control_a": "noisy", "control_b": "noisy_again"}
    calls = []

    def as_before(self, name, processes, context, *options, must_die=False):
        calls.append((name, processes, context, must_die))
        return runs / folders[name]

    monkeypatch.setattr(train_proof.Proof, "train", as_before)
    arguments = ["--layouts", "1", "2c2", "--steps", str(STEPS)]
    assert train_proof.main(["--out", str(tmp_path / "a"), *arguments]) == 0
    assert ("2c2_killed", 2, 2, True) in calls and capsys.readouterr().out.count("yes ") == 6
    folders["2c2_again"] = "one"
    assert train_proof.main(["--out", str(tmp_path / "b"), *arguments]) == 1
    assert "NO  2c2, again: losses " in capsys.readouterr().out


def test_model_flops():
    """Of a model small enough to count by hand."""
    config = {"layers": 3, "width": 8, "heads": 4, "kv_heads": 2, "hidden": 16, "sequences": 2, "seqlen": 10}
    linear, attention = flops.of_a_step(config)
    assert linear == 6 * 20 * (3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 8 * 256)
    assert attention == 3 * 3 * 2 * 4 * (2 * 2 * 10 * 10 * 2) / 2


def test_clock_reads_what_is_done():
    clock = Clock(torch.device("cpu"), 1)
    x = torch.ones(3, requires_grad=True)
    with clock.step(7):
        (y,) = clock.begin("mlp", 0, x)
        clock.end("mlp", 0, y * 2).sum().backward()
    (times,) = clock.finished()
    assert times.step == 7 and set(times.milliseconds) == {("mlp", "forward"), ("mlp", "backward")}
    assert 0 < sum(sum(ms) for ms in times.milliseconds.values()) < 1000 * times.seconds
    assert x.grad.tolist() == [2, 2, 2] and not list(clock.finished(wait=True))


def test_batches_do_not_know_the_layout():
    whole = Text().batch(3, seed=1, sequences=4, seqlen=12)
    assert whole.shape == (4, 13) and torch.equal(whole, Text().batch(3, seed=1, sequences=4, seqlen=12))
    for context in (1, 2, 4):
        layouts = [Layout(rank, 4, context, 4, 12) for rank in range(4)]
        seen = torch.zeros(4, 12, dtype=torch.int64)
        for layout in layouts:
            part, (sequences, rows) = layout.cut(whole[:, :-1]), layout.shard().ranges
            columns = torch.cat([torch.arange(*run) for run in rows])
            assert torch.equal(part, whole[slice(*sequences[0])][:, columns]) and layout.positions().equal(columns)
            seen[slice(*sequences[0]), columns] += 1
        assert (seen == 1).all()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Layout(0, 4, 3, 4, 8), "--context-parallel must divide the number of processes, 4, got 3"),
        (lambda: Layout(0, 4, 2, 3, 8), "--batch must be a multiple of the 2 groups of processes .*, got 3"),
        (lambda: Text("/nowhere"), "--text must be a file, or a folder with .* got '/nowhere'"),
        (lambda: Text().batch(0, seed=0, sequences=1, seqlen=10**9), "--seqlen must be below the length of the text"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--kv-heads", "3"], "--kv-heads must divide --heads 4, got 3"),
        (["--width", "30"], "--width must be an even multiple of --heads 4, got 30"),
        (["--fault", "flood:0:1"], "--fault must be kill:RANK:STEP or slow:RANK:MILLISECONDS for one of 1 ranks"),
        (["--trace", "0", "1"], "--trace must be steps after the first, 0"),
        (["--text", "/nowhere"], "--text must be a file"),
        (["--stale-memory", "-1"], "--stale-memory must be at least 0, and 0 without a GPU, got -1"),
        (["--resume", "-2"], "--resume must be a step of at least 0, got -2"),
    ],
)
def test_wrong_options(tmp_path, capsys, monkeypatch, options, message):
    import torch.distributed as dist

    monkeypatch.setenv(VARIABLE, ":4096:8")  # main sets the variable for its process
    try:
        assert train.main(["--out", str(tmp_path), *TINY, *options]) == 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.unfreeze()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_settings_of_a_step_end_with_the_step(deterministic):
    with settings_put_back():
        torch.use_deterministic_algorithms(True, warn_only=True)
        with settings_put_back(), pytest.raises(KeyError), ordered.deterministic_torch(deterministic):
            inside = global_settings()
            raise KeyError
        torch.use_deterministic_algorithms(False)
    assert [inside[name] for name in ("use_deterministic_algorithms", "cudnn.deterministic")] == [deterministic] * 2
    assert not any(inside[name] for name in ("warn_only", "fill_uninitialized_memory", "cudnn.benchmark"))
    assert inside["bf16_reduced_precision"] != deterministic


def test_a_setting_that_is_left_behind_is_found():
    try:
        with pytest.raises(AssertionError, match="left behind: {'cudnn.benchmark': "), settings_put_back():
            torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark


@pytest.mark.slow
def test_a_folder_with_another_run(runs):
    config = json.loads((runs / "one" / "config.json").read_text())
    with pytest.raises(FileExistsError, match="--out must be a folder without a run, .*--resume continues the run"):
        check_config(runs / "one", config, resume=False)
    check_config(runs / "one", config | {"ranks": 8}, resume=True)
    with pytest.raises(ValueError, match="the run in --out .* has seed 0, got 1"):
        check_config(runs / "one", config | {"seed": 1}, resume=True)

"""Receipts of one process: planted bits are found, whatever they are planted in; files, replays and the command."""

import concurrent.futures
import contextlib
import copy
import io
import json
import os
import pathlib
import re
import resource
import shlex
import signal
import sqlite3
import subprocess
import sys

import pytest
import torch
from receipts_support import STEPS, Plant, batch_of, make, train

from dash_attn import receipts
from dash_attn.receipts import KINDS, Recorder, Shard, compare, tap
from dash_attn.receipts.__main__ import main

ROOT = pathlib.Path(__file__).parents[1]
# By what a bit is planted in: the first record that differs, and the cause that is named.
PLANTED = {
    "data": ("data", "data.weights", "data"),
    "weights": ("weights", "layers.1.weight", "weights"),
    "activation": ("activation", "layers.1", "forward"),
    "activation_gradient": ("activation_gradient", "layers.1", "backward"),
    "gradient": ("gradient", "layers.1.weight", "backward"),
    "state": ("state", "layers.1.weight.exp_avg", "optimizer"),
    "updated_weights": ("updated_weights", "layers.1.weight", "optimizer"),
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Receipts of a training in which nothing is planted."""
    path = tmp_path_factory.mktemp("clean")
    train(path)
    return path


def test_the_same_run_twice(clean, tmp_path):
    train(tmp_path / "again")
    found = compare(clean, tmp_path / "again")
    assert found.first is None and found.steps == list(range(STEPS)) and not found.not_compared and not found.facts
    # A step: two of data, 7 parameters five times over (two of them state, its step counter too), 6 taps twice.
    assert found.compared == STEPS * (2 + 7 * (1 + 1 + 3 + 1) + 6 * 2)


@pytest.mark.parametrize("bit", [0, 17, 31])
@pytest.mark.parametrize("thing", PLANTED)
def test_a_planted_bit(clean, tmp_path, thing, bit):
    train(tmp_path / "run", Plant(thing, bit=bit))
    first = compare(clean, tmp_path / "run").first
    kind, name, cause = PLANTED[thing]
    assert (first.step, first.key.kind, first.key.name, first.cause) == (2, kind, name, cause)
    assert first.what == "the bits" and first.ranks == []
    if thing == "activation_gradient":
        assert 21 // 8 in first.blocks
    else:
        assert first.blocks == [21 // 8] and first.elements == (16, 24)
    of_kinds = list(first.differing.items())
    before = [of_kind for of_kind in of_kinds if KINDS.index(of_kind[0]) < KINDS.index(kind)]
    assert all(differ == 0 for _, (differ, _) in before) and first.differing[kind][0] >= 1


def test_a_bit_in_the_first_step_means_another_start(clean, tmp_path):
    train(tmp_path / "run", Plant("weights", step=0))
    first = compare(clean, tmp_path / "run").first
    assert (first.step, first.cause) == (0, "weights") and "already differ at the start" in first.reason
    train(tmp_path / "later", Plant("weights", step=2))
    assert "step 1 agrees to its end" in compare(clean, tmp_path / "later").first.reason


def test_what_was_not_recorded_is_not_ruled_out(tmp_path):
    for name, plant in (("a", None), ("b", Plant("activation"))):
        train(tmp_path / f"{name}1", plant, kinds=["activation", "gradient"])
        train(tmp_path / f"{name}2", plant, kinds=["gradient"])
        train(tmp_path / f"{name}3", plant, kinds=["updated_weights"])
    assert compare(tmp_path / "a1", tmp_path / "b1").first.cause == "data or weights or forward"
    assert compare(tmp_path / "a2", tmp_path / "b2").first.cause == "forward or backward"
    assert compare(tmp_path / "a3", tmp_path / "b3").first.cause == "backward or optimizer"


def test_order_is_that_of_execution(clean):
    found = [(key.kind, key.name) for key in receipts_of(clean, 1)]
    forward = [name for kind, name in found if kind == "activation"]
    assert forward == ["embedding", "layers.0", "layers.1", "layers.2", "features", "loss"]
    assert [name for kind, name in found if kind == "activation_gradient"] == forward[::-1]
    gradients = [name for kind, name in found if kind == "gradient"]
    places = [gradients.index(f"layers.{layer}.weight") for layer in (2, 1, 0)]
    assert places == sorted(places) and gradients[-1] == "embedding.weight"


def receipts_of(path, step):
    from dash_attn.receipts.runs import Run

    run = Run(path)
    try:
        return run.tensors(run.rows(step))
    finally:
        run.close()


def test_every_and_blocks(tmp_path):
    """Blocks are kept of the last steps and of every so many; fingerprints of all."""
    train(tmp_path / "run", steps=range(12), every=2, blocks_every=4, keep_blocks=2)
    database = sqlite3.connect(tmp_path / "run" / "rank_00000.sqlite")
    assert [row[0] for row in database.execute("SELECT step FROM step ORDER BY step")] == [0, 2, 4, 6, 8, 10]
    assert [row[0] for row in database.execute("SELECT step FROM blocks ORDER BY step")] == [0, 4, 8, 10]
    assert database.execute("SELECT count(*) FROM sequence").fetchone() == (1,)
    database.close()
    train(tmp_path / "other", Plant("gradient"), steps=range(12), every=2, blocks_every=4, keep_blocks=2)
    first = compare(tmp_path / "run", tmp_path / "other").first
    assert first.step == 2 and first.blocks is None and first.elements is None


def test_killed_and_resumed(clean, tmp_path):
    """A run that goes on from a checkpoint writes its steps again; one that did not mean to is told."""
    path = tmp_path / "run"
    made = train(path, steps=range(2))
    state = [made[0].state_dict(), made[1].state_dict()]
    state = [torch.load(save(x, tmp_path), weights_only=True) for x in state]
    train(path, Plant("data", step=2), steps=range(2, 4), made=made, resume=True)
    assert compare(clean, path).first.step == 2
    with pytest.raises(FileExistsError, match="without receipts of rank 0.*resume=True continues"):
        train(path)
    model, optimizer = make()
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    train(path, steps=range(2, STEPS), made=(model, optimizer), resume=True)
    assert compare(clean, path).first is None
    with pytest.raises(ValueError, match="receipts whose block is 16, got .* with 8"):
        train(path, steps=range(4, 5), block=16, resume=True)


def save(value, folder):
    torch.save(value, folder / "state.pt")
    return folder / "state.pt"


def test_a_process_that_dies_leaves_what_it_wrote(tmp_path):
    program = (
        "import os, sys, time, signal, sqlite3\n"
        f"sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from receipts_support import *\n"
        "model, optimizer = make()\n"
        "recorder = Recorder(sys.argv[1], model=model, optimizer=optimizer, block=BLOCK)\n"
        "for step in range(3):\n"
        "    with recorder.step(step, data=batch_of(step)):\n"
        "        if step == 2:\n"
        "            while sqlite3.connect(sys.argv[1] + '/rank_00000.sqlite').execute(\n"
        "                    'SELECT count(*) FROM step').fetchone()[0] < 2:\n"
        "                time.sleep(0.01)\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        model(batch_of(step)).backward()\n"
        "        optimizer.step()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    assert subprocess.run(command, env=environment, timeout=300).returncode == -signal.SIGKILL
    assert len(receipts_of(tmp_path / "run", 1)) > 7 and not receipts_of(tmp_path / "run", 2)


def test_an_error_within_a_step(clean, tmp_path):
    """What was recorded before it can be compared, and the error is the trainer's own."""
    model, optimizer = make()
    with pytest.raises(ZeroDivisionError):
        with Recorder(tmp_path / "run", model=model, optimizer=optimizer, block=8) as recorder:
            with recorder.step(0):
                tap(model.embedding(batch_of(0)), "embedding")
                raise ZeroDivisionError
    assert [key.kind for key in receipts_of(tmp_path / "run", 0)] == ["weights"] * 7 + ["activation"]
    found = compare(clean, tmp_path / "run")
    assert found.first is None and found.compared == 8
    assert found.not_compared["not recorded to the end in run b"] == "steps 0"
    # Two that end at the same place have nothing that the other lacks, and yet no step to its end.
    found = compare(tmp_path / "run", tmp_path / "run")
    assert found.compared == 8 and list(found.not_compared.values()) == ["steps 0", "steps 0"]


def test_what_was_not_compared_is_not_called_the_same(clean, tmp_path, capsys):
    """Steps of one run only, and a run that lost the gradients of a layer."""
    train(tmp_path / "short", steps=range(2))
    train(tmp_path / "some", steps=(0, 1, 7, 9))
    dying = Plant()

    def die(*_):
        if dying.now == 3:
            raise ZeroDivisionError

    dying.hook = lambda model, _: model.layers[2].register_forward_hook(die)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "died", dying)
    lost = Plant()
    lost.hook = lambda model, _: model.layers[0].requires_grad_(False)
    train(tmp_path / "lost", lost, kinds=["data", "gradient"], steps=range(1))
    train(tmp_path / "whole", kinds=["data", "gradient"], steps=range(1))
    for a, b, lines in (
        (clean, "short", ["compared 112 records of 2 steps (0 to 1)", "steps 2 to 3: recorded only in run a"]),
        (clean, "some", ["steps 2 to 3: recorded only in run a", "steps 7, 9: recorded only in run b"]),
        (clean, "died", ["of 4 steps", "steps 3: not recorded to the end in run b", "records: only in run a"]),
        (tmp_path / "whole", "lost", ["not compared: 2 records: only in run a"]),
    ):
        assert main(["compare", str(a), str(tmp_path / b)]) == 3, b
        out = capsys.readouterr().out
        assert all(line in out for line in lines), out
        assert out.endswith("no record that was compared differs\n") and "the same" not in out


def test_a_disk_that_is_full_is_an_error(tmp_path):
    recorder = Recorder(tmp_path / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, limits[1]))
        with pytest.raises(RuntimeError, match="receipts could not be written: .*disk"):
            for step in range(1000):
                with recorder.step(step, data=torch.ones(3)):
                    pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with contextlib.suppress(RuntimeError):
            recorder.close()
    assert len(receipts_of(tmp_path / "run", 0)) == 1


def test_parts_against_the_whole(tmp_path):
    """A rank that records its two chunks of a zigzag, against another that has the whole."""
    x = torch.arange(24.0).view(8, 3)
    shards = [Shard.along((8, 3), 0, (0, 2), (6, 8)), Shard.along((8, 3), 0, (2, 6))]
    with Recorder(tmp_path / "whole", block=8) as recorder, recorder.step(0):
        recorder.record(x, "x", "activation")
    with Recorder(tmp_path / "part", block=8) as recorder, recorder.step(0):
        recorder.record(torch.cat([x[:2], x[6:]]), "x", "activation", shard=shards[0])
    with pytest.raises(ValueError, match="its parts hold 12 of 24 elements"):
        compare(tmp_path / "whole", tmp_path / "part")


def unpickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, unpickled])
def test_copies_of_a_model_are_not_recorded(tmp_path, make_copy):
    """As of weights that are averaged, or of a teacher."""

    def run(folder, copies):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        with Recorder(folder, model=model, taps="0") as recorder, recorder.step(0):
            model(torch.ones(2, 4)).sum().backward()
            if copies:
                make_copy(model)(torch.zeros(2, 4)).sum().backward()
        return folder

    found = compare(run(tmp_path / "a", False), run(tmp_path / "b", True))
    assert found.compared == 4 and found.first is None and not found.not_compared


def test_taps_outside_of_steps_and_gradients_of_views(tmp_path):
    x = torch.ones(3, requires_grad=True)
    assert tap(x, "x") is x
    with Recorder(tmp_path / "run") as recorder:
        assert not recorder.is_recording
        with recorder.step(0):
            y = tap(x * 2, "y")
            tap(y, "y")
            y.mul_(2).sum().backward()  # in place, behind the tap
        tap(x, "x")
    assert [(key.kind, key.name, key.time) for key in receipts_of(tmp_path / "run", 0)] == [
        ("activation", "y", 0), ("activation", "y", 1),
        ("activation_gradient", "y", 0), ("activation_gradient", "y", 1),
    ]  # fmt: skip


def test_replay_down_to_the_element(clean, tmp_path, monkeypatch, capsys):
    train(tmp_path / "run", Plant("state", element=21, bit=30))
    first = compare(clean, tmp_path / "run").first
    for name, command, plant in zip("ab", first.replay, (None, Plant("state", element=21, bit=30))):
        words = shlex.split(command.removesuffix(")"))
        assert words[:5] == ["(cd", os.getcwd(), "||", "exit;", "export"]
        for word in words[5:7]:
            monkeypatch.setenv(*word.removesuffix(";").split("=", 1))
        monkeypatch.setenv("DASH_ATTN_RECEIPTS_PATH", str(tmp_path / f"replay_{name}"))
        assert words[7:] == sys.orig_argv
        with pytest.raises(SystemExit):
            train(tmp_path / "not written", plant)
        monkeypatch.delenv("DASH_ATTN_RECEIPTS_DUMP")
        monkeypatch.delenv("DASH_ATTN_RECEIPTS_PATH")
    assert not (tmp_path / "not written").exists()
    assert compare(clean, tmp_path / "replay_a").first is None
    capsys.readouterr()
    assert main(["elements", str(tmp_path / "replay_a"), str(tmp_path / "replay_b")]) == 1
    out = capsys.readouterr().out
    assert "1 of 8 words differ" in out and "element [1, 9]: " in out and out.endswith("bits [30]\n")
    assert main(["elements", str(tmp_path / "replay_a"), str(tmp_path / "replay_a")]) == 0
    assert main(["elements", str(clean), str(tmp_path / "replay_a")]) == 2


def test_a_command_of_ones_own_for_replays(clean, tmp_path):
    train(tmp_path / "run", Plant("data"), replay="python train.py --resume at_{step}.pt", facts={"seed": 1})
    found = compare(clean, tmp_path / "run")
    assert found.first.replay[1].endswith("}'; python train.py --resume at_2.pt)")
    assert found.facts == {"seed": (None, "1")}


def test_the_command_of_torchrun(tmp_path, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python", "-u", "train.py", "--name", "two words"])
    for name, plant in (("a", None), ("b", Plant("data"))):
        train(tmp_path / name, plant)
    first = compare(tmp_path / "a", tmp_path / "b").first
    assert first.replay[0].endswith("}'; torchrun --nnodes 2 --nproc-per-node 4 train.py --name 'two words')")


@pytest.mark.slow
def test_example(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "examples" / "receipts.py", "--folder", str(tmp_path / "receipts")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the runs first differ in step 3\n  first: activation_gradient q\n" in done.stdout
    assert "likely cause: backward" in done.stdout


def test_command_line(clean, tmp_path, capsys):
    train(tmp_path / "run", Plant("gradient"))
    pytest.importorskip("matplotlib")
    assert main(["compare", str(clean), str(tmp_path / "run"), "--png", str(tmp_path / "where.png")]) == 1
    out = capsys.readouterr().out
    for line in ("the runs first differ in step 2", "first: gradient layers.1.weight", "1 of its 18 blocks: 2",
                 "block 2: elements 16 to 23 of the shape [12, 12], from [1, 4] to [1, 11]",
                 "likely cause: backward"):  # fmt: skip
        assert line in out
    assert (tmp_path / "where.png").read_bytes().startswith(b"\x89PNG")
    assert main(["compare", str(clean), str(tmp_path / "run"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first"]["key"]["name"] == "layers.1.weight"
    assert main(["compare", str(clean), str(clean)]) == 0
    assert "the runs agree: no record differs" in capsys.readouterr().out
    for arguments, message in (
        (["compare", str(clean), str(tmp_path)], "the folder must hold receipts (rank_00000.sqlite, ...), got"),
        (["compare", str(clean), str(clean), "--png", "where.jpg"], "path must end in .png, got 'where.jpg'"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_runs_that_cannot_be_compared(clean, tmp_path):
    train(tmp_path / "later", steps=range(7, 9))
    with pytest.raises(ValueError, match="must have a recorded step in common"):
        compare(clean, tmp_path / "later")
    train(tmp_path / "blocks", block=16)
    with pytest.raises(ValueError, match="the same block size, got 8 and 16 words"):
        compare(clean, tmp_path / "blocks")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "rank_00000.sqlite").write_text("no database, but text that is long enough to be one" * 20)
    with pytest.raises(ValueError, match="rank_00000.sqlite cannot be read as a receipt: file is not a database"):
        compare(clean, tmp_path / "text")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"every": 0}, "every must be an int of at least 1, got 0"),
        ({"keep_blocks": 1.5}, "keep_blocks must be an int of at least 1, got 1.5"),
        ({"kinds": ["gradients"]}, r"kinds must be among data, .*, got \['gradients'\]"),
        ({"block": 100}, "block must be a power of two"),
        ({"taps": ["layer.*"]}, r"taps must name modules of the model \(.*layers.*\), got 'layer.\*'"),
    ],
)
def test_bad_arguments(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_bad_steps(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        with recorder.step(3):
            pass
        with pytest.raises(ValueError, match="number must be an int larger than the previous step's, 3, got 3"):
            with recorder.step(3):
                pass
        with pytest.raises(ValueError, match="data must hold a tensor, got str"):
            with recorder.step(4, data="text"):
                pass
        with pytest.raises(TypeError, match="activation 'sparse' cannot be recorded: tensor must be dense"):
            with recorder.step(5):
                tap(torch.ones(3).to_sparse(), "sparse")
        for number in (-1, 2**63):
            with pytest.raises(ValueError, match=rf"number must be .*, got {number}"), recorder.step(number):
                pass
        with pytest.raises(RuntimeError, match="step 7 must end before another step begins, got step 8"):
            with recorder.step(7), recorder.step(8):
                pass
        for number, (name, error, message) in enumerate([
            (3, TypeError, "name must be a str, got 3"),
            ("\ud800", ValueError, r"name must be text that UTF-8 can encode, got '\\ud800'"),
        ]):  # fmt: skip
            with pytest.raises(error, match=message), recorder.step(10 + number):
                tap(torch.ones(3), name)
        with pytest.raises(TypeError, match="activation 'x' cannot be recorded: tensor must not be batched by"):
            with recorder.step(12):
                torch.vmap(lambda x: tap(x, "x"))(torch.ones(2, 3))
        with pytest.raises(ValueError, match="kind must be one of data, .*, got 'loss'"):
            recorder.record(torch.ones(3), "x", "loss")
    with pytest.raises(RuntimeError, match="the recorder is closed"):
        with recorder.step(13):
            pass
    with pytest.raises(ValueError, match="model must be given together with optimizer"):
        Recorder(tmp_path / "other", optimizer=make()[1])
    assert receipts.FINGERPRINT == "dash-attn-1"


def test_a_step_in_another_thread(tmp_path):
    """`tap` would record this thread's tensors with the recorder of the other thread."""
    message = f"step 3 must not begin while the recorder of {tmp_path / 'a'} is in a step in another thread"
    with Recorder(tmp_path / "a") as one, Recorder(tmp_path / "b") as other:

        def begin():
            with other.step(3):
                tap(torch.ones(3), "x")

        with concurrent.futures.ThreadPoolExecutor() as pool:
            with one.step(0):
                with pytest.raises(RuntimeError, match=re.escape(message)):
                    pool.submit(begin).result()
                with other.step(2):  # a step within a step of the same thread
                    tap(torch.ones(3), "x")
                tap(torch.ones(3), "x")
            pool.submit(begin).result()  # the step that was refused may begin once the other one has ended
    assert [compare(path, path).compared for path in (tmp_path / "a", tmp_path / "b")] == [1, 2]


@pytest.mark.parametrize("every, every_of_other", [(1, 2), (2, 1)])
def test_a_step_in_another_thread_of_which_one_is_not_recorded(tmp_path, every, every_of_other):
    with Recorder(tmp_path / "a", every=every) as one, Recorder(tmp_path / "b", every=every_of_other) as other:

        def begin():
            with other.step(3):
                tap(torch.ones(3), "x")

        with concurrent.futures.ThreadPoolExecutor() as pool:
            with one.step(1), pytest.raises(RuntimeError, match="step 3 must not begin while the recorder of"):
                pool.submit(begin).result()
            pool.submit(begin).result()

"""The hunt for a run of examples/train.py that does not repeat, and the taps that name the stage at which it parts."""

import pathlib
import subprocess
import sys
import threading
import time

import pytest
import torch

import dash_attn
from dash_attn import flash_attn_func
from dash_attn.receipts import Recorder, compare, tap

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

import train_proof  # noqa: E402
from train_worker import TINY  # noqa: E402
from training import hunt, probe  # noqa: E402
from training.clock import Clock  # noqa: E402
from training.layout import Layout  # noqa: E402
from training.model import Llama, Shape, rotary_angles  # noqa: E402

SHAPE = Shape(layers=2, width=32, heads=4, kv_heads=2, hidden=48)
LAYOUT = Layout(0, 1, 1, 2, 48)


def flip(x):
    with torch.no_grad():
        x.view(torch.int32).view(-1)[7] ^= 1


def other_output(_, __, out):
    out = out.clone()
    flip(out)
    return out


def other_weight(module, _):
    flip(module.weight)


def attend(*tensors):
    return flash_attn_func(*(x.bfloat16() for x in tensors), causal=True).float()


def recorded(folder, plant=None, stages=True, steps=1):
    """Receipts of a model's forward and backward in which `plant` changes one bit."""
    torch.manual_seed(0)
    model = Llama(SHAPE, attend, Clock(torch.device("cpu"), SHAPE.layers), LAYOUT, seed=0)
    if plant is not None:
        plant(model)
    if stages:
        probe.tap_stages(model, LAYOUT)
    tokens = torch.arange(96).view(2, 48)
    with Recorder(folder, model=model) as recorder:
        for step in range(steps):
            with recorder.step(step, tokens):
                model(tokens, tokens).backward()
    return folder


@pytest.mark.parametrize(
    "plant, name",
    [
        (lambda m: m.layers[0].before_attention.register_forward_hook(other_output), "layers.0.before_attention.out"),
        (lambda m: m.layers[0].attention.q.register_forward_pre_hook(other_weight), "layers.0.attention.q.weight"),
        (lambda m: m.layers[0].attention.q.register_forward_hook(other_output), "layers.0.attention.q.out"),
        (lambda m: m.layers[1].mlp.up.register_forward_hook(other_output), "layers.1.mlp.up.out"),
        (lambda m: m.norm.register_forward_hook(other_output), "norm.out"),
    ],
)
def test_the_stage_that_differs_is_named(tmp_path, plant, name):
    first = compare(recorded(tmp_path / "a"), recorded(tmp_path / "b", plant)).first
    assert (first.step, first.key.kind, first.key.name, first.cause) == (0, "activation", name, "forward")


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_a_buffer_that_differs_is_named_before_the_stages_that_read_it(tmp_path, name):
    one, other = recorded(tmp_path / "a"), recorded(tmp_path / "b", lambda model: flip(getattr(model, name)))
    first = compare(one, other).first
    assert (first.step, first.key.kind, first.key.name, first.cause) == (0, "buffers", name, "buffers")


def test_without_probe_there_is_no_stage_and_no_hook(tmp_path):
    found = compare(recorded(tmp_path / "a", stages=False), recorded(tmp_path / "b"))
    assert found.first is None and list(found.not_compared) == ["only in run b"]
    assert found.compared == compare(tmp_path / "a", recorded(tmp_path / "c", stages=False)).compared


def test_stages_are_recorded_once_a_step(tmp_path):
    """Also of weights, whose gradients must not get a hook for each step."""
    found = [compare(recorded(tmp_path / f"{steps}a", steps=steps), recorded(tmp_path / f"{steps}b", steps=steps))
             for steps in (1, 3)]  # fmt: skip
    assert found[1].compared == 3 * found[0].compared and not found[1].not_compared


@pytest.mark.parametrize("rows", [48, 1001, 8192])
def test_rotary_angles_do_not_depend_on_threads(rows):
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3, 7, 16, 64):
            torch.set_num_threads(count)
            found.append(rotary_angles(torch.arange(rows), 128))
    finally:
        torch.set_num_threads(threads)
    assert all(x.equal(y) for other in found[1:] for x, y in zip(found[0], other))


def wait_until(condition, seconds=60):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"this has not come true in {seconds} seconds"
        time.sleep(0.05)


def has_ended(pid):
    """Whether the process no longer runs. A zombie has ended: its new parent may be slow to collect it."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_load_is_ended_with_all_that_it_has_started(tmp_path):
    """And is asked to end first, so that it can end what has left its session."""
    pid = tmp_path / "pid"
    command = f"trap 'echo asked; exit' TERM; sleep 1000 & echo $! > {pid}; wait"
    with hunt.beside([command], tmp_path) as failed:
        wait_until(lambda: pid.exists() and pid.read_text())
    wait_until(lambda: has_ended(int(pid.read_text())))
    assert (tmp_path / "load_0.log").read_text() == "asked\n" and not failed


# The runs of a hunt are processes. These tests make them in threads, which must take turns with a recorder.
ONE_RECORDER = threading.Lock()


def run_of(folder, value):
    with ONE_RECORDER, Recorder(folder / "receipts") as recorder, recorder.step(0):
        tap(torch.zeros(5), "before")
        tap(torch.full((5,), float(value)), "here")
    (folder / "losses.txt").write_text(f"0 {value}\n")
    return folder


def test_runs_are_put_into_groups(tmp_path):
    values, said = [3, 3, 5, 3, 5, 3, 4], []
    groups = hunt.hunt(
        lambda number: run_of(tmp_path / f"run_{number}", values[number]), 7, jobs=1, seconds=60, say=said.append
    )
    assert [len(group) for group in groups] == [4, 2, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(group[0].name for group in groups)
    assert len(said) == 2 and all("in step 0, first at activation here" in text for text in said)
    assert "1 of 1 blocks; equal before it: activation before; likely cause " in said[0]


def test_a_hunt_ends_in_time(tmp_path):
    """Runs that were begun are finished, and no other is begun."""
    assert hunt.hunt(lambda number: run_of(tmp_path / f"{number}", 1), 9, jobs=2, seconds=-1, say=print) == []


def test_losses_alone_may_differ(tmp_path):
    one, other = run_of(tmp_path / "a", 1), run_of(tmp_path / "b", 1)
    assert hunt.differ(one, other) is None
    (other / "losses.txt").write_text("0 2\n")
    found = hunt.differ(one, other)
    assert found is not None and found.first is None


@pytest.mark.slow
def test_hunt(tmp_path, capsys, monkeypatch):
    """Real runs, beside a load, which do not repeat."""
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(dash_attn.__file__).parents[1]))
    options = ["--hunt", "2", "--jobs", "2", "--steps", "1", "--load", "--attention", "noisy", *TINY]
    assert train_proof.main(["--out", str(tmp_path / "out"), *options]) == 1
    out = capsys.readouterr().out
    assert "in step 0, first at activation_gradient layers.1.attention.q: the bits" in out
    assert "NO  2 runs of 1 steps, 2 at a time, on " in out and "load: " not in out
    for run in (tmp_path / "out" / "run_00000", tmp_path / "out" / "run_00001"):
        assert sorted(path.name for path in run.iterdir()) == [
            "config.json", "losses.txt", "probe", "receipts", "times"
        ]  # fmt: skip


def test_what_a_hunt_says_of_runs_that_repeat(tmp_path, capsys, monkeypatch):
    """A load that fails is not the load that was asked for."""
    environments, of_options, tries = [], [], tmp_path / "tries"
    fails = f"echo begins >> {tries}; exit 3"

    def train(self, name, processes, context, *options, environment):
        environments.append(environment)
        if self.out.name == "b":  # the load is begun again once its failure has been noted
            wait_until(lambda: tries.exists() and tries.read_text().count("begins") > 1)
        assert (processes, context, options[:2]) == (1, 1, ("--checkpoint-every", "9"))
        of_options.append((environment["CUDA_VISIBLE_DEVICES"], *options[2:]))
        return run_of(self.out / name, 1)

    monkeypatch.setattr(train_proof.Proof, "train", train)
    monkeypatch.setattr(hunt, "visible_gpus", lambda: ["3", "5"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ["--hunt", "3", "--jobs", "2"]
    assert train_proof.main(["--out", str(tmp_path / "a"), *options, "--load", "sleep 9"]) == 0
    assert capsys.readouterr().out.startswith("yes 3 runs of 8 steps, 2 at a time, on 2 GPUs: 3 as run_0000")
    assert sorted(of_options) == [(gpu, "--stale-memory", gib) for gpu, gib in (("3", "0"), ("3", "4"), ("5", "0"))]
    assert not any("OMP_NUM_THREADS" in x for x in environments)
    assert train_proof.main(["--out", str(tmp_path / "b"), *options, "--load", fails]) == 1
    assert f"NO  load: {fails!r} ended with status 3, see " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train_proof.main(["--out", str(tmp_path / "c"), "--hunt", "1"])
    assert "argument --hunt: must be at least 2 runs, got 1" in capsys.readouterr().err


def test_a_hunt_goes_on_after_a_run_that_fails(tmp_path, capsys, monkeypatch):
    def trainer(command, **_):
        folder = pathlib.Path(command[command.index("--out") + 1])
        if folder.name == "run_00001":
            return subprocess.CompletedProcess(command, 1)
        run_of(folder, 1)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", trainer)
    monkeypatch.setattr(hunt, "visible_gpus", list)
    out = tmp_path / "out"
    assert train_proof.main(["--out", str(out), "--hunt", "4"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"NO  hunt: error: run_00001 failed, see {out / 'run_00001.log'}",
        "NO  4 runs of 8 steps, 1 at a time, on no GPUs: 3 as run_00000, 1 failed",
    ]

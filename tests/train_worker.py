"""One rank of a group that runs examples/train.py in several ways: see test_train_example.py and test_train_files.py.

python train_worker.py RANK RANKS PORT FOLDER PART
"""

import gc
import json
import os
import pathlib
import signal
import sys
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

import train  # noqa: E402
import train_costs  # noqa: E402

STEPS, CHECKPOINT_EVERY, KILLED_IN = 4, 2, 3
TINY = ["--seqlen", "48", "--width", "32", "--heads", "4", "--kv-heads", "2", "--hidden", "48", "--timeout", "60"]


def run(folder, name, *options, steps=STEPS, receipts=True):
    """Leaves FOLDER/NAME, and receipts in FOLDER/NAME/receipts."""
    out = folder / name
    arguments = ["--out", str(out), "--steps", str(steps), *TINY]
    arguments += ["--receipts", str(out / "receipts")] if receipts else []
    arguments += ["--checkpoint-every", str(CHECKPOINT_EVERY), *options]
    train.run(train.parsed(arguments), torch.device("cpu"))


def probe(folder, name):
    return ["--probe", str(folder / name / "probe")]


def replay(folder, name, *options):
    """Of the first step of a run, as `receipts compare` says; leaves its receipts in FOLDER/replay."""
    want = {"step": 0, "kind": "activation_gradient", "name": "layers.1.attention.q", "time": 0, "block": 0}
    asked = {"DASH_ATTN_RECEIPTS_PATH": str(folder / "replay"), "DASH_ATTN_RECEIPTS_DUMP": json.dumps(want)}
    os.environ.update(asked)
    try:
        run(folder, name, *options, "--resume", "0")
    except SystemExit as end:
        assert end.code == 0
    else:
        raise AssertionError("a replay must end after its step")
    finally:
        for key in asked:
            del os.environ[key]


def one(folder):
    run(folder, "one", *probe(folder, "one"), "--trace", "1", "2")
    run(folder, "one_again", *probe(folder, "one_again"))
    for name in ("noisy", "noisy_again"):
        run(folder, name, "--attention", "noisy", steps=1)
    replay(folder, "noisy", "--attention", "noisy")
    run(folder, "two_moved", "--resume", steps=STEPS + 1, receipts=False)
    tiny = ["--rounds", "1", "--steps", "1", "--seqlens", "32", "--tokens", "64", "--peers", "sdpa", "flash_attn_3"]
    train_costs.run(train_costs.parsed(["--out", str(folder / "costs.json"), *tiny]), torch.device("cpu"))


def two(folder):
    context = ["--context-parallel", "2"]
    run(folder, "two", *context, *probe(folder, "two"))
    run(folder, "two_again", *context, *probe(folder, "two_again"))
    run(folder, "slow", *probe(folder, "slow"), "--fault", "slow:1:100", steps=3, receipts=False)
    run(folder, "killed", *context, *probe(folder, "killed"), "--fault", f"kill:1:{KILLED_IN}")


def two_killed_in_checkpoint(folder):
    """A run that goes back to its first checkpoint and loses rank 1 before that has written its part of the next."""
    save = train.checkpoints.dcp.save

    def fatal(*arguments, **named):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        save(*arguments, **named)

    train.checkpoints.dcp.save = fatal
    run(folder, "half", "--context-parallel", "2", "--resume", str(CHECKPOINT_EVERY))


def two_resumed(folder):
    context = ["--context-parallel", "2", "--resume"]
    run(folder, "killed", *context, *probe(folder, "killed"))
    run(folder, "half", *context)


def one_branch(folder):
    """Another history from the first checkpoint on, killed before the next."""
    options = ["--attention", "noisy", "--resume", str(CHECKPOINT_EVERY), "--fault", f"kill:0:{KILLED_IN}"]
    run(folder, "branch", *options, steps=STEPS + 2)


def one_branch_resumed(folder):
    run(folder, "branch", "--attention", "noisy", "--resume", steps=STEPS + 2)


def four(folder):
    context = ["--context-parallel", "2", "--layout", "contiguous"]
    run(folder, "four", *context, *probe(folder, "four"), steps=1)
    run(folder, "four_again", *context, *probe(folder, "four_again"), steps=1)


def two_late_listing(folder):
    """A checkpoint of which rank 1 does not see the first file at once."""
    model = torch.nn.Sequential(torch.nn.Linear(37, 11), torch.nn.Linear(11, 5))
    optimizer = torch.optim.AdamW(model.parameters())

    def late(path, *_):
        return [path / name for name in sorted(os.listdir(path))[dist.get_rank() :]]

    with mock.patch.multiple(pathlib.Path, glob=late, iterdir=late):
        train.checkpoints.save(folder, 2, model, optimizer)
    assert train.checkpoints.load_last(folder, 2, model, optimizer) == 2


def main(rank, ranks, port, folder, part):
    gc.freeze()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    parts = [one, one_branch, one_branch_resumed, two, two_killed_in_checkpoint, two_resumed, two_late_listing, four]
    {function.__name__: function for function in parts}[part](folder)
    train.end_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4]), sys.argv[5])

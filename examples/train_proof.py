"""Runs examples/train.py again and again, and says whether it repeats: in fresh processes, killed and resumed, on
several layouts of processes.

    python examples/train_proof.py --out proof --layouts 1 2 2c2 4 4c2 --jobs 4

`4c2` is four processes of which two share a sequence. For each layout: a run, the same again, and one that is killed in
a step and goes on from its checkpoint. Losses and receipts must be the same, byte by byte. Attention to equal inputs
must have equal bits on all layouts (receipts of --probe). As a control the first layout is run twice with an attention
that is not deterministic: it must part, and the receipts say where. The exit status is 0 where all this holds.

With --jobs several runs share the GPUs, so that each is also load for the others.
"""

import argparse
import concurrent.futures
import pathlib
import re
import subprocess
import sys

import torch

from dash_attn.receipts import compare

TRAIN = pathlib.Path(__file__).with_name("train.py")


class Proof:
    def __init__(self, out: pathlib.Path, steps: int, kill_at: int, extra: list[str]) -> None:
        self.out, self.steps, self.kill_at, self.extra, self.all_hold = out, steps, kill_at, extra, True

    def train(self, name: str, processes: int, context: int, *options: str, must_die: bool = False) -> pathlib.Path:
        """Runs the trainer in processes of its own; what it says goes to NAME.log."""
        folder = self.out / name
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += [str(TRAIN), "--out", str(folder), "--receipts", str(folder / "receipts")]
        command += ["--context-parallel", str(context), "--steps", str(self.steps), *self.extra, *options]
        with (self.out / f"{name}.log").open("a") as log:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
        if must_die != (status != 0):
            raise SystemExit(f"error: {name} {'was not killed' if must_die else 'failed'}, see {self.out / name}.log")
        return folder

    def killed_and_resumed(self, name: str, processes: int, context: int) -> pathlib.Path:
        fault = f"kill:{processes - 1}:{self.kill_at}"
        self.train(name, processes, context, "--fault", fault, must_die=True)
        return self.train(name, processes, context, "--resume")

    def say(self, name: str, holds: bool, detail: str) -> None:
        self.all_hold &= holds
        print(f"{'yes' if holds else 'NO':<4}{name}: {detail}", flush=True)

    def same(self, name: str, one: pathlib.Path, other: pathlib.Path) -> None:
        losses = [(folder / "losses.txt").read_bytes() for folder in (one, other)]
        found = compare(one / "receipts", other / "receipts")
        detail = f"{found.compared} receipts of {len(found.steps)} steps"
        if found.first is not None:
            detail += f", parting in step {found.first.step} at {found.first.key}, likely cause {found.first.cause}"
        if found.not_compared:
            detail += f", not compared: {found.not_compared}"
        whole = found.first is None and not found.not_compared and len(found.steps) == self.steps
        self.say(
            name,
            whole and losses[0] == losses[1],
            f"losses {'equal' if losses[0] == losses[1] else 'NOT equal'}, {detail}",
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of all runs; it must not be there")
    parser.add_argument("--layouts", nargs="+", default=["1", "2", "2c2", "4", "4c2"], metavar="N[cM]")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kill-at", type=int, default=5, metavar="STEP", help="behind a checkpoint, every 3 steps")
    parser.add_argument("--jobs", type=int, default=1, choices=range(1, 65), metavar="N", help="runs at a time")
    parser.add_argument("--control", default="sdpa_flash" if torch.cuda.is_available() else "noisy",
                        help="an attention that is not deterministic")  # fmt: skip
    arguments, extra = parser.parse_known_args(argv)
    layouts = {}
    for text in arguments.layouts:
        found = re.fullmatch(r"(\d+)(?:c(\d+))?", text)
        if found is None:
            parser.error(f"argument --layouts: must be like 4 or 4c2, got {text!r}")
        layouts[text] = int(found[1]), int(found[2] or 1)
    arguments.out.mkdir(parents=True)
    proof = Proof(arguments.out, arguments.steps, arguments.kill_at, [*extra, "--checkpoint-every", "3"])
    probes = {name: arguments.out / f"{name}_probe" for name in layouts}
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        runs = {}

        def finished(run: concurrent.futures.Future) -> pathlib.Path:
            try:
                return run.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

        for name, layout in layouts.items():
            # What takes longest is started first.
            runs[name, "killed and resumed"] = pool.submit(proof.killed_and_resumed, f"{name}_killed", *layout)
            runs[name, "first"] = pool.submit(proof.train, f"{name}_first", *layout, "--probe", str(probes[name]))
            runs[name, "again"] = pool.submit(proof.train, f"{name}_again", *layout)
        first_layout = arguments.layouts[0]
        controls = [
            pool.submit(proof.train, f"control_{x}", *layouts[first_layout], "--attention", arguments.control)
            for x in "ab"
        ]
        for name in layouts:
            first = finished(runs[name, "first"])
            for what in ("again", "killed and resumed"):
                proof.same(f"{name}, {what}", first, finished(runs[name, what]))
            if name != first_layout:
                found = compare(probes[first_layout], probes[name])
                whole = found.first is None and not found.not_compared
                detail = f"{found.compared} receipts of attention to equal inputs"
                proof.say(f"{name} and {first_layout}", whole, detail + ("" if whole else f": {found.first}"))
        parting = compare(*(finished(control) / "receipts" for control in controls)).first
    where = "" if parting is None else f"step {parting.step}, {parting.key}, likely cause {parting.cause}"
    parts = parting is not None and parting.key.name.split(".")[2:3] == ["attention"]
    proof.say(f"{arguments.control} parts", parts, where)
    return 0 if proof.all_hold else 1


if __name__ == "__main__":
    sys.exit(main())

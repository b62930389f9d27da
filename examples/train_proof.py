"""Runs examples/train.py repeatedly and checks that the run repeats: in new processes, killed and resumed, and on
several layouts of processes.

    python examples/train_proof.py --out proof --layouts 1 2 2c2 4 4c2 --jobs 4

`4c2` means four processes in pairs that share a sequence. For each layout there is a run, a repeat, and a run that is
killed in a step and continues from its checkpoint. Their losses and receipts must be the same, byte by byte. Attention
to equal inputs must have equal bits on all layouts (receipts of --probe). As a control, the first layout runs twice
with a non-deterministic attention: these runs must differ, and the receipts show where. The exit status is 0 if all of
this holds.

With --jobs several runs share the GPUs, so that each run is also load for the others.

    python examples/train_proof.py --out hunt --hunt 200 --jobs 12 --load

hunts for a run that does not repeat: 200 equal runs of one process, 12 at a time, distributed over all GPUs, with all
threads and --probe, while other GPU work runs. Each run that differs from the earlier ones is reported with the first
tensor that differs. A failing run is reported with its log, and the hunt continues. The exit status is 1 if a run
differs or fails.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import re
import shlex
import subprocess
import sys

import torch
from training import hunt

from dash_attn.receipts import compare

TRAIN = pathlib.Path(__file__).with_name("train.py")
STALE_GIB = 4
LOAD = shlex.join([sys.executable, str(TRAIN.parent / "training" / "load.py")])


class Proof:
    def __init__(self, out: pathlib.Path, steps: int, kill_at: int, extra: list[str]) -> None:
        self.out, self.steps, self.kill_at, self.extra, self.all_hold = out, steps, kill_at, extra, True

    def train(
        self,
        name: str,
        processes: int,
        context: int,
        *options: str,
        must_die: bool = False,
        environment: dict[str, str] | None = None,
    ) -> pathlib.Path:
        """Runs the trainer in new processes, whose output goes to NAME.log."""
        folder = self.out / name
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += [str(TRAIN), "--out", str(folder), "--receipts", str(folder / "receipts")]
        command += ["--probe", str(folder / "probe"), "--context-parallel", str(context)]
        command += ["--steps", str(self.steps), *self.extra, *options]
        with (self.out / f"{name}.log").open("a") as log:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
        if must_die != (status != 0):
            raise SystemExit(f"error: {name} {'was not killed' if must_die else 'failed'}, see {self.out / name}.log")
        return folder

    def killed_and_resumed(self, name: str, processes: int, context: int) -> pathlib.Path:
        fault = f"kill:{processes - 1}:{self.kill_at}"
        self.train(name, processes, context, "--fault", fault, must_die=True)
        return self.train(name, processes, context, "--resume")

    def hunt(self, runs: int, jobs: int, seconds: float, loads: list[str]) -> None:
        """Makes equal runs of one process, and reports those that differ."""
        gpus = hunt.visible_gpus()
        failed: list[int] = []

        def start(number: int) -> pathlib.Path | None:
            environment = hunt.all_threads()
            # No checkpoints, because no run continues these runs.
            options = ["--checkpoint-every", str(self.steps + 1)]
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
                # In every other run on a GPU, so that reads of uninitialized memory make these runs differ from the
                # rest.
                options += ["--stale-memory", str(STALE_GIB * (number // len(gpus) % 2))]
            try:
                return self.train(f"run_{number:05d}", 1, 1, *options, environment=environment)
            except SystemExit as error:
                self.say("hunt", False, str(error))
                failed.append(number)
                return None

        with hunt.beside(loads, self.out) as failed_loads:
            groups = hunt.hunt(start, runs, jobs=jobs, seconds=seconds, say=functools.partial(self.say, "hunt", False))
        for text in failed_loads[:1]:
            self.say("load", False, text)
        sizes = {group[0].name: len(group) for group in groups}
        counts = [f"{size} as {name}" for name, size in sizes.items()] + [f"{len(failed)} failed"] * bool(failed)
        runs = sum(sizes.values()) + len(failed)
        made = f"{runs} runs of {self.steps} steps, {jobs} at a time, on {len(gpus) or 'no'} GPUs"
        same = len(sizes) == 1 and max(sizes.values()) > 1
        self.say(made, same and not failed, ", ".join(counts))

    def say(self, name: str, holds: bool, detail: str) -> None:
        self.all_hold &= holds
        print(f"{'yes' if holds else 'NO':<4}{name}: {detail}", flush=True)

    def same(self, name: str, one: pathlib.Path, other: pathlib.Path) -> None:
        losses = [(folder / "losses.txt").read_bytes() for folder in (one, other)]
        found = compare(one / "receipts", other / "receipts")
        detail = f"{found.compared} receipts of {len(found.steps)} steps"
        if found.first is not None:
            detail += f", first difference in step {found.first.step} at {found.first.key}, likely {found.first.cause}"
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
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for all runs; must not exist yet")
    parser.add_argument("--layouts", nargs="+", default=["1", "2", "2c2", "4", "4c2"], metavar="N[cM]")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kill-at", type=int, default=5, metavar="STEP", help="checkpoints are written every 3 steps")
    parser.add_argument("--jobs", type=int, default=1, choices=range(1, 65), metavar="N", help="concurrent runs")
    parser.add_argument("--control", default="sdpa_flash" if torch.cuda.is_available() else "noisy",
                        help="a non-deterministic attention")  # fmt: skip
    parser.add_argument("--hunt", type=int, metavar="RUNS", help="instead make this many equal runs of one process")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which a hunt starts no new run")
    parser.add_argument("--load", nargs="?", const=LOAD, action="append", default=[], metavar="COMMAND",
                        help="commands that run in a loop during a hunt; default: other work on all GPUs")  # fmt: skip
    arguments, extra = parser.parse_known_args(argv)
    if arguments.hunt is not None and arguments.hunt < 2:
        parser.error(f"argument --hunt: must be at least 2 runs, got {arguments.hunt}")
    layouts = {}
    for text in arguments.layouts:
        found = re.fullmatch(r"(\d+)(?:c(\d+))?", text)
        if found is None:
            parser.error(f"argument --layouts: must be like 4 or 4c2, got {text!r}")
        layouts[text] = int(found[1]), int(found[2] or 1)
    arguments.out.mkdir(parents=True)
    proof = Proof(arguments.out, arguments.steps, arguments.kill_at, [*extra, "--checkpoint-every", "3"])
    if arguments.hunt is not None:
        proof.hunt(arguments.hunt, arguments.jobs, arguments.seconds, arguments.load)
        return 0 if proof.all_hold else 1
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        runs = {}

        def finished(run: concurrent.futures.Future) -> pathlib.Path:
            try:
                return run.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

        for name, layout in layouts.items():
            # The longest jobs start first.
            runs[name, "killed and resumed"] = pool.submit(proof.killed_and_resumed, f"{name}_killed", *layout)
            runs[name, "first"] = pool.submit(proof.train, f"{name}_first", *layout)
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
                found = compare(finished(runs[first_layout, "first"]) / "probe", first / "probe")
                whole = found.first is None and not found.not_compared
                detail = f"{found.compared} receipts of attention to equal inputs"
                proof.say(f"{name} and {first_layout}", whole, detail + ("" if whole else f": {found.first}"))
        parting = compare(*(finished(control) / "receipts" for control in controls)).first
    where = "" if parting is None else f"step {parting.step}, {parting.key}, likely cause {parting.cause}"
    parts = parting is not None and parting.key.name.split(".")[2:3] == ["attention"]
    proof.say(f"{arguments.control} does not repeat", parts, where)
    return 0 if proof.all_hold else 1


if __name__ == "__main__":
    sys.exit(main())

"""Trains a small Llama so that the run repeats bit by bit, on the sources of Python's standard library, with FSDP2.

    python examples/train.py --out run                                       one process
    torchrun --nproc-per-node 4 examples/train.py --out run --receipts run/receipts
    torchrun --nproc-per-node 4 examples/train.py --out run --context-parallel 2 --resume

Each process uses one GPU over NCCL, or the CPU with dash_attn's reference over gloo if there is no GPU. Losses, times
and checkpoints go to --out, and the fingerprints of everything that a step computes go to --receipts. --resume
continues from the last undamaged checkpoint, on any number of processes. docs/training.md explains what the runs show.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import os
import pathlib
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from training import checkpoints, files, flops, ordered, probe
from training.attention import ATTENTION
from training.clock import Clock, StepTimes
from training.faults import Fault, leave_stale_memory
from training.layout import Layout
from training.model import Shape
from training.text import Text
from training.trainer import Trainer

from dash_attn.distributed import LAYOUTS
from dash_attn.receipts import Recorder, replays

# Steps between garbage collections, which all ranks run at once: a rank that pauses at another time delays all.
COLLECT_EVERY = 50


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=pathlib.Path, required=True, help="folder for losses, times, checkpoints and traces")
    add("--steps", type=int, default=100 if gpu else 10, help="the step at which the run ends")
    add("--batch", type=int, default=4, help="sequences per batch, over all processes")
    add("--seqlen", type=int, default=8192 if gpu else 64, help="tokens per sequence")
    add("--layers", type=int, default=24 if gpu else 2)
    add("--width", type=int, default=1024 if gpu else 64)
    add("--heads", type=int, default=8 if gpu else 4, help="query heads")
    add("--kv-heads", type=int, default=4, help="KV heads")
    add("--hidden", type=int, default=2816 if gpu else 128, help="columns of the MLP")
    add("--learning-rate", type=float, default=3e-4 if gpu else 3e-3)
    add("--seed", type=int, default=0, help="seed of the weights and of the order of the data")
    add("--text", help="a file, or a folder of *.py files; default: this Python's standard library")
    add("--attention", choices=ATTENTION, default="dash_attn", help="all but dash_attn are non-deterministic")
    add("--deterministic", action=argparse.BooleanOptionalAction, default=True, help="everything except attention")
    add("--context-parallel", type=int, default=1, metavar="N", help="processes that share a sequence")
    add("--layout", choices=LAYOUTS, default="zigzag", help="layout of the rows of a shared sequence")
    add("--checkpoint-every", type=int, default=50 if gpu else 5, metavar="STEPS")
    add("--resume", nargs="?", const=sys.maxsize, type=int, metavar="STEP",
        help="continue from the last checkpoint, or from the last up to STEP; later ones are set aside")  # fmt: skip
    add("--receipts", type=pathlib.Path, metavar="FOLDER", help="record fingerprints of all steps")
    add("--receipts-every", type=int, default=1, metavar="STEPS")
    add("--probe", type=pathlib.Path, metavar="FOLDER",
        help="record attention to inputs equal in all layouts, and in --receipts each layer's stages")  # fmt: skip
    add("--trace", type=int, nargs=2, metavar=("FIRST", "LAST"), help="steps to trace by torch.profiler, for Perfetto")
    add("--fault", metavar="FAULT", help="inject a fault: kill:RANK:STEP or slow:RANK:MILLISECONDS")
    add("--stale-memory", type=float, default=0, metavar="GIB",
        help="fill this much free GPU memory with NaN, to find reads of uninitialized memory")  # fmt: skip
    add("--timeout", type=float, default=300, metavar="SECONDS", help="seconds after which a missing rank is lost")
    add("--peak-tflops", type=float, default=flops.PEAK_TFLOPS if gpu else None, help="peak TFLOP/s, for MFU")
    return parser.parse_args(argv)


def device_of_process() -> torch.device:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def begin_group(device: torch.device, timeout_s: float) -> None:
    """Starts gloo in addition to NCCL, so that the hosts can exchange records without waiting for a GPU."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    # Imported modules stay, so garbage collections need not look at them again.
    gc.freeze()
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)


def end_group() -> None:
    """Drops all references to the group before it is destroyed; otherwise gloo's threads would outlive Python."""
    gc.collect()
    dist.destroy_process_group()


def exit_status(work: Callable[[torch.device], None], timeout_s: float, *expected: type[Exception]) -> int:
    """Calls `work` in a group of all ranks. Returns 0, or 2 after printing an `expected` error as one line."""
    device = device_of_process()
    begin_group(device, timeout_s)
    status = 0
    try:
        work(device)
    except expected as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    end_group()
    return status


def require_same(name: str, value: object) -> None:
    """Raises a ValueError on all ranks if they do not have the same value."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    others = [rank for rank, other in enumerate(values) if other != values[0]]
    if others:
        raise ValueError(
            f"{name} must be the same on all ranks: rank 0 has {values[0]}, {others[0]} has {values[others[0]]}"
        )


def profiler(out: pathlib.Path, span: list[int] | None, start: int, rank: int) -> torch.profiler.profile | None:
    """Returns a profiler that writes one trace per rank, for ui.perfetto.dev and Holistic Trace Analysis."""
    if span is None:
        return None
    first, last = (step - start for step in span)
    if not 1 <= first <= last:
        raise ValueError(f"--trace must be steps after the first, {start}, in ascending order, got {span}")
    (out / files.TRACES).mkdir(parents=True, exist_ok=True)
    path = out / files.TRACES / f"rank_{rank:05d}.json.gz"
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=first - 1, warmup=1, active=last - first + 1, repeat=1),
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(path)),
    )


def shower(config: dict) -> Callable[[int, float, StepTimes], None]:
    """Returns a function that prints a line per step."""
    total = sum(flops.of_a_step(config)) / 1e12
    tokens = config["sequences"] * config["seqlen"]

    def show(step: int, loss: float, times: StepTimes) -> None:
        rate = total / times.seconds / config["ranks"]
        mfu = f"  MFU {rate / config['peak_tflops']:.1%}" if config["peak_tflops"] else ""
        print(
            f"step {step}  loss {loss:.4f}  {times.seconds:.3f} s  {tokens / times.seconds:,.0f} tokens/s{mfu}",
            flush=True,
        )

    return show


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    """Trains, in a group that exists."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = Text(arguments.text)
    require_same("the text", text.sha256)
    shape = Shape(arguments.layers, arguments.width, arguments.heads, arguments.kv_heads, arguments.hidden)
    layout = Layout(rank, ranks, arguments.context_parallel, arguments.batch, arguments.seqlen, arguments.layout)
    config = {
        **dataclasses.asdict(shape), "sequences": arguments.batch, "seqlen": arguments.seqlen, "seed": arguments.seed,
        "learning_rate": arguments.learning_rate, "text": text.description, "text_sha256": text.sha256, "ranks": ranks,
        "context": layout.context, "order": layout.order, "attention": arguments.attention,
        "deterministic": arguments.deterministic, "peak_tflops": arguments.peak_tflops,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }  # fmt: skip
    # A replay of a step writes its own receipts, and nothing into the folder of the original run.
    wanted = replays.wanted()
    resume = arguments.resume is not None
    if resume and arguments.resume < 0:
        raise ValueError(f"--resume must be a step of at least 0, got {arguments.resume}")
    if wanted is None:
        files.check_config(arguments.out, config, resume=resume)
        dist.barrier()
    leave_stale_memory(device, arguments.stale_memory)
    fault = Fault(arguments.fault, rank, ranks, device)
    clock = Clock(device, shape.layers, fault)
    trainer = Trainer(
        shape, layout, device, attention=arguments.attention, deterministic=arguments.deterministic,
        learning_rate=arguments.learning_rate, seed=arguments.seed, clock=clock,
    )  # fmt: skip
    of_probe = wanted is not None and wanted.name.startswith(f"{probe.PREFIX}.")
    if arguments.probe is not None:
        if wanted is None or of_probe:
            attend = trainer.model.layers[0].attention.attend
            probe.attend_and_record(arguments.probe, attend, shape, layout, device, arguments.seed, resume=resume)
        probe.tap_stages(trainer.model, layout)
    start, folder = 0, arguments.out / files.CHECKPOINTS
    if resume:
        start = checkpoints.load_last(folder, arguments.resume, trainer.model, trainer.optimizer)
    trace = None if wanted is not None else profiler(arguments.out, arguments.trace, start, rank)
    if rank == 0:
        print(f"{ranks} ranks on {config['device']}, from step {start}: {text.description}, {text.sha256}", flush=True)
    with contextlib.ExitStack() as stack:
        recorder = None
        if arguments.receipts is not None:
            recorder = stack.enter_context(
                Recorder(
                    arguments.receipts, model=trainer.model, optimizer=trainer.optimizer, facts=config, resume=resume,
                    every=arguments.receipts_every, replay=f"{replays.launch_command()} --resume {{step}}",
                )
            )  # fmt: skip
        written = None
        if wanted is None:
            # Nothing in the run's folder changes before all arguments have been checked.
            checkpoints.drop_after(folder, start)
            written = files.Files(arguments.out, rank, start, config, shower(config))
            stack.callback(written.close, clock)
        if trace is not None:
            stack.enter_context(trace)
        gc.disable()
        stack.callback(gc.enable)
        for step in range(start, arguments.steps):
            fault.step = step
            try:
                with clock.step(step):
                    batch = text.batch(step, seed=arguments.seed, sequences=arguments.batch, seqlen=arguments.seqlen)
                    tokens, targets = (layout.cut_to(device, x) for x in (batch[:, :-1], batch[:, 1:]))
                    data = {"tokens": tokens, "targets": targets}
                    with (
                        contextlib.nullcontext()
                        if recorder is None
                        else recorder.step(step, data, shard=layout.shard())
                    ):
                        loss = trainer.step(tokens, targets)
                    if written is not None:
                        written.put_loss(step, loss)
            except Exception:
                print(f"rank {rank} failed in step {step}, {clock.place}", file=sys.stderr, flush=True)
                raise
            if trace is not None:
                trace.step()
            if written is None:
                continue
            written.write(clock.finished())
            if (step + 1) % arguments.checkpoint_every == 0:
                written.flush(clock)
                checkpoints.save(folder, step + 1, trainer.model, trainer.optimizer)
            if (step + 1) % COLLECT_EVERY == 0:
                gc.collect()


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    ordered.prepare(arguments.deterministic)
    expected = (ValueError, FileExistsError, ImportError)
    return exit_status(lambda device: run(arguments, device), arguments.timeout, *expected)


if __name__ == "__main__":
    sys.exit(main())

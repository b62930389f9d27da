"""Measures the cost of determinism in training: tokens per second, as medians of steps in alternating segments.

    torchrun --nproc-per-node 1 examples/train_costs.py --out costs.json

Attention is dash_attn's or that of the fastest of --peers, all non-deterministic. The rest of the step is deterministic
or not, and one variant records receipts of every step. On a CPU the sizes are tiny, and the results do not carry over
to a GPU.
"""

import argparse
import datetime
import functools
import gc
import json
import os
import pathlib
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from train import exit_status
from training import costs, ordered
from training.layout import Layout
from training.model import Shape
from training.safe_files import replace_text
from training.text import Text

import dash_attn


def parsed(argv: list[str] | None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=pathlib.Path, required=True, help="JSON file for the results")
    add("--seqlens", type=int, nargs="+", default=[2048, 8192, 32768] if gpu else [32, 64], help="tokens per sequence")
    add("--tokens", type=int, default=32_768 if gpu else 128, help="tokens per batch, over all processes")
    add("--layers", type=int, default=24 if gpu else 2)
    add("--width", type=int, default=1024 if gpu else 64)
    add("--heads", type=int, default=8 if gpu else 4)
    add("--kv-heads", type=int, default=4)
    add("--hidden", type=int, default=2816 if gpu else 128)
    add("--rounds", type=int, default=4 if gpu else 2, help="rounds, in each of which every variant has a segment")
    add("--steps", type=int, default=4 if gpu else 2, help="steps per segment")
    add("--peers", nargs="*", default=["flash_attn_3", "sdpa_cudnn", "sdpa_flash", "flash_attn_2"] if gpu else ["sdpa"])
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    text = Text()
    results: list[dict] = []
    shape = Shape(arguments.layers, arguments.width, arguments.heads, arguments.kv_heads, arguments.hidden)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU, tiny sizes: not comparable to a GPU"
    ranks = dist.get_world_size()
    for seqlen in arguments.seqlens:
        if arguments.tokens % (seqlen * ranks):
            raise ValueError(
                f"--tokens must be a multiple of {seqlen} tokens x {ranks} processes, got {arguments.tokens}"
            )
    of_run = {
        "device": name, "ranks": ranks, "torch": torch.__version__, "cuda": torch.version.cuda,
        "dash_attn": dash_attn.__version__, "commit": os.environ.get("DASH_ATTN_COMMIT", "unknown"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "shape": vars(shape),
        "tokens": arguments.tokens, "text": text.description, "results": results,
    }  # fmt: skip
    say = functools.partial(print, flush=True) if dist.get_rank() == 0 else lambda *_: None
    say(f"{ranks} of {name}, {arguments.tokens} tokens per step")
    for seqlen in arguments.seqlens:
        layout = Layout(dist.get_rank(), ranks, 1, arguments.tokens // seqlen, seqlen)
        peer, said = costs.fastest(arguments.peers, shape, layout, device)
        say(f"{seqlen} tokens: " + "; ".join(f"{peer}: {x}" for peer, x in said.items()))
        results.append({"seqlen": seqlen, "peers": said, "rows": []})
        with tempfile.TemporaryDirectory() as folder:
            bench = costs.Bench(shape, layout, device, text, pathlib.Path(folder))
            began = time.monotonic()
            rounds = costs.measure(bench, costs.variants(peer), rounds=arguments.rounds, steps=arguments.steps)
            for number, found in enumerate(rounds):
                results[-1]["rows"] = costs.medians(found, layout.tokens)
                say(f"round {number + 1} of {arguments.rounds}: {time.monotonic() - began:.0f} s")
                if dist.get_rank() == 0:
                    replace_text(arguments.out, json.dumps(of_run, indent=2) + "\n")
        del bench, rounds
        gc.collect()
        say(f"\n{costs.markdown(results[-1:])}\n")


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    ordered.prepare(True)
    return exit_status(lambda device: run(arguments, device), 300, ValueError)


if __name__ == "__main__":
    sys.exit(main())

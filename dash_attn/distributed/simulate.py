"""Predicts the time of attention over many GPUs: `python -m dash_attn.distributed.simulate --help`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from os import PathLike

from ..commands import exit_status
from ..pictures import check_picture, new_figure
from .layout import LAYOUTS
from .prediction import Costs, Prediction, Shape, predict

_HELP = {
    "forward_tflops": "TFLOP/s of the forward on one GPU, measured",
    "backward_tflops": "TFLOP/s of the backward on one GPU, measured",
    "node_gbs": "GB/s between one GPU and the GPUs of its node, assumed",
    "network_gbs": "GB/s between one GPU and other nodes, assumed",
    "hop_us": "microseconds of a message in addition to its bytes, assumed",
    "task_us": "microseconds of a launch in addition to its work, assumed",
    "gpus_of_node": "GPUs per node",
}

GPUS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def table(shape: Shape, predictions: Sequence[Prediction]) -> str:
    """Formats the predictions as lines of text, with times in milliseconds per layer."""
    mask = "causal" if shape.causal else "full"
    lines = [
        f"PREDICTION, not a measurement: {shape.seqlen} tokens, {shape.heads}/{shape.kv_heads} heads of "
        f"{shape.head_dim}, {mask} mask, {shape.layout} layout; milliseconds per layer",
        f"  {'GPUs':>5}{'heads x rows':>14}{'forward':>10}{'backward':>10}{'ideal sum':>11}{'of ideal':>10}  idle",
    ]
    for p in predictions:
        division = f"{p.ulysses} x {p.gather}"
        note = " network-bound" if p.network_bound else ""
        note += "" if p.played else " (formula)"
        lines.append(
            f"  {p.gpus:>5}{division:>14}{p.forward_ms:>10.3f}{p.backward_ms:>10.3f}{p.ideal_ms:>11.3f}"
            f"{p.share_of_ideal:>10.2f}  {p.idle_share:.1%}{note}"
        )
    lines.append("  of ideal: time of the products spread evenly over all GPUs / predicted time of both passes")
    lines.append("  idle: share of the backward's schedule; (formula): the plan was too long to simulate")
    return "\n".join(lines)


def draw(shape: Shape, predictions: Sequence[Prediction], path: str | PathLike[str]) -> None:
    """Draws the times and their share of the ideal over the number of GPUs, as a PNG file.

    Raises:
        ValueError: `path` does not end in .png.
        ImportError: matplotlib is not installed.
    """
    check_picture(path, "a prediction")
    figure = new_figure(11, 4.5)
    times, shares = figure.subplots(1, 2)
    gpus = [p.gpus for p in predictions]
    times.plot(gpus, [p.total_ms for p in predictions], "o-", label="forward and backward, predicted")
    times.plot(gpus, [p.ideal_ms for p in predictions], "--", color="gray", label="products spread evenly")
    times.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="milliseconds per layer")
    times.legend()
    shares.plot(gpus, [p.share_of_ideal for p in predictions], "o-")
    shares.set(xscale="log", xlabel="GPUs", ylabel="share of the ideal", ylim=(0, 1.02))
    for axes in (times, shares):
        axes.grid(alpha=0.3)
        axes.set_xticks(gpus, [str(n) for n in gpus], rotation=45)
        axes.minorticks_off()
    mask = "causal" if shape.causal else "full"
    heads = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}"
    figure.suptitle(f"PREDICTION, not a measurement: {shape.seqlen} tokens, {heads}, {mask}, {shape.layout}")
    figure.savefig(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dash_attn.distributed.simulate",
        description="Predicts the time of one layer's attention over 2 to 4,096 GPUs. Heads are spread by all-to-all "
        "within a node, keys are gathered beyond, and the gradients of keys are carried from rank to rank in the order "
        "of one process. The result is a PREDICTION from the costs of one GPU and its links. Nothing runs on a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    of_shape = parser.add_argument_group("shape")
    of_shape.add_argument("--seqlen", type=int, default=131_072, metavar="N", help="tokens per sequence")
    of_shape.add_argument("--heads", type=int, default=32, metavar="N", help="query heads")
    of_shape.add_argument("--kv-heads", type=int, default=8, metavar="N", help="KV heads")
    of_shape.add_argument("--head-dim", type=int, default=128, metavar="N", help="columns of q, k and v")
    of_shape.add_argument("--mask", choices=["causal", "full"], default="causal", help="mask")
    of_shape.add_argument("--layout", choices=LAYOUTS, default="zigzag", help="the rows that each rank holds")
    of_shape.add_argument("--gpus", type=int, nargs="+", default=list(GPUS), metavar="N", help="numbers of GPUs")
    of_costs = parser.add_argument_group("costs; rates are measured on one H200, links and hops are assumed")
    for field in dataclasses.fields(Costs):
        kind = int if field.name == "gpus_of_node" else float
        option = f"--{field.name.replace('_', '-')}"
        of_costs.add_argument(option, type=kind, default=field.default, metavar="X", help=_HELP[field.name])
    parser.add_argument("--png", default=None, metavar="PATH", help="also draw the prediction; needs matplotlib")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 2 if an argument is out of range."""
    arguments = _parser().parse_args(argv)
    names = {field.name for field in dataclasses.fields(Costs)}
    costs = Costs(**{name: value for name, value in vars(arguments).items() if name in names})
    shape = Shape(
        arguments.seqlen,
        arguments.heads,
        arguments.kv_heads,
        arguments.head_dim,
        arguments.mask == "causal",
        arguments.layout,
    )

    def show() -> None:
        predictions = [predict(shape, gpus, costs) for gpus in arguments.gpus]
        print(table(shape, predictions))
        if arguments.png is not None:
            draw(shape, predictions, arguments.png)
            print(f"wrote {arguments.png}")

    return exit_status(show, ValueError, ImportError, OSError)


if __name__ == "__main__":
    sys.exit(main())

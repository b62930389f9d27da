"""Summarizes a run's times: tokens per second, MFU, attention's share and rate, and which rank is slow in which layer.

python examples/train_report.py FOLDER [--skip 3] [--png heat_map.png]
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics

from . import flops
from .clock import PASSES
from .files import TIMES, read_config, read_lines, step_of_times

_SLOW = 1.05  # times the median of the ranks


@dataclasses.dataclass(frozen=True)
class Times:
    """Medians over the steps, except for the grid's means, because an intermittently slow GPU has a normal median.

    `grid[region]` has a row per rank and a column per layer: milliseconds of forward and backward."""

    config: dict
    steps: int
    seconds: float
    grid: dict[str, list[list[float]]]
    passes: dict[str, float]
    """Milliseconds per step of "attention forward" and so on, over all layers, the mean of the ranks."""


def read(folder: pathlib.Path, skip: int) -> Times:
    """Reads the times of a run without its first `skip` steps, in which libraries choose kernels and memory grows.

    Raises:
        ValueError: there are no times, or a file is damaged.
    """
    config = read_config(folder)
    files = sorted((folder / TIMES).glob("rank_*.jsonl"))[: config["ranks"] if config else 0]
    of_ranks = []
    for file in files:
        steps = [json.loads(line) for _, line in read_lines(file, step_of_times)]
        of_ranks.append([step for step in steps if step["step"] >= skip])
    if not of_ranks or not all(of_ranks):
        raise ValueError(f"{folder} must be the --out of a run of more than {skip} steps (--skip), got none")
    seconds = statistics.median(step["seconds"] for steps in of_ranks for step in steps)
    grid: dict[str, list[list[float]]] = {}
    passes: dict[str, float] = {}
    for region in ("attention", "mlp"):
        rows = []
        for steps in of_ranks:
            columns = zip(*([a + b for a, b in zip(*(s[f"{region} {p}"] for p in PASSES))] for s in steps))
            rows.append([statistics.mean(column) for column in columns])
        grid[region] = rows
        for of_pass in PASSES:
            name = f"{region} {of_pass}"
            passes[name] = statistics.mean(statistics.median(sum(s[name]) for s in steps) for steps in of_ranks)
    return Times(config, min(map(len, of_ranks)), seconds, grid, passes)


def slow_ranks(times: Times) -> list[tuple[int, str, float]]:
    """Returns the ranks that take more than 1.05 times the median rank's time for a region, the slowest first.

    With context parallelism the time of attention includes waiting for other ranks, and does not show which rank is
    slow. The time of the MLP does.
    """
    found = []
    for region, rows in times.grid.items():
        if region == "attention" and times.config["context"] > 1:
            continue
        sums = [sum(row) for row in rows]
        usual = statistics.median_low(sums)
        found += [(rank, region, x / usual) for rank, x in enumerate(sums) if x > _SLOW * usual]
    return sorted(found, key=lambda x: -x[2])


def text(times: Times) -> str:
    config = times.config
    linear, attention = flops.of_a_step(config)
    tokens = config["sequences"] * config["seqlen"]
    rate = (linear + attention) / times.seconds / config["ranks"] / 1e12
    lines = [
        f"{config['ranks']} ranks on {config['device']}, {times.steps} steps; medians of steps, means of layers",
        f"{times.seconds:.4f} s per step, {tokens / times.seconds:,.0f} tokens/s",
        f"model FLOPs ({flops.CONVENTION}): {(linear + attention) / 1e12:.4g} T per step, of which attention "
        f"{attention / (linear + attention):.1%}",
        f"{rate:.4g} TFLOP/s per rank"
        + (f", MFU {rate / config['peak_tflops']:.1%} of {config['peak_tflops']:g}" if config["peak_tflops"] else ""),
    ]
    own = attention / 3 / config["ranks"]
    for of_pass, products in zip(PASSES, (1.0, 2.5)):
        ms = times.passes[f"attention {of_pass}"]
        lines.append(
            f"attention {of_pass}: {ms:.3f} ms per step, {ms / 10 / times.seconds:.1f}% of it, "
            f"{own * products / ms / 1e9:.4g} TFLOP/s (of {'two' if of_pass == 'forward' else 'five'} products)"
        )
    if config["context"] > 1:
        lines.append("  including the movement between ranks and the wait for them")
    slow = slow_ranks(times)
    lines += [
        f"rank {rank} is slow: its {region} takes {ratio:.2f} times the median rank's" for rank, region, ratio in slow
    ]
    return "\n".join(lines if slow else [*lines, f"no rank takes more than {_SLOW} times the median rank's time"])


def draw(times: Times, path: pathlib.Path) -> None:
    """Draws the heat map: ranks by layers, the mean of the steps, as a multiple of the layer's median over ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ranks = len(next(iter(times.grid.values())))
    figure, axes = plt.subplots(1, 2, figsize=(12, 2.5 + 0.2 * min(ranks, 64)), layout="constrained")
    for axis, (region, rows) in zip(axes, times.grid.items()):
        usual = [statistics.median_low(column) for column in zip(*rows)]
        relative = [[x / y for x, y in zip(row, usual)] for row in rows]
        image = axis.imshow(relative, aspect="auto", vmin=0.9, vmax=1.3, cmap="inferno", interpolation="nearest")
        waiting = " (including waits)" if region == "attention" and times.config["context"] > 1 else ""
        axis.set(title=f"{region}{waiting}", xlabel="layer", ylabel="rank")
        for of_axis, count in ((axis.xaxis, len(usual)), (axis.yaxis, ranks)):
            of_axis.set_ticks(range(0, count, -(-count // 16)))
    figure.colorbar(image, ax=axes, label="multiple of the median rank")
    figure.savefig(path, dpi=120)
    plt.close(figure)

"""Draws a result of benchmarks.run as a PNG.

    python -m benchmarks.plot result.json result.png
    python -m benchmarks.plot result.json result.png --peers benchmarks/results/peers_h200.json --deterministic
"""

import argparse
import collections
import json
import pathlib

from benchmarks.shapes import Shape

OURS = "dash_attn"


def panels(result: dict, pass_: str) -> dict[tuple, dict[tuple, list[tuple[int, float]]]]:
    """(dtype, head_dim, heads, kv_heads, mask) to (impl, schedule, deterministic) to its (seqlen, TFLOP/s), by seqlen."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in result["rows"]:
        if row["pass"] == pass_:
            panel = tuple(row[field] for field in ("dtype", "head_dim", "heads", "kv_heads", "mask"))
            line = row["impl"], row["schedule"], row["deterministic"]
            found[panel][line].append((row["seqlen"], row["tflops"]))
    return {panel: {line: sorted(points) for line, points in lines.items()} for panel, lines in found.items()}


def with_peers(result: dict, peers: dict) -> dict:
    """The result with the peers of another one instead of its own."""
    shapes = {Shape.of_row(row) for row in result["rows"]}
    found = [row for row in peers["rows"] if row["impl"] != OURS and Shape.of_row(row) in shapes]
    return {**result, "rows": [row for row in result["rows"] if row["impl"] == OURS] + found}


def draw(result: dict, path: pathlib.Path, pass_: str | None = None) -> None:
    """TFLOP/s against seqlen, a panel for each head dim, number of heads and mask: ours and the deterministic peers in solid
    lines, the others dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pass_ = pass_ or next((p for p in ("backward", "both", "forward") if panels(result, p)), "backward")
    drawn = panels(result, pass_)
    if not drawn:
        raise ValueError(f"the result has no rows of pass {pass_!r}")
    columns = min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.5 * columns, 4 * rows), squeeze=False)
    names = sorted({line for lines in drawn.values() for line in lines}, key=lambda line: (line[0] != OURS, str(line)))
    colour = {line: f"C{i % 10}" for i, line in enumerate(names)}
    for axis, (panel, lines) in zip(axes.flat, drawn.items()):
        dtype, head_dim, heads, kv_heads, mask = panel
        for line in sorted(lines, key=names.index):
            impl, schedule, deterministic = line
            x, y = zip(*lines[line])
            label = " ".join(filter(None, (impl, schedule, None if deterministic else "(not deterministic)")))
            axis.plot(
                x,
                y,
                color=colour[line],
                linestyle="-" if deterministic else "--",
                marker="o" if impl == OURS else "s",
                linewidth=2 if impl == OURS else 1.2,
                markersize=4,
                label=label,
            )
        axis.set_xscale("log", base=2)
        lengths = sorted({x for points in lines.values() for x, _ in points})
        axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        axis.set_ylim(bottom=0)
        axis.set_title(f"{dtype}, head_dim {head_dim}, {heads} heads / {kv_heads} KV heads, {mask}", fontsize=10)
        axis.set_xlabel("seqlen")
        axis.set_ylabel("TFLOP/s")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in list(axes.flat)[len(drawn) :]:
        axis.axis("off")
    meta = result["meta"]
    figure.suptitle(f"{pass_}: {meta['gpu']}, CUDA {meta['cuda']}, torch {meta['torch']}, {meta['commit'][:12]}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=pathlib.Path)
    parser.add_argument("png", type=pathlib.Path)
    parser.add_argument("--pass", dest="pass_", help="default: the backward, where there are rows of it")
    parser.add_argument("--peers", type=pathlib.Path, help="draw the peers of this result instead of those of the other")
    parser.add_argument("--deterministic", action="store_true", help="leave out what is not deterministic")
    arguments = parser.parse_args()
    result = json.loads(arguments.json.read_text())
    if arguments.peers:
        result = with_peers(result, json.loads(arguments.peers.read_text()))
    if arguments.deterministic:
        result["rows"] = [row for row in result["rows"] if row["deterministic"]]
    draw(result, arguments.png, arguments.pass_)


if __name__ == "__main__":
    main()

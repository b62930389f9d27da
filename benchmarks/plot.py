"""Draws a result of benchmarks.run as a PNG.

python -m benchmarks.plot result.json result.png
python -m benchmarks.plot result.json result.png --peers benchmarks/results/peers_h200.json --deterministic
"""

import argparse
import collections
import json
import math
import pathlib
from collections.abc import Collection

from benchmarks import compare, sharded
from benchmarks.compare import OURS
from benchmarks.shapes import Shape


def are_series(shapes: Collection[Shape]) -> bool:
    """Whether most shapes differ from others only in the sequence length, without equal lengths, so that a line over
    the length shows them. Shapes that differ in several properties, such as sharded shapes, variable-length batches,
    windows and scores, have no such line."""
    if any(shape.pack or shape.mask == "window" or shape.scores for shape in shapes):
        return False
    lengths = collections.defaultdict(list)
    for shape in shapes:
        lengths[shape.dtype, shape.head_dim, shape.heads, shape.kv_heads, shape.mask].append(shape.seqlen)
    return 2 * len(lengths) <= len(shapes) and all(len(set(found)) == len(found) for found in lengths.values())


def panel_of(shape: Shape, series: bool) -> str:
    heads = f"{shape.heads} heads / {shape.kv_heads} KV heads, " if series else ""
    return f"{shape.dtype}, head_dim {shape.head_dim}, {heads}{shape.mask}"


def place_of(shape: Shape, series: bool) -> str:
    """Returns the label of a shape on the axis of its panel."""
    length = f"{shape.seqlen // 1024}k" if shape.seqlen % 1024 == 0 else str(shape.seqlen)
    if series:
        return length
    sequences = shape.pack or f"{shape.batch}x{length}"
    window = [shape.mask_name.removeprefix("window ")] if shape.mask == "window" else []
    scores = [shape.scores] if shape.scores else []
    return "\n".join([shape.heads_name, sequences, *window, *scores])


def size_of(shape: Shape) -> tuple[int, ...]:
    return shape.seqlen, shape.heads, shape.kv_heads, shape.batch, *shape.window


def panels(result: dict, pass_: str) -> dict[str, dict[tuple, dict[Shape, float]]]:
    """Maps titles to (impl, schedule, deterministic) to TFLOP/s of each shape, shortest sequences first."""
    rows = [row for row in result["rows"] if row["pass"] == pass_]
    series = are_series({Shape.of_row(row) for row in rows})
    found = collections.defaultdict(lambda: collections.defaultdict(dict))
    for row in rows:
        shape = Shape.of_row(row)
        line = row["impl"], row["schedule"], row["deterministic"]
        found[panel_of(shape, series)][line][shape] = row["tflops"]
    return {
        panel: {line: dict(sorted(points.items(), key=lambda item: size_of(item[0]))) for line, points in lines.items()}
        for panel, lines in found.items()
    }


def with_peers(result: dict, peers: dict) -> dict:
    """Returns the result with the baselines of another result instead of its own."""
    shapes = {Shape.of_row(row) for row in result["rows"]}
    found = [row for row in peers["rows"] if row["impl"] != OURS and Shape.of_row(row) in shapes]
    meta = {**result["meta"], "peers": "; baselines measured in other runs"}
    return {"meta": meta, "rows": [row for row in result["rows"] if row["impl"] == OURS] + found}


def label(line: tuple[str, str | None, bool]) -> str:
    impl, schedule, deterministic = line
    words = (compare.NAMES.get(impl, impl), schedule, None if deterministic else "(non-deterministic)")
    return " ".join(filter(None, words))


def draw(result: dict, path: pathlib.Path, pass_: str | None = None) -> None:
    """Draws TFLOP/s over seqlen with a panel per head dim, number of heads and mask, or shape by shape with a panel per
    head dim and mask. Our lines and those of deterministic baselines are solid, the others dashed. A line breaks where
    its baseline was not measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pass_ = pass_ or next((p for p in ("backward", "both", "forward") if panels(result, p)), "backward")
    drawn = panels(result, pass_)
    if not drawn:
        raise ValueError(f"the result must have rows of pass {pass_!r}, got none")
    series = are_series({shape for lines in drawn.values() for points in lines.values() for shape in points})
    columns = min(3 if series else 2, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.5 * columns, 4 * rows + 1), squeeze=False)
    names = sorted({line for lines in drawn.values() for line in lines}, key=lambda line: (line[0] != OURS, str(line)))
    colour = {line: f"C{i % 10}" for i, line in enumerate(names)}
    shown = {}
    for axis, (panel, lines) in zip(axes.flat, drawn.items()):
        shapes = sorted({shape for points in lines.values() for shape in points}, key=size_of)
        places = [shape.seqlen for shape in shapes] if series else range(len(shapes))
        for line in sorted(lines, key=names.index):
            measured = lines[line]
            ours = line[0] == OURS
            (shown[line],) = axis.plot(
                places,
                [measured.get(shape, math.nan) for shape in shapes],
                color=colour[line],
                linestyle="-" if line[2] else "--",
                marker="o" if ours else "s",
                linewidth=2 if ours else 1.2,
                markersize=4,
            )
        if series:
            axis.set_xscale("log", base=2)
        axis.set_xticks(places, [place_of(shape, series) for shape in shapes], fontsize=None if series else 8)
        axis.set_ylim(bottom=0)
        axis.set_title(panel, fontsize=10)
        axis.set_xlabel("seqlen" if series else "heads / KV heads, batch x seqlen")
        axis.set_ylabel("TFLOP/s")
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(drawn) :]:
        axis.axis("off")
    meta = result["meta"]
    ours = f"{pass_}: {meta['gpu']}, CUDA {meta['cuda']}, torch {meta['torch']}, dash_attn {meta['commit'][:12]}"
    figure.suptitle(ours + meta.get("peers", ""))
    figure.tight_layout(rect=(0, 0.05 + 0.03 / rows, 1, 1))
    lines = [line for line in names if line in shown]
    figure.legend([shown[line] for line in lines], map(label, lines), loc="lower center", ncols=5, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_ratios(result: dict, path: pathlib.Path) -> None:
    """Draws our throughput over the best baselines for a run of many shapes, with a panel per head dim and mask. Each
    line is a ratio, sorted from the worst shape to the best."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = sharded.ratios(result["rows"])
    groups = sorted({compare.group_of(shape) for of in found for shape in of})
    if not groups:
        raise ValueError("the result must have a shape with ours and a baseline, got none")
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.5 * columns, 3.5 * rows + 1), squeeze=False, sharey=True)
    for axis, group in zip(axes.flat, groups):
        for of, name in zip(found, sharded.HEADS):
            ordered = sorted(ratio for shape, ratio in of.items() if compare.group_of(shape) == group)
            axis.plot(range(1, len(ordered) + 1), ordered, label=name)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_title(group, fontsize=10)
        axis.set_xlabel("shapes, each line from the worst to the best")
        axis.set_ylabel("throughput over the baseline's")
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(groups) :]:
        axis.axis("off")
    meta = result["meta"]
    figure.suptitle(f"{meta['gpu']}, dash_attn {meta['commit'][:12]}")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def deterministic_only(result: dict) -> dict:
    return {**result, "rows": [row for row in result["rows"] if row["deterministic"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=pathlib.Path)
    parser.add_argument("png", type=pathlib.Path)
    parser.add_argument("--pass", dest="pass_", help="default: the backward if there are rows of it")
    parser.add_argument("--peers", type=pathlib.Path, help="draw the baselines of this result instead")
    parser.add_argument("--deterministic", action="store_true", help="leave out non-deterministic baselines")
    arguments = parser.parse_args()
    try:
        result = json.loads(arguments.json.read_text())
        if arguments.peers:
            result = with_peers(result, json.loads(arguments.peers.read_text()))
        draw(deterministic_only(result) if arguments.deterministic else result, arguments.png, arguments.pass_)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()

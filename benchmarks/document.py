"""Writes the generated parts of README.md, benchmarks/README.md and benchmarks/by_shape.md, and draws the pictures.

    R=benchmarks/results/RESULT
    python -m benchmarks.document $R.json --sharded ${R}_sharded.json --packed-bar ${R}_packed-bar.json \
        --windows-bar ${R}_windows-bar.json --head-dims ${R}_head-dims.json --scores ${R}_scores.json \
        --dropout ${R}_dropout.json

README.md quotes two figures, the cost of a training step and this result compared with the baselines of its own run,
and shows the picture. benchmarks/README.md also compares the result with benchmarks/results/peers_h200.json, and quotes
the results of the options: each option takes the result of the grid of its name, which has its own baselines.
benchmarks/by_shape.md lists those grids by shape. The picture of the result lies next to it with the suffix .png, and
the picture of the sharded shapes, which benchmarks/README.md shows, has the suffix _sharded.png.
"""

import argparse
import json
import pathlib
from typing import NamedTuple

from benchmarks import bars, compare, plot
from benchmarks.compare import Comparison
from benchmarks.files import prose, with_block
from benchmarks.shapes import Shape

ROOT = pathlib.Path(__file__).parents[1]
PEERS = ROOT / "benchmarks" / "results" / "peers_h200.json"
TRAINING = ROOT / "benchmarks" / "results" / "h200_2026-11-23_76127b1_training_costs.json"
MODULE = "benchmarks.document"
PICTURE = f"{MODULE}: the picture"
TARGET = 0.98  # of the throughput with atomics
THIS_RUN = "this run"
# By the names in examples/train_costs.py.
ATTENTIONS = {
    "sdpa_cudnn": "cuDNN",
    "sdpa_flash": "FlashAttention-2",
    "flash_attn_2": "FlashAttention-2",
    "flash_attn_3": "FlashAttention-3",
}


class Grid(NamedTuple):
    """A grid that is quoted from its own result: its description, and the name of its shapes."""

    what: str
    shapes: str


OWN_GRIDS = {
    "sharded": Grid("Shapes that one GPU of a tensor-parallel group sees", "the sharded shapes"),
    "sharded_held_out": Grid("Shapes of that kind that were not used for tuning", "the held-out sharded shapes"),
    "packed-bar": Grid("Variable-length batches of unequal and equal lengths", "the variable-length batches"),
    "windows-bar": Grid("Sliding windows", "the windows"),
    "head-dims": Grid("Head dims other than 128, of queries and keys and of values", "the head dims"),
    "scores": Grid("Softcaps, ALiBi and sinks", "the shapes with changed scores"),
    "dropout": Grid("Dropout", "the shapes with dropout"),
}


class Quoted:
    """A result compared with the baselines, and the results of the grids in OWN_GRIDS by name."""

    def __init__(self, result: pathlib.Path, peers: pathlib.Path = PEERS, **own: pathlib.Path | None):
        self.path, self.peers_path = result, peers
        self.own = {name: own[name] for name in OWN_GRIDS if own.get(name)}
        self.meta = json.loads(result.read_text())["meta"]
        self.peers_meta = json.loads(peers.read_text())["meta"]

    def against_peers(self, pass_: str) -> list[Comparison]:
        return compare.compare(compare.read(self.path, pass_), compare.read(self.peers_path, pass_))

    def in_one_run(self, pass_: str) -> dict[str, list[Comparison]]:
        """Returns the comparisons with the baselines that each run measured, by the run's name, including this one."""
        runs = {THIS_RUN: compare.read(self.path, pass_), **compare.read_runs(self.peers_path, pass_)}
        compared = {name: compare.compare(figures, figures) for name, figures in runs.items()}
        return {name: found for name, found in compared.items() if found}

    def runs_told(self) -> dict[str, str]:
        """Returns a description of each run in which both sides were measured."""
        told = {THIS_RUN: f"dash_attn {self.meta['commit'][:7]}", **self.peers_meta["same_run"]}
        if versions := self.meta.get("impls"):
            told[THIS_RUN] += f" beside {' and '.join(versions.values())}"
        return {run: told[run] for run in self.in_one_run("backward")}

    def of_own_grid(self, name: str, pass_: str) -> list[Comparison]:
        figures = compare.read(self.own[name], pass_)
        return compare.of_grid(compare.compare(figures, figures), name)


def listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def groups_of(rows: list[Comparison]) -> dict[tuple[int, str], list[Comparison]]:
    """Groups rows by head_dim and mask."""
    groups: dict[tuple[int, str], list[Comparison]] = {}
    for row in rows:
        groups.setdefault((row.shape.head_dim, row.shape.mask), []).append(row)
    return groups


def summary(rows: list[Comparison]) -> str:
    lines = []
    for (head_dim, mask), group in [*groups_of(rows).items(), (("all", ""), rows)]:
        ours = [c.ours.tflops for c in group]
        means = [compare.mean(group, deterministic) for deterministic in (True, False)]
        cells = [str(head_dim), mask, str(len(group)), f"{min(ours):.0f} to {max(ours):.0f}"]
        lines.append([*cells, *(f"{mean.ratio:.2f}" if mean else "-" for mean in means)])
    return table(["head_dim", "mask", "shapes", "TFLOP/s", "best deterministic baseline", "best other baseline"], lines)


def run_told(quoted: Quoted, name: str) -> str:
    """Returns the commit and the GPU of the result of a grid."""
    meta = json.loads(quoted.own[name].read_text())["meta"]
    return f"commit {meta['commit'][:12]} on one {meta['gpu'].split()[1]}"


def own_grid_line(quoted: Quoted, name: str) -> str:
    """Quotes our throughput over each baseline's, in geometric mean and minimum, from the grid's run; and
    variable-length batches over our dense call."""
    said = []
    for pass_ in ("backward", "forward"):
        rows = quoted.of_own_grid(name, pass_)
        means = {}
        for peer in compare.measured_peers(rows):
            shown = str(peer) if pass_ == "backward" else compare.NAMES[peer.impl]
            means[shown] = compare.mean(rows, peer.deterministic, peer.impl)
        if dense := compare.dense_mean(rows):
            means["our dense call on variable-length batches of equal lengths"] = dense
        for shown, mean in means.items():
            said.append(f"the {pass_} {mean.ratio:.2f} times that of {shown}, minimum {mean.least:.2f} ({mean.shapes})")
    return prose(
        f"""{OWN_GRIDS[name].what} (`--grid {name}`), both sides in one run of {run_told(quoted, name)}. Geometric mean
        of our throughput over the baseline's, the minimum, and the number of shapes: {"; ".join(said)}."""
    )


def own_grid_table(quoted: Quoted, name: str) -> str:
    """Quotes a grid with targets: every ratio, and its target."""
    claims = bars.CLAIMS[name](bars.Run(quoted.own[name], name))
    if not claims:
        raise SystemExit(f"error: --{name} must be a result of that grid with peers, got {quoted.own[name]}")
    said = prose(
        f"""{OWN_GRIDS[name].what} (`--grid {name}`), both sides in one run of {run_told(quoted, name)}. Speedup
        (geometric mean, minimum), and the target where there is one."""
    )
    return f"{said}\n\n{table(bars.HEADS, [claim.cells() for claim in claims])}"


def own_grid(quoted: Quoted, name: str) -> str:
    said = own_grid_table(quoted, name) if name in bars.CLAIMS else own_grid_line(quoted, name)
    if name == "sharded":
        said += f"\n\n![Throughput over the best baselines, shape by shape](results/{sharded_picture(quoted).name})"
    return said


def sharded_picture(quoted: Quoted) -> pathlib.Path:
    return quoted.path.with_name(f"{quoted.path.stem}_sharded.png")


def training_ratios(path: pathlib.Path = TRAINING) -> dict[int, tuple[float, str]]:
    """Returns, by the tokens per sequence, the speed of a fully deterministic training step with dash_attn over that of
    a non-deterministic step with the baseline, and the baseline's name."""
    found = {}
    for result in json.loads(path.read_text())["results"]:
        plain = [row for row in result["rows"] if not row["receipts"]]
        rows = {(row["attention"] == "dash_attn", row["deterministic"]): row for row in plain}
        ours, baseline = rows[True, True], rows[False, False]
        ratio = ours["tokens_per_second"] / baseline["tokens_per_second"]
        found[result["seqlen"]] = ratio, ATTENTIONS[baseline["attention"]]
    return found


def of_training() -> str:
    meta, ratios = json.loads(TRAINING.read_text()), training_ratios()
    (baseline,) = {name for _, name in ratios.values()}
    fa3_is_absent = all(result["peers"]["flash_attn_3"].startswith("not here") for result in meta["results"])
    absent = " FlashAttention-3 was not installed there;" if fa3_is_absent else ""
    return prose(
        f"""- **Training.** A fully deterministic training step with dash_attn runs at
        {listed([f"{ratio:.2f}" for ratio, _ in ratios.values()])} times the speed of a non-deterministic step with
        {baseline} attention, at {listed([f"{tokens:,}" for tokens in ratios])} tokens per sequence (one
        {meta["device"].split()[1]}, {meta["shape"]["layers"]} layers, {meta["tokens"]:,} tokens per step;{absent}
        [measurement](docs/training.md#what-it-costs)).""",
        indent="  ",
    )


def of_kernels(quoted: Quoted) -> str:
    """Compares with the baselines of this run, and with FlashAttention-4, which was measured separately."""
    backward, forward = (quoted.in_one_run(pass_).get(THIS_RUN, []) for pass_ in ("backward", "forward"))
    here = compare.measured_peers(backward)
    names = {mode: [compare.NAMES[peer.impl] for peer in here if peer.deterministic == mode] for mode in (True, False)}
    if not (names[True] and names[False] and forward):
        raise SystemExit(
            f"error: {quoted.path} must have both passes with baselines of its run, deterministic and others"
        )
    ordered, other, of_forward = *(compare.mean(backward, mode) for mode in (True, False)), compare.mean(forward, True)
    apart = [compare.mean(quoted.against_peers("backward"), mode, "fa4") for mode in (True, False)]
    most = "faster" if len(names[False]) == 2 else "fastest"
    return prose(
        f"""- **Kernels.** The backward has {ordered.ratio:.2f} times the throughput of {listed(names[True])} in
        deterministic mode, and {other.ratio:.2f} times that of the {most} of {listed(names[False])} without
        determinism. The forward has {of_forward.ratio:.2f} times that of the fastest of these baselines. The figures
        are geometric means over {ordered.shapes} shapes in bf16, from one run on one {quoted.meta["gpu"].split()[1]};
        the minima are {ordered.least:.2f}, {other.least:.2f} and {of_forward.least:.2f}. Compared with
        FlashAttention-4's deterministic and non-deterministic modes, measured in separate runs at {apart[0].shapes}
        shapes, the backward has {apart[0].ratio:.2f} and {apart[1].ratio:.2f} times the throughput
        ([every figure](benchmarks/README.md)).""",
        indent="  ",
    )


def readme(quoted: Quoted) -> str:
    return f"\n{of_training()}\n{of_kernels(quoted)}\n\n"


def picture(quoted: Quoted) -> str:
    path = quoted.path.with_suffix(".png").relative_to(ROOT)
    shown = f"![Throughput of the backward]({path})"
    said = f"""Throughput of the backward in TFLOP/s by sequence length, on one {quoted.meta["gpu"].split()[1]}, commit
        {quoted.meta["commit"][:12]}: dash_attn and the baselines of the same run."""
    return f"\n{shown}\n\n{prose(said)}\n\n"


def of_schedules(quoted: Quoted, schedule: str, other: str) -> dict[Shape, float]:
    """Returns the backward's throughput with one schedule over another, at the shapes where both were measured."""
    ratios = {}
    for shape, figures in compare.read(quoted.path, "backward").items():
        by_schedule = {f.schedule: f.tflops for f in figures if f.impl == compare.OURS}
        if {schedule, other} <= by_schedule.keys():
            ratios[shape] = by_schedule[schedule] / by_schedule[other]
    return ratios


def order_free(quoted: Quoted) -> str:
    mean = compare.mean_of(of_schedules(quoted, "order_free", "auto"))
    said = '`schedule="order_free"` has {:.2f} times the throughput of `"auto"` (minimum {:.2f}).'
    return said.format(mean.ratio, mean.least) if mean else ""


def grid(rows: list[Comparison]) -> str:
    """Lists every shape with the best baselines, and those that were not measured there. For variable-length batches,
    also our throughput over our dense call."""
    notes, missing = compare.footnotes(rows)
    series = plot.are_series([row.shape for row in rows])
    with_dense = any(row.dense for row in rows)
    lines = []
    for row in rows:
        shape, note = row.shape, notes[row.shape]
        length = shape.sequences_name if shape.pack else f"{shape.batch} x {shape.seqlen}"
        cells = [str(shape.head_dim), shape.heads_name, shape.mask_name, str(shape.seqlen) if series else length]
        cells.append(f"**{row.ours.tflops:.0f}**")
        if with_dense:
            cells.append(f"{row.ratio(row.dense):.2f}" if row.dense else "-")
        for deterministic in (True, False):
            peer = row.best(deterministic)
            cells += [f"{peer.tflops:.0f} ({peer.name})", f"{row.ratio(peer):.2f}"] if peer else ["-", "-"]
        lines.append([*cells, note])
    heads = ["head_dim", "heads", "mask", "seqlen" if series else "batch x seqlen", "dash_attn"]
    heads += ["over dense"] * with_dense + ["best deterministic baseline", "ratio", "best other baseline", "ratio"]
    modes = {True: "deterministic", False: "non-deterministic"}
    shown = []
    for letter, peers in missing.items():
        said = [
            f"{modes[mode]}: {', '.join(compare.NAMES[p.impl] for p in peers if p.deterministic == mode)}"
            for mode in (True, False)
            if any(p.deterministic == mode for p in peers)
        ]
        shown.append(prose(f"- {letter}: {'; '.join(said)}", indent="  "))
    found = table([*heads, "missing"], lines)
    legend = "These baselines were not measured at the shape:\n\n" + "\n".join(shown)
    return f"{found}\n\n{legend}" if shown else found


def counts(rows: list[Comparison]) -> str:
    """Counts the shapes of each group at which each baseline was measured."""
    groups = groups_of(rows)
    lines = []
    for peer in compare.measured_peers(rows):
        found = [sum(c.best(peer.deterministic, peer.impl) is not None for c in group) for group in groups.values()]
        lines.append([str(peer), *map(str, found)])
    heads = [f"{head_dim} {mask} ({len(group)})" for (head_dim, mask), group in groups.items()]
    return table(["backward, shapes measured", *heads], lines)


def shown_mean(mean: compare.Mean | None) -> str:
    return f"{mean.ratio:.2f} ({mean.shapes})" if mean else "-"


def to_each_peer(quoted: Quoted, pass_: str) -> str:
    """Tabulates the mean ratio to each baseline, in separate runs and in runs with both sides."""
    apart, together = quoted.against_peers(pass_), quoted.in_one_run(pass_)
    lines = []
    for peer in compare.measured_peers(apart):
        cells = []
        for rows in (apart, *together.values()):
            cells.append(shown_mean(compare.mean(rows, peer.deterministic, peer.impl)))
        lines.append([str(peer) if pass_ == "backward" else compare.NAMES[peer.impl], *cells])
    for deterministic, name in ((True, "the best deterministic"), (False, "the best other")):
        means = [compare.mean(rows, deterministic) for rows in (apart, *together.values())]
        if any(means):
            label = name if pass_ == "backward" else "the best"
            lines.append([label, *map(shown_mean, means)])
    return table([pass_, "separate runs", *together], lines)


def yardstick(quoted: Quoted) -> str:
    """Compares with the same kernel with plain fp32 atomics, if the result has it."""
    ratios = of_schedules(quoted, "auto", "atomic")
    if not ratios:
        return ""
    below = [f"{shape} ({ratio:.3f})" for shape, ratio in ratios.items() if ratio < TARGET]
    return prose(
        f"""Compared with the same kernel with plain fp32 atomics, which is non-deterministic (`--schedules atomic`):
        {compare.geometric_mean(list(ratios.values())):.3f} in geometric mean, {min(ratios.values()):.3f} to
        {max(ratios.values()):.3f}. """
        + (f"Below the target of {TARGET}: {', '.join(below)}." if below else f"None is below the target of {TARGET}.")
    )


def details(quoted: Quoted) -> str:
    backward, both = quoted.against_peers("backward"), quoted.against_peers("both")
    here = quoted.in_one_run("backward")[THIS_RUN]
    with_fa3 = compare.mean([row for row in backward if row.best(True, "fa3")], True)
    means = [compare.mean(both, deterministic) for deterministic in (True, False)]
    meta, name = quoted.meta, quoted.path.name
    through_autograd = any(row["pass"] == "both" for row in json.loads(quoted.path.read_text())["rows"])
    how = "through autograd" if through_autograd else "computed from both passes"
    impls = [
        prose(f"- {compare.NAMES[impl]}: {what}.", indent="  ") for impl, what in quoted.peers_meta["impls"].items()
    ]
    parts = [
        prose(
            f"""[`{name}`](results/{name}): commit {meta["commit"]}, {meta["gpu"]}, driver {meta["driver"]}, CUDA
            {meta["cuda"]}, torch {meta["torch"]}. Throughput of the backward with `schedule="auto"` in bf16, and the
            geometric mean of its ratio to the best baseline of the same run:"""
        ),
        summary(here),
        *([shown] if (shown := order_free(quoted)) else []),
        "Every shape, in TFLOP/s, compared with the best baselines of the same run:",
        grid(here),
        "The same, compared with baselines of other runs:",
        grid(backward),
        "The number of shapes at which each baseline was measured, by head_dim and mask:",
        counts(backward),
        "The baselines:",
        "\n".join(impls),
        prose(f"Not included: {quoted.peers_meta['left_out']}."),
        prose(
            f"""Geometric means of our throughput over the baseline's, with the number of shapes. The first column
            compares separate runs. In the other columns the baseline was measured in one run with ours:
            {"; ".join(f"{run} is {what}" for run, what in quoted.runs_told().items())}."""
        ),
        to_each_peer(quoted, "backward"),
        to_each_peer(quoted, "forward"),
        prose(
            f"""Over the {with_fa3.shapes} shapes with a figure of deterministic FlashAttention-3, the ratio to the best
            deterministic baseline in separate runs is {with_fa3.ratio:.2f}."""
        ),
        prose(
            f"""Forward and backward together (ours {how}, a baseline's backward after the fastest forward of any) have,
            in separate runs, {means[0].ratio:.2f} times the throughput of the best deterministic baseline
            ({means[0].shapes} shapes) and {means[1].ratio:.2f} times that of the best other ({means[1].shapes})."""
        ),
        yardstick(quoted),
    ]
    parts += [own_grid(quoted, name) for name in quoted.own]
    return "\n" + "\n\n".join(filter(None, parts)) + "\n\n"


def by_shape(quoted: Quoted) -> str:
    """Lists the grids that have their own results."""
    parts = []
    for name, path in quoted.own.items():
        for pass_ in ("backward", "forward"):
            if name in bars.CLAIMS:
                of_pass = table(*bars.ratios_by_shape(bars.Run(path, name), pass_))
            else:
                of_pass = grid(quoted.of_own_grid(name, pass_))
            parts += [f"The {pass_} of {OWN_GRIDS[name].shapes}, {run_told(quoted, name)}:", of_pass]
    return "\n" + "\n\n".join(parts) + "\n\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=pathlib.Path)
    for name in OWN_GRIDS:
        parser.add_argument(f"--{name}", type=pathlib.Path, help=f"also quote this result of --grid {name}")
    arguments = parser.parse_args(argv)
    own = {name: getattr(arguments, name.replace("-", "_")) for name in OWN_GRIDS}
    quoted = Quoted(arguments.result.resolve(), **own)
    here = ROOT / "benchmarks"
    blocks = {ROOT / "README.md": readme, here / "README.md": details, here / "by_shape.md": by_shape}
    # Everything is computed before anything is written.
    written = {path: with_block(path.read_text(), MODULE, block(quoted)) for path, block in blocks.items()}
    written[ROOT / "README.md"] = with_block(written[ROOT / "README.md"], PICTURE, picture(quoted))
    plot.draw(json.loads(quoted.path.read_text()), quoted.path.with_suffix(".png"), "backward")
    if path := quoted.own.get("sharded"):
        plot.draw_ratios(json.loads(path.read_text()), sharded_picture(quoted))
    for path, text in written.items():
        path.write_text(text)


if __name__ == "__main__":
    main()

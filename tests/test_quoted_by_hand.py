"""The figures that benchmarks/few_heads_masks_decoding.md and docs/ quote by hand are those of committed results."""

import json
import pathlib
import re
import statistics

import pytest
import test_readme as readme

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "benchmarks" / "few_heads_masks_decoding.md").read_text()
RUN = "h200_2026-11-"


def rows_of(*names):
    return [row for name in names for row in json.loads((readme.RESULTS / f"{RUN}{name}.json").read_text())["rows"]]


def test_every_result_is_quoted():
    """By a page or a program; a run that nothing quotes any more is in the history."""
    own = {path.name for path in readme.OWN.values()}
    folders = "README.md", "benchmarks/*.*", "dash_attn/**/*.py", "docs/**/*.md", "tests/*.py"
    text = "".join(path.read_text() for pattern in folders for path in ROOT.glob(pattern))
    patterns = re.findall(r"h[12]00_[\w.*-]*\*[\w.*-]*\.json", text)
    assert not [
        path.name
        for path in readme.RESULTS.iterdir()
        if path.name not in own | {readme.RESULT.name}
        and path.name not in text
        and not any(path.match(pattern) for pattern in patterns)
    ]


def words(page):
    return " ".join((ROOT / page).read_text().split())


SHARDED = rows_of("28_f05c3d1_sharded_1", "28_129c590_sharded_2")
BACKWARD = readme.ours(SHARDED, "backward")
FASTER = {
    shape: max(tflops, readme.ours(SHARDED, "backward", "order_free")[shape]) for shape, tflops in BACKWARD.items()
}
OTHER = readme.theirs(SHARDED, "backward", False)


@pytest.mark.parametrize(
    "said, mine, peers",
    [
        ("backward, `auto` | best non-deterministic", BACKWARD, OTHER),
        ("backward, `auto` | deterministic", BACKWARD, readme.theirs(SHARDED, "backward", True)),
        ("backward, the faster of `auto` and `order_free` | best non-deterministic", FASTER, OTHER),
        ("forward | best", readme.ours(SHARDED, "forward"), readme.theirs(SHARDED, "forward")),
    ],
)
def test_few_heads(said, mine, peers):
    ratios = readme.ratios_of(mine, peers)
    assert len(ratios) == 240
    below = sum(ratio < 0.9 for ratio in ratios)
    assert f"| {said} | {statistics.geometric_mean(ratios):.2f} | {min(ratios):.2f} | {below} |" in PAGE


def test_where_few_heads_are_slow():
    text = words("benchmarks/few_heads_masks_decoding.md")

    def over(mine, fits):
        fitting = {shape: mine[shape] for shape in mine if fits(dict(zip(readme.SHAPE, shape)))}
        ratios = readme.ratios_of(fitting, OTHER)
        return f"{statistics.geometric_mean(ratios):.2f}", f"{min(ratios):.2f}", len(ratios)

    def batch(mask, batch, seqlen):
        return over(BACKWARD, lambda s: (s["mask"], s["batch"], s["seqlen"]) == (mask, batch, seqlen))[0]

    alone = over(BACKWARD, lambda s: s["heads"] == s["kv_heads"] <= 2)[0]
    assert (
        f"({batch('full', 1, 8192)} for one sequence of 8,192 tokens, {batch('full', 2, 4096)} for two of 4,096)"
        in text
    )
    assert f"with one or two KV heads without groups ({alone})" in text
    assert f"2,048 tokens ({batch('full', 1, 2048)} full, {batch('causal', 1, 2048)} causal)" in text
    long = [over(mine, lambda s: s["batch"] * s["seqlen"] * s["kv_heads"] >= 32768) for mine in (BACKWARD, FASTER)]
    assert (
        f"Over the {long[0][2]} shapes" in text and f"{long[0][0]} times the throughput (minimum {long[0][1]})" in text
    )
    assert f"the two schedules {long[1][0]} times (minimum {long[1][1]})" in text
    shape = (128, 8, 1, "causal", 8192, 1)
    fa4 = [readme.theirs(SHARDED, "backward", mode, "fa4")[shape][0][1] for mode in (True, False)]
    assert f"`auto` has {BACKWARD[shape]:.0f} TFLOP/s" in text
    assert f"FlashAttention-4 {fa4[0]:.0f} with determinism and {fa4[1]:.0f} without" in text


def column_ratios(name, head_dim):
    """By case and tokens: ours over the baseline's, by baseline and pass."""
    found = {}
    for row in rows_of(name):
        if row["head_dim"] != head_dim:
            continue
        found.setdefault((row["case"], row["seqlen"]), {})[row["impl"], row["pass"]] = row["tflops"]
    return {
        case: {
            (impl, pass_): of_case["columns", pass_] / tflops
            for (impl, pass_), tflops in of_case.items()
            if impl != "columns"
        }
        for case, of_case in found.items()
    }


OLD, NEW = "28_129c590_column_masks_128", "29_6b9e0ac_column_masks"
WIDE, NARROW = column_ratios(OLD, 128) | column_ratios(NEW, 128), column_ratios(NEW, 64)
LONG = WIDE.keys() - NARROW.keys()
ORDER = [(of, pass_) for pass_ in ("forward", "backward") for of in ("own", "flex")]


def test_column_masks():
    for (case, tokens), ratios in WIDE.items():
        own = "packs" if ("packs", "forward") in ratios else "causal"
        cells = ["hides nothing" if case.startswith("nothing") else case, f"{tokens:,}"]
        cells.append({"packs": "packed batch", "causal": "causal kernel"}[own])
        for table in (WIDE, NARROW):
            of_case = table.get((case, tokens))
            at = [of_case and of_case[own if of == "own" else of, pass_] for of, pass_ in ORDER]
            cells += ["–" if ratio is None else f"{ratio:.2f}" for ratio in at]
        cells[1] += "*" if (case, tokens) in LONG else ""
        assert f"| {' | '.join(cells)} |" in PAGE
    assert PAGE.count(" | packed batch | ") + PAGE.count(" | causal kernel | ") == len(WIDE)


def test_the_speed_of_column_masks():
    text = words("docs/masks.md")
    documents = {case: ratios for case, ratios in WIDE.items() if case[0].startswith("documents of")}
    usual = [ratios for (case, _), ratios in documents.items() if case != "documents of 1024"]
    short = [ratios for (case, _), ratios in documents.items() if case == "documents of 1024"]

    def reach(cases, impl, *passes, digits=2):
        ratios = [ratios[impl, pass_] for ratios in cases for pass_ in passes]
        return f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}"

    assert f"at {reach(usual, 'packs', 'forward')} of the speed" in text
    assert f"at {reach(usual, 'packs', 'backward')} in the backward" in text
    assert f"They are {reach(usual, 'flex', 'forward', 'backward', digits=1)} times as fast" in text
    assert f"1,024 tokens run at {reach(short, 'packs', 'forward', 'backward')} of" in text
    costs = [round(100 - 100 * WIDE[f"nothing at {n}", n]["causal", "forward"]) for n in (16384, 4096)]
    assert f"costs {costs[0]}% at 16,384 tokens and {costs[1]}% at 4,096 tokens" in text


def test_a_later_run_of_column_masks():
    ratios = column_ratios("29_cc098fc_column_masks", 128)

    def quoted(cases, other, *passes):
        return [f"{ratios[case][other, pass_]:.2f}" for case in cases for pass_ in passes]

    nothing = [(f"nothing at {n}", n) for n in (1024, 4096, 16384)]
    text = words("benchmarks/few_heads_masks_decoding.md")
    for pass_ in ("forward", "backward"):
        first, second, third = quoted(nothing, "causal", pass_)
        assert f"at {first}, {second} and {third}" in text
    for case, other in ((16384, "packs"), (65536, "packs")):
        assert "at {} and {}".format(*quoted([("documents of 1024", case)], other, "forward", "backward")) in text
    assert (
        "at {} and {} of the causal".format(*quoted([("question of 512", 16896)], "causal", "forward", "backward"))
        in text
    )


def test_small_pages():
    page = (ROOT / "docs" / "design_decisions.md").read_text()
    rows = [row for row in rows_of("29_6b9e0ac-dirty_pages_and_plans") if "seqlen" in row and row["new_tokens"] == 1]
    shapes = (64, 8192, 8), (1, 32768, 8), (16, 8192, 1)

    def times(version, size, run):
        of_shape = {
            (row["batch"], row["seqlen"], row["kv_heads"]): row["us"][size]
            for row in rows
            if (row["version"], row["run"]) == (version, run) and row["head_dim"] == 128
        }
        return " | ".join(f"{of_shape[shape]:,.0f}" for shape in shapes)

    for version, run in (("6b9e0ac", 1), ("chunks", 1), ("look-ups", 2), ("all buffers", 2), ("always a copy", 1)):
        assert f" | {times(version, '1', run)} |" in page
    assert f"| a plain cache | {times('look-ups', 'plain', 2)} |" in page


def test_decoding():
    rows = rows_of("29_e3c94fc_decoding")
    for row in rows:
        speed = row["tb_per_s"]
        cells = [f"{row['batch']} x {row['seqlen']}", f"{row['heads']}/{row['kv_heads']}", row["head_dim"]]
        cells += [row["new_tokens"], f"{speed['plain']:.2f}"]
        cells += [f"{speed[page] / speed['plain']:.2f}" for page in ("1", "16", "64", "100")]
        assert f"| {' | '.join(map(str, cells))} |" in PAGE
    for row in rows_of("28_d45d1ce-dirty_short_tiles"):
        cells = [f"{row['batch']} x {row['seqlen']}", f"{row['heads']}/{row['kv_heads']}", row["head_dim"]]
        cells += [row["us"][cache][when] for cache in ("plain", "64") for when in ("before", "after")]
        assert f"| {' | '.join(map(str, cells))} |" in PAGE
    few = [row for row in rows if row["batch"] * row["kv_heads"] <= 64 and row["head_dim"] == 128]
    speeds = [1000 * row["tb_per_s"]["plain"] / (row["batch"] * row["kv_heads"]) for row in few]
    assert f"{min(speeds):.0f} to {max(speeds):.0f} GB/s" in PAGE
    (small,) = (row for row in rows if (row["batch"], row["kv_heads"]) == (16, 1))
    assert f"reach {small['tb_per_s']['plain']:.2f} TB/s of an H200's 4.8" in words("docs/usage.md")
    (one_head,) = (row for row in rows if (row["batch"], row["kv_heads"]) == (64, 1))
    (eight,) = (
        row for row in rows if [row[key] for key in ("batch", "heads", "kv_heads", "new_tokens")] == [64, 32, 8, 1]
    )
    text = words("CHANGELOG.md")
    assert f"one KV head are read at {one_head['tb_per_s']['plain']:.2f} TB/s" in text
    assert f"Pages of 64 reach {eight['tb_per_s']['64'] / eight['tb_per_s']['plain']:.2f} of a plain cache" in text
    ones = sorted(
        row["tb_per_s"]["1"] / row["tb_per_s"]["plain"]
        for row in rows
        if row["batch"] * row["kv_heads"] <= 64 and row["head_dim"] == 128
    )
    assert f"and at {ones[0]:.2f} to {ones[-1]:.2f} otherwise" in text


def test_steps_of_decoding_without_a_plan():
    rows = [row for row in rows_of("29_e3c94fc_steps_without_a_plan") if "l2" not in row]
    planned = "64x8192 32/8", "256x2048", "33x2000"

    def kind(call):
        if call.startswith("cache") and not any(shape in call for shape in planned):
            return "steps"
        return next((mask for mask in ("causal", "window") if mask in call), "with a plan")

    ratios = {}
    for row in rows:
        ratios.setdefault(kind(row["call"]), []).append(min(row["after_us"]) / min(row["before_us"]))
    steps, limits = ratios["steps"], {name: (f"{min(x):.2f}", f"{max(x):.2f}") for name, x in ratios.items()}
    text = words("docs/design_decisions.md")
    assert f"In {len(steps)} of these calls the time is {limits['steps'][0]} to {limits['steps'][1]} of" in text
    assert f"({statistics.geometric_mean(steps):.2f} on average)" in text
    assert limits["causal"] == ("0.99", "1.00") and limits["window"] == ("1.00", "1.02")
    assert limits["with a plan"] == ("1.00", "1.01")


def kinds_of_calls(name):
    """{(pass, kind of call): the new time over the old one of each call}."""
    found = {}
    for row in rows_of(name):
        if "call" in row:
            kind = "cache" if row["call"].startswith("cache") else row["call"].split()[-1]
            ratio = min(row["after_us"]) / min(row["before_us"])
            found.setdefault((row["pass"], kind), {})[row["call"]] = ratio
    return found


def test_divisions_and_branches():
    found = kinds_of_calls("29_cc098fc_windows_chunks_pages")
    text, changes = words("docs/design_decisions.md"), words("CHANGELOG.md")

    def mean(pass_, kind, of=found):
        return f"{statistics.geometric_mean(of[pass_, kind].values()):.2f}"

    forward = [mean("forward", kind) for kind in ("window", "chunk", "packwindow")]
    backward = [mean("backward", kind) for kind in ("window", "chunk", "packwindow")]
    assert "is {} for windows, {} for chunks and {} for packs with windows".format(*forward) in text
    assert "in the forward, {}, {} and {} in the backward".format(*backward) in text
    assert (
        "with a window takes {} of the time, a forward with chunks {} and a forward of packs with windows {}".format(
            *forward
        )
        in changes
    )
    assert "the backward takes {}, {} and {}".format(*backward) in changes
    pages = {call: ratio for call, ratio in found["forward", "cache"].items() if "page None" not in call}
    small = [ratio for call, ratio in pages.items() if re.search(r"page (1|100) ", call)]
    assert f"{min(small):.2f} to {max(small):.2f} for pages of 1 or 100 rows" in text
    cut = [ratio for call, ratio in pages.items() if int(re.search(r"page (\d+)", call)[1]) % 16]
    assert f"takes {min(cut):.2f} to {max(cut):.2f} of the time" in changes
    usual = {mean(pass_, kind) for pass_ in ("forward", "backward") for kind in ("causal", "full")}
    assert usual <= {"0.99", "1.00"}
    planner = kinds_of_calls("29_32f49d1-dirty_planner")
    packs, chunks = (mean("backward", kind, planner) for kind in ("packwindow", "chunk"))
    assert f"packs with windows takes {packs} of the time of before the divisions, and that of chunks {chunks}" in text
    without = kinds_of_calls("29_716f94a-dirty_divisions")
    assert f"{mean('backward', 'window', without)} of the time became {mean('backward', 'window')}" in text


def test_masks_as_windows():
    rows = [row for row in rows_of("29_cc098fc_windows_chunks_pages") if row["pass"] == "backward" and "call" in row]
    times = {row["call"]: min(row["after_us"]) for row in rows}
    causal, full = (
        statistics.geometric_mean(
            time / times[call.replace(f"w{mask}", mask)] for call, time in times.items() if call.endswith(f" w{mask}")
        )
        for mask in ("causal", "full")
    )
    said = f"a causal backward as a window still takes {causal:.2f} times as long, and a full one {full:.2f} times"
    assert said in words("docs/design_decisions.md")


def test_scores_that_share_kernels():
    rows = [row for row in rows_of("29_cc098fc_windows_chunks_pages") if "scores" in row]
    shared = [row for row in rows if row["scores"] != "softcap causal"]

    def reach(pass_):
        ratios = [row["new_over_old"] for row in shared if row["pass"] == pass_]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    text = words("docs/design_decisions.md")
    assert f"a backward takes {reach('backward')} times as long" in text and f"a forward {reach('forward')}." in text
    assert f"takes {reach('backward')} times as long" in words("CHANGELOG.md")
    assert {f"{row['by_head_dim'][1]:.2f}" for row in rows if row["scores"] == "softcap causal"} == {"1.04"}

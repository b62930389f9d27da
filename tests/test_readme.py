"""What README.md and benchmarks/README.md quote is what the committed results say, worked out here from the files
alone; the example runs, schedules are listed as they are, links lead somewhere."""

import ast
import collections
import itertools
import json
import pathlib
import re
import shlex
import statistics

import pytest
import torch

from benchmarks import bars, compare, document
from benchmarks.shapes import GRIDS
from dash_attn import _schedule, schedule

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "README.md", ROOT / "benchmarks" / "README.md", ROOT / "benchmarks" / "by_shape.md"
README, DETAILS, BY_SHAPE = (path.read_text() for path in PAGES)
RESULT = RESULTS / re.search(r"\(results/(h200_[^)]*\.json)\)", DETAILS)[1]
# By grid, its result beside this one; its own commit may be older.
OWN = {name: RESULT.with_name(f"{RESULT.stem}_{name}.json") for name in document.OWN_GRIDS}
OWN = {name: path for name, path in OWN.items() if path.exists()}
PEERS = json.loads((RESULTS / "peers_h200.json").read_text())
NAMES = {
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN",
    "memory-efficient": "memory-efficient",  # torch's, with dropout alone
    "dash-authors": "DASH",
}
SHAPE = ("head_dim", "heads", "kv_heads", "mask", "seqlen", "batch")
LATER = ("pack", "window", "chunk", "scores", "value_head_dim", "dropout_p")  # of the rows that have them


def key(row):
    return tuple(row[field] for field in SHAPE) + tuple(str(row[field]) for field in LATER if field in row)


def ours(rows, pass_, schedule="auto"):
    return {
        key(row): row["tflops"]
        for row in rows
        if (row["impl"], row["pass"]) == ("dash_attn", pass_) and row["schedule"] in (schedule, None)
    }


def theirs(rows, pass_, deterministic=None, impl=None):
    """By shape, each peer's best figure, the best peer first."""
    found = collections.defaultdict(dict)
    for row in rows:
        fits = row["pass"] == pass_ and impl in (None, row["impl"]) and deterministic in (None, row["deterministic"])
        if fits and row["impl"] != "dash_attn":
            of_shape = found[key(row)]
            of_shape[row["impl"]] = max(row["tflops"], of_shape.get(row["impl"], 0.0))
    return {shape: sorted(peers.items(), key=lambda item: -item[1]) for shape, peers in found.items()}


def ratios_of(mine, peers):
    """Ours over the best peer's, at the shapes where some peer was measured."""
    return [tflops / peers[shape][0][1] for shape, tflops in mine.items() if shape in peers]


def mean(mine, peers):
    """The geometric mean of the ratios, and over how many shapes; "-" where there is none."""
    ratios = ratios_of(mine, peers)
    return (f"{statistics.geometric_mean(ratios):.2f}", len(ratios)) if ratios else ("-", 0)


@pytest.fixture(scope="module")
def result():
    return json.loads(RESULT.read_text())


@pytest.mark.parametrize("where", ["the same run", "other runs"])
def test_the_table_of_all_shapes(where, result):
    peers_rows = result["rows"] if where == "the same run" else PEERS["rows"]
    mine, missing = ours(result["rows"], "backward"), {}
    peers = {mode: theirs(peers_rows, "backward", mode) for mode in (True, False)}
    same, others = block(DETAILS).split("The same, compared with baselines of other runs:")
    table = same if where == "the same run" else others.split("The number of shapes at which")[0]
    legend = table.partition("These baselines were not measured")[2]
    for letter, text in re.findall(r"^- ([a-z]): (.*(?:\n  .*)*)", legend, re.M):
        missing[letter] = " ".join(text.split())
    rows = [line for line in table.splitlines() if re.match(r"\| (64|128) \| \d", line)]
    assert len(rows) == len(mine) == 30
    seen = set()
    for line, (shape, tflops) in zip(rows, mine.items()):
        head_dim, heads, kv_heads, mask, seqlen, _ = shape
        shown = str(heads) if heads == kv_heads else f"{heads}/{kv_heads}"
        cells = [str(head_dim), shown, mask, str(seqlen), f"**{tflops:.0f}**"]
        absent = {True: "deterministic: ", False: "non-deterministic: "}
        notes = []
        for mode in (True, False):
            of_shape = peers[mode].get(shape, [])
            if of_shape:
                impl, best = of_shape[0]
                cells += [f"{best:.0f} ({NAMES[impl]})", f"{tflops / best:.2f}"]
            else:
                cells += ["-", "-"]
            all_of_mode = {impl for found in peers[mode].values() for impl, _ in found}
            if names := sorted(NAMES[impl] for impl in all_of_mode - {impl for impl, _ in of_shape}):
                notes.append(absent[mode] + ", ".join(names))
        *found, letter = [cell.strip() for cell in line.strip("|").split("|")]
        assert found == cells, shape
        assert missing.get(letter, "") == "; ".join(notes), shape
        seen.add(letter)
    assert seen - {""} == set(missing)
    assert result["meta"]["gpu"] == "NVIDIA H200" and re.fullmatch("[0-9a-f]{40}", result["meta"]["commit"])
    assert f"commit {result['meta']['commit']}" in " ".join(DETAILS.split())


def groups_of(mine):
    groups = collections.defaultdict(dict)
    for shape, tflops in mine.items():
        groups[str(shape[0]), shape[3]][shape] = tflops
    return groups


def test_the_summary(result):
    mine = ours(result["rows"], "backward")
    groups = {**groups_of(mine), ("all", ""): mine}
    rows = re.findall(r"^\| (64|128|all) \| (full|causal|) *\| (.*) \|$", block(DETAILS).split("Every shape")[0], re.M)
    assert len(rows) == len(groups) == 5
    for head_dim, mask, rest in rows:
        group = groups[head_dim, mask]
        cells = [str(len(group)), f"{min(group.values()):.0f} to {max(group.values()):.0f}"]
        cells += [mean(group, theirs(result["rows"], "backward", mode))[0] for mode in (True, False)]
        assert [cell.strip() for cell in rest.split("|")] == cells, (head_dim, mask)
    other = ours(result["rows"], "backward", "order_free")
    ratios = [other[shape] / tflops for shape, tflops in mine.items()]
    middle = statistics.geometric_mean(ratios)
    said = f'has {middle:.2f} times the throughput of `"auto"` (minimum {min(ratios):.2f}).'
    assert said in " ".join(DETAILS.split())


def test_how_many_shapes_each_peer_was_measured_at(result):
    groups = groups_of(ours(result["rows"], "backward"))
    heads, _, *lines = DETAILS.split("| backward, shapes measured |")[1].split("\n\n")[0].splitlines()
    assert [c.strip() for c in heads.strip("|").split("|")] == [f"{d} {m} ({len(g)})" for (d, m), g in groups.items()]
    expected = {}
    for impl, mode in {(row["impl"], row["deterministic"]) for row in PEERS["rows"] if row["pass"] == "backward"}:
        measured = theirs(PEERS["rows"], "backward", mode, impl)
        counts = [str(sum(shape in measured for shape in group)) for group in groups.values()]
        expected[NAMES[impl] + (", deterministic" if mode else "")] = counts
    assert {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in lines} == expected
    assert len(lines) == len(expected)


def test_the_claim_against_other_runs(result):
    mine = ours(result["rows"], "backward")
    deterministic = theirs(PEERS["rows"], "backward", True)
    fa3 = theirs(PEERS["rows"], "backward", True, "fa3")
    with_fa3 = {shape: tflops for shape, tflops in mine.items() if shape in fa3}
    ratio, shapes = mean(with_fa3, deterministic)
    claim = rf"Over the {shapes} shapes with a figure of deterministic FlashAttention-3, .* baseline in .* is {ratio}\."
    assert re.search(claim, " ".join(DETAILS.split()))


def test_the_figures_of_the_kernels(result):
    text, rows = " ".join(README.split()), result["rows"]
    backward, forward = ours(rows, "backward"), ours(rows, "forward")
    by_mode = {mode: theirs(rows, "backward", mode) for mode in (True, False)}
    pairs = [*((backward, peers) for peers in by_mode.values()), (forward, theirs(rows, "forward"))]
    said = re.search(r"(\S+) times the throughput of (.*?) in d.*? (\S+) times that of the \w+ of (.*?) without", text)
    names = [{NAMES[impl] for found in peers.values() for impl, _ in found} for peers in by_mode.values()]
    assert [set(re.split(", | and ", shown)) for shown in said.group(2, 4)] == names
    in_forward = re.search(r"The forward has (\S+) times that of the fastest of these baselines\.", text)[1]
    assert [*said.group(1, 3), in_forward] == [mean(*pair)[0] for pair in pairs]
    leasts = [f"{min(ratios_of(*pair)):.2f}" for pair in pairs]
    assert f"over {len(backward)} shapes in bf16, from one run on one H200; the minima are" in text
    assert f"the minima are {leasts[0]}, {leasts[1]} and {leasts[2]}." in text
    apart = [mean(backward, theirs(PEERS["rows"], "backward", mode, "fa4")) for mode in (True, False)]
    assert apart[0][1] == apart[1][1]
    assert f"in separate runs at {apart[0][1]} shapes, the backward has {apart[0][0]} and {apart[1][0]} times" in text


def test_the_figure_of_a_training_step():
    """The page that it links to has the same ratios in its table."""
    costs = json.loads(document.TRAINING.read_text())
    lengths, ratios = [], []
    for found in costs["results"]:
        speed = collections.defaultdict(dict)
        for row in found["rows"]:
            if not row["receipts"]:
                speed[row["attention"]][row["deterministic"]] = row["tokens_per_second"]
        assert speed.keys() == {"dash_attn", "sdpa_cudnn"}
        lengths.append(f"{found['seqlen']:,}")
        ratios.append(speed["dash_attn"][True] / speed["sdpa_cudnn"][False])
    two, three = ([f"{ratio:.{digits}f}" for ratio in ratios] for digits in (2, 3))
    text = " ".join(README.split())
    assert f"runs at {two[0]}, {two[1]} and {two[2]} times the speed of a non-deterministic step with cuDNN" in text
    assert f"at {lengths[0]}, {lengths[1]} and {lengths[2]} tokens per sequence (one H200, 24 layers, 32,768" in text
    assert (costs["device"], costs["shape"]["layers"], costs["tokens"]) == ("NVIDIA H200", 24, 32768)
    assert all("not here" in found["peers"]["flash_attn_3"] for found in costs["results"])
    assert "FlashAttention-3 was not installed there" in text
    training = (ROOT / "docs" / "training.md").read_text()
    assert document.TRAINING.name in training
    table = re.findall(r"^\| ([\d,]+) \| dash_attn \| deterministic \| [\d,]+ \| ([\d.]+) \|", training, re.M)
    assert table == list(zip(lengths, three))


def test_no_run_has_two_names(result):
    """Of the peers' file, and this one."""
    runs = collections.defaultdict(list)
    for row in PEERS["same_run"]:
        runs[row["run"]].append(row)
    runs["this run"] = result["rows"]
    peers_of = [{(key(row), row["pass"], row["impl"]): row["tflops"] for row in rows} for rows in runs.values()]
    for one, other in itertools.combinations(peers_of, 2):
        same = [one[what] == other[what] for what in one.keys() & other.keys()]
        assert sum(same) < len(same) / 2, "one run under two names"


@pytest.mark.parametrize("pass_", ["backward", "forward"])
def test_the_means_to_each_peer(pass_, result):
    table = DETAILS.split(f"| {pass_} | separate runs |")[1].split("\n\n")[0].splitlines()
    runs = [column.strip() for column in table[0].strip(" |").split("|")]
    rows_of = {"this run": result["rows"]} if any(row["impl"] != "dash_attn" for row in result["rows"]) else {}
    for row in PEERS["same_run"]:
        rows_of.setdefault(row["run"], []).append(row)
    assert runs == list(rows_of)
    lines = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in table[2:]}
    peers = {(row["impl"], row["deterministic"]) for row in PEERS["rows"] if row["pass"] == pass_}
    for impl, deterministic in peers:
        name = NAMES[impl] + (", deterministic" if pass_ == "backward" and deterministic else "")
        apart = mean(ours(result["rows"], pass_), theirs(PEERS["rows"], pass_, deterministic, impl))
        expected = [f"{apart[0]} ({apart[1]})"]
        for run in runs:
            rows = rows_of[run]
            ratio, shapes = mean(ours(rows, pass_), theirs(rows, pass_, deterministic, impl))
            expected.append(f"{ratio} ({shapes})" if shapes else "-")
        assert lines[name] == expected, name
    assert len(lines) == len(peers) + (2 if pass_ == "backward" else 1)


def test_both_passes_and_the_yardstick(result):
    text = " ".join(DETAILS.split())
    mine, forwards = ours(result["rows"], "both"), theirs(PEERS["rows"], "forward")
    if not mine:  # not measured together
        backward, forward = (ours(result["rows"], pass_) for pass_ in ("backward", "forward"))
        mine = {shape: 3.5 / (1 / forward[shape] + 2.5 / backward[shape]) for shape in backward}
    best = "{} times the throughput of the best deterministic baseline ({} shapes)"
    for mode, words in {True: best, False: "{} times that of the best other ({})."}.items():
        pairs = {
            shape: [(impl, 3.5 / (1 / forwards[shape][0][1] + 2.5 / tflops)) for impl, tflops in found]
            for shape, found in theirs(PEERS["rows"], "backward", mode).items()
        }
        assert words.format(*mean(mine, pairs)) in text
    automatic, atomic = (ours(result["rows"], "backward", schedule) for schedule in ("auto", "atomic"))
    ratios = {shape: automatic[shape] / tflops for shape, tflops in atomic.items()}
    if ratios:
        low, high = min(ratios.values()), max(ratios.values())
        middle = statistics.geometric_mean(ratios.values())
        assert f"{middle:.3f} in geometric mean, {low:.3f} to {high:.3f}." in text
        below = re.findall(r"\((0\.\d{3})\)", text.split(f"{low:.3f} to {high:.3f}.")[1].split("<!-- end")[0])
        assert sorted(below) == sorted(f"{r:.3f}" for r in ratios.values() if r < 0.98)


def test_versions_of_the_peers_are_named(result):
    text = " ".join(DETAILS.split())
    for impl, what in PEERS["meta"]["impls"].items():
        assert f"- {NAMES[impl]}: {what}." in text
    assert PEERS["meta"]["left_out"] in text
    told = dict(PEERS["meta"]["same_run"])
    if any(row["impl"] != "dash_attn" for row in result["rows"]):
        beside = " and ".join(result["meta"].get("impls", {}).values())
        told["this run"] = f"dash_attn {result['meta']['commit'][:7]}" + (f" beside {beside}" if beside else "")
    for run, what in told.items():
        assert re.search(rf"[:;] {re.escape(run)} is {re.escape(what)}[.;]", text), run


def block(text, module="benchmarks.document"):
    """What stands between the marks."""
    (found,) = re.findall(rf"<!-- written by {module} -->\n(.*?)<!-- end -->", text, re.S)
    return found


def test_the_blocks_are_what_the_program_writes(tmp_path, monkeypatch):
    """Into documents with nothing between the marks, and again into those with something: what is committed, in which
    the results of the other grids are quoted as well."""
    monkeypatch.setattr(document, "ROOT", tmp_path)
    drawn = []

    def draw(result, path, pass_):
        drawn.append((result, pass_))
        path.write_bytes(b"png")

    monkeypatch.setattr(document.plot, "draw", draw)
    monkeypatch.setattr(document.plot, "draw_ratios", lambda result, path: path.write_bytes(b"png"))
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    result = results / RESULT.name
    result.write_text(RESULT.read_text())
    mark = "<!-- written by benchmarks.document -->\n"
    readmes = [tmp_path / path.relative_to(ROOT) for path in PAGES]
    for path in readmes:
        path.write_text(f"before\n{mark}<!-- end -->\nafter\n")
    with readmes[0].open("a") as file:
        file.write(f"<!-- written by {document.PICTURE} -->\n<!-- end -->\nafter\n")
    arguments = [str(result), *itertools.chain(*((f"--{name}", str(path)) for name, path in OWN.items()))]
    document.main(arguments)
    once = [path.read_text() for path in readmes]
    assert all(text.startswith(f"before\n{mark}") and text.endswith("<!-- end -->\nafter\n") for text in once)
    assert [block(text) for text in once] == [block(README), block(DETAILS), block(BY_SHAPE)]
    assert block(once[0], document.PICTURE) == block(README, document.PICTURE)
    assert "scores" in OWN and all(f"(`--grid {name}`), both sides" in once[1] for name in OWN)
    assert f"](benchmarks/results/{RESULT.stem}.png)" in once[0] and (results / f"{RESULT.stem}.png").exists()
    assert drawn == [(json.loads(RESULT.read_text()), "backward")]  # beside the peers of its own run
    document.main(arguments)
    assert [path.read_text() for path in readmes] == once


@pytest.mark.parametrize("kept", [{"dash_attn"}, {"dash_attn", "cudnn"}], ids=["no peer", "no deterministic peer"])
def test_a_result_without_peers_is_not_quoted(kept, tmp_path, monkeypatch, result):
    """And nothing is written."""
    monkeypatch.setattr(document, "ROOT", tmp_path)
    pages = [tmp_path / path.relative_to(ROOT) for path in PAGES]
    empty = "<!-- written by benchmarks.document -->\n<!-- end -->\n"
    for page in pages:
        page.parent.mkdir(exist_ok=True)
        page.write_text(empty)
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**result, "rows": [row for row in result["rows"] if row["impl"] in kept]}))
    with pytest.raises(SystemExit, match="must have both passes with baselines of its run"):
        document.main([str(path)])
    assert not path.with_suffix(".png").exists()
    assert {page.read_text() for page in pages} == {empty}


@pytest.mark.parametrize("pass_", ["backward", "forward"])
@pytest.mark.parametrize("grid", [name for name in OWN if name not in bars.CLAIMS])
def test_the_claims_of_the_other_grids(grid, pass_):
    """Beside every peer of the run, and beside our own dense call: geometric mean, the least, how many."""
    meta, rows = (json.loads(OWN[grid].read_text())[name] for name in ("meta", "rows"))
    text = " ".join(block(DETAILS).split()).split(f"(`--grid {grid}`), ")[1].split("(`--grid")[0]
    assert text.startswith(f"both sides in one run of commit {meta['commit'][:12]} on one {meta['gpu'].split()[1]}.")
    mine, others = ours(rows, pass_), collections.defaultdict(dict)
    assert len(mine) == len(GRIDS[grid]())
    for row in rows:
        if row["impl"] != "dash_attn" and row["pass"] == pass_ and row["schedule"] in ("auto", None):
            others[row["impl"], row["deterministic"]][key(row)] = row["tflops"]
    assert others
    for (impl, deterministic), peer in others.items():
        ratios = [mine[shape] / tflops for shape, tflops in peer.items()]
        if impl == "dash_attn dense":
            name = "our dense call on variable-length batches of equal lengths"
        else:
            name = NAMES[impl] + (", deterministic" if deterministic and pass_ == "backward" else "")
        middle = statistics.geometric_mean(ratios)
        claim = f"the {pass_} {middle:.2f} times that of {name}, minimum {min(ratios):.2f} ({len(ratios)})"
        assert claim in text


@pytest.mark.parametrize("pass_", ["backward", "forward"])
@pytest.mark.parametrize("grid", [name for name in OWN if name in bars.CLAIMS])
def test_the_ratios_by_shape_of_the_grids_with_bars(grid, pass_):
    """Every cell of the table of a pass is a ratio of two rows of the result."""
    rows = json.loads(OWN[grid].read_text())["rows"]
    what = document.OWN_GRIDS[grid].shapes
    shown = BY_SHAPE.split(f"\nThe {pass_} of {what}, commit")[1].split(":\n\n", 1)[1].split("\n\n")[0].splitlines()
    names, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in shown)
    assert names[5] == "over dash_attn" and len(names) > 6
    mine = ours(rows, pass_)
    peers = {}
    for impl, name in NAMES.items():
        for deterministic in (True, False):
            shown = name + (", deterministic" if deterministic and pass_ == "backward" else "")
            of_peer = theirs(rows, pass_, deterministic, impl)
            if of_peer:
                peers[f"over {shown}"] = {shape: found[0][1] for shape, found in of_peer.items()}
    for number, (shape, cells) in enumerate(zip(mine, lines, strict=True)):
        assert cells[4] == f"**{mine[shape]:.0f}**", number
        for name, cell in zip(names[6:], cells[6:]):
            peer = peers[name].get(shape)
            assert cell == (f"{mine[shape] / peer:.2f}" if peer else "-")


DOCUMENTS = [path for folder in (".", "benchmarks", "third_party") for path in (ROOT / folder).glob("*.md")]
DOCUMENTS += (ROOT / "docs").rglob("*.md")


def anchors(document):
    """Those of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", sorted(str(path.relative_to(ROOT)) for path in DOCUMENTS))
def test_links_lead_somewhere_and_lines_are_wrapped(path):
    text = (ROOT / path).read_text()
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        document = (ROOT / path).parent / target if target else ROOT / path
        assert document.exists(), target
        assert not anchor or anchor in anchors(document), f"{target}#{anchor}"
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert not long


@pytest.mark.parametrize("path", sorted(str(path.relative_to(ROOT)) for path in DOCUMENTS))
def test_a_list_of_contents_is_complete(path):
    text = re.sub(r"^```.*?^```$", "", (ROOT / path).read_text(), flags=re.M | re.S)
    listed = re.findall(r"^- \[([^\]]*)\]\(#[^)]*\)$", text, re.M)
    assert not listed or listed == re.findall(r"^## (.*)$", text, re.M)


def test_every_page_is_reached_from_the_readme():
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        reached.add(page)
        targets = [(page.parent / name).resolve() for name in re.findall(r"\]\(([^)#:]+\.md)", page.read_text())]
        left += [target for target in targets if target not in reached]
    assert not set(DOCUMENTS) - reached


def test_the_example_runs():
    """On the CPU and smaller."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    assert len(ast.parse(code).body) == 5
    for shown, tried in (("(2, 4096, 16, 128", "(1, 64, 2, 64"), ('"cuda"', '"cpu"')):
        assert code.count(shown) == 1
        code = code.replace(shown, tried)
    names = {}
    exec(code, names)
    assert names["out"].shape == (1, 64, 2, 64)
    assert all(torch.isfinite(names[name].grad).all() and names[name].grad.any() for name in "qkv")


def test_the_table_of_schedules():
    text = (ROOT / "docs" / "usage.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.M)
    full, causal, window = {"causal": False}, {"causal": True}, {"causal": False, "window": (8, 8)}
    names = {(True, True, True): "all", (True, False, False): "full", (False, True, False): "causal"}
    of_policies = {
        policy: names[tuple(_schedule.fits(policy, **mask) for mask in (full, causal, window))]
        for policy in schedule.POLICIES
    }
    assert dict(rows) == {"auto": "all", **of_policies} and len(rows) == len(of_policies) + 1
    (automatic,) = re.findall(r"^\| `auto` \| all \| `(\w+)`: one rule for every shape", text, re.M)
    head_dims = (64, 96, 128, 192, 256)
    assert {schedule.resolve("auto", head_dim=d, **m) for d in head_dims for m in (full, causal, window)} == {automatic}


def test_the_comparisons_that_are_named(capsys, tmp_path, result):
    """They run, and print the geometric mean to the best deterministic peer, for each run that both files have."""
    lines = re.findall(r"^python -m benchmarks\.compare (.*)$", DETAILS, re.M)
    tflops = {("dash_attn", "auto"): 500.0, ("dash_attn", "atomic"): 900.0}
    tflops |= {("fa3", "auto"): 400.0, ("fa3", None): 450.0}
    files = {"result.json": str(RESULT)}
    for grid in ("sharded", "packed", "windows"):
        rows = []
        for (impl, policy), pass_ in itertools.product(tflops, ("backward", "forward")):
            head = {"impl": impl, "pass": pass_, "schedule": policy, "deterministic": policy == "auto"}
            rows.append({**head, **GRIDS[grid]()[0].row(), "ms": 1.0, "tflops": tflops[impl, policy]})
        path = tmp_path / f"{grid}.json"
        path.write_text(json.dumps({"rows": rows}))
        files[path.name] = str(path)
    of_runs = collections.defaultdict(list)
    for row in PEERS["same_run"]:
        of_runs[row["run"]].append(row)
    pairs = [(result["rows"], PEERS["rows"]), *((of_run, of_run) for of_run in of_runs.values())]
    ratios = [ratios_of(ours(own, "backward"), theirs(peers, "backward", True)) for own, peers in pairs]
    expected = dict.fromkeys(files, [1.25, 1.25])
    expected["result.json"] = [statistics.geometric_mean(found) for found in ratios]
    assert list(dict.fromkeys(line.split()[0] for line in lines)) == list(files)
    for line in lines:
        compare.main([files.get(word, str(ROOT / word) if "/" in word else word) for word in shlex.split(line)])
        printed = capsys.readouterr().out
        assert "atomic" not in printed and "auto" in printed
        means = [f"{mean:.3f}" for mean in expected[line.split()[0]]]
        assert re.findall(r"^  all +([\d.]+)", printed, re.M) == means

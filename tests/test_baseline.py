"""An older library beside this one: the two processes, the turns and the summary, with the reference for a library."""

import pathlib
import sys
import textwrap

import pytest
import torch

from benchmarks import baseline, peers, run
from benchmarks.shapes import Shape

ROOT = pathlib.Path(__file__).parents[1]
TINY = Shape("bf16", 64, 2, 1, "causal", 96, 1)
# A worker whose library is this package's reference; `spt` writes wrong gradients.
WORKER = """
    import sys

    import torch

    import dash_attn
    from benchmarks import baseline

    PACK, WINDOW = (None,) * 4, (-1, -1, 0)  # a dense batch, no window


    class Reference:
        def forward(self, q, k, v, out, softmax_lse, softmax_scale, causal):
            results = torch.ops.dash_attn.forward(q, k, v, *PACK, softmax_scale, causal, *WINDOW)
            for target, x in zip((out, softmax_lse), results):
                target.copy_(x)

        def backward(self, *arguments):
            *tensors, softmax_scale, causal, schedule = arguments
            torch.ops.dash_attn.backward(*tensors, *PACK, softmax_scale, causal, *WINDOW, schedule, 0)
            if schedule == "spt":
                tensors[-1].mul_(1.1)


    baseline.Worker(Reference(), torch.device("cpu")).serve(sys.stdin, sys.stdout)
"""


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    started = []

    def start(schedules, code=WORKER):
        started.append(baseline.Baseline([sys.executable, "-c", textwrap.dedent(code)], schedules))
        return started[-1]

    yield start
    for process in started:
        process.close()


def test_both_sides_are_measured_and_what_is_wrong_is_left_out(worker):
    implementations = [peers.DashAttn(["auto", "descending"]), worker(["descending", "spt"])]
    passes = ["backward", "forward", "both"]
    rows, failures = run.measure(TINY, implementations, passes, torch.device("cpu"), 0.0, turns=3)
    figures = {(row["impl"], row["pass"], row["schedule"]): row for row in rows}
    ours = [("dash_attn", pass_, schedule) for schedule in ("auto", "descending") for pass_ in ("backward", "both")]
    theirs = [("baseline", "backward", "descending"), ("baseline", "forward", None)]
    assert set(figures) == {*ours, ("dash_attn", "forward", None), *theirs}
    assert all(row["ms"] > 0 and len(row["repeats_ms"]) == 3 for row in rows)
    (failure,) = failures
    assert failure.startswith("baseline spt: RuntimeError: RuntimeError: wrong dv: relative error 1.0")


def test_a_process_that_ends_is_said(worker):
    process = worker(["descending"], "raise SystemExit(3)")
    with pytest.raises((RuntimeError, BrokenPipeError), match="ended, exit status 3|Broken pipe"):
        process.prepare(peers.Variant("baseline", "descending", True), TINY, None)


def test_policies_fit_their_mask():
    full = Shape(**{**vars(TINY), "mask": "full"})
    side = object.__new__(baseline.Baseline)
    side._schedules = ["descending", "shift", "symmetric_shift", "spt_descending"]
    assert [v.schedule for v in side.variants(full)] == ["descending", "shift"]
    assert [v.schedule for v in side.variants(TINY)] == ["descending", "symmetric_shift", "spt_descending"]


def test_the_baseline_has_its_turn_after_ours_of_the_same_schedule():
    def variant(impl, schedule):
        return peers.Variant(impl, schedule, True)

    names = [(variant("dash_attn", "auto"), "backward"), (variant("dash_attn", None), "forward")]
    names += [(variant("dash_attn", "spt"), "backward"), (variant("fa2", None), "backward")]
    names += [(variant("baseline", "spt"), "backward"), (variant("baseline", None), "forward")]
    order = [(v.impl, v.schedule, p) for v, p in run.beside_each_other(dict.fromkeys(names))]
    assert order == [
        ("dash_attn", "auto", "backward"),
        ("dash_attn", None, "forward"),
        ("baseline", None, "forward"),
        ("dash_attn", "spt", "backward"),
        ("baseline", "spt", "backward"),
        ("fa2", None, "backward"),
    ]


def test_summary_is_of_the_same_schedule_or_of_the_fastest():
    def row(impl, schedule, seqlen, ms, pass_="backward"):
        shape = {**vars(TINY), "seqlen": seqlen}
        return {"impl": impl, "pass": pass_, "schedule": schedule, "deterministic": True, **shape, "ms": ms}

    rows = [row("baseline", "descending", 512, 2.0), row("baseline", "spt", 512, 1.0)]
    rows += [row("baseline", "descending", 1024, 2.0), row("baseline", "spt", 1024, 4.0)]
    rows += [row("dash_attn", "auto", 512, 1.1), row("dash_attn", "auto", 1024, 2.0), row("dash_attn", "spt", 512, 0.9)]
    rows += [row("dash_attn", None, 512, 1.0, "forward")]
    text = run.against_baseline(rows)
    assert "backward auto: 1.0488 in geometric mean over 2 shapes, at worst 1.1000 (bf16 d64 h2/1 causal 1x512)" in text
    assert "backward spt: 0.9000 in geometric mean over 1 shapes" in text
    assert "forward" not in text, "the baseline has none"


def test_the_worker_loads_nothing_of_the_package():
    code = "import sys, benchmarks.baseline; print([m for m in sys.modules if m.startswith('dash_attn')])"
    import subprocess

    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"

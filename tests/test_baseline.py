"""An older library beside this one: the two processes, the turns and the summary, with the reference for a library."""

import pathlib
import sys
import textwrap
import types

import pytest
import torch

from benchmarks import baseline, peers, run
from benchmarks import library as library_module
from benchmarks.shapes import Shape

ROOT = pathlib.Path(__file__).parents[1]
TINY = Shape("bf16", 64, 2, 1, "causal", 96, 1)
# A worker whose library is this package's reference; `spt` writes wrong gradients.
WORKER = """
    import sys

    import torch

    import dash_attn
    from benchmarks import baseline


    class Reference:
        def forward(self, q, k, v, out, softmax_lse, softmax_scale, causal, **variable):
            mask = None, None, None, None, softmax_scale, causal, -1, -1, 0
            for target, x in zip((out, softmax_lse), torch.ops.dash_attn.forward(q, k, v, *mask, 0)):
                target.copy_(x)

        def backward(self, *arguments, **variable):
            *tensors, softmax_scale, causal, schedule = arguments
            mask = None, None, None, None, softmax_scale, causal, -1, -1, 0
            torch.ops.dash_attn.backward(*tensors, *mask, schedule, 0)
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
    with pytest.raises((RuntimeError, BrokenPipeError), match="ended with exit status 3|Broken pipe"):
        process.prepare(peers.Variant("baseline", "descending", True), TINY, None)


def test_policies_fit_their_mask():
    full = Shape(**{**vars(TINY), "mask": "full"})
    side = object.__new__(baseline.Baseline)
    side._schedules = ["descending", "shift", "symmetric_shift", "spt_descending"]
    assert [v.schedule for v in side.variants(full)] == ["descending", "shift"]
    assert [v.schedule for v in side.variants(TINY)] == ["descending", "symmetric_shift", "spt_descending"]
    window = Shape(**{**vars(TINY), "mask": "window", "window": (8, 0)})
    assert [v.schedule for v in side.variants(window)] == ["descending"]


class Op:
    """An op that keeps what it is called with, of a library with these arguments."""

    def __init__(self, *names):
        arguments = [types.SimpleNamespace(name=name) for name in names]
        self.default = types.SimpleNamespace(_schema=types.SimpleNamespace(arguments=arguments))

    def __call__(self, *arguments):
        self.called = arguments


def test_an_older_library_takes_dense_batches_without_windows(monkeypatch):
    """Whether it is older, its ops' arguments say."""
    library = object.__new__(library_module.Library)
    library._policies = ["descending", "spt"]
    full = Shape(**{**vars(TINY), "mask": "full"})
    window = Shape(**{**vars(TINY), "mask": "window", "window": (8, 0), "chunk": 32})
    pack = Shape.of_pack("8192x34", 64, 2, 1, "causal").of_tokens(34)
    for names, mask_of in (("q", ()), ("q cu_seqlens_q", (-1, -1, 0))):
        for pass_ in ("forward", "backward"):
            monkeypatch.setattr(torch.ops.dash_attn_C, pass_, Op(*names.split()), raising=False)
        forward, backward = torch.ops.dash_attn_C.forward, torch.ops.dash_attn_C.backward
        for shape in (TINY, full):
            x = peers.random_tensors(shape, torch.device("cpu"))
            calls = baseline.calls_of(library, "spt", shape, x)
            lengths = (None,) * 4 if mask_of else ()
            mask = (*lengths, 0.125, shape.causal, *mask_of)
            calls["forward"]()
            assert forward.called[:3] == (x.q, x.k, x.v) and forward.called[5:] == (*mask, 0)
            calls["backward"]()
            assert backward.called[9:] == (*mask, 1, 0)
        for shape, mask in ((window, (False, 8, 0, 32)), (pack, (True, -1, -1, 0))):
            x = peers.random_tensors(shape, torch.device("cpu"))
            if not mask_of:
                with pytest.raises(ValueError, match="supports only dense batches without windows"):
                    baseline.calls_of(library, "spt", shape, x)
                continue
            baseline.calls_of(library, "spt", shape, x)["backward"]()
            assert forward.called[4].shape == ((1, 2, 96) if shape is window else (2, 34))
            for of_op in (forward.called[5:], backward.called[9:]):
                assert of_op[0] is of_op[1] is x.cu_seqlens and of_op[2:4] == (None, None)
                assert of_op[4:9] == (0.125, *mask)


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

"""The benchmark's packs and windows, on the CPU: shapes, counts, what each implementation is called with, and the check
of its results. Peers are stood in for by functions with their arguments; no figure here means anything."""

import functools
import itertools
import json
import sys
import types

import pytest
import torch

from benchmarks import check, compare, document, peers, plot, run
from benchmarks.compare import DENSE, OURS
from benchmarks.packs import PACKS
from benchmarks.shapes import GRIDS, SHAPE_FIELDS, Shape, flops, visible
from dash_attn import schedule

CPU = torch.device("cpu")
MASKS = [("full", (-1, -1), 0), ("causal", (-1, -1), 0)]
MASKS += [("window", window, 0) for window in ((1, 0), (5, 0), (5, 3), (-1, 4), (7, -1), (400, 400))]
MASKS += [("window", (-1, 0), 16), ("window", (-1, -1), 16), ("window", (5, 2), 16), ("window", (-1, 0), 400)]


@pytest.fixture(autouse=True)
def small_packs(monkeypatch):
    monkeypatch.setitem(PACKS, "mixed", (3, 70, 0, 33, 1, 40))
    monkeypatch.setitem(PACKS, "equal", (48, 48, 48))


def small(mask="causal", window=(-1, -1), chunk=0, pack="mixed", heads=4, kv_heads=2):
    """A pack, or a dense batch without one."""
    if pack is None:
        return Shape("bf16", 64, heads, kv_heads, mask, 70, 2, window=window, chunk=chunk)
    return Shape.of_pack(pack, 64, heads, kv_heads, mask, window=window, chunk=chunk)


@functools.cache
def seen(length, causal, left, right, chunk=0):
    """Pair by pair, by the arguments of FlashAttention."""
    right = 0 if causal else right
    found = torch.zeros(length, length, dtype=torch.bool)
    for query, key in itertools.product(range(length), repeat=2):
        near = (left < 0 or key >= query - left) and (right < 0 or key <= query + right)
        found[query, key] = near and (not chunk or key // chunk == query // chunk)
    return found


def attention(q, k, v, cu_seqlens, scale, *mask):
    """In float32, of rows packed at these offsets; differentiable."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    outs = []
    for start, end in itertools.pairwise(cu_seqlens):
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k[start:end].float()) * scale
        scores = scores.masked_fill(~seen(end - start, *mask), float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[start:end].float()))
    return torch.cat(outs).to(q.dtype)


def attention_of(q, k, v, cu_seqlens, scale, *mask):
    """The same of a dense batch, where there are no offsets."""
    if cu_seqlens is not None:
        return attention(q, k, v, cu_seqlens.tolist(), scale, *mask)
    return torch.stack([attention(*of_one, [0, q.shape[1]], scale, *mask) for of_one in zip(q, k, v)])


@pytest.mark.parametrize("mask, window, chunk", [*MASKS, ("window", (0, 0), 0)])
def test_visible_pairs_are_counted(mask, window, chunk):
    for shape in (small(mask, window, chunk), small(mask, window, chunk, pack=None)):
        expected = sum(int(seen(n, shape.causal, *window, chunk).sum()) for n in shape.lengths)
        assert visible(shape) == expected
        if shape.pack or mask == "window":
            assert flops(shape, "forward") == 4 * 64 * 4 * expected
            assert flops(shape, "backward") == 2.5 * flops(shape, "forward")
            assert flops(shape, "both") == 3.5 * flops(shape, "forward")
        in_pieces = sum(int(seen(n, shape.causal, *window).sum()) for n in shape.pieces)
        assert in_pieces == expected and sum(shape.pieces) == sum(shape.lengths)


def test_packs():
    sizes = {name: (len(lengths), sum(lengths), max(lengths)) for name, lengths in PACKS.items()}
    assert sizes["8x2048"] == (8, 16384, 2048) and sizes["lognormal"] == (40, 35331, 3032)
    assert sizes["one long"] == (65, 16384, 12288) and sizes["sft mix"] == (40, 28681, 1478)
    assert sizes["8192x34"] == (8192, 8192 * 34, 34) and sizes["one of 32k"] == (2049, 102400, 32768)
    assert sizes["mostly empty"] == (1024, 16384, 2048)


def test_packed_grids(monkeypatch):
    monkeypatch.delitem(PACKS, "mixed")
    monkeypatch.delitem(PACKS, "equal")
    shapes, bar = GRIDS["packed"](), GRIDS["packed-bar"]()
    assert len(shapes) == len(set(shapes)) == len(set(map(str, shapes))) and bar == shapes[: len(bar)]
    assert {(s.head_dim, s.heads, s.kv_heads) for s in shapes} == {(128, 32, 8), (64, 32, 32)}
    stated = {(name, "causal") for name in ("8x2048", "lognormal", "one long", "sft mix")} | {("lognormal", "full")}
    assert {(s.pack, s.mask, s.head_dim) for s in bar} == {(*what, d) for what in stated for d in (64, 128)}
    assert {(s.pack, s.head_dim) for s in shapes if s.causal} == {(name, d) for name in PACKS for d in (64, 128)}
    assert all(s.batch == len(PACKS[s.pack]) and s.seqlen == max(PACKS[s.pack]) for s in shapes)
    assert {s.pack for s in shapes if s.dense} == {"8x2048", "32x512", "2x8192", "8192x34"}


def test_windows_grids():
    shapes, bar = GRIDS["windows"](), GRIDS["windows-bar"]()
    assert len(shapes) == len(set(shapes)) == len(set(map(str, shapes))) and bar == shapes[: len(bar)]
    assert {(s.head_dim, s.heads, s.kv_heads, s.batch, s.seqlen, s.window, s.chunk, s.pack) for s in bar} == {
        (128, 32, 8, 1, 16384, (4095, 0), 0, None),
        (128, 32, 8, 1, 32768, (4095, 0), 0, None),
        (128, 16, 16, 2, 8192, (1023, 0), 0, None),
        (128, 16, 16, 8, 2048, (1023, 0), 0, None),
        (64, 64, 8, 2, 8192, (127, 0), 0, None),
    }
    assert all(s.mask == "window" for s in shapes)
    assert {s.chunk for s in shapes} == {0, 8192} and {s.pack for s in shapes} == {None, "lognormal"}


def test_shapes_go_through_rows():
    for shape in [*GRIDS["packed"](), *GRIDS["windows"](), small("window", (5, 3), 16)]:
        assert Shape.of_row(json.loads(json.dumps(shape.row()))) == shape
        assert Shape.of_row(json.loads(json.dumps(vars(shape)))) == shape
    assert tuple(GRIDS["full"]()[0].row()) == SHAPE_FIELDS
    assert str(small()) == "bf16 d64 h4/2 causal pack mixed"
    assert str(small("window", (5, 0), pack=None)) == "bf16 d64 h4/2 window (5, 0) 2x70"
    assert str(small("window", (-1, 0), 16)) == "bf16 d64 h4/2 window (-1, 0) chunk 16 pack mixed"


def test_a_trial_takes_the_first_sequences():
    assert small().of_tokens(80).lengths == (3, 70, 0)
    assert small().of_tokens(1).lengths == (3,) and small().of_tokens(1).seqlen == 3
    assert small().of_tokens(10**6) == small()
    assert str(small().of_tokens(80)) == "bf16 d64 h4/2 causal pack mixed[:3]"
    assert Shape.of_row(small().of_tokens(80).row()).lengths == (3, 70, 0)
    assert small(pack=None).of_tokens(300).batch == 4


def test_tensors_of_a_pack():
    shape = small()
    x = peers.random_tensors(shape, CPU)
    assert x.q.shape == x.dout.shape == (147, 4, 64) and x.k.shape == x.v.shape == (147, 2, 64)
    assert x.cu_seqlens.dtype == torch.int32 and x.cu_seqlens.tolist() == [0, 3, 73, 73, 106, 107, 147]
    assert list(x.lengths) == ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert x.lengths["max_seqlen_q"] == x.lengths["max_seqlen_k"] == 70
    assert peers.without_chunks(shape, x) is x
    dense = small("window", (-1, 0), 32, pack=None)
    cut = peers.without_chunks(dense, peers.random_tensors(dense, CPU))
    assert cut.q.shape == (140, 4, 64) and cut.cu_seqlens.tolist() == [0, 32, 64, 70, 102, 134, 140]
    assert cut.max_seqlen == 32


def test_the_mask_as_arguments():
    def arguments(*mask):
        return peers.mask_arguments(small(*mask))

    assert arguments("full") == (False, -1, -1) and arguments("causal") == (True, -1, -1)
    assert arguments("window", (5, 0)) == (False, 5, 0) and arguments("window", (-1, 4)) == (False, -1, 4)
    assert arguments("window", (-1, 0), 16) == (True, -1, -1)


def test_who_takes_what():
    window, pack, equal = small("window", (5, 0)), small(), small(pack="equal")
    both = set(schedule.fitting(causal=True)) & set(schedule.fitting(causal=False))
    assert {v.schedule for v in peers.DashAttn().variants(window)} == {"auto", *both} != {"auto"}
    assert not both & {"shift", "symmetric_shift"}
    assert peers.DashAttn().variants(pack) == peers.DashAttn().variants(small(pack=None))
    dense = peers.DashAttnDense(["auto", "atomic"])
    assert dense.variants(window) == dense.variants(pack) == dense.variants(small(pack=None)) == []
    assert dense.variants(equal) == [peers.Variant(DENSE, "auto", True), peers.Variant(DENSE, "atomic", False)]
    assert [peers.TorchCudnn().variants(s) for s in (window, pack, equal)] == [[], [], []]
    assert len(peers.TorchCudnn().variants(small(pack=None))) == 1


@pytest.mark.parametrize("pack", [None, "mixed"])
@pytest.mark.parametrize("mask, window, chunk", MASKS)
def test_our_ops_get_lengths_and_mask(pack, mask, window, chunk, monkeypatch):
    shape, called = small(mask, window, chunk, pack), {}

    def forward(*tensors, **arguments):
        called["forward"] = tensors, arguments
        return tensors[0], None

    def backward(*tensors, **arguments):
        called["backward"] = tensors, arguments

    monkeypatch.setattr(torch.ops, "dash_attn", types.SimpleNamespace(forward=forward, backward=backward))
    monkeypatch.setattr(torch.ops.dash_attn_C, "backward", backward, raising=False)
    x = peers.random_tensors(shape, CPU)
    for variant in peers.DashAttn(["spt", "atomic"]).variants(shape):
        peers.DashAttn().prepare(variant, shape, x)["backward"]()
        causal, left, right = peers.mask_arguments(shape)
        expected = dict.fromkeys(("seqused_q", "seqused_k", "sinks", "alibi_slopes"))
        expected |= dict(cu_seqlens_q=x.cu_seqlens, cu_seqlens_k=x.cu_seqlens, softmax_scale=64**-0.5, causal=causal)
        expected |= dict(window_left=left, window_right=right, attention_chunk=chunk, sm_margin=0, softcap=0.0)
        assert called["forward"] == ((x.q, x.k, x.v), expected)
        policy = "spt" if variant.deterministic else schedule.policy_number("atomic")
        expected |= dict(dsoftmax_lse=None, dsinks=None, schedule=policy)
        tensors, arguments = called["backward"]
        assert tensors[0] is x.dout and len(tensors) == 9 and arguments == expected


@pytest.mark.parametrize("pack", [None, "mixed", "equal"])
@pytest.mark.parametrize("mask, window, chunk", MASKS)
def test_our_results_are_right(pack, mask, window, chunk):
    """Those of the ops and of the public functions; beside our dense call where lengths are equal."""
    shape = small(mask, window, chunk, pack)
    ours = [peers.DashAttn(["descending"]), peers.DashAttnDense(["descending"])]
    rows, failures = run.measure(shape, ours, list(run.PASSES), CPU, 0.0, turns=1)
    assert failures == []
    impls = [OURS, DENSE] if pack == "equal" else [OURS]
    assert {(row["impl"], row["pass"]) for row in rows} == set(itertools.product(impls, run.PASSES))
    assert all(Shape.of_row(row) == shape for row in rows)


def bound(op, args, kwargs):
    """The arguments of a call of an op by name; fails as the op does where they do not fit its schema."""
    arguments = op.default._schema.arguments
    positional = [a.name for a in arguments if not a.kwarg_only]
    assert len(args) <= len(positional) and set(kwargs) <= {a.name for a in arguments}
    return {**dict(zip(positional, args)), **kwargs}


@pytest.fixture
def aten(monkeypatch):
    """torch's FlashAttention-2 in float32; gives the list of its calls: which op, its arguments by name, whether torch
    was asked for deterministic algorithms."""
    calls = []
    forward_op, backward_op = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward

    def out_of(x, q, k, v):
        assert x["dropout_p"] == 0.0
        mask = x["is_causal"], x["window_size_left"], x["window_size_right"]
        assert x["cum_seq_q"] is x["cum_seq_k"] and x["max_q"] == x["max_k"]
        return attention_of(q, k, v, x["cum_seq_q"], x["scale"], *mask)

    def forward(*args, **kwargs):
        x = bound(forward_op, args, kwargs)
        calls.append(("forward", x, torch.are_deterministic_algorithms_enabled()))
        assert x["return_debug_mask"] is False
        return out_of(x, x["query"], x["key"], x["value"]), "lse", "rng", "unused", None

    def backward(*args, **kwargs):
        x = bound(backward_op, args, kwargs)
        calls.append(("backward", x, torch.are_deterministic_algorithms_enabled()))
        assert (x["logsumexp"], x["rng_state"], x["unused"]) == ("lse", "rng", "unused")
        leaves = [x[name].detach().requires_grad_() for name in ("query", "key", "value")]
        with torch.enable_grad():
            return torch.autograd.grad(out_of(x, *leaves), leaves, x["grad_out"])

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    return calls


@pytest.mark.parametrize("pack", [None, "mixed"])
@pytest.mark.parametrize("mask, window, chunk", MASKS)
def test_torchs_flash_attention_2(pack, mask, window, chunk, aten):
    shape = small(mask, window, chunk, pack)
    rows, failures = run.measure(shape, [peers.TorchFlashAttention2()], ["forward", "backward"], CPU, 0.0, turns=1)
    assert failures == []
    assert [(row["pass"], row["deterministic"]) for row in rows] == [
        ("forward", True), ("backward", True), ("backward", False)
    ]  # fmt: skip
    assert {enabled for pass_, _, enabled in aten if pass_ == "backward"} == {True, False}
    for _, x, _ in aten:
        assert (x["cum_seq_q"] is None) == (pack is None and not chunk)
        assert x["max_q"] == min(70, chunk or 70)


@pytest.fixture
def flash_attention_3(monkeypatch):
    """Its module, in float32, with the arguments of its functions; gives the list of their calls."""
    calls = []

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, window_size=(-1, -1), deterministic=False):
        calls.append(("dense", window_size, deterministic))
        return attention_of(q, k, v, None, 64**-0.5, causal, *window_size)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, window_size=(-1, -1), deterministic=False,
    ):  # fmt: skip
        assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist() and cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_k == max(cu_seqlens_q.diff()) and isinstance(max_seqlen_q, int)
        calls.append(("varlen", window_size, deterministic))
        return attention_of(q, k, v, cu_seqlens_q, 64**-0.5, causal, *window_size), None

    functions = dict(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.SimpleNamespace(**functions))
    return calls


@pytest.mark.parametrize("pack", [None, "mixed"])
@pytest.mark.parametrize("mask, window, chunk", MASKS)
def test_flash_attention_3(pack, mask, window, chunk, flash_attention_3):
    """Its backward has no chunks: those are sequences of a pack."""
    shape = small(mask, window, chunk, pack)
    rows, failures = run.measure(shape, [peers.FlashAttention3()], ["forward", "backward"], CPU, 0.0, turns=1)
    assert failures == []
    assert [row["deterministic"] for row in rows if row["pass"] == "backward"] == [True, False]
    kind = "varlen" if pack or chunk else "dense"
    sides = (-1, -1) if mask == "causal" or (chunk and window == (-1, 0)) else window
    assert set(flash_attention_3) == {(kind, sides, deterministic) for deterministic in (True, False)}


def test_flash_attention_4_writes_none_for_an_open_side(monkeypatch):
    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, *, max_seqlen_q, max_seqlen_k, **options):
        called.append(options["window_size"])
        return q

    called = []
    module = types.SimpleNamespace(flash_attn_func=None, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: module)
    for mask in (("causal",), ("window", (-1, 4)), ("window", (5, 0))):
        shape = small(*mask)
        peers.FlashAttention4().prepare(peers.Variant("fa4", None, True), shape, peers.random_tensors(shape, CPU))
    assert called == [(None, None), (None, 4), (5, 0)]


@pytest.mark.parametrize("sequence, found", [(0, True), (1, True), (5, True), (3, False)])
@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_the_first_the_longest_and_the_last_sequence_are_checked(name, sequence, found):
    """A head of one of them is off by 2% in norm: the last KV head, or its last query head."""
    shape = small("window", (20, 0))
    x = peers.random_tensors(shape, CPU)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out = attention_of(*leaves, x.cu_seqlens, 64**-0.5, False, 20, 0)
    results = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, x.dout)))}
    reference = check.Reference(shape, x)

    def wrong():
        of_pass = results["out"] if name == "out" else tuple(results[n] for n in ("dq", "dk", "dv"))
        return reference.wrong(of_pass)

    assert wrong() is None
    start, end = x.cu_seqlens.tolist()[sequence : sequence + 2]
    results[name][start:end, -2 if name in ("out", "dq") else -1 :] *= 1.02
    message = wrong()
    assert (message is not None) == found
    if found:
        assert message.startswith(f"wrong {name}: relative error 2.0") and f"sequence {sequence}" in message


def test_the_whole_program(tmp_path, capsys):
    """Of packs, those of short sequences alone, and the first sequences of them: beside our dense call."""
    path = tmp_path / "packed.json"
    arguments = ["--device", "cpu", "--grid", "packed", "--max-seqlen", "48", "--tokens", "68", "--min-time", "0"]
    arguments += ["--schedules", "auto", "--pass", "backward", "forward", "--json", str(path)]
    assert run.main([*arguments, "--png", str(tmp_path / "packed.png")]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {(row["pack"], row["batch"]) for row in rows if row["pack"].startswith("8192")} == {("8192x34", 2)}
    per_pass = {pass_: [row["impl"] for row in rows if row["pass"] == pass_] for pass_ in ("backward", "forward")}
    assert set(per_pass["backward"]) == set(per_pass["forward"]) == {OURS, DENSE}
    printed = capsys.readouterr().out
    assert "auto dense auto" in " ".join(printed.split()) and "pack 8192x34[:2]" in printed


def test_our_dense_call_has_its_turn_after_ours():
    names = [(peers.Variant(OURS, policy, True), "backward") for policy in ("auto", "spt")]
    names += [(peers.Variant("fa2", None, True), "backward")]
    names += [(peers.Variant(DENSE, policy, True), "backward") for policy in ("auto", "spt")]
    order = [str(variant) for variant, _ in run.beside_each_other(dict.fromkeys(names))]
    assert order == ["dash_attn auto", "dash_attn dense auto", "dash_attn spt", "dash_attn dense spt", "fa2 det"]


def rows_of(shape, backward, forward):
    """A row for each figure: by (impl, deterministic) of the backward, by impl of the forward."""

    def row(impl, pass_, schedule, deterministic, tflops):
        head = {"impl": impl, "pass": pass_, "schedule": schedule, "deterministic": deterministic}
        return {**head, **shape.row(), "ms": 1.0, "tflops": tflops}

    policy = {OURS: "auto", DENSE: "auto"}
    rows = [row(impl, "backward", policy.get(impl), mode, tflops) for (impl, mode), tflops in backward.items()]
    return rows + [row(impl, "forward", None, True, tflops) for impl, tflops in forward.items()]


@pytest.fixture
def packed_file(tmp_path):
    """Ours 300 beside 100 and 400 of a peer and, where lengths are equal, 320 of our dense call; the dense call is
    quicker than every peer, and is none."""
    rows = []
    for shape in [s for s in GRIDS["packed"]() if s.pack in ("lognormal", "8x2048")]:
        backward = {(OURS, True): 300.0, ("fa3", True): 100.0, ("fa3", False): 400.0}
        forward = {OURS: 500.0, "fa3": 400.0}
        if shape.dense:
            backward[DENSE, True], forward[DENSE] = 320.0, 500.0
        rows += rows_of(shape, backward, forward)
    path = tmp_path / "packed.json"
    path.write_text(json.dumps({"meta": {"commit": "abcdef" * 7, "gpu": "NVIDIA H200"}, "rows": rows}))
    return path


def test_our_dense_call_is_no_peer(packed_file, capsys):
    compare.main([str(packed_file), "--pass", "backward", "forward", "both", "--grid", "packed"])
    backward, forward, both = capsys.readouterr().out.split("baselines of the same run")[1:]
    assert "not measured here" not in backward
    lines = {line.strip().split("  ")[0]: line.split() for line in backward.splitlines() if " of " in line}
    assert lines["the best deterministic"][3:5] == ["3.000", "(8)"]
    assert lines["the best other"][3:5] == ["0.750", "(8)"]
    equal = Shape.of_pack("8x2048", 128, 32, 8, "causal")
    assert lines[DENSE][2:] == f"0.938 (4) of 8, minimum 0.938 at {equal}".split()
    assert any(line.strip().startswith(DENSE) and "1.000 (4)" in line for line in forward.splitlines())
    # Each of ours after its own forward: 3.5 / (1 / 500 + 2.5 / 300) over 3.5 / (1 / 500 + 2.5 / 320).
    assert any(line.strip().startswith(DENSE) and "0.950 (4)" in line for line in both.splitlines())
    compare.main([str(packed_file), "--grid", "packed-bar"])
    assert "3.000 (6) of 6" in capsys.readouterr().out


def test_a_pack_beside_our_dense_call_alone_is_compared(packed_file):
    shape = Shape.of_pack("8x2048", 128, 32, 8, "causal")
    figures = compare.figures(rows_of(shape, {(OURS, True): 300.0, (DENSE, True): 400.0}, {}), "backward")
    (found,) = compare.compare(figures, figures)
    assert found.peers == [] and found.ratio(found.dense) == 0.75
    assert compare.dense_mean([found]).ratio == 0.75 and compare.mean([found], True) is None
    assert DENSE in compare.report([found])


def test_documents_quote_packs_and_windows(packed_file, tmp_path):
    result = document.ROOT / "benchmarks" / "results" / "h200_2026-11-27_5742ba2.json"
    windows = tmp_path / "windows.json"
    figures = {(OURS, True): 300.0, ("fa3", False): 250.0}
    rows = [row for shape in GRIDS["windows-bar"]() for row in rows_of(shape, figures, {})]
    meta = {"commit": "123456" * 7, "gpu": "NVIDIA H100 80GB HBM3"}
    windows.write_text(json.dumps({"meta": meta, "rows": rows}))
    assert "`--grid packed-bar`" not in document.details(document.Quoted(result))
    quoted = document.Quoted(result, **{"packed-bar": packed_file, "windows-bar": windows})
    said = " ".join(document.details(quoted).split())
    assert "(`--grid packed-bar`), both sides in one run of commit abcdefabcdef on one H200." in said
    assert "the backward 3.00 times that of FlashAttention-3, deterministic, minimum 3.00 (6)" in said
    dense = "our dense call on variable-length batches of equal lengths"
    assert f"the backward 0.94 times that of {dense}, minimum 0.94 (2)" in said
    assert "(`--grid windows-bar`), both sides in one run of commit 123456123456 on one H100." in said
    assert "the backward 1.20 times that of FlashAttention-3, minimum 1.20 (5)" in said
    by_shape = document.by_shape(quoted)
    head = "| head_dim | heads | mask | batch x seqlen | dash_attn | over dense | best deterministic baseline | ratio |"
    assert by_shape.count(head) == 2, "packs, backward and forward"
    assert "| 128 | 32/8 | causal | pack 8x2048 | **300** | 0.94 | 100 (FlashAttention-3) | 3.00 | 400" in by_shape
    assert "| 64 | 32 | full | pack lognormal | **300** | - | 100 (FlashAttention-3) | 3.00 | 400" in by_shape
    assert "| 64 | 64/8 | window (127, 0) | 2 x 8192 | **300** | - | - | 250 (FlashAttention-3) | 1.20 |" in by_shape
    assert "| 128 | 32/8 | window (4095, 0) | 1 x 32768 | **300** |" in by_shape


def test_the_table_of_a_run_names_packs_and_windows(packed_file):
    rows = json.loads(packed_file.read_text())["rows"]
    rows += rows_of(GRIDS["windows-bar"]()[0], {(OURS, True): 200.0}, {})
    backward, forward = run.table(rows).split("\n\n")
    heads, *lines = backward.splitlines()[1:]
    assert heads.split() == ["auto", "fa3", "det", "fa3", "dense", "auto"] and len(lines) == 9
    (line,) = [line for line in lines if line.startswith("bf16 d64 h32 causal pack 8x2048 ")]
    assert line.split()[-4:] == ["300.0", "100.0", "400.0", "320.0"]
    assert lines[-1].startswith("bf16 d128 h32/8 window (4095, 0) 1x16384 ")
    assert forward.splitlines()[1].split() == ["dash_attn", "det", "fa3", "det", "dense", "det"]


@pytest.mark.parametrize("grid", ["packed", "windows"])
def test_a_picture_has_a_place_for_each(grid, tmp_path):
    shapes = GRIDS[grid]()
    rows = [row for shape in shapes for row in rows_of(shape, {(OURS, True): 300.0, ("fa3", True): 100.0}, {})]
    assert not plot.are_series(shapes)
    panels = plot.panels({"rows": rows}, "backward")
    places = [plot.place_of(s, False) for s in next(iter(panels.values()))[OURS, "auto", True]]
    assert len(set(places)) == len(places) > 1
    assert {"32/8\nlognormal", "32/8\n1x32k\n(4095, 0)"} & set(places)
    assert sum(len(lines[OURS, "auto", True]) for lines in panels.values()) == len(shapes)
    meta = {"gpu": "none", "cuda": "none", "torch": "none", "commit": "none"}
    plot.draw({"meta": meta, "rows": rows}, tmp_path / "drawn.png", "backward")
    assert (tmp_path / "drawn.png").stat().st_size > 1000

"""`benchmarks.dropout_model` on the CPU: what it runs, what it writes, what it does when parts fail. No figure here
means anything."""

import ctypes
import json
import shutil
import time
import types

import pytest
import torch

from benchmarks import document, dropout_block, dropout_model, dropout_report, timing
from dash_attn.dropout import model

CPU = torch.device("cpu")
BLOCK = dropout_model.TINY.blocks["Llama-3 8B"]


def run(path, *arguments):
    return dropout_model.main(["--tiny", "--device", "cpu", "--min-time", "0", "--json", str(path), *arguments])


@pytest.fixture(scope="module")
def result_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("dropout_model") / "result.json"
    assert run(path, "--blocks", "Llama-3 8B", "Mixtral 8x7B", "--seqlens", "64") == 0
    return path


def test_every_part_is_measured(result_path):
    result = json.loads(result_path.read_text())
    assert result["meta"]["p"] == 0.125 and result["meta"]["failures"] == result["meta"]["left_out"] == []
    assert {(row["rounds"], row["planes"]) for row in result["generator"]} == {(7, 4), (10, 4), (7, 8), (10, 8)}
    assert {row["of"] for row in result["overheads"]} == {"call", "fork"}
    assert [row["pass"] for row in result["attention"]] == ["forward", "backward"] * 2
    assert {row["where"] for row in result["pairs"]} == {"streams"}
    found = {(row["block"], row["seqlen"], row["pass"]) for row in result["rows"]}
    assert found == {(b, 64, p) for b in ("Llama-3 8B", "Mixtral 8x7B") for p in ("forward", "backward")}
    for row in result["rows"]:
        assert set(row["gemm_ms"]) == {"qkv", "out", "up", "down"} and set(row["generator_ms"]) == {"7", "10"}
        times = [row[f"{name}_ms"] for name in ("attention", "attention_bits", "sequential", "overlapped")]
        assert min(times) > 0


def test_the_model_reads_what_is_measured(result_path):
    result = model.read(result_path)
    fitted = model.fitted(result, result_path.name)
    assert fitted.machine.gemm_tflops.is_measured and fitted.settings.gemm_slowdown.is_measured
    assert fitted.settings.forward_use.is_measured and not fitted.settings.hidden_in_attention.is_measured
    judged = {(one.block, one.pass_, one.of) for one in model.every(result, fitted)}
    names = ("generator, 7 rounds", "generator, 10 rounds", "attention with bits", "sequential", "overlapped")
    blocks = ("Llama-3 8B", "Mixtral 8x7B")
    assert judged == {(b, p, of) for b in blocks for p in ("forward", "backward") for of in names}


def test_a_document_quotes_it(result_path, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    copy = tmp_path / "dropout.md"
    shutil.copy(document.ROOT / "docs" / "dropout.md", copy)
    dropout_report.main([str(result_path), "--document", str(copy)])
    text = copy.read_text()
    assert "predictions are within 10%" in text and "| Mixtral 8x7B | 64 | backward |" in text
    assert (tmp_path / "dropout_model.png").read_bytes().startswith(b"\x89PNG")
    dropout_report.main([str(result_path), "--document", str(copy)])
    assert copy.read_text() == text
    prose = [line for line in text.splitlines() if not line.startswith(("|", "!"))]
    assert max(map(len, prose)) <= 120
    with pytest.raises(SystemExit, match="error: "):
        dropout_report.main([str(tmp_path / "none.json"), "--document", str(copy)])


def test_the_document_quotes_the_result_that_the_package_brings():
    text = (document.ROOT / "docs" / "dropout.md").read_text()
    assert dropout_report.block(model.PACKAGED) in text


def test_a_part_that_fails_hides_no_other(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no attention here")

    monkeypatch.setattr(dropout_model.blocks, "attention_calls", broken)
    path = tmp_path / "result.json"
    assert run(path, "--blocks", "Llama-3 8B", "--seqlens", "64") == 1
    result = json.loads(path.read_text())
    assert result["generator"] and result["gemm"] and result["pairs"] and result["overheads"]
    assert result["attention"] == result["rows"] == []
    assert "Llama-3 8B, 64, forward: RuntimeError: no attention here" in result["meta"]["failures"]
    printed = capsys.readouterr().out
    assert "failed: attention of 16 heads: RuntimeError: no attention here" in printed
    assert "No time of a block" in printed


def test_an_attention_that_fails_hides_no_other(tmp_path, monkeypatch, capsys):
    class Broken(dropout_block.peers.DashAttnBits):
        def prepare(self, *_):
            raise RuntimeError("no bits here")

    monkeypatch.setattr(dropout_block.peers, "DashAttnBits", Broken)
    path = tmp_path / "result.json"
    assert run(path, "--blocks", "Llama-3 8B", "--seqlens", "64") == 1
    result = json.loads(path.read_text())
    assert [row["pass"] for row in result["rows"]] == ["forward", "backward"]
    for row in result["rows"]:
        assert "attention_ms" in row and not {"attention_bits_ms", "sequential_ms", "overlapped_ms"} & row.keys()
    assert "RuntimeError: no bits here" in capsys.readouterr().out


def test_a_call_that_fails_hides_no_other():
    def broken():
        raise ValueError("bad")

    bench = dropout_model.Bench(CPU, dropout_model.TINY, 0.1, 0.0)
    assert set(bench.ms({"good": lambda: None, "broken": broken, "missing": None})) == {"good"}
    assert bench.failures == ["broken: ValueError: bad"]


def test_what_has_no_time_left_is_said(tmp_path, capsys):
    path = tmp_path / "result.json"
    assert run(path, "--seconds", "-1", "--blocks", "Llama-3 8B", "--seqlens", "64") == 0
    printed = capsys.readouterr().out
    assert "Not measured: the generator over sizes; " in printed and "Llama-3 8B, 64, backward" in printed


def test_a_part_has_a_limit(monkeypatch, capsys):
    called = []

    def sleep():
        called.append(True)
        time.sleep(5)

    def slow():
        yield from timing.measure({"a": sleep, "b": sleep}, device=CPU)

    monkeypatch.setattr(dropout_model, "PART_SECONDS", 0.4)  # enough to begin the first call
    bench = dropout_model.Bench(CPU, dropout_model.TINY, 0.1, 0.0)
    recording = dropout_model.Recording(None, {}, bench, 10.0)
    recording.part("rows", "something slow", slow)
    assert bench.failures == ["something slow: Late: took longer than 0 s"] and len(called) == 1
    recording.part("rows", "something else", lambda: iter([{"a": 1}]))
    assert recording.result["rows"] == [{"a": 1}]


@pytest.mark.parametrize("name", model.BLOCKS)
def test_gemms_are_those_that_the_model_counts(name):
    block, tokens = model.BLOCKS[name], 4096
    gemms = dropout_block.gemms_of(block, tokens)
    assert gemms["qkv"].flops == block.projection_flops(tokens) and gemms["out"].flops == block.output_flops(tokens)
    assert sum(gemm.flops for gemm in gemms.values()) == block.projection_flops(tokens) + block.other_flops(tokens)
    assert gemms["up"].batch == (8 if name.startswith("Mixtral") else 1)


def test_microbenchmarks_are_of_no_shape_of_a_block():
    sizes = dropout_model.Sizes(blocks=model.BLOCKS)
    micro = {(gemm.depth, gemm.columns) for gemm in (*sizes.gemms, *(gemm for gemm, _ in sizes.pairs))}
    gemms = [gemm for block in model.BLOCKS.values() for gemm in dropout_block.gemms_of(block, 16384).values()]
    assert micro.isdisjoint((gemm.depth, gemm.columns) for gemm in gemms)
    assert set(sizes.attention).isdisjoint(sizes.seqlens)


def test_a_gemm_and_its_gradients_are_right():
    torch.manual_seed(0)
    for gemm in (dropout_block.Gemm(6, 8, 10), dropout_block.Gemm(6, 8, 10, batch=3)):
        calls = dropout_block.gemm_calls(gemm, CPU, torch.float32)
        found = {}
        for cell, name in zip(calls["backward"].__closure__, calls["backward"].__code__.co_freevars):
            found[name] = cell.cell_contents
        x, weight = found["x"].clone().requires_grad_(), found["weight"].clone().requires_grad_()
        y = x @ weight.mT
        torch.testing.assert_close(calls["forward"](), y.detach())
        calls["backward"]()
        dx, dweight = torch.autograd.grad(y, (x, weight), found["dy"])
        torch.testing.assert_close(found["dx"], dx)
        torch.testing.assert_close(found["dweight"], dweight)


@pytest.mark.parametrize("pass_, order", [
    ("forward", ["qkv", "generator", "attention", "out", "up", "down"]),
    ("backward", ["down", "up", "out", "generator", "attention", "qkv"]),
])  # fmt: skip
def test_the_order_of_a_block(pass_, order):
    done = []
    gemms = {name: lambda name=name: done.append(name) for name in dropout_block.GEMMS}
    attention, generator = (lambda name=name: done.append(name) for name in ("attention", "generator"))
    whole = dropout_block.Pass(pass_, gemms, attention, generator, None)
    for call in (whole.sequential(), whole.overlapped()):
        done.clear()
        call()
        assert done == order
    assert whole.calls == (5 if pass_ == "forward" else 9)


def test_two_streams(monkeypatch):
    """The generator waits for what was before the GEMM alone, and comes to the GPU after it; what follows waits."""
    done = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            done.append(f"{self.name} waits for {other.name}")

        def __enter__(self):
            done.append("to the side")

        def __exit__(self, *_):
            done.append("back")

    current = Stream("current")
    cuda = types.SimpleNamespace(current_stream=lambda: current, stream=lambda stream: stream)
    monkeypatch.setattr(dropout_block, "torch", types.SimpleNamespace(cuda=cuda))
    dropout_block.beside(lambda: done.append("gemm"), lambda: done.append("generator"), Stream("side"))()
    waits = "side waits for current", "current waits for side"
    assert done == [waits[0], "gemm", "to the side", "generator", "back", waits[1]]


def test_bits_that_attention_is_given_are_those_of_the_state():
    generator = dropout_block.Generator(2, 2, 64, 0.1, CPU)
    generator.call()()
    from dash_attn.dropout import dropout_bits

    assert torch.equal(generator.made().bits, dropout_bits(generator.state, p=0.1, **generator.sizes).bits)


def test_what_is_quick_comes_first():
    found = dropout_model.jobs(dropout_model.Sizes(blocks=model.BLOCKS))
    assert len(found) == len(set(found)) == 2 * 3 * len(model.BLOCKS)
    assert [pass_ for _, _, pass_ in found] == ["forward"] * 18 + ["backward"] * 18
    assert found[0] == ("Llama-2 7B", 2048, "forward") and found[17] == ("GPT-3 175B", 32768, "forward")


def test_blocks_of_one_shape_are_measured_once(tmp_path):
    path = tmp_path / "result.json"
    assert run(path, "--blocks", "Llama-2 70B", "Llama-3 70B", "--seqlens", "64") == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["block"], row.get("measured_as")) for row in rows] == [
        ("Llama-2 70B", None), ("Llama-3 70B", "Llama-2 70B"), ("Llama-2 70B", None), ("Llama-3 70B", "Llama-2 70B"),
    ]  # fmt: skip
    assert rows[0]["sequential_ms"] == rows[1]["sequential_ms"]


@pytest.mark.parametrize("arguments, message", [
    (["--device", "cpu"], "error: --tiny must be given without a GPU, got --device cpu"),
    (["--device", "cpu", "--tiny", "--p", "1"], "error: --p must be above 0 and below 1, got 1.0"),
])  # fmt: skip
def test_errors(arguments, message):
    with pytest.raises(SystemExit, match=message):
        dropout_model.main(arguments)


def test_rates_of_instructions():
    """Of a library that says how many clocks each CTA took."""

    class Library:
        def rate_threads(self):
            return 1024

        def rate_instructions(self, kind):
            return 32 * (kind + 1)

        def measure_rate(self, kind, ctas, repeats, clocks, out, stream):
            assert repeats == dropout_model.REPEATS and ctas == 4
            taken = (ctypes.c_int64 * ctas).from_address(clocks.value)
            taken[:] = [1024 * 32 * repeats // 64, 1024 * 32 * repeats // 64, 10**9, 1024 * 32 * repeats // 64]
            return 0

    bench = dropout_model.Bench(CPU, dropout_model.TINY, 0.1, 0.0)
    rows = list(dropout_model.instructions(bench, Library(), 4, stream=0))
    assert [row["instruction"] for row in rows] == list(dropout_model.INSTRUCTIONS)
    assert [row["lanes"] for row in rows] == [64.0, 128.0, 192.0, 256.0]
    failing = Library()
    failing.measure_rate = lambda *_: 98
    with pytest.raises(RuntimeError, match=r"measure_rate\(0\) returned CUDA error 98"):
        list(dropout_model.instructions(bench, failing, 4, stream=0))


def test_when_each_of_two_is_done(monkeypatch):
    clock = iter(range(100))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(clock)

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ends = dropout_model.Ends({"gemm": lambda: None, "generator": lambda: next(clock)}, torch.device("cuda"))
    both = ends.begun(dropout_block.in_turn([ends.noted("gemm"), ends.noted("generator")]))
    for _ in range(3):
        both()
    assert ends.medians_ms() == {"gemm_end_ms": 1, "generator_end_ms": 3}

"""`benchmarks.dropout_block` on the CPU: what it runs, what it writes, what it does when calls fail; and the figures of
docs/dropout.md."""

import json
import shutil
import statistics

import pytest
import torch

from benchmarks import bars, document, dropout_block, dropout_report, peers

CPU = torch.device("cpu")
PAGE = document.ROOT / "docs" / "dropout.md"
NAME = "Mixtral 8x7B"


@pytest.fixture(scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dropout_block.BLOCKS, NAME, dropout_block.Block(64, 4, 2, 96, experts=2))
        yield


def run(path, *arguments):
    settings = ["--device", "cpu", "--min-time", "0", "--tokens", "64", "--blocks", NAME, "--seqlens", "32"]
    return dropout_block.main([*settings, "--json", str(path), *arguments])


@pytest.fixture(scope="module")
def result_path(tmp_path_factory, small):
    path = tmp_path_factory.mktemp("dropout_block") / "result.json"
    assert run(path) == 0
    return path


def test_every_part_is_measured(result_path):
    result = json.loads(result_path.read_text())
    assert result["meta"]["p"] == 0.125 and result["meta"]["failures"] == []
    assert [(row["block"], row["seqlen"], row["pass"]) for row in result["rows"]] == [
        (NAME, 32, "forward"), (NAME, 32, "backward"),
    ]  # fmt: skip
    for row in result["rows"]:
        assert set(row["gemm_ms"]) == {"qkv", "out", "up", "down"} and set(row["generator_ms"]) == {"7", "10"}
        assert row["tokens"] == 64
        assert min(row[f"{name}_ms"] for name in ("attention", "attention_bits", "sequential", "overlapped")) > 0


def test_a_document_quotes_it(result_path, tmp_path):
    copy = tmp_path / "dropout.md"
    shutil.copy(PAGE, copy)
    dropout_report.main([str(result_path), "--document", str(copy)])
    assert f"| {NAME} | 32 | " in copy.read_text() and "| GPT-3 175B |" not in copy.read_text()
    with pytest.raises(SystemExit, match="error: "):
        dropout_report.main([str(tmp_path / "none.json"), "--document", str(copy)])


def test_an_attention_that_fails_hides_no_other(tmp_path, monkeypatch, capsys, small):
    def broken(*_):
        raise RuntimeError("no bits here")

    monkeypatch.setattr(peers.DashAttnBits, "prepare", broken)
    path = tmp_path / "result.json"
    assert run(path) == 1
    for row in json.loads(path.read_text())["rows"]:
        assert "attention_ms" in row and not {"attention_bits_ms", "sequential_ms", "overlapped_ms"} & row.keys()
    printed = capsys.readouterr().out
    assert "RuntimeError: no bits here" in printed and "| -, - | -, - | -, - |" in printed
    assert "No block was measured in both ways." in printed


def test_a_block_that_fails_hides_no_other(tmp_path, monkeypatch, capsys, small):
    measure = dropout_block.measure

    def broken(name, seqlen, pass_, bench):
        if pass_ == "forward":
            raise RuntimeError("out of memory")
        return measure(name, seqlen, pass_, bench)

    monkeypatch.setattr(dropout_block, "measure", broken)
    path = tmp_path / "result.json"
    assert run(path) == 1
    result = json.loads(path.read_text())
    assert [row["pass"] for row in result["rows"]] == ["backward"]
    assert f"| {NAME} | 32 | -, " in capsys.readouterr().out
    assert result["meta"]["failures"] == [f"{NAME}, 32, forward: RuntimeError: out of memory"]


def test_errors():
    with pytest.raises(SystemExit, match="error: --p must be above 0 and below 1, got 1.0"):
        dropout_block.main(["--device", "cpu", "--p", "1"])


@pytest.mark.parametrize("name, parameters", [
    ("Llama-2 7B", 202_375_168), ("Llama-2 70B", 855_638_016), ("GPT-3 175B", 12 * 12288**2),
])  # fmt: skip
def test_gemms_have_the_parameters_of_a_layer(name, parameters):
    gemms = dropout_block.gemms_of(dropout_block.BLOCKS[name], 4096).values()
    assert sum(gemm.depth * gemm.columns for gemm in gemms) == parameters
    assert {gemm.rows for gemm in gemms} == {4096}


def test_a_token_uses_two_of_eight_experts():
    gemms = dropout_block.gemms_of(dropout_block.BLOCKS["Mixtral 8x7B"], 4096)
    assert [(gemm.batch, gemm.rows) for gemm in gemms.values()] == [(1, 4096), (1, 4096), (8, 1024), (8, 1024)]


@pytest.mark.parametrize("gemm", [dropout_block.Gemm(6, 8, 10), dropout_block.Gemm(6, 8, 10, batch=3)], ids=str)
def test_a_gemm_and_its_gradients_are_right(gemm):
    torch.manual_seed(0)
    calls = dropout_block.gemm_calls(gemm, CPU, torch.float32)
    names, cells = calls["backward"].__code__.co_freevars, calls["backward"].__closure__
    found = {name: cell.cell_contents for name, cell in zip(names, cells)}
    x, weight = (found[name].clone().requires_grad_() for name in ("x", "weight"))
    y = x @ weight.mT
    torch.testing.assert_close(calls["forward"](), y.detach())
    calls["backward"]()
    for actual, expected in zip(("dx", "dweight"), torch.autograd.grad(y, (x, weight), found["dy"])):
        torch.testing.assert_close(found[actual], expected)


class Streams:
    """Takes the place of torch.cuda, and notes what happens."""

    def __init__(self, done):
        self.done, self.current, self.side = done, Stream("current", done), Stream("side", done)

    def current_stream(self):
        return self.current

    def stream(self, stream):
        return stream


class Stream:
    def __init__(self, name, done):
        self.name, self.done = name, done

    def wait_stream(self, other):
        self.done.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        self.done.append("to the side")

    def __exit__(self, *_):
        self.done.append("back")


@pytest.mark.parametrize("pass_, before, gemm, after", [
    ("forward", [], "qkv", ["out", "up", "down"]), ("backward", ["down", "up"], "out", ["qkv"]),
])  # fmt: skip
def test_the_order_of_a_block(pass_, before, gemm, after, monkeypatch):
    """The generator waits for what precedes the GEMM alone, and comes to the GPU after it; what follows waits."""
    done = []
    streams = Streams(done)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    gemms = {name: lambda name=name: done.append(name) for name in ("qkv", "out", "up", "down")}
    attention, generator = (lambda name=name: done.append(name) for name in ("attention", "generator"))
    whole = dropout_block.Pass(pass_, gemms, attention, generator, streams.side)
    whole.sequential()()
    assert done == [*before, gemm, "generator", "attention", *after]
    done.clear()
    whole.overlapped()()
    both = ["side waits for current", gemm, "to the side", "generator", "back", "current waits for side"]
    assert done == [*before, *both, "attention", *after]


def test_the_page_quotes_the_measured_blocks():
    text = PAGE.read_text()
    assert dropout_report.block(dropout_report.RESULT) in text


def test_the_page_quotes_the_runs_with_dropout():
    text, found = PAGE.read_text(), {}
    for path in (document.ROOT / "benchmarks" / "results").glob("h200_*_dropout*.json"):
        for claim in bars.of_dropout(bars.Run(path, "dropout")):
            if claim.of.startswith("dropout 0.125") and claim.bar:
                _, *of = claim.of.split(", ")
                found.setdefault((*of, claim.pass_, claim.bar), []).append(claim.mean.ratio)
    assert len(found) == 7 and {len(ratios) for ratios in found.values()} == {5}
    for (*of, pass_, bar), ratios in found.items():
        head_dim = of[0] if of else "64 and 128, over cuDNN"
        said = f"{of[1]}, {pass_}, {head_dim}" if of[1:] else f"both passes with generation, {head_dim}"
        mean = statistics.mean(ratios)
        cells = [said, f"{bar:.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}", f"{mean:.3f}"]
        assert f"| {' | '.join(cells)}{', **missed**' if mean < bar else ''} |" in text

"""The inputs, the cases and the comparison behind the golden bits, without a GPU."""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent / "gpu"))

import golden_bits

import dash_attn
from dash_attn import schedule

ROOT = pathlib.Path(__file__).parents[1]
# The SHA-256 of golden_bits.json by bits version. The line of a released version changes only with added cases.
GOLDEN = {2: "2e9bf35462fe7a15"}


def test_golden_bits_belong_to_the_bits_version():
    digest = hashlib.sha256(golden_bits.FILE.read_bytes()).hexdigest()[:16]
    assert GOLDEN[dash_attn.__bits_version__] == digest, (
        f"golden_bits.json is {digest} now. If bits have changed since the last release, raise __bits_version__ by "
        "one, list the change in docs/contract.md and CHANGELOG.md, and write the digest into GOLDEN"
    )


def test_every_bits_version_is_listed():
    """In docs/contract.md, the newest first, with its release; CHANGELOG.md names it there."""
    rows = re.findall(r"^\| (\d+) \| (\S+) \|", (ROOT / "docs" / "contract.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(dash_attn.__bits_version__, 0, -1))
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    (section,) = (text for text in releases if text.startswith(rows[0][1]))
    assert f"Bits version {rows[0][0]}" in section and "### Bits" in section


def test_the_generator_gives_known_values():
    assert golden_bits.hashed(torch.tensor([0, 1, 2, 2**32 - 1])).tolist() == [0, 824515495, 1722258072, 539527247]
    exact = golden_bits.values((2, 5), 3, torch.float32, "cpu")
    assert (256 * exact).tolist() == [[97, 36, -298, 479, 335], [-106, 275, 209, 137, -43]]
    rounded = golden_bits.values((2, 5), 3, torch.bfloat16, "cpu")
    assert (256 * rounded.float()).tolist() == [[97, 36, -298, 480, 336], [-106, 276, 209, 137, -43]]


def test_the_generator_is_near_the_normal_distribution():
    x = golden_bits.values((200_000,), 1, torch.float32, "cpu")
    assert abs(x.mean().item()) < 0.01 and abs(x.std().item() - 1) < 0.01
    assert abs((x**4).mean().item() - 3) < 0.2 and 3.5 < x.abs().max().item() < 6
    y = golden_bits.values((200_000,), 2, torch.float32, "cpu")
    assert abs((x * y).mean().item()) < 0.01 and abs((x[1:] * x[:-1]).mean().item()) < 0.01


def test_the_inputs_of_a_case():
    case = golden_bits.Case("fp16", 40, True, 2, 30, 70, 4, 2)
    q, k, v, dout = golden_bits.inputs(case, "cpu")
    assert q.shape == dout.shape == (2, 30, 4, 40) and k.shape == v.shape == (2, 70, 2, 40)
    assert {x.dtype for x in (q, k, v, dout)} == {torch.float16}
    assert not torch.equal(k, v) and not torch.equal(q, dout)


def test_the_inputs_of_a_pack():
    case = golden_bits.Case.of_pack("bf16", 64, False, ((0, 65), (129, 30)), 4, 2, window=(127, 0))
    assert str(case) == "bf16 d64 h4/2 window 127,0 pack 0x65+129x30"
    q, k, v, dout = golden_bits.inputs(case, "cpu")
    assert q.shape == dout.shape == (129, 4, 64) and k.shape == v.shape == (95, 2, 64)
    cu_seqlens_q, cu_seqlens_k = case.cu_seqlens("cpu")
    assert cu_seqlens_q.tolist() == [0, 0, 129] and cu_seqlens_k.tolist() == [0, 65, 95]
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    found = golden_bits.digests(case, golden_bits.Package(), "cpu")
    assert len(found) == 2 + 3 * len(schedule.fitting(**case.mask))


def test_the_columns_of_a_case():
    case = golden_bits.Case("bf16", 64, True, 2, 700, 301, 4, 2, column_bounds=1)
    assert str(case) == "bf16 d64 h4/2 causal columns 1 2x700x301" and not case.is_plain
    columns = golden_bits.columns(case, "cpu")
    assert columns.shape == (2, 2, 301, 1) and columns.dtype == torch.int32
    assert columns[0, 0, [0, 149, 150, 299, 300], 0].tolist() == [0, 0, 195, 195, 472]
    assert list(golden_bits.digests(case, golden_bits.Package(), "cpu")) == [
        "out", "softmax_lse", "descending dq", "descending dk", "descending dv"
    ]  # fmt: skip


def splits_of(case):
    heads = dict(heads=case.heads, kv_heads=case.kv_heads)
    lengths = (case.seqlen_q, case.seqlen_k)
    return schedule.problem("descending", *lengths, causal=case.causal, head_dim=case.head_dim, **heads).splits


def test_the_cases_are_legal_and_cover_what_they_should():
    everything = golden_bits.cases()
    assert len(set(map(str, everything))) == len(everything)
    for head_dim in (64, 128):
        of_columns = [case for case in everything if case.column_bounds and case.head_dim == head_dim]
        assert {(bool(case.pack), case.column_bounds) for case in of_columns} == {(False, 1), (True, 4)}
        special = [case for case in everything if not case.is_plain and case.head_dim == head_dim]
        special = [case for case in special if case not in of_columns]
        assert {(bool(case.pack), case.window != (-1, -1)) for case in special} == {
            (False, True), (True, False), (True, True)
        }  # fmt: skip
    cases = [case for case in everything if case.is_plain]
    for case in cases:
        for policy in schedule.fitting(causal=case.causal):
            heads = dict(heads=case.heads, kv_heads=case.kv_heads, batch=case.batch)
            tiles = schedule.problem(
                policy, case.seqlen_q, case.seqlen_k, causal=case.causal, head_dim=case.head_dim, **heads
            )
            assert tiles.num_kv_tiles > 1
    assert {case.dtype for case in cases} == {"bf16", "fp16"} and {case.causal for case in cases} == {False, True}
    assert {case.head_dim for case in cases} == {64, 128, 96, 40}
    assert any(case.seqlen_q < case.seqlen_k for case in cases) and any(case.seqlen_q > case.seqlen_k for case in cases)
    for head_dim in (64, 128):
        splits = {splits_of(case) for case in cases if case.head_dim == head_dim}
        assert 1 in splits and max(splits) > 1
    long = [case for case in cases if case.seqlen_k >= 8192]
    assert {(case.head_dim, case.causal) for case in long} == set(itertools.product((64, 128), (False, True)))
    assert {case.kv_heads > 1 for case in long} == {False, True} and all(splits_of(case) > 1 for case in long)


def test_one_bit_of_one_tensor_is_seen():
    case = golden_bits.Case("bf16", 40, True, 1, 20, 30, 2, 1)
    ops = golden_bits.Package()
    found = golden_bits.digests(case, ops, "cpu")
    policies = schedule.fitting(causal=True)
    names = [f"{policy} {gradient}" for policy in policies for gradient in ("dq", "dk", "dv")]
    assert list(found) == ["out", "softmax_lse", *names]
    assert golden_bits.digests(case, ops, "cpu") == found

    original = ops.backward

    def backward(*arguments):
        dq, dk, dv = original(*arguments)
        if arguments[-1] == policies[-1]:
            dv.view(torch.int16)[0, 3, 0, 7] ^= 1
        return dq, dk, dv

    ops.backward = backward
    differ, alone = golden_bits.differences({str(case): found}, {str(case): golden_bits.digests(case, ops, "cpu")})
    assert differ == [f"{case}: {policies[-1]} dv"] and not alone


def test_two_files_are_compared(tmp_path, capsys):
    before = {"a": {"out": "1", "spt dq": "2"}, "b": {"out": "3", "old dq": "9"}}
    after = {"a": {"out": "1", "spt dq": "4"}, "b": {"out": "3"}}
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, content in zip(paths, (before, after)):
        path.write_text(golden_bits.dumps(content))
        assert json.loads(path.read_text()) == content
    assert golden_bits.main(["--compare", *map(str, paths)]) == 1
    printed = capsys.readouterr().out
    assert "DIFFERS a: spt dq" in printed and "b: only before: old dq" in printed
    assert "3 digests in both; the bits of 1 of 2 cases differ" in printed
    assert golden_bits.main(["--compare", str(paths[0]), str(paths[0])]) == 0


class FakeLibrary:
    """Writes its arguments' sum, and takes policies by name as a Library does."""

    def forward(self, q, k, v, out, softmax_lse, softmax_scale, causal):
        out.copy_(q + softmax_scale)
        softmax_lse.fill_(float(causal))

    def backward(self, dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, schedule):
        dq.copy_(dout)
        dk.copy_(k)
        dv.copy_(v)


@pytest.mark.parametrize("causal", [False, True])
def test_a_library_by_its_path_has_its_own_policies(causal):
    case = golden_bits.Case("bf16", 40, causal, 1, 20, 30, 2, 1)
    raw = golden_bits.Raw(FakeLibrary(), list(golden_bits.POLICIES))
    assert raw.takes(case) and not raw.takes(dataclasses.replace(case, window=(5, 0)))
    own = {"spt_descending", "symmetric_shift"} if causal else {"shift"}
    assert set(raw.fitting(case)) == {"descending", "spt", "order_free"} | own
    found = golden_bits.digests(case, raw, "cpu")
    assert found["spt dk"] == golden_bits.digest(golden_bits.inputs(case, "cpu")[1])

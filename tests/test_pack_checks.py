"""The checks of packs that the GPU tests rest on, tried on the CPU: they pass what is right and fail what is wrong."""

import pathlib
import random
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent / "gpu"))

import gpu_support as support
import pack_checks
from gpu_support import GRADIENTS, Problem
from pack_checks import Pool, Rows

LENGTHS = ((20, 30), (0, 7), (9, 0), (33, 33))
ROWS_Q, ROWS_K = Rows(80, (1, 25, 25, 34, 70), (20, 0, 9, 33)), Rows(90, (0, 30, 37, 40, 80), (30, 7, 0, 33))


@pytest.fixture(scope="module")
def pool():
    return Pool(Problem(1, 0, 0, 4, 2, 16, True), "cpu")


def make_pack(pool, **arguments):
    return pack_checks.make_pack([pool.get(*lengths) for lengths in LENGTHS], ROWS_Q, ROWS_K, **arguments)


def outputs(pack):
    return {name: x.clone() for name, x in pack_checks.varlen_attention(pack, "auto").items()}


def test_a_layout_knows_its_rows():
    assert ROWS_Q.outside() == [1, 4, 0, 0, 13] and ROWS_Q.has_gaps()
    assert not Rows(9, (2, 4, 4, 7), (2, 0, 3)).has_gaps()
    parts = [torch.full((n, 2), float(i)) for i, n in enumerate(ROWS_Q.lengths)]
    joined = ROWS_Q.join(parts, torch.full((1, 2), -1.0).expand(13, 2))
    assert joined.shape == (80, 2)
    assert joined[:, 0].tolist() == [-1] + [0] * 20 + [-1] * 4 + [2] * 9 + [3] * 33 + [-1] * 13
    for seed in range(50):
        chance = random.Random(seed)
        lengths = chance.choices((0, 1, 40), k=5)
        rows = pack_checks.lay_out(lengths, chance, gaps=seed % 2 == 0, total=2000)
        assert min(rows.outside()) >= 0 and sum(rows.outside()) + sum(lengths) == 2000
        assert seed % 2 == 0 or not rows.has_gaps()


def test_memory_is_poisoned_in_the_block_alone():
    before = torch.are_deterministic_algorithms_enabled()
    with pack_checks.poisoned_allocations():
        assert torch.empty(5, dtype=torch.bfloat16).isnan().all()
        assert (torch.empty(5, dtype=torch.uint8) == 255).all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_a_right_pack_passes(pool):
    for poisoned in (None, 0, 3):
        pack = make_pack(pool, poisoned=poisoned)
        assert pack.q.isnan().any() and pack.dout.isnan().any() and pack.k.isinf().any()
        pack_checks.assert_as_alone(pack, {"auto": outputs(pack)})


def test_a_mask_by_key_columns_is_that_of_its_sequence():
    pack = make_pack(Pool(Problem(1, 0, 0, 4, 2, 16, False, column_bounds=4, column_heads=True), "cpu"))
    assert pack.columns.shape == (2, ROWS_K.total, 4)
    pack_checks.assert_as_alone(pack, {"auto": outputs(pack)})
    pack.sequences[3].columns.zero_()  # The outputs of the sequence alone are computed already.
    with pytest.raises(AssertionError, match="auto: out.* of sequence 3 "):
        pack_checks.assert_as_alone(pack, {"auto": outputs(pack)})


@pytest.mark.parametrize("name", pack_checks.OUTPUTS)
def test_one_bit_is_seen_where_it_is(name, pool):
    pack = make_pack(pool)
    behind = 85 if name in ("dk", "dv") else 79
    for row, where in ((behind, "outside every sequence"), (41, "sequence 3")):
        found = outputs(pack)
        rows = found[name].transpose(0, 1) if name == "softmax_lse" else found[name]
        bits = support.int_view(rows)
        bits[row].view(-1)[-1] ^= 1
        with pytest.raises(AssertionError, match=f"auto: {name}.*1 of .* elements differ; row {row} is .*{where}"):
            pack_checks.assert_as_alone(pack, {"descending": outputs(pack), "auto": found})


def test_a_poisoned_sequence_is_not_looked_at_and_its_neighbours_are(pool):
    pack = make_pack(pool, poisoned=0)
    found = outputs(pack)
    assert found["dq"][1].isnan().all()
    found["dq"][70] = 1.0
    with pytest.raises(AssertionError, match="outside every sequence"):
        pack_checks.assert_as_alone(pack, {"auto": found})


@pytest.mark.parametrize("name", ("out", *GRADIENTS))
def test_an_inaccurate_sequence_is_named(name, pool):
    pack = make_pack(pool)
    found = outputs(pack)
    assert pack_checks.accuracy_failures(pack, {"auto": found}) == []
    own = pack_checks.own_rows(pack, found, 3)[name]
    own.copy_(own * 1.01)
    lines = pack_checks.accuracy_failures(pack, {"auto": found})
    assert lines and all(line.startswith("sequence 3 of 33 queries and 33 keys, from rows") for line in lines)


def test_a_sequence_of_nothing_must_have_zeros(pool):
    pack = make_pack(pool)
    found = outputs(pack)
    pack_checks.own_rows(pack, found, 1)["dk"][3] = 1.0
    pack_checks.own_rows(pack, found, 2)["softmax_lse"][1] = 0.0
    lines = pack_checks.accuracy_failures(pack, {"auto": found})
    assert [line.split(", auto: ")[1] for line in lines] == [
        f"{name} of a sequence without queries or keys" for name in ("dk", "softmax_lse")
    ]


def test_every_policy_of_a_mask_is_tried():
    for kind, masks in pack_checks.MASKS.items():
        for mask in masks:
            problem = Problem(1, 1, 1, 1, 1, 64, **mask)
            assert problem.mask_kind == kind
            own = {"full": {"shift"}, "causal": {"symmetric_shift"}, "window": set()}[kind]
            assert set(support.policies(problem)) == {"descending", "spt", "order_free"} | own

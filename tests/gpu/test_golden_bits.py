"""The bits are those that were written down. A change of bits between versions is a decision: it is written in
CHANGELOG.md, and then `python tests/gpu/golden_bits.py --write` writes the new ones."""

import json

import golden_bits
import pytest

CHANGED = (
    "these bits are not those of tests/gpu/golden_bits.json. If that is meant, say in CHANGELOG.md what changed "
    "and for whom, and run `python tests/gpu/golden_bits.py --write`"
)


@pytest.fixture(scope="module")
def golden():
    return json.loads(golden_bits.FILE.read_text())


@pytest.mark.parametrize("case", golden_bits.cases(), ids=str)
def test_bits_are_the_golden_ones(case, golden, device):
    if not golden.get(str(case)):
        pytest.fail(
            f"tests/gpu/golden_bits.json has no bits of {case}: run `python tests/gpu/golden_bits.py --write` on a GPU"
        )
    found = golden_bits.digests(case, golden_bits.Package(), device)
    differ, alone = golden_bits.differences({str(case): golden[str(case)]}, {str(case): found})
    assert not differ, f"{differ[0]}: {CHANGED}"
    assert not alone, f"{alone[0]}: {CHANGED}"


def test_every_golden_case_is_tried(golden):
    assert list(golden) == [str(case) for case in golden_bits.cases()]

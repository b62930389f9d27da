"""products.py, which chooses the cases of other tests."""

import itertools

from products import CASES, few_cases, pairwise, spread

SIZES, MASKS, DTYPES = (64, 96, 128), ({}, {"causal": True}), ("bf16", "fp16")


def test_all_pairs_meet_in_few_cases():
    cases = pairwise(SIZES, MASKS, DTYPES)
    for first, second in itertools.combinations(range(3), 2):
        wanted = itertools.product(*((SIZES, MASKS, DTYPES)[i] for i in (first, second)))
        assert all(any((case[first], case[second]) == pair for case in cases) for pair in wanted)
    assert len(cases) == len(SIZES) * 2


def test_cases_meet_the_other_values_evenly():
    cases = spread(itertools.product(SIZES, MASKS), DTYPES)
    assert [case[:2] for case in cases] == list(itertools.product(SIZES, MASKS))
    assert {(size, dtype) for size, _, dtype in cases} == set(itertools.product(SIZES, DTYPES))
    assert sum(dtype == "bf16" for *_, dtype in cases) == len(cases) / 2


def test_few_cases_of_every_test():
    names = [*(f"a.py::test_x[{n}-[]]" for n in range(100)), "a.py::test_y", "b.py::test_x[1]", "b.py::test_x[2]"]
    few = few_cases(names)
    assert few == few_cases(names) and few >= set(names[100:]) and len(few) == CASES + 3
    numbers = [int(name.split("[")[1].split("-")[0]) for name in few if name.startswith("a.py::test_x")]
    assert max(numbers) > CASES, "not the first ones alone"

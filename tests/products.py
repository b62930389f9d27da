"""Cases of a test that stand for the product of its parameters."""

import collections
import itertools
import random
from collections.abc import Collection, Iterable

CASES = 5  # of a test that `make test` runs


def pairwise(*parameters: Collection) -> list[tuple]:
    """Few cases in which every value of a parameter meets every value of every other: enough where what can go wrong
    depends on two parameters at most."""
    return covering(itertools.product(*parameters))


def covering(cases: Iterable[tuple]) -> list[tuple]:
    """Few of the cases, which still have every pair of values that occurs together in any of them."""
    candidates = [(case, set(_pairs(case))) for case in cases]
    missing = set().union(*(pairs for _, pairs in candidates))
    found = []
    while missing:
        case, pairs = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        found.append(case)
        missing -= pairs
    return found


def spread(cases: Iterable[tuple], *others: Collection) -> list[tuple]:
    """Every case once, with values of other parameters that meet the parts of the cases evenly."""
    found: list[tuple] = []
    uses: collections.Counter = collections.Counter()

    def uses_of(case: tuple) -> tuple[int, int]:
        return sum(uses[pair] for pair in _pairs(case)), sum(uses[part] for part in _parts(case))

    for case in cases:
        extended = min((case + rest for rest in itertools.product(*others)), key=uses_of)
        uses.update([*_pairs(extended), *_parts(extended)])
        found.append(extended)
    return found


def few_cases(names: Iterable[str]) -> set[str]:
    """Of tests with their parameters, such as file.py::test[1-x], at most CASES of each: the same ones every time."""
    of_test = collections.defaultdict(list)
    for name in names:
        of_test[name.partition("[")[0]].append(name)
    chosen = (random.Random(test).sample(cases, min(CASES, len(cases))) for test, cases in of_test.items())
    return set(itertools.chain(*chosen))


def _parts(case: tuple) -> list[tuple]:
    # By their texts, for values may have no hash.
    return list(enumerate(map(str, case)))


def _pairs(case: tuple) -> list[tuple]:
    return list(itertools.combinations(_parts(case), 2))

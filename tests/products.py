"""Cases of a test that stand for the product of its parameters."""

import itertools
from collections.abc import Collection, Iterable


def pairwise(*parameters: Collection) -> list[tuple]:
    """Few cases in which every value of a parameter meets every value of every other: enough where what can go wrong
    depends on two parameters at most."""
    return _greedy(itertools.product(*parameters))


def spread(cases: Iterable[tuple], *others: Collection) -> list[tuple]:
    """Every case once, with values of other parameters that meet the parts of the cases evenly."""
    found, uses = [], {}
    for case in cases:
        extended = min(
            (case + rest for rest in itertools.product(*others)), key=lambda x: sum(uses.get(p, 0) for p in _pairs(x))
        )
        for pair in _pairs(extended):
            uses[pair] = uses.get(pair, 0) + 1
        found.append(extended)
    return found


def _pairs(case: tuple) -> list[tuple]:
    # By their texts, for values may have no hash.
    return list(itertools.combinations(enumerate(map(str, case)), 2))


def _greedy(product: Iterable[tuple]) -> list[tuple]:
    candidates = [(case, set(_pairs(case))) for case in product]
    missing = set().union(*(pairs for _, pairs in candidates))
    found = []
    while missing:
        case, pairs = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        found.append(case)
        missing -= pairs
    return found

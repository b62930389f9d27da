"""Rows that context parallelism moves between ranks: one rank, which moves them within itself, stands for several."""

import types

import pytest
import torch

from dash_attn.distributed import redistribute
from dash_attn.distributed.layout import Rows
from dash_attn.distributed.redistribute import Route

CHANNEL = types.SimpleNamespace(rank=0, size=1)


def runs(*pairs):
    return (tuple(Rows(*pair) for pair in pairs),)


@pytest.mark.parametrize(
    "places, expected",
    [([], slice(0, 0)), ([3], slice(3, 4)), ([2, 3, 4], slice(2, 5)), ([2, 4], None), ([3, 2], None)],
)
def test_rows_that_follow_each_other_are_a_slice(places, expected):
    places = torch.tensor(places, dtype=torch.int64)
    found = redistribute._run_of(places, torch.device("cpu"))
    assert found == expected if expected is not None else torch.equal(found, places)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "source, target, are_slices",
    [
        (runs((0, 6)), runs((0, 6)), True),
        (runs((2, 6)), runs((3, 5)), True),
        (runs((0, 2), (4, 6)), runs((4, 6), (0, 2)), False),
        (runs((0, 2), (4, 6)), runs((0, 6)), False),  # rows 2 and 3 come from nowhere
        (runs((1, 1)), runs((0, 3)), True),  # and so do all of these
    ],
)
def test_rows_are_where_the_target_has_them(source, target, are_slices, batch):
    route = Route(6, source, target)
    of_source, of_target = ([row for run in side[0] for row in range(*run)] for side in (source, target))
    whole = torch.randn(batch, 6, 2, 3)
    (moved,) = redistribute._moved(CHANNEL, "test", [route], [whole[:, of_source]], [7.0])
    expected = torch.full((batch, len(of_target), 2, 3), 7.0)
    for place, row in enumerate(of_target):
        if row in of_source:
            expected[:, place] = whole[:, row]
    assert torch.equal(moved, expected)
    places = redistribute._places(route, 0, torch.device("cpu"))
    assert all(isinstance(x, slice) for x in (*places.sent, *places.received)) == are_slices
    assert places.are_all == set(of_target).issubset(of_source)

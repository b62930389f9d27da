"""The checks of the GPU tests of dropout, tried on the CPU: they pass the reference implementation, and wrong results
fail them."""

import dataclasses
import pathlib
import sys

import pytest
import torch

from dash_attn.dropout import layout

sys.path.insert(0, str(pathlib.Path(__file__).parent / "gpu"))

import dropout_checks
import gpu_support as support
import gradient_check
from gpu_support import Problem

PROBLEM = Problem(2, 150, 200, 4, 2, 64, True, dropout_p=0.1)


def test_the_reference_implementation_meets_the_bar():
    for p, head_dim, lengths in ((0.1, 40, (70, 90)), (0.5, 128, (90, 70)), (0.99, 64, (100, 100))):
        problem = Problem(2, *lengths, 2, 1, head_dim, True, sinks=True, lse_gradient=True, dropout_p=p)
        assert gradient_check.check(problem, "cpu", ["descending"]) == [], problem


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_the_bar_refuses_another_mask_and_a_scale_that_is_left_out(name):
    inputs = support.random_inputs(PROBLEM, "cpu")
    bar = gradient_check.Bar(PROBLEM, inputs)
    outputs = {"out": inputs.out, **support.backward(inputs, PROBLEM, "descending")}
    assert bar.failures(outputs) == []
    # One element of which the bit is wrong; the last key is seen by the last query alone.
    dropout = inputs.scores.dropout
    element = (140, 3) if name in ("out", "dq") else (149, 199)
    other = dropout._replace(bits=dropout.bits ^ support.packed_bits(dropout_checks.single(PROBLEM, *element)))
    spoilt = dataclasses.replace(inputs, scores=inputs.scores._replace(dropout=other))
    wrong = support.random_inputs(PROBLEM, "cpu")
    wrong.out, wrong.softmax_lse = support.forward(PROBLEM, inputs.q, inputs.k, inputs.v, scores=spoilt.scores)
    found = {"out": wrong.out, **support.backward(spoilt, PROBLEM, "descending")}
    assert any(line.startswith(f"{name}[") for line in bar.failures({**outputs, name: found[name]}))
    without = {**outputs, name: (outputs[name].double() * 0.9).to(PROBLEM.dtype)}
    assert any(line.startswith(f"{name}: relative error") for line in bar.failures(without))


def test_bits_that_nobody_may_look_at_are_inverted():
    problem = dataclasses.replace(PROBLEM, window=(20, 0))
    bits = torch.zeros(layout.shape_of(2, 4, 150, 200), dtype=torch.uint8)
    seen = ~layout.unpack(support.with_poison(problem, bits), 160, 224)
    assert torch.equal(seen[0, 0, :150, :200], support.visible_keys(150, 200, True, window=(20, 0)))
    assert not seen[:, :, 150:].any() and not seen[..., 200:].any()

"""Scores of all kinds: drawn, given to the public functions, and compared with float64 and with sequences alone."""

import math

import torch
from float64_reference import Scores, attention_float64, error_limits

from dash_attn import flash_attn_func, flash_attn_varlen_func

NAMES = ("out", "softmax_lse", "dq", "dk", "dv", "dsinks")
# By how many tensors q, k and v are in.
GRADIENTS = {3: ("dq", "dk", "dv"), 2: ("dq", "dkv"), 1: ("dqkv",)}


def draw(
    batch, heads, seqlen_q, *, softcap=0.0, alibi=None, sinks=None, lse_gradient=False, seed=0, sink_seed=0
) -> Scores:
    """`alibi`: None, "heads" or "batch". `sinks`: their dtype, or None."""
    generator = torch.Generator().manual_seed(1000 + seed)
    shape = {None: None, "heads": (heads,), "batch": (batch, heads)}[alibi]
    slopes = None if shape is None else torch.rand(shape, generator=generator) * 0.5
    of_sinks = torch.Generator().manual_seed(2000 + sink_seed)
    return Scores(
        softcap,
        slopes,
        None if sinks is None else (torch.randn(heads, generator=of_sinks) + 1).to(sinks),
        torch.randn(batch, heads, seqlen_q, generator=generator) if lse_gradient else None,
    )


def results_of(function, inputs, dout, scores, **arguments):
    """By name: out, softmax_lse and the gradients of sum(dout * out) + sum(dsoftmax_lse * softmax_lse)."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    if scores.sinks is not None:
        leaves.append(scores.sinks.detach().clone().requires_grad_())
        arguments["learnable_sink"] = leaves[-1]
    arguments |= {"softcap": scores.softcap, "alibi_slopes": scores.alibi_slopes, "return_attn_probs": True}
    out, lse, _ = function(*leaves[: len(inputs)], **arguments)
    outputs, cotangents = [out], [dout]
    if scores.dsoftmax_lse is not None:
        outputs, cotangents = [out, lse], [dout, scores.dsoftmax_lse]
    gradients = torch.autograd.grad(outputs, leaves, cotangents)
    names = ("out", "softmax_lse", *GRADIENTS[len(inputs)], "dsinks")
    return dict(zip(names, (out.detach(), lse.detach(), *gradients)))


def dense(q, k, v, dout, scores, **arguments):
    return results_of(flash_attn_func, (q, k, v), dout, scores, **arguments)


def truth_of(q, k, v, dout, scores, **formula):
    with torch.no_grad():
        return attention_float64(q, k, v, dout, scores=scores, **formula)


def failures(found, q, k, v, dout, scores, **formula):
    """What is further from float64 than the bar allows, a line each."""
    truth = truth_of(q, k, v, dout, scores, **formula)
    limits = error_limits(truth, q, k, v, dout, found["out"], rounded_factors=False, scores=scores, **formula)
    lines = []
    for name, limit in limits.items():
        error = (found[name].double() - getattr(truth, name)).norm()
        if not error <= limit:
            lines.append(f"{name}: off by {error:.3e} in norm, allowed {limit:.3e}")
    lse, exact = found["softmax_lse"].double(), truth.softmax_lse
    finite = exact.isfinite()
    if not torch.equal(lse[~finite], exact[~finite]):
        lines.append("softmax_lse: not infinite where it should be")
    if not ((lse - exact).abs()[finite] <= 1e-5 * (1 + exact.abs()[finite])).all():
        lines.append(f"softmax_lse: off by up to {(lse - exact).abs()[finite].max():.3e}")
    return lines


def packed(pack, scores, **arguments):
    return results_of(
        lambda q, k, v, **more: flash_attn_varlen_func(q, k, v, *pack.offsets(), **pack.used(), **more),
        pack[:3], pack.dout, scores, **arguments,
    )  # fmt: skip


def sequence_of(pack, scores, number):
    """q, k, v, dout and the scores of one sequence of the pack, as a batch of its own."""
    queries, keys = pack.sequences()[number]
    slopes, dlse = scores.alibi_slopes, scores.dsoftmax_lse
    own = Scores(
        scores.softcap,
        slopes[number : number + 1] if slopes is not None and slopes.dim() == 2 else slopes,
        scores.sinks,
        None if dlse is None else dlse[None, :, queries],
    )
    rows = ((pack.q, queries), (pack.k, keys), (pack.v, keys), (pack.dout, queries))
    return *(x[None, own_rows] for x, own_rows in rows), own


def assert_as_alone(pack, scores, found, **arguments):
    """Each sequence's results, which it returns as the dense function has them, and the sinks' gradient as the sum over
    the sequences in their order."""
    numbers = range(len(pack.sequences()))
    sequences = [dense(*sequence_of(pack, scores, number), **arguments) for number in numbers]
    for (queries, keys), own in zip(pack.sequences(), sequences):
        for name in NAMES[:5]:
            x = found[name]
            part = x[:, queries] if name == "softmax_lse" else x[keys if name in ("dk", "dv") else queries]
            assert torch.equal(part, own[name][0]), name
    if scores.sinks is not None:
        total = sum((own["dsinks"] for own in sequences), torch.zeros_like(found["dsinks"]))
        assert torch.equal(found["dsinks"], total)
    rows_q, rows_k = pack.outside()
    assert (found["softmax_lse"][:, rows_q] == math.inf).all()
    assert not any(found[name][rows].any() for name, rows in (("out", rows_q), ("dq", rows_q), ("dk", rows_k)))
    return sequences

"""Masks by key columns: drawn at random, written out pair by pair without code of dash_attn, judged head by head."""

from collections import defaultdict

import torch
from float64_reference import Scores, attention_float64, error_limits, visible_keys

from dash_attn import flash_attn_func

FORMS = [(True, 1), (True, 2), (False, 2), (False, 4)]  # causal, bounds of a key
NAMES = ("out", "softmax_lse", "dq", "dk", "dv")


def draw_columns(batch, heads, seqlen_q, seqlen_k, causal, bounds, *, seed=0):
    """Bounds of runs of keys, some of them beyond the rows, some of intervals that are empty."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-9, seqlen_q + 10, (batch, heads, seqlen_k, bounds), generator=generator, dtype=torch.int32)
    if seqlen_k == 0:
        return drawn
    # Neighbours often hide the same rows: whole tiles are hidden then.
    run = torch.randint(0, seqlen_k, (batch, heads, max(1, seqlen_k // 20)), generator=generator)
    firsts = torch.zeros(batch, heads, seqlen_k, dtype=torch.int64).scatter_(2, run, run).cummax(dim=2).values
    columns = drawn.gather(2, firsts[..., None].expand_as(drawn))
    return columns if (causal, bounds) != (False, 2) else columns.sort(dim=-1, descending=True).values


def hidden_pairs(columns, seqlen_q, causal):
    """(keys, bounds) -> bool (seqlen_q, keys)."""
    hidden = torch.zeros(seqlen_q, columns.shape[0], dtype=torch.bool)
    for key, bounds in enumerate(columns.tolist()):
        if causal:
            intervals = [(bounds[0], seqlen_q if len(bounds) == 1 else bounds[1])]
        elif len(bounds) == 2:
            intervals = [(bounds[0], seqlen_q), (0, bounds[1])]
        else:
            intervals = [bounds[:2], bounds[2:]]
        for start, end in intervals:
            hidden[max(0, start) : max(0, start, end), key] = True
    return hidden


def results(q, k, v, dout, columns, *, function=flash_attn_func, dlse=None, **arguments):
    """By NAMES, and dsinks with a learnable_sink."""
    sinks = arguments.pop("learnable_sink", None)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, *(() if sinks is None else (sinks,)))]
    if sinks is not None:
        arguments["learnable_sink"] = leaves[3]
    out, lse, _ = function(*leaves[:3], startend_row_indices=columns, return_attn_probs=True, **arguments)
    outputs, cotangents = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    gradients = torch.autograd.grad(outputs, leaves, cotangents)
    return dict(zip((*NAMES, "dsinks"), (out.detach(), lse.detach(), *gradients)))


def hides_nothing(batch, seqlen_k, causal, bounds, device="cpu"):
    """Empty intervals, of which some lie within the rows."""
    of_form = {(True, 1): [2**31 - 1], (True, 2): [7, 7], (False, 2): [2**31 - 1, -5], (False, 4): [9, 3, 0, -(2**31)]}
    numbers = torch.tensor(of_form[causal, bounds], dtype=torch.int32, device=device)
    return numbers.expand(batch, 1, seqlen_k, bounds)


def part_of(found, b, g, group):
    """Of the results, those of a KV head of a sequence and of its query heads, as a batch of one."""
    heads, batch = slice(g * group, (g + 1) * group), slice(b, b + 1)
    part = {name: found[name][batch, :, heads] for name in ("out", "dq")}
    part |= {name: found[name][batch, :, g : g + 1] for name in ("dk", "dv")}
    part["softmax_lse"] = found["softmax_lse"][batch, heads]
    if "dsinks" in found:
        part["dsinks"] = found["dsinks"][heads]
    return {name: part[name] for name in found}


def inputs_of_head(q, k, v, dout, b, g):
    """The inputs of a KV head of a sequence and of its query heads."""
    group = q.shape[2] // k.shape[2]
    heads, batch = slice(g * group, (g + 1) * group), slice(b, b + 1)
    return q[batch, :, heads], k[batch, :, g : g + 1], v[batch, :, g : g + 1], dout[batch, :, heads]


def failures(found, q, k, v, dout, columns, *, rounded_factors=False, sinks=None, causal, **window):
    """What is further from float64 than the bar allows, a line each. `sinks`: of a batch of one alone.

    Errors and limits are norms over all heads: those of a few rows are up to chance.
    """
    lines, errors, limits = [], defaultdict(list), defaultdict(list)
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for g in range(k.shape[2]):
            hidden = hidden_pairs(columns[b, g % columns.shape[1]].cpu(), q.shape[1], causal).to(q.device)
            visible = visible_keys(q.shape[1], k.shape[1], causal, q.device, hidden=hidden, **window)
            scores = Scores(sinks=None if sinks is None else sinks[g * group : (g + 1) * group])
            own, part = inputs_of_head(q, k, v, dout, b, g), part_of(found, b, g, group)
            exact, own_errors = _judged(part, *own, visible, scores, rounded_factors)
            lines += [f"sequence {b}, KV head {g}: {line}" for line in exact]
            for name, (error, limit) in own_errors.items():
                errors[name].append(error)
                limits[name].append(limit)
    for name in errors:
        error, limit = (torch.stack(x[name]).norm() for x in (errors, limits))
        if not error <= limit:
            lines.append(f"{name}: off by {error:.3e} in norm, allowed {limit:.3e}")
    return lines


def _judged(found, q, k, v, dout, visible, scores, rounded_factors):
    """Of one KV head: lines of what must be exact and is not, and by name the error and its limit."""
    sees = visible.any(dim=1)
    lines = [f"{name} of a query without keys" for name in ("out", "dq") if found[name][:, ~sees].any()]
    lse_without_keys = torch.full((1, 1, 1), torch.inf, device=q.device)
    if scores.sinks is not None:
        lse_without_keys = scores.sinks[None, :, None]
    if not (found["softmax_lse"][..., ~sees] == lse_without_keys).all():
        lines.append("softmax_lse of a query without keys")
    lines += [f"{name} of a key without queries" for name in ("dk", "dv") if found[name][:, ~visible.any(dim=0)].any()]
    if not sees.any():
        return lines, {}
    q, dout, out, mask = q[:, sees], dout[:, sees], found["out"][:, sees], {"hidden": ~visible[sees]}
    with torch.no_grad():
        truth = attention_float64(q, k, v, dout, scores=scores, **mask)
    lse = found["softmax_lse"][..., sees].double()
    if not ((lse - truth.softmax_lse).abs() <= 1e-5 * (1 + truth.softmax_lse.abs())).all():
        lines.append("softmax_lse is off")
    limits = error_limits(truth, q, k, v, dout, out, rounded_factors=rounded_factors, scores=scores, **mask)
    actual = {name: found[name][:, sees] if name in ("out", "dq") else found[name] for name in limits}
    errors = {name: (actual[name].double() - getattr(truth, name)).norm() for name in limits}
    return lines, {name: (errors[name], limit.double()) for name, limit in limits.items()}

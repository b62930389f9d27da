"""Problems of all features beside each other for the GPU tests, and what is to hold of each.

Works on any device, as gpu_support does.
"""

import dataclasses
import random

import gpu_support as support
import pack_checks
import torch
from float64_reference import Scores
from gpu_support import GRADIENTS, Problem
from gradient_check import Bar, check
from pack_checks import Pool

import dash_attn

LENGTHS = (1, 17, 63, 64, 65, 127, 128, 129, 200, 333, 515, 700, 1100)
HEADS = ((4, 4), (4, 2), (6, 2), (8, 1), (16, 1))
# (of q and k, of v): every row of the tile table, and some that are padded to one.
HEAD_DIMS = (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (40, 40), (72, 200)
WINDOWS = ((-1, -1), (-1, -1), (127, 0), (64, 64), (10, -1), (-1, 10), (500, 0))
SCORES = {
    "softcap": dict(softcap=50.0),
    "small softcap": dict(softcap=2.0),
    "slopes": dict(alibi="heads"),
    "slopes of sequences": dict(alibi="sequences"),
    "sinks": dict(sinks=True),
    "log-sum-exp": dict(lse_gradient=True),
    "softcap, sinks, log-sum-exp": dict(softcap=20.0, sinks=True, lse_gradient=True),
    "slopes, sinks, log-sum-exp": dict(alibi="sequences", sinks=True, lse_gradient=True),
}


def random_problem(kind: str, chance: random.Random, dtype: torch.dtype) -> Problem:
    """Of these scores; the rest is up to chance. One query is a batch of many."""
    seqlen_q, seqlen_k = chance.choice(LENGTHS), chance.choice(LENGTHS[1:])
    heads, (head_dim, value_head_dim) = chance.choice(HEADS), chance.choice(HEAD_DIMS)
    return Problem(
        64 if seqlen_q < 17 else 2,
        seqlen_q,
        seqlen_k,
        *heads,
        head_dim,
        causal=chance.random() < 0.5,
        dtype=dtype,
        softmax_scale=chance.choice((None, None, 0.3, -0.2)),
        window=chance.choice(WINDOWS),
        attention_chunk=chance.choice((0, 0, 0, 100)),
        value_head_dim=value_head_dim,
        **SCORES[kind],
    )


def accuracy_failures(problem: Problem, device: str, policies: list[str]) -> list[str]:
    """A line each."""
    return [f"{problem} {line}" for line in check(problem, device, policies)]


def check_batch_and_alone(problem: Problem, device: str, policies: list[str]) -> None:
    """A dense batch: every sequence as alone, and the gradient of sinks the sum over them in their order."""
    pool = Pool(dataclasses.replace(problem, batch=1), device)
    sequences = [pack_checks.Alone(pool.problem, device, seed) for seed in range(problem.batch)]
    tensors = [torch.stack([getattr(one, name) for one in sequences]) for name in ("q", "k", "v", "dout")]
    scores = [one.scores for one in sequences]
    first = scores[0]
    batch = Scores(
        first.softcap,
        torch.cat([x.alibi_slopes for x in scores]) if problem.alibi == "sequences" else first.alibi_slopes,
        first.sinks,
        None if first.dsoftmax_lse is None else torch.cat([x.dsoftmax_lse for x in scores]),
    )
    for policy in policies:
        found = pack_checks.dense_attention(problem, policy, *tensors, batch)
        alone = [one.outputs(policy) for one in sequences]
        expected = {name: torch.stack([x[name] for x in alone]) for name in pack_checks.OUTPUTS}
        if problem.sinks:
            expected["dsinks"] = sum((x["dsinks"] for x in alone), torch.zeros_like(first.sinks))
        support.assert_same_bits(found, expected, f"{problem} {policy}")


def check_heads(problem: Problem, device: str, policies: list[str]) -> None:
    """Every KV head with its query heads: among all heads, and alone."""
    q, k, v, dout = support.random_qkv_dout(problem, device)
    scores = support.random_scores(problem, device)
    group = problem.heads // problem.kv_heads
    for policy in policies:
        whole = pack_checks.dense_attention(problem, policy, q, k, v, dout, scores)
        for head in range(problem.kv_heads):
            own, one = slice(head * group, (head + 1) * group), slice(head, head + 1)
            part = dataclasses.replace(problem, heads=group, kv_heads=1)
            slopes, sinks, dlse = scores.alibi_slopes, scores.sinks, scores.dsoftmax_lse
            of_heads = Scores(
                scores.softcap,
                None if slopes is None else slopes[..., own].contiguous(),
                None if sinks is None else sinks[own].contiguous(),
                None if dlse is None else dlse[:, own].contiguous(),
            )
            tensors = (x[:, :, heads].clone() for x, heads in ((q, own), (k, one), (v, one), (dout, own)))
            found = pack_checks.dense_attention(part, policy, *tensors, of_heads)
            places = {"softmax_lse": (slice(None), own), "dsinks": (own,)}
            places |= {name: (slice(None), slice(None), one) for name in ("dk", "dv")}
            expected = {name: x[places.get(name, (slice(None), slice(None), own))] for name, x in whole.items()}
            support.assert_same_bits(found, expected, f"{problem} {policy}, KV head {head}")


def check_queries_without_keys(problem: Problem, device: str) -> None:
    """Output 0, the sink as the log-sum-exp, and a gradient of the sink that is the log-sum-exp's. NaN in the gradient
    of an infinite log-sum-exp reaches nothing."""
    assert problem.sinks and problem.lse_gradient
    tensors = support.random_qkv_dout(problem, device)
    scores = support.random_scores(problem, device)
    sinks, dlse = scores.sinks.clone(), scores.dsoftmax_lse.clone()
    sinks[1] = -torch.inf
    unseen = max(0, problem.seqlen_q - problem.seqlen_k) if problem.causal or problem.seqlen_k == 0 else 0
    dlse[:, 1, :unseen] = torch.nan
    found = pack_checks.dense_attention(problem, "auto", *tensors, scores._replace(sinks=sinks, dsoftmax_lse=dlse))
    expected = sinks.masked_fill(sinks == -torch.inf, torch.inf)[None, :, None].expand(problem.batch, -1, unseen)
    assert torch.equal(found["softmax_lse"][:, :, :unseen], expected), f"{problem}: softmax_lse"
    assert not found["out"][:, :unseen].any() and not found["dq"][:, :unseen].any(), f"{problem}: out or dq"
    wrong = [name for name in (*GRADIENTS, "dsinks") if not found[name].isfinite().all()]
    assert not wrong and found["dsinks"][1] == 0, f"{problem}: {wrong}"
    if problem.seqlen_k == 0:
        exact = dlse.double().sum(dim=(0, 2)).masked_fill(sinks == -torch.inf, 0.0)
        torch.testing.assert_close(found["dsinks"].double(), exact, rtol=1e-5, atol=1e-5)


def merging_failures(problem: Problem, device: str) -> list[str]:
    """Of two attentions over the first and the other keys, merged in plain torch by their log-sum-exp."""
    assert not problem.causal
    *tensors, dout = support.random_qkv_dout(problem, device)
    q, k, v = (x.requires_grad_() for x in tensors)
    half = problem.seqlen_k // 3
    parts = [
        dash_attn.flash_attn_func(q, k[:, keys], v[:, keys], return_attn_probs=True)[:2]
        for keys in (slice(None, half), slice(half, None))
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * (own - lse).exp().transpose(1, 2)[..., None] for out, own in parts)
    gradients = torch.autograd.grad(merged, (q, k, v), dout.to(merged.dtype))
    tensors = (x.detach() for x in (dout, q, k, v))
    exact = Bar(problem, support.Inputs(*tensors, merged.detach().to(problem.dtype), lse.detach())).exact
    lines = []
    for name, x in zip(("out", *GRADIENTS), (merged, *gradients)):
        error = ((x.double() - getattr(exact, name)).norm() / getattr(exact, name).norm()).item()
        # Each part rounds on its own.
        if not error < 2 * torch.finfo(problem.dtype).eps:
            lines.append(f"{problem}: {name} is off by {error:.1e} of its norm")
    return lines

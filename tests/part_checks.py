"""A backward that is made part by part, for the tests on CPUs and on GPUs: chunks of keys by chunks of queries, in any
order that keeps every sum's own, must leave the bits of one call."""

import itertools
import random

import torch

from dash_attn import flash_attn_func, schedule
from dash_attn.distributed import parts


def cut(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def chunk_orders(policy, rows_q, rows_k, size, mask) -> tuple[list[list[int]], list[list[int]]]:
    """For each chunk of keys its chunks of queries, and for each chunk of queries its chunks of keys, in order."""
    problem = schedule.problem(
        policy, rows_q, rows_k, head_dim=64, **mask._asdict(), tile_q=size, tile_k=size, cta_group=1, splits=1
    )
    return schedule.visit_order(policy, problem), schedule.add_order(policy, problem)


def gradients_by_parts(
    q,
    k,
    v,
    out,
    softmax_lse,
    dout,
    *,
    mask,
    policy,
    size,
    chance,
    dsoftmax_lse=None,
    sm_margin=0,
    expected_splits=None,
):
    """dq, dk and dv, the parts in an order that `chance` draws of those that are possible. Where there is more than one
    split of the query heads, each has parts of its own."""
    batch, rows_q, heads, head_dim = q.shape
    rows_k, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    problem = schedule.problem(
        policy, rows_q, rows_k, head_dim=head_dim, value_head_dim=v.shape[-1], heads=heads, kv_heads=kv_heads,
        **mask._asdict(),
    )  # fmt: skip
    assert expected_splits in (None, problem.splits)
    of_split = group // problem.splits
    at_once = of_split if schedule.heads_together(policy, problem) else 1
    chunks_q, chunks_k = cut(rows_q, size), cut(rows_k, size)
    visits, adds = chunk_orders(policy, rows_q, rows_k, size, mask)
    rule = parts.Rule(policy, head_dim**-0.5, mask, sm_margin)
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    for gradient, chunks, reached in ((dq, chunks_q, adds), (dk, chunks_k, visits), (dv, chunks_k, visits)):
        for rows, others in zip(chunks, reached):
            if not others:
                gradient[:, rows] = 0
    chains = {
        (kv_head, split, j): [
            (head, i) for head in range(split * of_split, (split + 1) * of_split, at_once) for i in visited
        ]
        for kv_head, split in itertools.product(range(kv_heads), range(problem.splits))
        for j, visited in enumerate(visits)
        if visited
    }
    dq_sums, key_sums, totals = {}, {}, {}
    done_of_chain, done_of_dq = dict.fromkeys(chains, 0), {}

    def next_of(chain):
        """The chain's next part, if its other sums have come to it."""
        kv_head, split, j = chain
        if done_of_chain[chain] == len(chains[chain]):
            return None
        head, i = chains[chain][done_of_chain[chain]]
        if adds[i][done_of_dq.get((kv_head, head, i), 0)] != j:
            return None
        is_last = done_of_chain[chain] + 1 == len(chains[chain])
        if is_last and split and (kv_head, split - 1, j) not in totals:
            return None
        return head, i, is_last

    while ready := [(chain, part) for chain in chains if (part := next_of(chain)) is not None]:
        (kv_head, split, j), (head, i, is_last) = chance.choice(ready)
        chain, of_dq = (kv_head, split, j), (kv_head, head, i)
        first = kv_head * group + head
        of_heads, of_head, rows, keys = (
            slice(first, first + at_once),
            slice(kv_head, kv_head + 1),
            chunks_q[i],
            chunks_k[j],
        )
        operands = parts.Operands(
            dout[:, rows, of_heads], q[:, rows, of_heads], k[:, keys, of_head], v[:, keys, of_head],
            out[:, rows, of_heads], softmax_lse[:, of_heads, rows],
            None if dsoftmax_lse is None else dsoftmax_lse[:, of_heads, rows],
        )  # fmt: skip
        for sums, key, size_of in zip((dq_sums, key_sums), (of_dq, chain), parts.sums_sizes(*operands[1:4])):
            if key not in sums:  # what is there before a sum begins must not matter
                sums[key] = torch.full((size_of,), torch.nan, dtype=torch.float32, device=q.device)
        ends = is_last and split + 1 == problem.splits
        parts.add(
            rule, operands, parts.Sums(dq_sums[of_dq], key_sums[chain]),
            parts.Chunk(rows_q, rows_k, rows.start, keys.start),
            dq_continues=done_of_dq.get(of_dq, 0) > 0, keys_continue=done_of_chain[chain] > 0,
            total=totals.get((kv_head, split - 1, j)) if is_last else None,
            dq=dq[:, rows, of_heads] if adds[i][-1] == j else None,
            dk=dk[:, keys, of_head] if ends else None, dv=dv[:, keys, of_head] if ends else None,
        )  # fmt: skip
        if is_last:
            totals[chain] = key_sums[chain]
        done_of_chain[chain] += 1
        done_of_dq[of_dq] = done_of_dq.get(of_dq, 0) + 1
    return dq, dk, dv


def check_parts(
    *, batch, rows_q, rows_k, heads, kv_heads, head_dim, value_head_dim=None, causal, window=(-1, -1),
    attention_chunk=0, policy="descending", device="cpu", dtype=torch.bfloat16, size, lse_gradient=False, orders=2,
    order_of=None, sm_margin=0, splits=None,
) -> None:  # fmt: skip
    """`size`: rows of a chunk, whole tiles. `order_of`: a policy whose order the parts keep in place of the call's.
    `splits`: how many there must be of the query heads of a KV head."""
    generator = torch.Generator(device).manual_seed(rows_q + head_dim)
    value_head_dim = value_head_dim or head_dim
    shapes = [(batch, rows_q, heads, head_dim), (batch, rows_k, kv_heads, head_dim)]
    shapes += [(batch, rows_k, kv_heads, value_head_dim), (batch, rows_q, heads, value_head_dim)]
    q, k, v, dout = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    options = {"causal": causal, "window_size": window, "attention_chunk": attention_chunk}
    out, lse, _ = flash_attn_func(*leaves, **options, schedule=policy, return_attn_probs=True)
    dlse = torch.randn(lse.shape, generator=generator, device=device) if lse_gradient else None
    outputs, gradients = ([out, lse], [dout, dlse]) if lse_gradient else ([out], [dout])
    whole = torch.autograd.grad(outputs, leaves, gradients)
    for number in range(orders):
        found = gradients_by_parts(
            q, k, v, out.detach(), lse.detach(), dout, mask=parts.MaskOfWhole(causal, window, attention_chunk),
            policy=order_of or policy, size=size, chance=random.Random(number), dsoftmax_lse=dlse, sm_margin=sm_margin,
            expected_splits=splits,
        )  # fmt: skip
        for name, x, expected in zip(("dq", "dk", "dv"), found, whole):
            differ = x.view(torch.int16) != expected.view(torch.int16)
            assert not bool(differ.any()), f"{name}: {int(differ.sum())} of {differ.numel()} elements differ"

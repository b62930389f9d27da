"""Trainings of tiny models of transformers: whose losses repeat, and whose do not."""

import random

import torch
import torch.nn.functional as F
import transformers_support as support
from torch import Tensor

NOISY = "attention_in_the_order_of_arrival"


def losses(model, shape, steps, between=lambda: None, one_batch=False) -> Tensor:
    """Of each step on random tokens of `shape`, (rows, seqlen); calls `between` in each. They fall for certain where
    all steps have `one_batch`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        ids = support.random_ids(*shape, seed=0 if one_batch else step).to(model.device)
        optimizer.zero_grad()
        between()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).cpu()


def first_that_differs(run, expected: Tensor, tries: int) -> int | None:
    """The number of the first of `tries` runs with other losses, from 1 on; None where all are the same bits."""
    return next((i for i in range(1, tries + 1) if not torch.equal(run(), expected)), None)


class _InOrderOfArrival(torch.autograd.Function):
    """Causal attention whose dq is a sum over parts of the keys in an order by chance, as of atomic adds.

    It is added in 16 bits: in a tensor of this size the order of a sum in fp32 would seldom show.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale, chance):
        ctx.save_for_backward(q, k, v)
        ctx.scale, ctx.chance = scale, chance
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    @staticmethod
    def backward(ctx, dout):
        q, k, v = (x.float() for x in ctx.saved_tensors)
        rows = q.shape[-2]
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        p = (ctx.scale * q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1)
        dp = dout.float() @ v.mT
        ds = ctx.scale * p * (dp - (p * dp).sum(-1, keepdim=True))
        parts = [(ds[..., i : i + 4] @ k[..., i : i + 4, :]).to(dout.dtype) for i in range(0, rows, 4)]
        ctx.chance.shuffle(parts)
        return sum(parts[1:], parts[0]), (ds.mT @ q).to(dout.dtype), (p.mT @ dout.float()).to(dout.dtype), None, None


def noisy_attention(chance: random.Random):
    """An attention for transformers whose gradients depend on `chance`, as those of atomic adds do on the moment."""

    def attention(module, query, key, value, attention_mask, scaling, **_):
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        return _InOrderOfArrival.apply(query, key, value, scaling, chance).transpose(1, 2), None

    return attention

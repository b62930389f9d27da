"""The contract on bits (docs/contract.md) on CPU tensors, for random calls: what the reference's bits depend on."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from pack_support import offsets_of

from dash_attn import fixed_order, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.dropout import DropoutState, dropout_bits
from dash_attn.schedule import fitting

CASES = range(60)
HEAD_DIMS = [(16, 16), (32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (40, 256)]
DROPOUT_P = 0.2


@dataclasses.dataclass
class Call:
    """A call of the public functions. A part that is cut out of the call gets its own part of every argument."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    learnable_sink: torch.Tensor | None
    states: torch.Tensor | None
    """Dropout's, one for each sequence."""
    first_head: int
    settings: dict

    @classmethod
    def random(cls, seed: int, *, decoding: bool = False) -> Call:
        """With `decoding` there are as many queries as keys, the mask is causal, and flash_attn_with_kvcache takes all
        arguments: there are no chunks and there is no dropout."""
        choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        batch, kv_heads, group = (choose.randint(1, most) for most in (3, 3, 4))
        seqlen_q, seqlen_k = (choose.choice([1, choose.randint(2, 9), choose.randint(10, 270)]) for _ in range(2))
        if decoding:
            seqlen_q = seqlen_k = choose.randint(2, 270)
        head_dim, value_head_dim = choose.choice(HEAD_DIMS)
        dtype = choose.choice([torch.bfloat16, torch.float16])

        def drawn(*shape, dtype=torch.float32):
            return torch.randn(*shape, generator=generator).to(dtype)

        heads = kv_heads * group
        kind = choose.choice(["plain", "softcap", "alibi", "alibi of the batch"])
        slopes = {"alibi": (heads,), "alibi of the batch": (batch, heads)}.get(kind)
        side = [-1, -1, choose.randint(0, 9), choose.randint(10, 200)]
        mask = {"causal": decoding or choose.random() < 0.5, "window_size": (choose.choice(side), choose.choice(side))}
        if not decoding:
            mask["attention_chunk"] = choose.choice([0, 0, 0, choose.randint(1, 150)])
        states = None
        if not decoding and choose.random() < 0.3:
            states = DropoutState.draw(batch=batch, generator=generator).rng_state
        call = {"causal": mask["causal"], "window": mask["window_size"], "head_dim": head_dim}
        call |= {"value_head_dim": value_head_dim, "attention_chunk": mask.get("attention_chunk", 0)}
        call |= {"changed_scores": kind != "plain", "dropout": states is not None}
        return cls(
            drawn(batch, seqlen_q, heads, head_dim, dtype=dtype),
            drawn(batch, seqlen_k, kv_heads, head_dim, dtype=dtype),
            drawn(batch, seqlen_k, kv_heads, value_head_dim, dtype=dtype),
            drawn(batch, seqlen_q, heads, value_head_dim, dtype=dtype),
            drawn(batch, heads, seqlen_q) if choose.random() < 0.3 else None,
            None if slopes is None else drawn(*slopes).abs() / 4,
            drawn(heads) if choose.random() < 0.4 else None,
            states,
            0,
            mask | {
                "softcap": choose.choice([1.5, 20.0]) if kind == "softcap" else 0.0,
                "softmax_scale": choose.choice([None, 0.3, -0.2]),
                "schedule": choose.choice(["auto", *fitting(**call)]),
            },
        )  # fmt: skip

    def sequence(self, number: int) -> Call:
        one = slice(number, number + 1)
        cut = {name: getattr(self, name)[one] for name in ("q", "k", "v", "dout")}
        cut |= {name: x[one] for name in ("dlse", "states") if (x := getattr(self, name)) is not None}
        if self.alibi_slopes is not None and self.alibi_slopes.dim() == 2:
            cut["alibi_slopes"] = self.alibi_slopes[one]
        return dataclasses.replace(self, **cut)

    def kv_heads(self, numbers: list[int]) -> Call:
        """The numbers are consecutive where there is dropout, because the mask depends on a head's number."""
        group = self.q.shape[2] // self.k.shape[2]
        heads = heads_of(numbers, group)
        cut = {"q": self.q[:, :, heads], "dout": self.dout[:, :, heads], "first_head": heads[0]}
        cut |= {"k": self.k[:, :, numbers], "v": self.v[:, :, numbers]}
        for name in ("alibi_slopes", "learnable_sink"):
            if (x := getattr(self, name)) is not None:
                cut[name] = x[..., heads]
        return dataclasses.replace(self, **cut, dlse=None if self.dlse is None else self.dlse[:, heads])

    def bits(self, heads: int):
        if self.states is None:
            return {}
        sizes = {"batch": self.q.shape[0], "seqlen_q": self.q.shape[1], "seqlen_k": self.k.shape[1]}
        sizes |= {"heads": self.q.shape[2], "first_head": self.first_head, "total_heads": heads}
        return {"dropout_p": DROPOUT_P, "dropout_bits": dropout_bits(DropoutState(self.states), p=DROPOUT_P, **sizes)}

    def forward_arguments(self):
        return self.settings | {"alibi_slopes": self.alibi_slopes, "learnable_sink": self.learnable_sink}

    def forward(self):
        """out and the log-sum-exp, by head: (batch, heads, seqlen_q, ...)."""
        arguments = self.forward_arguments() | self.bits(self.q.shape[2])
        out, lse, _ = flash_attn_func(self.q, self.k, self.v, return_attn_probs=True, **arguments)
        return out.transpose(1, 2), lse

    def results(self, function=flash_attn_func, total_heads=None, **more):
        """By name: the outputs and all gradients."""
        arguments = self.forward_arguments() | self.bits(total_heads or self.q.shape[2]) | more
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        if self.learnable_sink is not None:
            leaves.append(self.learnable_sink.clone().requires_grad_())
            arguments["learnable_sink"] = leaves[3]
        out, lse, _ = function(*leaves[:3], return_attn_probs=True, **arguments)
        outputs, cotangents = ([out], [self.dout]) if self.dlse is None else ([out, lse], [self.dout, self.dlse])
        gradients = torch.autograd.grad(outputs, leaves, cotangents)
        return dict(zip(("out", "lse", "dq", "dk", "dv", "dsinks"), (out.detach(), lse.detach(), *gradients)))


def heads_of(kv_heads, group):
    return [head * group + i for head in kv_heads for i in range(group)]


def assert_same_bits(actual, expected):
    assert list(actual) == list(expected)
    for name, x in expected.items():
        assert actual[name].shape == x.shape
        assert torch.equal(actual[name], x), f"{(actual[name] != x).sum()} of {x.numel()} elements of {name} differ"


@pytest.fixture
def threads():
    """Sets torch's number of threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", CASES)
def test_neither_the_run_nor_threads(seed, threads):
    call = Call.random(seed)
    threads(1)
    first = call.results()
    assert_same_bits(call.results(), first)
    for count in (2, 3):
        threads(count)
        assert_same_bits(call.results(), first)


@pytest.mark.parametrize("seed", CASES)
def test_not_the_rest_of_the_batch(seed):
    call = Call.random(seed)
    together = call.results()
    alone = [call.sequence(number).results() for number in range(call.q.shape[0])]
    joined = {name: torch.cat([own[name] for own in alone]) for name in together if name != "dsinks"}
    if call.learnable_sink is not None:
        joined["dsinks"] = sum(own["dsinks"] for own in alone)
    assert_same_bits(together, joined)


@pytest.mark.parametrize("seed", CASES)
def test_not_the_pack(seed):
    """The batch is packed, with rows that belong to no sequence between its sequences."""
    call = Call.random(seed)
    (batch, seqlen_q), seqlen_k, gap = call.q.shape[:2], call.k.shape[1], seed % 4

    def rows(x):
        return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, gap), value=torch.nan).flatten(0, 1)

    queries, keys = (torch.tensor(offsets_of([n + gap] * batch), dtype=torch.int32) for n in (seqlen_q, seqlen_k))
    used = {"seqused_q": torch.full((batch,), seqlen_q, dtype=torch.int32)}
    used["seqused_k"] = torch.full((batch,), seqlen_k, dtype=torch.int32)
    cut = {name: rows(getattr(call, name)) for name in ("q", "k", "v", "dout")}
    if call.dlse is not None:
        cut["dlse"] = torch.nn.functional.pad(call.dlse, (0, gap)).transpose(0, 1).flatten(1)

    def function(q, k, v, **arguments):
        return flash_attn_varlen_func(q, k, v, queries, keys, seqlen_q, seqlen_k, **arguments)

    packed = dataclasses.replace(call, **cut, states=None).results(function, **used, **call.bits(call.q.shape[2]))
    for name in ("out", "dq", "dk", "dv"):
        packed[name] = packed[name].unflatten(0, (batch, -1))[:, : -gap or None]
    packed["lse"] = packed["lse"].unflatten(1, (batch, -1)).transpose(0, 1)[..., : -gap or None]
    assert_same_bits(packed, call.results())


@pytest.mark.parametrize("seed", CASES)
def test_not_the_other_heads(seed):
    call = Call.random(seed)
    together = call.results()
    heads, kv_heads = call.q.shape[2], call.k.shape[2]
    choose = random.Random(seed)
    if call.states is not None:
        first = choose.randrange(kv_heads)
        numbers = list(range(first, choose.randint(first + 1, kv_heads)))
    else:
        numbers = choose.sample(range(kv_heads), choose.randint(1, kv_heads))
    query_heads = heads_of(numbers, heads // kv_heads)
    dims = {"lse": 1, "dsinks": 0}
    expected = {}
    for name, x in together.items():
        own = torch.tensor(numbers if name in ("dk", "dv") else query_heads)
        expected[name] = x.index_select(dims.get(name, 2), own)
    assert_same_bits(call.kv_heads(numbers).results(total_heads=heads), expected)


@pytest.mark.parametrize("seed", CASES)
def test_rows_decoded_have_the_bits_of_the_prefill(seed):
    call = Call.random(seed, decoding=True)
    out, lse = call.forward()
    choose, seqlen = random.Random(seed), call.q.shape[1]
    arguments = {name: x for name, x in call.forward_arguments().items() if name != "schedule"}
    for end in {1, seqlen, *(choose.randint(1, seqlen) for _ in range(4))}:
        first = choose.choice([end - 1, choose.randrange(end)])
        found, found_lse = flash_attn_with_kvcache(
            call.q[:, first:end], call.k, call.v, cache_seqlens=end, return_softmax_lse=True, **arguments
        )
        found = {"out": found.transpose(1, 2), "lse": found_lse}
        assert_same_bits(found, {"out": out[:, :, first:end], "lse": lse[:, :, first:end]})


@pytest.mark.parametrize("seed", CASES)
def test_rows_do_not_depend_on_those_after_them(seed):
    """Rows and keys are appended under a causal mask."""
    call = Call.random(seed, decoding=True)
    if seed % 3 == 0:
        call.settings["schedule"] = "auto"
        call.states = DropoutState.draw(batch=call.q.shape[0], generator=torch.Generator().manual_seed(seed)).rng_state
    out, lse = call.forward()
    choose, seqlen = random.Random(seed), call.q.shape[1]
    for end in {1, *(choose.randint(1, seqlen) for _ in range(4))}:
        prefix = {name: getattr(call, name)[:, :end] for name in ("q", "k", "v")}
        found = dict(zip(("out", "lse"), dataclasses.replace(call, **prefix).forward()))
        assert_same_bits(found, {"out": out[:, :, :end], "lse": lse[:, :, :end]})


@pytest.mark.parametrize(
    "batch, rows, inner, columns", [(1, 1, 1, 1), (2, 3, 130, 5), (3, 70, 16, 90), (1, 9, 256, 600)]
)
def test_products_add_their_terms_in_groups(batch, rows, inner, columns, threads):
    """Each group is a chain of fused multiply-adds. Another version of PyTorch must not change these bits."""
    generator = torch.Generator().manual_seed(inner)
    a, b = torch.randn(batch, rows, inner, generator=generator), torch.randn(batch, inner, columns, generator=generator)
    expected = torch.zeros(batch, rows, columns)
    for first in range(0, inner, fixed_order.GROUP):
        group = torch.zeros(batch, rows, columns)
        for i in range(first, min(first + fixed_order.GROUP, inner)):
            # Exact in float64 but for its own rounding, which changes the second one once in 2^29 times.
            group = (group.double() + a[:, :, i, None].double() * b[:, None, i].double()).float()
        expected += group
    transposed = b.mT.contiguous().mT
    for count in (1, 2):
        threads(count)
        assert torch.equal(fixed_order.matmul(a, b), expected)
        assert torch.equal(fixed_order.matmul(a, transposed), expected)

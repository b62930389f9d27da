"""Combinations of the arguments of FlashAttention-3's flash_attn_with_kvcache, each against the formula in float64.

FlashAttention-3's own test combines the same families of arguments. CPU tensors.
"""

import dataclasses
import random

import pytest
import torch
from cache_support import fill, turned
from float64_reference import Scores, attention_float64
from products import covering

from dash_attn.compat.flash_attn_3 import flash_attn_with_kvcache, get_scheduler_metadata

LENGTHS, CAPACITY = (150, 5, 0, 70), 200
BATCH = len(LENGTHS)
SCALE = 0.3
NEW_KEYS = ("none", "dense", "packed")


@dataclasses.dataclass(frozen=True)
class Case:
    """The arguments of one call; the repr names every one of a failing case."""

    new_keys: str
    rotary: str = "none"
    has_own_positions: bool = False
    page_size: int | None = None
    has_batch_idx: bool = False
    has_leftpad: bool = False
    has_packed_queries: bool = False
    mask: str = "full"
    heads: tuple[int, int] = (6, 6)
    head_dims: tuple[int, int] = (32, 32)
    seqlen_q: int = 1
    softcap: float = 0.0
    has_sinks: bool = False
    dtype: torch.dtype = torch.bfloat16
    num_splits: int = 0
    pack_gqa: bool | None = None
    has_metadata: bool = False
    sm_margin: int = 0


VALUES = {
    "rotary": ("none", "interleaved", "halves"),
    "has_own_positions": (False, True),
    "page_size": (None, 1, 4, 16, 64, 256),
    "has_batch_idx": (False, True),
    "has_leftpad": (False, True),
    "has_packed_queries": (False, True),
    "mask": ("full", "causal", "window", "causal_window", "chunk", "window_and_chunk"),
    "heads": ((6, 6), (6, 3), (6, 1)),
    "head_dims": ((32, 32), (32, 16), (20, 36)),
    "seqlen_q": (1, 3, 17),
    "softcap": (0.0, 2.0),
    "has_sinks": (False, True),
    "dtype": (torch.bfloat16, torch.float16),
    "num_splits": (0, 1, 3),
    "pack_gqa": (None, False, True),
    "has_metadata": (False, True),
    "sm_margin": (0, 5),
}
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (30, 4)},
    "causal_window": {"causal": True, "window_size": (12, -1)},
    "chunk": {"causal": True, "attention_chunk": 48},
    "window_and_chunk": {"window_size": (30, 4), "attention_chunk": 48},
}


def random_cases(new_keys, count):
    """Cases with equally likely values, apart from rotation, which needs new keys."""
    values = VALUES | ({"rotary": ("none",), "has_own_positions": (False,)} if new_keys == "none" else {})
    chance = random.Random(new_keys)
    return [(new_keys, *map(chance.choice, values.values())) for _ in range(count)]


def randn(*shape, seed, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def packed(rows):
    """The rows of all sequences after each other, and their offsets."""
    return torch.cat(rows), int32([0, *map(len, rows)]).cumsum(0, dtype=torch.int32)


class Inputs:
    """The queries, old keys and new keys of every sequence, as lists."""

    def __init__(self, case):
        heads, kv_heads = case.heads
        dim, value_dim = case.head_dims
        chance = random.Random(repr(case))

        def sequences(counts, *sizes, seed):
            return [randn(n, *sizes, seed=seed + b, dtype=case.dtype) for b, n in enumerate(counts)]

        counts = [case.seqlen_q] * BATCH
        if case.has_packed_queries:
            counts = [case.seqlen_q, *(chance.randint(0, case.seqlen_q) for _ in range(BATCH - 1))]
        self.q = sequences(counts, heads, dim, seed=10)
        self.keys = sequences(LENGTHS, kv_heads, dim, seed=20)
        self.values = sequences(LENGTHS, kv_heads, value_dim, seed=30)
        most = chance.randint(1, case.seqlen_q + 2)
        new_counts = [0] * BATCH if case.new_keys == "none" else [most] * BATCH
        if case.new_keys == "packed":
            new_counts = [chance.randint(0, most) for _ in range(BATCH)]
        self.new_keys = sequences(new_counts, kv_heads, dim, seed=40)
        self.new_values = sequences(new_counts, kv_heads, value_dim, seed=50)
        angles = torch.randn(CAPACITY + 40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(60))
        self.cos, self.sin = angles.cos().to(case.dtype), angles.sin().to(case.dtype)


def cache_of(case, keys, values):
    form = "".join(("paged" if case.page_size else "", "_indexed" * case.has_batch_idx,
                    "_left_padded" * case.has_leftpad))  # fmt: skip
    cache = fill(form.removeprefix("_") or "plain", keys, values, CAPACITY, block_size=case.page_size)
    cache.arguments = {name.replace("block_table", "page_table"): x for name, x in cache.arguments.items()}
    return cache


def check(case):
    inputs = Inputs(case)
    mask = MASKS[case.mask]
    cache = cache_of(case, inputs.keys, inputs.values)
    lengths = cache.arguments["cache_seqlens"]
    sinks = torch.linspace(-1, 1, case.heads[0]) if case.has_sinks else None
    q, cu_seqlens_q = packed(inputs.q) if case.has_packed_queries else (torch.stack(inputs.q), None)
    more = {} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": case.seqlen_q}
    if case.new_keys == "packed":
        (k, cu_seqlens_k_new), (v, _) = packed(inputs.new_keys), packed(inputs.new_values)
        more |= {"k": k, "v": v, "cu_seqlens_k_new": cu_seqlens_k_new}
    elif case.new_keys == "dense":
        more |= {"k": torch.stack(inputs.new_keys), "v": torch.stack(inputs.new_values)}
    turned_q, turned_keys = inputs.q, inputs.new_keys
    if case.rotary != "none":
        starts = lengths // 2 if case.has_own_positions else lengths
        factors = torch.complex(inputs.cos.double(), inputs.sin.double())
        interleaved = case.rotary == "interleaved"
        more |= {"rotary_cos": inputs.cos, "rotary_sin": inputs.sin, "rotary_interleaved": interleaved}
        more |= {"rotary_seqlens": starts} if case.has_own_positions else {}
        turned_q, turned_keys = (
            [
                turned(x, start + step * torch.arange(len(x)), factors, interleaved).to(case.dtype)
                for x, start in zip(sequences, starts.tolist())
            ]
            for sequences, step in ((inputs.q, int(bool(mask))), (inputs.new_keys, 1))
        )
    if case.has_metadata:
        more["scheduler_metadata"] = get_scheduler_metadata(
            BATCH, case.seqlen_q, CAPACITY, *case.heads, case.head_dims[0], lengths, case.dtype,
            headdim_v=case.head_dims[1], cu_seqlens_q=cu_seqlens_q, cache_leftpad=cache.arguments.get("cache_leftpad"),
            cu_seqlens_k_new=more.get("cu_seqlens_k_new"), page_size=case.page_size, num_splits=case.num_splits, **mask,
        )  # fmt: skip
    out, lse, *_ = flash_attn_with_kvcache(
        q, cache.k_cache, cache.v_cache, softmax_scale=SCALE, softcap=case.softcap, s_aux=sinks,
        num_splits=case.num_splits, pack_gqa=case.pack_gqa, sm_margin=case.sm_margin, return_softmax_lse=True,
        **cache.arguments, **mask, **more,
    )  # fmt: skip

    keys, values = (
        [torch.cat(x) for x in zip(old, new)]
        for old, new in ((inputs.keys, turned_keys), (inputs.values, inputs.new_values))
    )
    rounding = 0 if case.rotary == "none" else 2.0**-8
    expected_cache = cache_of(case, keys, values)
    torch.testing.assert_close(
        cache.k_cache, expected_cache.k_cache, rtol=rounding, atol=rounding / 256, equal_nan=True
    )
    torch.testing.assert_close(cache.v_cache, expected_cache.v_cache, rtol=0, atol=0, equal_nan=True)
    outs = out.split([len(x) for x in inputs.q]) if case.has_packed_queries else out
    lses = lse.split([len(x) for x in inputs.q], dim=1) if case.has_packed_queries else lse
    window = {name.removesuffix("_size"): x for name, x in mask.items()}
    for own_q, own_k, own_v, own_out, own_lse in zip(turned_q, keys, values, outs, lses, strict=True):
        exact = attention_float64(
            own_q[None], own_k[None], own_v[None], softmax_scale=SCALE, scores=Scores(case.softcap, sinks=sinks),
            **window,
        )  # fmt: skip
        truth, truth_lse = exact.out[0], exact.softmax_lse[0]
        assert (own_out.double() - truth).norm() <= 2.0**-8 * truth.norm()
        truth_lse = truth_lse.masked_fill(truth_lse == torch.inf, -torch.inf)
        torch.testing.assert_close(own_lse.double(), truth_lse, rtol=1e-5, atol=1e-5 if not rounding else 0.02)


def check_all(cases):
    for case in cases:
        try:
            check(Case(*case))
        except Exception as error:
            raise AssertionError(f"{Case(*case)}: {error}") from error


@pytest.mark.parametrize("new_keys", NEW_KEYS)
def test_every_pair_of_values(new_keys):
    cases = random_cases(new_keys, 1000)
    check_all(covering(cases))


@pytest.mark.slow
@pytest.mark.parametrize("new_keys", NEW_KEYS)
def test_random_combinations(new_keys):
    check_all(random_cases(new_keys, 1000))

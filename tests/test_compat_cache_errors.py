"""Bad arguments of flash_attn_with_kvcache: one clear error each, before the cache is touched."""

import math

import pytest
import torch

from dash_attn import flash_attn_with_kvcache
from dash_attn.compat import flash_attn_3


def t(*shape, dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


NEW = {"k": t(2, 3, 2, 32), "v": t(2, 3, 2, 16), "cache_seqlens": int32(4, 5)}
ROTARY = {"rotary_cos": t(20, 8), "rotary_sin": t(20, 8)}
TABLE = {"k_cache": t(5, 4, 2, 32), "v_cache": t(5, 4, 2, 16), "block_table": int32(0, 1, 2, 3).view(2, 2)}
PACKED_NEW = NEW | {"k": t(4, 2, 32), "v": t(4, 2, 16), "cu_seqlens_k_new": int32(0, 4, 4)}
K_CACHE = "k_cache must have shape (cache_batch, capacity, kv_heads, head_dim), got "
RANGE = " must be from 0 to {} (room in the cache, sizes of tables), got {}"
COLUMNS = (
    "rotary_cos must have rotary_dim / 2 columns, where rotary_dim is a multiple of 16 up to the head_dim, 32, got {}"
)
BAD = [
    ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got [1.0]"),
    ({"k_cache": None}, TypeError, "k_cache must be a torch.Tensor, got None (NoneType)"),
    ({"q": t(3, 4, 32)}, ValueError, "q must have shape (batch, seqlen_q, heads, head_dim), got (3, 4, 32)"),
    ({"k_cache": t(8, 2, 32)}, ValueError, K_CACHE + "(8, 2, 32)"),
    (TABLE | {"k_cache": t(4, 2, 32)}, ValueError,
     "k_cache must have shape (num_blocks, block_size, kv_heads, head_dim) with block_table, got (4, 2, 32)"),
    ({"v_cache": t(2, 9, 2, 16)}, ValueError,
     "v_cache must have the shape of k_cache except for the head_dim, (2, 8, 2, 32), got (2, 9, 2, 16)"),
    ({"v_cache": t(2, 8, 2, 16, dtype=torch.float16)}, TypeError,
     "v_cache must have the dtype of q, torch.bfloat16, got torch.float16"),
    ({"k_cache": t(2, 8, 2, 64)}, ValueError, "k_cache must have the head_dim of q, 32, got 64"),
    ({"k_cache": t(2, 8, 3, 32), "v_cache": t(2, 8, 3, 16)}, ValueError,
     "k_cache must have a number of heads that divides the 4 heads of q, got 3"),
    ({"k_cache": t(1, 8, 2, 32), "v_cache": t(1, 8, 2, 16)}, ValueError,
     "k_cache must have one sequence per sequence of the batch, 2, got 1"),
    ({"v_cache": t(2, 8, 2, 16, device="meta")}, ValueError, "v_cache must be on the device of q, cpu, got meta"),
    ({"cache_seqlens": 9}, ValueError, "cache_seqlens" + RANGE.format(8, 9)),
    ({"cache_seqlens": -1}, ValueError, "cache_seqlens" + RANGE.format(8, -1)),
    ({"cache_seqlens": True}, TypeError,
     "cache_seqlens must be an int, an int32 tensor of shape (batch,) or None, got True"),
    ({"cache_seqlens": [1, 2]}, TypeError,
     "cache_seqlens must be an int, an int32 tensor of shape (batch,) or None, got [1, 2]"),
    ({"cache_seqlens": int32(1, 2).long()}, TypeError, "cache_seqlens must be torch.int32, got torch.int64"),
    ({"cache_seqlens": int32(1)}, ValueError, "cache_seqlens must have shape (batch,) = (2,), got (1,)"),
    ({"cache_seqlens": int32(1, 9)}, ValueError, "cache_seqlens" + RANGE.format(8, [1, 9])),
    ({"cache_seqlens": int32(-1, 3)}, ValueError, "cache_seqlens" + RANGE.format(8, [-1, 3])),
    (NEW | TABLE | {"k": t(2, 2, 2, 32), "v": t(2, 2, 2, 16), "cache_seqlens": int32(-1, -2)}, ValueError,
     "cache_seqlens" + RANGE.format(6, -1)),
    (NEW | {"cache_seqlens": int32(-3, 0)}, ValueError, "cache_seqlens" + RANGE.format(5, [-3, 0])),
    (NEW | {"k": t(2, 9, 2, 32), "v": t(2, 9, 2, 16), "cache_seqlens": int32(0, 0)}, ValueError,
     "cache_seqlens" + RANGE.format(-1, [0, 0])),
    ({"cache_seqlens": int32(1, 2).to("meta")}, ValueError,
     "cache_seqlens must be on the device of q, cpu, got meta"),
    ({"cache_batch_idx": int32(0)}, ValueError, "cache_batch_idx must have shape (batch,) = (2,), got (1,)"),
    ({"cache_batch_idx": int32(0, 2)}, ValueError, "cache_batch_idx" + RANGE.format(1, [0, 2])),
    (NEW | {"cache_batch_idx": int32(1, 1)}, ValueError,
     "cache_batch_idx must have distinct values with k, got [1, 1]"),
    ({"cache_leftpad": int32(1, 9), "cache_seqlens": 7}, ValueError,
     "cache_leftpad must be from 0 to the cached keys, [7, 7], got [1, 9]"),
    ({"cache_leftpad": t(2)}, TypeError, "cache_leftpad must be torch.int32, got torch.bfloat16"),
    (TABLE | {"block_table": int32(1, 2)}, ValueError, "block_table must have shape (batch, max_blocks), got (2,)"),
    (TABLE | {"block_table": t(2, 2)}, TypeError, "block_table must be torch.int32, got torch.bfloat16"),
    (TABLE | {"block_table": int32(1, 2)[None]}, ValueError,
     "block_table must have shape (batch, max_blocks) = (2, 2), got (1, 2)"),
    (TABLE | {"block_table": int32(0, 1, 2, 5).view(2, 2)}, ValueError, "block_table" + RANGE.format(4, [2, 5])),
    (TABLE | {"cache_batch_idx": int32(0, 2)}, ValueError, "cache_batch_idx" + RANGE.format(1, [0, 2])),
    (NEW | TABLE | {"cache_batch_idx": int32(1, 1)}, ValueError,
     "cache_batch_idx must have distinct values with k, got [1, 1]"),
    (TABLE | {"cache_batch_idx": int32(0, 1), "block_table": t(2, 2)}, TypeError,
     "block_table must be torch.int32, got torch.bfloat16"),
    ({"k": NEW["k"]}, ValueError, "k and v must both be given or both be None, got one of them"),
    (NEW | {"cache_seqlens": None}, ValueError,
     "cache_seqlens must be given with k, to place the new keys, got None"),
    (NEW | {"cache_seqlens": int32(4, 6)}, ValueError, "cache_seqlens" + RANGE.format(5, [4, 6])),
    (NEW | {"cache_seqlens": 6}, ValueError, "cache_seqlens" + RANGE.format(5, 6)),
    (NEW | {"k": t(2, 3, 4, 32)}, ValueError,
     "k must have shape (batch, seqlen_new, kv_heads, head_dim) with the heads of k_cache, (2, 3, 2, 32), got "
     "(2, 3, 4, 32)"),
    (NEW | {"v": t(2, 2, 2, 16)}, ValueError,
     "v must have shape (batch, seqlen_new, kv_heads, head_dim) with the heads of v_cache, (2, 3, 2, 16), got "
     "(2, 2, 2, 16)"),
    (NEW | {"k": t(2, 3, 2, 32, dtype=torch.float16)}, TypeError,
     "k must have the dtype of q, torch.bfloat16, got torch.float16"),
    (ROTARY, ValueError, "rotary_cos must be None without k: keys in the cache are already rotated"),
    (NEW | {"rotary_cos": t(20, 8)}, ValueError,
     "rotary_cos and rotary_sin must both be given or both be None, got one of them"),
    (NEW | ROTARY | {"rotary_sin": t(19, 8)}, ValueError,
     "rotary_sin must have shape (positions, rotary_dim / 2), the same as rotary_cos, got (19, 8)"),
    (NEW | {"rotary_cos": t(20, 7), "rotary_sin": t(20, 7)}, ValueError, COLUMNS.format(7)),
    (NEW | {"rotary_cos": t(20, 24), "rotary_sin": t(20, 24)}, ValueError, COLUMNS.format(24)),
    (NEW | {"rotary_cos": t(20, 8, dtype=torch.int32), "rotary_sin": t(20, 8)}, TypeError,
     "rotary_cos must have a floating-point dtype, got torch.int32"),
    (NEW | {"rotary_cos": t(7, 8), "rotary_sin": t(7, 8)}, ValueError, "cache_seqlens" + RANGE.format(4, 5)),
    (NEW | TABLE | {"block_table": int32(0, 1, 2, 1).view(2, 2)}, ValueError,
     "block_table must have distinct blocks where k is written, got [1, 1]"),
    (NEW | TABLE | {"block_table": int32(2, 2, 0, 1).view(2, 2), "cache_seqlens": int32(3, 4)}, ValueError,
     "block_table must have distinct blocks where k is written, got [2, 2, 1]"),
    (TABLE | {"k_cache": t(5, 0, 2, 32), "v_cache": t(5, 0, 2, 16), "cache_seqlens": 0}, ValueError,
     "k_cache must have shape (num_blocks, block_size, kv_heads, head_dim) with block_table and a block_size of at "
     "least 1, got (5, 0, 2, 32)"),
    ({"num_splits": 1.5}, TypeError, "num_splits must be an int (it is ignored), got 1.5"),
    ({"causal": 2}, TypeError, "causal must be a bool, got 2"),
    (NEW | {"softcap": 1.0, "alibi_slopes": t(4, dtype=torch.float32)}, NotImplementedError,
     "softcap and alibi_slopes must not be given together (no kernel has both), got softcap=1 and alibi_slopes of "
     "shape (4,)"),
    (NEW | {"softcap": math.nan}, ValueError,
     "softcap must be a finite number or None (0 or less disables it), got nan"),
    (NEW | {"softmax_scale": math.inf}, ValueError, "softmax_scale must be a finite number or None, got inf"),
    (NEW | {"alibi_slopes": t(3, dtype=torch.float32)}, ValueError,
     "alibi_slopes must have shape (heads,) = (4,) or (batch, heads) = (2, 4), got (3,)"),
    (NEW | {"alibi_slopes": t(4, dtype=torch.float32, device="meta")}, ValueError,
     "alibi_slopes must be on the device of q, cpu, got meta"),
    (NEW | {"learnable_sink": t(3)}, ValueError,
     "learnable_sink (s_aux) must be of shape (heads,) = (4,), got (3,)"),
    (NEW | {"s_aux": t(4, device="meta")}, ValueError,
     "learnable_sink (s_aux) must be on the device of q, cpu, got meta"),
    (NEW | {"return_softmax_lse": 2}, TypeError, "return_softmax_lse must be a bool, got 2"),
    (NEW | ROTARY | {"rotary_interleaved": "yes"}, TypeError, "rotary_interleaved must be a bool, got 'yes'"),
]  # fmt: skip


DENSE = {"q": t(2, 3, 4, 32), "k_cache": t(2, 8, 2, 32), "v_cache": t(2, 8, 2, 16)}


def check_refused(function, arguments, error, message, cache_names=("k_cache", "v_cache"), new_names=("k", "v")):
    """With the caches as before, in which new keys and values would be seen."""
    ones = {name: arguments[name] + 1 for name in new_names if isinstance(arguments.get(name), torch.Tensor)}
    caches = {name: x.clone() for name in cache_names if isinstance(x := arguments[name], torch.Tensor)}
    with pytest.raises(error) as raised:
        function(**arguments | ones | caches)
    assert str(raised.value).splitlines()[0] == message
    for name, cache in caches.items():
        assert cache.is_meta or torch.equal(cache, arguments[name]), name


@pytest.mark.parametrize("change, error, message", BAD)
def test_bad_argument(change, error, message):
    check_refused(flash_attn_with_kvcache, DENSE | change, error, message)


ONE = t(1, 8, 2, 32)
BOTH = t(2, 8, 2, 48)


@pytest.mark.parametrize("k_cache, v_cache, message", [
    (ONE.expand(2, -1, -1, -1), DENSE["v_cache"],
     "k_cache must have one memory location per element, got strides (0, 64, 32, 1)"),
    (DENSE["k_cache"], ONE[..., :1].expand(2, 8, 2, 16),
     "v_cache must have one memory location per element, got strides (0, 64, 32, 0)"),
    # Sequences whose ends are the beginnings of the next ones.
    (t(12, 2, 32).as_strided((2, 8, 2, 32), (256, 64, 32, 1)), DENSE["v_cache"],
     "k_cache must have one memory location per element, got strides (256, 64, 32, 1)"),
    (DENSE["k_cache"], DENSE["k_cache"], "k_cache must not share memory with v_cache"),
    (DENSE["k_cache"], DENSE["k_cache"][..., :16], "k_cache must not share memory with v_cache"),
])  # fmt: skip
@pytest.mark.parametrize("paged", [{}, {"block_table": int32(0, 1).view(2, 1)}], ids=["dense", "paged"])
def test_what_is_written_has_memory_of_its_own(k_cache, v_cache, message, paged):
    new = NEW | {"v": t(2, 3, 2, v_cache.shape[3])}
    arguments = {"q": DENSE["q"], "k_cache": k_cache, "v_cache": v_cache}
    with pytest.raises(ValueError) as raised:
        flash_attn_with_kvcache(**arguments, **new, **paged)
    assert str(raised.value) == message
    assert not k_cache.any() and not v_cache.any()
    flash_attn_with_kvcache(**arguments, **paged)


@pytest.mark.parametrize("name, rows", [("k", slice(0, 3)), ("v", slice(4, 7)), ("q", slice(2, 4))])
def test_what_is_read_is_apart_from_the_cache(name, rows):
    """Otherwise a row would be read before or after it is written, as the threads of a kernel happen to run."""
    cache, new = t(2, 8, 2, 32), t(2, 3, 2, 32)
    arguments = {"q": new, "k_cache": cache, "v_cache": cache.clone(), **NEW, "v": new, name: cache[:, rows]}
    with pytest.raises(ValueError, match=f"^k_cache must not share memory with {name}$"):
        flash_attn_with_kvcache(**arguments)
    flash_attn_with_kvcache(**arguments | {name: arguments[name].clone()})


def test_caches_side_by_side_are_apart():
    new = {name: x + 1 if name != "cache_seqlens" else x for name, x in NEW.items()}
    k_cache, v_cache = BOTH.clone().split((32, 16), dim=-1)
    flash_attn_with_kvcache(DENSE["q"], k_cache, v_cache, **new)
    assert k_cache.sum() == new["k"].numel() and v_cache.sum() == new["v"].numel()


@pytest.mark.parametrize("change, error, message", [
    ({"page_table": int32(0, 9).view(2, 1)}, ValueError, "page_table" + RANGE.format(1, 9)),
    ({"rotary_seqlens": int32(0, 1).long()}, TypeError, "rotary_seqlens must be torch.int32, got torch.int64"),
    ({"cu_seqlens_k_new": int32(0, 1, 2)}, ValueError, "cu_seqlens_k_new must be None without k, got a tensor"),
    (NEW | {"cu_seqlens_k_new": int32(0, 1, 2)}, ValueError,
     "k must have shape (total_k_new, kv_heads, head_dim) with the heads of k_cache, (2, 2, 32), got (2, 3, 2, 32)"),
    (PACKED_NEW | {"v": t(5, 2, 16)}, ValueError,
     "v must have shape (total_k_new, kv_heads, head_dim) with the heads of v_cache, (4, 2, 16), got (5, 2, 16)"),
    (PACKED_NEW | {"cu_seqlens_k_new": int32(0, 4)}, ValueError,
     "cu_seqlens_k_new must have shape (batch + 1,) = (3,), got (2,)"),
    (PACKED_NEW | {"cu_seqlens_k_new": int32(0, 4, 4).long()}, TypeError,
     "cu_seqlens_k_new must be torch.int32, got torch.int64"),
    (PACKED_NEW | {"cu_seqlens_k_new": int32(0, 4, 3)}, ValueError,
     "cu_seqlens_k_new must hold non-decreasing offsets from 0 to 4, the number of rows, got [0, 4, 3]"),
    (PACKED_NEW | {"cache_seqlens": int32(5, 5)}, ValueError, "cache_seqlens" + RANGE.format(4, 5)),
    (PACKED_NEW | {"cache_seqlens": 8}, ValueError, "cache_seqlens" + RANGE.format(4, 8)),
    (PACKED_NEW | ROTARY | {"rotary_seqlens": int32(17, 18)}, ValueError, "rotary_seqlens" + RANGE.format(16, 17)),
    (NEW | ROTARY | {"rotary_seqlens": int32(0, 18)}, ValueError, "rotary_seqlens" + RANGE.format(17, 18)),
    (NEW | ROTARY | {"cu_seqlens_q": int32(0, 14, 30), "q": t(30, 4, 32), "causal": True}, ValueError,
     "cache_seqlens" + RANGE.format(4, 5)),
    ({"cu_seqlens_q": int32(0, 2, 6)}, ValueError,
     "q must have shape (total_q, heads, head_dim), got (2, 3, 4, 32)"),
    ({"cu_seqlens_q": int32(0, 2, 6)[None], "q": t(6, 4, 32)}, ValueError,
     "cu_seqlens_q must have shape (batch + 1,), got (1, 3)"),
    (NEW | {"attention_chunk": -1}, ValueError, "attention_chunk must be at least 0, got -1"),
    (NEW | {"sm_margin": -1}, ValueError, "sm_margin must be at least 0 and less than the SMs of the GPU (at most 144 "
     "on Hopper), got -1"),
    (NEW | {"cu_seqlens_q": int32(0, 5, 2), "q": t(6, 4, 32)}, ValueError,
     "cu_seqlens_q must hold non-decreasing offsets from 0 to 6, the number of rows, got [0, 5, 2]"),
    (NEW | {"cu_seqlens_q": int32(0, 5, 6).long(), "q": t(6, 4, 32)}, TypeError,
     "cu_seqlens_q must be torch.int32, got torch.int64"),
])  # fmt: skip
def test_bad_argument_of_flash_attention_3(change, error, message):
    check_refused(flash_attn_3.flash_attn_with_kvcache, DENSE | change, error, message)


@pytest.mark.parametrize("change, message", [
    ({"out_": t(2, 3, 4, 32)},
     "out_ must have shape and dtype (2, 3, 4, 16) of torch.bfloat16, got (2, 3, 4, 32) of torch.bfloat16"),
    ({"seqused_q": int32(3, 4)},
     "seqused_q must hold numbers from 0 to the lengths in cu_seqlens_q, [3, 3], got [3, 4]"),
    ({"seqused_q": int32(3)}, "seqused_q must have shape (batch,) = (2,), got (1,)"),
])  # fmt: skip
def test_bad_argument_of_the_private_forward(change, message):
    new = {"k_new": NEW["k"], "v_new": NEW["v"], "seqused_k": NEW["cache_seqlens"]}
    arguments = {"q": DENSE["q"], "k": DENSE["k_cache"], "v": DENSE["v_cache"]} | new | change
    names = {"cache_names": ("k", "v"), "new_names": ("k_new", "v_new")}
    check_refused(flash_attn_3._flash_attn_forward, arguments, ValueError, message, **names)


def interleaved_blocks():
    """Caches of blocks 0, 2, 4 and 1, 3, 5 of a buffer, each with the other's blocks in between."""
    buffer = t(6, 8, 2, 32)
    return buffer[:5], buffer[1:]


def test_blocks_of_keys_and_values_may_alternate_in_a_buffer():
    table = int32(2, 0).view(2, 1)
    new = NEW | {name: torch.randn_like(NEW["k"]) for name in ("k", "v")}
    k_cache, v_cache = interleaved_blocks()
    out = flash_attn_with_kvcache(DENSE["q"], k_cache, v_cache, **new, block_table=table)
    apart = [x.clone() for x in interleaved_blocks()]
    assert torch.equal(out, flash_attn_with_kvcache(DENSE["q"], *apart, **new, block_table=table))
    assert torch.equal(k_cache[::2], apart[0][::2]) and torch.equal(v_cache[::2], apart[1][::2])
    assert not apart[0][1::2].any() and k_cache[0, 5:].all()


def test_a_block_of_keys_and_values_is_an_error():
    new = NEW | {"v": NEW["k"]}
    k_cache, v_cache = interleaved_blocks()
    with pytest.raises(ValueError) as raised:
        flash_attn_with_kvcache(DENSE["q"], k_cache, v_cache, **new, block_table=int32(2, 1).view(2, 1))
    message = "block_table must name no block of k_cache that is also a named block of v_cache, got [2]"
    assert str(raised.value) == message and not k_cache.any() and not v_cache.any()
    # Blocks that are not whole numbers of blocks apart share memory in any table.
    rows = t(48, 2, 32)
    k_cache, v_cache = (rows[start : start + 40].view(5, 8, 2, 32) for start in (0, 4))
    with pytest.raises(ValueError, match="^k_cache must not share memory with v_cache$"):
        flash_attn_with_kvcache(DENSE["q"], k_cache, v_cache, **new, block_table=int32(2, 0).view(2, 1))

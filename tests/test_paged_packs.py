"""flash_attn_varlen_func with a block_table, on CPU tensors: a forward, with the bits of the call without pages."""

import pytest
import torch
from mask_support import CAUSAL, FULL, name_of, public, window
from pack_support import Pack, int32

from dash_attn import flash_attn_varlen_func
from dash_attn.compat import flash_attn_2, flash_attn_2_cuda, flash_attn_3

LENGTHS = [(20, 50), (1, 17), (0, 5), (7, 0), (33, 33)]
USED = [(20, 41), (1, 16), (0, 5), (3, 0), (30, 33)]
MASKS = [FULL, CAUSAL, window(9, 4), window(-1, -1, 16, causal=True)]


def paged(pack, block_size=16, poison=torch.nan):
    """k, v and block_table with the keys of the pack; rows of a block that have none hold `poison`."""
    keys = [rows for _, rows in pack.sequences()]
    width = max(-(-(rows.stop - rows.start) // block_size) for rows in keys)
    order = torch.randperm(len(keys) * width, generator=torch.Generator().manual_seed(0)).view(-1, width) + 1
    table, caches = torch.full_like(order, -1), []
    for x in (pack.k, pack.v):
        cache = x.new_full((order.numel() + 1, block_size, *x.shape[1:]), poison)
        for b, rows in enumerate(keys):
            for i, row in enumerate(x[rows]):
                cache[order[b, i // block_size], i % block_size] = row
                table[b, i // block_size] = order[b, i // block_size]
        caches.append(cache)
    return *caches, table.int()


@pytest.mark.parametrize("mask", MASKS, ids=name_of)
@pytest.mark.parametrize("used", [None, USED], ids=["all", "used"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_bits_of_the_call_without_pages(mask, used, block_size):
    pack = Pack.of(LENGTHS, used=used, first=2, tail=3, value_head_dim=16)
    scores = {"softcap": 3.0, "s_aux": torch.linspace(-1, 1, 4), "return_attn_probs": True}
    arguments = {**public(mask), **scores, **pack.used()}
    expected = flash_attn_varlen_func(pack.q, pack.k, pack.v, *pack.offsets(), **arguments)
    k, v, block_table = paged(pack, block_size)
    out = flash_attn_varlen_func(pack.q, k, v, *pack.offsets(), block_table=block_table, **arguments)
    assert len(out) == 3 and all(map(torch.equal, out, expected))
    alone = flash_attn_varlen_func(
        pack.q, k, v, *pack.offsets(), block_table=block_table, **arguments | {"return_attn_probs": False}
    )
    assert torch.equal(alone, expected[0])


def test_numbers_of_keys_take_the_place_of_offsets():
    """As FlashAttention-2 has it: with seqused_k the values of cu_seqlens_k are not looked at."""
    pack = Pack.of(LENGTHS, used=USED)
    k, v, block_table = paged(pack)
    offsets_q, offsets_k, *hints = pack.offsets()
    expected = flash_attn_varlen_func(pack.q, pack.k, pack.v, offsets_q, offsets_k, *hints, **pack.used())
    out = flash_attn_varlen_func(
        pack.q, k, v, offsets_q, torch.zeros_like(offsets_k), *hints, block_table=block_table, **pack.used()
    )
    assert torch.equal(out, expected)


def test_a_gradient_is_needed_only_where_it_is_required():
    pack = Pack.of(LENGTHS)
    k, v, block_table = paged(pack)
    q = pack.q.clone().requires_grad_()
    expected = flash_attn_varlen_func(pack.q, pack.k, pack.v, *pack.offsets())
    with pytest.raises(NotImplementedError, match=r"^block_table must be None if a gradient is required .* and q "):
        flash_attn_varlen_func(q, k, v, *pack.offsets(), block_table=block_table)
    with torch.no_grad():
        assert torch.equal(flash_attn_varlen_func(q, k, v, *pack.offsets(), block_table=block_table), expected)


@pytest.mark.parametrize("block_table", ["as given", "compiled"])
def test_names_of_flash_attention(block_table):
    """Each function that has a block_table, in its own order of arguments, eager and in one graph."""
    pack = Pack.of(LENGTHS)
    k, v, table = paged(pack)
    offsets_q, offsets_k, *_ = pack.offsets()
    expected, expected_lse, _ = flash_attn_varlen_func(
        pack.q, pack.k, pack.v, *pack.offsets(), causal=True, return_attn_probs=True
    )
    no_key = expected_lse.isinf()
    lse_3 = expected_lse.masked_fill(no_key, -torch.inf)

    def calls():
        yield flash_attn_3.flash_attn_varlen_func(
            pack.q, k, v, offsets_q, offsets_k, 33, 50, causal=True, block_table=table, return_attn_probs=True
        )
        yield flash_attn_2._flash_attn_varlen_forward(
            pack.q, k, v, offsets_q, offsets_k, 33, 50, 0.0, None, True, block_table=table
        )
        yield flash_attn_2_cuda.varlen_fwd(
            pack.q, k, v, None, offsets_q, offsets_k, None, None, table, None, 33, 50, 0.0, None, False, True, -1, -1,
            0.0, False, None,
        )  # fmt: skip

    def results():
        return [(out, lse) for out, lse, *_ in calls()]

    found = torch.compile(results, backend="aot_eager", fullgraph=True)() if block_table == "compiled" else results()
    torch.compiler.reset()
    assert len(found) == 3
    for out, lse in found:
        assert torch.equal(out, expected) and torch.equal(lse, lse_3)


def test_no_length_is_read():
    pack = Pack.of(LENGTHS)
    k, v, block_table = (x.to("meta") for x in paged(pack))
    offsets = [int32(x).to("meta") for x in (pack.offsets_q, pack.offsets_k)]
    out = flash_attn_varlen_func(pack.q.to("meta"), k, v, *offsets, 33, 50, block_table=block_table, causal=True)
    assert out.shape == pack.q.shape

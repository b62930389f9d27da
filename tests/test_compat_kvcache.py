"""flash_attn_with_kvcache on CPU tensors: every form of a cache, what is appended, masks, rotation and bits."""

import pytest
import torch
from cache_support import FORMS, fill, turned
from float64_reference import Scores, attention_float64, attention_in_dtype, visible_keys

import dash_attn
from dash_attn import flash_attn_func, flash_attn_with_kvcache
from dash_attn.compat import flash_attn_3

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 4, 2, 32, 16
LENGTHS, SEQLEN_Q, CAPACITY = (40, 5, 0, 23), 3, 60
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (7, 2)},
    "causal_window": {"causal": True, "window_size": (4, 0)},
}
forms = pytest.mark.parametrize("form", FORMS)
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


@pytest.fixture(autouse=True)
def forget_compiled():
    """Every test compiles for itself: together they would exceed what is compiled of one function."""
    yield
    torch.compiler.reset()


def randn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def sequences(lengths=LENGTHS, value_dim=VALUE_DIM):
    """Keys and values of each."""
    keys = [randn(n, KV_HEADS, HEAD_DIM, seed=10 + b) for b, n in enumerate(lengths)]
    return keys, [randn(n, KV_HEADS, value_dim, seed=20 + b) for b, n in enumerate(lengths)]


def queries(seqlen_q=SEQLEN_Q, batch=None):
    return randn(len(LENGTHS) if batch is None else batch, seqlen_q, HEADS, HEAD_DIM, seed=1)


def alone(q, keys, values, mask):
    """Each sequence by itself in a dense call of flash_attn_func: out and log-sum-exp."""
    results = [
        flash_attn_func(q[b : b + 1], k[None], v[None], return_attn_probs=True, **mask)[:2]
        for b, (k, v) in enumerate(zip(keys, values))
    ]
    return [torch.cat(x) for x in zip(*results)]


@forms
@masks
def test_every_form_of_a_cache_has_the_bits_of_a_dense_call(form, mask):
    """Also beside rows without keys that hold NaN."""
    keys, values = sequences()
    cache, q = fill(form, keys, values, CAPACITY), queries()
    out, lse = flash_attn_with_kvcache(
        q, cache.k_cache, cache.v_cache, return_softmax_lse=True, **cache.arguments, **mask
    )
    expected, expected_lse = alone(q, keys, values, mask)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert lse.is_contiguous() and (lse[2] == torch.inf).all() and not out[2].any()


@forms
@masks
def test_append(form, mask):
    """The cache then has the new rows, and nothing else is touched."""
    keys, values = sequences()
    cache, q = fill(form, keys, values, CAPACITY), queries()
    new_k, new_v = randn(4, 3, KV_HEADS, HEAD_DIM, seed=5), randn(4, 3, KV_HEADS, VALUE_DIM, seed=6)
    both = ([torch.cat(x) for x in zip(old, new)] for old, new in ((keys, new_k), (values, new_v)))
    longer = fill(form, *both, CAPACITY)
    out = flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, new_k, new_v, **cache.arguments, **mask)
    for actual, expected in ((cache.k_cache, longer.k_cache), (cache.v_cache, longer.v_cache)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out, flash_attn_with_kvcache(q, longer.k_cache, longer.v_cache, **longer.arguments, **mask))


@masks
@pytest.mark.parametrize("scores", ["plain", "softcap", "slopes", "slopes_of_sequences", "sinks"])
def test_against_float64(mask, scores):
    """No further from it than PyTorch's own operators in bf16."""
    lengths = (40, 5, 23)
    keys, values = sequences(lengths)
    cache, q = fill("paged", keys, values, CAPACITY), queries(batch=3)
    slopes = randn(3, HEADS, dtype=torch.float32).abs() / 4
    arguments = {
        "plain": {}, "softcap": {"softcap": 2.0}, "slopes": {"alibi_slopes": slopes[0]},
        "slopes_of_sequences": {"alibi_slopes": slopes}, "sinks": {"learnable_sink": slopes[1]},
    }[scores]  # fmt: skip
    out, lse = flash_attn_with_kvcache(
        q, cache.k_cache, cache.v_cache, softmax_scale=0.3, return_softmax_lse=True, **cache.arguments, **mask,
        **arguments,
    )  # fmt: skip
    formula = {"causal": mask.get("causal", False), "window": mask.get("window_size", (-1, -1)), "softmax_scale": 0.3}
    for b, (k, v) in enumerate(zip(keys, values)):
        of_sequence = Scores(
            softcap=arguments.get("softcap", 0.0),
            alibi_slopes=None if "slopes" not in scores else slopes[0] if scores == "slopes" else slopes[b],
            sinks=arguments.get("learnable_sink"),
        )
        tensors = q[b : b + 1], k[None], v[None]
        exact = attention_float64(*tensors, scores=of_sequence, **formula)
        eager = attention_in_dtype(*tensors, scores=of_sequence, **formula)
        assert (out[b : b + 1].double() - exact.out).norm() <= (eager.out.double() - exact.out).norm()
        torch.testing.assert_close(lse[b : b + 1].double(), exact.softmax_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", [1, 2, 7, 64])
@pytest.mark.parametrize("window_size", [(-1, -1), (9, 0), (40, 0)])
def test_decoding_has_the_bits_of_one_call(step, window_size):
    """Row by row and in chunks, from a cache that fills up."""
    q, k, v = (randn(1, 65, heads, 32, seed=heads + 1) for heads in (4, 2, 2))
    arguments = {"causal": True, "window_size": window_size}
    expected, expected_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **arguments)
    k_cache, v_cache = (torch.full((1, 80, 2, 32), torch.nan).bfloat16() for _ in range(2))
    for start in range(0, 65, step):
        rows = slice(start, min(start + step, 65))
        out, lse = flash_attn_with_kvcache(
            q[:, rows], k_cache, v_cache, k[:, rows], v[:, rows], cache_seqlens=int32(start), return_softmax_lse=True,
            **arguments,
        )  # fmt: skip
        assert torch.equal(out, expected[:, rows]) and torch.equal(lse, expected_lse[:, :, rows])


def test_bits_do_not_depend_on_the_batch():
    keys, values = sequences()
    cache, q = fill("plain", keys, values, CAPACITY), queries()
    out = flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, causal=True, **cache.arguments)
    for batch in ([0], [3, 1], [2, 2, 0, 3, 1]):
        few = fill("plain", [keys[b] for b in batch], [values[b] for b in batch], CAPACITY + 11)
        rows = flash_attn_with_kvcache(q[batch], few.k_cache, few.v_cache, causal=True, **few.arguments)
        assert torch.equal(rows, out[batch])


@pytest.mark.parametrize("cache_seqlens", [None, 40, 17])
def test_lengths_of_all(cache_seqlens):
    keys, values = sequences((40, 40))
    q, k_cache, v_cache = queries(batch=2), torch.stack(keys), torch.stack(values)
    length = 40 if cache_seqlens is None else cache_seqlens
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, causal=True)
    assert torch.equal(out, flash_attn_func(q, k_cache[:, :length], v_cache[:, :length], causal=True))


@pytest.mark.parametrize("layout", ["expanded", "rows_first", "unlike_each_other"])
def test_layouts_whose_sequences_are_no_rows_apart(layout):
    """Those are copied; lengths of any strides."""
    keys, values = sequences((40, 40))
    k_cache, v_cache = torch.stack(keys), torch.stack(values)
    if layout == "expanded":
        k_cache, v_cache = (x[:1].expand_as(x) for x in (k_cache, v_cache))
    elif layout == "rows_first":
        k_cache, v_cache = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k_cache, v_cache))
    else:
        v_cache = torch.cat((v_cache, v_cache), dim=1)[:, :40]
    lengths = int32(40, 0, 17, 0)[::2]
    q = queries(batch=2)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, causal=True)
    cut = [x[:n] for x, n in zip(k_cache, (40, 17))], [x[:n] for x, n in zip(v_cache, (40, 17))]
    assert torch.equal(out, alone(q, *cut, {"causal": True})[0])


def test_blocks_past_the_keys_are_not_looked_at():
    keys, values = sequences()
    cache, q = fill("paged", keys, values, CAPACITY), queries()
    expected = flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, **cache.arguments)
    table = cache.arguments["block_table"]
    for b, length in enumerate(LENGTHS):
        table[b, -(-length // 16) :] = (-1, 10**6)[b % 2]
    assert torch.equal(flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, **cache.arguments), expected)


def test_blocks_that_are_only_read_may_be_shared():
    """Of sequences with the same start, each of which writes into a block of its own."""
    start, ends = randn(16, 2, HEAD_DIM), (randn(2, 2, HEAD_DIM, seed=1), randn(5, 2, HEAD_DIM, seed=2))
    blocks = torch.cat((start[None], torch.zeros(2, 16, 2, HEAD_DIM).bfloat16()))
    for number, end in enumerate(ends):
        blocks[1 + number, : len(end)] = end
    new, q = randn(2, 1, 2, HEAD_DIM, seed=3), queries(1, batch=2)
    table, lengths = int32(0, 1, 0, 2).view(2, 2), int32(18, 21)
    out = flash_attn_with_kvcache(q, blocks, blocks + 1, new, new, cache_seqlens=lengths, block_table=table)
    keys = [torch.cat((start, end, row)) for end, row in zip(ends, new)]
    values = [torch.cat((x[:-1] + 1, x[-1:])) for x in keys]
    assert torch.equal(out, alone(q, keys, values, {})[0])


@pytest.mark.parametrize("is_pack", [False, True])
def test_a_rotary_table_needs_the_rows_that_are_looked_up(is_pack):
    """Without a mask all queries are turned as the first is; with one a sequence needs as many as it has queries."""
    keys, values = sequences((40, 5))
    q, new_k, new_v = queries(30, 2), randn(2, 1, 2, HEAD_DIM), randn(2, 1, 2, VALUE_DIM)
    pack = {"cu_seqlens_q": int32(0, 1, 31)} if is_pack else {}
    q = q.flatten(0, 1)[:31] if is_pack else q
    results = []
    for rows, causal in ((41, False), (99, False), *(((41, True), (99, True)) if is_pack else ())):
        cache, table = fill("plain", keys, values, CAPACITY), randn(99, 8, seed=4)[:rows]
        arguments = {"rotary_cos": table, "rotary_sin": table, "causal": causal, **pack, **cache.arguments}
        results.append(flash_attn_3.flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, new_k, new_v, **arguments))
    assert all(map(torch.equal, results[::2], results[1::2]))


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8, 12, 16, 24, 48, 64])
def test_block_sizes(block_size):
    keys, values = sequences()
    cache, q = fill("paged", keys, values, CAPACITY, block_size=block_size), queries()
    out = flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, causal=True, **cache.arguments)
    assert torch.equal(out, alone(q, keys, values, {"causal": True})[0])


@pytest.mark.parametrize("takes_none", [(1,), (0, 3), (2, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("block", [-1, 10**6, "another's"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_sequences_that_fill_up_a_batch(takes_none, block, is_compiled):
    """transformers gives those of a decoding batch that are none -1 for their length and for all their blocks."""
    keys, values = sequences((40, 5, 16, 23))
    cache, q = fill("paged", keys, values, CAPACITY), queries(1)
    new_k, new_v = randn(4, 1, KV_HEADS, HEAD_DIM, seed=5), randn(4, 1, KV_HEADS, VALUE_DIM, seed=6)
    others = [b for b in range(4) if b not in takes_none]
    few = fill("paged", keys, values, CAPACITY)
    few.arguments = {name: x[others] for name, x in few.arguments.items()}
    rows = new_k[others], new_v[others]
    expected = flash_attn_with_kvcache(q[others], few.k_cache, few.v_cache, *rows, **few.arguments)
    for b in takes_none:
        cache.arguments["cache_seqlens"][b] = -1
        # Also the one where sequence 2 writes its first row.
        cache.arguments["block_table"][b] = cache.arguments["block_table"][2, 1] if block == "another's" else block
    function = flash_attn_with_kvcache
    if is_compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    out, lse = function(q, cache.k_cache, cache.v_cache, new_k, new_v, return_softmax_lse=True, **cache.arguments)
    assert torch.equal(out[others], expected)
    assert not out[list(takes_none)].any() and (lse[list(takes_none)] == torch.inf).all()
    for actual, truth in ((cache.k_cache, few.k_cache), (cache.v_cache, few.v_cache)):
        torch.testing.assert_close(actual, truth, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "form, lengths", [("plain", (-1, 3)), ("plain", (3, -3)), ("paged", (-2, 3)), ("plain", (3, 70))]
)
@pytest.mark.parametrize("appends", [False, True])
def test_lengths_out_of_range_are_the_ops_error(form, lengths, appends):
    """Where they are not read beforehand, as on a GPU."""
    cache = fill(form, *sequences((3, 3)), CAPACITY)
    cache.arguments["cache_seqlens"] = int32(*lengths)
    new = (randn(2, 3, KV_HEADS, HEAD_DIM), randn(2, 3, KV_HEADS, VALUE_DIM)) if appends else ()
    compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    with pytest.raises((ValueError, IndexError), match="seqused_k|cache_seqlens|out of bounds"):
        compiled(queries(batch=2), cache.k_cache, cache.v_cache, *new, **cache.arguments)


@pytest.mark.parametrize("form, name, appends", [
    ("paged", "block_table", False), ("paged", "block_table", True), ("indexed", "cache_batch_idx", False),
    ("indexed", "cache_batch_idx", True), ("left_padded", "rotary_seqlens", True),
])  # fmt: skip
def test_negative_indices_do_not_wrap_round(form, name, appends):
    """Where they are not read beforehand, as on a GPU: an error on the device before anything is written."""
    cache, before = (fill(form, *sequences((18, 3)), CAPACITY, poison=0.0) for _ in range(2))
    arguments = {key.replace("block_table", "page_table"): x for key, x in cache.arguments.items()}
    if name == "rotary_seqlens":
        angles = randn(70, 8, dtype=torch.float32)
        arguments |= {"rotary_seqlens": int32(4, -1), "rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    elif name == "block_table":
        arguments["page_table"][0, 1] = -1
    else:
        arguments[name][1] = -1
    if appends:
        arguments |= {"k": randn(2, 3, KV_HEADS, HEAD_DIM), "v": randn(2, 3, KV_HEADS, VALUE_DIM)}
    compiled = torch.compile(flash_attn_3.flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    error = f"({name.replace('block', 'page')}|block_table and cache_batch_idx) must be at least 0"
    with pytest.raises((RuntimeError, ValueError), match=error):
        compiled(queries(batch=2), cache.k_cache, cache.v_cache, **arguments)
    assert torch.equal(cache.k_cache, before.k_cache) and torch.equal(cache.v_cache, before.v_cache)


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (9, 9)}, {"attention_chunk": 16}], ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("is_pack", [False, True])
@pytest.mark.parametrize("own_positions", [None, (3, 50, 20, 0)])
def test_rotation(mask, interleaved, is_pack, own_positions):
    """New keys by their places; queries by theirs under a mask, else all by that of the first."""
    keys, values = sequences()
    cache, q = fill("left_padded", keys, values, CAPACITY), queries()
    angles = torch.randn(70, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    factors = torch.complex(cos.double(), sin.double())
    new_k, new_v = randn(4, SEQLEN_Q, KV_HEADS, HEAD_DIM, seed=5), randn(4, SEQLEN_Q, KV_HEADS, VALUE_DIM, seed=6)
    starts = cache.arguments["cache_seqlens"].clone()
    places = (starts if own_positions is None else int32(*own_positions)).long()
    steps = torch.arange(SEQLEN_Q)
    turned_k = torch.stack([turned(x, p + steps, factors, interleaved) for x, p in zip(new_k, places)])
    turned_q = torch.stack([turned(x, p + steps * bool(mask), factors, interleaved) for x, p in zip(q, places)])
    own = {} if own_positions is None else {"rotary_seqlens": int32(*own_positions)}
    if own or is_pack or "attention_chunk" in mask:
        offsets = {"cu_seqlens_q": int32(0, 3, 6, 9, 12), "max_seqlen_q": 3} if is_pack else {}
        out = flash_attn_3.flash_attn_with_kvcache(
            q.flatten(0, 1) if is_pack else q, cache.k_cache, cache.v_cache, new_k, new_v, None, cos, sin,
            rotary_interleaved=interleaved, **offsets, **own, **cache.arguments, **mask,
        )  # fmt: skip
    else:
        out = flash_attn_with_kvcache(
            q, cache.k_cache, cache.v_cache, new_k, new_v, cos, sin, rotary_interleaved=interleaved, **cache.arguments,
            **mask,
        )  # fmt: skip
    rounding = 2.0**-8
    for b, start in enumerate(starts.tolist()):
        appended = cache.k_cache[b, start : start + SEQLEN_Q]
        torch.testing.assert_close(appended.double(), turned_k[b], rtol=rounding, atol=1e-6)
        assert torch.equal(appended[..., 16:], new_k[b, :, :, 16:])
        pad = int(cache.arguments["cache_leftpad"][b])
        # The queries as ours are rounded: to bf16 once, of what is exact but for fp32.
        expected = flash_attn_func(
            turned_q[b : b + 1].bfloat16(), cache.k_cache[b : b + 1, pad : start + SEQLEN_Q],
            cache.v_cache[b : b + 1, pad : start + SEQLEN_Q], **mask,
        )  # fmt: skip
        actual = out.view(4, SEQLEN_Q, HEADS, VALUE_DIM)[b : b + 1]
        assert (actual.double() - expected.double()).norm() <= rounding * expected.double().norm()


@pytest.mark.parametrize("form", ["plain", "paged", "left_padded"])
def test_queries_of_unequal_lengths(form):
    """FlashAttention-3's cu_seqlens_q, as chunks of prompts beside decoded tokens."""
    keys, values = sequences()
    cache = fill(form, keys, values, CAPACITY)
    arguments = {name.replace("block_table", "page_table"): x for name, x in cache.arguments.items()}
    q = randn(14, HEADS, HEAD_DIM, seed=1)
    out, lse, *rest = flash_attn_3.flash_attn_with_kvcache(
        q, cache.k_cache, cache.v_cache, cu_seqlens_q=int32(0, 9, 10, 10, 13), max_seqlen_q=9, causal=True,
        attention_chunk=16, return_softmax_lse=True, **arguments,
    )  # fmt: skip
    assert [x.shape for x in rest] == [(0,), (0,)]
    for b, rows in ((0, slice(0, 9)), (1, slice(9, 10)), (3, slice(10, 13))):
        expected = flash_attn_func(
            q[None, rows], keys[b][None], values[b][None], causal=True, attention_chunk=16, return_attn_probs=True
        )
        assert torch.equal(out[rows], expected[0][0]) and torch.equal(lse[:, rows], expected[1][0])
    assert not out[13].any() and (lse[:, 13] == -torch.inf).all()


def test_no_key_in_flash_attention_3():
    keys, values = sequences()
    cache = fill("plain", keys, values, CAPACITY)
    _, lse, *_ = flash_attn_3.flash_attn_with_kvcache(
        queries(), cache.k_cache, cache.v_cache, return_softmax_lse=True, **cache.arguments
    )
    assert (lse[2] == -torch.inf).all() and lse[[0, 1, 3]].isfinite().all()


def test_private_forward_of_flash_attention_3():
    """With its names for the same arguments, as megatron-core calls it."""
    keys, values = sequences()
    new_k, new_v = randn(4, 3, KV_HEADS, HEAD_DIM, seed=5), randn(4, 3, KV_HEADS, VALUE_DIM, seed=6)
    first, second = (fill("paged", keys, values, CAPACITY) for _ in range(2))
    expected = flash_attn_with_kvcache(
        queries(), first.k_cache, first.v_cache, new_k, new_v, causal=True, return_softmax_lse=True, **first.arguments
    )
    names = {"cache_seqlens": "seqused_k", "block_table": "page_table"}
    arguments = {names[name]: x for name, x in second.arguments.items()}
    out, lse, *_ = flash_attn_3._flash_attn_forward(
        queries(), second.k_cache, second.v_cache, new_k, new_v, causal=True, **arguments
    )
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    torch.testing.assert_close(second.k_cache, first.k_cache, rtol=0, atol=0, equal_nan=True)


@forms
def test_compiled(form):
    """One graph, whose appended rows reach the cache."""
    keys, values = sequences()
    caches = [fill(form, keys, values, CAPACITY) for _ in range(2)]
    new_k, new_v = randn(4, 3, KV_HEADS, HEAD_DIM, seed=5), randn(4, 3, KV_HEADS, VALUE_DIM, seed=6)
    compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    results = [
        function(queries(), cache.k_cache, cache.v_cache, new_k, new_v, causal=True, **cache.arguments)
        for function, cache in zip((flash_attn_with_kvcache, compiled), caches)
    ]
    assert torch.equal(*results)
    torch.testing.assert_close(caches[1].k_cache, caches[0].k_cache, rtol=0, atol=0, equal_nan=True)


@forms
def test_nothing_is_read_on_the_host(form):
    """Tensors without values go through, as those on a GPU do without being waited for."""
    keys, values = sequences()
    cache = fill(form, keys, values, CAPACITY)
    new = randn(4, 3, KV_HEADS, HEAD_DIM), randn(4, 3, KV_HEADS, VALUE_DIM), randn(70, 8), randn(70, 8)
    tensors = [x.to("meta") for x in (queries(), cache.k_cache, cache.v_cache, *new)]
    arguments = {name: x.to("meta") for name, x in cache.arguments.items()}
    assert flash_attn_with_kvcache(*tensors, causal=True, **arguments).shape == (4, SEQLEN_Q, HEADS, VALUE_DIM)


def test_there_is_no_gradient():
    keys, values = sequences()
    cache, q = fill("plain", keys, values, CAPACITY), queries().requires_grad_()
    new_k = randn(4, 3, KV_HEADS, HEAD_DIM).requires_grad_()
    out = flash_attn_with_kvcache(
        q, cache.k_cache, cache.v_cache, new_k, randn(4, 3, KV_HEADS, VALUE_DIM), **cache.arguments
    )
    assert not out.requires_grad and not cache.k_cache.requires_grad


def test_nothing_to_do():
    k_cache, v_cache = randn(2, 8, KV_HEADS, HEAD_DIM), randn(2, 8, KV_HEADS, VALUE_DIM)
    assert flash_attn_with_kvcache(queries(0, 2), k_cache, v_cache, cache_seqlens=3).shape == (2, 0, HEADS, VALUE_DIM)
    out = flash_attn_with_kvcache(queries(3, 2), k_cache[:, :0], v_cache[:, :0])
    assert out.shape == (2, 3, HEADS, VALUE_DIM) and not out.any()
    assert flash_attn_with_kvcache(queries(3, 0), k_cache, v_cache, cache_seqlens=int32()).shape[0] == 0


def test_visible_keys_are_those_of_the_cached_ones():
    """The mask of the check above, said once more: the last query has the last cached key, new ones included."""
    assert visible_keys(2, 5, True).tolist() == [[True] * 4 + [False], [True] * 5]
    q, k_cache = torch.zeros(1, 2, 1, 8).bfloat16(), torch.zeros(1, 9, 1, 8).bfloat16()
    v_cache = torch.arange(9.0).view(1, 9, 1, 1).expand(1, 9, 1, 8).bfloat16().contiguous()
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=5, causal=True)
    assert out[0, :, 0, 0].tolist() == [1.5, 2.0]


def test_it_is_exported():
    assert dash_attn.flash_attn_with_kvcache is flash_attn_with_kvcache


@pytest.mark.parametrize("batch, capacity", [(0, 3), (1, 0), (3, 0)])
def test_a_cache_without_rows(batch, capacity):
    q, cache = queries(batch=batch), randn(batch, capacity, KV_HEADS, HEAD_DIM)
    expected = flash_attn_func(q, cache, cache, return_attn_probs=True)[:2]
    for x, y in zip(flash_attn_with_kvcache(q, cache, cache, return_softmax_lse=True), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("columns", [0, 2])
def test_a_cache_without_blocks(columns):
    cache, table = randn(0, 16, KV_HEADS, HEAD_DIM), int32(*[0] * 3 * columns).view(3, columns)
    for length in (0, int32(0, 0, 0)):
        out = flash_attn_with_kvcache(queries(batch=3), cache, cache, cache_seqlens=length, block_table=table)
        assert out.shape == (3, SEQLEN_Q, HEADS, HEAD_DIM) and not out.any()

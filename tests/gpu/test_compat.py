"""dash_attn.compat and the cache of keys and values on the GPU: bits, host waits, graphs."""

import functools
import subprocess
import sys

import pytest
import torch
from cache_support import FORMS, fill
from products import pairwise

from dash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.compat import flash_attn_2, flash_attn_3

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (200, 70)},
    "causal_window": {"causal": True, "window_size": (130, 0)},
}
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
REPEATS = 10


def randn(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def qkv(seqlen_q, seqlen_k, head_dim=128, value_dim=None, batch=2, heads=8, kv_heads=2):
    return (
        randn(batch, seqlen_q, heads, head_dim, seed=1),
        randn(batch, seqlen_k, kv_heads, head_dim, seed=2),
        randn(batch, seqlen_k, kv_heads, value_dim or head_dim, seed=3),
    )


def kernels_of(function):
    """Names of the ops of ours that ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return [event.name for event in profile.events() if event.name.startswith("dash_attn_C::")]


def gradients_of(module, dout, tensors, out, lse, mask, offsets=()):
    gradients = [torch.full_like(x, torch.nan) for x in tensors]
    left, right = mask.get("window_size", (-1, -1))
    causal, scale = mask.get("causal", False), tensors[0].shape[-1] ** -0.5
    if module is flash_attn_3:
        lengths = (*offsets[:2], None, None, *offsets[2:]) if offsets else (None,) * 6
        arguments = dict(softmax_scale=scale, is_causal=causal, window_size_left=left, window_size_right=right)
        softmax_d = module._flash_attn_backward(dout, *tensors, out, lse, *lengths, *gradients, **arguments)
    else:
        function = module._flash_attn_varlen_backward if offsets else module._flash_attn_backward
        options = (0.0, scale, causal, left, right, 0.0, None, False)
        softmax_d = function(dout, *tensors, out, lse, *gradients, *offsets, *options)
    return gradients, softmax_d


def outputs_of(module, tensors, mask, offsets=()):
    left, right = mask.get("window_size", (-1, -1))
    causal, scale = mask.get("causal", False), tensors[0].shape[-1] ** -0.5
    sides = dict(causal=causal, window_size_left=left, window_size_right=right, softmax_scale=scale)
    if module is flash_attn_3:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return module._flash_attn_forward(*tensors, **dict(zip(names, offsets)), **sides)[:2]
    options = dict(dropout_p=0.0, softcap=0.0, alibi_slopes=None, return_softmax=False, **sides)
    function = module._flash_attn_varlen_forward if offsets else module._flash_attn_forward
    return function(*tensors, *offsets, **options)[:2]


@pytest.mark.parametrize("module", [flash_attn_2, flash_attn_3], ids=["flash_attn_2", "flash_attn_3"])
@pytest.mark.parametrize("is_pack", [False, True])
@masks
def test_private_functions_have_the_bits_of_the_public_ones(module, mask, is_pack, perturbation):
    """In every run; under the causal mask the first queries see no key."""
    tensors, offsets = list(qkv(700, 550)), ()
    if is_pack:
        tensors = [x.flatten(0, 1) for x in tensors]
        starts = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 900, 900, 1400], [0, 800, 850, 1100]))
        offsets = (*starts, torch.tensor(900, device="cuda"), 800)
    dout = randn(*tensors[0].shape, seed=4)
    inputs = [x.clone().requires_grad_() for x in tensors]
    function = flash_attn_varlen_func if is_pack else flash_attn_func
    expected, expected_lse, _ = function(*inputs, *offsets, return_attn_probs=True, **mask)
    expected_gradients = torch.autograd.grad(expected, inputs, dout)
    for _ in range(REPEATS):
        perturbation.enqueue(2)
        out, lse = outputs_of(module, tensors, mask, offsets)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse.masked_fill(expected_lse == torch.inf, -torch.inf))
        for marker in (-torch.inf, torch.inf):
            marked = lse.masked_fill(lse == -torch.inf, marker)
            gradients, softmax_d = gradients_of(module, dout, tensors, out, marked, mask, offsets)
            assert all(map(torch.equal, gradients, expected_gradients))
    if mask.get("causal"):
        assert (lse == -torch.inf).any()
    d = (dout.double() * out.double()).sum(-1).transpose(-1, -2)
    if is_pack:
        places = torch.cat((torch.arange(900), torch.arange(900, 1400) + 2 * 128)).cuda()
        torch.testing.assert_close(softmax_d[:, places].double(), d, rtol=1e-5, atol=1e-4)
    else:
        torch.testing.assert_close(softmax_d[..., : d.shape[-1]].double(), d, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("module", [flash_attn_2, flash_attn_3], ids=["flash_attn_2", "flash_attn_3"])
def test_the_kernels_run(module):
    tensors = qkv(256, 256)
    dout = randn(*tensors[0].shape, seed=4)

    def both():
        gradients_of(module, dout, tensors, *outputs_of(module, tensors, {}), {})

    assert kernels_of(both) == ["dash_attn_C::forward", "dash_attn_C::backward"]


LENGTHS, CAPACITY = (1000, 129, 0, 300), 1100


def sequences(head_dim=128, value_dim=128, kv_heads=2, lengths=LENGTHS):
    keys = [randn(n, kv_heads, head_dim, seed=10 + b) for b, n in enumerate(lengths)]
    return keys, [randn(n, kv_heads, value_dim, seed=20 + b) for b, n in enumerate(lengths)]


# Forms are a matter of pages and lengths, masks one of the kernel.
@pytest.mark.parametrize("form, seqlen_q, mask", pairwise(FORMS, (1, 5, 130), MASKS), ids=str)
def test_every_form_of_a_cache_has_the_bits_of_a_dense_call(form, seqlen_q, mask):
    """Also beside rows without keys that hold NaN, and with more rows appended."""
    mask = MASKS[mask]
    keys, values = sequences()
    cache, q = fill(form, keys, values, CAPACITY), randn(4, seqlen_q, 8, 128, seed=1)
    new_k, new_v = randn(4, 3, 2, 128, seed=5), randn(4, 3, 2, 128, seed=6)
    for new in ((), (new_k, new_v)):
        out, lse = flash_attn_with_kvcache(
            q, cache.k_cache, cache.v_cache, *new, return_softmax_lse=True, **cache.arguments, **mask
        )
        for b, (k, v) in enumerate(zip(keys, values)):
            if new:
                k, v = torch.cat((k, new_k[b])), torch.cat((v, new_v[b]))
            alone = flash_attn_func(q[b : b + 1], k[None], v[None], return_attn_probs=True, **mask)
            assert torch.equal(out[b], alone[0][0]) and torch.equal(lse[b], alone[1][0])


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8, 12, 16, 24, 48, 64, 100, 256])
@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_pages_of_any_size(dims, block_size):
    """Beside rows of NaN; for one query, which has a short tile, and for two tiles of queries."""
    keys, values = sequences(*dims)
    cache = fill("paged", keys, values, CAPACITY, block_size=block_size)
    for seqlen_q in (1, 230):
        q = randn(4, seqlen_q, 8, dims[0], seed=1)
        out, lse = flash_attn_with_kvcache(
            q, cache.k_cache, cache.v_cache, causal=True, return_softmax_lse=True, **cache.arguments
        )
        for b, (k, v) in enumerate(zip(keys, values)):
            alone = flash_attn_func(q[b : b + 1], k[None], v[None], causal=True, return_attn_probs=True)
            assert torch.equal(out[b], alone[0][0]) and torch.equal(lse[b], alone[1][0])


def test_many_sequences_with_pages_that_cut_boxes():
    """More query tiles than SMs, whose rows are copied one by one: the next tile begins beside the last copies."""
    lengths = [(37 * i) % 600 for i in range(400)]
    keys, values = sequences(kv_heads=1, lengths=lengths)
    cache, q = fill("paged", keys, values, 616, block_size=7), randn(400, 2, 8, 128, seed=1)
    out, lse = flash_attn_with_kvcache(
        q, cache.k_cache, cache.v_cache, causal=True, return_softmax_lse=True, **cache.arguments
    )
    offsets = torch.tensor([0, *lengths], device=q.device).cumsum(0, dtype=torch.int32)
    pack = {"cu_seqlens_k": offsets, "max_seqlen_q": 2, "max_seqlen_k": 600}
    pack |= {"cu_seqlens_q": torch.arange(0, 801, 2, device=q.device, dtype=torch.int32)}
    alone = flash_attn_varlen_func(
        q.flatten(0, 1), torch.cat(keys), torch.cat(values), **pack, causal=True, return_attn_probs=True
    )
    assert torch.equal(out.flatten(0, 1), alone[0])
    assert torch.equal(lse.transpose(1, 2).flatten(0, 1), alone[1].transpose(0, 1))


@pytest.mark.parametrize("form", ["plain", "indexed", "paged"])
def test_a_step_of_decoding_launches_three_kernels(form):
    keys, values = sequences()
    cache = fill(form, keys, values, CAPACITY)
    q, new_k, new_v = randn(4, 1, 8, 128, seed=1), randn(4, 1, 2, 128, seed=5), randn(4, 1, 2, 128, seed=6)

    def launched(*new):
        call = functools.partial(
            flash_attn_with_kvcache, q, cache.k_cache, cache.v_cache, *new, causal=True, **cache.arguments
        )
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]

    # No plan: the tiles are fewer than the SMs.
    forward, check = launched()
    assert "forward_kernel" in forward and "check_kernel" in check
    assert ["append_kernel" in name for name in launched(new_k, new_v)] == [True, False, False]


@pytest.mark.parametrize("sm_margin", [0, 100])
def test_what_follows_a_step_of_decoding_follows_its_forward(sm_margin):
    """The kernel that ends a step begins beside the forward, which takes long here."""
    q, k, v = randn(1, 1, 8, 128, seed=1), randn(1, 200_000, 1, 128, seed=2), randn(1, 200_000, 1, 128, seed=3)
    lengths = torch.tensor([200_000], dtype=torch.int32, device="cuda")
    step = functools.partial(
        flash_attn_3.flash_attn_with_kvcache, q, k, v, cache_seqlens=lengths, causal=True, sm_margin=sm_margin
    )
    expected, copies = step(), [torch.zeros_like(q) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in copies:
            copy.copy_(step())
    graph.replay()
    assert all(torch.equal(copy, expected) for copy in copies)


WRONG_VALUES = {
    "too long": ("[65, 3]", "[[0, 1], [2, 3]]", "", "cache_seqlens"),
    "negative": ("[3, -1]", "[[0, 1], [2, 3]]", "", "cache_seqlens"),
    "no block": ("[33, 3]", "[[0, -1], [2, 3]]", "", "block_table"),
    "beyond the blocks": ("[33, 3]", "[[0, 4], [2, 3]]", "", "block_table"),
    "no room": ("[64, 3]", "[[0, 1], [2, 3]]", "x, x", "cache_seqlens"),
    "no block to write": ("[32, 3]", "[[0, -1], [2, 3]]", "x, x", "block_table"),
}


@pytest.mark.parametrize("head_dim, layout", [(64, "sliced"), (64, "transposed"), (64, "heads first"), (20, "usual")])
def test_appending_rows_of_any_layout(head_dim, layout):
    """Also where 16 bytes at a time cannot be moved, with more rows than the kernel has blocks."""
    rows, batch = 520, 4
    shape = (batch, rows, 2, head_dim)
    if layout == "transposed":
        new = [randn(batch, rows, head_dim, 2, seed=seed).transpose(2, 3) for seed in (1, 2)]
    elif layout == "sliced":
        new = [randn(batch, rows, 2, head_dim + 1, seed=seed)[..., 1:] for seed in (1, 2)]
    else:
        new = [randn(*shape, seed=seed) for seed in (1, 2)]
    caches = [randn(batch, 1000, 2, head_dim, seed=seed) for seed in (3, 4)]
    if layout == "heads first":
        caches = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches]
    lengths = torch.tensor([0, 7, 480, 100], dtype=torch.int32, device="cuda")
    expected = [x.clone() for x in caches]
    for cache, rows_of_new in zip(expected, new):
        for i, length in enumerate(lengths.tolist()):
            cache[i, length : length + rows] = rows_of_new[i]
    q = randn(batch, 1, 4, head_dim, seed=5)
    out = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lengths, causal=True)
    assert all(map(torch.equal, caches, expected))
    ends = lengths + rows
    assert torch.equal(out, flash_attn_with_kvcache(q, *expected, cache_seqlens=ends, causal=True))


CALL_WITH_WRONG_VALUES = """
import dash_attn, torch
integers = lambda values: torch.tensor(values * {copies}, dtype=torch.int32, device="cuda")
q, x = (torch.randn(2 * {copies}, 1, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
caches = [torch.randn(4, 32, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
tables = dict(cache_seqlens=integers({seqlens}), block_table=integers({table}))
dash_attn.flash_attn_with_kvcache(q, *caches, {new} **tables)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(
    "wrong, copies", [*((wrong, 1) for wrong in WRONG_VALUES), ("too long", 100), ("no block", 100)]
)
def test_values_out_of_range_are_an_error_on_the_device(wrong, copies):
    """In a process of its own, which can do no more with the device. With more sequences than SMs, the plan refuses."""
    seqlens, table, new, argument = WRONG_VALUES[wrong]
    new = f"{new}," if new else ""
    program = CALL_WITH_WRONG_VALUES.format(seqlens=seqlens, table=table, new=new, copies=copies)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode != 0 and "dash_attn: " in result.stdout and argument in result.stdout
    assert "CUDA error" in result.stderr


@pytest.mark.parametrize("dims, step, mask", pairwise(HEAD_DIMS, (1, 3, 64, 200), ("causal", "causal_window")), ids=str)
def test_decoding_has_the_bits_of_one_call(dims, step, mask):
    """Prefill and decode: random inputs, any chunks, rows of two sequences at different places of a paged cache."""
    mask = MASKS[mask]
    q, k, v = qkv(333, 333, *dims)
    expected, expected_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **mask)
    cache = fill("paged", [k[0, :0], k[1, :0]], [v[0, :0], v[1, :0]], 340, block_size=16)
    del cache.arguments["cache_seqlens"]
    starts = range(0, 333, step) if step > 1 else [*range(0, 333, 11), 332]
    filled = 0
    for start in starts:
        if start > filled:  # rows between those that are compared
            rows = slice(filled, start)
            flash_attn_with_kvcache(
                q[:, :1], cache.k_cache, cache.v_cache, k[:, rows], v[:, rows], cache_seqlens=filled, **cache.arguments
            )
        rows = slice(start, min(start + step, 333))
        out, lse = flash_attn_with_kvcache(
            q[:, rows], cache.k_cache, cache.v_cache, k[:, rows], v[:, rows], cache_seqlens=start,
            return_softmax_lse=True, **cache.arguments, **mask,
        )  # fmt: skip
        filled = rows.stop
        assert torch.equal(out, expected[:, rows]) and torch.equal(lse, expected_lse[:, :, rows])


@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 2), (8, 1), (12, 4)])
def test_decoding_does_not_depend_on_the_batch(heads, kv_heads):
    keys, values = sequences(kv_heads=kv_heads)
    cache, q = fill("plain", keys, values, CAPACITY), randn(4, 1, heads, 128, seed=1)
    out = flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, causal=True, **cache.arguments)
    for batch in ([0], [3, 1], [2, 2, 0, 3, 1] * 13):
        few = fill("plain", [keys[b] for b in batch], [values[b] for b in batch], CAPACITY + 77)
        rows = flash_attn_with_kvcache(q[batch], few.k_cache, few.v_cache, causal=True, **few.arguments)
        assert torch.equal(rows, out[batch])


@pytest.mark.parametrize("takes_none", [(1,), (2, 3), (0, 1, 2, 3)], ids=str)
def test_sequences_that_fill_up_a_batch(takes_none):
    """Length -1 and blocks -1, as transformers asks for: they write nothing, and the host does not look."""
    keys, values = sequences()
    cache, few = (fill("paged", keys, values, CAPACITY) for _ in range(2))
    q, new_k, new_v = randn(4, 1, 8, 128, seed=1), randn(4, 1, 2, 128, seed=5), randn(4, 1, 2, 128, seed=6)
    others = [b for b in range(4) if b not in takes_none]
    few.arguments = {name: x[others] for name, x in few.arguments.items()}
    rows = q[others], few.k_cache, few.v_cache, new_k[others], new_v[others]
    expected = flash_attn_with_kvcache(*rows, causal=True, **few.arguments)
    for b in takes_none:
        cache.arguments["cache_seqlens"][b] = -1
        cache.arguments["block_table"][b] = -1
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, new_k, new_v, causal=True, **cache.arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out[others], expected) and not out[list(takes_none)].any()
    torch.testing.assert_close(cache.k_cache, few.k_cache, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.v_cache, few.v_cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_rotation", [False, True])
def test_the_host_waits_for_nothing_and_graphs_repeat(form, has_rotation):
    """A captured decoding step, replayed as the cache fills."""
    keys, values = sequences()
    caches = [fill(form, keys, values, CAPACITY) for _ in range(2)]
    rotation = {"rotary_cos": randn(CAPACITY + 20, 32), "rotary_sin": randn(CAPACITY + 20, 32)} if has_rotation else {}
    q, new_k, new_v = randn(4, 1, 8, 128, seed=1), randn(4, 1, 2, 128, seed=5), randn(4, 1, 2, 128, seed=6)

    def step(cache):
        out = flash_attn_with_kvcache(
            q, cache.k_cache, cache.v_cache, new_k, new_v, causal=True, **rotation, **cache.arguments
        )
        cache.arguments["cache_seqlens"].add_(1)
        return out

    eager, captured = caches
    spare = fill(form, keys, values, CAPACITY)
    step(spare)  # loads the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = [step(eager) for _ in range(8)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(captured)
    for rows in expected:
        graph.replay()
        assert torch.equal(out, rows)
    torch.testing.assert_close(captured.k_cache, eager.k_cache, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(captured.v_cache, eager.v_cache, rtol=0, atol=0, equal_nan=True)

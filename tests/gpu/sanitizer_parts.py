"""For compute-sanitizer: calls that carry sums, in few chunks of small shapes and for every row of the tile
table, and decoding with each form of a cache.

compute-sanitizer --tool racecheck python tests/gpu/sanitizer_parts.py
"""

import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]

import torch
from cache_support import fill
from part_checks import check_parts
from test_parts_on_gpu import SIZES

from dash_attn import flash_attn_func, flash_attn_with_kvcache

MASKS = {"full": {"causal": False}, "causal": {"causal": True}, "window": {"causal": False, "window": (200, 30)}}

for head_dims, size in SIZES.items():
    for name, mask in MASKS.items():
        shape = dict(batch=1, heads=4, kv_heads=1, rows_q=size + 37, rows_k=size + 37, head_dim=head_dims[0])
        check_parts(**shape, **mask, value_head_dim=head_dims[1], device="cuda", size=size, lse_gradient=True, orders=1)
        print(f"ok    {head_dims} {name}", flush=True)

for head_dim in (64, 128):
    keys, values = ([torch.randn(n, 2, head_dim).cuda().bfloat16() for n in (2100, 70, 0)] for _ in range(2))
    new_k, new_v = (torch.randn(3, 2, 2, head_dim).cuda().bfloat16() for _ in range(2))
    for form, block_size in (("plain", 16), ("indexed", 16), ("paged", 64), ("paged", 6)):
        for queries in (2, 70):
            cache = fill(form, keys, values, 2110, block_size=block_size)
            q = torch.randn(3, queries, 16, head_dim).cuda().bfloat16()
            out = flash_attn_with_kvcache(q, cache.k_cache, cache.v_cache, new_k, new_v, causal=True, **cache.arguments)
            for i in range(3):
                k, v = (torch.cat(x)[None] for x in ((keys[i], new_k[i]), (values[i], new_v[i])))
                assert torch.equal(out[i], flash_attn_func(q[i : i + 1], k, v, causal=True)[0])
            print(f"ok    decoding of {queries} queries at {head_dim}, {form}, blocks of {block_size}", flush=True)

"""The kernels that carry sums, in few chunks of small shapes, for compute-sanitizer: every row of the tile table.

compute-sanitizer --tool racecheck python tests/gpu/sanitizer_parts.py
"""

import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]

from part_checks import check_parts
from test_parts_on_gpu import SIZES

MASKS = {"full": {"causal": False}, "causal": {"causal": True}, "window": {"causal": False, "window": (200, 30)}}

for head_dims, size in SIZES.items():
    for name, mask in MASKS.items():
        shape = dict(batch=1, heads=4, kv_heads=1, rows_q=size + 37, rows_k=size + 37, head_dim=head_dims[0])
        check_parts(**shape, **mask, value_head_dim=head_dims[1], device="cuda", size=size, lse_gradient=True, orders=1)
        print(f"ok    {head_dims} {name}", flush=True)

"""Runs one backward for a profiler, after one that loads the kernels.

ncu --profile-from-start off python -m benchmarks.profile_one --head-dim 128 --mask causal --seqlen 8192
ncu --profile-from-start off python -m benchmarks.profile_one --mask window --window 1023 0 --pack lognormal
"""

import argparse

import torch

from benchmarks import peers
from benchmarks.packs import PACKS
from benchmarks.shapes import Shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--mask", choices=("full", "causal", "window"), default="full")
    parser.add_argument("--window", type=int, nargs=2, default=(-1, -1), help="left and right side, for --mask window")
    parser.add_argument("--chunk", type=int, default=0, help="keys per chunk, for --mask window")
    parser.add_argument("--pack", choices=PACKS, help="a variable-length batch, instead of --seqlen and --batch")
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--dtype", choices=peers.DTYPES, default="bf16")
    parser.add_argument("--schedule", default="auto")
    a = parser.parse_args()
    seqlen, batch = (max(PACKS[a.pack]), len(PACKS[a.pack])) if a.pack else (a.seqlen, a.batch)
    shape = Shape(
        a.dtype, a.head_dim, a.heads, a.kv_heads or a.heads, a.mask, seqlen, batch, a.pack, tuple(a.window), a.chunk
    )
    variant = peers.Variant(peers.DashAttn.name, a.schedule, True)
    calls = peers.DashAttn().prepare(variant, shape, peers.random_tensors(shape, torch.device("cuda")))
    calls["backward"]()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    calls["backward"]()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()

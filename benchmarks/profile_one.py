"""One backward for a profiler, after one that loads the kernels.

    ncu --profile-from-start off python -m benchmarks.profile_one --head-dim 128 --mask causal --seqlen 8192
"""

import argparse

import torch

from benchmarks import peers
from benchmarks.shapes import Shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--mask", choices=("full", "causal"), default="full")
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--dtype", choices=peers.DTYPES, default="bf16")
    parser.add_argument("--schedule", default="auto")
    a = parser.parse_args()
    shape = Shape(a.dtype, a.head_dim, a.heads, a.kv_heads or a.heads, a.mask, a.seqlen, a.batch)
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

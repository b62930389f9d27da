"""Small shapes for compute-sanitizer: both passes, every policy, both masks, both head dims, ragged and unequal
lengths.

    compute-sanitizer --tool memcheck python tests/gpu/sanitizer_case.py

Inputs and reference are computed on the CPU, so that the only kernels under the tool are ours.
"""

import argparse
import pathlib
import sys

import torch

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]

import gpu_support as support
from float64_reference import attention_float64, relative_error
from gpu_support import Inputs, Problem

# The last one's query heads are split over work tiles.
SHAPES = ((200, 330, 4, 2), (330, 200, 2, 2), (1, 65, 2, 1), (130, 65, 128, 1))
# Far above the rounding of bf16, far below a wrong tile.
TOLERANCE = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help=f"how many of {SHAPES} (lengths, heads)")
    parser.add_argument("--passes", nargs="+", choices=("forward", "backward"), default=["forward", "backward"])
    arguments = parser.parse_args()
    failures = 0

    def report(what: str, outputs: dict[str, torch.Tensor], exact) -> None:
        nonlocal failures
        errors = {name: relative_error(x.cpu(), getattr(exact, name)) for name, x in outputs.items()}
        wrong = any(not error < TOLERANCE for error in errors.values())
        failures += wrong
        row = " ".join(f"{name} {error:.1e}" for name, error in errors.items())
        print(f"{'WRONG' if wrong else 'ok   '} {what}: {row}", flush=True)

    for head_dim in arguments.head_dims:
        for causal in (False, True):
            for seqlen_q, seqlen_k, heads, kv_heads in SHAPES[: arguments.shapes]:
                problem = Problem(1, seqlen_q, seqlen_k, heads, kv_heads, head_dim, causal)
                q, k, v, dout = support.random_qkv_dout(problem, "cpu")
                exact = attention_float64(q, k, v, dout, causal=causal)
                on_gpu = (x.cuda() for x in (dout, q, k, v, exact.out.to(q.dtype), exact.softmax_lse.float()))
                inputs = Inputs(*on_gpu)
                if "forward" in arguments.passes:
                    out, _ = torch.ops.dash_attn.forward(inputs.q, inputs.k, inputs.v, *support.settings(problem))
                    report(f"{problem} forward", {"out": out}, exact)
                for policy in support.schedules(causal) if "backward" in arguments.passes else ():
                    like = zip(support.GRADIENTS, (q, k, v))
                    gradients = {name: torch.empty(x.shape, dtype=x.dtype).cuda() for name, x in like}
                    support.backward_into(gradients, inputs, problem, policy)
                    report(f"{problem} {policy}", gradients, exact)
    print(f"{failures} wrong", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

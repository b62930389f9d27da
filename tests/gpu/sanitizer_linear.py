"""Small linear layers with bits of dropout for compute-sanitizer, as sanitizer_case.py has attention.

    compute-sanitizer --tool memcheck python tests/gpu/sanitizer_linear.py

Operands and expected results are made on the CPU, so that the only kernels under the tool are ours.
"""

import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # float64_reference

import linear_checks  # noqa: E402

from dash_attn.dropout import DropoutState, dropout_bits, linear_with_dropout_bits

SHAPES = [(1, 8, 8), (129, 264, 72), (300, 520, 328)]
SIZES = dict(batch=2, heads=2, seqlen_q=70, seqlen_k=600)
MODES = [dict(p=0.1), dict(p=0.125), dict(p=0.1, rounds=10), dict(p=0.1, mapping="flash_attention_2")]


def main() -> int:
    failures = 0
    for number, shape in enumerate(SHAPES):
        for mode in MODES:
            given = linear_checks.operands(shape, torch.float16, "cpu", bias=number != 1, whole=True)
            on_gpu = [t.cuda() for t in given.tensors()]
            state = DropoutState.of(3, 5)
            y, found = linear_with_dropout_bits(
                *on_gpu, state=DropoutState(state.rng_state.cuda()), keep_bits=True, **SIZES, **mode
            )
            same_bits = torch.equal(found.bits.cpu(), dropout_bits(state, **SIZES, **mode).bits)
            same_y = torch.equal(y.cpu(), given.exact().to(torch.float16))
            failures += not (same_bits and same_y)
            print(f"{shape} {mode}: y {'ok' if same_y else 'WRONG'}, bits {'ok' if same_bits else 'WRONG'}", flush=True)
    print(f"{failures} wrong", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

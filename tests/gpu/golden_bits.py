"""Digests of outputs and gradients over fixed inputs, to compare versions of the kernels bit by bit.

    python tests/gpu/golden_bits.py --write                             golden_bits.json, which the tests check
    python tests/gpu/golden_bits.py --json after.json                   the same digests into another file
    python tests/gpu/golden_bits.py --json before.json --library PATH   of another compiled library, older/_C.abi3.so
    python tests/gpu/golden_bits.py --compare before.json after.json    what differs; exit status 1 where bits do

The inputs are integers from a hash of each element's number, mapped to values near the normal distribution by
operations that are exact, so that every machine and every torch makes the same ones. Digests are of an H200; other
Hopper GPUs run the same instructions. With --library, nothing of this package is imported.
"""

import argparse
import ctypes
import dataclasses
import hashlib
import json
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks.library import POLICIES, Library

FILE = pathlib.Path(__file__).with_suffix(".json")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DIGITS = 16  # hexadecimal, of the SHA-256
NOT_DETERMINISTIC = ("atomic",)
# Each policy's mask, where it is defined for one only.
ONLY = {"shift": False, "symmetric_shift": True, "spt_descending": True}


@dataclasses.dataclass(frozen=True)
class Case:
    dtype: str
    head_dim: int
    causal: bool
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        lengths = f"{self.batch}x{self.seqlen_q}x{self.seqlen_k}"
        return f"{self.dtype} d{self.head_dim} h{self.heads}/{self.kv_heads} {mask} {lengths}"


# batch, seqlen_q, seqlen_k, heads, kv_heads: no length a multiple of a tile; fewer and more queries than keys; query
# heads that are split over work tiles; more KV tiles than a work tile's neighbours.
SHAPES = ((2, 515, 515, 4, 4), (2, 300, 700, 4, 2), (2, 700, 300, 8, 1), (1, 2049, 2049, 32, 1), (1, 4100, 4100, 3, 3))
PADDED = SHAPES[:2]


def cases() -> list[Case]:
    shapes = [(head_dim, shape) for head_dim in (64, 128) for shape in SHAPES]
    shapes += [(head_dim, shape) for head_dim in (96, 40) for shape in PADDED]
    return [Case(dtype, d, causal, *shape) for dtype in DTYPES for d, shape in shapes for causal in (False, True)]


def hashed(numbers: torch.Tensor) -> torch.Tensor:
    """32 well mixed bits of each int64 below 2^32. Every product stays below 2^63."""
    for _ in range(2):
        numbers = ((numbers ^ (numbers >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return numbers ^ (numbers >> 16)


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """(sum of twelve bytes - 1530) / 256: mean 0, standard deviation 1. Exact in fp32, then rounded to nearest even."""
    count = 1
    for size in shape:
        count *= size
    numbers = torch.arange(count, dtype=torch.int64, device=device)
    total = torch.full_like(numbers, -1530)
    for word in range(3):
        bits = hashed((numbers + hashed(torch.tensor(3 * seed + word, device=device))) & 0xFFFFFFFF)
        for byte in range(4):
            total += (bits >> (8 * byte)) & 0xFF
    return (total.to(torch.float32) / 256).to(dtype).view(shape)


def inputs(case: Case, device: str) -> tuple[torch.Tensor, ...]:
    """q, k, v and dout."""
    of_queries = (case.batch, case.seqlen_q, case.heads, case.head_dim)
    of_keys = (case.batch, case.seqlen_k, case.kv_heads, case.head_dim)
    shapes = (of_queries, of_keys, of_keys, of_queries)
    return tuple(values(shape, seed, DTYPES[case.dtype], device) for seed, shape in enumerate(shapes))


def digest(tensor: torch.Tensor) -> str:
    tensor = tensor.cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(tensor.data_ptr(), tensor.nbytes)).hexdigest()[:DIGITS]


class Package:
    """The installed package's ops, every policy that users can choose."""

    PACK, WINDOW = (None,) * 4, (-1, -1, 0)  # a dense batch, no window

    def __init__(self):
        import dash_attn  # noqa: F401  registers torch.ops.dash_attn
        from dash_attn import schedule

        self.fitting = schedule.fitting

    def forward(self, q, k, v, softmax_scale, causal):
        return torch.ops.dash_attn.forward(q, k, v, *self.PACK, softmax_scale, causal, *self.WINDOW)

    def backward(self, dout, q, k, v, out, softmax_lse, softmax_scale, causal, policy):
        gradients = tuple(torch.full_like(x, float("nan")) for x in (q, k, v))
        torch.ops.dash_attn.backward(
            dout, q, k, v, out, softmax_lse, *gradients, *self.PACK, softmax_scale, causal, *self.WINDOW, policy, 0
        )
        return gradients


class Raw:
    """The raw ops of a compiled library, every deterministic policy that it has."""

    def __init__(self, library: Library, policies: list[str]):
        self._library, self._policies = library, policies

    def fitting(self, *, causal: bool) -> list[str]:
        known = [policy for policy in self._policies if policy not in NOT_DETERMINISTIC]
        return [policy for policy in known if ONLY.get(policy, causal) == causal]

    def forward(self, q, k, v, softmax_scale, causal):
        out = torch.full_like(q, float("nan"))
        batch, seqlen_q, heads, _ = q.shape
        softmax_lse = torch.full((batch, heads, seqlen_q), float("nan"), dtype=torch.float32, device=q.device)
        self._library.forward(q, k, v, out, softmax_lse, softmax_scale, causal)
        return out, softmax_lse

    def backward(self, dout, q, k, v, out, softmax_lse, softmax_scale, causal, policy):
        gradients = tuple(torch.full_like(x, float("nan")) for x in (q, k, v))
        self._library.backward(dout, q, k, v, out, softmax_lse, *gradients, softmax_scale, causal, policy)
        return gradients


def digests(case: Case, ops: Package | Raw, device: str) -> dict[str, str]:
    """By "out", "softmax_lse" and "<policy> dq", "<policy> dk", "<policy> dv"."""
    q, k, v, dout = inputs(case, device)
    # A power of two: 1 / sqrt(head_dim) would be another constant's rounding.
    softmax_scale = 0.125
    out, softmax_lse = ops.forward(q, k, v, softmax_scale, case.causal)
    found = {"out": digest(out), "softmax_lse": digest(softmax_lse)}
    for policy in ops.fitting(causal=case.causal):
        gradients = ops.backward(dout, q, k, v, out, softmax_lse, softmax_scale, case.causal, policy)
        found |= {f"{policy} {name}": digest(x) for name, x in zip(("dq", "dk", "dv"), gradients)}
    return found


def differences(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> tuple[list[str], list[str]]:
    """A line for each case whose bits differ, naming what does; and one for what only one of the two has."""
    differ, alone = [], []
    for case in dict.fromkeys([*before, *after]):
        a, b = before.get(case, {}), after.get(case, {})
        changed = [name for name in a if name in b and a[name] != b[name]]
        if changed:
            differ.append(f"{case}: {', '.join(changed)}")
        for names, where in ((a.keys() - b.keys(), "before"), (b.keys() - a.keys(), "after")):
            if names:
                alone.append(f"{case}: only {where}: {', '.join(sorted(names))}")
    return differ, alone


def dumps(found: dict[str, dict[str, str]]) -> str:
    """JSON with a line for each case."""
    return "{\n" + ",\n".join(f" {json.dumps(case)}: {json.dumps(row)}" for case, row in found.items()) + "\n}\n"


def compare(before: pathlib.Path, after: pathlib.Path) -> int:
    a, b = (json.loads(path.read_text()) for path in (before, after))
    differ, alone = differences(a, b)
    for line in alone:
        print(line)
    for line in differ:
        print(f"DIFFERS {line}")
    common = sum(len(a[case].keys() & b[case].keys()) for case in a.keys() & b.keys())
    print(f"{common} digests in both; the bits of {len(differ)} of {len(a.keys() & b.keys())} cases differ")
    return 1 if differ else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--json", type=pathlib.Path, help="write the digests here")
    parser.add_argument("--library", type=pathlib.Path, help="a compiled _C*.so instead of the installed package")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="of the library, by number")
    parser.add_argument("--compare", type=pathlib.Path, nargs=2, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args(argv)
    if arguments.compare:
        return compare(*arguments.compare)
    target = FILE if arguments.write else arguments.json
    if target is None:
        parser.error("one of --write, --json and --compare is needed")
    if arguments.write and arguments.library:
        parser.error("--write is of the installed package: no --library")
    ops = Raw(Library(arguments.library, arguments.policies), arguments.policies) if arguments.library else Package()
    found = {str(case): digests(case, ops, "cuda") for case in cases()}
    target.write_text(dumps(found))
    print(f"{torch.cuda.get_device_name()}: {sum(map(len, found.values()))} digests of {len(found)} cases in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
import itertools
import json
import math
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks.library import POLICIES, Library

FILE = pathlib.Path(__file__).with_suffix(".json")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DIGITS = 16  # hexadecimal, of the SHA-256
YARDSTICKS = ("ascending", "atomic")
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
    window: tuple[int, int] = (-1, -1)
    # Queries and keys of each sequence of a pack, of batch 1 and as many queries and keys in all; empty: a dense batch.
    pack: tuple[tuple[int, int], ...] = ()
    column_bounds: int = 0  # of each key, in a mask by key columns; 0: there is no such mask

    @classmethod
    def of_pack(cls, dtype: str, head_dim: int, causal: bool, pack, heads: int, kv_heads: int, **mask) -> "Case":
        totals = (sum(lengths) for lengths in zip(*pack))
        return cls(dtype, head_dim, causal, 1, *totals, heads, kv_heads, pack=pack, **mask)

    @property
    def is_plain(self) -> bool:
        """A dense batch without a window and columns: what libraries of any version take."""
        return self.window == (-1, -1) and not self.pack and not self.column_bounds

    @property
    def mask(self) -> dict[str, object]:
        return {"causal": self.causal, "window": self.window}

    def cu_seqlens(self, device: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not self.pack:
            return None, None
        offsets = (list(itertools.accumulate(lengths, initial=0)) for lengths in zip(*self.pack))
        return tuple(torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in offsets)

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        if self.window != (-1, -1):
            mask = f"window {self.window[0]},{self.window[1]}"
        lengths = f"{self.batch}x{self.seqlen_q}x{self.seqlen_k}"
        if self.pack:
            lengths = "pack " + "+".join(f"{seqlen_q}x{seqlen_k}" for seqlen_q, seqlen_k in self.pack)
        if self.column_bounds:
            mask += f" columns {self.column_bounds}"
        return f"{self.dtype} d{self.head_dim} h{self.heads}/{self.kv_heads} {mask} {lengths}"


# batch, seqlen_q, seqlen_k, heads, kv_heads: no length a multiple of a tile; fewer and more queries than keys; query
# heads that are split over work tiles; more KV tiles than a work tile's neighbours.
SHAPES = ((2, 515, 515, 4, 4), (2, 300, 700, 4, 2), (2, 700, 300, 8, 1), (1, 2049, 2049, 32, 1), (1, 4100, 4100, 3, 3))
PADDED = SHAPES[:2]
# Grouped heads in sequences so long that the rule of splits cuts the query heads of a KV head further.
LONG = (1, 8192, 8192, 8, 1)
LONG_GROUPS = (1, 8192, 8192, 32, 4)
WINDOWS = ((127, 0), (64, 64))
WINDOWED = (1, 1100, 1300, 4, 2)
# A sequence of no queries, one of one tile, one of many, fewer and more queries than keys, one of no keys.
PACK = ((0, 65), (129, 129), (515, 515), (30, 700), (300, 40), (7, 0))


KEYS_OF_COLUMN = 150  # neighbours with the same bounds


def cases() -> list[Case]:
    shapes = [(head_dim, shape) for head_dim in (64, 128) for shape in SHAPES]
    shapes += [(head_dim, shape) for head_dim in (96, 40) for shape in PADDED]
    found = [Case(dtype, d, causal, *shape) for dtype in DTYPES for d, shape in shapes for causal in (False, True)]
    found += [Case("bf16", head_dim, causal, *LONG) for head_dim in (64, 128) for causal in (False, True)]
    found.append(Case("bf16", 128, True, *LONG_GROUPS))
    for head_dim in (64, 128):
        found += [Case("bf16", head_dim, False, *WINDOWED, window=window) for window in WINDOWS]
        found += [Case.of_pack("bf16", head_dim, causal, PACK, 4, 2) for causal in (False, True)]
        found.append(Case.of_pack("bf16", head_dim, False, PACK, 4, 2, window=WINDOWS[0]))
    for head_dim in (64, 128):
        found.append(Case("bf16", head_dim, True, *WINDOWED, column_bounds=1))
        found.append(Case.of_pack("bf16", head_dim, False, PACK, 4, 2, column_bounds=4))
    return found


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
    batch = () if case.pack else (case.batch,)
    of_queries = (*batch, case.seqlen_q, case.heads, case.head_dim)
    of_keys = (*batch, case.seqlen_k, case.kv_heads, case.head_dim)
    shapes = (of_queries, of_keys, of_keys, of_queries)
    return tuple(values(shape, seed, DTYPES[case.dtype], device) for seed, shape in enumerate(shapes))


def columns(case: Case, device: str | torch.device) -> torch.Tensor | None:
    """startend_row_indices, by KV head, of runs of keys that share their bounds."""
    if not case.column_bounds:
        return None
    batch = () if case.pack else (case.batch,)
    shape = (*batch, case.kv_heads, -(-case.seqlen_k // KEYS_OF_COLUMN), case.column_bounds)
    numbers = hashed(torch.arange(math.prod(shape), dtype=torch.int64, device=device)) % case.seqlen_q
    runs = numbers.to(torch.int32).view(shape)
    return runs.repeat_interleave(KEYS_OF_COLUMN, dim=-2)[..., : case.seqlen_k, :].contiguous()


def digest(tensor: torch.Tensor) -> str:
    tensor = tensor.cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(tensor.data_ptr(), tensor.nbytes)).hexdigest()[:DIGITS]


class Package:
    """The installed package's ops, every policy that users can choose."""

    def __init__(self):
        import dash_attn  # noqa: F401  registers torch.ops.dash_attn
        from dash_attn import schedule

        self._fitting = schedule.fitting

    def takes(self, case: Case) -> bool:
        return True

    def fitting(self, case: Case) -> list[str]:
        return ["descending"] if case.column_bounds else list(self._fitting(head_dim=case.head_dim, **case.mask))

    def _arguments(self, case: Case, softmax_scale: float, device: torch.device) -> dict[str, object]:
        lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), case.cu_seqlens(device)))
        unused = dict.fromkeys(("seqused_q", "seqused_k"))
        return dict(
            **lengths,
            **unused,
            softmax_scale=softmax_scale,
            causal=case.causal,
            window_left=case.window[0],
            window_right=case.window[1],
            attention_chunk=0,
            startend_row_indices=columns(case, device),
        )

    def forward(self, q, k, v, softmax_scale, case: Case):
        return torch.ops.dash_attn.forward(q, k, v, **self._arguments(case, softmax_scale, q.device))

    def backward(self, dout, q, k, v, out, softmax_lse, softmax_scale, case: Case, policy: str):
        gradients = tuple(torch.full_like(x, float("nan")) for x in (q, k, v))
        arguments = self._arguments(case, softmax_scale, q.device)
        torch.ops.dash_attn.backward(
            dout, q, k, v, out, softmax_lse, *gradients, **arguments, schedule=policy, sm_margin=0
        )
        return gradients


class Raw:
    """The raw ops of a compiled library, every policy for users that it has."""

    def __init__(self, library: Library, policies: list[str]):
        self._library, self._policies = library, policies

    def takes(self, case: Case) -> bool:
        return case.is_plain

    def fitting(self, case: Case) -> list[str]:
        known = [policy for policy in self._policies if policy not in YARDSTICKS]
        return [policy for policy in known if ONLY.get(policy, case.causal) == case.causal]

    def forward(self, q, k, v, softmax_scale, case: Case):
        out = torch.full_like(q, float("nan"))
        batch, seqlen_q, heads, _ = q.shape
        softmax_lse = torch.full((batch, heads, seqlen_q), float("nan"), dtype=torch.float32, device=q.device)
        self._library.forward(q, k, v, out, softmax_lse, softmax_scale, case.causal)
        return out, softmax_lse

    def backward(self, dout, q, k, v, out, softmax_lse, softmax_scale, case: Case, policy: str):
        gradients = tuple(torch.full_like(x, float("nan")) for x in (q, k, v))
        self._library.backward(dout, q, k, v, out, softmax_lse, *gradients, softmax_scale, case.causal, policy)
        return gradients


def digests(case: Case, ops: Package | Raw, device: str) -> dict[str, str]:
    """By "out", "softmax_lse" and "<policy> dq", "<policy> dk", "<policy> dv"."""
    q, k, v, dout = inputs(case, device)
    # A power of two: 1 / sqrt(head_dim) would be another constant's rounding.
    softmax_scale = 0.125
    out, softmax_lse = ops.forward(q, k, v, softmax_scale, case)
    found = {"out": digest(out), "softmax_lse": digest(softmax_lse)}
    for policy in ops.fitting(case):
        gradients = ops.backward(dout, q, k, v, out, softmax_lse, softmax_scale, case, policy)
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
    found = {str(case): digests(case, ops, "cuda") for case in cases() if ops.takes(case)}
    target.write_text(dumps(found))
    print(f"{torch.cuda.get_device_name()}: {sum(map(len, found.values()))} digests of {len(found)} cases in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

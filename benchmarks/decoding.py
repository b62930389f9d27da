"""Measures how fast decoding reads the keys and values of a cache, plain and in pages.

    python -m benchmarks.decoding --out results.json

Every call is `flash_attn_with_kvcache` in bf16 with a causal mask and a cold L2. The pages of a sequence lie in random
order. The program prints TB/s of keys and values, each counted once, and the ratio of each page size to the plain
cache. Before the timing, the outputs of all page sizes are compared with those of the plain cache bit by bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import torch

from benchmarks import files, run, timing
from dash_attn import flash_attn_with_kvcache

PAGE_SIZES = (16, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    new_tokens: int = 1

    def __str__(self) -> str:
        shape = f"{self.batch} x {self.seqlen}, {self.heads}/{self.kv_heads} heads of {self.head_dim}"
        return shape + (f", {self.new_tokens} tokens" if self.new_tokens > 1 else "")

    @property
    def bytes(self) -> int:
        return 2 * 2 * self.batch * self.seqlen * self.kv_heads * self.head_dim


CASES = [
    Case(64, 8192, 32, 8),
    Case(256, 2048, 32, 8),
    Case(64, 8192, 8, 1),
    Case(8, 32768, 32, 8),
    Case(16, 8192, 8, 1),
    Case(1, 32768, 32, 8),
    Case(64, 8192, 32, 8, new_tokens=4),
    Case(64, 8192, 64, 8),
    Case(16, 8192, 32, 8),
    Case(64, 4096, 16, 16, head_dim=64),
    Case(32, 8192, 16, 2, head_dim=256),
]


def calls_of(case: Case, device: torch.device, page_sizes: Sequence[int]) -> dict:
    """Returns {page size or None: call}."""
    options = dict(dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(case.batch, case.new_tokens, case.heads, case.head_dim, generator=generator, **options)
    shape = (case.batch, case.seqlen, case.kv_heads, case.head_dim)
    k, v = (torch.randn(shape, generator=generator, **options) for _ in range(2))
    seqlens = torch.full((case.batch,), case.seqlen, dtype=torch.int32, device=device)
    attend = functools.partial(flash_attn_with_kvcache, q, cache_seqlens=seqlens, causal=True)
    calls = {None: functools.partial(attend, k, v)}
    expected = calls[None]()
    for size in page_sizes:
        per_sequence = -(-case.seqlen // size)
        table = torch.randperm(case.batch * per_sequence, generator=generator, device=device).int()
        paged = [torch.empty(len(table), size, *shape[2:], **options) for _ in range(2)]
        for x, rows in zip(paged, (k, v)):
            rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, per_sequence * size - case.seqlen))
            x[table] = rows.view(x.shape)
        calls[size] = functools.partial(attend, *paged, block_table=table.view(case.batch, -1))
        if not torch.equal(calls[size](), expected):
            raise ValueError(f"pages of {size} rows give other bits than the plain cache, for {case}")
    return calls


def measure(case: Case, device: torch.device, page_sizes: Sequence[int], **how) -> dict:
    timings, errors = timing.measure(calls_of(case, device, page_sizes), device=device, **how)
    for size, error in errors.items():
        raise RuntimeError(f"{case}, page size {size}") from error
    rates = {str(size or "plain"): round(case.bytes / found.ms / 1e9, 6) for size, found in timings.items()}
    return {**dataclasses.asdict(case), "tb_per_s": dict(sorted(rates.items(), key=lambda item: item[0] != "plain"))}


def line_of(row: dict) -> str:
    rates = row["tb_per_s"]
    case = Case(**{field.name: row[field.name] for field in dataclasses.fields(Case)})
    of_pages = "".join(f"{size:>6}: {rate / rates['plain']:.3f}" for size, rate in rates.items() if size != "plain")
    return f"{case!s:<46}{rates['plain']:>7.3f} TB/s, pages of{of_pages}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the results")
    parser.add_argument("--page-sizes", type=int, nargs="+", default=PAGE_SIZES)
    parser.add_argument("--min-time", type=float, default=0.1, help="seconds of each call")
    parser.add_argument("--most-tokens", type=int, help="leave out cases with more tokens, for short tests")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for case in CASES:
        if arguments.most_tokens is not None and case.batch * case.seqlen > arguments.most_tokens:
            continue
        rows.append(measure(case, device, arguments.page_sizes, min_time_s=arguments.min_time))
        print(line_of(rows[-1]), flush=True)
        if arguments.out:
            arguments.out.write_text(files.dumps({"meta": run.metadata(device), "rows": rows}))


if __name__ == "__main__":
    main()

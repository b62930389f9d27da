"""Measures masks by key columns beside our own plain kernels, variable-length batches and FlexAttention.

    python -m benchmarks.column_masks --out results.json

Every mask is causal: documents in one sequence, a question that eight answers share, and a mask that hides nothing. The
program prints TFLOP/s on visible elements (a backward counts as 2.5 forwards) and these ratios:

    of causal   our TFLOP/s over those of our causal kernel, whose sequence has as many visible elements or more
    of packs    the same beside these documents as a variable-length batch
    of flex     our TFLOP/s over those of FlexAttention, compiled, whose gradients are not deterministic

Each call is timed from the public function, with a cold L2. The plan of the mask is part of each call; FlexAttention's
BlockMask is made before.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import random

import torch
from torch.nn.attention import flex_attention as flex

from benchmarks import files, run, timing
from dash_attn import flash_attn_func, flash_attn_varlen_func, masks

ANSWERS = 8
PASSES = {"forward": 4.0, "backward": 10.0}  # FLOPs of a visible pair, for each column of a head


@dataclasses.dataclass(frozen=True)
class Case:
    """A tree of nodes in depth-first order: documents are roots, and answers are children of their question."""

    name: str
    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    hides: bool = True

    @property
    def seqlen(self) -> int:
        return sum(self.lengths)

    @property
    def is_documents(self) -> bool:
        return self.hides and all(parent == -1 for parent in self.parents)

    def pairs(self) -> int:
        """The visible pairs of a query and a key, for each head."""
        if not self.hides:
            return self.seqlen * (self.seqlen + 1) // 2
        seen = [0] * len(self.parents)  # tokens of a node's ancestors
        for node, parent in enumerate(self.parents):
            seen[node] = 0 if parent == -1 else seen[parent] + self.lengths[parent]
        return sum(n * before + n * (n + 1) // 2 for n, before in zip(self.lengths, seen))

    def tensor(self, device: torch.device) -> torch.Tensor:
        if not self.hides:
            return torch.full((1, 1, self.seqlen, 1), self.seqlen, dtype=torch.int32, device=device)
        mask = masks.prefix_tree_mask(parents=list(self.parents), lengths=list(self.lengths))
        return mask.to(device)


def documents(length: int, total: int) -> Case:
    return Case(f"documents of {length}", (-1,) * (total // length), (length,) * (total // length))


def uneven_documents(total: int) -> Case:
    chosen, left = random.Random(0), total
    lengths = []
    while left > 0:
        lengths.append(min(left, max(64, int(chosen.lognormvariate(6.5, 1.0)))))
        left -= lengths[-1]
    return Case("documents, lognormal", (-1,) * len(lengths), tuple(lengths))


def shared_question(question: int, answer: int) -> Case:
    return Case(f"question of {question}", (-1,) + (0,) * ANSWERS, (question,) + (answer,) * ANSWERS)


CASES = [Case(f"nothing at {n}", (-1,), (n,), hides=False) for n in (1024, 4096, 16384)]
CASES += [documents(n, total) for total in (16384, 65536) for n in (1024, 2048, 4096, 8192, 16384)]
CASES += [uneven_documents(32768)]
CASES += [shared_question(n, n // 4) for n in (1024, 4096, 16384)] + [shared_question(512, 2048)]


def flex_call(case: Case, mask: torch.Tensor):
    """FlexAttention with the same mask."""
    ends = mask[0, 0, :, 0]
    size = case.seqlen
    rule = lambda b, h, q, kv: (q >= kv) & (q < ends[kv])  # noqa: E731
    block_mask = flex.create_block_mask(rule, None, None, size, size, device=mask.device)
    # After eight shapes Dynamo would no longer compile, and FlexAttention would compute all scores.
    torch.compiler.reset()
    call = torch.compile(flex.flex_attention, dynamic=False)

    def attention(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return call(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return attention


def calls_of(case: Case, device: torch.device, heads: int, kv_heads: int, dim: int, with_flex: bool) -> dict:
    """Returns {(implementation, pass): call}."""
    options = dict(dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, case.seqlen, n, dim) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator, **options).requires_grad_() for shape in shapes)
    dout = torch.randn(shapes[0], generator=generator, **options)
    mask = case.tensor(device)
    attentions = {
        "columns": functools.partial(flash_attn_func, causal=True, startend_row_indices=mask),
        "causal": functools.partial(flash_attn_func, causal=True),
    }
    if case.is_documents:
        offsets = torch.tensor([0, *case.lengths], device=device).cumsum(0).int()

        def packs(q, k, v):
            rows = [x.flatten(0, 1) for x in (q, k, v)]
            return flash_attn_varlen_func(*rows, offsets, offsets, case.seqlen, case.seqlen, causal=True)[None]

        attentions["packs"] = packs
    if with_flex:
        attentions["flex"] = flex_call(case, mask)
    calls = {}
    for name, attention in attentions.items():
        out = attention(q, k, v)
        if name == "columns":
            expected = out.detach()
        elif name != "causal" and not torch.allclose(out, expected, atol=0.03, rtol=0.03):
            raise ValueError(f"{name} is wrong for {case.name}")

        def forward(attention=attention):
            with torch.no_grad():
                attention(q, k, v)

        calls[name, "forward"] = forward
        calls[name, "backward"] = lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    return calls


def measure(
    case: Case, device: torch.device, heads: int, kv_heads: int, dim: int, with_flex: bool, **how
) -> list[dict]:
    timings, errors = timing.measure(calls_of(case, device, heads, kv_heads, dim, with_flex), device=device, **how)
    for key, error in errors.items():
        print(f"{case.name}: left out {key}: {error}", flush=True)
    shape = {"case": case.name, "seqlen": case.seqlen, "heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    rows = []
    for (name, pass_), found in timings.items():
        pairs = Case("", (-1,), (case.seqlen,), hides=False).pairs() if name == "causal" else case.pairs()
        tflops = PASSES[pass_] * pairs * heads * dim / found.ms / 1e9
        rows.append({**shape, "impl": name, "pass": pass_, "ms": round(found.ms, 5), "tflops": round(tflops, 4)})
    return rows


COLUMNS = (("mask", 22), ("seqlen", 7), ("heads", 7), ("dim", 5), ("pass", 10), ("TFLOP/s", 8))
RATIOS = ("causal", "packs", "flex")


def table(rows: list[dict]) -> str:
    heads_of_ratios = [(f"of {name}", 10) for name in RATIOS]
    lines = ["".join(f"{name:>{width}}" for name, width in (*COLUMNS, *heads_of_ratios))]
    keys = ("case", "seqlen", "heads", "kv_heads", "head_dim", "pass")
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in rows):
        found = {row["impl"]: row["tflops"] for row in rows if tuple(row[k] for k in keys) == key}
        if "columns" not in found:
            continue
        name, seqlen, heads, kv_heads, dim, pass_ = key
        cells = [name, seqlen, f"{heads}/{kv_heads}", dim, pass_, f"{found['columns']:.1f}"]
        ratios = [f"{found['columns'] / found[other]:.3f}" if other in found else "" for other in RATIOS]
        widths = [width for _, width in (*COLUMNS, *heads_of_ratios)]
        lines.append("".join(f"{cell:>{width}}" for cell, width in zip((*cells, *ratios), widths)))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the results")
    parser.add_argument("--cases", help="only cases whose names contain this")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention, which takes long to compile")
    parser.add_argument("--min-time", type=float, default=0.1, help="seconds of each call")
    parser.add_argument("--most", type=int, default=65536, help="leave out longer sequences")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict] = []
    for dim in arguments.head_dims:
        for case in CASES:
            if case.seqlen > arguments.most or arguments.cases and arguments.cases not in case.name:
                continue
            found = measure(case, device, arguments.heads, arguments.kv_heads, dim, not arguments.no_flex,
                            min_time_s=arguments.min_time)  # fmt: skip
            rows += found
            print("\n".join(table(found).splitlines()[1:] if rows != found else table(found).splitlines()), flush=True)
            if arguments.out:
                arguments.out.write_text(files.dumps({"meta": run.metadata(device), "rows": rows}))


if __name__ == "__main__":
    main()

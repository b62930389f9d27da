"""Writes the part of docs/dropout.md that quotes a result of `benchmarks.dropout_block`.

python -m benchmarks.dropout_report                   the result that the page quotes
python -m benchmarks.dropout_report result.json       a file in benchmarks/results
"""

import argparse
import json
import pathlib

from benchmarks.dropout_block import summary, table
from benchmarks.files import prose, with_block

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "dropout.md"
RESULT = ROOT / "benchmarks" / "results" / "h200_2026-11-26_354d623_transformer_blocks.json"
MODULE = "benchmarks.dropout_report"


def block(path: pathlib.Path) -> str:
    """Returns the text about the result."""
    result = json.loads(path.read_text())
    meta, rows = result["meta"], result["rows"]
    told = prose(
        f"The [measurement](../benchmarks/results/{path.name}) is of commit {meta['commit'][:7]} on an {meta['gpu']} "
        f"with torch {meta['torch']}, p = {meta['p']} and the causal mask. {summary(rows)} The cells are ratios of "
        "times in the forward and in the backward:"
    )
    return f"\n{told}\n\n{table(rows)}\n\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=pathlib.Path, nargs="?", default=RESULT)
    parser.add_argument("--document", type=pathlib.Path, default=DOCUMENT, help="default docs/dropout.md")
    arguments = parser.parse_args(argv)
    try:
        written = with_block(arguments.document.read_text(), MODULE, block(arguments.result))
    except (ValueError, KeyError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    arguments.document.write_text(written)


if __name__ == "__main__":
    main()

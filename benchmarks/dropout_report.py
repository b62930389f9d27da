"""Writes the part of docs/dropout.md that quotes a result of `benchmarks.dropout_model`, and draws its picture.

python -m benchmarks.dropout_report                   the result that the package contains
python -m benchmarks.dropout_report result.json
"""

import argparse
import pathlib

from benchmarks.files import prose, with_block
from dash_attn.dropout import model

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "dropout.md"
PICTURE = "dropout_model.png"
MODULE = "benchmarks.dropout_report"


def paragraphs(text: str) -> str:
    """Keeps tables, and wraps everything else like the documents."""
    return "\n\n".join(part if part.startswith("|") else prose(part) for part in text.split("\n\n"))


def block(path: pathlib.Path) -> str:
    """Returns the text about the result."""
    result = model.read(path)
    picture = f"![Predicted over measured times, dropout]({PICTURE})"
    return f"\n{picture}\n\n{paragraphs(model.report(result, model.fitted(result, path.name)))}\n\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=pathlib.Path, nargs="?", default=model.PACKAGED)
    parser.add_argument("--document", type=pathlib.Path, default=DOCUMENT, help="default docs/dropout.md")
    arguments = parser.parse_args(argv)
    try:
        result = model.read(arguments.result)
        written = with_block(arguments.document.read_text(), MODULE, block(arguments.result))
        found = model.every(result, model.fitted(result, arguments.result.name))
        model.draw_judged(str(arguments.document.with_name(PICTURE)), found, model.title(result))
    except (ValueError, KeyError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    arguments.document.write_text(written)


if __name__ == "__main__":
    main()

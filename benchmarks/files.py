"""The form of what the benchmarks write: result files, and the blocks of documents that quote them."""

import json
import textwrap

END = "<!-- end -->\n"


def dumps(result: dict) -> str:
    """JSON of a result, a line for each row of its lists, so that a change of one row is a change of one line."""
    blocks = []
    for key, value in result.items():
        if isinstance(value, list):
            lines = ",\n".join("  " + json.dumps(row) for row in value)
            blocks.append(f' "{key}": [\n{lines}\n ]')
        else:
            blocks.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def prose(text: str, indent: str = "") -> str:
    """One paragraph, or one item of a list, wrapped as the documents are."""
    options = dict(subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return textwrap.fill(" ".join(text.split()), 120, **options)


def with_block(document: str, module: str, block: str) -> str:
    """The document with what stands between the mark of `module` and END replaced by the block.

    Raises:
        ValueError: the document has no such mark, or more than one.
    """
    mark = f"<!-- written by {module} -->\n"
    if document.count(mark) != 1:
        raise ValueError(f"the document must hold the line {mark.strip()!r} once, got {document.count(mark)}")
    before, rest = document.split(mark)
    _, after = rest.split(END, 1)
    return before + mark + block + END + after

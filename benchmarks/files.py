"""The format of result files, and of the generated blocks in documents."""

import json
import textwrap

END = "<!-- end -->\n"


def dumps(result: dict) -> str:
    """Returns JSON with one line per row of the result's lists, so that a changed row is a changed line."""
    blocks = []
    for key, value in result.items():
        if isinstance(value, list):
            lines = ",\n".join("  " + json.dumps(row) for row in value)
            blocks.append(f' "{key}": [\n{lines}\n ]')
        else:
            blocks.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(blocks) + "\n}\n"


# What the parts of one run must have in common.
SAME_IN_PARTS = ("gpu", "driver", "cuda", "torch", "commit", "impls")


def merged(results: dict[str, dict]) -> dict:
    """Joins the results of all parts of a grid, given by their names.

    Raises:
        ValueError: a result is not a part, parts are missing or duplicated, or they were measured with different
            software or on different kinds of GPU.
    """
    metas = {name: result["meta"] for name, result in results.items()}
    first, one = next(iter(metas.items()))
    for name, meta in metas.items():
        if "part" not in meta:
            raise ValueError(f"{name} is not a part of a run")
        for key in SAME_IN_PARTS:
            if meta.get(key) != one.get(key):
                raise ValueError(f"{name} has {key} {meta.get(key)!r}, but {first} has {one.get(key)!r}")
    found = sorted(meta["part"] for meta in metas.values())
    parts = one["part"].split("/")[1]
    if found != sorted(f"{i}/{parts}" for i in range(1, int(parts) + 1)):
        raise ValueError(f"the parts must be 1 to {parts} of {parts}, got {', '.join(found)}")
    each = {meta["part"]: {key: meta[key] for key in meta if key not in SAME_IN_PARTS} for meta in metas.values()}
    common = {key: one[key] for key in SAME_IN_PARTS if key in one}
    rows = [row for result in results.values() for row in result["rows"]]
    return {"meta": {**common, "date": min(meta["date"] for meta in metas.values()), "parts": each}, "rows": rows}


def prose(text: str, indent: str = "") -> str:
    """Wraps one paragraph, or one item of a list, like the documents."""
    options = dict(subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return textwrap.fill(" ".join(text.split()), 120, **options)


def with_block(document: str, module: str, block: str) -> str:
    """Replaces the text of a document between the mark of `module` and END with the block.

    Raises:
        ValueError: the document has no such mark, or more than one.
    """
    mark = f"<!-- written by {module} -->\n"
    if document.count(mark) != 1:
        raise ValueError(f"the document must contain the line {mark.strip()!r} once, got {document.count(mark)}")
    before, rest = document.split(mark)
    _, after = rest.split(END, 1)
    return before + mark + block + END + after

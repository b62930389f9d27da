"""Names in docstrings become links: an extension of Griffe, which reads the docstrings, named in mkdocs.yml.

A public name in backticks leads to its reference, and the path of a page, such as docs/receipts.md, to that page. The
directives in docs/api say which names have a reference.
"""

from __future__ import annotations

import re
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
_DIRECTIVE = re.compile(r"^::: (dash_attn\S*)", re.M)
_NAME = re.compile(r"(`{1,2})([A-Za-z_][\w.]*)\1")
_PAGE = re.compile(r"docs/([\w/]+)\.md(#[\w-]+)?")
_INDEXED = re.compile(r"(?<!`)(\[\w+\]){2,}(?!`)")  # Markdown would take these for a reference


class LinkedNames(griffe.Extension):
    """Rewrites the docstrings of the package once all of it has been read."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        paths = _documented(pkg)
        for module in [pkg, *_modules_in(pkg)]:
            for item in [module, *_objects_in(module)]:
                if item.docstring is not None:
                    item.docstring.value = _linked(item.docstring.value, module.path, paths)


def _documented(package: griffe.Module) -> list[str]:
    """The full names that docs/api has, the shortest first."""
    found = set()
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for path in _DIRECTIVE.findall(page.read_text()):
            found.add(path)
            inner = path.removeprefix("dash_attn.")
            if inner in package.modules or package[inner].is_module:
                found.update(f"{path}.{name}" for name in package[inner].exports or package[inner].members)
    return sorted(found, key=lambda path: (path.count("."), path))


def _modules_in(module: griffe.Module) -> list[griffe.Module]:
    inner = [item for item in module.modules.values() if not item.is_alias]
    return inner + [deeper for item in inner for deeper in _modules_in(item)]


def _objects_in(item: griffe.Module | griffe.Class) -> list[griffe.Object]:
    own = [member for member in item.members.values() if not member.is_alias and not member.is_module]
    return own + [deeper for member in own if member.is_class for deeper in _objects_in(member)]


def _linked(text: str, module: str, paths: list[str]) -> str:
    def name(found: re.Match[str]) -> str:
        written = found[2]
        fitting = [path for path in paths if path == written or path.endswith(f".{written}") and "." in path]
        fitting = [path for path in fitting if path.startswith(module)] or fitting
        code = f"<code>{written}</code>"
        return f'<autoref optional identifier="{fitting[0]}">{code}</autoref>' if fitting else found[0]

    def page(found: re.Match[str]) -> str:
        path = ROOT / "docs" / f"{found[1]}.md"
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        return f'<a href="../{found[1]}.html{found[2] or ""}">{title}</a>'

    return _PAGE.sub(page, _NAME.sub(name, _INDEXED.sub(r"`\g<0>`", text)))

"""Builds the documentation site in site/, which `make docs` runs; a broken link ends it.

The pages link to each other and to sources as they do in the repository. So the site has the repository's folders: the
Markdown files, and every file that one of them links to.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGED = ROOT / "build" / "site-source"
# The order of the menu. Pages of docs/ that stand nowhere here come last.
MENU: dict[str, list[str]] = {
    "": ["README.md", "docs/install.md", "docs/usage.md", "docs/contract.md"],
    "Beyond one call": ["docs/distributed.md", "docs/receipts.md", "docs/training.md", "docs/dropout.md"],
    "Frameworks": ["docs/integrations/*.md"],
    "How it works": ["docs/design.md", "docs/forward.md", "docs/schedules.md", "docs/order_free.md", "docs/model.md"],
    "Measurements": ["benchmarks/README.md"],
    "Project": ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "third_party/README.md"],
}
# A page for contributors, which other pages link to.
NOT_IN_MENU = {ROOT / "docs" / "design_decisions.md"}
_LINK = re.compile(r"\]\(([^)#\s]+)")


def links(page: Path) -> list[Path]:
    """The files of the repository that a page links to, and its pictures."""
    targets = [target for target in _LINK.findall(page.read_text()) if "://" not in target]
    found = [(page.parent / target).resolve() for target in targets]
    return [path for path in found if path.is_file() and path.is_relative_to(ROOT)]


def menu() -> tuple[list[dict[str, object]], list[Path]]:
    """The menu, as mkdocs takes it, and its pages."""
    taken: list[Path] = []

    def pages(patterns: list[str]) -> list[str]:
        left_out = {*taken, *NOT_IN_MENU}
        found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern)) if path not in left_out]
        taken.extend(found)
        return [str(path.relative_to(ROOT)) for path in found]

    sections = {title: pages(patterns) for title, patterns in MENU.items()}
    sections["More"] = pages(["docs/**/*.md"])
    nav: list[dict[str, object]] = []
    for title, names in sections.items():
        nav += [{title: names}] if title and names else names
    return nav, taken


def main() -> None:
    try:
        from mkdocs.commands.build import build
        from mkdocs.config import load_config
        from mkdocs.exceptions import Abort
    except ModuleNotFoundError:
        raise SystemExit("the site needs mkdocs: pip install mkdocs, or make docs") from None
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    nav, pages = menu()
    shutil.rmtree(STAGED, ignore_errors=True)
    staged = [*pages, *NOT_IN_MENU]
    for path in dict.fromkeys([*staged, *(target for page in staged for target in links(page))]):
        target = STAGED / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    try:
        build(load_config(str(ROOT / "mkdocs.yml"), nav=nav, strict=True))
    except Abort as error:
        raise SystemExit(f"the site was not built: {error}") from None
    print(f"{ROOT / 'site' / 'index.html'}: {len(pages)} pages")


if __name__ == "__main__":
    sys.exit(main())

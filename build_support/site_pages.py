"""The files of the documentation site, and a check of what was built: a hook of mkdocs, which mkdocs.yml names.

The pages link to each other and to sources as they do in the repository, so the site has the repository's folders. It
holds every Markdown file that documents the project, and every other file that one of those links to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/**/*.md", "benchmarks/*.md", "third_party/*.md")
STYLES = ROOT / "docs" / "site.css"
_LINK = re.compile(r"\]\(([^)#\s]+)")
# What a browser fetches without a click: everything but the targets of <a>.
_FETCHED = re.compile(
    r"""<(?!a\b)\w+\b[^>]*?\s(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)|url\(["']?(https?://[^"')]+)"""
)


def pages() -> list[Path]:
    """The Markdown files of the site."""
    return sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})


def links(page: Path) -> list[Path]:
    """The files of the repository that a page links to, among them its pictures."""
    targets = [target for target in _LINK.findall(page.read_text()) if "://" not in target]
    found = [(page.parent / target).resolve() for target in targets]
    return [path for path in found if path.is_file() and path.is_relative_to(ROOT)]


def fetched_elsewhere(site: Path) -> list[str]:
    """What the pages and styles of a site make a browser fetch from another host, with the file that asks for it."""
    files = [path for path in sorted(site.rglob("*")) if path.suffix in (".html", ".css")]
    return [
        f"{path.relative_to(site)}: {of_tag or of_style}"
        for path in files
        for of_tag, of_style in _FETCHED.findall(path.read_text())
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces what mkdocs found in docs_dir, and keeps the theme's own files."""
    from mkdocs.structure.files import File, Files

    own = pages()
    paths = dict.fromkeys([STYLES, *own, *(target for page in own for target in links(page))])
    kept = [file for file in files if not str(file.abs_src_path).startswith(config.docs_dir)]
    names = [str(path.relative_to(ROOT)) for path in paths]
    return Files([*kept, *(File(name, str(ROOT), config.site_dir, use_directory_urls=False) for name in names)])


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """In a search our own functions come before those of the same name in FlashAttention's modules."""
    if page.file.src_uri == "docs/api/compat.md":
        page.meta["search"] = {"boost": 0.1}
    return markdown


def on_post_build(config: MkDocsConfig) -> None:
    """Ends the build if a page would make a request to another host."""
    from mkdocs.exceptions import PluginError

    if found := fetched_elsewhere(Path(config.site_dir)):
        raise PluginError("the site must need no other host, but it fetches\n" + "\n".join(found))

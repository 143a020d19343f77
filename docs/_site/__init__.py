"""The parts of the site that are made from the code: navigation, and the pages of reference/.

The navigation has the parts and pages that docs/index.md lists. Every writer is a function that
gives pages: path below reference/ -> Markdown. A file is written only when its text is new, so that
Sphinx builds only what has changed.
"""

from __future__ import annotations

import re
from pathlib import Path

from .api import api_pages
from .configuration import configuration_pages
from .hooks import hook_pages
from .messages import message_pages
from .packages import BLOB, TREE, distributions, package_pages

__all__ = ["ROOT", "navigation", "pages_below", "parts", "reference_pages", "write_reference"]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

REFERENCE = (
    "configuration",
    "hooks",
    "api/index",
    "packages/index",
    "messages",
)
"""The generated pages that the part of the index called "Look up" begins with."""

ENTRY = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<page>[\w./-]+)\.md\)", re.MULTILINE)


def parts() -> dict[str, list[tuple[str, str]]]:
    """Part -> its pages, each with the title that it has there: the lists of docs/index.md."""
    sections = (DOCS / "index.md").read_text("utf-8").split("\n## ")[1:]
    found = {section.partition("\n")[0]: ENTRY.findall(section) for section in sections}
    return {
        part: [(page, title) for title, page in entries]
        for part, entries in found.items()
        if entries
    }


def pages_below(docname: str) -> list[str]:
    """The pages of the folder that `docname` is the index of, in the order of its links to them.

    docs/plugins.md is the index of docs/plugins, decisions/index.md that of its own folder.
    """
    folder = DOCS / docname.removesuffix("/index")
    if docname == "index" or not folder.is_dir():
        return []
    text = (DOCS / f"{docname}.md").read_text("utf-8")
    names = sorted(page.stem for page in folder.glob("*.md") if page.stem != "index")
    return sorted(names, key=lambda name: text.find(f"{name}.md") % (len(text) + 1))


def to_reference(text: str, reference: str) -> str:
    """`text` with links to packages and to hooks as links to the generated pages, which GitHub does
    not have.
    """
    homes = distributions(ROOT)
    text = re.sub(
        rf"\[`(ds_\w+)`\]\({re.escape(BLOB)}[\w/]+/hookspecs\.py\)",
        rf"[`\1`]({reference}hooks.md#\1)",
        text,
    )
    for dist, folder in homes.items():
        path = re.escape(folder.relative_to(ROOT).as_posix())
        text = re.sub(
            rf"\]\((?:{re.escape(TREE)}{path}/?|{re.escape(BLOB)}{path}/README\.md)(#[\w-]+)?\)",
            rf"]({reference}packages/{dist}.md\1)",
            text,
        )
    return text


def navigation(app, docname, source):
    """Put the table of contents below index.md, and that of a folder below its index, and lead links
    into the repository to pages of the site.
    """
    if not docname.startswith("reference/"):
        source[0] = to_reference(source[0], "../" * docname.count("/") + "reference/")
    if below := pages_below(docname):
        prefix = "" if docname.endswith("/index") else f"{docname}/"
        lines = "\n".join(f"{prefix}{name}" for name in below)
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n\n{lines}\n```\n"
    if docname != "index":
        return
    for part, pages in parts().items():
        lines = [f"{title} <{page}>" for page, title in pages]
        if part == "Look up":
            lines = [f"reference/{page}" for page in REFERENCE] + lines
        source[0] += (
            f"\n\n```{{toctree}}\n:hidden:\n:caption: {part}\n\n" + "\n".join(lines) + "\n```\n"
        )


def reference_pages() -> dict[str, str]:
    """Path below reference/ -> Markdown of every page that is made from the code."""
    return {
        **configuration_pages(),
        **hook_pages(ROOT),
        **message_pages(ROOT),
        **package_pages(ROOT),
        **api_pages(ROOT),
    }


def write_reference(folder: Path) -> None:
    """Write the generated pages into `folder`, and remove what is no longer made."""
    pages = reference_pages()
    for path, text in pages.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
    for file in folder.rglob("*.md"):
        if file.relative_to(folder).as_posix() not in pages:
            file.unlink()

"""The parts of the site that are made from the code: navigation, and the pages of reference/.

Every writer is a function that gives pages: path below reference/ -> Markdown. A file is written
only when its text is new, so that Sphinx builds only what has changed.
"""

from __future__ import annotations

from pathlib import Path

from .api import api_pages
from .configuration import configuration_pages
from .hooks import hook_pages
from .messages import message_pages
from .packages import package_pages

__all__ = ["ROOT", "navigation", "reference_pages", "write_reference"]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

START = "tutorials/train-my-script tutorials/add-a-plugin tutorials/write-an-accelerator"
TRAIN = (
    "how-it-works training configuration running clusters data-sampling choosing-a-stage autotuning optimizers "
    "pipeline moe autoep "
    "compression checkpoints migrate"
)
WATCH = "monitors reports profiling is-my-run-right when-ranks-disagree"
EXTEND = (
    "plugins plugins/config plugins/optimizers plugins/watching plugins/training plugins/models "
    "plugins/sharding plugins/states plugins/devices plugins/commands plugins/own-hooks "
    "plugins/publishing kernels architecture checkpoint-format decisions/index"
)
REFERENCE = (
    "glossary reference/configuration errors reference/messages reference/hooks "
    "reference/api/index "
    "reference/packages/index"
)
ABOUT = "comparison differences versions roadmap"
PARTS = {
    "Tutorials": START,
    "Train": TRAIN,
    "Watch": WATCH,
    "Extend": EXTEND,
    "Reference": REFERENCE,
    "About": ABOUT,
}


def navigation(app, docname, source):
    """Put the table of contents below index.md, and that of the decisions below theirs.

    A page that no part names is listed in the second part.
    """
    if docname == "decisions/index":
        source[0] += "\n\n```{toctree}\n:hidden:\n:glob:\n\n[0-9]*\n```\n"
    if docname != "index":
        return
    named = {page for pages in PARTS.values() for page in pages.split()} | {"index"}
    here = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")}
    elsewhere = ("reference/", "decisions/")
    others = sorted(page for page in here - named if not page.startswith(elsewhere))
    for title, pages in PARTS.items():
        listed = [page for page in pages.split() if page in here] + (
            others if title == "Train" else []
        )
        source[0] += (
            f"\n\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(listed) + "\n```\n"
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

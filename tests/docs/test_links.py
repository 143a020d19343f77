"""Every link of every page leads somewhere: to a file or heading of this repository, or to a host
in `HOSTS`.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from distributions import HOME
from pages import DOCS, ROOT, anchors, links, name_of, pages

OURS = re.compile(
    re.escape(HOME) + r"(?:/(?:blob|tree|raw)/main/(?P<path>[^#]*))?(?:#(?P<anchor>.+))?$"
)
HOSTS = {
    "arxiv.org",
    "docs.astral.sh",
    "docs.pytorch.org",
    "docs.ray.io",
    "github.com",
    "huggingface.co",
    "pre-commit.com",
    "pytorch.org",
    "slurm.schedmd.com",
    "ui.perfetto.dev",
    "www.deepspeed.ai",
    "www.mpich.org",
    "www.open-mpi.org",
}
"""Where links may lead beside this repository.

They are checked for their form alone: tests use no network.
"""


@cache
def generated() -> dict[str, str]:
    """The pages below docs/reference that `make docs` writes."""
    sys.path.insert(0, str(DOCS))
    try:
        from _site import reference_pages
    finally:
        sys.path.remove(str(DOCS))
    return reference_pages()


@cache
def anchors_of(path: Path) -> set[str]:
    """The anchors of a page, written or generated."""
    if path.is_relative_to(DOCS / "reference"):
        return anchors(generated()[path.relative_to(DOCS / "reference").as_posix()])
    return anchors(path.read_text("utf-8"))


def broken(page: Path, target: str) -> str:
    """What is wrong with a link; "" for nothing."""
    parts = urlsplit(target)
    ours = OURS.match(target)
    if parts.scheme and not ours:
        if parts.scheme != "https":
            return "not https"
        return (
            ""
            if parts.hostname in HOSTS
            else f"a host that tests/docs/test_links.py does not list: {parts.hostname}"
        )
    if ours:
        if not ours["path"]:
            return ""
        path = ROOT / ours["path"]
        anchor = ours["anchor"]
    else:
        path = (page.parent / parts.path).resolve() if parts.path else page
        anchor = parts.fragment
        # Package indexes show READMEs, and the site pages of docs/, without their neighbours.
        shown_alone = (page.parent / "pyproject.toml").exists() or (
            page.is_relative_to(DOCS) and not path.is_relative_to(DOCS)
        )
        if shown_alone and path != page:
            return "write https://github.com/ds-core/ds_core/blob/main/..."
    made = path.is_relative_to(DOCS / "reference")
    if made and path.relative_to(DOCS / "reference").as_posix() not in generated():
        return "no such page is generated"
    if not made and not path.exists():
        return "no such file"
    if anchor and (path.suffix != ".md" or anchor not in anchors_of(path)):
        return f"no heading #{anchor}; there are {', '.join(sorted(anchors_of(path)))}"
    return ""


def test_every_link_leads_somewhere() -> None:
    wrong = [
        f"{name_of(page)}:{line}: {target}: {why}"
        for page in pages()
        for line, target in links(page)
        if (why := broken(page, target))
    ]
    assert not wrong, "\n".join(wrong)


def test_links_are_found_and_broken_ones_are_told(tmp_path: Path) -> None:
    page = DOCS / "index.md"
    assert len([link for each in pages() for link in links(each)]) > 100
    assert broken(page, "training.md") == ""
    assert broken(page, "no-such-page.md") == "no such file"
    assert "no heading #nowhere" in broken(page, "training.md#nowhere")
    assert (
        broken(page, "https://github.com/ds-core/ds_core/blob/main/no_such_file") == "no such file"
    )
    assert "does not list" in broken(page, "https://example.com/")
    assert broken(page, "http://github.com/") == "not https"
    assert broken(page, "reference/hooks.md#ds_loader") == ""
    assert broken(page, "reference/nothing.md") == "no such page is generated"


def test_the_index_leads_to_every_page() -> None:
    named = {target.partition("#")[0] for _, target in links(DOCS / "index.md")}
    missing = (
        # records are linked from decisions/index.md, which test_decisions.py holds
        {
            page.relative_to(DOCS).as_posix()
            for page in pages()
            if page.is_relative_to(DOCS) and not page.name[0].isdigit()
        }
        - named
        - {"index.md"}
    )
    assert not missing, f"docs/index.md has no link to {', '.join(sorted(missing))}"

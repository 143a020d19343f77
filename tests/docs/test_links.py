"""Every link of every page leads somewhere: to a file or heading that a clone of this repository has,
or to a host in `HOSTS`.
"""

from __future__ import annotations

import re
import subprocess
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
def kept() -> set[Path]:
    """Every file and folder of the repository: what git tracks, and what it does not ignore yet."""
    said = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    files = {ROOT / name for name in said.split("\0") if name and (ROOT / name).exists()}
    return files.union(*(file.parents for file in files))


@cache
def anchors_of(path: Path) -> set[str]:
    """The anchors of a page."""
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
    if not path.exists():
        return "no such file"
    if path not in kept():
        return "not in the repository: git ignores it, so the link is dead on GitHub"
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
    written = DOCS / "reference" / "made.md"
    made = not written.parent.exists()
    written.parent.mkdir(exist_ok=True)
    written.touch()
    try:
        assert "not in the repository" in broken(page, "reference/made.md")
    finally:
        written.unlink()
        if made:
            written.parent.rmdir()


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

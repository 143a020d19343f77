"""The Markdown pages of this repository: their blocks, headings and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
"""Pages that `make docs` writes; not part of the repository."""

FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^\n`]*)\n(?P<text>.*?)^ *(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(<?([^\s)>]+)>?(?: \"[^\"]*\")?\)")
BARE = re.compile(r"<(https?://[^>\s]+)>")
FILE = re.compile(r"# (?P<file>[\w./-]+\.(?:py|toml|json))\b")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. note: what its info string says after the language, such as "no-run: needs
    a GPU".
    """

    language: str
    note: str
    text: str
    line: int

    @property
    def file(self) -> str:
        """The path that its first line names, as in ``# my_ini/plugin.py``; "" for none."""
        found = FILE.match(self.text)
        return found["file"] if found else ""

    @property
    def left_out(self) -> bool:
        """Whether it says that it is not run or checked."""
        return self.note.startswith(("no-run:", "no-check:"))


def pages() -> list[Path]:
    """Every page that people wrote."""
    folders = [
        ROOT / name for name in ("docs", "plugins", "ops", "monitors", "examples", "benchmarks")
    ]
    found = [
        page for folder in folders for page in folder.rglob("*.md") if REFERENCE not in page.parents
    ]
    hidden = [
        page for page in found if any(part.startswith(".") for part in page.relative_to(ROOT).parts)
    ]
    return sorted([*ROOT.glob("*.md"), *(page for page in found if page not in hidden)])


def name_of(page: Path) -> str:
    """The page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text("utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, _, note = match["info"].strip().partition(" ")
        lines = [
            line.removeprefix(match["indent"]) for line in match["text"].splitlines(keepends=True)
        ]
        found.append(
            Block(language, note.strip(), "".join(lines), text.count("\n", 0, match.start()) + 1)
        )
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks and without code in lines, each blanked, so that lines
    keep their numbers.
    """
    text = FENCE.sub(lambda found: "\n" * found[0].count("\n"), page.read_text("utf-8"))
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "``", text)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub and MyST give the headings of a page."""
    seen: dict[str, int] = {}
    found = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        number = seen.get(slug, 0)
        seen[slug] = number + 1
        found.add(f"{slug}-{number}" if number else slug)
    return found


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Line and target of every link of a page."""
    text = prose(page)
    for match in (*LINK.finditer(text), *BARE.finditer(text)):
        yield text.count("\n", 0, match.start()) + 1, match[1]

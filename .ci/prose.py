"""Reads the project's texts with proselint and docs/style.toml: `prose.py`, or `prose.py FILE ...`.

Of Python files the docstrings are read, and what they say to users: `files.messages`.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from proselint import checks
from proselint.config import Config
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, CheckFlags, engine, types
from proselint.tools import LintFile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
STYLE = ROOT / "docs" / "style.toml"

# What is not prose: code, the addresses of links, tags, and `<!-- ... -->`.
NOT_PROSE = re.compile(
    r"^(?P<fence>[ \t]*(```+|~~~+)).*?^(?P=fence)[ \t]*$"
    r"|<!--.*?-->|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)|(?<=\])\([^)\s]*\)|<[^<>\n]*>|https?://\S+",
    re.MULTILINE | re.DOTALL,
)
OPTION = re.compile(r"(?<!\w)--?\w[\w-]*")


def prose(text: str) -> str:
    """The text with backticks for what is not prose and between paragraphs; lines keep their numbers."""
    masked = NOT_PROSE.sub(lambda found: re.sub(r"[^\n]", "`", found.group()), text)
    return re.sub(r"^$", "`", masked, flags=re.MULTILINE)


def docstrings(source: str) -> str:
    """The docstrings of a module, on their lines; all other lines are empty."""
    lines = source.splitlines()
    kept = [""] * len(lines)
    for node in ast.walk(ast.parse(source)):
        for found in node.body if isinstance(getattr(node, "body", None), list) else ():
            if isinstance(found, ast.Expr) and isinstance(found.value, ast.Constant):
                span = slice(found.lineno - 1, found.end_lineno)
                kept[span] = lines[span]
    return "\n".join(kept)


def load_style(path: Path = STYLE) -> dict[str, Any]:
    """Sections `files`, `phrases` and `terms`."""
    return tomllib.loads(path.read_text())


def make_checks(style: dict[str, Any]) -> tuple[Check, ...]:
    """One check per entry of the sections `phrases` and `terms`. A space also matches a line's end."""
    return tuple(
        Check(
            check_type=types.PreferredForms(items={pattern.replace(" ", r"\s+"): advice}),
            engine=engine.Fancy(),
            path=f"dscore.{section}.{number}",
            message=f"'{{1}}': {advice.replace('{', '{{').replace('}', '}}')}",
            flags=CheckFlags(allow_quotes=True),
        )
        for section in ("phrases", "terms")
        for number, (pattern, advice) in enumerate(style[section].items())
    )


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string that may be a message; a backtick for what an f-string fills in."""
    tree = ast.parse(source)
    inside = set()  # docstrings, and the parts of f-strings
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            inside.add(node.value)
        if isinstance(node, ast.JoinedStr):
            inside.update(node.values)
            parts = [v.value if isinstance(v, ast.Constant) else "`" for v in node.values]
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            text = node.value
        else:
            continue
        # Scripts and files are texts of many lines; names and options are single words.
        if " " in text.strip() and text.count("\n") < 3:
            yield node.lineno, OPTION.sub("`", text)


def find_files(files: Sequence[str]) -> list[str]:
    """The names of files that git knows or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *files]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).exists()]


def find_texts(style: dict[str, Any]) -> list[Path]:
    """The files of `files.read` without those of `files.skip`."""
    skipped = style["files"]["skip"]
    names = find_files(style["files"]["read"])
    return [ROOT / n for n in names if not any(fnmatch(n, pattern) for pattern in skipped)]


def find_faults(text: str, name: str, style: dict[str, Any]) -> list[str]:
    """Lines like `docs/page.md:3:7: 'goes on': resumes, continues`."""
    config = Config(
        max_errors=1000, checks={"dscore": True} | dict.fromkeys(style["files"]["proselint"], True)
    )
    return [
        f"{name}:{found.pos[0]}:{found.pos[1]}: {' '.join(found.check_result.message.split())}"
        for found in LintFile(name, prose(text)).lint(config)
    ]


def find_message_faults(source: str, name: str, style: dict[str, Any]) -> list[str]:
    """The same for the messages in a Python file, without the columns."""
    rules = [
        (re.compile(r"\b(?:" + pattern.replace(" ", r"\s+") + r")\b", re.IGNORECASE), advice)
        for section in ("phrases", "terms")
        for pattern, advice in style[section].items()
    ]
    return [
        f"{name}:{line}: {found.group()!r}: {advice}"
        for line, text in messages(source)
        for rule, advice in rules
        for found in rule.finditer(text)
    ]


def register(style: dict[str, Any]) -> None:
    """Put proselint's checks and ours into proselint's registry, once."""
    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(checks.__register__)
        registry.register_many(make_checks(style))


def main(argv: list[str]) -> int:
    """Print the faults; 1 if there is one."""
    style = load_style()
    register(style)
    texts = [Path(name).resolve() for name in argv] or find_texts(style)
    faults = []
    for path in texts:
        text = path.read_text()
        text = docstrings(text) if path.suffix == ".py" else text
        faults += find_faults(text, os.path.relpath(path, ROOT), style)
    sources = [] if argv else find_files(style["files"]["messages"])
    for name in sources:
        faults += find_message_faults((ROOT / name).read_text(), name, style)
    read = f"{len(texts)} texts and the messages of {len(sources)} files read"
    print("\n".join(faults) if faults else f"{read}: docs/style.toml is kept")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

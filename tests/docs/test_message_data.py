"""``dscore explain`` searches what docs/errors.md and the sources say today.

``python tests/docs/test_message_data.py`` writes the file anew.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "plugins" / "cli" / "ds_cli" / "explain" / "messages.json"


def data() -> dict[str, Any]:
    """What the file should hold."""
    classes, explained = _page((ROOT / "docs" / "errors.md").read_text())
    rows = [[error, message, meaning, ""] for error, message, meaning in explained]
    known = {(error, message) for error, message, _, _ in rows}
    for error, found in sorted(_sources().items()):
        for message, module in sorted(found):
            flat = " ".join(message.split())
            if (error, flat) not in known and error != "DSError":
                rows.append([error, flat, "", module])
                known.add((error, flat))
    for error in sorted({row[0] for row in rows}):
        classes.setdefault(error, "")
    return {"classes": classes, "messages": rows}


def as_text(found: dict[str, Any]) -> str:
    """One row a line, so that changes are read line by line."""
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in found["messages"])
    classes = json.dumps(found["classes"], ensure_ascii=False, indent=1)
    return f'{{"classes": {classes},\n "messages": [\n{rows}\n]}}\n'


def _page(text: str) -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """Of each class its first paragraph, and the rows of its table."""
    classes: dict[str, str] = {}
    rows = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        if not re.fullmatch(r"[A-Z]\w+", name.strip()):
            continue
        paragraphs = [p for p in body.strip().split("\n\n") if not p.startswith("|")]
        classes[name.strip()] = _plain(paragraphs[0]) if paragraphs else ""
        for line in body.splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) == 2 and cells[0].startswith("`"):
                rows.append((name.strip(), _plain(cells[0]), _plain(cells[1])))
    return classes, rows


def _plain(text: str) -> str:
    linked = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text.replace("\\|", "|"))
    return " ".join(linked.replace("`", "").split())


def _sources() -> dict[str, list[tuple[str, str]]]:
    # By the name under which test_errors.py imports it, too: the sources are parsed once for both.
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from _site.messages import messages
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return messages(ROOT)


def test_the_file_is_current() -> None:
    assert FILE.read_text() == as_text(data()), (
        "run python tests/docs/test_message_data.py: messages or docs/errors.md have changed"
    )


if __name__ == "__main__":
    FILE.write_text(as_text(data()))
    sys.exit(0)

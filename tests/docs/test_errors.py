"""docs/errors.md has an entry for every error class, and its messages are those of the code."""

from __future__ import annotations

import re
import sys

from pages import DOCS, ROOT

PAGE = (DOCS / "errors.md").read_text("utf-8")
sys.path.insert(0, str(DOCS))
from _site.messages import error_classes, messages  # noqa: E402

sys.path.remove(str(DOCS))

NOT_AS_WRITTEN = {
    "unknown key …": "a word of the message stands for itself",
    "train_batch_size … is not …": "ds_core.config.core.resolve_batch, in two pieces",
    "section … is served by …, which is not installed": "ds_core.catalogue.missing",
}


def test_every_error_class_has_an_entry() -> None:
    described = set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE))
    classes = set(error_classes(ROOT))
    assert len(classes) > 10
    assert described == classes, (
        f"docs/errors.md: missing {classes - described}, not a class {described - classes}"
    )


def test_explained_messages_are_raised() -> None:
    known = {" ".join(text.split()) for rows in messages(ROOT).values() for text, _ in rows}
    assert len(known) > 400
    shown = [
        row
        for row in re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
        if row not in NOT_AS_WRITTEN
    ]
    gone = [row for row in shown if not any(row in text for text in known)]
    assert len(shown) > 30
    assert not gone, "docs/errors.md explains messages that no code raises: " + "\n".join(gone)

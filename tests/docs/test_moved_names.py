"""What people copy names no module by its former name: pages, examples and templates.

Such a name works, with a warning, and not with a type checker.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOVED = json.loads((ROOT / "ds_core/moved.json").read_text())["modules"]
IMPORT = re.compile(r"\b(?:from|import)\s+(\w+(?:\.\w+)+)")
COPIED = (
    "README.md",
    "docs/**/*.md",
    "examples/**/*.py",
    "benchmarks/*.py",
    "plugins/*/README.md",
    "ops/*/README.md",
    "monitors/*/README.md",
    "plugins/new/**/*.jinja",
)


def test_pages_examples_and_templates_have_the_names_of_today() -> None:
    pages = [page for pattern in COPIED for page in ROOT.glob(pattern)]
    assert len(pages) > 100
    found = [
        f"{page.relative_to(ROOT)}: {name} is {MOVED[name]}"
        for page in pages
        for name in IMPORT.findall(page.read_text())
        if name in MOVED
    ]
    assert found == []

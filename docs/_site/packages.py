"""One page for each distribution: its README, with links into the repository turned into links
within the site.
"""

from __future__ import annotations

import re
from pathlib import Path

HEAD = """# Packages

Every feature is a distribution of its own. `dscore-train[standard]` and `dscore-train[all]` install those that the root
`pyproject.toml` lists under these names; every other is installed by its own name.

| package | what it gives |
| --- | --- |
"""
BLOB = "https://github.com/ds-core/ds_core/blob/main/"
TREE = "https://github.com/ds-core/ds_core/tree/main/"


def package_pages(root: Path) -> dict[str, str]:
    """A page for each distribution below plugins/, ops/ and monitors/, and their list."""
    pages = {}
    rows = []
    homes = distributions(root)
    for dist, folder in sorted(homes.items()):
        about = re.search(
            r'^description = "(.+)"', (folder / "pyproject.toml").read_text(), re.MULTILINE
        )
        rows.append(f"| [{dist}]({dist}.md) | {about[1] if about else ''} |")
        pages[f"packages/{dist}.md"] = inward((folder / "README.md").read_text(), root, homes)
    toc = "\n".join(sorted(homes))
    return {
        "packages/index.md": HEAD
        + "\n".join(rows)
        + f"\n\n```{{toctree}}\n:hidden:\n\n{toc}\n```\n",
        **pages,
    }


def distributions(root: Path) -> dict[str, Path]:
    """Name -> folder."""
    found = {}
    for file in sorted(root.glob("*/*/pyproject.toml")):
        if file.parts[-3] in ("plugins", "ops", "monitors"):
            name = re.search(r'^name = "(.+)"', file.read_text(), re.MULTILINE)
            assert name is not None, file
            found[name[1]] = file.parent
    return found


def inward(text: str, root: Path, homes: dict[str, Path]) -> str:
    """`text` with links to pages of this repository that the site has, as links within the site."""
    text = re.sub(re.escape(BLOB) + r"docs/([\w./-]+\.md)", r"../../\1", text)
    for dist, folder in homes.items():
        path = folder.relative_to(root).as_posix()
        text = re.sub(
            rf"\]\((?:{re.escape(TREE)}{path}/?|{re.escape(BLOB)}{path}/README\.md)(#[\w-]+)?\)",
            rf"]({dist}.md\1)",
            text,
        )
    return text

"""The site builds without a warning, needs no network to be read, and has every page."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import DOCS, ROOT, name_of, pages

# The build takes minutes, on a busy machine many.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert find_spec("sphinx"), (
        "`make test-all` and `make docs` install what the site needs (docs/requirements.txt)"
    )
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-W",
        "--keep-going",
        "-q",
        "-j",
        "auto",
    ]
    done = subprocess.run(
        [*command, "-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_it_has_every_page_and_the_references(site: Path) -> None:
    written = [page for page in pages() if page.is_relative_to(DOCS)]
    missing = [
        name_of(page)
        for page in written
        if not (site / page.relative_to(DOCS)).with_suffix(".html").exists()
    ]
    assert not missing
    assert (
        'id="confval-zero_optimization.stage"'
        in (site / "reference/config/zero_optimization.html").read_text()
    )
    assert 'id="ds_core.plugins.hookspecs.ds_loader"' in (site / "reference/hooks.html").read_text()
    assert (
        'id="ds_core.engine.engine.Engine.backward"'
        in (site / "reference/api/ds_core.engine.engine.html").read_text()
    )
    assert 'id="ds_zero.Init"' in (site / "reference/api/ds_zero.html").read_text()
    assert (site / "reference/packages/dscore-zero.html").exists()


def test_reading_it_needs_no_network(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|img|iframe)\b[^>]*\bsrc=\"(https?://[^\"]+)|<link\b[^>]*\brel=\"(?!canonical)[^>]*\bhref=\"(https?:[^\"]+)"
    )
    allowed = "https://github.com/ds-core/ds_core/raw/main/docs/"
    found = {
        (page.name, *match.groups())
        for page in site.rglob("*.html")
        for match in loaded.finditer(page.read_text("utf-8"))
        if not (match[1] or "").startswith(allowed)
    }
    assert not found
    styles = "".join(style.read_text("utf-8") for style in site.rglob("*.css"))
    assert not re.search(r"(@import|url\()\s*[\"']?https?:", styles)

"""The pictures in docs/images are those that docs/_site/drawings.py draws."""

from __future__ import annotations

import re
import sys

import pytest
from pages import DOCS

sys.path.insert(0, str(DOCS))
from _site.drawings import DRAWINGS, svg

sys.path.remove(str(DOCS))


@pytest.mark.parametrize("name", sorted(DRAWINGS))
def test_a_picture_is_current(name: str) -> None:
    assert (DOCS / "images" / f"{name}.svg").read_text() == svg(DRAWINGS[name]()), (
        "run python docs/_site/drawings.py"
    )


@pytest.mark.parametrize("name", sorted(DRAWINGS))
def test_a_picture_is_shown_with_words_for_those_who_cannot_see_it(name: str) -> None:
    page = (DOCS / "how-it-works.md").read_text()
    assert re.search(rf"!\[[^\]]{{20,}}\]\(\S+/images/{name}\.svg\)", page)

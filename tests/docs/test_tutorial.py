"""The pages that are played do what they show: their files, their commands in order, and their
output.

``python tests/docs/test_tutorial.py PAGE...`` runs them and writes the output into the pages;
``--frontends``: those of the front-ends too, with the Python of `make test-frontends`.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from pages import DOCS, name_of
from played import CONSOLE, PAGES, masked, played


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_what_it_shows(page: Path, tmp_path: Path) -> None:
    assert masked(played(page, tmp_path)) == masked(page.read_text("utf-8")), (
        f"run python tests/docs/test_tutorial.py {name_of(page)}"
    )


def test_it_shows_that_the_loss_falls() -> None:
    texts = [found["text"] for found in CONSOLE.finditer(PAGES[0].read_text("utf-8"))]
    plain, ours = (re.findall(r"epoch \d: loss ([\d.]+)", text) for text in texts[0:3:2])
    assert len(plain) == len(ours) == 3
    assert max(float(plain[-1]), float(ours[-1])) < 0.5


if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if word != "--frontends"]
    for chosen in [Path(name).resolve() for name in names] or PAGES:
        with tempfile.TemporaryDirectory(dir=DOCS.parent) as folder:
            text = played(chosen, Path(folder), frontends="--frontends" in sys.argv)
        chosen.write_text(text, "utf-8")

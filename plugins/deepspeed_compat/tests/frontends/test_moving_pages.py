"""What the documentation shows of PEFT, Accelerate and Lightning beside ds_core, with their
released packages: docs/fine-tune.md, docs/moving-from-accelerate.md, docs/moving-from-lightning.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import name_of
from played import FRONTENDS, PAGES, masked, played

pytestmark = pytest.mark.integration


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if FRONTENDS in page.read_text("utf-8")], ids=name_of
)
def test_a_page_is_what_it_shows(page: Path, tmp_path: Path) -> None:
    assert masked(played(page, tmp_path, frontends=True)) == masked(page.read_text("utf-8")), (
        f"run python tests/docs/test_tutorial.py --frontends {name_of(page)}"
    )

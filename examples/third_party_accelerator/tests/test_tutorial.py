"""The code of the tutorial is that of the example, to the letter."""

from __future__ import annotations

from pathlib import Path

from distributions import ROOT
from pages import blocks

EXAMPLE = Path(__file__).parents[1]


def test_the_tutorials_code_is_the_examples() -> None:
    shown = [
        b
        for b in blocks(ROOT / "docs/tutorials/write-an-accelerator.md")
        if b.language in ("cpp", "python", "toml")
    ]
    assert len(shown) > 15
    for block in shown:
        first, _, code = block.text.partition("\n")
        name = first.lstrip("/# ")
        assert code in (EXAMPLE / name).read_text(), f"line {block.line}: this is not in {name}"

"""What docs/versions.md says was run is what every distribution declares."""

from __future__ import annotations

import re

from distributions import DISTRIBUTIONS, ROOT

PAGE = (ROOT / "docs" / "versions.md").read_text()
RUN = re.findall(r"^\| (3\.\d+) \| ([\d.]+) \|", PAGE, re.MULTILINE)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_declared_is_what_was_run() -> None:
    pythons = sorted({python for python, _ in RUN}, key=numbers)
    oldest = min((torch for _, torch in RUN), key=numbers)
    for folder in (ROOT, *DISTRIBUTIONS):
        text = (folder / "pyproject.toml").read_text()
        assert f'requires-python = ">={pythons[0]}"' in text, folder
        assert re.findall(r"Python :: (3\.\d+)", text) == pythons, folder
        for bound in re.findall(r'"torch>=([\d.]+)', text):
            assert numbers(bound) == numbers(oldest)[: len(numbers(bound))], folder


def test_every_version_of_the_target_has_a_row() -> None:
    text = (ROOT / "tests" / "versions" / "run.py").read_text()
    assert re.findall(r'\("(3\.\d+)", "([\d.]+)", ', text) == RUN
    assert (
        "3.11",
        re.findall(r"^TORCH := torch==(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0],
    ) in RUN

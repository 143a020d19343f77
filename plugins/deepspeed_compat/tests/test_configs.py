"""Configs as the documents of DeepSpeed, Transformers, Accelerate, TRL and Lightning show them.

Each in ``configs`` passes ``dscore config check``, or every key that cannot be had is named in one
line: those in ``expected.json``, no others.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from ds_cli.config.command import make_app
from ds_deepspeed_compat.configs.migration import migrated
from typer.testing import CliRunner

FOLDER = Path(__file__).parent / "configs"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
PACKAGES = {"wandb.enabled": "wandb", "comet.enabled": "comet_ml"}
"""Keys that are refused where a package is missing."""


def test_there_is_an_expectation_for_each() -> None:
    assert sorted(EXPECTED) == sorted(
        file.stem for file in FOLDER.glob("*.json") if file.stem != "expected"
    )
    assert len(EXPECTED) >= 60


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_it_passes_or_each_key_that_cannot_be_had_is_named(name: str) -> None:
    file = FOLDER / f"{name}.json"
    refused = set(EXPECTED[name]["refused"])
    refused -= {key for key, package in PACKAGES.items() if find_spec(package)}
    said = CliRunner().invoke(make_app(), ["check", str(file)])
    lines = said.output.splitlines()
    if not refused:
        assert said.exit_code == 0, said.output
    else:
        assert said.exit_code == 1
        named = {line.removeprefix(f"{file}: ").partition(": ")[0] for line in lines}
        assert named and named <= refused, said.output
    found = migrated(file)
    assert {problem.path for problem in found.lost} == refused
    assert all("\n" not in str(problem) for problem in found.lost)
    again = migrated(found.config)
    assert again.config == found.config
    assert not (again.renamed or again.idle or again.lost)

"""Nothing in the core says of a distribution in this repository that it does not exist, installed
or not.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from ds_core import catalogue
from ds_core.errors import ConfigError
from ds_core.setup.compose import compose

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"{name}_maker", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


maker = loaded("catalogue")

PROJECTS = maker.projects()
NOT_THERE = re.compile(r"not built yet|not offered|will come with")


def test_the_catalogue_is_current() -> None:
    assert maker.FILE.read_text() == maker.made(), "run `make catalogue`"


def test_the_stub_of_engine_methods_is_current() -> None:
    methods = loaded("engine_methods")
    assert methods.FILE.read_text() == methods.made(), "run `make catalogue`"


def refusal(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a config is told where nothing but the core is installed."""
    monkeypatch.setattr("ds_core.plugins.registry.discover", lambda: ())
    with pytest.raises(ConfigError) as caught:
        compose({"train_batch_size": 1} | config)
    return str(caught.value)


@pytest.mark.parametrize("dist", PROJECTS)
def test_what_is_not_installed_is_answered_with_how_to_install_it(
    dist: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, project = PROJECTS[dist]
    hint = catalogue.install(dist)
    assert hint.startswith(f"`pip install -c dist/constraints.txt {dist}` in a clone of ds_core")
    said = [
        refusal({section: {"enabled": True, "some": "key"}}, monkeypatch)
        for section in project.get("entry-points", {}).get("ds_core.plugins", {})
    ]
    for kind, key in (("optimizers", "optimizer"), ("schedulers", "scheduler")):
        names = [n for n in catalogue.known(kind) if catalogue.offered_by(kind, n) == dist]
        core_has = {"adam", "adamw", "sgd", "adagrad"}
        said += [
            refusal({key: {"type": n}}, monkeypatch) for n in names if n.lower() not in core_has
        ]
    for text in said:
        assert NOT_THERE.search(text) is None and hint in text and f"served by {dist}" in text, text


def test_the_documents_owners_are_those_that_exist() -> None:
    """A section that somebody serves is served by whom the list of documented owners names."""
    assert {
        n: row
        for n, row in catalogue.documented().items()
        if catalogue.offered_by("sections", n) not in (None, row["owner"])
    } == {}


def test_no_sentence_promises_a_distribution_that_is_here() -> None:
    promise = re.compile(r"(?:will come with|comes with a later)[^\"']{0,20}?\b(dscore-[a-z-]+)")
    found = []
    for file in [
        *ROOT.glob("ds_core/**/*.py"),
        *ROOT.glob("*/*/ds_*/**/*.py"),
        *ROOT.glob("docs/*.md"),
    ]:
        text = file.read_text().replace("a later version of ds-", "a later version of DS-")
        found += [f"{file}: {m[0]}" for m in promise.finditer(text) if m[1] in PROJECTS]
    assert found == []

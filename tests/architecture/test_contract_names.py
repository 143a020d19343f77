"""No name that plugins use disappears, or takes other arguments, without a word: see
docs/stability.md.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from contract import FILE, ROOT, changes, imported, resolved

from ds_core.moved import MODULES, NAMES

RECORDED: dict[str, Any] = json.loads(FILE.read_text())
MOST = 179
"""The names that plugins import from the core: what an author has to learn."""
PLANS = "old_forms.give_plans: a partitioner of the earlier form works on"
BY_POSITION = "given by position"
EXPLAINED = {
    "ds_core.config:RunConfig.section does not take 'name' any more": BY_POSITION,
    "ds_core.config:RunConfig.section must be given 'which'": BY_POSITION,
    "ds_core.partition:Partitioner.begin does not take 'changed' any more": PLANS,
    "ds_core.partition:Partitioner.begin must be given 'plan'": PLANS,
    "ds_core.partition:Partitioner.finish must be given 'plan'": PLANS,
    "ds_core.replicated:Replicated.begin does not take 'changed' any more": PLANS,
    "ds_core.replicated:Replicated.begin must be given 'plan'": PLANS,
    "ds_core.replicated:Replicated.finish must be given 'plan'": PLANS,
}
"""A change that callers notice -> how the old form works on."""


def test_every_name_that_plugins_used_is_there() -> None:
    missing = []
    for name in RECORDED:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", DeprecationWarning)
            try:
                resolved(name)
            except (ImportError, AttributeError):
                missing.append(name)
                continue
        module, _, attribute = name.partition(":")
        moved = module in MODULES or attribute in NAMES.get(module, {})
        if moved and not warned and attribute in NAMES.get(module, {}):
            missing.append(f"{name} has moved without a warning")
    assert missing == [], "give an entry in ds_core/moved.py"


@pytest.mark.filterwarnings("ignore:.* now:DeprecationWarning")
def test_no_signature_changed_without_an_old_form() -> None:
    found = [
        change
        for name, before in RECORDED.items()
        for change in changes(name, before, resolved(name))
    ]
    assert sorted(set(found) - set(EXPLAINED)) == []
    assert sorted(set(EXPLAINED) - set(found)) == [], "no longer so"


def test_every_name_that_plugins_use_is_recorded() -> None:
    assert sorted(imported(ROOT) - RECORDED.keys()) == [], (
        "run python tests/architecture/contract.py"
    )


def test_plugins_need_few_names_of_the_core() -> None:
    """Names, not modules: one that is imported from two modules is one."""
    names = {name.partition(":")[2] for name in imported(ROOT)}
    assert len(names) <= MOST, (
        f"{len(names)} names: what a plugin needs is a hook, or belongs to a kit"
    )


def test_what_callers_notice_is_found() -> None:
    def before(a: int, b: int = 1) -> None: ...
    def now(a: int, c: int, d: int = 1) -> None: ...

    from contract import arguments, differences

    found = list(differences("f", arguments(before), arguments(now)))
    assert found == ["f does not take 'b' any more", "f must be given 'c'"]

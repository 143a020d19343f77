"""``dscore plugins grade``: a plugin as `dscore new plugin` writes it reaches the top; what is
wrong is found.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from building import write_metadata
from ds_new.naming import forms_of
from ds_new.rendering import render
from ds_testing.grade import Subject, examine, level_of
from ds_testing.processes import clean_environment, run

METADATA = (
    "License-Expression: Apache-2.0",
    "Requires-Python: >=3.10",
    "Summary: a plugin",
    "Requires-Dist: dscore-train>=0.1,<0.2",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("graded")
    for path, text in render("observer", forms_of("my-watch")).items():
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).write_text(text)
    write_metadata(
        made,
        "my-watch",
        *METADATA,
        entry_points={"ds_core.plugins": {"my_watch": "my_watch.plugin"}},
    )
    return made


@pytest.mark.slow
def test_a_new_plugin_is_whole(site: Path) -> None:
    dscore = str(Path(sys.executable).with_name("dscore"))
    env = clean_environment(PYTHONPATH=str(site))
    said = run([dscore, "plugins", "grade", "my_watch.plugin"], cwd=site, env=env, timeout=600)
    assert said.splitlines()[-1] == "my_watch.plugin: whole", said


WRONG = {
    "parallel": "def ds_open(ctx):\n    if ctx.rank == 1:\n        "
    "ctx.engine.module.last.bias.data.add_(1)\n",
    "resumes": "def ds_step_end(ctx, step):\n"
    "    SEEN.append(step)\n    ctx.engine.module.last.bias.data.add_(0.01 * len(SEEN))\n",
    "given-back": "def ds_open(ctx):\n    ctx.module.left = 1\n",
    "quiet": "print('hello')\n",
    "torch-free": "import torch\n",
    "contract": "",
}
BODY = """
from ds_core.config import Section

SEEN = []

class Wrong(Section):
    \"\"\"It has no keys.\"\"\"

def ds_config():
    return Wrong
"""


@pytest.mark.fast_cases("resumes", "quiet", "parallel")
@pytest.mark.parametrize("rule", WRONG)
def test_what_is_wrong_is_found(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"wrong_{rule.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(BODY + WRONG[rule])
    monkeypatch.syspath_prepend(str(tmp_path))
    others = {"tests", "kits", "documented", "typed", "metadata", "bounds", "lower-bounds"}
    others |= {"parallel", "resumes", "given-back"} - {rule}
    verdicts = list(examine(Subject(name, name, {}), frozenset(others)))
    assert {v.rule.name for v in verdicts if v.passed is False} >= {rule}, verdicts
    assert level_of(verdicts) != "whole"

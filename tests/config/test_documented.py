"""Sections that are switched off and have no plugin here: accepted without misspelt keys; the file
of their keys.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_core.catalogue import documented, known, offered_by
from ds_core.config import build_config
from ds_core.config.keys import iter_keys
from ds_core.errors import ConfigError

MISSPELT: list[tuple[dict[str, Any], str, str]] = [
    (
        {"flops_profiler": {"enabled": False, "profile_stpe": 3}},
        "flops_profiler.profile_stpe",
        "profile_step",
    ),
    ({"flops_profiler": {"enabld": False}}, "flops_profiler.enabld", "enabled"),
    (
        {"csv_monitor": {"enabled": False, "outputpath": "x"}},
        "csv_monitor.outputpath",
        "output_path",
    ),
    (
        {"zero_optimization": {"stage": 0, "offload_param": {"devise": 1}}},
        "zero_optimization.offload_param.devise",
        "",
    ),
    (
        {
            "tensor_parallel": {
                "autotp_size": 0,
                "partition_config": {"layer_specs": [{}, {"patern": "x"}]},
            }
        },
        "tensor_parallel.partition_config.layer_specs[1].patern",
        "tensor_parallel.partition_config.layer_specs[1].patterns",
    ),
    ({"compile": {"deepcompile": False, "pases": ["z1"]}}, "compile.pases", "compile.passes"),
    ({"elasticity": {"enabled": False, "min_gpu": 1}}, "elasticity.min_gpu", "elasticity.min_gpus"),
]


@pytest.mark.parametrize(("config", "path", "meant"), MISSPELT)
def test_a_misspelt_key_of_a_section_that_is_off_is_named(
    config: dict[str, Any], path: str, meant: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(config, {})
    (problem,) = caught.value.problems
    assert problem.path == path
    assert meant in problem.fix
    assert documented()[next(iter(config))]["owner"] in problem.fix


def test_a_misspelt_secret_is_not_shown() -> None:
    with pytest.raises(
        ConfigError,
        match=r"wandb.api_kye: unknown key 'api_kye' \(its value is \*\*\*\); wandb .* takes",
    ):
        build_config({"wandb": {"enabled": False, "api_kye": "hunter2"}}, {})


@pytest.mark.parametrize("section", sorted(documented()))
def test_every_documented_key_is_accepted_while_the_section_is_off(section: str) -> None:
    def sample(keys: dict[str, Any] | None) -> Any:
        return (
            1
            if keys is None
            else {("any name" if k == "*" else k): sample(inner) for k, inner in keys.items()}
        )

    switch = {"zero_optimization": {"stage": 0}, "tensor_parallel": {"autotp_size": 0}}
    off = {"compile": {"deepcompile": False}, **switch}.get(section, {"enabled": False})
    keys = documented()[section]["keys"]
    if keys is None:  # a key of one value
        for value in (None, *documented()[section].get("off", [False])):
            assert build_config({section: value}, {}).notes == ()
        return
    assert (
        build_config({section: {**sample(keys), **off} if set(off) <= set(keys) else {}}, {}).notes
        == ()
    )


@pytest.mark.parametrize(
    "section", sorted(n for n in known("sections") if offered_by("sections", n))
)
def test_the_file_has_every_key_of_our_own_plugins(section: str) -> None:
    from ds_core.plugins import Plugins

    model, _ = Plugins().models([section])[section]
    for key in iter_keys(model):
        keys: Any = documented()[section]["keys"]
        for name in key.path.replace("[]", "").split("."):
            assert name in keys, (
                f"{section}.{key.path} is missing in tests/architecture/documented.json"
            )
            keys = keys[name]


def test_the_catalogue_is_read_only_when_a_section_has_no_plugin() -> None:
    code = (
        "from ds_core.setup.compose import compose\nfrom ds_core.catalogue import _catalogue\n"
        "for config in ({'fp16': {'enabled': False}}, {'nebula': {'enabled': False}}):\n"
        "    compose(config)\n"
        "    print(_catalogue.cache_info().currsize)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    ).stdout
    assert said.split() == ["0", "1"]


@pytest.mark.parametrize(
    ("key", "meant"), [("nebulla", "not offered"), ("tensorbord", "not installed")]
)
def test_the_nearest_section_says_whether_it_can_be_had(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean '\w+' \(.*{meant}\)\?"):
        build_config({key: {"enabled": True}}, {})


def not_offered() -> dict[str, str]:
    """Every documented section and key that is not offered, with the reason and what to use."""
    from ds_core.config import CoreConfig
    from ds_core.config.section import NOT_OFFERED, marks
    from ds_core.plugins import Plugins

    found = {name: row["why"] for name, row in documented().items() if "why" in row}
    sections = sorted(n for n in known("sections") if offered_by("sections", n))
    models = [
        ("", CoreConfig),
        *((name, model) for name, (model, _) in Plugins().models(sections).items()),
    ]
    for prefix, model in models:
        for key in iter_keys(model, prefix):
            if why := marks(key.field).get(NOT_OFFERED):
                found[key.path] = str(why)
    return found


def test_every_key_is_offered_or_says_why_not_and_the_table_has_it() -> None:
    table = (
        (Path(__file__).parents[2] / "docs" / "differences.md")
        .read_text()
        .partition("## Not offered")[2]
    )
    missing = not_offered()
    assert {"amp", "nebula", "compile.offload_parameters", "compile.symmetric_memory"} <= set(
        missing
    )
    for path, why in missing.items():
        assert not re.search(r"\byet\b|not built|\blater\b|will come", why), f"{path}: {why}"
        if "is not in this version" not in why:
            assert f"`{path}`" in table, (
                f"{path} is missing in the last table of docs/differences.md"
            )


@pytest.mark.parametrize("section", sorted(documented()))
def test_no_answer_says_not_built_yet(section: str) -> None:
    """Of any documented section, switched on without a plugin: who serves it, or why nobody
    does."""
    with pytest.raises(ConfigError) as caught:
        build_config({section: "an odd value"}, {})
    said = str(caught.value)
    assert "not built" not in said and "will come" not in said
    assert "install it with" in said or "is documented but not offered: " in said

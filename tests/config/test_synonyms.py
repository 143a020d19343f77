"""Keys that people try: the error says where the key is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from refused_configs import refused

import ds_core.config
from ds_core.catalogue import documented
from ds_core.config import CORE_KEYS, CoreConfig, build_config
from ds_core.config.keys import iter_keys
from ds_core.errors import ConfigError
from ds_core.setup.compose import compose

SYNONYMS: Mapping[str, str] = json.loads(
    (Path(ds_core.config.__file__).parent / "synonyms.json").read_text()
)


def is_key(path: str) -> bool:
    """Whether the core or the documents have a key; parameters of optimizers are open."""
    section, *inner = path.split(".")
    if section in CORE_KEYS:
        paths = {key.path for key in iter_keys(CoreConfig)}
        return path in paths or ".".join(path.split(".")[:2]) in (
            "optimizer.params",
            "scheduler.params",
        )
    if section not in documented():
        return section in ("sequence_parallel", "tensor_parallel", "expert_parallel")
    keys: Any = documented()[section]["keys"]
    for name in inner:
        if keys is None or name not in keys:
            return False
        keys = keys[name]
    return True


@pytest.mark.parametrize(("name", "place"), SYNONYMS.items())
def test_it_names_keys_that_there_are(name: str, place: str) -> None:
    assert name not in CORE_KEYS and name not in documented()
    for path in re.findall(r"[a-z_]+\.[a-z_.]+[a-z]", place):
        assert is_key(path) or path.startswith("torch."), path
    with pytest.raises(ConfigError) as caught:
        build_config({name: 1}, {})
    (problem,) = caught.value.problems
    assert problem.path == name
    assert problem.fix == f"{name!r} belongs in {place}"


def test_in_a_section_too() -> None:
    (problem,) = refused({"optimizer": {"type": "AdamW", "lr": 0.1}}).problems
    assert str(problem).endswith("'lr' belongs in optimizer.params.lr")


def test_keys_and_names_are_told_together() -> None:
    config = {
        "lr": 1,
        "gradient_clipping": float("nan"),
        "optimizer": {"type": "AdmW"},
        "scheduler": {"type": "WarmpLR"},
        "plugins": {"load": 3},
    }
    with pytest.raises(ConfigError) as caught:
        compose(config)
    told = [problem.path for problem in caught.value.problems]
    assert sorted(told) == [
        "gradient_clipping",
        "lr",
        "optimizer.type",
        "plugins.load",
        "scheduler.type",
    ]


def test_a_wrong_section_is_one_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        compose({"optimizer": {"type": 3, "params": {"lr": float("nan")}}, "scheduler": 1})
    assert {p.path for p in caught.value.problems} == {
        "optimizer.params.lr",
        "optimizer.type",
        "scheduler",
    }
    with pytest.raises(ConfigError) as caught:
        compose({"optimizer": {"type": "AdamW", "params": {"lr": float("nan")}}})
    (problem,) = caught.value.problems
    assert "NaN" in problem.message

"""Configs that are refused: files with repeated keys, batch sizes that do not fit, several problems
at once.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, RootModel
from refused_configs import MODELS, Fake, Rule, refused

from ds_core.config import Section, build_config, option, read_config, resolve_batch
from ds_core.errors import ConfigError

# -- repeated keys, in every format ----------------------------------------------------------------

REPEATED = [
    (".json", '{"train_batch_size": 1, "train_batch_size": 2}', "train_batch_size"),
    (".json", '{"fp16": {"enabled": true, "enabled": true}}', "fp16.enabled"),
    (".json", '{"fake": {"rules": [{}, {"dim": 1, "dim": 1}]}}', "fake.rules[1].dim"),
    (".json", '{"fp16": {}, "fp16": {}}', "fp16"),
    (".json", '{"optimizer": {"params": {"lr": 1, "lr": 2}}}', "optimizer.params.lr"),
    (".hjson", "{\n  fp16: {\n    enabled: true\n    enabled: false\n  }\n}", "fp16.enabled"),
    (".hjson", "train_batch_size: 1\ntrain_batch_size: 2\n", "train_batch_size"),
    (".yaml", "fp16:\n  enabled: true\n  enabled: false\n", "fp16.enabled"),
    (".yaml", "fake:\n  rules:\n    - dim: 1\n      dim: 2\n", "fake.rules[0].dim"),
    (".yml", "train_batch_size: 1\ntrain_batch_size: 1\n", "train_batch_size"),
    (".toml", "train_batch_size = 1\ntrain_batch_size = 2\n", "train_batch_size"),
    (".toml", "[fp16]\nenabled = true\nenabled = false\n", "fp16.enabled"),
    (".toml", "[optimizer.params]\nlr = 1\nlr = 2", "optimizer.params.lr"),
    (".toml", "[fp16]\nenabled = true\n[bf16]\n[fp16]\nhysteresis = 2\n", "fp16"),
]
NOT_FINITE = [
    (".json", '{"gradient_clipping": NaN}', "gradient_clipping"),
    (".json", '{"optimizer": {"params": {"lr": -Infinity}}}', "optimizer.params.lr"),
    (".json", '{"gradient_clipping": 1e999}', "gradient_clipping"),
    (".hjson", "gradient_clipping: NaN\n", "gradient_clipping"),
    (".yaml", "fp16: {loss_scale: .inf}\n", "fp16.loss_scale"),
    (".yaml", "gradient_clipping: .nan\n", "gradient_clipping"),
    (".toml", "gradient_clipping = nan\n", "gradient_clipping"),
    (".toml", "[fp16]\nloss_scale = inf\n", "fp16.loss_scale"),
    (".yaml", "1: 2\n", "1"),
    (".yaml", "fp16: {on: true}\n", "fp16.True"),
    (".yaml", "fp16: {enabled: 'true'}\n", "fp16.enabled"),
    (".toml", "train_batch_size = 2024-01-01\n", "train_batch_size"),
]


@pytest.mark.parametrize(("suffix", "text", "path"), REPEATED + NOT_FINITE)
def test_the_key_is_named_in_files(tmp_path: Any, suffix: str, text: str, path: str) -> None:
    file = tmp_path / f"config{suffix}"
    file.write_text(text)
    error = refused(str(file))
    assert path in [p.path for p in error.problems]
    assert str(file) in str(error)


@pytest.mark.parametrize(("suffix", "text", "path"), REPEATED)
def test_repeated_keys_are_called_so(tmp_path: Any, suffix: str, text: str, path: str) -> None:
    file = tmp_path / f"config{suffix}"
    file.write_text(text)
    with pytest.raises(ConfigError, match="repeated"):
        read_config(file)


# -- the batch triple ------------------------------------------------------------------------------

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TRIPLES = [
    ((10, 3, 2), 2),
    ((8, 2, 2), 1),
    ((8, 2, 2), 4),
    ((7, 2, None), 2),
    ((8, 3, None), 2),
    ((2, 4, None), 1),
    ((8, None, 3), 2),
    ((1, None, 2), 1),
    ((3, None, None), 2),
    ((1, None, None), 2),
    ((None, None, 4), 2),
    ((None, None, None), 2),
]


@pytest.mark.parametrize(("given", "world"), TRIPLES)
def test_batch_sizes_that_do_not_multiply_out(given: tuple[int | None, ...], world: int) -> None:
    raw = {k: v for k, v in zip(KEYS, given, strict=True) if v is not None}
    config = build_config(raw, {})
    with pytest.raises(ConfigError) as caught:
        resolve_batch(config.core, world)
    (problem,) = caught.value.problems
    assert problem.path == "train_batch_size"
    assert all(str(v) in str(problem) for v in given if v is not None)
    if given[:2] != (None, None):
        assert f"{world} data-parallel ranks" in problem.message
        assert problem.fix


def test_auto_is_a_value_where_the_field_says_so() -> None:
    config = build_config(
        {"fake": {"strategy": "auto", "sub": {"mode": "auto"}, "groups": {"a": {"mode": "auto"}}}},
        MODELS,
    )

    class Pace(RootModel[Literal["auto"] | int]):
        """A section that is one value."""

    class Paces(Section):
        by_name: dict[str, Literal["auto"] | int] = option({}, "Named.")

    models: dict[str, tuple[type[BaseModel], str]] = {
        "pace": (Pace, "ds-pace 1"),
        "paces": (Paces, "ds-paces 1"),
    }
    paces = build_config({"pace": "auto", "paces": {"by_name": {"a": "auto", "b": 1}}}, models)
    assert paces.section("pace") == Pace("auto") and paces.section("paces") == Paces(
        by_name={"a": "auto", "b": 1}
    )
    assert config.section("fake") == Fake(
        strategy="auto", sub=Rule(mode="auto"), groups={"a": Rule(mode="auto")}
    )


def test_all_problems_come_at_once() -> None:
    bad = {
        "train_batch_size": "8",
        "fp16": {"enabld": 1},
        "fake": {"ratio": 2, "rules": [{"dims": 1}]},
        "wandb": 1,
    }
    paths = {p.path for p in refused(bad).problems}
    assert paths == {"train_batch_size", "fp16.enabld", "fake.ratio", "fake.rules[0].dims", "wandb"}


def test_a_disabled_plugin_says_why() -> None:
    with pytest.raises(
        ConfigError, match=r"fake: the plugin .* is disabled: plugins.disable names it"
    ):
        build_config({"fake": {}}, {}, [], {"fake": "plugins.disable names it"})


def test_json_text_is_the_same_as_a_dict() -> None:
    text = json.dumps({"fp16": {"loss_scale": True}})
    assert refused(json.loads(text)).problems[0].path == "fp16.loss_scale"

"""``--set KEY=VALUE``: typed by the schema, refused before anything starts, without secrets in logs."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from ds_command_kit.overrides import MOST, VARIABLE, describe, read_settings, variables_for
from ds_command_kit.show import CommandError

from ds_core.config import read_config
from ds_core.config.source import ConfigSource


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train_batch_size=8", "train_batch_size", 8),
        ("fp16.enabled=true", "fp16.enabled", True),
        ("gradient_clipping=1e-1", "gradient_clipping", 0.1),
        ("optimizer.type=AdamW", "optimizer.type", "AdamW"),
        ("optimizer.params.betas=[0.9, 0.95]", "optimizer.params.betas", [0.9, 0.95]),
        ('fp16={"enabled": true}', "fp16", {"enabled": True}),
        ("kernels.adam=3", "kernels.adam", "3"),  # text is what the key takes
        ("collectives=null", "collectives", None),
        ("optimizer.params.note=a=b", "optimizer.params.note", "a=b"),
        ("optimizer.params.note=", "optimizer.params.note", ""),
        ("plugins.disable=[]", "plugins.disable", []),
    ],
)
def test_values_have_the_type_of_their_key(text: str, key: str, value: Any) -> None:
    assert read_settings([text]) == {key: value}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zero", "is not KEY=VALUE"),
        ("=3", "is not KEY=VALUE"),
        ("a..b=3", "is not KEY=VALUE"),
        ("a b=3", "is not KEY=VALUE"),
        ("fp16.\x1b[31m=3", "is not KEY=VALUE"),
        ("a" * 10_000 + "=1", "is not KEY=VALUE"),
        ("a=b=c", "unknown key 'a'"),
        ("__class__.x=1", "unknown key '__class__'"),
        ("fp16.__class__=1", "unknown key '__class__'"),
        ("fp16.enabled.x=1", "fp16.enabled: must be true or false"),
        ("train_batch_size=-1", "train_batch_size: must be a whole number > 0"),
        ("train_batch_size=auto", '"auto" was not filled in'),
        ("train_batch_size=8.5", "train_batch_size"),
        ("gradient_clipping=NaN", "gradient_clipping"),
        ("optimizer.params.lr=NaN", "optimizer.params.lr: NaN is not a number"),
        ("optimizer.params=" + "[" * 5000, "optimizer.params"),
        ("amp.enabled=true", "documented but not offered"),
        ("lr=0.1", "'lr' belongs in optimizer.params.lr"),
    ],
)
def test_what_is_wrong_is_refused(text: str, said: str) -> None:
    with pytest.raises(CommandError) as caught:
        read_settings([text])
    message = str(caught.value)
    assert said in message
    assert "\x1b" not in message
    assert len(message) < 2000


def test_all_that_is_wrong_is_said() -> None:
    with pytest.raises(CommandError) as caught:
        read_settings(["x", "fp16.enabled=3", "fp16.hysteresis=2", "lr=1"])
    assert len(str(caught.value).splitlines()) == 3


def test_the_last_one_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    settings = read_settings(["fp16.hysteresis=3", 'fp16={"enabled": true}', "fp16.hysteresis=4"])
    assert [*settings] == ["fp16", "fp16.hysteresis"]
    monkeypatch.setenv(VARIABLE, variables_for(settings)[VARIABLE])
    raw = ConfigSource({"fp16": {"loss_scale": 1}}, "c").overridden().raw
    assert raw == {"fp16": {"enabled": True, "hysteresis": 4}}


def test_what_the_variable_holds_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"fp16.hysteresis": 1, "fp16": {"enabled": True}, "train_batch_size": 3})
    monkeypatch.setenv(VARIABLE, base64.urlsafe_b64encode(text.encode()).decode())
    found = read_config(variables_for({"fp16.hysteresis": 2})[VARIABLE]).raw
    assert found == {"fp16": {"enabled": True}, "train_batch_size": 3, "fp16.hysteresis": 2}
    assert [*found][-1] == "fp16.hysteresis"
    with pytest.raises(CommandError, match="too long"):
        variables_for({"optimizer.params.x": "x" * MOST})


def test_secrets_are_not_shown() -> None:
    shown = describe({"optimizer.params.api_key": "s3cret", "optimizer.params.lr": 0.1})
    assert shown == 'optimizer.params.api_key = "***", optimizer.params.lr = 0.1'
    with pytest.raises(CommandError) as caught:
        read_settings(["api_key=s3cret", "wandb.api_keys=s3cret"])
    assert "api_key" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert "a" * 5000 not in describe({"optimizer.params.x": "a" * 5000})


def test_keys_are_merged_into_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"zero_optimization.stage": 3, "bf16.enabled": True, "optimizer": {"type": "SGD"}}
    monkeypatch.setenv(VARIABLE, base64.urlsafe_b64encode(json.dumps(more).encode()).decode())
    given = {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 7},
        "bf16": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 1}},
    }
    before = json.dumps(given)
    assert ConfigSource(given, "c").overridden().raw == {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 7},
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD"},
    }
    assert json.dumps(given) == before

"""The whole config: defaults, secrets, fingerprints, and that none of it loads torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import traceback
from typing import Any

import pytest
from pydantic import BaseModel, RootModel

from ds_core.catalogue import documented
from ds_core.config import (
    CORE_KEYS,
    Section,
    build_config,
    option,
    read_config,
)
from ds_core.config.build import load_config, plugin_settings
from ds_core.config.redaction import is_secret_name, redact
from ds_core.errors import ConfigError


class Login(Section):
    user: str = option("", "User.")
    code: str | None = option(None, "Code.", secret=True)


class Service(Section):
    enabled: bool = option(False, "On.")
    code: str | None = option(None, "Code.", secret=True)
    logins: list[Login] = option([], "Log-ins.")
    either: Login | bool = option(False, "A log-in or none.")
    max_tokens: int = option(10, "Tokens.")
    url: str = option("", "Address.")


class Level(RootModel[int]):
    """A section that is one number."""


MODELS: dict[str, tuple[type[BaseModel], str]] = {
    "service": (Service, "ds-service 1.0"),
    "level": (Level, "ds-level 1.0"),
}
SECRETS = {
    "service": {
        "code": "S3cret-a",
        "logins": [{"user": "me", "code": "S3cret-b"}],
        "either": {"code": "S3cret-c"},
        "max_tokens": 99,
        "url": "https://me:S3cret-d@host/x",
    },
    "optimizer": {
        "type": "SGD",
        "params": {"lr": 0.1, "hf_token": "S3cret-e", "deep": [{"Api-Key": "S3cret-f"}]},
    },
}


def test_the_defaults_are_the_documents() -> None:
    core = build_config({}, {}).core
    assert (
        core.train_batch_size,
        core.train_micro_batch_size_per_gpu,
        core.gradient_accumulation_steps,
    ) == (None,) * 3
    assert core.managed_gradient_accumulation and not core.dataloader_drop_last
    assert (core.fp16.enabled, core.fp16.loss_scale, core.fp16.initial_scale_power) == (
        False,
        0,
        16,
    )
    assert (core.fp16.loss_scale_window, core.fp16.hysteresis, core.fp16.min_loss_scale) == (
        1000,
        2,
        1,
    )
    assert not core.fp16.consecutive_hysteresis and not core.fp16.auto_cast
    assert (core.bf16.enabled, core.bf16.immediate_grad_update, core.bf16.check_grad_overflow) == (
        False,
        False,
        True,
    )
    assert (core.torch_autocast.enabled, core.torch_autocast.dtype) == (False, None)
    assert (core.gradient_clipping, core.gradient_predivide_factor, core.gradient_allreduce_op) == (
        1.0,
        1.0,
        "mean",
    )
    assert core.communication_data_type is None
    assert core.log_level is None and core.vocabulary_size is None
    assert core.optimizer is None and core.scheduler is None


def test_values_arrive() -> None:
    raw = {
        "train_batch_size": 5e8,
        "communication_data_type": "torch.bfloat16",
        "torch_autocast": {
            "enabled": True,
            "dtype": "bf16",
            "lower_precision_safe_modules": ["torch.nn.Linear"],
        },
        "fp16": {"enabled": True, "loss_scale": 128, "min_loss_scale": 1},
        "data_types": {"param_dtype": "half", "grad_accum_dtype": "float32"},
        "gradient_allreduce_op": "SUM",
        "log_level": "INFO",
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0}},
        "plugins": ["my.module"],
        "level": 3,
        "service": {"either": False},
    }
    config = build_config(raw, MODELS)
    core = config.core
    assert core.train_batch_size == 500_000_000 and type(core.train_batch_size) is int
    assert core.communication_data_type == "bf16"
    assert core.torch_autocast.dtype == "bfloat16"
    assert (core.data_types.param_dtype, core.data_types.grad_accum_dtype) == ("fp16", "fp32")
    assert (core.gradient_allreduce_op, core.log_level) == ("sum", "info")
    assert core.plugins.load == ["my.module"]
    assert core.optimizer is not None and core.optimizer.params == {"lr": 1.0}
    assert config.section("level") == Level(3)
    assert config.section("absent") is None
    assert config.redacted() == raw


def test_the_result_is_frozen() -> None:
    config = build_config({}, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.core = None  # type: ignore[misc, assignment]


def test_plugin_settings() -> None:
    raw = {
        "plugins": {"require": ["dscore-zero>=0.1"], "disable": ["aio"], "prefer": {"a": "b"}},
        "train_batch_size": "x",
    }
    settings = plugin_settings(read_config(raw))
    assert (settings.require, settings.disable, settings.load) == (
        ["dscore-zero>=0.1"],
        ["aio"],
        [],
    )
    assert settings.prefer == {"a": "b"}
    wrong = {"plugins": {"requires": ["no"], "load": ["no.such"]}}
    assert plugin_settings(read_config(wrong)).load == ()
    with pytest.raises(ConfigError, match=r"plugins\.requires: unknown key .*plugins\.require"):
        load_config(wrong)


def test_every_section_of_the_documents_has_an_owner() -> None:
    known = set(documented()) | set(CORE_KEYS)
    for name in (
        "zero_optimization",
        "aio",
        "pipeline",
        "elasticity",
        "nebula",
        "hybrid_engine",
        "fp16",
        "scheduler",
    ):
        assert name in known
    assert set(documented()).isdisjoint(CORE_KEYS)


# -- secrets ---------------------------------------------------------------------------------------


def test_secrets_are_redacted() -> None:
    config = build_config(SECRETS, MODELS)
    shown = config.redacted()
    assert "S3cret" not in json.dumps(shown)
    assert shown["service"]["max_tokens"] == 99
    assert shown["service"]["logins"][0] == {"user": "me", "code": "***"}
    assert shown["optimizer"]["params"]["lr"] == 0.1
    assert "S3cret" not in repr(config) + str(config) + repr(config.core) + repr(config.sections)
    assert config.raw["service"]["code"] == "S3cret-a"  # the plugin still gets it


def test_fingerprints_compare_secrets_without_showing_them() -> None:
    items = build_config(SECRETS, MODELS).fingerprint_items()
    assert "S3cret" not in json.dumps(items)
    other = json.loads(json.dumps(SECRETS))
    other["service"]["logins"][0]["code"] = "another"
    changed = build_config(other, MODELS).fingerprint_items()
    assert {k for k in items if items[k] != changed[k]} == {"service.logins[0].code"}
    assert list(items) == sorted(items)


def test_fingerprints_know_that_numbers_are_equal() -> None:
    one = build_config(
        {"train_batch_size": 5e8, "kernels": {}, "plugins": []}, {}
    ).fingerprint_items()
    two = build_config(
        {"plugins": [], "kernels": {}, "train_batch_size": 500000000}, {}
    ).fingerprint_items()
    assert one == two == {"kernels": "{}", "plugins": "[]", "train_batch_size": "500000000"}


@pytest.mark.parametrize(
    "bad",
    [
        {"service": {"code": ["S3cret"]}},
        {"service": {"codes": "S3cret", "code": "S3cret"}},
        {"service": {"logins": [{"code": 3, "password": "S3cret"}]}},
        {"service": {"either": {"code": {"x": "S3cret"}}}},
        {"service": {"max_tokens": "S3cret", "code": "S3cret"}},
        {"api_key": "S3cret"},
        {"unknown": {"api_key": "S3cret"}},
        {"fp16": {"hf_token": "S3cret"}},
        {"wandb": {"enabled": True, "api_key": "S3cret"}},
        {"optimizer": {"type": 3, "params": {"password": "S3cret"}}},
        {"kernels": {"auth_token": ["S3cret"]}},
        {"service": {"url": 3, "authorization": "Bearer S3cret"}},
        {"servise": {"password": "S3cret"}},
        {"level": {"secret": "S3cret"}},
    ],
)
def test_errors_hold_no_secret(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(bad, MODELS)
    assert "S3cret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apiKey",
        "API-KEY",
        "hf_token",
        "token",
        "WANDB_API_KEY",
        "password",
        "db_password",
        "secret",
        "client_secret",
        "secret_key",
        "aws_secret_access_key",
        "Authorization",
        "credentials",
        "private_key",
        "access_key",
        "access_tokens",
        "passwd",
        "auth",
    ],
)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)
    assert redact({"a": [{name: "x"}]}) == {"a": [{name: "***"}]}


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "max_token",
        "tokens",
        "num_tokens",
        "pad_token",
        "token_type",
        "key",
        "keys",
        "experiment_key",
        "lr",
        "author",
        "keyboard",
        "tokenizer",
        "",
        "passes",
        "monkey",
    ],
)
def test_names_that_are_not_secret(name: str) -> None:
    assert not is_secret_name(name)


# -- imports ---------------------------------------------------------------------------------------


def test_nothing_here_loads_torch_or_a_parser() -> None:
    code = """
import sys, pkgutil, importlib
from ds_core.config import Section
light = set(sys.modules)
assert "ds_core.config.core" not in light and "yaml" not in light and "hjson" not in light
import ds_core.config as package
for module in pkgutil.iter_modules(package.__path__):
    importlib.import_module(f"ds_core.config.{module.name}")
for name in package.__all__:
    assert not isinstance(getattr(package, name), type(sys)), name
package.build_config({"train_batch_size": 1}, {})
loaded = {"torch", "numpy", "yaml", "hjson", "tomllib"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=300)


class Loud(Section):
    depth: int = option(1, "Layers.")
    verbose: bool = option(False, "Say more.", per_rank=True)


def test_what_only_a_ranks_own_log_shows_is_not_compared() -> None:
    """As published scripts have it: ``"verbose": rank == 0``."""
    models = {"loud": (Loud, "someone")}
    quiet, loud = ({"loud": {"depth": 2, "verbose": on}} for on in (False, True))
    items = build_config(loud, models).fingerprint_items()
    assert items == build_config(quiet, models).fingerprint_items() == {"loud.depth": "2"}

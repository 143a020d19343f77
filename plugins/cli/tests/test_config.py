"""``dscore config``: what `check` and `explain` print."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from ds_cli.config.command import make_app
from typer.testing import CliRunner


def test_check_prints_what_has_no_effect(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(
        json.dumps(
            {"train_batch_size": 4, "disable_allgather": True, "bfloat16": {"enabled": False}}
        )
    )
    done = CliRunner().invoke(make_app(), ["check", str(file), "--world", "2"])
    assert done.exit_code == 0
    assert "  note: disable_allgather: has no effect: " in done.stdout
    assert "  note: bfloat16: is deprecated and was read as 'bf16'; rename it\n" in done.stdout


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        ({}, ["gradient_clipping"]),
        ({"gradient_clipping": 0}, []),
        ({"fp16": {"enabled": True, "clip": 1.0}}, []),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
            ["gradient_clipping", "optimizer.params.weight_decay"],
        ),
        (
            {"gradient_clipping": 0, "optimizer": {"type": "adamw"}},
            ["optimizer.params.weight_decay"],
        ),
        (
            {
                "gradient_clipping": 1.0,
                "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.0}},
            },
            [],
        ),
        ({"gradient_clipping": 1.0, "optimizer": {"type": "Adam"}}, []),
        (
            {
                "gradient_clipping": 1.0,
                "optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}},
            },
            ["optimizer.params.adam_w_mode"],
        ),
        ({"gradient_clipping": 1.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, []),
    ],
)
def test_check_names_defaults_that_are_not_torchs(
    config: dict[str, object], paths: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"train_batch_size": 4, **config}))
    done = CliRunner().invoke(make_app(), ["check", str(file)])
    assert done.exit_code == 0, done.stdout
    said = re.findall(r"^  note: ([\w.]+): is not given", done.stdout, re.MULTILINE)
    assert said == paths, done.stdout


def test_the_defaults_are_those_that_check_names() -> None:
    from ds_core.config.core import CoreConfig
    from ds_core.setup.optim import AdamParams, AdamWParams

    assert CoreConfig().gradient_clipping == 1.0
    assert (AdamWParams().weight_decay, AdamParams().adam_w_mode) == (0.0, True)
    weight = torch.nn.Parameter(torch.ones(1))
    assert torch.optim.AdamW([weight]).defaults["weight_decay"] == 0.01
    assert torch.optim.Adam([weight]).defaults["weight_decay"] == 0


def test_check_accepts_what_a_front_end_fills_in(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    config = {
        "train_batch_size": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, "auto"]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    }
    file.write_text(json.dumps(config))
    done = CliRunner().invoke(make_app(), ["check", str(file), "--world", "2"])
    assert done.exit_code == 0, done.stdout
    assert (
        "train_batch_size, fp16.enabled, bf16.enabled, optimizer.params.lr, "
        "optimizer.params.betas[1]" in done.stdout
    )
    assert CliRunner().invoke(make_app(), ["check", str(file), "--no-auto"]).exit_code == 1
    config["train_btach_size"] = "auto"
    file.write_text(json.dumps(config))
    done = CliRunner().invoke(make_app(), ["check", str(file)])
    assert done.exit_code == 1
    assert done.stdout.count("\n") == 1 and "did you mean 'train_batch_size'" in done.stdout


def test_explain_lists_the_keys_of_a_section_and_who_takes_a_parameter() -> None:
    said = CliRunner().invoke(make_app(), ["explain", "fp16"]).stdout
    assert "  default: those of its keys\n" in said
    assert "    auto_cast: Cast floating-point inputs of the model to float16.\n" in said
    said = CliRunner().invoke(make_app(), ["explain", "optimizer.params.lr"]).stdout
    assert "adamw" in said and "a number >= 0, default 0.001" in said

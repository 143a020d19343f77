"""``dscore config``: check, schema, explain."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import dscore, missing

from ds_core.config import load_config
from ds_core.errors import PluginError
from ds_core.plugins import SECTIONS, Plugins
from ds_core.plugins import registry as P
from ds_core.plugins.registry import PluginSettings


def test_config_check(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "csv_monitor": {"enabled": '
        "false}}"
    )
    done = dscore("config", "check", str(file), "--world", "2")
    assert done.exit_code == 0
    assert (
        "train_batch_size 8 = micro-batch 2 x accumulation 2 x 2 data-parallel ranks" in done.output
    )
    assert "csv_monitor: dscore-monitor-csv" in done.output
    assert dscore("config", "check", str(file), "--world", "3").exit_code == 1

    file.write_text('{"fp16": {"enabld": true}, "gradient_clippin": 1}')
    done = dscore("config", "check", str(file))
    assert done.exit_code == 1
    assert len(done.output.splitlines()) == 2
    assert "fp16.enabld" in done.output
    assert "did you mean 'gradient_clipping'" in done.output

    file.write_text('{"kernels": {"squared_norm": "warp"}}')
    done = dscore("config", "check", str(file))
    assert (done.exit_code, "no provider 'warp'" in done.output) == (1, True)
    (tmp_path / "made_to_run.py").write_text(
        f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\ndef ds_close():\n    pass\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        for load in ('["made_to_run"]', '{"load": ["own=made_to_run"]}'):
            file.write_text(f'{{"plugins": {load}}}')
            done = dscore("config", "check", str(file))
            assert (
                done.exit_code != 0
                and "give --import" in done.output
                and "made_to_run" in done.output
            )
        assert not (tmp_path / "ran").exists()
        file.write_text('{"train_batch_size": 1, "plugins": ["made_to_run"]}')
        assert (
            dscore("config", "check", "--import", str(file)).exit_code == 0
            and (tmp_path / "ran").exists()
        )
    finally:
        sys.path.remove(str(tmp_path))
    for path, why in ((tmp_path, "is a folder"), (tmp_path / "none.json", "no such config file")):
        done = dscore("config", "check", str(path))
        assert (done.exit_code, done.output.count("\n"), why in done.output) == (2, 1, True)


def test_config_schema_and_explain() -> None:
    schema = json.loads(dscore("config", "schema").stdout)
    assert {"train_batch_size", "fp16", "csv_monitor", "tensorboard"} <= set(schema["properties"])
    done = dscore("config", "explain", "csv_monitor.output_path")
    assert done.exit_code == 0
    assert "owner:   dscore-monitor-csv" in done.output
    done = dscore("config", "explain", "fp16.los_scale")
    assert (done.exit_code, "did you mean 'fp16.loss_scale'" in done.output) == (2, True)


def test_a_broken_section_is_left_out_of_the_schema_with_a_word(
    install: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(P, "discover", lambda: (missing(group=SECTIONS),))
    done = dscore("config", "schema")
    assert done.exit_code == 0
    assert "bad" not in json.loads(done.stdout)["properties"]
    assert "left out: plugin 'bad'" in done.stderr


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "train_batch_size: a batch size is needed, and nothing is given"),
        ({"gradient_accumulation_steps": 2}, "only gradient_accumulation_steps 2 is given"),
        (
            {
                "train_batch_size": 63,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
            },
            "63 is not a multiple of train_micro_batch_size_per_gpu 4 x "
            "gradient_accumulation_steps 2 = 8, so it fits no number of processes; use 56 or 64",
        ),
        (
            {"train_batch_size": 3, "gradient_accumulation_steps": 4},
            "3 is not a multiple of gradient_accumulation_steps 4, so it fits no number of "
            "processes; use 4",
        ),
    ],
)
def test_batch_sizes_that_fit_no_world_are_said_without_one(
    tmp_path: Path, config: dict[str, int], why: str
) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps(config))
    done = dscore("config", "check", str(file))
    assert done.exit_code == 1 and why in done.output


def test_a_front_end_and_elasticity_may_fill_in_the_batch(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"train_batch_size": "auto"}')
    assert dscore("config", "check", str(file)).exit_code == 0
    assert dscore("config", "check", str(file), "--no-auto").exit_code == 1
    pytest.importorskip("ds_elasticity")
    section = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4]}
    file.write_text(json.dumps({"elasticity": {**section, "min_gpus": 1, "max_gpus": 16}}))
    done = dscore("config", "check", str(file))
    assert done.exit_code == 0, done.output


def test_json_that_is_only_hjson_is_said(tmp_path: Path) -> None:
    pytest.importorskip("ds_config_formats")
    file = tmp_path / "c.json"
    file.write_text("{'train_batch_size': 8}")
    done = dscore("config", "check", str(file))
    assert done.exit_code == 0
    assert "note: read as hjson, since it is not valid JSON (" in done.output
    assert "without dscore-config-formats it cannot be read" in done.output
    file.write_text('{"train_batch_size": 8}')
    assert "read as hjson" not in dscore("config", "check", str(file)).output
    as_hjson = tmp_path / "c.hjson"
    as_hjson.write_text("{train_batch_size: 8}")
    assert "read as hjson" not in dscore("config", "check", str(as_hjson)).output


def test_processes_that_a_mesh_cannot_divide_are_told_by_key(tmp_path: Path) -> None:
    pytest.importorskip("ds_pipeline")
    file = tmp_path / "c.json"
    file.write_text('{"train_batch_size": 12, "pipeline": {"stages": 3}}')
    done = dscore("config", "check", str(file), "--world", "4")
    assert done.exit_code == 1
    assert "pipeline.stages 3 needs a multiple of 3 processes; --world is 4" in done.output
    assert dscore("config", "check", str(file), "--world", "6").exit_code == 0


def test_the_beginning_of_a_section_has_candidates() -> None:
    pytest.importorskip("ds_zero")
    done = dscore("config", "explain", "zero")
    assert done.exit_code == 2
    assert "did you mean 'zero_optimization' or " in done.output


def test_a_key_from_elsewhere_is_explained_by_its_place() -> None:
    for key, place in (("lr", "optimizer.params.lr"), ("epochs", "your training loop")):
        done = dscore("config", "explain", key)
        assert (done.exit_code, f"{key!r} belongs in {place}" in done.output) == (2, True)


def test_wrong_entries_of_plugins_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "pl.json"
    entries = {
        "require": ["dscore-train>=99", "no-such-package", "???"],
        "load": ["no_such_module_one", "mine=no_such_module_two"],
        "disable": ["nobody"],
    }
    file.write_text(json.dumps({"train_batch_size": 1, "plugins": entries}))
    done = dscore("config", "check", "--import", str(file))
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        [str(file), key]
        for key in (
            *(f"plugins.require[{i}]" for i in range(3)),
            *(f"plugins.load[{i}]" for i in range(2)),
            "plugins.disable[0]",
        )
    ]
    for why in (
        "'dscore-train>=99', but dscore-train ",
        "is installed; a newer release is needed",
        "'no-such-package', which is not installed; `pip install no-such-package`",
        "'???' is not a requirement",
        "No module named 'no_such_module_one'",
        "No module named 'no_such_module_two'",
    ):
        assert any(why in line for line in lines), why
    file.write_text(json.dumps({"plugins": {"require": ["dscore-train<0.0.1"]}}))
    assert "another release is needed" in dscore("config", "check", str(file)).output
    with pytest.raises(PluginError) as error:
        Plugins(PluginSettings(require=("nobody-has-it",), load=("no_such_module_one",)))
    assert str(error.value).startswith("2 problems\n  - plugins.require: 'nobody-has-it', which is")
    with pytest.raises(PluginError, match=re.escape(f"{file}: plugins.require: 'dscore-train<0")):
        load_config(file)

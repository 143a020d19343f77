"""``dscore config``: check, schema, explain."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cli_runs import dscore, missing

from ds_core.plugins import SECTIONS
from ds_core.plugins import registry as P


def test_config_check(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "csv_monitor": {"enabled": '
        "false}}"
    )
    done = dscore("config", "check", str(file), "--world", "2")
    assert done.exit_code == 0
    assert (
        "train_batch_size 8 = micro batch 2 x accumulation 2 x 2 data-parallel ranks" in done.output
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
    for path in (tmp_path, tmp_path / "none.json"):
        done = dscore("config", "check", str(path))
        assert (done.exit_code, done.output.count("\n")) == (1, 1)


def test_config_schema_and_explain() -> None:
    schema = json.loads(dscore("config", "schema").stdout)
    assert {"train_batch_size", "fp16", "csv_monitor", "tensorboard"} <= set(schema["properties"])
    done = dscore("config", "explain", "csv_monitor.output_path")
    assert done.exit_code == 0
    assert "owner:   dscore-monitor-csv" in done.output
    done = dscore("config", "explain", "fp16.los_scale")
    assert (done.exit_code, "did you mean 'fp16.loss_scale'" in done.output) == (1, True)


def test_a_broken_section_is_left_out_of_the_schema_with_a_word(
    install: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(P, "discover", lambda: (missing(group=SECTIONS),))
    done = dscore("config", "schema")
    assert done.exit_code == 0
    assert "bad" not in json.loads(done.stdout)["properties"]
    assert "left out: plugin 'bad'" in done.stderr

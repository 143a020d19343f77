"""``dscore config migrate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds_command_kit.app import make_app
from ds_deepspeed_compat.configs.migration import migrated
from typer.testing import CliRunner

OLD: dict[str, Any] = {
    "train_batch_size": "auto",
    "bfloat16": {"enabled": False},
    "fp16": {"enabled": True, "clip": 0.5, "loss_scale": 128, "hysteresis": 4},
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": 2,
        "cpu_offload": True,
        "allgather_size": 5e8,
        "round_robin_gradients": True,
        "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
        "stage3_param_persistence_threshold": 1e4,
    },
    "flops_profiler": {"enabled": False},
    "amp": {"enabled": True},
    "steps_per_print": float("inf"),
    "trian_batch_size": 3,
}


def test_each_key_is_told_and_the_new_config_is_clean() -> None:
    found = migrated(OLD)
    assert found.config == {
        "train_batch_size": "auto",
        "bf16": {"enabled": False},
        "fp16": {"enabled": True, "loss_scale": 128},
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": 2,
            "allgather_bucket_size": 5e8,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
            "stage3_param_persistence_threshold": 1e4,
        },
        "flops_profiler": {"enabled": False},
        "steps_per_print": None,
    }
    zero = "zero_optimization"
    assert {p.path for p in found.renamed} == {
        *("bfloat16", "fp16.clip", f"{zero}.cpu_offload", f"{zero}.allgather_size"),
    }
    idle = {"fp16.hysteresis", f"{zero}.round_robin_gradients"}
    assert {p.path for p in found.idle} == idle
    assert [p.path for p in found.remarks] == [zero]  # keys of stage 3
    lost = {p.path: p.fix for p in found.lost}
    assert set(lost) == {"optimizer.type", "amp", "trian_batch_size"}
    assert (
        "set stage 0" in lost["optimizer.type"] and "train_batch_size" in lost["trian_batch_size"]
    )
    assert found.autos == ("train_batch_size",)
    again = migrated(found.config)
    assert again.config == found.config
    assert not (again.renamed or again.idle or again.lost)


def test_the_old_switch_of_zero() -> None:
    assert migrated({"zero_optimization": True}).config == {"zero_optimization": {"stage": 1}}


def test_the_command_writes_a_file_that_passes(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    new = tmp_path / "new.json"
    old.write_text(
        json.dumps(
            {"train_batch_size": 8, "bfloat16": {"enabled": True}, "amp": {"api_key": "geheim"}}
        )
    )
    old.chmod(0o600)

    def dscore(*words: str) -> Any:
        return CliRunner().invoke(make_app(), ["config", *words])

    said = dscore("migrate", str(old), "-o", str(new))
    assert (
        said.exit_code == 1 and "  bfloat16: is deprecated and was read as 'bf16'\n" in said.output
    )
    assert (
        "does not work here, and was left out:\n  amp: " in said.output
        and "geheim" not in said.output
    )
    assert json.loads(new.read_text()) == {"train_batch_size": 8, "bf16": {"enabled": True}}
    assert new.stat().st_mode & 0o777 == 0o600
    assert dscore("check", str(new)).exit_code == 0
    assert dscore("migrate", str(new)).output == "stays: train_batch_size, bf16\n"
    assert "exists; name a new file" in dscore("migrate", str(old), "-o", str(new)).stderr
    assert "migrate" in dscore("--help").output
    assert "No such command 'migrat'" in dscore("migrat").output

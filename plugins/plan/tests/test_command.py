"""The command ``dscore plan``: its table, its JSON, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_command_kit.app import make_app
from ds_plan import PlannedRun
from ds_zero.config import ZeroConfig
from ds_zero.planning.predict import predict
from torch import nn
from typer.testing import CliRunner

from ds_core.entries import OptimizerEntry
from ds_core.precision import Precision, cast_module
from ds_core.setup.optim import Choice

MIXED = Precision(param=torch.float16, master=torch.float32)


def build_toy() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))


def dscore(*words: str) -> Any:
    return CliRunner().invoke(make_app(), ["plan", *words])


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine_to_plan.py").write_text(
        "from torch import nn\n"
        "def build(): return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))\n"
        "def build_nothing(): return None\n"
        "def broken(): return 1 / 0\n"
        "def greedy(size): return nn.Linear(size, size)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_the_command_prints_a_table_and_its_advice() -> None:
    done = dscore("--world", "64", "--params", "7B", "--device-memory", "80GB", "--reserve", "20GB")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "7,000,000,000 parameters on 64 ranks; GB of each rank, without activations"
    assert len(lines) == 1 + 1 + 12 + 1
    assert [line.startswith("> 2 ") for line in lines].count(True) == 1
    assert lines[-1].startswith("stage 2: 16.4 GB on the device; of what fits it offloads least")


def test_where_nothing_fits_the_answer_is_negative() -> None:
    done = dscore("--world", "8", "--params", "7B", "--device-memory", "1GB")
    assert done.exit_code == 1 and "nothing fits: " in done.output
    assert "on disk needs least, 2.3 GB on the device" in done.output
    large = dscore("--world", "8", "--params", "700B", "--device-memory", "8GB").output
    assert (
        "142 GB on the device and 744 GB on the host, 1,400 GB on disk" in large
        and "e+0" not in large
    )


def test_the_table_fits_80_columns_and_details_fold() -> None:
    words = ("--world", "64", "--params", "7B")
    short = dscore(*words).output.splitlines()
    assert max(map(len, short)) <= 80
    long = dscore(*words, "--verbose").output.splitlines()
    assert long[: len(short)] == short and max(map(len, long)) <= 80
    assert "1  none: weights 14, gradients 14, masters 0.438, states 0.875, step 0.438" in long


def test_zenflow_is_part_of_the_plans_with_offload(tmp_path: Path) -> None:
    needs = []
    for zenflow in ({}, {"zenflow": {"topk_ratio": 0.5}}):
        (tmp_path / "c.json").write_text(
            json.dumps(
                {
                    "train_batch_size": 2,
                    "optimizer": {"type": "AdamW"},
                    "zero_optimization": {
                        "stage": 2,
                        "offload_optimizer": {"device": "cpu"},
                        **zenflow,
                    },
                }
            )
        )
        words = [
            "plan",
            "--world",
            "2",
            "--params",
            "1M",
            "--config",
            str(tmp_path / "c.json"),
            "--json",
        ]
        result = CliRunner().invoke(make_app(), words)
        assert result.exit_code == 0, result.output
        needs.append({(n["stage"], n["offload"]): n for n in json.loads(result.output)["choices"]})
    plain, flow = needs
    assert flow[2, "none"] == plain[2, "none"]
    for stage in (1, 2, 3):
        before = plain[stage, "optimizer"]
        after = flow[stage, "optimizer"]
        share = after["device"]["states"] / before["host"]["states"]
        assert 0.49 < share < 0.51
        assert after["host"]["gradients"] > before["host"]["gradients"]


def test_json_holds_bytes_and_the_config_counts() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {
            "stage": 1,
            "param_persistence_threshold": 0,
            "offload_optimizer": {"device": "none"},
        },
    }
    Path("config.json").write_text(json.dumps(config))
    found = json.loads(
        dscore(
            "--world", "2", "--model", "mine_to_plan:build", "--config", "config.json", "--json"
        ).output
    )
    model = build_toy()
    count = sum(p.numel() for p in model.parameters())
    assert (found["parameters"], found["gradient_accumulation_steps"], found["recommended"]) == (
        count,
        2,
        None,
    )
    cast_module(model, Precision(param=torch.float16))
    section = ZeroConfig(stage=2, param_persistence_threshold=0)
    need = predict(model, section, PlannedRun(2, MIXED, states=1, gas=2, casts=False))
    row = next(r for r in found["choices"] if (r["stage"], r["offload"]) == (2, "none"))
    assert row["device"] == dataclasses.asdict(need.device)
    assert (row["sent"], row["device_peak"]) == (need.sent, need.device.peak)
    fp32 = json.loads(
        dscore("--world", "2", "--model", "mine_to_plan:build", "--dtype", "fp32", "--json").output
    )
    assert next(r for r in fp32["choices"] if r["stage"] == 2)["device"]["masters"] == 0


def test_optimizers_that_need_unsharded_tensors_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = OptimizerEntry("torch.optim:AdamW", grain="tensor")
    monkeypatch.setattr(
        "ds_core.setup.compose.choose", lambda kind, *_: (Choice(kind, {}, entry), [])
    )
    done = dscore("--world", "8", "--params", "1M")
    assert done.exit_code == 0
    assert "needs unsharded tensors" in done.output + done.stderr


def test_states_in_8_bits_are_counted_as_such(tmp_path: Path) -> None:
    states = []
    for kind in ("AdamW", "AdamW8bit"):
        config = tmp_path / "adam.json"
        config.write_text(json.dumps({"optimizer": {"type": kind}, "bf16": {"enabled": True}}))
        done = dscore("--world", "2", "--params", "1M", "--config", str(config), "--json")
        assert done.exit_code == 0, done.output
        states.append(json.loads(done.output)["choices"][0]["device"]["states"])
    assert states == [8_000_000, 2_000_000]


def test_what_an_optimizer_of_matrices_exchanges(tmp_path: Path) -> None:
    """Two matrices on two ranks: (64, 64) and (10, 64), each whole on one of them in the step."""
    config = tmp_path / "muon.json"
    config.write_text(json.dumps({"optimizer": {"type": "Muon"}, "bf16": {"enabled": True}}))
    words = ("--world", "2", "--model", "mine_to_plan:build", "--config", str(config))
    done = dscore(*words, "--json")
    assert done.exit_code == 0, done.output
    large = 64 * 64
    small = 10 * 64
    # Without ZeRO results go to the other rank; with it half of what is not owned, and half of what is.
    assert json.loads(done.output)["optimizer_exchanges"] == [
        {"stages": "0", "sent": 4 * large, "held": 8 * large},
        {"stages": "1, 2, 3", "sent": 2 * (large + small), "held": 8 * large},
    ]
    assert (
        "the optimizer collects matrices, stage 0: a rank sends up to 1.64e-05 GB"
        in dscore(*words).output
    )
    assert "are not counted" not in dscore(*words).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either --params, such as 7B, or --model"),
        (["--params", "7B", "--model", "a:b"], "either --params"),
        (["--params", "7X"], "--params is '7X'; write a number with a unit"),
        (["--params", "0"], "--params is '0'"),
        (
            ["--params", "1M", "--largest-layer", "2M"],
            "--largest-layer is 2000000; it must be from 1 to the 1000000",
        ),
        (
            ["--model", "mine_to_plan:build", "--largest-layer", "2M"],
            "--largest-layer is an option of --params",
        ),
        (["--model", "mine_to_plan"], "write module:function"),
        (["--model", "mine_to_plan:missing"], "the module mine_to_plan has no 'missing'"),
        (
            ["--model", "no_such_module_here:build"],
            "there is no module 'no_such_module_here', neither in",
        ),
        (
            ["--model", "mine_to_plan:build_nothing"],
            "returned a NoneType; it must return a torch.nn.Module",
        ),
        (["--model", "mine_to_plan:broken"], "building it failed: ZeroDivisionError"),
        (["--model", "mine_to_plan:greedy"], "needs arguments (size)"),
        (["--model", "missing.json"], "no such config.json of a model: 'missing.json' in"),
        (
            ["--params", "7B", "--device-memory", "80"],
            "--device-memory is '80'; write a number with",
        ),
        (["--params", "7"], "--params is '7'"),
        (["--params", "7B", "--config", "gone.json"], "no such config file: 'gone.json' in"),
        (["--params", "7B", "--host-memory", "1TB"], "give --device-memory too"),
    ],
)
def test_what_cannot_be_planned_says_why(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    done = dscore("--world", "8", *words)
    assert done.exit_code == 2
    assert message in done.output + done.stderr + capfd.readouterr().err


def test_hugging_face_configs_need_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("config.json").write_text(
        '{"model_type": "tiny", "width": 8, "architectures": ["TinyModel"]}'
    )
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = dscore("--world", "8", "--model", "config.json")
    assert done.exit_code == 2
    assert "pip install transformers, or give --params" in done.output + done.stderr
    # The library itself is large; this is its face.
    library = types.ModuleType("transformers")
    library.AutoConfig = types.SimpleNamespace(for_model=lambda model_type, **rest: rest)  # type: ignore[attr-defined]
    library.TinyModel = lambda config: nn.Linear(config["width"], config["width"])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", library)
    done = dscore("--world", "8", "--model", "config.json", "--json")
    assert json.loads(done.output)["parameters"] == 8 * 8 + 8


def test_plugins_add_what_they_plan(tmp_path: Path) -> None:
    (tmp_path / "sketch.py").write_text(
        "from ds_core.entries import Chart\n"
        "def ds_charts(config): return [Chart('a', 'A title', 'some text'), Chart('b', 'B', "
        "'drawn', '<svg/>')]\n"
    )
    Path("c.json").write_text(
        json.dumps({"bf16": {"enabled": True}, "plugins": {"load": ["sketch=sketch"]}})
    )
    done = dscore(
        "--world", "8", "--params", "1M", "--config", "c.json", "--import", "--svg-folder", "drawn"
    )
    assert done.exit_code == 0, done.stderr
    assert done.stdout.endswith("\nA title\nsome text\n\nB\ndrawn\n")
    assert [(p.name, p.read_text()) for p in Path("drawn").iterdir()] == [("b.svg", "<svg/>")]
    done = dscore("--world", "8", "--params", "1M", "--svg", "drawn")
    assert done.exit_code == 2
    assert "no plugin draws anything" in " ".join((done.output + done.stderr).split())

"""``dscore plan --against``: the plan is what a run held, and differences are explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_command_kit.app import make_app
from ds_plan import Kinds, Need, Offload, PlannedRun
from ds_plan.comparison import Snapshot, compare, read_snapshots
from ds_testing import run_ranks
from ds_zero.config import ZeroConfig
from ds_zero.planning.predict import predict
from torch import Tensor, nn
from typer.testing import CliRunner

from ds_core.errors import UsageError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 33, bias=False))
        self.register_buffer("shift", torch.ones(33))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x + self.get_buffer("shift").to(x.dtype)).float().square().mean()
        return out


def trained(stage: int, offload: bool, folder: str) -> None:
    import ds_core

    section: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 100}
    if offload:
        section["offload_optimizer"] = {"device": "cpu"}
    config = {
        **CONFIG,
        "zero_optimization": section,
        "memory_snapshot": {"enabled": True, "folder": folder},
    }
    engine, *_ = ds_core.initialize(model=Net(), config=config)
    for _ in range(3):
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 33, dtype=torch.bfloat16)))
            engine.step()
    engine.destroy()


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (2, False), (3, False), (1, True)])
def test_a_run_holds_what_is_planned(
    stage: int, offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, but for the optimizer's counters; the command says so too."""
    run_ranks(2, trained, stage, offload, str(tmp_path / "memory"))
    snapshots = read_snapshots(tmp_path / "memory")
    assert [(s.rank, s.dp, s.gas, s.device) for s in snapshots] == [
        (0, 2, 2, "cpu"),
        (1, 2, 2, "cpu"),
    ]
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    places = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 100, **places}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "zero_optimization": zero}))
    arguments = [
        "plan",
        "--world",
        "2",
        "--model",
        "test_comparison:Net",
        "--config",
        str(tmp_path / "config.json"),
    ]
    arguments += ["--against", str(tmp_path / "memory")]
    answer = CliRunner().invoke(make_app(), [*arguments, "--json"])
    assert answer.exit_code == 0, answer.output
    lines = {line["kind"]: line for line in json.loads(answer.output)["kinds"]}
    for kind in ("parameters", "masters", "states", "gradients"):
        line = lines[kind]
        assert 0 <= line["measured"] - line["planned"] <= (100 if kind == "states" else 0), line
        assert line["why"] == "" and line["measured"] > 0
    assert lines["buffers"]["measured"] == 33 * 4
    assert lines["peak"]["measured"] > 2**20
    shown = CliRunner().invoke(make_app(), arguments)
    assert (
        f"on cpu, stage {stage}, {'optimizer' if offload else 'none'} on the host" in shown.output
    )
    wrong = CliRunner().invoke(make_app(), [*arguments, "--world", "4"])
    assert wrong.exit_code != 0


def snapshot(**device: int) -> Snapshot:
    return Snapshot(0, 1, 1, "cuda", {"device": device, "host": {}}, 900)


def test_differences_are_explained() -> None:
    need = Need(0, Offload.NONE, Kinds(100, 100, 200, 400), Kinds(), 0, 0, 0, 0)
    exact = {"parameters": 100, "masters": 200, "states": 400, "gradients": 100}

    def why(kind: str, measured: int) -> str:
        lines = compare(need, 2, snapshot(**{**exact, kind: measured}))
        return next(line.why for line in lines if line.kind == kind)

    assert [line.why for line in compare(need, 2, snapshot(**exact))[:4]] == [""] * 4
    assert why("states", 0).startswith("the optimizer had made none yet")
    assert (
        why("states", 200)
        == "the optimizer keeps 1 elements per parameter, not 2 (--optimizer-states)"
    )
    assert why("gradients", 50) == "some parameters had no gradient in this step"
    assert why("gradients", 250).startswith("buffers of reductions")
    assert why("parameters", 200).startswith("of another dtype")
    assert why("parameters", 30).startswith("parts of the model are on other ranks")
    assert why("masters", 900) == "another model or config than that of the run"
    (peak,) = (line for line in compare(need, 2, snapshot(**exact)) if line.kind == "peak")
    assert (peak.planned, peak.measured) == (need.device.peak, 900)
    assert peak.why == "activations and temporaries of autograd, which no plan counts"


def test_folders_without_snapshots(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='no snapshot here; run with "memory_snapshot"'):
        read_snapshots(tmp_path)
    (tmp_path / "rank0-oom.json").write_text("{}")
    (tmp_path / "rank0.json").write_text('{"rank": 0}')
    with pytest.raises(UsageError, match=r"rank0.json: is no snapshot"):
        read_snapshots(tmp_path)


def test_a_prediction_has_a_kind_for_each_that_is_measured() -> None:
    need = predict(nn.Linear(4, 4), ZeroConfig(stage=1), PlannedRun(2))
    assert {line.kind for line in compare(need, 2, snapshot())} >= {
        "parameters",
        "states",
        "gradients",
        "peak",
    }

"""Memory that is told before a trial: the model from its profile, its states by the plan, the rest
by a line.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_autotuning.records import Profile, Result, Status
from ds_autotuning.search.forecast import (
    Room,
    forecast,
    largest_micro_batch,
    make_profile,
    room_of,
    states_of,
)
from ds_autotuning.search.saved import Saved
from ds_autotuning.trials.looking import describe
from ds_autotuning.trials.profile import build, fit_line, joined
from ds_plan import PlannedRun
from ds_zero.config import ZeroConfig
from ds_zero.planning.predict import predict
from torch import nn

from ds_core.errors import UsageError
from ds_core.setup.compose import compose

MIB = 2**20
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Net(nn.Module):
    """Four blocks, a tied head and a frozen layer."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.fixed = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 512, bias=False)
        self.head.weight = self.embed.weight


def profile(**changes: Any) -> Profile:
    with torch.device("meta"):
        found = describe(Net())
    facts = {
        "world": 2,
        "device": "cuda",
        "device_memory": 10 * 2**30,
        "host_memory": 2**36,
        "host_base": 5.0,
    }
    made = dataclasses.replace(found, facts={**found.facts, **facts})
    return dataclasses.replace(
        made, activation_bytes_per_sample=3.0 * MIB, fixed_bytes=100.0 * MIB, **changes
    )


def test_the_module_is_built_again() -> None:
    with torch.device("meta"):
        model = Net()
    again = build(profile())
    assert [(n, type(m).__name__) for n, m in again.named_modules()] == [
        (n, type(m).__name__) for n, m in model.named_modules()
    ]
    rows = [
        [
            (n, p.shape, p.dtype, p.requires_grad)
            for n, p in m.named_parameters(remove_duplicate=False)
        ]
        for m in (again, model)
    ]
    assert rows[0] == rows[1]
    assert again.get_parameter("head.weight") is again.get_parameter("embed.weight")
    assert all(p.is_meta for p in again.parameters())


def test_a_profile_goes_through_json() -> None:
    made = profile()
    assert Profile.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_are_those_of_the_plan(stage: int) -> None:
    chosen = compose({**BASE, "zero_optimization": {"stage": stage}})
    with torch.device("meta"):
        need = predict(Net(), ZeroConfig(stage=stage), PlannedRun(2, casts=True))
    told = states_of(profile(), chosen, 2)
    assert (
        told["device"] == pytest.approx(need.device.peak, rel=0.02)
        and told["host"] == need.host.peak
    )


ADDS = "def ds_memory(module): return {'device': 7.0, 'host': 11.0, 'disk': 0.0}"


@pytest.mark.parametrize("stage", [None, 2])
def test_what_plugins_add_counts_too(
    stage: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adds_memory.py").write_text(ADDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {k: v for k, v in BASE.items() if k != "zero_optimization"}
    if stage is not None:
        config["zero_optimization"] = {"stage": stage}
    alone = states_of(profile(), compose(config), 2)
    more = states_of(profile(), compose({**config, "plugins": {"load": ["adds_memory"]}}), 2)
    assert {place: more[place] - alone[place] for place in alone} == {
        "device": 7.0,
        "host": 11.0,
        "disk": 0.0,
    }


def test_without_a_plan_adam_is_assumed() -> None:
    made = profile()
    config = {k: v for k, v in BASE.items() if k != "zero_optimization"}
    assert (
        states_of(made, compose(config), 2)["device"]
        == 4 * made.parameters + (4 + 8) * made.trainable
    )
    half = states_of(made, compose({**config, "bf16": {"enabled": True}}), 2)["device"]
    assert half == 2 * made.parameters + (2 + 8 + 8) * made.trainable


def test_a_forecast_adds_what_was_measured() -> None:
    told = forecast(profile(), compose(BASE), 2)
    assert told.activations == 4 * 3 * MIB and told.fixed == 100 * MIB
    assert told.device == told.states + told.activations + told.fixed
    assert told.host == 5.0


def test_offloaded_states_are_on_the_host_and_on_a_cpu_they_are_all_the_same() -> None:
    offloaded = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    chosen = compose({**BASE, "zero_optimization": offloaded})
    made = profile()
    there = forecast(made, chosen, 2)
    here = forecast(made, compose(BASE), 2)
    assert there.device < here.device and there.host > here.host
    on_cpu = dataclasses.replace(made, facts={**made.facts, "device": "cpu"})
    told = forecast(on_cpu, chosen, 2)
    assert told.host == told.device == there.device + there.host - 5.0


def test_recomputation_and_other_axes_keep_less() -> None:
    made = profile()
    plain = forecast(profile(), compose(BASE), 4)
    again = forecast(made, compose({**BASE, "activation_checkpointing": {"modules": "auto"}}), 4)
    assert again.activations == plain.activations / 4  # one block of four
    known = dataclasses.replace(made, facts={**made.facts, "recomputes": True})
    assert (
        forecast(known, compose({**BASE, "activation_checkpointing": {"modules": "auto"}}), 4)
        == plain
    )
    tp = forecast(made, compose({**BASE, "tensor_parallel": {"autotp_size": 2}}), 4)
    assert tp.activations == plain.activations / 2
    same_dp = forecast(made, compose(BASE), 2)
    assert tp.states < same_dp.states * 0.6
    stages = forecast(
        made, compose({**BASE, "zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}}), 4
    )
    whole = forecast(made, compose({**BASE, "zero_optimization": {"stage": 1}}), 2)
    assert stages.states < whole.states * 0.75


def test_what_does_not_fit_says_the_numbers() -> None:
    made = profile()
    told = forecast(made, compose(BASE), 2)
    assert Room().refuses(told) == "" and room_of(made).refuses(told) == ""
    why = Room(device=50.0 * MIB).refuses(told)
    assert "of the device" in why and "0.0977 GiB of others); there are 0.0488 GiB" in why
    assert "of host memory per rank; there are" in Room(host=1.0).refuses(told)
    assert room_of(made, 3.0, 4.0) == Room(3e9, 4e9)


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    made = profile()
    room = Room(device=400.0 * MIB)
    most = largest_micro_batch(made, compose(BASE), 2, room, 1024)
    assert 1 < most < 1024
    fits, over = (compose({**BASE, "train_micro_batch_size_per_gpu": n}) for n in (most, most + 1))
    assert not room.refuses(forecast(made, fits, 2)) and room.refuses(forecast(made, over, 2))
    assert largest_micro_batch(made, compose(BASE), 2, Room(device=1.0), 1024) == 0
    assert largest_micro_batch(made, compose(BASE), 2, Room(), 64) == 64


def test_a_line_through_measurements() -> None:
    assert fit_line([(1, 10.0), (2, 13.0)]) == (7.0, 3.0)
    assert fit_line([(1, 10.0), (2, 8.0)]) == (9.0, 0.0)  # memory does not shrink with the batch
    assert fit_line([(4, 10.0)]) == (10.0, 0.0) and fit_line([]) == (0.0, 0.0)


def test_profile_runs_become_one_profile(tmp_path: Path) -> None:
    files = []
    states = states_of(profile(), compose(BASE), 2)["device"]
    for micro in (1, 3):
        config = {**BASE, "train_micro_batch_size_per_gpu": micro, "wandb": {"team": "***"}}
        row = profile(seconds={}).to_json()
        row["facts"] = {**row["facts"], "config": config}
        peak = round(states + 50 * MIB + micro * 2 * MIB)
        result = Result(Status.DONE, latency=0.1 * micro, peak_device=peak, peak_host=1000 + micro)
        files.append(tmp_path / f"{micro}.json")
        files[-1].write_text(json.dumps(joined([row, row], micro, result).to_json()))
    made = make_profile([*files, tmp_path / "missing.json"])
    assert made.activation_bytes_per_sample == pytest.approx(2 * MIB, rel=1e-3)
    assert made.fixed_bytes == pytest.approx(50 * MIB, rel=1e-3)
    assert made.seconds == {1: 0.1, 3: pytest.approx(0.3)}
    assert made.facts["host_base"] == 1003 and made.facts["recomputes"] is False
    with pytest.raises(UsageError, match="no profile of the model was written"):
        make_profile([tmp_path / "missing.json"])


def test_stages_that_ranks_built_alone_are_joined() -> None:
    """A rank of a pipeline may have no more than its own blocks."""
    whole = profile()
    first, second = (
        dataclasses.replace(
            whole,
            modules=tuple(r for r in whole.modules if not r.path.startswith(f"blocks.{away}")),
        ).to_json()
        for away in (0, 1)
    )
    made = joined([first, second], 1, Result(Status.DONE))
    assert (made.parameters, made.trainable) == (whole.parameters, whole.trainable)
    assert {r.path for r in made.modules} == {r.path for r in whole.modules}
    build(made)


class Layered(nn.Module):
    """A layer outside, two blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def test_what_recomputation_would_keep_is_counted_in_one_forward() -> None:
    model = Layered()
    saved = Saved(model)
    with torch.no_grad():
        model(torch.ones(4, 8))
    assert saved.part is None  # an evaluation keeps nothing
    loss = model(torch.ones(4, 8))
    # Of 4 x 8: the input; of each block its input and tanh's output; and the last block's output,
    # of which is the loss. Recomputed: the input, both blocks' inputs, the output, and while it
    # runs again one block's input and tanh.
    assert saved.part == pytest.approx((4 + 2) / 6)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    loss.backward()
    made = dataclasses.replace(profile(), facts={**profile().facts, "recomputed_part": 0.5})
    again = forecast(made, compose({**BASE, "activation_checkpointing": {"modules": "auto"}}), 2)
    assert again.activations == 0.5 * forecast(made, compose(BASE), 2).activations
    assert Saved(nn.Linear(2, 2)).part is None

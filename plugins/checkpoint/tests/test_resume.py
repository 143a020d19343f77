"""A resumed run is the run that was never interrupted, bit for bit; and the arguments of save and
load.
"""

from __future__ import annotations

import json
import logging
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from ds_checkpoint.folder.format import parse_manifest
from ds_checkpoint.source import SavedStates
from ds_run_state import RunState
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ds_core
from ds_core.errors import CheckpointError

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}},
}
ZERO: dict[str, dict[str, Any]] = {
    f"{name} stage {stage}": {
        **MODES[name],
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 50,
            "param_persistence_threshold": 5,
        },
        "checkpoint": {"async": stage == 2},
    }
    for name in ("fp32", "fp16")
    for stage in (1, 2, 3)
}


class Net(nn.Module):
    """Dropout, batch statistics, tied and frozen weights, odd buffers, extra state: everything that
    can be lost.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(width)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.embed.weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 1)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        noise = random.random() * 0.01 + float(np.random.rand()) * 0.01 + self.calls * 0.001
        hidden = (
            self.frozen(self.tied(self.norm(self.drop(self.embed(x.to(self.gain.dtype))))))
            * self.gain
        )
        return (self.head(hidden).float() - y + noise).square().mean()


def make(mode: str = "fp32", *, seed: int = 1, width: int = 8, **config: Any) -> Any:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, width), torch.randn(24, 1))
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    full: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "MultiStepLR", "params": {"milestones": [2, 5]}},
    }
    engine, *_ = ds_core.initialize(
        model=Net(width), training_data=data, config=full | (MODES | ZERO)[mode] | config
    )
    torch.manual_seed(seed)
    return engine


def train(engine: Any, steps: int) -> list[float]:
    if not hasattr(engine, "batches"):
        engine.batches = iter(ds_core.RepeatingLoader(engine.training_dataloader))
    losses = []
    for _ in range(2 * steps):
        loss = engine(*next(engine.batches))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def everything(engine: Any) -> dict[str, Any]:
    """All that a step depends on, by name."""
    states = {s.name: s.tensor.detach().clone() for s in RunState(engine).states(engine.optimizer)}
    draws = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    run = json.dumps(RunState(engine).common(), default=lambda v: sorted(v.items()), sort_keys=True)
    return {"states": states, "draws": draws, "run": run, "calls": engine.module.calls}


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["states"].keys() == b["states"].keys()
    for name, tensor in a["states"].items():
        assert torch.equal(tensor, b["states"][name]), name
    assert (a["draws"], a["run"], a["calls"]) == (b["draws"], b["run"], b["calls"])


def first_life(folder: str, mode: str) -> Any:
    engine = make(mode)
    train(engine, 3)
    engine.save_checkpoint(folder, client_state={"epoch": 1})
    return train(engine, 5), engine.wait_for_checkpoint() or everything(engine)


def second_life(folder: str, mode: str, steps: int = 5) -> Any:
    engine = make(mode, seed=99)
    train(engine, 2)  # whatever was there before must not shine through
    path, client = engine.load_checkpoint(folder)
    assert path == str(Path(folder) / "global_step3") and client == {"epoch": 1}
    del engine.batches
    return train(engine, steps), everything(engine)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("mode", [*MODES, *ZERO])
def test_resume_is_bit_identical(ranks: Any, tmp_path: Path, mode: str, world: int) -> None:
    whole = ranks(world, first_life, str(tmp_path), mode)
    resumed = ranks(world, second_life, str(tmp_path), mode)
    for (losses, end), (losses_again, end_again) in zip(whole, resumed, strict=True):
        assert losses == losses_again
        assert_equal(end, end_again)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "global_step3", "latest"]


def both_lives_at_step_0(folder: str) -> Any:
    engine = make()
    engine.save_checkpoint(folder)
    before = train(engine, 2)
    engine.load_checkpoint(folder)
    del engine.batches
    return before, train(engine, 2)


def test_going_back_to_before_the_first_step_in_the_same_engine(ranks: Any, tmp_path: Path) -> None:
    [(before, again)] = ranks(1, both_lives_at_step_0, str(tmp_path))
    assert before == again


def memory_after_loading(folder: str, mode: str) -> Any:
    engine = make(mode)
    train(engine, 1)
    engine.save_checkpoint(folder)
    train(engine, 1)
    before = {s.name: s.tensor.data_ptr() for s in RunState(engine).states(engine.optimizer)}
    engine.load_checkpoint(folder)
    after = {s.name: s.tensor for s in RunState(engine).states(engine.optimizer)}
    moved = [name for name, tensor in after.items() if tensor.data_ptr() != before[name]]
    return moved, all(t.untyped_storage().resizable() for t in after.values())


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_states_are_read_into_the_memory_that_they_have(
    ranks: Any, tmp_path: Path, mode: str
) -> None:
    assert ranks(2, memory_after_loading, str(tmp_path), mode) == [([], True)] * 2


def states_now(folder: str | None, mode: str = "fp32") -> Any:
    engine = make(mode, seed=5)
    if folder is None:
        train(engine, 3)
        return everything(engine)
    engine.load_checkpoint(folder)
    return everything(engine)


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 3)])
def test_another_world_size(ranks: Any, tmp_path: Path, worlds: tuple[int, int]) -> None:
    saved = ranks(worlds[0], first_life_short, str(tmp_path))
    loaded = ranks(worlds[1], states_now, str(tmp_path))
    data = {json.loads(end["run"])["data"]["samples"] for end in loaded}
    assert len(data) == 1 and data.pop() <= json.loads(saved[0]["run"])["data"]["samples"]
    for rank, end in enumerate(loaded):
        like = saved[rank if rank < worlds[0] else 0]  # running statistics are each rank's own
        for name, tensor in like["states"].items():
            assert torch.equal(tensor, end["states"][name]), name
        if rank < worlds[0]:
            assert end["draws"] == saved[rank]["draws"]
    new = [end["draws"] for end in loaded[worlds[0] :]]
    assert all(draws not in [s["draws"] for s in saved] for draws in new)


def first_life_short(folder: str) -> Any:
    engine = make()
    train(engine, 3)
    engine.save_checkpoint(folder)
    return everything(engine)


# -- arguments -------------------------------------------------------------------------------------


def parts(folder: str, arguments: dict[str, Any]) -> dict[str, Any]:
    engine = make(seed=9)
    train(engine, 1)
    before = everything(engine)
    path, client = engine.load_checkpoint(folder, **arguments)
    after = everything(engine)
    changed = {
        kind: any(
            not torch.equal(t, after["states"][n])
            for n, t in before["states"].items()
            if n.startswith(kind) and t.numel() and "step" not in n
        )
        for kind in ("module/", "optimizer/")
    }
    run = json.loads(after["run"])
    old = json.loads(before["run"])
    return {
        **changed,
        "client": client,
        "steps": run["global_steps"],
        "schedule": run["lr_scheduler"] != old["lr_scheduler"],
        "groups": run["optimizer_groups"] != old["optimizer_groups"],
        "calls": engine.module.calls,
        "path": path,
    }


ALL = {
    "module/": True,
    "optimizer/": True,
    "schedule": True,
    "groups": True,
    "steps": 3,
    "calls": 6,
}


@pytest.mark.parametrize(
    "arguments, different",
    [
        ({}, {}),
        ({"load_optimizer_states": False}, {"optimizer/": False, "groups": False}),
        ({"load_lr_scheduler_states": False}, {"schedule": False}),
        (
            {"load_module_only": True},
            {"optimizer/": False, "schedule": False, "groups": False, "steps": 1, "client": {}},
        ),
    ],
)
def test_what_is_loaded(
    ranks: Any, tmp_path: Path, arguments: dict[str, Any], different: dict[str, Any]
) -> None:
    ranks(1, first_life, str(tmp_path), "fp32")
    [found] = ranks(1, parts, str(tmp_path), arguments)
    expected = ALL | different
    assert {k: found[k] for k in expected} == expected


def load_by_hand(folder: str) -> Any:
    engine = make("bf16", seed=9)
    seen: dict[str, Any] = {}

    def custom(source: dict[str, Tensor], module: nn.Module) -> None:
        seen.update({k: tuple(v.shape) for k, v in source.items()})
        with torch.no_grad():
            module.head.weight.fill_(2.0)  # type: ignore[union-attr, operator]

    engine.load_checkpoint(folder, custom_load_fn=custom)
    states = everything(engine)["states"]
    return (
        seen,
        states["module/head.weight"],
        states["master/head.weight"],
        states["optimizer/exp_avg/head.weight"],
    )


def test_custom_load_fn(ranks: Any, tmp_path: Path) -> None:
    [(_, end)] = ranks(1, first_life, str(tmp_path), "bf16")
    [(seen, weight, master, moment)] = ranks(1, load_by_hand, str(tmp_path))
    assert seen["tied.weight"] == seen["embed.weight"] == (8, 8)
    assert seen["empty"] == (0, 3) and seen["gain"] == () and "scratch" not in seen
    assert weight.eq(2).all() and master.eq(2).all()
    assert (
        moment.abs().sum() > 0
        and moment.shape == end["states"]["optimizer/exp_avg/head.weight"].shape
    )


def load_other(folder: str, how: str, strict: bool) -> Any:
    torch.manual_seed(7)
    model = Net(4 if how == "narrow" else 8)
    if how == "more":
        model.extra = nn.Linear(2, 2)
    if how == "less":
        del model.norm.running_mean
        model.norm.running_mean = None
    before = [p.detach().clone() for p in model.parameters()]
    config: dict[str, Any] = {
        "train_batch_size": comm_size(),
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    if how == "groups":
        head = list(model.head.parameters())
        rest = [p for n, p in model.named_parameters() if not n.startswith("head")]
        engine, *_ = ds_core.initialize(
            model=model, config=config, model_parameters=[{"params": head}, {"params": rest}]
        )
    else:
        engine, *_ = ds_core.initialize(model=model, config=config)
    try:
        engine.load_checkpoint(
            folder, load_module_strict=strict, load_optimizer_states=how == "groups"
        )
    except CheckpointError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert engine.global_steps == 0
        return str(error)
    return engine.module.state_dict()["head.weight"]


def comm_size() -> int:
    from ds_core import comm

    return comm.world_size()


@pytest.mark.parametrize(
    "how, strict, words",
    [
        ("narrow", True, ["embed.weight", "(8, 8)", "(4, 4)"]),
        ("narrow", False, ["embed.weight", "(8, 8)", "(4, 4)"]),
        ("more", True, ["extra.weight", "load_module_strict=False"]),
        ("less", True, ["norm.running_mean", "load_module_strict=False"]),
        ("groups", True, ["1 optimizer groups", "2", "load_optimizer_states=False"]),
    ],
)
def test_another_model_is_refused_before_anything_changes(
    ranks: Any, tmp_path: Path, how: str, strict: bool, words: list[str]
) -> None:
    ranks(2, first_life_short, str(tmp_path))
    for message in ranks(2, load_other, str(tmp_path), how, strict):
        assert isinstance(message, str)
        assert all(word in message for word in words), message


@pytest.mark.parametrize("how", ["more", "less"])
def test_not_strict_takes_what_fits(ranks: Any, tmp_path: Path, how: str) -> None:
    [end] = ranks(1, first_life_short, str(tmp_path))
    [weight] = ranks(1, load_other, str(tmp_path), how, False)
    assert torch.equal(weight, end["states"]["module/head.weight"])


def save_without_frozen(folder: str) -> Any:
    engine = make("bf16")
    train(engine, 1)
    engine.save_checkpoint(folder, "t", exclude_frozen_parameters=True)
    engine.save_16bit_model(folder, exclude_frozen_parameters=True)
    other = make("bf16", seed=3)
    mine = other.module.frozen.weight.detach().clone()
    other.load_checkpoint(folder)
    kept = torch.equal(other.module.frozen.weight, mine)
    return kept, torch.equal(other.module.head.weight, engine.module.head.weight)


def with_amsgrad(folder: str, saved: bool, here: bool) -> Any:
    def start(amsgrad: bool) -> Any:
        return make(optimizer={"type": "AdamW", "params": {"lr": 0.01, "amsgrad": amsgrad}})

    engine = start(saved)
    engine.train_batch()
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = start(here)
    before = engine.head.weight.clone()
    told = None
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        told = str(error)
        assert torch.equal(engine.head.weight, before)
        engine.load_checkpoint(folder, load_optimizer_states=False)
    engine.train_batch()
    engine.destroy()
    return told


@pytest.mark.parametrize("saved, here", [(False, True), (True, False), (True, True)])
def test_a_hyperparameter_that_adds_a_state(
    ranks: Any, tmp_path: Path, saved: bool, here: bool
) -> None:
    [message] = ranks(1, with_amsgrad, str(tmp_path), saved, here)
    if saved == here:
        assert message is None
        return
    words = ("on", "off") if saved else ("off", "on")
    assert f"had amsgrad {words[0]}, and this run has it {words[1]}" in message
    assert "load_optimizer_states=False" in message


def test_exclude_frozen_parameters(ranks: Any, tmp_path: Path) -> None:
    assert ranks(1, save_without_frozen, str(tmp_path)) == [(True, True)]
    names = {s.name for s in parse_manifest(tmp_path / "t" / "manifest.json").states}
    assert "module/head.weight" in names and not any("frozen" in n for n in names)
    assert not any(
        "frozen" in n for n in safetensors.torch.load_file(tmp_path / "model.safetensors")
    )


def save_16bit(folder: str, mode: str, name: str) -> Any:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_checkpoint").addHandler(handler)
    engine = make(mode)
    train(engine, 1)
    assert engine.save_16bit_model(folder, name) is True
    return engine.module.state_dict(), messages


@pytest.mark.parametrize(
    "mode, dtype", [("fp32", torch.bfloat16), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_16bit_model(ranks: Any, tmp_path: Path, mode: str, dtype: torch.dtype) -> None:
    (state, messages), _ = ranks(2, save_16bit, str(tmp_path), mode, "pytorch_model.bin")
    assert [p.name for p in tmp_path.iterdir()] == ["pytorch_model.safetensors"]
    assert sum("pytorch_model.safetensors" in m for m in messages) == 1
    loaded = safetensors.torch.load_file(tmp_path / "pytorch_model.safetensors")
    assert set(loaded) == set(state) - {"tied.weight", "_extra_state"}
    for name, tensor in loaded.items():
        want = state[name].to(dtype) if state[name].is_floating_point() else state[name]
        assert tensor.dtype == want.dtype and torch.equal(tensor, want), name


def bad_names(folder: str) -> list[str]:
    engine = make()
    found = []
    for name in ("../a.safetensors", "a/b.safetensors", "model.pt", ""):
        with pytest.raises(CheckpointError) as caught:
            engine.save_16bit_model(folder, name)
        found.append(str(caught.value))
    return found


def test_16bit_model_stays_in_its_directory(ranks: Any, tmp_path: Path) -> None:
    for [messages] in [ranks(1, bad_names, str(tmp_path / "in"))]:
        assert all("must be a file name" in m for m in messages)
    assert list(tmp_path.iterdir()) == []


# -- held axes, plugins, other optimizers ----------------------------------------------------------


class Held(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.same = nn.Linear(3, 3)
        torch.manual_seed(seed)
        self.held_tp = nn.Linear(3, 3)


def make_held(seed: int, axes: dict[str, int]) -> Any:
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW"},
        "plugins": {"load": ["fake_axes=ds_testing.fake_axes"]},
        "fake_axes": {"axes": axes},
    }
    torch.manual_seed(seed)
    return ds_core.initialize(model=Held(seed + 10 * comm_rank()), config=config)[0]


def comm_rank() -> int:
    from ds_core import comm

    return comm.rank()


def held_round_trip(folder: str) -> bool:
    engine = make_held(1, {"tp": 2})
    other = make_held(2, {"tp": 2})
    engine.save_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"held_tp.* differs along mesh axes tp"):
        engine.save_16bit_model(folder)
    other.load_checkpoint(folder)
    return all(
        torch.equal(a, b)
        for a, b in zip(engine.module.parameters(), other.module.parameters(), strict=True)
    )


def held_elsewhere(folder: str) -> str:
    engine = make_held(3, {"tp": 1})
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    return str(caught.value)


def test_ranks_that_hold_different_weights(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, held_round_trip, str(tmp_path)) == [True, True]
    states = parse_manifest(tmp_path / "global_step0" / "manifest.json").states
    assert [s.at for s in states if s.name == "module/held_tp.weight"] == [{"tp": 0}, {"tp": 1}]
    for message in ranks(2, held_elsewhere, str(tmp_path)):
        assert "'module/held_tp.bias' differs along mesh axis 'tp', of size 2" in message


class Stage(nn.Module):
    """Held on tp, and with another name on each rank, as pipeline stages have."""

    def __init__(self, names: list[int]) -> None:
        super().__init__()
        for name in names:
            torch.manual_seed(name)
            stage = nn.Module()
            stage.held_tp = nn.Linear(30, 30)
            self.add_module(f"stage{name}", stage)


def make_stages(names: list[int], tp: int) -> Any:
    config = {
        "plugins": {"load": ["fake_axes=ds_testing.fake_axes"]},
        "fake_axes": {"axes": {"tp": tp}},
    }
    return ds_core.initialize(model=Stage(names), config={"train_batch_size": 1, **config})[0]


def save_stages(folder: str) -> Any:
    engine = make_stages([comm_rank()], 2)
    engine.save_checkpoint(folder)
    assert engine.save_16bit_model(folder)
    if comm_rank() == 0:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    with pytest.raises(CheckpointError, match="File too large"):
        engine.save_16bit_model(folder, "other.safetensors")
    if comm_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    engine.load_checkpoint(folder)
    return engine.module.state_dict()


def load_stages(folder: str) -> Any:
    engine = make_stages([7, 8], 1)
    with pytest.raises(CheckpointError, match=r"has no stage7"):
        engine.load_checkpoint(folder)
    both = make_stages([0, 1], 1)
    for p in both.module.parameters():
        p.data.zero_()
    both.load_checkpoint(folder)
    return both.module.state_dict()


def test_names_that_only_one_rank_has_load_anywhere(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, save_stages, str(tmp_path))
    want = {**first, **second}
    [loaded] = ranks(1, load_stages, str(tmp_path))
    narrow = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert want.keys() == loaded.keys() == narrow.keys()
    for name, tensor in want.items():
        assert torch.equal(tensor, loaded[name]) and torch.equal(tensor.bfloat16(), narrow[name])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".lock",
        "global_step0",
        "latest",
        "model.safetensors",
    ]


class Counting(torch.optim.SGD):
    """Keeps its step as an int, as many optimizers out there do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
        return super().step(closure)


def counting(folder: str) -> Any:
    found = []
    for load in (False, True):
        model = nn.Linear(2, 1)
        engine, *_ = ds_core.initialize(
            model=model,
            optimizer=lambda groups: Counting(groups, lr=0.1, momentum=0.9),
            config={"train_batch_size": 1},
        )
        if load:
            engine.load_checkpoint(folder)
        for _ in range(0 if load else 3):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
        if not load:
            engine.save_checkpoint(folder)
        found.append(
            [
                (engine.optimizer.state[p]["count"], engine.optimizer.state[p]["momentum_buffer"])
                for p in model.parameters()
            ]
        )
    return found


def test_optimizer_state_that_is_no_tensor(ranks: Any, tmp_path: Path) -> None:
    [(before, after)] = ranks(1, counting, str(tmp_path))
    assert [c for c, _ in after] == [c for c, _ in before] == [3, 3]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True))


PLUGIN = """
class Keeper:
    def __init__(self, rank):
        self.value = {"rank": rank}
    def state_dict(self):
        return self.value
    def load_state_dict(self, state):
        self.value = state
KEEPER = None
def ds_checkpointables(ctx):
    global KEEPER
    KEEPER = KEEPER or Keeper(ctx.rank)
    return {"keeper": KEEPER}
"""


def keep(folder: str, value: Any) -> Any:
    import importlib
    import sys

    sys.path.insert(0, folder)
    sys.modules.pop("keeper_plugin", None)
    module = importlib.import_module("keeper_plugin")
    engine, *_ = ds_core.initialize(
        model=nn.Linear(1, 1),
        config={"train_batch_size": comm_size(), "plugins": {"load": ["keeper_plugin"]}},
    )
    if value is None:
        engine.load_checkpoint(folder)
        return module.KEEPER.value
    engine.ctx.plugins.ask("ds_checkpointables", ctx=engine.ctx)
    module.KEEPER.value = value | {"mine": torch.full((2,), comm_rank())}
    if value.get("bad"):
        module.KEEPER.value["bad"] = [{comm_rank()}]
    try:
        engine.save_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    return None


def test_plugin_states(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "keeper_plugin.py").write_text(PLUGIN)
    ranks(2, keep, str(tmp_path), {"n": (1, 2)})
    for rank, value in enumerate(ranks(2, keep, str(tmp_path), None)):
        assert value["n"] == (1, 2) and value["mine"].tolist() == [rank, rank]
    [alone] = ranks(1, keep, str(tmp_path), None)
    assert alone["mine"].tolist() == [0, 0]
    for message in ranks(2, keep, str(tmp_path), {"bad": True}):
        assert "plugins/keeper_plugin/keeper" in message and "sorted(it)" in message


# -- reading ---------------------------------------------------------------------------------------


def count_bytes(folder: str) -> int:
    engine = make()
    path = Path(folder) / "global_step3"
    source = SavedStates(path, parse_manifest(path / "manifest.json"), engine.ctx.mesh)
    assert source.read("module/embed.weight", 5, 9).equal(source.read("module/embed.weight")[5:9])
    source.close()
    return source.bytes_read


def test_a_range_costs_its_bytes(ranks: Any, tmp_path: Path) -> None:
    ranks(1, first_life_short, str(tmp_path))
    assert ranks(1, count_bytes, str(tmp_path)) == [4 * 4 + 64 * 4]


def schedule_names() -> list[str]:
    import torch.optim.lr_scheduler as schedules

    return sorted(
        n for n, c in vars(schedules).items() if isinstance(c, type) and hasattr(c, "state_dict")
    )


def test_every_schedule_of_torch_can_be_kept() -> None:
    import torch.optim.lr_scheduler as s
    from ds_checkpoint.folder.values import decode, encode

    opt = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    made: list[Any] = [
        s.ConstantLR(opt),
        s.LinearLR(opt),
        s.PolynomialLR(opt),
        s.ReduceLROnPlateau(opt),
    ]
    made += [
        s.LambdaLR(opt, lambda e: 0.9),
        s.MultiplicativeLR(opt, lambda e: 0.9),
        s.ExponentialLR(opt, 0.9),
    ]
    made += [s.StepLR(opt, 2), s.MultiStepLR(opt, [2, 4]), s.CosineAnnealingLR(opt, 5)]
    made += [
        s.CosineAnnealingWarmRestarts(opt, 5),
        s.OneCycleLR(opt, 0.1, 10),
        s.CyclicLR(opt, 0.1, 0.2),
    ]
    made += [s.SequentialLR(opt, [s.LinearLR(opt), s.MultiStepLR(opt, [2])], [3])]
    made += [s.ChainedScheduler([s.LinearLR(opt), s.StepLR(opt, 2)])]
    assert {type(x).__name__ for x in made} >= set(schedule_names()) - {
        "LRScheduler",
        "_LRScheduler",
        "Optimizer",
    }
    for schedule in made:
        state = schedule.state_dict()
        back = decode(json.loads(json.dumps(encode(state, "s", {}, own=True))), {}.__getitem__, "s")
        assert back == state, type(schedule).__name__

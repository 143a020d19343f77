"""States that only some ranks have, states of plugins, and what reading costs."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import safetensors.torch
import torch
from checkpoint_runs import comm_size, first_life_short, make
from ds_checkpoint.folder.format import parse_manifest
from ds_checkpoint.source import SavedStates
from ds_checkpoint.storages.disk import DiskCheckpoint
from torch import nn

import ds_core
from ds_core.errors import CheckpointError

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
        "plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]},
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
        "plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]},
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
    source = SavedStates(
        DiskCheckpoint(path), parse_manifest(path / "manifest.json"), engine.ctx.mesh
    )
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

"""Names and values in checkpoints of torch.distributed.checkpoint, as programs write them."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_runs import Net, batch, net, steps_of
from ds_checkpoint.formats.convert import convert
from ds_checkpoint.formats.finding import open_any
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ds_core
from ds_core.errors import CheckpointError
from ds_core.plugins import Plugins

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LRS = (0.01, 0.002)


def groups_of(model: torch.nn.Module, turned: bool = False) -> list[dict[str, Any]]:
    """Matrices in one group, the rest in another, with a learning rate each."""
    rows = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "lr": LRS[0]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": LRS[1]},
    ]
    return rows[::-1] if turned else rows


def trained(folder: Path, flat: bool, turned: bool = False) -> list[float]:
    """A run of torch alone, saved after three steps; the losses of two more."""
    model = net()
    optimizer = torch.optim.AdamW(groups_of(model, turned))
    losses = []
    for step in range(5):
        if step == 3:
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            weights, states = get_state_dict(model, optimizer, options=options)
            dcp.save({"app": {"model": weights, "optim": states}}, checkpoint_id=folder)
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[3:]


def engine_of(turned: bool = False) -> Any:
    torch.manual_seed(9)
    model = Net()
    optimizer = torch.optim.AdamW([{**g, "lr": 1.0} for g in groups_of(model, turned)])
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0}
    return ds_core.initialize(model=model, optimizer=optimizer, config=config)[0]


@pytest.mark.parametrize("turned", [False, True], ids=["same order", "other order"])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_groups_are_known_by_their_weights(tmp_path: Path, flat: bool, turned: bool) -> None:
    losses = trained(tmp_path / "ck", flat)
    engine = engine_of(turned)
    engine.load_checkpoint(str(tmp_path / "ck"))
    lrs = [group["lr"] for group in engine.param_groups()]
    assert lrs == list(LRS[::-1] if turned else LRS) and engine.global_steps == 3
    assert steps_of(engine, 3, 5) == pytest.approx(losses, rel=1e-6)
    engine.destroy()


def test_groups_of_other_weights_are_refused(tmp_path: Path) -> None:
    trained(tmp_path / "ck", False)
    torch.manual_seed(9)
    model = Net()
    mixed = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": mixed[:2]}, {"params": mixed[2:]}])
    config = {"train_micro_batch_size_per_gpu": 4}
    engine = ds_core.initialize(model=model, optimizer=optimizer, config=config)[0]
    with pytest.raises(CheckpointError, match="have other weights than this run's"):
        engine.load_checkpoint(str(tmp_path / "ck"))
    engine.load_checkpoint(str(tmp_path / "ck"), load_optimizer_states=False)
    engine.destroy()


def test_values_of_earlier_versions_and_tensors_among_them(tmp_path: Path) -> None:
    """All groups in one value (torch before 2.4), and a learning rate that is a tensor."""
    weights = {"a": torch.ones(2)}
    state = {"a": {"exp_avg": torch.ones(2), "step": torch.tensor(4.0)}}
    group = {"lr": torch.tensor(0.25), "betas": (0.5, 0.75), "fused": True, "params": ["a"]}
    dcp.save(
        {"model": weights, "optim": {"state": state, "param_groups": [group]}},
        checkpoint_id=tmp_path / "new",
    )
    found = dcp.FileSystemReader(tmp_path / "new").read_metadata()
    assert "optim.param_groups.0.lr" in found.state_dict_metadata
    old = {"optim.param_groups": [{"lr": 0.25, "betas": (0.5, 0.75), "params": ["a"]}]}
    flat = {"model": weights, **{f"optim.state.a.{k}": t for k, t in state["a"].items()}, **old}
    dcp.save(
        flat,
        checkpoint_id=tmp_path / "old",
        planner=dcp.DefaultSavePlanner(flatten_state_dict=True),
    )
    with open_any(Plugins(), tmp_path / "new") as saved:
        assert saved.values is not None
        [kept] = saved.values[0]["optimizer_groups"]
        assert kept == {"lr": 0.25, "betas": (0.5, 0.75)} and saved.manifest.step == 4


def test_all_groups_in_one_value() -> None:
    from ds_checkpoint_dcp.layout import groups_of as read_groups
    from ds_checkpoint_dcp.layout import read_layout

    paths: dict[str, Any] = {
        "m.a": ("model", "a"),
        "o.s": ("optim", "state", "a", "exp_avg"),
        "o.g": ("optim", "param_groups"),
    }
    layout = read_layout(paths, ["m.a", "o.s"])
    rows = [{"lr": 0.5, "foreach": None, "params": ["a"]}]
    groups, params, _ = read_groups(layout, {"o.g": rows}.__getitem__)
    assert (groups, params) == ([{"lr": 0.5}], [["a"]])
    assert layout.states == {("exp_avg", "a"): "o.s"} and layout.weights == {"a": "m.a"}


def test_weights_alone_and_a_model_that_has_a_module_of_that_name(tmp_path: Path) -> None:
    flat = {"model.embed": torch.ones(2), "lm_head": torch.zeros(3)}
    dcp.save(flat, checkpoint_id=tmp_path / "a")
    with open_any(Plugins(), tmp_path / "a") as saved:
        assert set(saved.weights()) == set(flat)
        assert any("optimizer states" in text for text in saved.missing)
    dcp.save({"step": 3}, checkpoint_id=tmp_path / "b")
    with pytest.raises(CheckpointError, match="holds no weights"):
        convert(tmp_path / "b", tmp_path / "c")


def save_2d(folder: str) -> None:
    """Weights that are cut along both dimensions, and along one of them twice."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(35.0).view(5, 7)
    cuts = {
        "both": (Shard(0), Shard(1)),
        "rows": (Shard(0), Shard(0)),
        "replicated": (Replicate(), Shard(1)),
        "none": (Replicate(), Replicate()),
    }
    state = {n: distribute_tensor(whole.clone(), mesh, places) for n, places in cuts.items()}
    dcp.save({"model": state}, checkpoint_id=folder)


@pytest.mark.slow
def test_weights_cut_along_two_dimensions(tmp_path: Path, ranks: Any) -> None:
    ranks(4, save_2d, str(tmp_path / "ck"))
    with open_any(Plugins(), tmp_path / "ck") as saved:
        for name in saved.weights():
            found = saved.source.whole(f"module/{name}")
            assert torch.equal(found, torch.arange(35.0).view(5, 7)), name
        assert len(saved.weights()) == 4


@pytest.mark.slow
def test_random_damage_is_named_or_has_no_effect(tmp_path: Path) -> None:
    """Bytes flipped, cut and doubled: an error of ours, or the same values."""
    trained(tmp_path / "ck", False)
    files = {p: p.read_bytes() for p in (tmp_path / "ck").iterdir()}
    with open_any(Plugins(), tmp_path / "ck") as saved:
        want = {n: saved.source.whole(n) for n in saved.source.names()}
    draw = random.Random(0)
    refused = 0
    for _ in range(400):
        path = draw.choice(sorted(files))
        data = bytearray(files[path])
        place = draw.randrange(len(data))
        kind = draw.randrange(3)
        if kind == 0:
            data[place] = draw.randrange(256)
        elif kind == 1:
            del data[place : place + draw.randrange(1, 50)]
        else:
            data[place:place] = data[place : place + draw.randrange(1, 50)]
        path.write_bytes(bytes(data))
        try:
            with open_any(Plugins(), tmp_path / "ck") as saved:
                saved.source.verify(0, 1)
                found = {n: saved.source.whole(n) for n in saved.source.names()}
        except CheckpointError as error:
            refused += 1
            assert str(tmp_path) in str(error)
        else:
            same = {n for n in want if n in found and torch.equal(found[n], want[n])}
            # A flipped letter of a name gives a weight another name; never other values.
            assert len(want) - len(same) <= 2
        path.write_bytes(files[path])
    assert refused > 200

"""What is loaded of a checkpoint: arguments of load_checkpoint, other models, 16-bit exports."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import safetensors.torch
import torch
from checkpoint_runs import (
    Net,
    comm_size,
    everything,
    first_life,
    first_life_short,
    losses_of,
    make,
)
from ds_checkpoint.folder.format import parse_manifest
from torch import Tensor, nn

import ds_core
from ds_core.errors import CheckpointError

# -- arguments -------------------------------------------------------------------------------------


def parts(folder: str, arguments: dict[str, Any]) -> dict[str, Any]:
    engine = make(seed=9)
    losses_of(engine, 1)
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


@pytest.mark.fast_cases("arguments2-different2", "arguments3-different3")
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
    losses_of(engine, 1)
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
    losses_of(engine, 1)
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

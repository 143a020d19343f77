"""Torch's own calls on partitioned weights: state_dict, load_state_dict, apply."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import ds_zero
import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor, nn

from plugins.zero.tests.gathered_models import (
    D,
    Net,
    gathered_engine,
    step,
    unused_are_sharded,
    weights,
)


def check_placeholders(engine: Any, names: list[str], said: list[str]) -> None:
    """Partitioned weights are empty in a state dict, also while they happen to be gathered, and
    loading them changes nothing; what one rank refuses, all do."""
    from ds_core import comm

    module = engine.module
    rank = comm.rank()
    partitioned = {n for n, p in module.named_parameters() if not p.ds_persist}
    step(engine)
    # weights are kept for a backward that never comes
    engine(torch.ones(4, D, dtype=torch.bfloat16))
    assert any(module.get_parameter(n).numel() for n in partitioned), "none was kept"
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    before = weights(engine)
    loaded = torch.load(file)
    assert list(loaded) == names
    assert {
        n for n, t in loaded.items() if not t.numel()
    } == partitioned and "a.weight" in partitioned
    assert (loaded["a.weight"].shape, loaded["a.weight"].dtype) == ((0,), torch.bfloat16)
    module.load_state_dict(loaded)
    after = weights(engine)
    assert all(torch.equal(after[n], before[n]) for n in before)
    assert [text.partition(":")[0] for text in said] == (
        [] if rank else ["state_dict()", "load_state_dict()"]
    )
    with pytest.raises(RuntimeError, match="size mismatch for a.weight"):
        Net().load_state_dict(loaded)
    with pytest.raises(RuntimeError, match=r"size mismatch for a.weight.*of this rank"):
        module.load_state_dict({**loaded, "a.weight": torch.ones(2, 2)} if rank else loaded)
    # on ranks without the file
    for given in (loaded["a.weight"], torch.empty(D, D, device="meta")):
        step(engine)
        module.load_state_dict({**loaded, "a.weight": given if rank else torch.ones(D, D)})
        assert bool((weights(engine)["a.weight"] == 1).all())


def check_state_dicts(stage: int, folder: str, section: dict[str, Any]) -> None:
    from ds_core import comm

    said: list[str] = []
    watch = logging.Handler()
    watch.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_zero").addHandler(watch)
    engine = gathered_engine(stage, "bfloat16", **section)
    module = engine.module
    names = list(Net().state_dict())
    assert list(module.state_dict(keep_vars=True)) == names
    if stage == 3:
        check_placeholders(engine, names, said)
    with ds_zero.GatheredParameters(module):
        state = {n: t.clone() for n, t in module.state_dict().items()}
    assert list(state) == names and state["a.weight"].shape == (D, D)

    new = {n: torch.randn_like(t) if t.is_floating_point() else t for n, t in state.items()}
    for tensor in new.values():
        comm.broadcast(tensor, src=0)
    # weights are kept for a backward that never comes
    engine(torch.ones(4, D, dtype=torch.bfloat16))
    for assign in (False, True):
        # For what is partitioned the first rank's counts; the rest every rank loads for itself.
        given = {
            n: t + 1 if comm.rank() and n == "a.weight" and stage == 3 else t
            for n, t in new.items()
        }
        module.load_state_dict(given, assign=assign)
    found = weights(engine)
    assert all(torch.equal(found[n], new[n].double()) for n in found)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    step(engine)
    found = weights(engine)
    assert all(torch.equal(found[n], new[n].double()) for n in found), "the masters did not follow"

    with pytest.raises(RuntimeError, match=r"size mismatch for a.weight"):
        module.load_state_dict({**new, "a.weight": torch.ones(2, 2)})
    with pytest.raises(RuntimeError, match="Missing key.*b.0.bias"):
        module.load_state_dict({n: t for n, t in new.items() if n != "b.0.bias"})
    module.a.load_state_dict({"weight": torch.ones(D, D)}, strict=False)
    found = weights(engine)
    assert bool((found["a.weight"] == 1).all())
    assert torch.equal(found["a.bias"], new["a.bias"].double())
    step(engine)
    assert bool((weights(engine)["a.weight"] == 1).all())

    check_custom_loading(engine, folder, names, new["a.bias"])
    engine.destroy()
    assert list(module.state_dict()) == names


def check_custom_loading(engine: Any, folder: str, names: list[str], bias: Tensor) -> None:
    """A checkpoint is loaded by the user's function, by which it may be changed."""
    module = engine.module
    engine.save_checkpoint(folder)
    with ds_zero.GatheredParameters(module, modifier_rank=0):
        module.a.weight.data.zero_()
    loaded = []

    def load(tensors: dict[str, Tensor], target: nn.Module) -> None:
        loaded.append(list(tensors))
        target.load_state_dict({n: t + 1 if n == "a.weight" else t for n, t in tensors.items()})

    engine.load_checkpoint(folder, custom_load_fn=load)
    assert sorted(loaded[0]) == sorted(names)
    step(engine)
    found = weights(engine)
    assert bool((found["a.weight"] == 2).all())
    assert torch.equal(found["a.bias"], bias.double())


@pytest.mark.fast_cases("3-offload", "2-device")
@pytest.mark.parametrize(
    "section", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=["device", "offload"]
)
@pytest.mark.parametrize("stage", [2, 3])
def test_state_dicts_and_custom_loading(
    stage: int, section: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(2, check_state_dicts, stage, str(tmp_path), section)


@pytest.mark.slow
def test_state_dicts_on_four_ranks(tmp_path: Path) -> None:
    run_ranks(4, check_state_dicts, 3, str(tmp_path), {})


def check_apply() -> None:
    from ds_core import comm

    seen: dict[str, tuple[int, ...]] = {}

    def start_linear(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            seen[str(id(module))] = tuple(module.weight.shape)
            with torch.no_grad():
                module.weight.fill_(comm.rank() + 3.0)
        if isinstance(module, nn.Sequential):
            module[0].bias.data.fill_(comm.rank() + 4.0)  # of a child

    engine = gathered_engine(3)
    assert engine.module.apply(start_linear) is engine.module
    unused_are_sharded(engine)
    assert set(seen.values()) == {(D, D)}
    found = weights(engine)
    assert bool((found["a.weight"] == 3).all()) and bool((found["b.0.bias"] == 4).all())
    module = engine.module
    engine.destroy()
    assert "apply" not in vars(module) and "apply" not in vars(module.a)

    seen.clear()
    engine = gathered_engine(3, override_module_apply=False)
    before = weights(engine)
    assert type(engine.module.apply).__name__ == "method" and "apply" not in vars(engine.module)
    engine.module.apply(start_linear)
    assert set(seen.values()) == {(0,)}
    assert torch.equal(weights(engine)["a.weight"], before["a.weight"])
    engine.destroy()

    for override in (True, False):
        section = {"stage": 3, "override_module_apply": override}
        run = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": section,
        }
        with ds_zero.Init(config_dict_or_path=run):
            model = Net()
        assert ("apply" in vars(model.a), "apply" in vars(model)) == (override, override)


def test_apply() -> None:
    run_ranks(2, check_apply)

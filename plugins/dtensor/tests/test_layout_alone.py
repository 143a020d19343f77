"""The declaration, the arithmetic of boxes, and one process; they need no other plugin."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from ds_dtensor.layout import boxes, contiguous
from ds_testing import EngineMethodsConformance, PluginConformance
from ds_testing.one_process import one_process_engine
from torch import nn

from ds_core.engine import Engine

SHAPES = [(), (1,), (7,), (3, 4), (4, 1), (1, 5), (2, 3, 4), (3, 1, 2, 2)]
REQUIRED = {"plugins": {"require": ["dscore-dtensor"]}}
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
    **REQUIRED,
}


class TestPlugin(PluginConformance):
    entry_point = "ds_dtensor.plugin"


class TestMethods(EngineMethodsConformance):
    config: ClassVar[dict[str, Any]] = REQUIRED
    names = ("load_state_dict", "state_dict")

    def test_names_are_free_and_described(self, engine: Engine) -> None:
        """They stand for the module's methods of these names, since torch's tools call those."""
        for name in self.names:
            function = getattr(engine, name).func
            assert inspect.getdoc(function)
            given = set(inspect.signature(function).parameters)
            if name == "load_state_dict":
                assert given >= set(inspect.signature(nn.Module.load_state_dict).parameters) - {
                    "self"
                }


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_are_a_range_of_the_flattened_array(shape: tuple[int, ...]) -> None:
    array = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(array.numel() + 1), 2):
        found = list(boxes(shape, start, stop))
        values = torch.cat(
            [array[b.slices()].reshape(-1) for b, _ in found] or [array.new_empty(0)]
        )
        assert values.tolist() == list(range(start, stop))
        assert [at for _, at in found] == [
            int(array[b.slices()].reshape(-1)[0]) - start for b, _ in found
        ]
        assert len(found) <= max(2 * len(shape) - 1, 1)
        for box, _ in found:
            assert contiguous(box.size) == torch.empty(box.size).stride()


@pytest.fixture
def engine() -> Iterator[Any]:
    torch.manual_seed(0)
    with one_process_engine(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), CONFIG) as engine:
        yield engine


def test_one_process_has_plain_tensors_on_the_same_memory(engine: Any) -> None:
    found = engine.state_dict()
    own = engine.module.state_dict()
    assert list(found) == list(own)
    for key, value in own.items():
        assert type(found[key]) is torch.Tensor
        assert found[key].data_ptr() == value.data_ptr()
    assert list(engine.state_dict(prefix="net.")) == [f"net.{key}" for key in own]


def test_torchs_functions_take_an_engine(engine: Any) -> None:
    from ds_dtensor import EngineOptimizer
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def step() -> None:
        loss = engine(torch.ones(4, 3)).square().sum()
        engine.backward(loss)
        engine.step()

    step()
    model, optim = get_state_dict(engine, EngineOptimizer(engine))
    before = {k: v.clone() for k, v in model.items()}
    momentum = optim["state"]["0.weight"]["momentum_buffer"].clone()
    optim["state"]["0.weight"]["momentum_buffer"] = momentum
    step()
    kept = {k: v.clone() for k, v in before.items()}
    set_state_dict(engine, EngineOptimizer(engine), model_state_dict=kept, optim_state_dict=optim)
    assert all(torch.equal(v, engine.module.state_dict()[k]) for k, v in before.items())
    state = engine.optimizer.state[engine.module[0].weight]
    assert torch.equal(state["momentum_buffer"], momentum)


def test_what_is_not_there_is_said(engine: Any) -> None:
    from ds_dtensor import EngineOptimizer

    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading.*\n\tmissing key\(s\): 0.bias"):
        engine.load_state_dict({k: v for k, v in engine.state_dict().items() if k != "0.bias"})
    keys = engine.load_state_dict({"other": torch.ones(1)}, strict=False)
    assert keys.unexpected_keys == ["other"] and "0.bias" in keys.missing_keys
    with pytest.raises(RuntimeError, match="call engine.step"):
        EngineOptimizer(engine).step()


def test_states_that_have_not_begun_are_foreseen(engine: Any) -> None:
    from ds_dtensor import EngineOptimizer

    states = EngineOptimizer(engine).state_dict()["state"]
    assert all(list(state) == ["momentum_buffer"] for state in states.values())
    assert not engine.optimizer.state


def test_nothing_is_left_behind() -> None:
    module = nn.Linear(3, 2)
    with one_process_engine(module, CONFIG) as engine:
        assert module._load_state_dict_pre_hooks
        assert engine.state_dict()
    assert not module._load_state_dict_pre_hooks


class Counts(nn.Linear):
    """A module whose extra state is a list, which cannot be a key of a dict."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.counts = [0]

    def get_extra_state(self) -> list[int]:
        return list(self.counts)

    def set_extra_state(self, state: list[int]) -> None:
        self.counts = state


def test_extra_states_of_any_kind_are_loaded() -> None:
    module = Counts()
    with one_process_engine(module, CONFIG) as engine:
        found = engine.state_dict(view="dtensor")
        module.counts = [5]
        engine.load_state_dict(found)
        assert module.counts == [0]

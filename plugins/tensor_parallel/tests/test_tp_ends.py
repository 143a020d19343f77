"""The end of a run with divided layers: each rank has the whole model again, which trains and runs
by itself.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ds_testing.kits.parallel.given_back import Structure
from ds_testing.pytest_plugin import Ranks
from ds_testing.truth import start

from ds_core import comm

TP = {"tensor_parallel": {"autotp_size": 2}}


def llama() -> Any:
    """Two key heads for four queries, tied to nothing; on four ranks keys are computed several
    times.
    """
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 36, "num_hidden_layers": 2}
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**small, num_attention_heads=4, num_key_value_heads=2)
    )


def gives_back(size: int) -> None:
    model = llama()
    plain = llama()
    before = Structure(model)
    batch = torch.arange(16).view(2, 8)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for sections in (
        {"tensor_parallel": {"autotp_size": size}},
        {},
        {"tensor_parallel": {"autotp_size": size}},
    ):
        engine = start(model, **sections)
        loss = engine(input_ids=batch, labels=batch).loss
        wanted = plain(input_ids=batch, labels=batch).loss
        torch.testing.assert_close(loss, wanted)
        engine.backward(loss)
        engine.step()
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()
        copied = copy.deepcopy(engine.module)
        torch.testing.assert_close(
            copied(input_ids=batch, labels=batch).loss, engine(input_ids=batch, labels=batch).loss
        )
        engine.destroy()
        # What was divided is divided in the copy, and still works among the ranks.
        torch.testing.assert_close(
            copied(input_ids=batch, labels=batch).loss, plain(input_ids=batch, labels=batch).loss
        )
        assert not before.differences(model)
        for name, weight in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], weight)
    own = torch.arange(10).view(2, 5) + comm.rank()
    torch.testing.assert_close(
        model(input_ids=own, labels=own).logits, plain(input_ids=own, labels=own).logits
    )


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_model_is_whole_again_and_trains_with_and_without(ranks: Ranks, size: int) -> None:
    ranks(size, gives_back, size)


def ends_in_an_exception() -> None:
    """Other ranks may not come: the module is whole after the next initialize."""
    model = llama()
    plain = llama()
    engine = start(model, **TP)
    try:
        raise ValueError("training ends")
    except ValueError:
        engine.destroy()
    assert model.lm_head.weight.shape != plain.lm_head.weight.shape
    batch = torch.arange(16).view(2, 8)
    engine = start(model)
    torch.testing.assert_close(
        engine(input_ids=batch, labels=batch).loss, plain(input_ids=batch, labels=batch).loss
    )
    engine.destroy()
    assert "ds_undo" not in vars(model)


def test_an_exception_lets_ranks_end_without_each_other(ranks: Ranks) -> None:
    ranks(2, ends_in_an_exception)


def written_whole() -> None:
    from ds_tensor_parallel.deepspeed_names import GatherReplacedLayerParams

    engine = start(llama(), tensor_parallel={"autotp_size": 2})
    whole = dict(llama().named_parameters())
    name = "model.layers.0.mlp.up_proj.weight"
    param = dict(engine.module.named_parameters())[name]
    assert param.shape != whole[name].shape
    with GatherReplacedLayerParams(engine.module.parameters(), engine.module):
        for other, value in engine.module.named_parameters():
            torch.testing.assert_close(value.data, whole[other].data)
        param.data.mul_(2)
    assert param.shape != whole[name].shape
    with GatherReplacedLayerParams(param, engine.module):
        torch.testing.assert_close(param.data, 2 * whole[name].data)
    with GatherReplacedLayerParams(param, engine.module, enabled=False):
        assert param.shape != whole[name].shape
    engine.destroy()


def test_parameters_are_whole_inside_gather_replaced_layer_params(ranks: Ranks) -> None:
    ranks(2, written_whole)

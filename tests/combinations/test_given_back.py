"""Features that change a model, alone and two at once: after destroy it is what it was, and runs
without an engine.

Also where `initialize` refuses the pair or fails, and where the engine was forgotten instead of
destroyed.
"""

from __future__ import annotations

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.kits.parallel.given_back import Structure
from torch import Tensor, nn

import ds_core
from ds_core.errors import DSError, UsageError

VOCABULARY = 13
WIDTH = 8
LENGTH = 8
LAYERS = 3


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, 12)
        self.down_proj = nn.Linear(12, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(torch.tanh(self.up_proj(hidden)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(self.norm(hidden))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Each place is told from its own token alone, so that sequences can be cut anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "param_persistence_threshold": 10, **more}}


LTD = {
    "enabled": True,
    "total_layer_num": LAYERS,
    "random_ltd_layer_num": LAYERS,
    "random_ltd_layer_id": list(range(LAYERS)),
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 2,
        "max_value": 6,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 10, "seq_per_step": 1},
    },
}
LENGTHS = {
    "enabled": True,
    "min_difficulty": 2,
    "max_difficulty": LENGTH,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 2},
}
FEATURES: dict[str, dict[str, Any]] = {
    "zero 1": zero(1),
    "zero 2 offloaded": zero(2, offload_optimizer={"device": "cpu"}),
    "zero 3": zero(3),
    "zero 3 leaves": zero(3, leaf_module={"classes": [f"{__name__}.Block"]}),
    "zero 3 quantised": zero(3, zero_quantized_weights=True, zero_quantized_gradients=True),
    "layer drop": {"progressive_layer_drop": {"enabled": True, "theta": 0.01, "gamma": 100.0}},
    "random LTD": {
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": LTD}}
    },
    "lengths": {"curriculum_learning": LENGTHS},
    "recomputed": {"activation_checkpointing": {"modules": ["Block"]}},
    "recomputed in parts": {
        "activation_checkpointing": {"modules": ["Block"], "partition_activations": True}
    },
    "reproducible": {"reproducibility": {}},
    "tensor parallel": {"tensor_parallel": {"autotp_size": 2}},
    "sequence parallel": {
        "sequence_parallel": {"size": 2, "inputs": {"input_ids": 1, "labels": 1}}
    },
    "tiled": {"sequence_parallel": {"tiled_mlp": {"modules": ["MLP"], "shards": 2}}},
    "profiled": {
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": "/dev/null"}
    },
    "logged": {"wall_clock_breakdown": True, "memory_breakdown": True, "steps_per_print": 1},
    "sparse gradients": {"sparse_gradients": True},
    "one bit": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1}}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def config(*names: str) -> dict[str, Any]:
    merged: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    for name in names:
        for key, section in FEATURES[name].items():
            merged[key] = (
                {**merged.get(key, {}), **section} if isinstance(section, dict) else section
            )
    return merged


def batch(number: int) -> dict[str, Tensor]:
    ids = torch.randint(
        0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(number)
    )
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def two_steps(engine: Any) -> None:
    for number in range(2):
        engine.backward(engine(**batch(number)))
        engine.step()


def check_plain(model: nn.Module, before: Structure, what: str) -> None:
    """It calculates in training mode what a new model with its weights does, gradients too; so does
    a copy.
    """
    assert not (left := before.differences(model)), f"{what}: {left[:5]}"
    plain = Net()
    plain.load_state_dict(model.state_dict())
    wanted = gradients(plain)
    for part in (model, copy.deepcopy(model)):
        torch.testing.assert_close(gradients(part), wanted, msg=lambda m: f"{what}: {m}", **CLOSE)


def gradients(model: nn.Module) -> list[Tensor]:
    model.train().zero_grad()
    loss = model(**batch(9))
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def destroyed(names: tuple[str, ...], forgotten: bool) -> str:
    """With the features, without, with. Returns what `initialize` says where it refuses them."""
    torch.manual_seed(3)
    model = Net()
    before = Structure(model)
    for turn in (names, (), names):
        said = ""
        try:
            engine, *_ = ds_core.initialize(model=model, config=config(*turn))
        except DSError as error:
            said = str(error)
        if said:
            # What needs all ranks to be changed back waits for the next `initialize`.
            ds_core.initialize(model=model, config=config())[0].destroy()
            check_plain(model, before, "refused")
            return said
        two_steps(engine)
        copy.deepcopy(engine.module)
        engine.destroy()
        check_plain(model, before, f"after {turn or 'nothing'}")
    with pytest.raises(UsageError, match="nothing to train"):
        ds_core.initialize(model=model, model_parameters=[], config=config(*names))
    engine, *_ = ds_core.initialize(model=model, config=config())
    two_steps(engine)
    engine.destroy()
    check_plain(model, before, "after a start that failed")
    if forgotten:
        engine, *_ = ds_core.initialize(model=model, config=config(*names))
        two_steps(engine)
        del engine
        gc.collect()
        gradients(model)
    return ""


ALONE = [(name,) for name in FEATURES]
PAIRS = [
    pair
    for pair in itertools.combinations(FEATURES, 2)
    if not all(name.startswith("zero") for name in pair)
]
FEW = [("zero 3", "lengths"), ("recomputed", "tensor parallel"), ("layer drop", "random LTD")]
LOCAL = (
    "reproducible",
    "layer drop",
    "random LTD",
    "lengths",
    "recomputed",
    "tiled",
    "profiled",
    "logged",
    "autocast",
)
"""Features under which a rank's module runs by itself, once its engine is forgotten."""


REFUSED = {
    **{
        (name, "sparse gradients"): "sparse_gradients: does not go with zero_opt"
        for name in FEATURES
        if "zero" in name
    },
    **{
        (name, "one bit"): "reduces gradients by itself, and so does ZeRO"
        for name in FEATURES
        if "zero" in name
    },
    (
        "sparse gradients",
        "one bit",
    ): "reduces gradients by itself, and so does plugin 'sparse_gradients'",
    ("tensor parallel", "sequence parallel"): "sp 2 must divide dp 1",
    ("random LTD", "sequence parallel"): "random_ltd.enabled: does not go with sequence_parallel",
}
"""What is said of pairs that two ranks cannot have; of all others `initialize` says nothing."""


@pytest.mark.parametrize(
    "names",
    [
        *FEW,
        *(
            pytest.param(names, marks=pytest.mark.slow)
            for names in (*ALONE, *PAIRS)
            if names not in FEW
        ),
    ],
    ids=" + ".join,
)
def test_a_model_is_given_back(names: tuple[str, ...]) -> None:
    forgotten = all(name in LOCAL for name in names)
    wanted = REFUSED.get(names, "")
    for said in run_ranks(2, destroyed, names, forgotten):
        assert wanted in said and bool(said) == bool(wanted), said

"""Models in shard groups are built, saved and loaded, and exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing import run_ranks

from plugins.zero.tests.hierarchy_models import HPZ, MICS, SMALL, D, Net


def errors_after_init(zero: dict[str, Any]) -> list[float]:
    """A model built under MiCS_Init on each block, against plain construction on rank 0."""
    import ds_zero
    from ds_testing.truth import whole_weights

    import ds_core
    from ds_core import comm

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "param_persistence_threshold": 0, **MICS, **zero},
    }
    torch.manual_seed(comm.rank())
    with ds_zero.MiCS_Init(config_dict_or_path=config):
        model = Net()
    assert model.inp.weight.ds_tensor.numel() == D * D // 2
    torch.manual_seed(0)
    truth = dict(Net().named_parameters())
    engine, *_ = ds_core.initialize(model=model, config=config)
    whole = whole_weights(engine)
    engine.destroy()
    return [float((whole[n].view_as(p) - p).abs().max()) for n, p in truth.items() if n in whole]


@pytest.mark.parametrize(
    "offloads",
    [(), pytest.param(("offload_param", "offload_optimizer"), marks=pytest.mark.slow)],
    ids=["", "offload"],
)
def test_models_are_built_in_shard_groups(offloads: tuple[str, ...]) -> None:
    for errors in run_ranks(4, errors_after_init, {key: {"device": "cpu"} for key in offloads}):
        assert len(errors) >= 12 and not any(errors)


def keep(folder: str, zero: dict[str, Any], load: str, tag: str) -> None:
    """Train a step, or load; and save."""
    import ds_core
    from ds_core import comm

    torch.manual_seed(comm.rank())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, **SMALL, **zero},
    }
    engine, *_ = ds_core.initialize(model=Net(), config=config)
    if load:
        engine.load_checkpoint(folder, tag=load)
    else:
        engine.backward(engine(torch.ones(2, D, dtype=torch.bfloat16)))
        engine.step()
    engine.save_checkpoint(folder, tag=tag)
    engine.destroy()


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (4, HPZ),
    (1, {}),
    (4, {"mics_shard_size": 4}),
    (2, MICS),
    (4, {}),
]


@pytest.mark.parametrize(
    ("zero", "layouts"),
    [
        (MICS, LAYOUTS[:1]),
        pytest.param(MICS, LAYOUTS, marks=pytest.mark.slow),
        pytest.param(HPZ, [(4, MICS), (2, {})], marks=pytest.mark.slow),
    ],
)
def test_checkpoints_load_at_other_sizes(
    zero: dict[str, Any], layouts: list[tuple[int, dict[str, Any]]], tmp_path: Any
) -> None:
    from ds_checkpoint.offline import differences as differing
    from ds_checkpoint.offline import open_saved

    run_ranks(4, keep, str(tmp_path), zero, "", "from")
    with open_saved(tmp_path, "from") as first:
        for place, (world, other) in enumerate(layouts):
            run_ranks(world, keep, str(tmp_path), other, "from", f"to{place}")
            with open_saved(tmp_path, f"to{place}") as second:
                assert list(differing(first, second)) == [], (world, other)


def test_construction_in_shard_groups_needs_their_size() -> None:
    import ds_zero

    from ds_core.errors import UsageError

    with pytest.raises(UsageError, match="has no zero_optimization.mics_shard_size"):
        ds_zero.MiCS_Init(
            config_dict_or_path={"train_batch_size": 1, "zero_optimization": {"stage": 3}}
        )


def export(folder: str, zero: dict[str, Any]) -> None:
    """Save the model for others, of weights that are the same on every rank."""
    import ds_core

    torch.manual_seed(0)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, **SMALL, **zero},
    }
    engine, *_ = ds_core.initialize(model=Net(), config=config)
    engine(torch.ones(2, D))
    assert engine.save_16bit_model(folder, "model.safetensors")
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("zero", [HPZ, MICS], ids=["hpZ", "MiCS"])
def test_models_are_exported(zero: dict[str, Any], tmp_path: Any) -> None:
    from safetensors.torch import load_file

    run_ranks(4, export, str(tmp_path), zero)
    torch.manual_seed(0)
    (file,) = tmp_path.rglob("*.safetensors")
    found = load_file(file)
    for name, value in Net().state_dict().items():
        assert name == "out.weight" or torch.equal(found[name], value.to(found[name].dtype)), name

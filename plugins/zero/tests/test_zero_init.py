"""`ds_zero.Init`: models built in parts are, to the last bit, the models that plain construction
gives.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import Any

import ds_zero
import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import _len_torch_function_stack

from ds_core.errors import UsageError
from plugins.zero.tests.init_models import D, Everything, config, inputs, losses_of


def same_bits_with_init(stage: int, name: str, section: dict[str, Any]) -> None:
    """Weights after construction, losses and weights after training: the same bits with and without
    `Init`.
    """
    from ds_testing.truth import whole_weights

    import ds_core
    from ds_core import comm

    dtype = getattr(torch, name)
    torch.manual_seed(0)
    plain = Everything()
    start = {n: p.detach().clone().to(dtype) for n, p in plain.named_parameters()}
    engine, *_ = ds_core.initialize(model=plain, config=config(stage, name, **section))
    truth = losses_of(engine, dtype), whole_weights(engine)
    engine.destroy()

    torch.manual_seed(comm.rank())
    given = {k: v for k, v in section.items() if k == "offload_param"}
    with ds_zero.Init(config_dict_or_path=config(3, name, **given)):
        model = Everything()
    assert all(ds_zero.is_zero_param(p) and p.numel() == 0 for p in model.parameters())
    with ds_zero.GatheredParameters(model):
        for key, param in model.named_parameters():
            assert param.shape == start[key].shape, key
            assert torch.equal(param, start[key]), key
    assert [n for n, _ in model.named_parameters()] == list(start)
    engine, *_ = ds_core.initialize(model=model, config=config(stage, name, **section))
    losses = losses_of(engine, dtype)
    assert losses == truth[0]
    for key, value in whole_weights(engine).items():
        assert torch.equal(value, truth[1][key]), key
    engine.destroy()
    assert not any(ds_zero.is_zero_param(p) for p in model.parameters())
    assert model.head.weight is model.emb.weight


def built_on_disk(folder: str) -> list[int]:
    """Bytes of shards in memory after construction, and files on disk then and after the engine's
    end.
    """
    from pathlib import Path

    import ds_zero.init.sharded_param as sharded

    sharded.STORED = 16
    far = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    with ds_zero.Init(config_dict_or_path=config(3, "bfloat16", offload_param=far)):
        model = Everything()
    shards = [ds_zero.init.sharded_param.sharded_param_of(p).shard for p in model.parameters()]  # type: ignore[union-attr]
    found = [
        max(s.untyped_storage().nbytes() for s in shards if s is not None),
        len(list(Path(folder).rglob("*.bin"))),
    ]
    same_bits_with_init(3, "bfloat16", {"offload_param": far})
    return found


@pytest.mark.fast_cases("1")
@pytest.mark.parametrize("world", [1, 2])
def test_shards_rest_on_disk(world: int, tmp_path: Any) -> None:
    for largest, files in run_ranks(world, built_on_disk, str(tmp_path)):
        assert largest < 16
        assert files > 3


@pytest.mark.fast_cases("float32-1", "float32-2")
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_equals_plain_construction(world: int, name: str) -> None:
    run_ranks(world, same_bits_with_init, 3, name, {})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages_take_the_model_too(stage: int) -> None:
    run_ranks(2, same_bits_with_init, stage, "bfloat16", {})


# -- devices, dtypes, places -----------------------------------------------------------------------


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.own = nn.Parameter(torch.empty(D, D))
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor, step: int = 0) -> Any:
        return self.norm(self.lin(x) @ self.own)


def check_meta() -> None:
    import ds_core
    from ds_core import comm

    torch.manual_seed(0)
    plain = NoReset()
    torch.manual_seed(comm.rank())
    with ds_zero.Init(), torch.device("meta"):
        model = NoReset()
    own = model.own
    assert own is model.own and own.ds_shape == (D, D) and own.numel() == 0
    assert not any(b.is_meta for b in model.buffers())
    with pytest.raises(UsageError, match=r"own: built on the meta device.*load_state_dict"):
        ds_core.initialize(model=model, config=config())
    with ds_zero.GatheredParameters(model):
        # as reset_parameters of the plain one
        assert torch.equal(model.lin.weight, plain.lin.weight)
        assert bool(model.own.isnan().all())
    # As from_pretrained does: rank 0 alone has the values, one weight after the other.
    for name, param in model.named_parameters():
        with ds_zero.GatheredParameters(param, modifier_rank=0):
            if comm.rank() == 0:
                with torch.no_grad():
                    param.copy_(torch.full(param.shape, float(len(name))))
    engine, *_ = ds_core.initialize(model=model, config=config())
    with ds_zero.GatheredParameters(engine.module):
        assert all(bool((p == len(n)).all()) for n, p in model.named_parameters())
    engine.destroy()

    with ds_zero.Init(), torch.device("meta"):
        model = NoReset()
    values = {
        n: torch.randn_like(t) if t.is_floating_point() else t
        for n, t in plain.state_dict().items()
    }
    comm_values = {n: t.clone() for n, t in values.items()}
    for tensor in comm_values.values():
        comm.broadcast(tensor, src=0)
    model.load_state_dict(
        values if comm.rank() == 0 else {n: torch.zeros_like(t) for n, t in values.items()}
    )
    with ds_zero.GatheredParameters(model):
        assert all(torch.equal(p, comm_values[n]) for n, p in model.named_parameters())


def test_meta_device() -> None:
    run_ranks(2, check_meta)


def check_places() -> None:
    import torch.distributed as dist

    from ds_core import comm

    rank = comm.rank()
    existing = nn.Linear(D, D)
    nn.init.constant_(existing.weight, rank)
    ds_zero.Init(module=existing, dtype=torch.bfloat16)
    assert existing.weight.dtype == existing.weight.ds_tensor.dtype == torch.bfloat16
    assert existing.weight.ds_numel == D * D and existing.weight.ds_tensor.numel() == D * D // 2
    with ds_zero.GatheredParameters(existing):
        assert bool((existing.weight == 0).all())

    pairs = [dist.new_group([0]), dist.new_group([1])]
    with ds_zero.Init(data_parallel_group=pairs[rank], remote_device="cpu", pin_memory=True):
        alone = nn.Linear(D, D)
    assert alone.weight.ds_tensor.numel() == D * D

    class Mpu:
        def get_data_parallel_group(self) -> Any:
            return pairs[rank]

    with ds_zero.Init(mpu=Mpu()):
        alone = nn.Linear(D, D)
    assert alone.weight.ds_tensor.numel() == D * D
    with pytest.raises(
        UsageError, match=rf"rank {rank} is not in data_parallel_group, which has \[{1 - rank}\]"
    ):
        ds_zero.Init(data_parallel_group=pairs[1 - rank]).__enter__()


def test_places_and_dtypes() -> None:
    run_ranks(2, check_places)


def check_other_replicas() -> None:
    """Parameters that differ over an axis: parked over all ranks, partitioned over the ranks that
    share them.
    """
    from ds_testing.truth import whole_weights

    import ds_core
    from ds_core import comm

    fake = {
        "fake_axes": {"axes": {"ep": 2}},
        "plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]},
    }
    section = {**config(param_persistence_threshold=0), **fake}
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        with ds_zero.Init(enabled=enabled):
            model = nn.ModuleDict({"held_ep": nn.Linear(D, D), "shared": nn.Linear(D, D)})
        engine, *_ = ds_core.initialize(model=model, config=section)
        for step in range(2):
            x = inputs(step, comm.rank(), torch.float32)
            engine.backward(model["shared"](torch.tanh(model["held_ep"](x))).square().mean())
            engine.step()
        found.append(whole_weights(engine))
        engine.destroy()
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


def test_parameters_that_fewer_ranks_share_are_partitioned_anew() -> None:
    run_ranks(4, check_other_replicas)


# -- what it leaves behind, and misuse -------------------------------------------------------------


def test_nothing_is_left_behind() -> None:
    hooks = (
        torch_module._global_parameter_registration_hooks,
        torch_module._global_module_registration_hooks,
    )
    before = (
        [dict(h) for h in hooks],
        nn.Linear.__init__,
        nn.Module.apply,
        _len_torch_function_stack(),
    )
    with pytest.raises(ZeroDivisionError), ds_zero.Init():
        first = nn.Linear(D, D)
        broken = nn.Linear(D, D)
        raise ZeroDivisionError
    assert ds_zero.is_zero_param(first.weight)
    assert not ds_zero.is_zero_param(broken.weight)
    other: list[nn.Module] = []
    with ds_zero.Init():
        thread = threading.Thread(target=lambda: other.append(nn.Linear(D, D)))
        thread.start()
        thread.join()
        with ds_zero.Init(enabled=False):
            inner = nn.Linear(D, D)
        with ds_zero.Init(dtype=torch.bfloat16):
            nested = nn.Linear(D, D)
        outer = nn.Linear(D, D)
    assert not ds_zero.is_zero_param(other[0].weight)
    assert ds_zero.is_zero_param(inner.weight)
    assert (nested.weight.dtype, outer.weight.dtype) == (torch.bfloat16, torch.float32)
    assert before == (
        [dict(h) for h in hooks],
        nn.Linear.__init__,
        nn.Module.apply,
        _len_torch_function_stack(),
    )
    assert nn.Linear(D, D).weight.shape == (D, D)
    with ds_zero.Init(enabled=False):
        assert nn.Linear(D, D).weight.shape == (D, D)


class Within(nn.Module):
    """Begins the context inside a constructor: what is under construction is its own business."""

    def __init__(self) -> None:
        super().__init__()
        with ds_zero.Init():
            self.lin = nn.Linear(D, D)
            self.own = nn.Parameter(torch.ones(D))
            self.lazy = nn.LazyLinear(3)
        self.own.data.mul_(3.0)


def test_a_module_under_construction_stays_whole() -> None:
    model = Within()
    assert ds_zero.is_zero_param(model.lin.weight)
    assert torch.equal(model.own, torch.full((D,), 3.0))
    assert not ds_zero.is_zero_param(model.lazy.weight)


def test_weights_that_are_replaced_are_partitioned_too() -> None:
    """As loaders do that build on the meta device and then put one whole parameter after the other
    in its place.
    """
    with ds_zero.Init():
        model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
        for layer in model:
            for name, value in (("weight", torch.ones(D, D)), ("bias", torch.ones(D))):
                setattr(layer, name, nn.Parameter(value))
    assert all(ds_zero.is_zero_param(p) for p in model.parameters())
    with ds_zero.GatheredParameters(model):
        assert all(bool((p == 1).all()) for p in model.parameters())


def test_a_model_without_an_engine_says_so() -> None:
    with ds_zero.Init():
        model = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        assert model(torch.ones(2, D)).shape == (2, D)  # constructors may look at shapes
    with pytest.raises(
        UsageError, match=r"Linear: its weights were sharded by ds_zero.Init; give the model to"
    ):
        model(torch.ones(2, D))
    weight = model.state_dict()["0.weight"]
    assert (weight.shape, weight.dtype) == ((0,), torch.float32)
    with ds_zero.GatheredParameters(model):
        assert model.state_dict()["0.weight"].shape == (D, D)
        assert model(torch.ones(2, D)).shape == (2, D)
    model[0].weight.data = torch.ones(D, D)
    with pytest.raises(UsageError, match=r"was given data of shape \(6, 6\) while it is sharded"):
        ds_zero.GatheredParameters(model).__enter__()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.int8}, "dtype is torch.int8; use torch.float16"),
    (
        {"remote_device": "nvme"},
        "remote_device 'nvme' needs the folder; give config_dict_or_path= with",
    ),
    ({"remote_device": "gpu"}, "remote_device is 'gpu'; use 'cpu', 'nvme'"),
    ({"config": config(), "config_dict_or_path": config()}, "are both given; give one"),
    (
        {"config_dict_or_path": config(dtype="bfloat16"), "dtype": torch.float16},
        "trains in torch.bfloat16",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, ValueError), match=message):
        ds_zero.Init(**arguments)
    ds_zero.Init(enabled=False, **arguments)


def test_an_argument_without_effect_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ds_zero"):
        ds_zero.Init(
            mem_efficient_linear=False,
            zero_param_parallel_group=object(),
            zero_quantized_weights=True,
        )
    assert "mem_efficient_linear has no effect" in caplog.text
    assert "zero_param_parallel_group has no effect" in caplog.text
    assert "zero_quantized_* have no effect" in caplog.text


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_config_below_stage_3_partitions_nothing(stage: int) -> None:
    with ds_zero.Init(config_dict_or_path=config(stage)):
        assert not ds_zero.is_zero_param(nn.Linear(D, D).weight)


def test_the_package_loads_no_torch() -> None:
    code = (
        "import sys, ds_zero; assert set(ds_zero.__all__) <= set(dir(ds_zero)); assert 'torch' "
        "not "
        "in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    assert all(callable(getattr(ds_zero, name)) for name in ds_zero.__all__)


def test_what_the_trainer_fills_in_later_is_left_to_it() -> None:
    """As transformers gives it to Init before it knows how many steps there are."""
    schedule = {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"},
    }
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": schedule,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"},
    }
    with ds_zero.Init(config_dict_or_path=config):
        made = nn.Linear(3, 2)
    assert hasattr(made.weight, "ds_id")

"""Up to 4,096 ranks: shares by arithmetic over real layouts, and one process standing for one rank
of many.

In the fake runs everything is real (initialize, forward, backward, step) but for the numbers:
tensors are fake ones, which have sizes and no memory, and the process group is torch's fake one,
which sends nothing.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from ds_plan import PlannedRun
from ds_testing import Traffic
from ds_zero.buckets import make as make_module
from ds_zero.config import ZeroConfig
from ds_zero.planning.buckets import lay_out
from ds_zero.planning.predict import predict
from torch import Tensor, nn

from ds_core.precision import Precision, cast_module

BF16 = Precision(param=torch.bfloat16, master=torch.float32)


class Block(nn.Module):
    """The weights of a Llama block (gated, three projections, no biases) or of a GPT-2 block."""

    def __init__(self, d: int, hidden: int, llama: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d, bias=not llama)
        self.norm2 = nn.LayerNorm(d, bias=not llama)
        sizes = [d, d, d] if llama else [3 * d]
        self.into = nn.ModuleList(nn.Linear(d, size, bias=not llama) for size in sizes)
        self.out = nn.Linear(d, d, bias=not llama)
        self.up = nn.ModuleList(nn.Linear(d, hidden, bias=not llama) for _ in range(1 + llama))
        self.down = nn.Linear(hidden, d, bias=not llama)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.out(sum(part(y)[..., : x.shape[-1]] for part in self.into))
        y = self.norm2(x)
        out: Tensor = x + self.down(torch.tanh(sum(part(y) for part in self.up)))
        return out


class Model(nn.Module):
    def __init__(
        self, d: int, hidden: int, layers: int, words: int, positions: int, llama: bool
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, d)
        self.positions = nn.Embedding(positions, d) if positions else None
        self.blocks = nn.ModuleList(Block(d, hidden, llama) for _ in range(layers))
        self.norm = nn.LayerNorm(d, bias=not llama)
        self.head = nn.Linear(d, words, bias=False)
        if not llama:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        if self.positions is not None:
            x = x + self.positions(ids)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(self.norm(x)).float().mean()
        return loss

    def to(self, *args: Any, **kwargs: Any) -> Model:
        """Nothing: torch cannot move fake tensors, and they are where they should be."""
        return self


MODELS: dict[str, tuple[Any, ...]] = {
    "llama-7b": (4096, 11008, 32, 32000, 0, True),
    "gpt2-xl": (1600, 6400, 48, 50257, 1024, False),
}
PARAMS = {"llama-7b": 6_738_415_616, "gpt2-xl": 1_557_611_200}


def model_of(name: str) -> Model:
    with torch.device("meta"):
        model = Model(*MODELS[name])
    cast_module(model, BF16)
    return model


# -- all ranks, by arithmetic ----------------------------------------------------------------------


def per_rank(model: nn.Module, section: ZeroConfig, world: int) -> list[int]:
    """Bytes of weights, gradients, masters and Adam's states that each rank holds, except for whole
    weights.
    """
    sizes = [0] * world
    for bucket in lay_out(model, section, world).buckets:
        layout = bucket.layout
        fixed = layout.shard_numel * ((0 if bucket.replicated else 2) + 2 + 4)
        filled = sum(layout.sizes)
        for rank in range(world):
            sizes[rank] += fixed + 8 * min(
                max(filled - rank * layout.shard_numel, 0), layout.shard_numel
            )
    return sizes


@pytest.mark.fast_cases("gpt2-xl")
@pytest.mark.parametrize("name", MODELS)
def test_every_rank_of_4096_holds_its_share(name: str) -> None:
    model = model_of(name)
    world = 4096
    count = sum(p.numel() for p in model.parameters())
    assert count == PARAMS[name]
    for stage, each in ((1, 14), (2, 14), (3, 16)):
        held = per_rank(model, ZeroConfig(stage=stage, param_persistence_threshold=0), world)
        ideal = each * count / world
        assert len(held) == world
        assert max(held) <= 1.005 * ideal, (stage, max(held) / ideal)
        assert sum(held) >= each * count  # nothing was left out
    for rank in (0, 1, 2047, 4095):
        need = predict(
            model,
            ZeroConfig(stage=3, param_persistence_threshold=0),
            PlannedRun(world, BF16),
            rank=rank,
        )
        assert need.device.resting == held[rank]


@pytest.mark.parametrize(("name", "ratio"), [("llama-7b", 1.0205), ("gpt2-xl", 1.3314)])
def test_what_small_weights_that_stay_whole_cost(name: str, ratio: float) -> None:
    """With the default persistence threshold every rank has those; the README says how much that
    is.
    """
    model = model_of(name)
    world = 4096
    need = predict(model, ZeroConfig(stage=3), PlannedRun(world, BF16))
    assert need.device.resting / (16 * PARAMS[name] / world) == pytest.approx(ratio, abs=1e-4)
    small = sum(p.numel() for p in model.parameters() if p.numel() < 100_000)
    whole = sum(
        2 * b.layout.total
        for b in lay_out(model, ZeroConfig(stage=3), world).buckets
        if b.replicated
    )
    assert 2 * small <= whole <= 2 * small + 2 * 2 * world


# -- single ranks, for real ------------------------------------------------------------------------


def storages(tensors: Any) -> dict[int, int]:
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return found


@contextlib.contextmanager
def one_of(world: int, rank: int) -> Iterator[None]:
    """This process as rank `rank` of `world`, whose others say what this one says."""
    import torch.distributed as dist
    from ds_zero.reduce.reducer import Reducer
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ds_core import comm
    from ds_core.comm import agreement

    def same(value: Any, group: Any = None) -> list[Any]:
        return [value] * world

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with (
            mock.patch.object(comm, "all_gather_json", same, create=True),
            mock.patch.object(agreement, "all_gather_json", same),
            # the machines that are simulated have memory of their own
            mock.patch.object(make_module, "HOST_BYTES", 1 << 40),
            # it reads values, which fake tensors have none of
            mock.patch.object(Reducer, "_agree", return_value=[]),
            warnings.catch_warnings(),
            FakeTensorMode(),
        ):
            warnings.simplefilter("ignore")  # fake tensors have addresses that mean nothing
            yield
    finally:
        dist.destroy_process_group()


def pretend(name: str, stage: int, world: int, rank: int) -> dict[str, int]:
    """Two steps as one rank of many; the bytes held and sent."""
    import ds_core
    from ds_core import comm

    gc.collect()
    gc.freeze()
    with one_of(world, rank):
        engine, *_ = ds_core.initialize(
            model=Model(*MODELS[name]),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                # fake tensors have no memory
                "plugins": {"disable": ["dscore-optimizers", "dscore-ops-cpu"]},
                "zero_optimization": {"stage": stage},
            },
        )
        engine._weight_update.norm = lambda *_: 1.0  # a number is read from a tensor
        sent = 0
        found: dict[str, int] = {}
        comm.add_interceptor(traffic := Traffic())
        for _ in range(2):
            traffic.sent.clear()
            engine.backward(engine(torch.zeros(1, dtype=torch.int64)))
            found = held(engine)
            engine.step()
            sent = sum(row.bytes // world * (world - 1) for row in traffic.sent)
        if stage == 3:
            found["gathered"] = 2 * engine.partitioner.gathering.peak
        engine.partitioner.detach()
        comm.remove_interceptor(traffic)
    gc.unfreeze()
    return found | {"sent": sent}


def held(engine: Any) -> dict[str, int]:
    gc.collect()
    params = list(engine.module.parameters())
    weights = storages(
        [p.data for p in params] + [p.ds_tensor for p in params if hasattr(p, "ds_tensor")]
    )
    masters = storages(p.data for g in engine.optimizer.param_groups for p in g["params"])
    states = [
        v for s in engine.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)
    ]
    known = {*weights, *masters, *storages(states)}
    everything = storages(t for t in gc.get_objects() if issubclass(type(t), Tensor))
    return {
        "parameters": sum(weights.values()),
        "masters": sum(masters.values()),
        "states": sum(t.numel() * t.element_size() for t in states if t.dim()),
        "gradients": sum(size for key, size in everything.items() if key not in known),
    }


CASES = [
    ("llama-7b", 2, 512, 511),
    pytest.param("gpt2-xl", 3, 4096, 2047, marks=pytest.mark.slow),
    pytest.param("llama-7b", 1, 4096, 4095, marks=pytest.mark.slow),
    pytest.param("llama-7b", 3, 4096, 0, marks=pytest.mark.slow),
    pytest.param("llama-7b", 3, 4096, 4095, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.usefixtures("clean_ds")  # a group that another test of this process has left
@pytest.mark.parametrize(("name", "stage", "world", "rank"), CASES)
def test_one_process_as_one_rank_of_many(name: str, stage: int, world: int, rank: int) -> None:
    found = pretend(name, stage, world, rank)
    need = predict(model_of(name), ZeroConfig(stage=stage), PlannedRun(world, BF16), rank=rank)
    kinds = {k: getattr(need.device, k) for k in found if k != "sent"}
    assert found == kinds | {"sent": need.sent}

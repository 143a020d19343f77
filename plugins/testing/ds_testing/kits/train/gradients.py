"""`GradientsConformance`: does a plugin change gradients alike on all ranks, however they are
reduced and sharded?

Subclass it, set `config` to what switches your plugin on (and `load` to its declaration module when
it is not installed). The kit trains small models with it on one rank, and compares: data-parallel
ranks with accumulation on one, each of `partitioners`, and loss scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from ds_testing.pool import run_ranks


class GradientsConformance:
    """Subclass me; see the module's docstring.

    partitioners: by name, what is added to the config to shard gradients in another way.
    tolerance: of the largest relative difference of a weight, in fp64.
    """

    config: ClassVar[Mapping[str, Any]] = {}
    load: ClassVar[tuple[str, ...]] = ()
    partitioners: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    tolerance: ClassVar[float] = 1e-9
    timeout: ClassVar[float] = 300.0

    def _weights(self, world: int, gas: int, **extra: Any) -> list[Any]:
        config = {**self.config, **extra}
        return run_ranks(world, _train, gas, config, list(self.load), timeout=self.timeout)

    def test_it_changes_what_is_trained(self) -> None:
        """Weights with the plugin are not those without it."""
        (without,) = run_ranks(1, _train, 2, {}, [], timeout=self.timeout)
        changed = _difference(self._weights(1, 2)[0], without) > self.tolerance
        assert changed, (
            f"weights are those without it; does `config` switch it on? It is {dict(self.config)}"
        )

    @pytest.mark.parametrize("gas", [1, 2])
    def test_ranks_are_as_one(self, gas: int) -> None:
        """On two ranks weights are the same, and those of one rank with twice the accumulation
        steps.
        """
        (truth,) = self._weights(1, 2 * gas)
        ranks = self._weights(2, gas)
        assert _difference(ranks[0], ranks[1]) == 0, "the ranks have different weights"
        off = _difference(ranks[0], truth)
        assert off <= self.tolerance, (
            f"two ranks are off by {off:.2g} from one: change shards in the same way on every rank"
        )

    def test_every_partitioner_gives_the_same(self) -> None:
        """Weights do not depend on how gradients are sharded."""
        (truth,) = self._weights(1, 2)
        for name, extra in self.partitioners.items():
            for rank, weights in enumerate(self._weights(2, 1, **extra)):
                assert _difference(weights, truth) <= self.tolerance, f"{name}, rank {rank}"

    def test_the_factor_is_honoured(self) -> None:
        """A plain ``loss.backward()``, whose gradients the step divides by the accumulation steps,
        gives the same.
        """
        (truth,) = self._weights(1, 4)
        (plain,) = run_ranks(
            1, _train, 4, dict(self.config), list(self.load), True, timeout=self.timeout
        )
        assert _difference(plain, truth) <= self.tolerance, (
            "a gradient is its tensor times gradients.factor"
        )

    def test_the_loss_scale_does_not_matter(self) -> None:
        """Under fp16, weights do not depend on the loss scale, up to fp16's rounding."""
        found = [
            self._weights(1, 1, fp16={"enabled": True, "loss_scale": scale})[0]
            for scale in (8, 512)
        ]
        off = _difference(*found)
        assert off <= 1e-2, (
            f"weights depend on the loss scale ({off:.2g}): a gradient is its tensor times "
            "gradients.factor"
        )


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    from ds_testing.truth import relative

    assert list(one) == list(other)
    return max(relative(one[name], other[name]) for name in one)


def _train(gas: int, extra: dict[str, Any], load: list[str], plain: bool = False) -> dict[str, Any]:
    """Three steps of `gas` micro-batches on each rank; returns unsharded weights, in fp64.

    plain: ``backward()``.
    """
    import ds_core
    from ds_core import comm
    from ds_testing.kits.train.partitioner import with_plugins
    from ds_testing.models import Case, build_model, micro_batch
    from ds_testing.truth import whole_weights

    case = Case(
        gas=gas, clip=0.5, optimizer="SGD", dtype="float32" if "fp16" in extra else "float64"
    )
    world = comm.world_size()
    engine, *_ = ds_core.initialize(
        model=build_model(case), config=with_plugins(case.config(world), extra, load)
    )
    dtype = next(p.dtype for p in engine.module.parameters())
    for step in range(3):
        for micro in range(gas):
            batch = micro_batch(case, step, 0, micro * world + comm.rank())
            loss = engine(batch["x"].to(dtype), batch["y"])
            loss.backward() if plain else engine.backward(loss)
            engine.step()
    assert engine.skipped_steps == 0
    weights = whole_weights(engine)
    engine.destroy()
    return weights

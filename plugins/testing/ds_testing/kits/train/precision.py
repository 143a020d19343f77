"""`PrecisionConformance`: is a precision mode one that every part of ds_core can train in?

Subclass it and set `config` (and `load`) to what selects your mode. All cases of a world size are
one call of its worker pool. Checkpoints are saved and loaded, so a checkpointer must be installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ds_testing.pool import reference, run_ranks

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ds_core import Engine

MICRO = 4


def _default_model() -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1)
    )


class PrecisionConformance:
    """Subclass me; see the module's docstring."""

    config: ClassVar[Mapping[str, Any]] = {}
    """Added to the config of the engine."""
    load: ClassVar[tuple[str, ...]] = ()
    """Its ``plugins.load``."""
    make_model = staticmethod(_default_model)
    """``() -> module`` that maps 8 inputs to 1 output per sample, given as ``staticmethod``."""
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"": {}}
    """By name, what is added to the config, such as stages of ZeRO."""
    gas: ClassVar[tuple[int, ...]] = (1, 2)
    """Micro-batches per step."""
    worlds: ClassVar[tuple[int, ...]] = (1, 2)
    """World sizes."""
    tolerance: ClassVar[float] = 1e-4
    """How far, relatively, losses may be from those of one process: formats with few bits turn a
    rounding in a sum into another value.
    """

    def _run(self, world: int, function: Any, *arguments: Any) -> list[Any]:
        make = type(self).make_model
        return run_ranks(
            world, function, [reference(make), dict(self.config), list(self.load)], *arguments
        )

    def test_it_is_selected_and_keeps_parameters(self) -> None:
        """The config selects it, its description is the same every time, and converting keeps names
        and shapes.
        """
        (found,) = self._run(1, _describe)
        assert found["plugin"], "the config selects no mode of a plugin"
        assert found["text"][0] == found["text"][1], (
            "the description differs from one initialize to the next"
        )
        assert found["lost"] == [], (
            "parameters that are missing, or have another shape, in the converted model"
        )
        assert found["state"] == [], (
            "names of the plain model's state dict that are missing in the converted model's"
        )

    def test_it_trains_alike_everywhere(self) -> None:
        """Losses fall, and are those of one process at every world size, accumulation and
        variant."""
        cases = [
            [variant, gas] for variant, gas in itertools.product(self.variants.values(), self.gas)
        ]
        ((truth, *_),) = self._run(1, _train, [[{}, 1]], max(self.worlds) * max(self.gas))
        assert all(x == x and abs(x) != float("inf") for x in truth), truth
        assert truth[-1] < 0.8 * truth[0], f"nothing is learnt: {truth}"
        for world in self.worlds:
            for rank, rows in enumerate(
                self._run(world, _train, cases, max(self.worlds) * max(self.gas))
            ):
                for case, losses in zip(cases, rows, strict=True):
                    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, truth, strict=True))
                    assert worst <= self.tolerance, (
                        f"world {world}, rank {rank}, {case}: losses off by {worst:.3g}"
                    )

    def test_resume_is_bit_identical(self, tmp_path: Path) -> None:
        """Two steps, a checkpoint, two steps: the same losses and weights with a new engine in
        between.
        """
        for world, (name, variant) in itertools.product(self.worlds, self.variants.items()):
            folder = str(tmp_path / f"{world} {name}")
            for rank, (same_losses, same_weights) in enumerate(
                self._run(world, _resume, dict(variant), folder)
            ):
                where = f"world {world}, rank {rank}, {name or 'plain'}"
                assert same_losses, f"{where}: losses differ after resuming"
                assert same_weights, f"{where}: weights differ after resuming"

    def test_an_overflow_is_skipped(self) -> None:
        """If it scales losses: a step with inf gradients on one rank changes no weight, and the
        scaler notices.
        """
        world = max(self.worlds)
        for skipped, unchanged, restored in self._run(world, _overflow):
            assert skipped == unchanged == restored is True


def _engine(what: list[Any], extra: Mapping[str, Any], gas: int, total: int) -> Engine:
    import ds_core
    from ds_testing.kits.train.partitioner import with_plugins
    from ds_testing.worker import find_function

    make, config, load = what
    base = {
        "train_batch_size": total * MICRO,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "Adam", "params": {"lr": 0.02}},
    }
    engine, *_ = ds_core.initialize(
        model=find_function(make)(), config=with_plugins(base, {**config, **extra}, load)
    )
    return engine


def _batch(total: int) -> tuple[Tensor, Tensor]:
    """One fixed batch, all that a step sees over ranks and micro-batches."""
    import torch

    x = torch.randn(total * MICRO, 8, generator=torch.Generator().manual_seed(1))
    return x, x.square().mean(1, keepdim=True)


def _step(engine: Engine, total: int) -> float:
    """One optimizer step over `_batch`; the mean loss over ranks."""
    import torch

    from ds_testing.truth import train

    parts = engine.ctx.mesh.size("dp") * engine.ctx.batch.gas
    x, y = (t.chunk(parts) for t in _batch(total))
    dtype = next(engine.module.parameters()).dtype

    def loss(model: Any, number: int) -> Tensor:
        return torch.nn.functional.mse_loss(model(x[number].to(dtype)).float(), y[number])

    return train(engine, lambda _, number: number, 1, loss=loss)[0]


def _describe(what: list[Any]) -> dict[str, Any]:
    from ds_testing.worker import find_function

    plain = find_function(what[0])()
    first = _engine(what, {}, 1, 1)
    engine = _engine(what, {}, 1, 1)
    made = {n: p.shape for n, p in engine.module.named_parameters()}
    found = {
        "plugin": str(engine.ctx.precision.plugin or ""),
        "text": [str(e.ctx.precision) for e in (first, engine)],
        "lost": [n for n, p in plain.named_parameters() if made.get(n) != p.shape],
        "state": sorted({*plain.state_dict()} - {*engine.module.state_dict()}),
    }
    first.destroy()
    engine.destroy()
    return found


def _train(what: list[Any], cases: list[Any], total: int) -> list[list[float]]:
    rows = []
    for variant, gas in cases:
        engine = _engine(what, variant, gas, total)
        rows.append([_step(engine, total) for _ in range(8)])
        engine.destroy()
    return rows


def _resume(what: list[Any], variant: dict[str, Any], folder: str) -> list[bool]:
    import torch

    from ds_testing.truth import whole_weights

    total = 4
    runs = []
    for resumed in (False, True):
        engine = _engine(what, variant, 2, total)
        if resumed:
            engine.load_checkpoint(folder)
        else:
            _step(engine, total), _step(engine, total)
            engine.save_checkpoint(folder)
        runs.append(([_step(engine, total) for _ in range(2)], whole_weights(engine)))
        engine.destroy()
    (losses, weights), (again, others) = runs
    return [losses == again, all(torch.equal(weights[n], others[n]) for n in weights)]


def _overflow(what: list[Any]) -> list[bool]:
    import torch

    from ds_testing.truth import whole_weights

    engine = _engine(what, {}, 1, 4)
    if engine.scaler is None:
        engine.destroy()
        return [True, True, True]
    _step(engine, 4)
    before = whole_weights(engine)
    dtype = next(engine.module.parameters()).dtype
    factor = float("inf") if engine.ctx.rank == 0 else 1.0
    engine.backward(engine(torch.ones(1, 8, dtype=dtype)).float().sum() * factor)
    engine.step()
    after = whole_weights(engine)
    state = engine.scaler.state_dict()
    other = _engine(what, {}, 1, 4)
    assert other.scaler is not None
    other.scaler.load_state_dict(state)
    answer = [
        engine.skipped_steps == 1 and not engine.was_step_applied(),
        all(torch.equal(before[n], after[n]) for n in before),
        other.scaler.state_dict() == state,
    ]
    engine.destroy()
    other.destroy()
    return answer

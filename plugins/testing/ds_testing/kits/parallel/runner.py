"""`RunnerConformance`: does a runner train exactly as the core's own does?

Subclass it, set `config` (and `load`) to what switches your runner on and give `make_model` and
`make_batch`. The kit checks `train_batch` and `eval_batch` against one process of plain torch:
losses, weights, accumulation, an iterator that ends early, evaluation that changes nothing, and
(for runners that cannot be stepped) the errors. All of a world size's cases are one call of its
worker pool, so that hundreds take seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from ds_testing.pool import reference, run_ranks

if TYPE_CHECKING:
    from torch import nn

    from ds_core.mesh import Mesh

WIDTH = 6
MICRO = 2
SGD: dict[str, Any] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
TOLERANCE = {"float64": 1e-12, "float32": 1e-6}


def default_model() -> nn.Module:
    """The kit's small model."""
    from ds_testing.models import Case, build_model

    return build_model(Case())


def default_batch(step: int, micro: int, index: int) -> Any:
    """What replica `index` gets in this micro-batch."""
    from ds_testing.models import Case, micro_batch

    return micro_batch(Case(), step, micro, index)


class RunnerConformance:
    """Subclass me; see the module's docstring.

    `cases` chooses from the product of `variants`, `gas` and `dtypes`.
    """

    config: ClassVar[Mapping[str, Any]] = {}
    load: ClassVar[tuple[str, ...]] = ()
    worlds: ClassVar[tuple[int, ...]] = (1, 2)
    """World sizes, of which the smallest is used where one is enough."""
    make_model = staticmethod(default_model)
    """``() -> module`` whose output holds a scalar loss, in fp64; a module-level function, given as
    ``staticmethod``.
    """
    make_batch = staticmethod(default_batch)
    """``(step, micro, dp index) -> batch`` as the module accepts it, given likewise."""
    make_truth: ClassVar[Any] = None
    """As `make_model`, one plain module with the same parameter names, where the model is not one
    itself.
    """
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"": {}}
    """By name, what is added to the config."""
    gas: ClassVar[tuple[int, ...]] = (1, 3)
    """Micro-batches per batch."""
    dtypes: ClassVar[tuple[str, ...]] = ("float64",)
    """"float64" (to 1e-12) and "float32" (to 1e-6)."""
    timeout: ClassVar[float] = 300.0

    @classmethod
    def cases(cls, world: int) -> list[tuple[str, int, str]]:
        """(variant, gas, dtype) of the cases that `world` ranks train; all by default."""
        return list(itertools.product(cls.variants, cls.gas, cls.dtypes))

    def _run(self, world: int, function: Any, *arguments: Any) -> list[Any]:
        model = type(self).make_model
        batch = type(self).make_batch
        truth = type(self).make_truth
        names = [reference(f) for f in (model, batch, truth or model)]
        return run_ranks(
            world,
            function,
            names,
            dict(self.config),
            list(self.load),
            *arguments,
            timeout=self.timeout,
        )

    def test_train_batch_is_plain_torch(self) -> None:
        """Losses and weights of three steps, at every world size."""
        for world in self.worlds:
            cases = [
                [name, dict(self.variants[name]), gas, dtype]
                for name, gas, dtype in self.cases(world)
            ]
            for rank, rows in enumerate(self._run(world, _train_all, cases)):
                for (name, gas, dtype), (loss, weight) in zip(self.cases(world), rows, strict=True):
                    where = (
                        f"world {world}, rank {rank}, {name or 'plain'}, {gas} micro-batches, "
                        f"{dtype}"
                    )
                    assert loss <= TOLERANCE[dtype], f"{where}: losses off by {loss:.3g}"
                    assert weight <= TOLERANCE[dtype], f"{where}: weights off by {weight:.3g}"

    def test_an_iterator_that_ends_early_changes_nothing(self) -> None:
        """StopIteration comes through, and no weight and no counter has changed."""
        for world in self.worlds:
            same = self._run(world, _short)
            assert all(same), (
                f"world {world}: StopIteration did not come through, or a weight or counter "
                f"changed: {same}"
            )

    def test_evaluation_changes_nothing(self) -> None:
        """eval_batch gives the plain loss, keeps weights, gradients and the training mode."""
        for world in self.worlds:
            for error, unchanged, training in self._run(world, _evaluate):
                assert error <= 1e-12, (
                    f"world {world}: eval_batch's loss is off by {error:.3g} from plain torch"
                )
                assert unchanged, f"world {world}: eval_batch changed weights or gradients"
                assert training, f"world {world}: eval_batch left the module in eval mode"

    def test_manual_driving_works_or_says_why_not(self) -> None:
        """forward / backward / step either work or raise a UsageError with the runner's reason."""
        world = min(self.worlds)
        works = self._run(world, _manual)
        assert all(works), (
            f"driven by hand it neither trains nor raises UsageError with manual_reason: {works}"
        )


def data_place(mesh: Mesh) -> tuple[int, int]:
    """How many ranks have samples of their own, and which of them this is."""
    axis = "batch" if mesh.has("batch") else "dp"
    return mesh.size(axis), mesh.index(axis)


def _parts(names: list[Any]) -> tuple[Any, Any, Any]:
    from ds_testing.worker import find_function

    return find_function(names[0]), find_function(names[1]), find_function(names[2])


def _engine(
    names: list[Any], extra: dict[str, Any], load: list[str], gas: int, dtype: str = "float64"
) -> Any:
    import torch

    import ds_core
    from ds_testing.kits.train.partitioner import with_plugins

    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.7,
        "optimizer": SGD,
    }
    model = _parts(names)[0]().to(getattr(torch, dtype))
    engine, *_ = ds_core.initialize(model=model, config=with_plugins(config, extra, load))
    return engine


def _train_all(
    names: list[Any], extra: dict[str, Any], load: list[str], cases: list[Any]
) -> list[list[float]]:
    return [
        _train(names, {**extra, **variant}, load, gas, dtype) for _, variant, gas, dtype in cases
    ]


def _train(
    names: list[Any], extra: dict[str, Any], load: list[str], gas: int, dtype: str
) -> list[float]:
    import torch

    from ds_core.engine import call_with_batch, loss_of
    from ds_core.precision import cast_floats
    from ds_testing.truth import plain, relative, whole_weights

    _, make_batch, make_truth = _parts(names)
    engine = _engine(names, extra, load, gas, dtype)
    dp, index = data_place(engine.ctx.mesh)
    kind = getattr(torch, dtype)
    truth = make_truth().to(kind)
    wanted = plain(
        truth,
        lambda step, number: cast_floats(make_batch(step, number // dp, number % dp), kind),
        3,
        count=gas * dp,
        clip=0.7,
        optimizer=SGD,
        loss=lambda model, batch: loss_of(call_with_batch(model, batch)),
    )
    worst = 0.0
    for step, theirs in enumerate(wanted):
        micros = [cast_floats(make_batch(step, m, index), kind) for m in range(gas)]
        ours = engine.train_batch(iter(micros)).item()
        worst = max(worst, abs(ours - theirs) / max(abs(theirs), 1e-3))
    mine = whole_weights(engine)
    weights = {n: p.detach() for n, p in truth.named_parameters() if n in mine}
    assert weights, f"no parameter has a name of the plain model's: {sorted(mine)}"
    answer = [worst, max(relative(mine[n], w) for n, w in weights.items())]
    engine.destroy()
    return answer


def _short(names: list[Any], extra: dict[str, Any], load: list[str]) -> bool:
    import torch

    from ds_testing.truth import whole_weights

    _, make_batch, _ = _parts(names)
    engine = _engine(names, extra, load, 3)
    before = whole_weights(engine)
    with pytest.raises(StopIteration):
        engine.train_batch(iter([make_batch(0, 0, 0)]))
    same = all(
        torch.equal(a, b)
        for a, b in zip(before.values(), whole_weights(engine).values(), strict=True)
    )
    answer = same and engine.global_steps == 0 and engine.micro_steps == 0
    engine.destroy()
    return answer


def _evaluate(names: list[Any], extra: dict[str, Any], load: list[str]) -> list[Any]:
    import torch

    from ds_core.engine import call_with_batch, loss_of
    from ds_testing.truth import whole_weights

    _, make_batch, make_truth = _parts(names)
    engine = _engine(names, extra, load, 2)
    dp, index = data_place(engine.ctx.mesh)
    before = whole_weights(engine)
    ours = engine.eval_batch(iter([make_batch(0, m, index) for m in range(2)])).item()
    truth = make_truth().eval()
    with torch.no_grad():
        losses = [
            loss_of(call_with_batch(truth, make_batch(0, m, i))).item()
            for m in range(2)
            for i in range(dp)
        ]
    theirs = sum(losses) / len(losses)
    same = all(
        torch.equal(a, b)
        for a, b in zip(before.values(), whole_weights(engine).values(), strict=True)
    )
    answer = [abs(ours - theirs) / max(abs(theirs), 1e-3), same, engine.module.training]
    engine.destroy()
    return answer


def _manual(names: list[Any], extra: dict[str, Any], load: list[str]) -> bool:
    from ds_core.engine import call_with_batch, loss_of
    from ds_core.errors import UsageError

    engine = _engine(names, extra, load, 1)
    batch = _parts(names)[1](0, 0, 0)
    if engine.runner.manual:
        engine.backward(loss_of(call_with_batch(engine, batch)))
        engine.step()
        answer = bool(engine.global_steps == 1)
    else:
        assert engine.runner.manual_reason, (
            "manual is False, so manual_reason must say what to call instead"
        )
        with pytest.raises(UsageError, match="explicitly"):
            call_with_batch(engine, batch)
        with pytest.raises(UsageError, match="explicitly"):
            engine.step()
        answer = True
    engine.destroy()
    return answer

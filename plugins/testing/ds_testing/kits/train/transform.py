"""The conformance kit for transforms, the model -> model steps that a plugin returns from
`ds_transforms`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ds_testing.kits.parallel.given_back import Structure, check_ordinary
from ds_testing.one_process import one_process_engine

_RATE = 0.1
_TRAINS: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": _RATE}},
}


class TransformConformance:
    """Tests of a transform: inherit, and set `plugin` and `config`.

    Give `make_model` and `make_batch` if the default ones do not fit.
    """

    plugin: str = ""
    """Reference of the declaration module."""
    config: ClassVar[Mapping[str, Any]] = {}
    """What is added to the config so that it takes part."""
    load: ClassVar[tuple[str, ...]] = ()
    """Modules for ``plugins.load``, where the plugin is not installed."""
    same_outputs: ClassVar[bool] = True
    """Whether the transformed model computes what the given one does (to `tolerance`), gradients
    too.
    """
    same_names: ClassVar[bool] = True
    """Whether parameters keep their names."""
    given_back: ClassVar[bool] = True
    """Whether the given model is as it was once the engine is destroyed; false where something else
    ends it.
    """
    tolerance: ClassVar[float] = 1e-6

    def make_model(self) -> nn.Module:
        """A model to transform; the same whenever torch's seed is the same."""
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def make_batch(self) -> Any:
        """What the model is called with."""
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

    def loss(self, output: Any) -> Tensor:
        """A scalar of what the model returns."""
        value: Tensor = (output[0] if isinstance(output, tuple) else output).square().mean()
        return value

    def model(self) -> nn.Module:
        """`make_model` with a fixed seed."""
        with _seeded():
            return self.make_model()

    def run(self, check: Callable[[Any, list[Any]], None], model: nn.Module | None = None) -> None:
        """`check` an engine of one process over `model`, and the transforms that the plugin gives
        for it.
        """
        config = {**_TRAINS, "plugins": {"load": list(self.load)}, **self.config}
        with one_process_engine(self.model() if model is None else model, config) as engine:
            answers = engine.ctx.plugins.ask("ds_transforms", ctx=engine.ctx)
            check(engine, [t for a in answers if a.plugin.module == self.plugin for t in a.value])

    def test_it_takes_part(self) -> None:
        """With `config`, the plugin gives at least one transform, and the model trains."""

        def check(engine: Any, transforms: list[Any]) -> None:
            assert transforms, f"{self.plugin} gives no transform with config {dict(self.config)}"
            before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
            engine.backward(self.loss(engine(self.make_batch())))
            engine.step()
            changed = [
                n for n, p in engine.module.named_parameters() if not torch.equal(p, before[n])
            ]
            assert changed, "a step of the transformed model changed no parameter"

        self.run(check)

    def test_parameters_stay_what_they_are(self) -> None:
        """The transformed model has the given one's names, shapes, frozen parameters and training
        mode.
        """
        given = self.model()
        first = next(given.parameters())
        first.requires_grad_(False)
        wanted = {n: (tuple(p.shape), p.requires_grad) for n, p in given.named_parameters()}

        def check(engine: Any, transforms: list[Any]) -> None:
            assert engine.module.training, "the transformed model is in eval mode"
            got = {
                n: (tuple(p.shape), p.requires_grad) for n, p in engine.module.named_parameters()
            }
            if self.same_names:
                assert got == wanted, f"parameters are {got}, they were {wanted}"
            else:
                frozen = [n for n, (_, trains) in got.items() if not trains]
                assert frozen, (
                    "the given model has a frozen parameter, the transformed one has none"
                )

        self.run(check, given)

    def test_it_calculates_the_same(self) -> None:
        """Output and gradients are those of the given model; not checked where `same_outputs` is
        false.
        """
        if not self.same_outputs:
            return
        plain = self.model()
        batch = self.make_batch()
        with _seeded():
            loss = self.loss(plain(copy.deepcopy(batch)))
            loss.backward()
        wanted = {n: p.grad for n, p in plain.named_parameters()}

        def check(engine: Any, transforms: list[Any]) -> None:
            with _seeded():
                mine = self.loss(engine(batch))
                mine.backward()
            torch.testing.assert_close(
                mine, loss, rtol=self.tolerance, atol=self.tolerance, msg=lambda m: f"loss: {m}"
            )
            got = {n: p.grad for n, p in engine.module.named_parameters()}
            pairs = ((n, got[n], wanted[n]) for n in wanted) if self.same_names else ()
            for name, a, b in pairs:
                assert (a is None) == (b is None), (
                    f"{name}: only one of the models gives a gradient"
                )
                if a is not None and b is not None:
                    off = float((a - b).abs().max())
                    assert off <= self.tolerance * (1 + float(b.abs().max())), (
                        f"the gradient of {name} is off by {off}"
                    )

        self.run(check)

    def test_it_is_given_back(self) -> None:
        """After `destroy` the given model is an ordinary one, which trains with the transform and
        without.
        """
        if not self.given_back:
            return
        given = self.model()
        before = Structure(given)

        def train(engine: Any, transforms: list[Any]) -> None:
            engine.backward(self.loss(engine(self.make_batch())))
            engine.step()
            copy.deepcopy(engine.module)  # as averages of weights and reference models are made

        self.run(train, given)
        plain = self.model()
        check_ordinary(given, before, plain, self._calculated)
        with _seeded():
            self.loss(plain(self.make_batch())).backward()
        torch.optim.SGD(plain.parameters(), lr=_RATE).step()
        with one_process_engine(given, _TRAINS) as engine, _seeded():
            engine.backward(self.loss(engine(self.make_batch())))
            engine.step()
        for name, param in given.named_parameters():
            off = float((param - plain.get_parameter(name)).detach().abs().max())
            assert off <= 1e-5, (
                f"without the transform, a model that had it trains otherwise: {name} is off by "
                f"{off}"
            )
        self.run(train, given)
        check_ordinary(given, before, self.model(), self._calculated)

    def _calculated(self, model: nn.Module) -> list[Tensor]:
        """The loss and the gradients of a model."""
        model.zero_grad()
        with _seeded():
            loss = self.loss(model(self.make_batch()))
            loss.backward()
        found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        return found

    def test_equal_models_become_equal(self) -> None:
        """Transforming is the same on every rank: nothing depends on chance, order of sets or the
        time.
        """
        states: list[dict[str, Tensor]] = []

        def check(engine: Any, transforms: list[Any]) -> None:
            # a transform that draws numbers shall not get the same ones by accident
            torch.manual_seed(len(states))
            states.append({n: t.detach().clone() for n, t in engine.module.state_dict().items()})

        for _ in range(2):
            self.run(check)
        assert list(states[0]) == list(states[1]), (
            "the names of states, or their order, differ between two runs"
        )
        for name, value in states[0].items():
            assert torch.equal(value, states[1][name]), f"{name} differs between two runs"


@contextmanager
def _seeded() -> Iterator[None]:
    """Random numbers (dropout, noise of a gate) are the same each time, and those of the test are
    left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield

"""The conformance kit of passes over the graphs of torch.compile: `ds_compile_passes`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ds_core.entries import resolve
from ds_testing.one_process import one_process_engine


class CompilePassConformance:
    """Tests of compile passes: inherit, and set `plugin`.

    Give `make_model` and `make_batch` if your passes look for something in a model.
    """

    plugin: str = ""
    """Reference of the declaration module."""
    config: ClassVar[Mapping[str, Any]] = {}
    """What is added to the config."""
    load: ClassVar[tuple[str, ...]] = ()
    """``plugins.load``, for a plugin that is not installed."""
    tolerance: ClassVar[float] = 1e-6
    """How far losses and gradients may be from those without the pass."""

    def make_model(self) -> nn.Module:
        """A model in eval mode, or without randomness; the same whenever torch's seed is the
        same."""
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))

    def make_batch(self) -> Any:
        """What the model is called with."""
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

    def loss(self, output: Any) -> Tensor:
        """A scalar of what the model returns."""
        value: Tensor = (output[0] if isinstance(output, tuple) else output).square().mean()
        return value

    def offered(self) -> Mapping[str, str]:
        """Name -> reference."""
        found: Mapping[str, str] = resolve(self.plugin).ds_compile_passes()
        return found

    def made(self, check: Callable[[str, Any, Any], None]) -> None:
        """`check` a name, the pass (or None) that its function makes in a run of one process, and
        the engine.
        """
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 3,
            "plugins": {"load": list(self.load)},
            **self.config,
        }
        config.setdefault("optimizer", {"type": "SGD", "params": {"lr": 0.1}})
        with one_process_engine(self.make_model(), config) as engine:
            for name, reference in self.offered().items():
                check(name, resolve(reference)(engine.ctx), engine)

    def test_functions_make_passes(self) -> None:
        """Each reference is a function of the context, which gives a function ``(graph, inputs)``,
        or None.
        """
        assert self.offered(), f"{self.plugin}.ds_compile_passes offers no pass"

        def check(name: str, change: Any, engine: Any) -> None:
            if change is None:
                return
            assert callable(change), (
                f"{name}: the function gave {change!r}; it gives a pass, or None"
            )
            try:
                inspect.signature(change).bind(None, ())
            except TypeError as error:
                raise AssertionError(f"{name}: a pass takes (graph, inputs): {error}") from None

        self.made(check)

    def test_they_calculate_the_same(self) -> None:
        """Loss and gradients of the changed graph are those of the model, and the graph is
        sound."""

        def check(name: str, change: Any, engine: Any) -> None:
            if change is None:
                return
            graphs = 0

            def backend(graph: Any, inputs: Sequence[Any]) -> Any:
                nonlocal graphs
                changed = change(graph, inputs)
                assert isinstance(changed, torch.fx.GraphModule), (
                    f"{name} returned {type(changed).__name__}, no graph"
                )
                changed.graph.lint()
                changed.recompile()
                graphs += 1
                return changed.forward

            model = engine.module
            batch = self.make_batch()
            wanted = self._pass(model, model, copy.deepcopy(batch))
            torch._dynamo.reset()
            found = self._pass(torch.compile(model, backend=backend), model, batch)
            torch._dynamo.reset()
            assert graphs, f"{name}: nothing was captured of the model"
            for what, mine in found.items():
                off = float((mine - wanted[what]).abs().max())
                assert off <= self.tolerance * (1 + float(wanted[what].abs().max())), (
                    f"{name}: {what} is off by {off}"
                )

        self.made(check)

    def _pass(self, run: Callable[..., Any], model: nn.Module, batch: Any) -> dict[str, Tensor]:
        model.zero_grad()
        loss = self.loss(run(batch))
        loss.backward()
        found = {
            f"the gradient of {n}": p.grad
            for n, p in model.named_parameters()
            if p.grad is not None
        }
        return {"the loss": loss.detach(), **{n: g.clone() for n, g in found.items()}}

"""The conformance kit for methods of the engine: subclass `EngineMethodsConformance` and name what
is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from ds_testing.kits.train.partitioner import with_plugins
from ds_testing.one_process import one_process_engine
from ds_testing.pool import run_ranks

if TYPE_CHECKING:
    from ds_core.engine import Engine

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.05}}}


class EngineMethodsConformance:
    """Inherit, and set `config` and `names`.

    ``class TestMine(EngineMethodsConformance)``, so that pytest collects it.

    Add tests of what the methods do, with the fixture `engine`.
    """

    config: ClassVar[Mapping[str, Any]] = {}
    """What switches your plugin on."""
    load: ClassVar[tuple[str, ...]] = ()
    """``plugins.load``, for a plugin that is not installed."""
    names: ClassVar[tuple[str, ...]] = ()
    """Of all the methods that it gives under `config`."""

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        """An engine of one process over a small model, with the plugin."""
        from torch import nn

        with one_process_engine(
            nn.Linear(3, 1), with_plugins(CONFIG, dict(self.config), list(self.load))
        ) as engine:
            yield engine

    def test_it_gives_what_it_says(self, engine: Engine) -> None:
        """The methods are those in `names`, and can be called on the engine."""
        assert self.names, f"set {type(self).__name__}.names to the methods that the plugin gives"
        given = engine.ctx.plugins.merged("ds_engine_methods")
        # A plugin of an earlier contract gives its methods when the engine is opened.
        missing = [name for name in self.names if name not in given and not hasattr(engine, name)]
        assert not missing, (
            f"{missing} are not given; is the plugin's section in {type(self).__name__}.config?"
        )
        modules = {given[name].plugin.module for name in self.names if name in given}
        more = sorted(
            n for n, a in given.items() if a.plugin.module in modules and n not in self.names
        )
        assert not more, f"{more} are given too; add them to {type(self).__name__}.names"
        for name in self.names:
            assert callable(getattr(engine, name, None)), f"engine.{name} cannot be called"

    def test_the_first_argument_is_the_engine(self, engine: Engine) -> None:
        """Each is a function that takes the engine by position, whatever the argument is called."""
        for name, function in self._functions(engine):
            kinds = [p.kind for p in inspect.signature(function).parameters.values()]
            by_position = (
                inspect.Parameter.POSITIONAL_ONLY,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
            )
            first = kinds[0] if kinds else None
            open_ended = first is inspect.Parameter.VAR_POSITIONAL
            assert first in by_position or open_ended, (
                f"{name} takes no engine; write def {name}(engine, ...)"
            )

    def test_names_are_free_and_described(self, engine: Engine) -> None:
        """No name hides a method of torch's modules, or is private; each function has a docstring,
        for ``help``.
        """
        from torch import nn

        for name, function in self._functions(engine):
            assert name.isidentifier() and not name.startswith("_"), (
                f"{name!r} is no public name; rename it"
            )
            hidden = hasattr(nn.Module, name)
            assert not hidden, (
                f"{name} would hide the module's own, which users call on the engine; rename it"
            )
            assert inspect.getdoc(function), (
                f"{name} has no docstring; say what it does and returns"
            )

    def test_every_rank_has_the_same(self) -> None:
        """Two ranks are given the same methods, in the same order."""
        ours, theirs = run_ranks(2, _given, dict(self.config), list(self.load))
        assert ours == theirs, (
            f"rank 0 has {ours}, rank 1 has {theirs}; do not choose methods by rank"
        )

    def _functions(self, engine: Engine) -> list[tuple[str, Any]]:
        given = engine.ctx.plugins.merged("ds_engine_methods")
        return [
            (n, given[n].resolve(given[n].value, f"engine.{n}")) for n in self.names if n in given
        ]


def _given(config: dict[str, Any], load: list[str]) -> list[str]:
    from torch import nn

    with one_process_engine(nn.Linear(3, 1), with_plugins(CONFIG, config, load)) as engine:
        return list(engine.ctx.plugins.merged("ds_engine_methods"))

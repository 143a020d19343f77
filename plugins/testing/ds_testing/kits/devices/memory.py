"""The conformance kit for what tells the memory of model states before anything runs:
`MemoryConformance`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from ds_core.setup.compose import compose

PLACES = {"device", "host", "disk"}


class MemoryConformance:
    """Inherit, and set `config`; ``class TestMine(MemoryConformance)``, so that pytest collects it."""

    config: ClassVar[Mapping[str, Any]] = {}
    """One in which the plugin takes part."""
    load: ClassVar[tuple[str, ...]] = ()
    """``plugins.load``, for a plugin that is not installed."""
    worlds: ClassVar[tuple[int, ...]] = (1, 2, 4)
    """Numbers of data-parallel ranks that the config allows."""

    def model(self, width: int) -> nn.Module:
        """A model without memory; override where yours needs another."""
        return nn.Sequential(*(nn.Linear(width, width, device="meta") for _ in range(4)))

    def memory(self, module: nn.Module, world: int) -> Mapping[str, float]:
        """What is told of `module` on `world` data-parallel ranks."""
        loaded = (
            {"plugins": {**self.config.get("plugins", {}), "load": list(self.load)}}
            if self.load
            else {}
        )
        chosen = compose({**self.config, **loaded})
        answers = chosen.plugins.ask(
            "ds_memory", config=chosen.config, plugins=chosen.plugins, module=module, world=world
        )
        assert answers, f"nobody answers; is the plugin's section in {type(self).__name__}.config?"
        told: Mapping[str, float] = answers[-1].value  # of the plugin that was named last
        return told

    def test_it_tells_of_all_places(self) -> None:
        """Bytes of the device, the host and the disk: finite, not negative; and somewhere there are
        some.
        """
        for world in self.worlds:
            told = self.memory(self.model(256), world)
            assert set(told) == PLACES, (
                f"it tells of {sorted(told)}; give {sorted(PLACES)}, 0 where there is nothing"
            )
            numbers = [float(size) for size in told.values()]
            assert all(math.isfinite(n) and n >= 0 for n in numbers), (
                f"{told}: bytes are finite and not negative"
            )
            assert sum(numbers) > 0, "it tells that a model takes nothing at all"

    def test_a_larger_model_takes_more(self) -> None:
        """With twice the width there is more of it, in all places together."""
        for world in self.worlds:
            less, more = (
                sum(self.memory(self.model(width), world).values()) for width in (256, 512)
            )
            assert more > less, (
                f"{less:.0f} bytes at width 256, {more:.0f} at 512, on {world} ranks"
            )

    def test_more_ranks_do_not_take_more_each(self) -> None:
        """Of a model much larger than any padding, by a hundredth at most; one rank alone needs no
        buffers.
        """
        several = sorted(world for world in self.worlds if world > 1)
        told = [sum(self.memory(self.model(8192), world).values()) for world in several]
        for fewer, more in itertools.pairwise(told):
            assert more <= fewer * 1.01, f"{fewer:.0f} bytes per rank, but {more:.0f} on more ranks"

    def test_nothing_is_made_or_changed(self) -> None:
        """The module stays on the meta device, and a second answer is the first one."""
        module = self.model(256)
        before = [(name, p.shape, p.dtype) for name, p in module.named_parameters()]
        told = [dict(self.memory(module, self.worlds[0])) for _ in range(2)]
        assert told[0] == told[1], "another answer when asked again"
        assert [(name, p.shape, p.dtype) for name, p in module.named_parameters()] == before, (
            "the module was changed"
        )
        assert all(p.is_meta for p in module.parameters()), "the module was given memory"

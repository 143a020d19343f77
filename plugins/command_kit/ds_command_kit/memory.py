"""What plugins tell of memory (hook ``ds_memory``), added up."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from ds_core.setup.compose import Composition

PLACES = ("device", "host", "disk")


def memory_of(chosen: Composition, module: nn.Module, world: int) -> tuple[dict[str, float], bool]:
    """Bytes on one rank at most, by place; and whether they hold the model states, or what is added
    to them alone.

    module, world: see ``ds_memory``.
    """
    plugins = chosen.plugins
    owners = plugins.implementing("ds_partitioner")
    total = dict.fromkeys(PLACES, 0.0)
    states = False
    for answer in plugins.ask(
        "ds_memory", config=chosen.config, plugins=plugins, module=module, world=world
    ):
        states |= answer.plugin in owners
        for place, size in answer.value.items():
            total[place] += float(size)
    return total, states

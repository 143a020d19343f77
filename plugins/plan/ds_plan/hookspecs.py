"""The hook of dscore-plan (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core import entries
from ds_core.plugins import checks


@checks.gives(checks.named("builtins:str"))
def ds_planners() -> Mapping[str, entries.Ref]:  # type: ignore[empty-body]
    """Hook: what ``dscore plan`` predicts, by name: reference to a `ds_plan.planner.Planner`.

    The class is called with the raw config, also where the config does not name the plugin.
    """

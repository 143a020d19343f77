"""The declaration, which needs no other package of this repository's."""

from __future__ import annotations

from typing import Any, ClassVar

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_numerics.plugin"
    section = "numerics"
    good_config: ClassVar[Any] = {"every": 50, "action": "repair"}
    bad_configs: ClassVar[Any] = [{"every": 0}, {"every": 1.5}, {"action": "mend"}, {"often": 1}]

"""The declaration of dscore-pipeline."""

from __future__ import annotations

from typing import Any, ClassVar

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_pipeline.plugin"
    section = "pipeline"
    good_config: ClassVar[Any] = {}
    bad_configs: ClassVar[Any] = [{"stagess": 2}, {"stages": "many"}, {"stages": -1}, {"stages": 0}]

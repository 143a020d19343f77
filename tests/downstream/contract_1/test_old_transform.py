"""old-transform against the contracts of plugins and transforms."""

from __future__ import annotations

import pytest
from ds_testing import PluginConformance, TransformConformance
from old_transform.transform import recompute
from torch import nn

from ds_core.errors import UsageError
from ds_core.undo import Undo


class TestPlugin(PluginConformance):
    entry_point = "old_transform.plugin"
    section = "old_transform"
    good_config = {"modules": ["0"]}
    bad_configs = ({"modules": 3},)


class TestTransform(TransformConformance):
    """The kit's model is a Sequential."""

    plugin = "old_transform.plugin"
    config = {"old_transform": {"modules": ["0", "2"]}}


def test_a_wrong_name_is_told() -> None:
    with pytest.raises(UsageError, match="modules: no 'nope'"):
        recompute(nn.Sequential(nn.Linear(2, 2)), ["nope"], Undo())

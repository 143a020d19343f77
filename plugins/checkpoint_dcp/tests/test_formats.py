"""The formats pass the kit."""

from __future__ import annotations

import pytest
from ds_checkpoint.formats.conformance import CheckpointFormatConformance
from ds_testing import PluginConformance

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class TestDeclaration(PluginConformance):
    entry_point = "ds_checkpoint_dcp.plugin"


class TestDcp(CheckpointFormatConformance):
    plugin = "ds_checkpoint_dcp.plugin"
    name = "dcp"


class TestMegatron(CheckpointFormatConformance):
    plugin = "ds_checkpoint_dcp.plugin"
    name = "megatron"

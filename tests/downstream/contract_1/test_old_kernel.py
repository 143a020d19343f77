"""old-kernel against the contracts of plugins and kernels."""

from __future__ import annotations

import torch
from ds_testing import KernelConformance, PluginConformance
from old_kernel.kernel import squared_norm


class TestPlugin(PluginConformance):
    entry_point = "old_kernel.plugin"


class TestKernel(KernelConformance):
    """Against the reference."""

    plugin = "old_kernel.plugin"


def test_by_hand() -> None:
    assert squared_norm([torch.tensor([3.0, 4.0]), torch.tensor(2.0)]).item() == 29

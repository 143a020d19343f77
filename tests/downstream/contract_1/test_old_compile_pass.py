"""old-compile-pass against the contracts of plugins and compile passes."""

from __future__ import annotations

import torch
from ds_testing import CompilePassConformance, PluginConformance
from old_compile_pass.drops import without_dropouts
from torch import nn


class TestPlugin(PluginConformance):
    entry_point = "old_compile_pass.plugin"


class TestPass(CompilePassConformance):
    plugin = "old_compile_pass.plugin"

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 2))

    def test_only_dropouts_of_0_go(self) -> None:
        model = nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.5))
        left: list[int] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
            changed = without_dropouts(graph, inputs)
            left.append(sum("dropout" in str(node.target) for node in changed.graph.nodes))
            changed.recompile()
            return changed.forward

        torch.compile(model, backend=backend)(torch.ones(3))
        assert left == [1]

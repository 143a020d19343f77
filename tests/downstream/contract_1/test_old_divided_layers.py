"""old-divided-layers against the contracts of plugins and of transforms that divide a model."""

from __future__ import annotations

import pytest
from ds_testing import PluginConformance, RemoteError, ShardedTransformConformance, run_ranks
from torch import Tensor, nn


class TestPlugin(PluginConformance):
    entry_point = "old_divided_layers.plugin"
    section = "old_divided_layers"
    good_config = {"size": 2, "pairs": [["inp", "mid"]]}
    bad_configs = ({"size": 0}, {"pairs": ["inp"]})


class Model(nn.Module):
    """Its 13 units divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(7, 13), nn.Linear(13, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor, use_extra: bool = False) -> Tensor:
        return nn.functional.cross_entropy(self.out(self.mid(self.inp(x).tanh())), y)


class TestDivided(ShardedTransformConformance):
    axis = "old_divided_layers"
    configs = {2: {"old_divided_layers": {"size": 2, "pairs": [["inp", "mid"]]}}}
    cut = (r"inp\..*", r"mid\.weight")
    frozen = (r"mid\.weight",)
    make_model = staticmethod(Model)


def wrong_name() -> None:
    import ds_core

    config = {"train_micro_batch_size_per_gpu": 1, "old_divided_layers": {"pairs": [["nope", "1"]]}}
    ds_core.initialize(model=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), config=config)


def test_a_wrong_name_is_told() -> None:
    with pytest.raises(RemoteError, match="'nope' is not a linear layer"):
        run_ranks(1, wrong_name)

"""old-observer against the contracts of plugins and observers."""

from __future__ import annotations

from ds_testing import ObserverConformance, PluginConformance
from old_observer.plugin import Best


class TestPlugin(PluginConformance):
    entry_point = "old_observer.plugin"
    section = "old_observer"
    good_config = {"patience": 3, "folder": "checkpoints"}
    bad_configs = ({"patience": 0}, {"folder": 3})


class TestObserver(ObserverConformance):
    """The loss of the kit's training falls in every step."""

    config = {"old_observer": {"patience": 2}}


def test_the_lowest_loss_is_kept() -> None:
    restored = Best()
    restored.load_state_dict(Best(0.5, 3).state_dict())
    assert restored == Best(0.5, 3)

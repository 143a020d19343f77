"""A module that is not installed tells how much memory the model states of its own layout take."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from ds_testing import MemoryConformance
from torch import nn

from ds_core.errors import PluginError
from ds_core.setup.compose import compose

SLICED = '''
"""Everything is cut into as many slices as there are ranks; moments rest on the host."""

def ds_memory(module, world):
    elements = sum(p.numel() for p in module.parameters())
    return {"device": 8 * elements / world, "host": 8 * elements / world, "disk": 0}
'''


@pytest.fixture(autouse=True)
def _sliced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sliced_states.py").write_text(SLICED)
    monkeypatch.syspath_prepend(str(tmp_path))


class TestSliced(MemoryConformance):
    load: ClassVar[tuple[str, ...]] = ("sliced_states",)

    def test_half_on_each_of_two_ranks(self) -> None:
        module = nn.Linear(10, 10, bias=False, device="meta")
        assert self.memory(module, 2) == {"device": 400, "host": 400, "disk": 0}


def test_two_answers_are_an_error_that_names_both() -> None:
    chosen = compose({"zero_optimization": {"stage": 1}, "plugins": {"load": ["sliced_states"]}})
    arguments = {
        "config": chosen.config,
        "plugins": chosen.plugins,
        "module": nn.Linear(2, 2),
        "world": 1,
    }
    with pytest.raises(
        PluginError, match=r"ds_memory is answered by .*; only one can drive"
    ) as caught:
        chosen.plugins.driver("ds_memory", **arguments)
    assert "sliced_states" in str(caught.value) and "dscore-zero" in str(caught.value)

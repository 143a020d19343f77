"""Plugins written when the kits were parts of the core: they train as they did, with warnings that
say what moved.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from ds_testing.pool import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from frozen import HERE, installed, passed

KIT = """
from ds_core.testing import PartitionerConformance, PluginConformance

class TestDeclaration(PluginConformance):
    entry_point = "my_plain.plugin"
    section = "plain"
    good_config = {}

class TestPlain(PartitionerConformance):
    config = {"plain": {}}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("before_kits") / "site"
    assert len(installed(HERE / "before_kits", made)) == 10
    return made


def losses_and_warnings(site: str, folder: str, sections: dict[str, Any]) -> list[Any]:
    """Two steps with most of the plugins at once; what became of the losses, and which warnings
    came.
    """
    import warnings

    import torch

    import ds_core

    sys.path.insert(0, site)
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "MySign", "params": {"lr": 0.1}},
        "scheduler": {"type": "MyHalving", "params": {"every": 1}},
        "my_lines": {"file": f"{folder}/lines.jsonl"},
        "plugins": {
            "load": [
                "my_optim.plugin",
                "my_lines=my_lines.plugin",
                "my_norm.plugin",
                "my_attic.plugin",
            ]
        },
        **sections,
    }
    config["plugins"]["load"] += [
        f"{name}={name}.plugin" for name in ("my_runner", "my_towers") if name in sections
    ]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        engine, *_ = ds_core.initialize(model=Towers(), config=config)
        losses = [
            engine.train_batch(iter([torch.full((2, 3), 1.0 + i) for _ in range(8)])).item()
            for i in range(2)
        ]
        engine.destroy()
    return [losses, sorted({str(w.message) for w in warned if w.category is DeprecationWarning})]


def Towers() -> Any:  # noqa: N802  # a class, made where torch may be loaded
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(3, 4)
            self.tower = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tower(torch.tanh(self.base(x))).square().mean()

    return Model()


def test_they_train_together(site: Path, tmp_path: Path) -> None:
    sections = {"my_runner": {}, "my_towers": {"size": 2}}
    (losses, _), _ = run_ranks(2, losses_and_warnings, str(site), str(tmp_path), sections)
    (truth, _), _ = run_ranks(2, losses_and_warnings, str(site), str(tmp_path), {})
    assert losses == pytest.approx(truth, rel=1e-6), (
        "another runner, and towers that are alike, change nothing"
    )
    assert "train_loss" in (tmp_path / "lines.jsonl").read_text()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_store_with_the_old_names_serves(site: Path, tmp_path: Path, stage: int) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": "attic"}}
    plain = run_ranks(
        2, losses_and_warnings, str(site), str(tmp_path), {"zero_optimization": {"stage": stage}}
    )[0]
    losses, warned = run_ranks(
        2, losses_and_warnings, str(site), str(tmp_path), {"zero_optimization": zero}
    )[0]
    assert losses == pytest.approx(plain[0], rel=1e-6)
    if stage == 1:  # a worker imports the store once
        assert any("ds_core.stores is ds_state_stores now" in text for text in warned)
        assert any("Attic.stow is evict now" in text for text in warned)


@pytest.mark.slow
def test_the_partitioner_passes_todays_kit_by_its_old_name(site: Path) -> None:
    """But for two backwards before a step, where it was wrong then, too: it has no `begin`."""
    (site / "test_plain.py").write_text(KIT)
    said = passed(site, "test_plain.py", "-k", "not products and not two_backwards")
    assert "ds_core.testing is ds_testing now" in said


def test_upgrade_brings_them_forward(site: Path, tmp_path: Path) -> None:
    from ds_testing.processes import clean_environment, run

    forward = tmp_path / "forward"
    shutil.copytree(site, forward)
    dscore = str(Path(sys.executable).with_name("dscore"))
    shown = run([dscore, "plugins", "upgrade", "--check", str(forward)], status=1)
    assert "-from ds_core.stores import StateStore, away" in shown
    said = run([dscore, "plugins", "upgrade", str(forward)])
    assert "Partitioner.begin and finish take a BackwardPlan" in said
    text = (forward / "my_attic" / "store.py").read_text()
    assert (
        "from ds_state_stores import StateStore, is_evicted" in text
        and "filter(is_evicted, tensors)" in text
    )
    env = clean_environment(PYTHONPATH=str(forward))
    run([sys.executable, "-W", "error::DeprecationWarning", "-c", "import disk_store"], env=env)

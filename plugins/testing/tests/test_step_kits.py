"""`GradientsConformance` and `ObserverConformance` find what is wrong with a plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ds_testing import GradientsConformance, ObserverConformance

HEAD = "def ds_gradients(ctx, gradients):\n    import torch\n    for s in gradients.shards: "


@pytest.mark.fast_cases("scale", "nothing")
@pytest.mark.parametrize(
    ("body", "check"),
    [
        ("s.tensor.add_(ctx.rank * 0.01)", lambda kit: kit.test_ranks_are_as_one(1)),
        ("s.tensor.clamp_(-0.01, 0.01)", lambda kit: kit.test_the_factor_is_honoured()),
        ("pass", lambda kit: kit.test_it_changes_what_is_trained()),
    ],
    ids=["ranks", "scale", "nothing"],
)
def test_wrong_changes_of_gradients(
    body: str, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"changes_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(HEAD + body)
    monkeypatch.syspath_prepend(str(tmp_path))
    kit = type("Kit", (GradientsConformance,), {"load": (name,)})()
    with pytest.raises(AssertionError):
        check(kit)


@pytest.mark.parametrize(
    "body",
    [
        "def ds_step_end(ctx): ctx.engine.optimizer.param_groups[0]['lr'] = 0.2",
        "def ds_phase_begin(phase): 1 / 0",
        "def ds_phase_begin(ctx, phase): phase != 'eval' or "
        "ctx.engine.module.layer.bias.data.add_(1)",
    ],
    ids=["changes", "fails", "evaluation"],
)
def test_wrong_observers(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"observes_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    kit = type("Kit", (ObserverConformance,), {"load": (name,)})()
    with pytest.raises(AssertionError):
        kit.test_training_is_the_same_with_it()


KEEPS = """
class Kept:
    def __init__(self): self.seen = {initial}
    def state_dict(self): return {{"seen": self.seen}}
    def load_state_dict(self, state): {load}
KEPT = []
def ds_checkpointables(ctx):
    KEPT.append(Kept())
    return {{"kept": KEPT[-1]}}
def ds_step_end(ctx):
    for kept in KEPT: kept.seen += 1
"""


@pytest.mark.parametrize(
    ("initial", "load", "saying"),
    [
        ("0", "pass", "after load_state_dict, state_dict gives"),
        ("1j", "self.seen = state['seen']", "not JSON or a tensor"),
    ],
    ids=["forgets", "complex"],
)
def test_states_that_are_lost(
    initial: str, load: str, saying: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"keeps_{len(load)}.py").write_text(KEEPS.format(initial=initial, load=load))
    monkeypatch.syspath_prepend(str(tmp_path))
    kit = type("Kit", (ObserverConformance,), {"load": (f"keeps_{len(load)}",)})()
    with pytest.raises(AssertionError, match=saying):
        kit.test_what_it_keeps_in_checkpoints_survives()

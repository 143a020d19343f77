"""`CheckpointerConformance`: does a run that a checkpointer saved and loaded go on as if it had
never stopped?

Subclass it, and set `config` (and `load`) to what switches your checkpointer on. The kit trains a
small model whose state has one of everything (moments, a schedule, a loss scale, buffers, random
numbers, a data position, states of a plugin and of a module), saves, loads into an engine that was
made with other weights, and compares bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ds_core.errors import CheckpointError, UsageError
from ds_testing.pool import run_ranks

WIDTH = 6
MICRO = 2
SAVED = 3
MORE = 2
KEPT = "ds_testing.kits.train.kept_state"


class CheckpointerConformance:
    """Subclass me; see the module's docstring.

    The name must start with Test, so that pytest collects it.
    """

    config: ClassVar[Mapping[str, Any]] = {}
    """Sections that switch the checkpointer on."""
    load: ClassVar[tuple[str, ...]] = ()
    """Modules for ``plugins.load``."""
    worlds: ClassVar[tuple[int, ...]] = (1, 2)
    """World sizes."""
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"": {}}
    """By name, what is added to the config, such as a ZeRO stage; those of 16 bits bring a loss
    scaler with them.
    """
    reshards: ClassVar[bool] = True
    """Whether a checkpoint loads at another number of ranks."""
    timeout: ClassVar[float] = 300.0

    def _run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        load = [*self.load, f"kept={KEPT}"]
        config = {
            **self.config,
            "kept": {},
            "plugins": {**self.config.get("plugins", {}), "load": load},
        }
        return run_ranks(world, function, config, *arguments, timeout=self.timeout)

    def test_a_resumed_run_is_bit_identical(self, tmp_path: Path) -> None:
        """Losses, weights, optimizer states, counters and random numbers, at every world size, in
        every variant.
        """
        for world in self.worlds:
            variants = {name: dict(extra) for name, extra in self.variants.items()}
            for rank, rows in enumerate(
                self._run(world, _resume, str(tmp_path / str(world)), variants)
            ):
                for name, differences in rows.items():
                    assert differences == [], (
                        f"world {world}, rank {rank}, {name or 'plain'}: {differences} differ"
                    )

    def test_another_number_of_ranks(self, tmp_path: Path) -> None:
        """The weights that the most ranks saved are those that the fewest load; `reshards` says
        whether that works.
        """
        if not self.reshards:
            return
        saved = self._run(max(self.worlds), _save_weights, str(tmp_path))[0]
        for loaded in self._run(min(self.worlds), _load_weights, str(tmp_path)):
            assert loaded == saved

    def test_tags_and_the_latest(self, tmp_path: Path) -> None:
        """A load without a tag takes what was saved last with save_latest; before that, it loads
        nothing.
        """
        world = max(self.worlds)
        for row in self._run(world, _tags, str(tmp_path)):
            assert row == [[None, None], [None, {}], 1, 2, 1, {"at": 2}]

    def test_what_is_not_loaded_stays(self, tmp_path: Path) -> None:
        """load_module_only leaves the optimizer and the counters; load_optimizer_states=False
        leaves the optimizer.
        """
        for row in self._run(max(self.worlds), _partly, str(tmp_path)):
            assert row == [True] * 5

    def test_a_failure_on_one_rank_is_one_on_all(self, tmp_path: Path) -> None:
        """Every rank raises CheckpointError, and what was saved before is still there and is the
        latest.
        """
        for rank, (raised, loaded) in enumerate(
            self._run(max(self.worlds), _failing, str(tmp_path))
        ):
            assert raised, (
                f"rank {rank} did not raise CheckpointError when the last rank's state could not "
                "be saved"
            )
            assert loaded == 1, (
                f"rank {rank}: after a failed save, step {loaded} was loaded and not 1"
            )

    def test_another_model_is_refused(self, tmp_path: Path) -> None:
        """CheckpointError on every rank, and nothing has changed."""
        for row in self._run(max(self.worlds), _other_model, str(tmp_path)):
            assert row == [True, True]

    def test_export_writes_a_file_or_says_that_it_cannot(self, tmp_path: Path) -> None:
        """save_16bit_model returns whether it wrote the file, or raises UsageError."""
        for wrote in self._run(max(self.worlds), _export, str(tmp_path)):
            assert wrote is None or (tmp_path / "model.safetensors").is_file() == wrote


def _engine(
    config: dict[str, Any],
    extra: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    width: int = WIDTH,
) -> Any:
    import random

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import ds_core
    from ds_core import comm

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(width, 11)
            # A norm with buffers, dropout with random numbers, and a counter as extra state: each
            # would differ after a load that leaves it out.
            self.norm = nn.BatchNorm1d(11)
            self.drop = nn.Dropout(0.25)
            self.last = nn.Linear(11, 1)
            self.calls = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            hidden = self.drop(self.norm(self.first(x.to(self.first.weight.dtype))))
            return self.last(hidden).float().square().mean()

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(64, width, generator=generator))
    torch.manual_seed(seed)
    base = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 2}},
    }
    engine, *_ = ds_core.initialize(
        model=Net(), training_data=data, config={**base, **config, **(extra or {})}
    )
    # Another seed on each rank, as dropout needs: random states are saved by rank.
    torch.manual_seed(seed + comm.rank() if comm.is_initialized() else seed)
    random.seed(seed)
    return engine


def _steps(engine: Any, count: int) -> list[float]:
    return [engine.train_batch().item() for _ in range(count)]


def _snapshot(engine: Any) -> dict[str, Any]:
    """Everything that a resumed run must have, by name."""
    import random

    import torch
    from ds_run_state import RunState

    from ds_testing.kits.train import kept_state

    found: dict[str, Any] = {f"buffer {n}": b.clone() for n, b in engine.module.named_buffers()}
    for state in RunState(engine).states(engine.optimizer):
        found[f"{state.name} from {state.start}"] = state.values().detach().clone()
    found["counters"] = [
        engine.micro_steps,
        engine.global_steps,
        engine.global_samples,
        engine.skipped_steps,
    ]
    found |= {
        "lr": engine.get_lr(),
        "loss scale": engine.loss_scale,
        "random": [torch.rand(()).item(), random.random()],
    }
    return found | {"plugin": kept_state.of(engine.ctx).value, "module": engine.module.calls}


def _differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    import torch

    def equal(a: Any, b: Any) -> bool:
        return (
            torch.equal(a, b)
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
            else bool(a == b)
        )

    return sorted(
        name
        for name in {*one, *two}
        if name not in one or name not in two or not equal(one[name], two[name])
    )


def _resume(config: dict[str, Any], folder: str, variants: dict[str, Any]) -> dict[str, list[str]]:
    found = {}
    for name, extra in variants.items():
        place = f"{folder}/{name or 'plain'}"
        engine = _engine(config, extra)
        _steps(engine, SAVED)
        engine.save_checkpoint(place, client_state={"note": (1, [2.5, None], "x")})
        engine.wait_for_checkpoint()
        # The truth is the same run, which simply continues after the save.
        before = {"losses": _steps(engine, MORE), **_snapshot(engine)}
        engine.destroy()
        # Another seed, so that nothing is equal unless it was loaded.
        engine = _engine(config, extra, seed=1)
        _, client = engine.load_checkpoint(place)
        after = {"losses": _steps(engine, MORE), **_snapshot(engine)}
        engine.destroy()
        found[name] = _differences(before, after) + ["client state"] * (
            client != {"note": (1, [2.5, None], "x")}
        )
    return found


def _weights(engine: Any) -> dict[str, list[float]]:
    from ds_testing.truth import whole_weights

    return {name: tensor.flatten().tolist() for name, tensor in whole_weights(engine).items()}


def _save_weights(config: dict[str, Any], folder: str) -> dict[str, list[float]]:
    engine = _engine(config)
    _steps(engine, 1)
    engine.save_checkpoint(folder)
    found = _weights(engine)
    engine.destroy()
    return found


def _load_weights(config: dict[str, Any], folder: str) -> dict[str, list[float]]:
    engine = _engine(config, seed=1)
    engine.load_checkpoint(folder)
    found = _weights(engine)
    engine.destroy()
    return found


def _tags(config: dict[str, Any], folder: str) -> list[Any]:
    engine = _engine(config)
    seen: list[Any] = [
        list(engine.load_checkpoint(folder)),
        list(engine.load_checkpoint(folder, missing_ok=True)),
    ]
    _steps(engine, 1)
    engine.save_checkpoint(folder, tag="one")
    _steps(engine, 1)
    engine.save_checkpoint(folder, tag="two", client_state={"at": 2}, save_latest=False)
    engine.wait_for_checkpoint()
    client = None
    for tag in (None, "two", "one"):
        _, given = engine.load_checkpoint(folder, tag=tag)
        client = given or client
        seen.append(engine.global_steps)
    engine.destroy()
    return [*seen, client]


def _partly(config: dict[str, Any], folder: str) -> list[bool]:
    engine = _engine(config)
    _steps(engine, 2)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    saved = _snapshot(engine)
    engine.destroy()
    engine = _engine(config, seed=1)
    _steps(engine, 1)
    started = _snapshot(engine)
    _, client = engine.load_checkpoint(folder, load_module_only=True)
    loaded = _snapshot(engine)
    weights = [name for name in saved if name.startswith("module/")]
    states = [name for name in saved if name.startswith("optimizer/")]
    seen = [
        not _differences({n: saved[n] for n in weights}, {n: loaded[n] for n in weights}),
        client == {},
    ]
    seen.append(not _differences({n: started[n] for n in states}, {n: loaded[n] for n in states}))
    seen.append(engine.global_steps == 1)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    loaded = _snapshot(engine)
    same = not _differences({n: started[n] for n in states}, {n: loaded[n] for n in states})
    seen.append(same and engine.global_steps == 2)
    engine.destroy()
    return seen


def _failing(config: dict[str, Any], folder: str) -> list[Any]:
    from ds_testing.kits.train import kept_state

    engine = _engine(config)
    _steps(engine, 1)
    engine.save_checkpoint(folder, tag="good")
    engine.wait_for_checkpoint()
    _steps(engine, 1)
    # A plugin's state cannot be saved on the last rank; the others notice nothing by themselves.
    kept_state.of(engine.ctx).fails = engine.ctx.rank == engine.ctx.world_size - 1
    raised = False
    try:
        engine.save_checkpoint(folder, tag="bad")
        engine.wait_for_checkpoint()
    except CheckpointError:
        raised = True
    kept_state.of(engine.ctx).fails = False
    engine.load_checkpoint(folder)
    step = engine.global_steps
    engine.destroy()
    return [raised, step]


def _other_model(config: dict[str, Any], folder: str) -> list[bool]:
    engine = _engine(config)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    engine.destroy()
    engine = _engine(config, seed=1, width=WIDTH + 1)
    before = _snapshot(engine)
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(folder)
    # Taking a snapshot draws random numbers, so they differ in any case.
    del before["random"]
    after = _snapshot(engine)
    del after["random"]
    engine.destroy()
    return [True, not _differences(before, after)]


def _export(config: dict[str, Any], folder: str) -> bool | None:
    engine = _engine(config)
    try:
        wrote: bool | None = engine.save_16bit_model(folder)
    except UsageError:
        wrote = None
    engine.destroy()
    return wrote

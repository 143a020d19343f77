"""The rules of ``dscore plugins grade`` that train: on several ranks, resumed, and after the
end."""

from __future__ import annotations

import tempfile
from typing import Any

from ds_testing.pool import RemoteError, run_ranks

STEPS = 4
ROWS = 8
WIDTH = 6
TOLERANCE = 1e-9
AXES: tuple[dict[str, int], ...] = ({}, {"tp": 2}, {"pp": 2}, {"ep": 2})


def _config(
    module: str, section: str, value: Any, rows: int, axes: dict[str, int]
) -> dict[str, Any]:
    load = [f"{section}={module}"]
    extra: dict[str, Any] = {section: value}
    if axes:
        load.append("fake_axes=ds_testing.kits.parallel.fake_axes")
        extra["fake_axes"] = {"axes": axes}
    return {
        "train_micro_batch_size_per_gpu": rows,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "plugins": {"load": load},
        **extra,
    }


def _model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(WIDTH, 1)

        def forward(self, x: Any) -> Any:
            return self.last(torch.tanh(self.first(x))).square().mean()

    return Model().double()


def _rows(step: int) -> Any:
    import torch

    return torch.randn(
        ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64
    )


def _train(module: str, section: str, value: Any, axes: dict[str, int]) -> tuple[list[float], str]:
    """The losses over all ranks; or why it was refused."""
    import ds_core
    from ds_core import comm
    from ds_core.errors import DSError

    with tempfile.TemporaryDirectory() as folder:
        shown = _in(folder, value)
        world = comm.world_size()
        ranks = world if not axes else 1  # along other axes ranks have the same data
        config = _config(module, section, shown, ROWS // ranks, axes)
        try:
            engine, *_ = ds_core.initialize(model=_model(), config=config)
        except DSError as error:
            return [], f"{error}"
        dp = engine.ctx.mesh.size("batch")
        index = engine.ctx.mesh.index("batch")
        losses = []
        for step in range(STEPS):
            mine = _rows(step).chunk(dp)[index]
            loss = engine(mine.to(next(engine.module.parameters()).dtype))
            engine.backward(loss)
            engine.step()
            total = loss.detach().double() / dp
            if dp > 1:
                comm.all_reduce(total, group=engine.ctx.mesh.group("batch"))
            losses.append(float(total))
        engine.destroy()
        return losses, ""


def _in(folder: str, value: Any) -> Any:
    """The config, with what it writes in `folder`."""
    if isinstance(value, dict):
        paths = ("folder", "path", "file", "output_path", "journal")
        return {
            k: f"{folder}/{k}" if k in paths and isinstance(v, str) else _in(folder, v)
            for k, v in value.items()
        }
    return value


def trains_alike(module: str, section: str, value: Any) -> None:
    """On two ranks, and with axes of other features, losses are those of one process, or all ranks
    refuse.
    """
    from ds_core.errors import UsageError

    alone, why = run_ranks(1, _train, module, section, value, {})[0]
    if why:
        raise UsageError(why)
    for axes in AXES:
        try:
            answers = run_ranks(2, _train, module, section, value, axes)
        except RemoteError as error:
            raise AssertionError(f"2 ranks{_with(axes)}: {error}") from error
        refused = [why for _, why in answers]
        if all(refused):
            assert all(section in why for why in refused), (
                f"2 ranks{_with(axes)}: refused without {section}: {refused[0]}"
            )
            continue
        assert not any(refused), (
            f"2 ranks{_with(axes)}: one rank refuses, the other trains: {refused}"
        )
        for rank, (losses, _) in enumerate(answers):
            worst = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, alone, strict=True))
            assert worst <= TOLERANCE, (
                f"rank {rank} of 2{_with(axes)}: losses are off by {worst:.1g}"
            )


def _with(axes: dict[str, int]) -> str:
    return f" with {', '.join(axes)}" if axes else ""


def _resume(module: str, section: str, value: Any) -> tuple[list[float], list[float], str]:
    """Losses of a whole run, and of one that was saved after half and loaded into another
    engine."""
    import ds_core
    from ds_core.errors import DSError

    with tempfile.TemporaryDirectory() as folder:

        def start(name: str) -> Any:
            shown = _in(f"{folder}/{name}", value)
            return ds_core.initialize(
                model=_model(), config=_config(module, section, shown, ROWS, {})
            )[0]

        def step(engine: Any, number: int) -> float:
            loss = engine(_rows(number).to(next(engine.module.parameters()).dtype))
            engine.backward(loss)
            engine.step()
            return float(loss)

        try:
            engine = start("whole")
        except DSError as error:
            return [], [], f"{error}"
        whole = []
        for number in range(STEPS):
            whole.append(step(engine, number))
            if number == STEPS // 2 - 1:
                engine.save_checkpoint(f"{folder}/saved")
        engine.destroy()
        engine = start("resumed")
        engine.load_checkpoint(f"{folder}/saved")
        resumed = [step(engine, number) for number in range(STEPS // 2, STEPS)]
        engine.destroy()
        return whole[STEPS // 2 :], resumed, ""


def resumes(module: str, section: str, value: Any) -> None:
    """Bit-identical losses after a load."""
    from ds_core.errors import UsageError

    whole, resumed, why = run_ranks(1, _resume, module, section, value)[0]
    if why:
        raise UsageError(why)
    assert whole == resumed, f"losses after a load are {resumed}, and were {whole} without it"


def _left(module: str, section: str, value: Any) -> tuple[list[str], str]:
    import gc
    import threading

    import torch

    import ds_core
    from ds_core.errors import DSError
    from ds_testing.kits.parallel.given_back import Structure

    with tempfile.TemporaryDirectory() as folder:
        model = _model()
        before = Structure(model)
        threads = set(threading.enumerate())
        hook = id(__import__("sys").excepthook)
        try:
            engine, *_ = ds_core.initialize(
                model=model, config=_config(module, section, _in(folder, value), ROWS, {})
            )
        except DSError as error:
            return [], f"{error}"
        loss = engine(_rows(0).to(next(engine.module.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        engine.destroy()
        del engine, loss
        gc.collect()
        found = before.differences(model)
        more = {t for t in threading.enumerate() if t.is_alive() and not t.daemon} - threads
        found += [f"the thread {t.name!r} runs on" for t in more]
        found += ["sys.excepthook is another"] if id(__import__("sys").excepthook) != hook else []
        found += ["gradients are off"] if not torch.is_grad_enabled() else []
        return found, ""


def gives_back(module: str, section: str, value: Any) -> None:
    """The model, the threads and the process are as they were."""
    from ds_core.errors import UsageError

    found, why = run_ranks(1, _left, module, section, value)[0]
    if why:
        raise UsageError(why)
    assert not found, "; ".join(found)

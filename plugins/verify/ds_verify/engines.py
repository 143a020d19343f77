"""Compares two engines of one program, for notebooks and tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ds_core import comm
from ds_core.errors import UsageError
from ds_verify.comparing import LIMIT, Report, compare_folders
from ds_verify.config import Verify
from ds_verify.plugin import RECORDER
from ds_verify.recording.making import begin_recording
from ds_verify.recording.replay import Replay, Save

if TYPE_CHECKING:
    from ds_core.engine import Engine
    from ds_verify.recording.recorder import Driver, Recorder


def compare(
    engine: Engine,
    reference: Engine,
    batches: Sequence[Any],
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    limit: float = LIMIT,
) -> Report:
    """Whether `engine` computes what `reference` computes from the same weights, states and data.

    Both were made on these ranks with ``"verify": {"role": "compare"}`` in their configs, of equal
    models; their layouts may differ. Both are given back with the weights and states they had.

    batches: this rank's micro-batches, as many as make some whole steps: a tuple of the model's
        arguments, a mapping of them, or its only argument; of a pipeline what ``train_batch`` takes.
    loss: ``(output, batch) -> loss``; without it the output is the loss, or has it as ``loss``.
    limit: the ratio to rounding above which a tensor counts as different.

    Returns the same report on all ranks. Raises UsageError for engines that cannot be compared.
    Collective; the ranks share the folder for temporary files.
    """
    gas = engine.gradient_accumulation_steps()
    if not batches or len(batches) % gas:
        raise UsageError(
            f"{len(batches)} micro-batches make no whole number of steps of {gas} accumulation steps"
        )
    with _folder() as folder:
        section = Verify(folder=str(folder / "subject"), steps=len(batches) // gas)
        with _kept(engine, folder / "kept"), _recording(engine, section, Save()):
            for begin in range(0, len(batches), gas):
                _train(engine, batches[begin : begin + gas], loss)
        for name, perturb in (("reference", False), ("perturbed", True)):
            again = section.model_copy(
                update={
                    "folder": str(folder / name),
                    "source": section.folder,
                    "perturb": perturb,
                }
            )
            comm.barrier()  # who replays reads what all ranks have written
            replay = Replay(again)
            with (
                _kept(reference, folder / f"kept-{name}"),
                _recording(reference, again, replay) as recorder,
            ):
                recorder.started = True
                replay.run(recorder)
        comm.barrier()
        report = compare_folders(
            folder / "subject", folder / "reference", folder / "perturbed", limit
        )
        comm.barrier()  # before the folder goes
    return report


def _train(engine: Any, batches: Sequence[Any], loss: Callable[[Any, Any], Tensor] | None) -> None:
    """One step."""
    if not engine.runner.manual:
        engine.train_batch(iter(batches))
        return
    for batch in batches:
        if isinstance(batch, Mapping):
            output = engine(**batch)
        else:
            output = engine(*(batch if isinstance(batch, (tuple, list)) else (batch,)))
        value = loss(output, batch) if loss is not None else getattr(output, "loss", output)
        engine.backward(value)
        engine.step()


@contextmanager
def _recording(engine: Engine, section: Verify, driver: Driver) -> Iterator[Recorder]:
    """Inside, the engine is recorded."""
    own = engine.ctx.config.section(Verify)
    if own is None or own.role != "compare":
        raise UsageError(
            'compare needs engines whose config has "verify": {"role": "compare"}: it takes part in '
            "their steps"
        )
    recorder = begin_recording(engine.ctx, section, driver)
    engine.ctx.stash[RECORDER] = recorder
    try:
        yield recorder
    finally:
        recorder.close()


@contextmanager
def _kept(engine: Engine, folder: Path) -> Iterator[None]:
    """After it the engine has the weights and states of before. Collective."""
    engine.save_checkpoint(str(folder), tag="kept")
    engine.wait_for_checkpoint()
    yield
    engine.load_checkpoint(str(folder), tag="kept")


@contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder that all ranks have."""
    with tempfile.TemporaryDirectory(prefix="ds-verify-") as own:
        yield Path(comm.all_gather_json(own)[0])

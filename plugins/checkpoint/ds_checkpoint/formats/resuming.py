"""Loading a checkpoint of another program into a run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_run_state import RunState, SavedRun
from ds_run_state.slices import SLICES

from ds_checkpoint.folder.contents import shared_names
from ds_checkpoint.formats.finding import format_of, is_ours, recognise
from ds_checkpoint.formats.foreign import ForeignCheckpoint, ForeignStates, no_rank_values
from ds_checkpoint.storages.contract import Storage
from ds_checkpoint.storages.disk import DiskStorage
from ds_core.engine import LoadOptions
from ds_core.errors import CheckpointError


def find_foreign(run: RunState, storage: Storage, options: LoadOptions) -> list[str] | None:
    """The name of the format, and the path, of another program's checkpoint in `storage`.

    None: there is none, or one of ours; those of other programs are on a disk.
    """
    root = storage.root if isinstance(storage, DiskStorage) else None
    if root is None or not root.exists() or is_ours(root, options.tag):
        return None
    found = recognise(run.ctx.plugins, root, options.tag)
    return None if found is None else [found.name, str(found.path)]


def open_foreign(run: RunState, name: str, path: Path, *, verify: bool) -> ForeignStates:
    """The states as this rank reads them, under the names that its model has, until they are
    closed.

    verify: compare this rank's share of what is stored with its checksums.
    """
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(format_of(run.ctx.plugins, name).open(path))
        found = _in_first_names(run, found)
        source = ForeignStates(found, run.ctx.mesh, run.ctx.stash.get(SLICES))
        source.add_masters()
        if verify:
            source.verify(run.rank, run.ctx.world_size)
        source.stack = stack.pop_all()
    return source


def _in_first_names(run: RunState, found: ForeignCheckpoint) -> ForeignCheckpoint:
    """With tied weights under their first names; other programs store each name, or another one."""
    stored = {piece.state for piece in found.pieces}
    rename: dict[str, str] = {}
    extra: set[str] = set()
    for alias, first in shared_names(run.module).items():
        for kind in ("module", "master"):
            if f"{kind}/{alias}" not in stored:
                continue
            if f"{kind}/{first}" in stored or f"{kind}/{first}" in rename.values():
                extra.add(f"{kind}/{alias}")
            else:
                rename[f"{kind}/{alias}"] = f"{kind}/{first}"
    pieces = [
        dataclasses.replace(piece, state=rename.get(piece.state, piece.state))
        for piece in found.pieces
        if piece.state not in extra
    ]
    return dataclasses.replace(found, pieces=pieces)


def saved_run(
    run: RunState, source: ForeignStates, options: LoadOptions
) -> tuple[SavedRun, list[str]]:
    """(what `RunState.restore` takes, what of it is not taken over)."""
    found = source.found
    values = dict(found.run)
    mine = run.common()
    values["lr_scheduler"], note = _schedule(mine["lr_scheduler"], values["lr_scheduler"])
    if options.optimizer and not options.module_only:
        _order_groups(values, mine["optimizer_params"])
    saved = SavedRun(
        states=source,
        common=values,
        local=no_rank_values(),
        own=False,
        world_size=1,
        shared=found.shared,
    )
    return saved, [*found.missing, *note]


def _order_groups(values: dict[str, Any], mine: list[list[str]]) -> None:
    """Bring the optimizer's groups into the order of this run's, by the weights that they have.

    CheckpointError where no order fits.
    """
    groups = values["optimizer_groups"]
    params = values["optimizer_params"]
    if len(groups) < 2 or len(groups) != len(mine) or len(params) != len(groups) or not all(params):
        return
    owner = {name: number for number, names in enumerate(params) for name in names}
    found = [sorted({owner[name] for name in names if name in owner}) for names in mine]
    taken = [numbers[0] for numbers in found if numbers]
    if any(len(numbers) > 1 for numbers in found) or len(set(taken)) < len(taken):
        raise CheckpointError(
            "the groups of its optimizer have other weights than this run's; use the same groups, or "
            "load_optimizer_states=False"
        )
    # A group that has no weights on this rank gets one that no other group has.
    free = iter(n for n in range(len(groups)) if n not in taken)
    order = [numbers[0] if numbers else next(free) for numbers in found]
    values["optimizer_groups"] = [groups[n] for n in order]
    values["optimizer_params"] = [params[n] for n in order]


def _schedule(
    mine: Mapping[str, Any] | None, state: Mapping[str, Any] | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """The state of this run's schedule, made of another program's; None: it stays as it is."""
    if state is None or mine is None:
        return (None if state is None else dict(state)), []
    if set(mine) <= set(state):
        return dict(state), []
    # torch's schedules count in the same words, whatever they compute.
    if "last_epoch" in mine and "last_epoch" in state:
        counts = ("last_epoch", "_step_count", "_last_lr")
        return dict(mine) | {k: state[k] for k in counts if k in mine and k in state}, []
    keys = ", ".join(sorted(map(str, state))[:5])
    return None, [f"its schedule's state ({keys}) is of another kind; this run's starts again"]
